"""Laws of the torch problem: losses, gradients, batches, second derivatives."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from networks import Tied, mean_square, net_problem, train
from problems import DIM, Linear, quadratics
from stacked_runs import one_by_one, stacked
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    Batch,
    Border,
    ContextStore,
    FedAvgClient,
    InProcessGrid,
    LocalTraining,
    Problem,
    client_id,
    solve,
)
from fl_strategies import FedBC
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem


class Idle(nn.Module):
    """A layer that the forward pass never reaches, among those it does."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 1)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)[:, 0]
        return out


def test_full_batch_gradient_and_loss_are_the_quadratics() -> None:
    for quadratic in quadratics(3):
        problem = quadratic.problem()
        w = np.random.default_rng(2).normal(size=DIM) * 4
        problem.model.write(torch.tensor(w))
        loss, outputs = problem.gradient(problem.data.whole)
        scale = np.abs(quadratic.gradient(w)).max()
        np.testing.assert_allclose(
            problem.model.gradient, quadratic.gradient(w), rtol=0, atol=1e-13 * scale
        )
        assert float(loss) == pytest.approx(quadratic.value(w), rel=1e-13)
        assert outputs is not None
        np.testing.assert_allclose(outputs, quadratic.X @ w, rtol=1e-12, atol=1e-12)
        assert problem.evaluate().loss == pytest.approx(quadratic.value(w), rel=1e-13)
        assert np.isnan(problem.evaluate().accuracy)


def test_the_penalty_adds_its_value_and_gradient_once() -> None:
    quadratic = quadratics(1)[0]
    plain = quadratic.problem()
    bent = Problem(
        Border(Linear()),
        plain.loss,
        plain.tensors.inputs,
        plain.tensors.targets,
        penalty=lambda w: 0.3 * (w**2 / (1 + w**2)).sum(),
    )
    w = np.array([1.5, -2.0, 0.25, 3.0, -0.5])
    for problem in (plain, bent):
        problem.model.write(torch.tensor(w))
    loss, _ = bent.gradient(bent.data.whole)
    penalty = 0.3 * (w**2 / (1 + w**2)).sum()
    slope = 0.3 * 2 * w / (1 + w**2) ** 2
    assert float(loss) == pytest.approx(quadratic.value(w) + penalty, rel=1e-13)
    np.testing.assert_allclose(bent.model.gradient, quadratic.gradient(w) + slope, rtol=1e-12)
    assert bent.evaluate().loss - plain.evaluate().loss == pytest.approx(penalty, rel=1e-11)


def idle_problem() -> Problem:
    torch.manual_seed(8)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    return Problem(Idle().double(), mean_square, x, y)


@pytest.mark.parametrize("pull", [0.0, 0.5])
def test_a_gradient_that_a_problem_was_given_is_asked_for_at_each_step(
    pull: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, asked = net_problem(), list[int]()
    own = problem.gradient

    def gradient(batch: Batch) -> tuple[Tensor, Tensor | None]:
        asked.append(batch.samples)
        return own(batch)

    monkeypatch.setattr(problem, "gradient", gradient)
    start = problem.model.vector.clone()
    training = LocalTraining(lr=0.1, steps=3)
    solve(problem, start, Subproblem(pull=pull, centre=start), training, stream(1, "local"))
    assert len(asked) == 3
    batch = problem.on(problem.data.whole)
    solve(batch, start, Subproblem(pull=pull, centre=start), training, stream(1, "local"))
    assert len(asked) == 6


def test_evaluation_counts_right_answers_and_changes_nothing() -> None:
    problem = net_problem()
    model = problem.model
    before = [array.copy() for array in model.arrays(model.vector)]
    twin = copy.deepcopy(model.module).eval()
    right = sum(
        int(twin(problem.tensors.inputs[i : i + 1]).argmax()) == int(problem.tensors.targets[i])
        for i in range(len(problem))
    )
    result = problem.evaluate()
    assert result.accuracy == right / len(problem)
    each = cross_entropy(
        twin(problem.tensors.inputs), problem.tensors.targets, reduction="none"
    ).detach()
    assert result.loss == pytest.approx(float(each.mean()), rel=1e-12)
    for ours, theirs in zip(model.arrays(model.vector), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_full_gradient_leaves_statistics_and_generators_alone() -> None:
    torch.manual_seed(9)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    problem = Problem(module, cross_entropy, torch.randn(7, 3), torch.arange(7) % 2)
    buffers = [buffer.clone() for buffer in module.buffers()]
    generator = torch.get_rng_state()
    problem.full_gradient()
    assert problem.model.gradient.abs().max() > 0
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, module.buffers(), buffers))


