"""Laws of a Border: one vector for a whole module, which stays as it is, and nothing lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net, Tied, images, mean_square, net_problem, train
from problems import DIM, Linear
from torch import nn
from torch.nn.functional import cross_entropy

from clients import Border, LocalTraining, Problem, solve
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem


def test_the_vector_is_the_trained_parameters_in_their_order() -> None:
    module: Any = Net().to(torch.float64)
    places = [tensor.data_ptr() for tensor in module.state_dict().values()]
    model = Border(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    expected = nn.utils.parameters_to_vector(trained)
    assert torch.equal(model.vector, expected)
    assert model.size == len(expected)
    with torch.no_grad():
        model.vector.add_(1.0)  # a copy
    assert torch.equal(model.vector, expected)
    model.write(2.0 * expected.detach())
    for piece, parameter in zip(model.views(model.vector), trained, strict=True):
        assert torch.equal(piece, parameter)
    torch.testing.assert_close(model.vector, 2.0 * expected.detach(), rtol=0, atol=0)
    assert [tensor.data_ptr() for tensor in module.state_dict().values()] == places
    assert "forward" not in vars(module)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_a_problem_of_its_own(copied: Callable[[Problem], Problem]) -> None:
    problem = net_problem()
    twin = copied(problem)
    before = twin.model.vector
    np.testing.assert_array_equal(train(problem), train(copied(twin)))
    assert torch.equal(twin.model.vector, before)
    assert twin.model.signature == problem.model.signature


def test_what_became_of_gradients_elsewhere_does_not_matter() -> None:
    problem, other = net_problem(), net_problem()
    for parameter in problem.model.trained:
        parameter.grad = torch.full_like(parameter, 7.0)
    np.testing.assert_array_equal(train(problem), train(other))


def test_the_gradient_is_autograds_on_an_untouched_copy() -> None:
    torch.manual_seed(4)
    twin = Net().double()
    problem = net_problem()
    loss = cross_entropy(twin(images()[0]), images()[1])
    torch.autograd.backward(loss)
    value, _ = problem.gradient(problem.data.whole)
    assert value.item() == pytest.approx(loss.item(), rel=1e-13)
    slopes = [p.grad.reshape(-1) for p in twin.parameters() if p.grad is not None]
    torch.testing.assert_close(problem.model.gradient, torch.cat(slopes), rtol=1e-12, atol=1e-14)


def test_what_was_loaded_comes_back() -> None:
    model = net_problem().model
    rng = np.random.default_rng(5)
    sent = [
        np.asarray(rng.normal(size=model.layout.shapes[name]) * 9, model.layout.dtypes[name])
        for name in model.names
    ]
    vector = model.load(sent)
    for name, ours, theirs in zip(model.names, model.arrays(vector), sent, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
        assert ours.dtype == theirs.dtype
    trained = dict(zip(model.names, sent, strict=True))
    for name, parameter in model.module.named_parameters():
        if name in trained:
            np.testing.assert_array_equal(parameter.detach(), trained[name])
    assert trained.keys() ^ dict(model.module.named_parameters()).keys() == {
        "scale",
        *model.buffers,
    }


def test_loading_and_reading_touch_nothing_else() -> None:
    model = net_problem().model
    present = model.vector.clone()
    arrays = model.arrays(present + 1.0)
    assert torch.equal(model.vector, present)
    for array in arrays:
        array.flags.writeable = False  # as bytes from the wire
    before = copy.deepcopy(arrays)
    vector = model.load(arrays)
    vector.add_(1.0)  # a new vector, not the model's
    model.write(model.vector + 5.0)
    for ours, theirs in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert torch.equal(vector, present + 2.0)


def test_running_statistics_are_buffers_and_frozen_parameters_stay_at_home() -> None:
    model: Any = net_problem().model
    statistics = [f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert model.buffers == tuple(statistics)
    assert model.at_home == [*model.layout.frozen] == ["scale"]
    trained = [p for p in model.module.parameters() if p.requires_grad]
    assert len(model.vector) == sum(p.numel() for p in trained)
    assert set(model.layout.trainable) == set(model.names) - set(model.buffers)
    train(net_problem())
    assert torch.equal(model.module.scale, Net().scale.double())


def test_an_integer_parameter_is_frozen_and_a_complex_one_refused() -> None:
    module = Linear()
    module.count = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
    model = Border(module)
    assert (model.buffers, model.at_home) == ((), ["count"])
    assert len(model.vector) == DIM
    module.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"'wave' has type torch\.complex128, not a float"):
        Border(module)


def test_a_model_without_a_trainable_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        Border(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("pull", [0.0, 0.5])
def test_parameters_of_several_types_keep_theirs(pull: float) -> None:
    """The vector has the widest, what travels each its own."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[1].double()
    module[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    twin, (x, y) = copy.deepcopy(module), (torch.ones(4, 3), torch.arange(4) % 2)
    model = Border(module)
    assert model.vector.dtype == model.dtype == torch.float64
    assert [array.dtype for array in model.arrays(model.vector)] == [*["f4"] * 2, *["f8"] * 2]

    class Single(Problem):
        def forward(self, inputs: Any, targets: Any) -> Any:
            return super().forward(inputs.float(), targets)

    centre = model.vector + 1.0
    w = solve(
        Single(model, cross_entropy, x, y),
        model.vector,
        Subproblem(0.0, pull, centre),
        LocalTraining(solver="gd", steps=2),
        stream(1, "t"),
    ).w
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        flat = torch.cat([p.double().reshape(-1) for p in twin.parameters()])
        bent = cross_entropy(twin(x), y) + pull / 2 * (flat - centre).square().sum()
        torch.autograd.backward(bent)
        optimizer.step()
    for ours, theirs in zip(model.arrays(w), twin.state_dict().values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_tied_parameters_count_once_and_stay_tied() -> None:
    torch.manual_seed(6)
    twin = Tied().double()
    model = Border(copy.deepcopy(twin))
    assert len(model.vector) == 9 + 3
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    got = train(Problem(model, mean_square, x, y), steps=4)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(mean_square(twin(x), y))
        optimizer.step()
    for name, ours, theirs in zip(
        model.names, model.arrays(got), twin.state_dict().values(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=name)
    assert isinstance(model.module, Tied)
    assert model.module.second.weight is model.module.first.weight


@pytest.mark.parametrize("change", ["fewer", "more", "shape"])
def test_arrays_that_do_not_fit_are_refused_with_the_numbers(change: str) -> None:
    model = Border(Linear())
    arrays = model.arrays(model.vector)
    before = model.vector.clone()
    if change == "shape":
        wrong, message = [arrays[0] + 1.0, np.zeros(3)], r"'tail' .* \(1,\), \(3,\) was received"
    else:
        wrong = arrays[:1] if change == "fewer" else [*arrays, arrays[0]]
        message = f"has 2 arrays, {len(wrong)} were received"
    with pytest.raises(ValueError, match=message):
        model.load(wrong)
    assert torch.equal(model.vector, before)


@pytest.mark.slow
def test_a_compiled_modules_wrapper_is_refused_and_the_module_trains() -> None:
    """The wrapper's arrays have other names, by which no plain module reads the result."""
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"module\.compile\(\) compiles it in place$"):
        Border(torch.compile(module))  # type: ignore[arg-type]
    module.compile(backend="eager")
    assert Border(module).names == ["weight", "bias"]
