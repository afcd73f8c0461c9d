"""Laws of the flat model: one vector for a whole model, and nothing lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from networks import Net, Tied, images, mean_square, net_problem, train
from problems import DIM, Linear
from torch import nn
from torch.nn.functional import cross_entropy

from clients import FlatModel, Problem


def assert_views(model: FlatModel) -> None:
    """Parameters are pieces of the vector, in their order, and gradients of the gradient."""
    for whole, of in ((model.vector, lambda p: p.data), (model.gradient, lambda p: p.grad)):
        start = whole.data_ptr()
        for parameter in (p for p in model.module.parameters() if p.requires_grad):
            assert of(parameter).data_ptr() == start
            start += parameter.numel() * parameter.element_size()
        assert start == whole.data_ptr() + whole.numel() * whole.element_size()


def test_views_stay_views_through_training() -> None:
    problem = net_problem()
    for solver in ("gd", "sgd", "adam", "lbfgs"):
        train(problem, solver=solver, batch_size=4)
        assert_views(problem.model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_a_flat_model_of_its_own(copied: Callable[[Problem], Problem]) -> None:
    problem = net_problem()
    twin = copied(problem)
    assert_views(twin.model)
    before = twin.model.vector.clone()
    np.testing.assert_array_equal(train(problem), train(copied(twin)))
    assert torch.equal(twin.model.vector, before)
    assert twin.model.signature == problem.model.signature


def test_a_solver_does_not_mind_what_became_of_the_gradients_elsewhere() -> None:
    problem, other = net_problem(), net_problem()
    start = problem.model.vector.clone()
    problem.model.module.zero_grad(set_to_none=True)
    problem.model.gradient.fill_(7.0)
    np.testing.assert_array_equal(train(problem), train(other))
    assert not torch.equal(problem.model.vector, start)
    assert_views(problem.model)


def test_the_gradient_is_autograds_on_an_untouched_copy() -> None:
    torch.manual_seed(4)
    twin = Net().double()
    problem = net_problem()
    x, y = images()
    loss = cross_entropy(twin(x), y)
    loss.backward()
    problem.model.module.train()
    value, _ = problem.gradient(problem.inputs, problem.targets)
    assert value.item() == pytest.approx(loss.item(), rel=1e-13)
    for (name, ours), theirs in zip(
        problem.model.module.named_parameters(), twin.parameters(), strict=True
    ):
        if theirs.requires_grad:
            # rounding only: summation order differs between memory layouts
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-11, atol=1e-14), name


def test_filters_lie_channels_last_in_the_vector_and_travel_in_their_own_shape() -> None:
    problem = net_problem()
    model = problem.model
    filters = model.module.conv.weight.detach()
    assert torch.equal(model.vector[: filters.numel()], filters.permute(0, 2, 3, 1).reshape(-1))
    array = model.arrays(model.vector)[model.names.index("conv.weight")]
    assert array.shape == (3, 2, 3, 3)
    np.testing.assert_array_equal(array, filters.numpy())
    assert problem.inputs.is_contiguous(memory_format=torch.channels_last)


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
    model.vector.add_(5.0)
    for ours, theirs in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert torch.equal(vector, present + 2.0)


def test_running_statistics_are_buffers_and_frozen_parameters_stay_at_home() -> None:
    model = net_problem().model
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
    model = FlatModel(module)
    assert (model.buffers, model.at_home) == ((), ["count"])
    assert len(model.vector) == DIM
    module.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"'wave' has type torch\.complex128, not a float"):
        FlatModel(module)


def test_a_model_that_cannot_be_one_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        FlatModel(nn.Linear(2, 2).requires_grad_(False))
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    with pytest.raises(ValueError, match=r"\['torch\.float32', 'torch\.float64'\]"):
        FlatModel(mixed)
    assert FlatModel(mixed, dtype=torch.float64).vector.dtype == torch.float64


def test_tied_parameters_count_once_and_stay_tied() -> None:
    torch.manual_seed(6)
    twin = Tied().double()
    model = FlatModel(copy.deepcopy(twin))
    assert len(model.vector) == 9 + 3
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    got = train(Problem(model, mean_square, x, y), steps=4)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        mean_square(twin(x), y).backward()
        optimizer.step()
    for name, ours, theirs in zip(
        model.names, model.arrays(got), twin.state_dict().values(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=name)
    assert model.module.second.weight is model.module.first.weight


@pytest.mark.parametrize("change", ["fewer", "more", "shape"])
def test_arrays_that_do_not_fit_are_refused_with_the_numbers(change: str) -> None:
    model = FlatModel(Linear())
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
        FlatModel(torch.compile(module))
    module.compile(backend="eager")
    assert FlatModel(module).names == ["weight", "bias"]
