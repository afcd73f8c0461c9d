"""Laws of the models: sizes of the papers, the papers' functions, one seed one model."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simulations.models import MODELS, build

DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
SMALLEST = {"cnn-6-16": 16, "cnn-10-20": 16}


def size(name: str, shape: tuple[int, ...], classes: int) -> int:
    """Return a model's number of parameters, for which none needs to be drawn."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(name, shape, classes, seed=1).parameters())


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
    assert size(f"cnn1{variant}", MNIST, 10) == 1_663_370
    assert size(f"cnn2{variant}", CIFAR, 10) == 1_105_098


def test_lenets_and_leafs_cnn_have_a_weight_per_connection() -> None:
    convolutions = 25 * 3 * 6 + 6 + 25 * 6 * 16 + 16
    dense = sum(a * b + b for a, b in pairwise((16 * 5 * 5, 120, 84, 10)))
    assert size("cnn-6-16", CIFAR, 10) == convolutions + dense == 62_006
    convolutions = 25 * 32 + 32 + 25 * 32 * 64 + 64
    dense = sum(a * b + b for a, b in pairwise((64 * 7 * 7, 2048, 62)))
    assert size("cnn-leaf", MNIST, 62) == convolutions + dense == 6_603_710


@pytest.mark.parametrize(
    ("name", "classes", "total"),
    [
        ("resnet18", 10, 11_173_962),
        ("resnet50", 100, 23_705_252),
    ],
)
def test_the_large_resnets_are_he_et_als_with_a_small_first_filter(
    name: str, classes: int, total: int
) -> None:
    count = 9 * 3 * 64 + 2 * 64  # no bias; two numbers a norm
    before = 64
    for width, basic, deep in ((64, 2, 3), (128, 2, 4), (256, 2, 6), (512, 2, 3)):
        for _ in range(basic if name == "resnet18" else deep):
            after = width if name == "resnet18" else 4 * width
            inside = (
                9 * before * width + 9 * width * width + 4 * width
                if name == "resnet18"
                else before * width + 9 * width * width + 4 * width * width + 4 * width + 2 * after
            )
            count += inside + (before * after + 2 * after if before != after else 0)
            before = after
    assert size(name, CIFAR, classes) == count + before * classes + classes == total


def test_a_large_resnet_halves_a_small_image_three_times_only() -> None:
    model, shapes = build("resnet18", CIFAR, 10, seed=1), []
    for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
        layer.register_forward_hook(lambda m, x, y: shapes.append(tuple(y.shape[1:])))
    model(images(CIFAR, n=1))
    assert shapes == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
    for filters in (model.conv1.weight, model.layer1[0].conv1.weight):  # He's: 2/(9 * 64)
        assert filters.var().item() == pytest.approx(2 / (9 * 64), rel=0.15)  # 3.4 % a sigma


def test_the_dense_models_have_a_weight_per_pair_and_a_bias_per_unit() -> None:
    assert size("logistic", (60,), 10) == 60 * 10 + 10
    assert size("mlp", MNIST, 10) == 784 * 128 + 128 + 128 * 10 + 10
    sizes = (784, 128, 64, 10)
    expected = sum(a * b + b for a, b in pairwise(sizes))
    assert size("mlp3", MNIST, 10) == expected


