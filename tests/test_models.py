"""Laws of the models: sizes of the papers, the papers' functions, one seed one model."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from simulations.models import MODELS, build

DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def images(shape: tuple[int, ...], n: int = 5) -> Tensor:
    return torch.randn((n, *shape), generator=torch.Generator().manual_seed(3))


def twin(model: nn.Module, x: Tensor, *, relu: bool) -> Tensor:
    """Return a CNN's logits in the papers' order: convolution, ReLU, pooling."""
    k1, b1, k2, b2, w1, c1, w2, c2 = model.parameters()
    for kernel, bias in ((k1, b1), (k2, b2)):
        x = F.conv2d(x, kernel, bias, padding=2)
        x = F.max_pool2d(x.relu() if relu else x, 2)
    return F.linear(F.linear(x.flatten(1), w1, c1).relu(), w2, c2)


@pytest.mark.parametrize("variant", ["", "-linear", "-authors"])
def test_the_cnns_have_as_many_parameters_as_fedadmm_says(variant: str) -> None:
    assert size(build(f"cnn1{variant}", MNIST, 10, seed=1)) == 1_663_370
    assert size(build(f"cnn2{variant}", CIFAR, 10, seed=1)) == 1_105_098


def test_the_dense_models_have_a_weight_per_pair_and_a_bias_per_unit() -> None:
    assert size(build("logistic", (60,), 10, seed=1)) == 60 * 10 + 10
    assert size(build("mlp", MNIST, 10, seed=1)) == 784 * 128 + 128 + 128 * 10 + 10
    sizes = (784, 128, 64, 10)
    expected = sum(a * b + b for a, b in pairwise(sizes))
    assert size(build("mlp3", MNIST, 10, seed=1)) == expected


def test_resnet20_has_nineteen_convolutions_one_dense_layer_and_two_halvings() -> None:
    model = build("resnet20", CIFAR, 10, seed=1)
    widths = [3] + [16] * 7 + [32] * 6 + [64] * 6
    convolutions = sum(9 * a * b + 2 * b for a, b in pairwise(widths))  # and two numbers a norm
    assert size(model) == convolutions + 64 * 10 + 10 == 269_722
    shapes = []
    for block in list(model)[3:12]:
        block.register_forward_hook(lambda m, x, y: shapes.append(tuple(y.shape[1:])))
    model(images(CIFAR))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_a_block_of_resnet20_without_its_convolutions_is_its_shortcut() -> None:
    block = list(build("resnet20", CIFAR, 10, seed=1))[6]  # 16 filters to 32
    nn.init.zeros_(block.norm2.weight)
    x = torch.rand((2, 16, 8, 8), generator=torch.Generator().manual_seed(3))
    y = block(x)
    torch.testing.assert_close(y[:, 8:24], x[:, :, ::2, ::2])
    assert y.shape == (2, 32, 4, 4)
    assert y[:, :8].abs().max() == y[:, 24:].abs().max() == 0


@pytest.mark.parametrize("shape", [DIGITS, (1, 9, 13), MNIST, CIFAR])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_maps_images_to_one_number_per_class(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7, seed=1)
    out = model(images(shape))
    out.sum().backward()
    assert out.shape == (5, 7)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("name", "relu"), [("cnn1", True), ("cnn2", True), ("cnn1-linear", False)])
def test_pooling_before_the_relu_is_the_papers_function(name: str, relu: bool) -> None:
    model, x = build(name, DIGITS, 10, seed=1), images(DIGITS)
    torch.testing.assert_close(model(x), twin(model, x, relu=relu))


@pytest.mark.parametrize(
    ("authors", "plain"),
    [
        ("cnn1-authors", "cnn1-linear"),
        ("cnn2-authors", "cnn2-linear"),
        ("logistic-authors", "logistic"),
    ],
)
def test_the_authors_models_end_in_a_softmax(authors: str, plain: str) -> None:
    x = images(DIGITS)
    logits = build(plain, DIGITS, 10, seed=1)(x)
    torch.testing.assert_close(build(authors, DIGITS, 10, seed=1)(x), logits.softmax(1))


def test_cross_entropy_of_a_softmax_has_a_floor() -> None:
    certain = torch.eye(10)[:1]  # the best that a softmax can say
    floor = F.cross_entropy(certain, torch.tensor([0])).item()
    assert floor == pytest.approx(math.log(math.e + 9) - 1, rel=1e-6)


def test_dropout_acts_in_training_alone() -> None:
    model, x = build("mlp-authors", DIGITS, 10, seed=1), images(DIGITS)
    with torch.random.fork_rng(devices=[]):
        assert not torch.equal(model(x), model(x))
    torch.testing.assert_close(model.eval()(x), build("mlp", DIGITS, 10, seed=1)(x))


def test_the_small_model_has_running_statistics() -> None:
    names = dict(build("cnn-bn", DIGITS, 10, seed=1).named_buffers())
    assert sorted(name.split(".")[-1] for name in names) == [
        "num_batches_tracked",
        "running_mean",
        "running_var",
    ]


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_model_and_leaves_the_global_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (build(name, DIGITS, 10, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_unknown_models_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'resnet', known are logistic, .*cnn-bn"):
        build("resnet", DIGITS, 10, seed=1)


@pytest.mark.parametrize("shape", [(60,), (8, 8), (1, 3, 8)])
def test_convolutions_refuse_what_is_no_image(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape must be"):
        build("cnn1", shape, 10, seed=1)