def test_a_parameter_without_gradient_keeps_its_dual_and_pull() -> None:
    problem = idle_problem()
    model = problem.model
    idle = slice(4, 10)
    slope, centre = torch.randn(10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    start = model.vector.clone()
    pull, lr, steps = 0.7, 0.2, 5
    model.module.zero_grad(set_to_none=True)
    got = solve(
        problem,
        start,
        Subproblem(slope, pull, centre),
        LocalTraining(solver="gd", lr=lr, steps=steps),
        stream(1, "t"),
    ).w
    # f is flat there: w - target shrinks by 1 - lr r in every step
    target = centre - slope / pull
    expected = target + (1 - lr * pull) ** steps * (start - target)
    assert torch.allclose(got[idle], expected[idle], rtol=1e-13, atol=1e-13)


def test_integers_are_stored_as_they_come_and_reach_the_module_as_int64() -> None:
    torch.manual_seed(10)
    module = nn.Sequential(nn.Embedding(200, 3), nn.Flatten(), nn.Linear(12, 4))
    wide, y = torch.randint(0, 200, (7, 4)), torch.arange(7) % 4
    gradients = []
    for inputs in (wide, wide.to(torch.uint8), wide.to(torch.int16)):
        problem = Problem(copy.deepcopy(module), cross_entropy, inputs, y)
        assert problem.tensors.inputs.dtype == inputs.dtype
        assert all(b.inputs.dtype == torch.int64 for b in problem.data.batches(stream(1, "b"), 3))
        problem.gradient(problem.data.whole)
        gradients.append((problem.model.gradient.clone(), problem.evaluate().loss))
    assert gradients[0][0].abs().max() > 0
    for gradient, loss in gradients[1:]:
        assert torch.equal(gradient, gradients[0][0])
        assert loss == gradients[0][1]


def test_batches_part_the_examples_in_an_order_of_the_stream() -> None:
    problem = net_problem(7)
    drawn = [list(problem.data.batches(stream(s, "b"), 3)) for s in (1, 1, 2)]
    for batches in drawn:
        assert [batch.samples for batch in batches] == [3, 3, 1]
        pairs = {(float(x[i].sum()), int(y[i])) for x, y, n in batches for i in range(n)}
        together = zip(problem.tensors.inputs, problem.tensors.targets, strict=True)
        assert pairs == {(float(x.sum()), int(y)) for x, y in together}
    orders = [torch.cat([batch.targets for batch in batches]).tolist() for batches in drawn]
    assert orders[0] == orders[1] != orders[2]
    (whole,) = problem.data.batches(stream(1, "b"), 0)
    assert torch.equal(whole.inputs, problem.tensors.inputs)
    assert torch.equal(whole.targets, problem.tensors.targets)


def test_the_hessians_product_is_the_quadratics() -> None:
    (q,) = quadratics(1)
    v = np.arange(1.0, DIM + 1)
    problem = q.problem()
    product = problem.hessian_product(problem.data.whole, torch.tensor(v))
    np.testing.assert_allclose(product, q.A @ v, rtol=1e-12)


def test_the_penalty_adds_its_second_derivative_once() -> None:
    (q,) = quadratics(1)
    problem = Problem(
        Border(Linear()), q.problem().loss, torch.tensor(q.X), torch.tensor(q.y),
        penalty=lambda w: (w**4).sum(),
    )  # fmt: skip
    w, v = np.linspace(-1, 2, DIM), np.arange(1.0, DIM + 1)
    problem.model.write(torch.tensor(w))
    product = problem.hessian_product(problem.data.whole, torch.tensor(v))
    np.testing.assert_allclose(product, q.A @ v + 12 * w**2 * v, rtol=1e-12)


def test_a_gradient_of_its_own_needs_a_hessian_product_of_its_own() -> None:
    class Doubled(Problem):
        def gradient(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
            found = super().gradient(batch)
            for parameter in self.model.trained:
                parameter.grad.mul_(2.0)
            return found

    class Complete(Doubled):
        def hessian_product(self, batch: Batch, v: Tensor) -> Tensor:
            return 2.0 * super().hessian_product(batch, v)

    (q,) = quadratics(1)
    v = torch.ones(DIM, dtype=torch.float64)
    parts = Linear(), q.problem().loss, torch.tensor(q.X), torch.tensor(q.y)
    batch = Problem(*parts).data.whole
    for problem in (one := Doubled(*parts)), one.on(batch):
        with pytest.raises(ValueError, match="Doubled has a gradient of f of its own, and needs"):
            problem.hessian_product(batch, v)
    for problem in (two := Complete(*parts)), two.on(batch):
        product = problem.hessian_product(batch, v)
        np.testing.assert_allclose(product, 2.0 * q.A @ v.numpy(), rtol=1e-12)


def test_a_gradient_that_is_the_same_everywhere_has_no_second_derivative() -> None:
    x, y = torch.ones(4, 3), torch.ones(4)
    problem = Problem(
        Border(nn.Linear(3, 1)), lambda o, y: (y - o[:, 0]).mean(), x, y, penalty=torch.sum
    )
    assert not problem.hessian_product(problem.data.whole, torch.ones(4)).any()


class Sentence(nn.Module):
    """Embedded words through an LSTM and through fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lstm(self.words(x))[0]
        out: Tensor = self.out(nn.functional.scaled_dot_product_attention(h, h, h)[:, -1])
        return out


@pytest.mark.parametrize("kind", ["convolution", "sentence", "tied"])
def test_the_hessians_product_is_the_derivative_of_the_gradient(kind: str) -> None:
    """By central differences of gradients, whose error falls with the step squared."""
    torch.manual_seed(2)
    if kind == "convolution":
        problem = net_problem()
    elif kind == "sentence":
        words = torch.arange(18).view(3, 6) % 5
        model = Border(Sentence().to(torch.float64))
        problem = Problem(model, cross_entropy, words, torch.arange(3))
    else:
        model = Border(Tied().to(torch.float64))
        problem = Problem(model, mean_square, torch.randn(4, 3), torch.randn(4, 3))
    model, h = problem.model, 1e-5
    model.module.train()
    w, v = model.vector.clone(), torch.randn_like(model.vector)
    product = problem.hessian_product(problem.data.whole, v)

    def gradient(at: Tensor) -> Tensor:
        model.write(at)
        problem.gradient(problem.data.whole)
        return model.gradient.clone()

    difference = (gradient(w + h * v) - gradient(w - h * v)) / (2 * h)
    torch.testing.assert_close(product, difference, rtol=1e-5, atol=1e-8)
    assert product.abs().max() > 1e-2


def test_a_problem_on_a_batch_is_that_batchs_and_leaves_the_whole_as_it_was() -> None:
    (q,) = quadratics(1)
    problem = q.problem()
    part = problem.on(problem.tensors.at(torch.arange(2, 5)))
    w = np.linspace(-1, 2, DIM)
    problem.model.write(torch.tensor(w))
    part.full_gradient()
    X, y = q.X[2:5], q.y[2:5]
    np.testing.assert_allclose(problem.model.gradient, X.T @ (X @ w - y) / 3, rtol=1e-12)
    problem.full_gradient()
    np.testing.assert_allclose(problem.model.gradient, q.gradient(w), rtol=1e-12)
    assert (len(part), len(problem)) == (3, 7)


# ---- the module is the user's --------------------------------------------------------------------


class Parts(nn.Module):
    """A body, dropout, batch normalisation and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = nn.Linear(3, 4), nn.Dropout(0.5)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.norm(self.body(x))))
        return out