def test_delta_sgds_cnn_has_two_convolutions_without_padding_and_two_dense_layers() -> None:
    convolutions = (1 * 25 + 1) * 10 + (10 * 25 + 1) * 20
    pixels = ((28 - 4) // 2 - 4) // 2
    total = size("cnn-10-20", MNIST, 10)
    assert total == convolutions + (20 * pixels**2 + 1) * 50 + 51 * 10 == 21_840


def test_delta_sgds_cnn_drops_whole_filters_and_single_units_in_training_alone() -> None:
    model, x = build("cnn-10-20", MNIST, 10, seed=1), images(MNIST, n=40)
    k1, b1, k2, b2, w1, c1, w2, c2 = model.parameters()
    first = F.max_pool2d(F.conv2d(x, k1, b1).relu(), 2)
    second = F.max_pool2d(F.conv2d(first, k2, b2).relu(), 2)
    expected = F.linear(F.linear(second.flatten(1), w1, c1).relu(), w2, c2)
    torch.testing.assert_close(model.eval()(x), expected)
    dropped: dict[str, Tensor] = {}
    for layer in model:
        if isinstance(layer, nn.Dropout | nn.Dropout2d):
            name = type(layer).__name__
            layer.register_forward_hook(lambda m, x, y, name=name: dropped.update({name: y}))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model.train()(x)
    filters = (dropped["Dropout2d"] == 0).flatten(2).double().mean(2)
    assert set(filters.unique().tolist()) == {0.0, 1.0}
    assert filters.mean() == pytest.approx(0.5, abs=0.1)  # of 800: 2 % a sigma
    units = (dropped["Dropout"] == 0).double().mean()  # half of those that the ReLU leaves
    assert 0.5 < units < 0.95


def test_resnet20_has_nineteen_convolutions_one_dense_layer_and_two_halvings() -> None:
    model = build("resnet20", CIFAR, 10, seed=1)
    widths = [3] + [16] * 7 + [32] * 6 + [64] * 6
    convolutions = sum(9 * a * b + 2 * b for a, b in pairwise(widths))  # and two numbers a norm
    assert size("resnet20", CIFAR, 10) == convolutions + 64 * 10 + 10 == 269_722
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


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name in MODELS
        for shape in (DIGITS, (1, 9, 13), (1, 17, 22), MNIST, CIFAR)
        if min(shape[1:]) >= SMALLEST.get(name, 4)
    ],
)
@pytest.mark.sampled(*(name for name in MODELS if not name.startswith("resnet")))
def test_every_model_maps_images_to_one_number_per_class(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7, seed=1)
    out = model(images(shape))
    out.sum().backward()
    assert out.shape == (5, 7)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "relu"),
    [("cnn1", True), ("cnn2", True), ("cnn-leaf", True), ("cnn1-linear", False)],
)
def test_pooling_before_the_relu_is_the_papers_function(name: str, relu: bool) -> None:
    model, x = build(name, DIGITS, 10, seed=1), images(DIGITS)
    torch.testing.assert_close(model(x), twin(model, x, relu=relu))


def test_the_small_cnn_is_the_papers_convolution_pooling_and_relu() -> None:
    model, x = build("cnn-6-16", CIFAR, 10, seed=1), images(CIFAR)
    k1, b1, k2, b2, *dense = model.parameters()
    for kernel, bias in ((k1, b1), (k2, b2)):
        x = F.max_pool2d(F.conv2d(x, kernel, bias).relu(), 2)
    x = F.linear(x.flatten(1), dense[0], dense[1]).relu()
    x = F.linear(F.linear(x, dense[2], dense[3]).relu(), dense[4], dense[5])
    torch.testing.assert_close(model(images(CIFAR)), x)


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


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"resnet50"}))  # resnet18's, deeper
def test_the_seed_decides_the_model_and_leaves_the_global_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (build(name, MNIST, 10, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_unknown_models_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown model 'vgg'; known: logistic, .*cnn-bn.*"
        r"resnet20, resnet18, resnet50, cnn-6-16, cnn-leaf, lstm, distilbert$",
    ):
        build("vgg", DIGITS, 10, seed=1)


def test_models_refuse_options_that_they_do_not_have() -> None:
    with pytest.raises(ValueError, match=r"model 'cnn1' has no option 'hidden'; it has none"):
        build("cnn1", MNIST, 10, seed=1, hidden=3)
    with pytest.raises(ValueError, match=r"no option 'hub'; it has \['source', 'pretrained'\]"):
        build("distilbert", (12,), 10, seed=1, vocabulary=9, hub="x")
    for options, message in (
        ({"source": 3}, "source must be a text, got 3"),
        ({"pretrained": "x"}, "pretrained must be bool, got 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            build("distilbert", (12,), 10, seed=1, vocabulary=9, **options)


def test_models_of_text_and_of_numbers_refuse_each_others_inputs() -> None:
    with pytest.raises(
        ValueError, match="'mlp' takes numbers; of text models are lstm, distilbert"
    ):
        build("mlp", (80,), 80, seed=1, vocabulary=80)
    with pytest.raises(ValueError, match="'lstm' takes integers below a vocabulary; "):
        build("lstm", (80,), 80, seed=1)
    with pytest.raises(ValueError, match=r"shape must be \(length,\) of a text, got \(8, 8\)"):
        build("lstm", (8, 8), 80, seed=1, vocabulary=80)


@pytest.mark.parametrize("shape", [(60,), (8, 8), (1, 3, 8)])
def test_convolutions_refuse_what_is_no_image(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape must be .*height >= 4"):
        build("cnn1", shape, 10, seed=1)


@pytest.mark.parametrize("name", SMALLEST)
def test_convolutions_without_padding_need_sixteen_pixels(name: str) -> None:
    x = images((3, 16, 16))
    assert build(name, x.shape[1:], 10, seed=1)(x).shape == (5, 10)
    with pytest.raises(ValueError, match=r"height >= 16, width >= 16\), got \(3, 16, 15\)"):
        build(name, (3, 16, 15), 10, seed=1)