PARTS = torch.linspace(-1, 2, 27, dtype=torch.float64).reshape(9, 3).sin(), torch.arange(9) % 2


def parts() -> Any:
    torch.manual_seed(5)
    return Parts().double()


@pytest.mark.parametrize("still", ["", "norm", "drop", "body"])
@pytest.mark.parametrize("whole", ["train", "eval"])
def test_parts_in_evaluation_mode_stay_so_and_a_module_that_is_as_a_whole_trains(
    whole: str, still: str
) -> None:
    module, twin = parts(), parts().train()
    module.train(whole == "train")
    for one in (module, twin) if whole == "train" else ():
        if still:
            one.get_submodule(still).eval()
    modes = [part.training for part in twin.modules()]
    torch.manual_seed(6)
    train(Problem(module, cross_entropy, *PARTS), solver="sgd", batch_size=0)
    torch.manual_seed(6)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(twin(PARTS[0]), PARTS[1]))
        optimizer.step()
    for ours, theirs in zip(module.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    found = Problem(module, cross_entropy, *PARTS).evaluate().loss
    assert [part.training for part in module.modules()] == modes
    assert found == pytest.approx(cross_entropy(twin.eval()(PARTS[0]), PARTS[1]).item(), rel=1e-12)


def test_one_value_per_channel_raises_pytorchs_own_error() -> None:
    problem = Problem(parts(), cross_entropy, PARTS[0][:1], PARTS[1][:1])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        train(problem)


@pytest.mark.parametrize("solver", ["sgd", "SGD", "adam", "AdamW", "lbfgs", "sps"])
@pytest.mark.parametrize("pull", [0.0, 0.5])
def test_parameters_that_are_frozen_later_do_not_move(solver: str, pull: float) -> None:
    """With weight decay, and with FedProx's pull to where they are."""
    module = parts()
    problem = Problem(module, cross_entropy, *PARTS)
    before = copy.deepcopy(module.state_dict())
    module.body.requires_grad_(False)
    decay = 0.0 if solver in ("lbfgs", "sps") else 0.3
    training = LocalTraining(solver=solver, lr=0.1, steps=3, batch_size=0, weight_decay=decay)
    start = problem.model.vector
    solve(problem, start, Subproblem(0.0, pull, start), training, stream(1, "t"))
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("body")


def test_a_module_that_is_replaced_later_is_told() -> None:
    module = parts()
    problem = Problem(module, cross_entropy, *PARTS)
    arrays = problem.model.arrays(problem.model.vector)
    module.head = nn.Linear(4, 2).double()
    client = FedAvgClient(problem, client_id=0)
    with pytest.raises(ValueError, match=r"\['head.weight', 'head.bias'\] of the module were repl"):
        client.fit(arrays, {"lr": 0.1})


def test_what_a_pass_replaces_is_what_trains_and_travels() -> None:
    """A buffer, and the data of a parameter."""

    class Replacing(nn.Linear):
        average: Tensor

        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("average", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.average = 0.5 * self.average + x.mean(0).detach()
                self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
            return super().forward(x + self.average)

    torch.manual_seed(5)
    module = Replacing().double()
    twin = copy.deepcopy(module)
    problem = Problem(module, cross_entropy, *PARTS)
    w = train(problem, steps=4)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(twin(PARTS[0]), PARTS[1]))
        optimizer.step()
    for ours, theirs in zip(problem.model.arrays(w), twin.state_dict().values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    average = module.average.clone()
    problem.full_gradient()
    assert torch.equal(module.average, average)


def test_parameters_of_a_loss_are_not_left_untrained() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(outputs * self.scale, targets)

    with pytest.raises(ValueError, match=r"no client would train, \['scale'\]"):
        Problem(parts(), Scaled(), *PARTS)
    Problem(parts(), Scaled().requires_grad_(False), *PARTS)


# ---- a user's metrics ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 700])
def test_metrics_get_all_samples_at_once(count: int) -> None:
    model = Border(nn.Linear(2, 3))
    x, y = torch.randn(count, 2), torch.arange(count) % 3
    found = []

    def measure(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        found.append((outputs, targets))
        return {"largest": outputs.max(), "share": 0.5}

    result = Problem(model, cross_entropy, x, y, metrics=measure).evaluate()
    ((outputs, targets),) = found
    torch.testing.assert_close(outputs, model.module(x).detach())
    assert torch.equal(targets, y)
    assert result.others == {"largest": float(outputs.max()), "share": 0.5}


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (0.5, "metrics must be a function that returns {name: number}, got 0.5"),
        ({"loss": 1.0}, "a metric must be a name other than loss and accuracy, got 'loss'"),
    ],
    ids=str,
)
def test_mistakes_in_metrics_are_told(returned: Any, told: str) -> None:
    model = Border(nn.Linear(2, 3))
    x, y = torch.randn(4, 2), torch.arange(4) % 3
    problem = Problem(model, cross_entropy, x, y, metrics=lambda outputs, targets: returned)
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        problem.evaluate()


@pytest.mark.parametrize("federation", [one_by_one, stacked])
def test_a_clients_metrics_are_those_of_the_global_and_of_its_personalized_model(
    federation: Callable[..., InProcessGrid],
) -> None:
    model = Border(nn.Linear(2, 3))
    initial = ArrayRecord(model.module.state_dict())

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        generator = torch.Generator().manual_seed(me)
        x, y = torch.randn(8, 2, generator=generator), torch.arange(8) % 3

        def miss(outputs: Tensor, targets: Tensor) -> dict[str, float]:
            wrong = float((outputs.argmax(1) != targets).double().mean())
            return {"miss": wrong, "even": wrong if me % 2 == 0 else math.nan}

        problem = Problem(model, cross_entropy, x, y, metrics=miss)
        store = ContextStore(context)
        return AnyAlgorithmClient(problem, client_id=me, test=problem, store=store)

    strategy = FedBC(local={"lr": 0.5, "steps": 5}, seed=1)
    found = strategy.start(federation(client_fn, 4), initial, 2).evaluate_metrics_clientapp[2]
    for name in ("eval", "own"):
        assert found[f"{name}-miss"] == pytest.approx(1.0 - found[f"{name}-accuracy"])  # type: ignore[operator]
        assert 0.0 <= found[f"{name}-even"] <= 1.0  # type: ignore[operator]
