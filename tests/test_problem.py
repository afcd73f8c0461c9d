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
from networks import Net, Tied, mean_square, net_problem, train
from problems import DIM, Linear, quadratics
from stacked_runs import one_by_one, stacked
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    FlatModel,
    InProcessGrid,
    LocalTraining,
    Problem,
    client_id,
    solve,
)
from clients.stacking.stack import Stack
from fl_strategies import FedBC
from fl_strategies.core.log import log_once
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
        problem.model.vector.copy_(torch.tensor(w))
        loss, outputs = problem.gradient(problem.inputs, problem.targets)
        scale = np.abs(quadratic.gradient(w)).max()
        np.testing.assert_allclose(
            problem.model.gradient, quadratic.gradient(w), rtol=0, atol=1e-13 * scale
        )
        assert float(loss) == pytest.approx(quadratic.value(w), rel=1e-13)
        np.testing.assert_allclose(outputs, quadratic.X @ w, rtol=1e-12, atol=1e-12)
        assert problem.evaluate().loss == pytest.approx(quadratic.value(w), rel=1e-13)
        assert np.isnan(problem.evaluate().accuracy)


def test_pieces_of_a_large_batch_add_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    quadratic = quadratics(6)[5]
    problem = quadratic.problem()
    problem.model.vector.copy_(torch.arange(DIM) - 2.5)
    whole_loss, whole_outputs = problem.gradient(problem.inputs, problem.targets)
    whole = problem.model.gradient.clone()
    whole_evaluation = problem.evaluate().loss
    for chunk in (1, 2, 3, 5, 16):
        monkeypatch.setattr("clients.learning.passes.CHUNK", chunk)
        monkeypatch.setattr("clients.learning.problem.TESTED", chunk)
        loss, outputs = problem.gradient(problem.inputs, problem.targets)
        assert torch.allclose(problem.model.gradient, whole, rtol=1e-13, atol=1e-13)
        assert float(loss) == pytest.approx(float(whole_loss), rel=1e-13)
        assert torch.allclose(outputs, whole_outputs, rtol=1e-13)
        assert problem.evaluate().loss == pytest.approx(whole_evaluation, rel=1e-13)


class Heads(nn.Module):
    """Scores of classes, and a number: a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.4))
        self.classes, self.number = nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.classes(h), self.number(h)


WHOLE = {
    "class weights": nn.CrossEntropyLoss(torch.tensor([1.0, 9.0, 0.2], dtype=torch.float64)),
    "left out labels": nn.CrossEntropyLoss(ignore_index=2),
    "a piece of left out labels": lambda o, y: cross_entropy(o, torch.where(y == 0, -100, y)),
    "a sum": nn.CrossEntropyLoss(reduction="sum"),
    "a comparison": lambda o, y: torch.pdist(o).mean() + cross_entropy(o, y),
}
"""Losses that are not the mean of those of a batch's pieces."""


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("heads", [False, True])
def test_a_loss_on_a_large_batch_is_that_on_all_of_it(
    kind: str, heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clients.learning.passes.CHUNK", 4)
    monkeypatch.setattr("clients.learning.problem.TESTED", 4)
    torch.manual_seed(3)
    module: nn.Module = Heads().double() if heads else nn.Sequential(Heads().body, nn.Linear(5, 3))
    module = module.double()
    plain, y = WHOLE[kind], torch.tensor([0, 0, 0, 0, 1, 2, 1, 1, 1, 2, 0])
    loss: Any = plain
    if heads:
        loss = lambda o, y: plain(o[0], y) + o[1].square().mean()  # noqa: E731
    problem = Problem(FlatModel(module), loss, torch.randn(11, 3), y)
    twin = copy.deepcopy(module)
    for _ in range(2):
        torch.manual_seed(7)
        parts = [twin.train()(x) for x in problem.inputs.tensor_split(3)]  # the same masks
        outputs = tuple(map(torch.cat, zip(*parts, strict=True))) if heads else torch.cat(parts)
        expected = loss(outputs, y)
        slopes = torch.autograd.grad(expected, [*twin.parameters()])
        expected = expected.detach()
        torch.manual_seed(7)
        problem.model.module.train()
        value, _ = problem.gradient(problem.inputs, y)
        assert float(value) == pytest.approx(float(expected), rel=1e-12)
        for ours, theirs in zip(problem.model.views(problem.model.gradient), slopes, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        for ours, theirs in zip(module.buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours, theirs)
        with torch.no_grad():
            whole = float(loss(twin.eval()(problem.inputs), y))
        assert problem.evaluate().loss == pytest.approx(whole, rel=1e-12)


def test_equal_losses_of_pieces_do_not_show_that_a_loss_is_a_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a model that begins at 0, whose classes are equally likely."""
    monkeypatch.setattr("clients.learning.problem.TESTED", 2)
    model, x, y = FlatModel(nn.Linear(3, 3)), torch.eye(6, 3), torch.tensor([0, 0, 1, 1, 2, 2])
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 9.0, 0.2]))
    problem = Problem(model, loss, x, y)
    for scale in (0.0, 1.0):
        model.vector.copy_(scale * torch.linspace(-1, 2, 12))
        assert problem.evaluate().loss == pytest.approx(
            float(loss(model.module(x), y).detach()), rel=1e-6
        )


def test_no_piece_of_a_large_batch_is_a_single_example(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(9)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    problem = Problem(FlatModel(module), cross_entropy, torch.randn(7, 3), torch.arange(7) % 2)
    monkeypatch.setattr("clients.learning.passes.CHUNK", 3)  # 3 + 3 + 1 would fail in BatchNorm
    log_once.cache_clear()
    with caplog.at_level("INFO"):
        assert train(problem).isfinite().all()
    assert "a batch of more than 3 samples passes through the model in pieces, and" in caplog.text
    log_once.cache_clear()


def one_value_per_channel() -> Problem:
    """Return a problem of one image, of which BatchNorm gets one value per channel."""
    large = net_problem(1)
    return Problem(large.model, cross_entropy, large.inputs[:, :, :3, :3], large.targets)


def test_one_example_meets_batchnorm_in_its_running_statistics() -> None:
    problem = one_value_per_channel()
    problem.model.module.norm.running_mean.fill_(0.3)
    twin = copy.deepcopy(problem.model.module)
    twin.train()
    twin.norm.eval()
    twin.zero_grad(set_to_none=True)
    cross_entropy(twin(problem.inputs), problem.targets).backward()
    problem.model.module.train()
    problem.gradient(problem.inputs, problem.targets)
    assert problem.model.module.norm.training
    assert torch.equal(problem.model.module.norm.running_mean, twin.norm.running_mean)
    for ours, theirs in zip(problem.model.module.parameters(), twin.parameters(), strict=True):
        if theirs.requires_grad:
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-11, atol=1e-14)


def test_the_penalty_adds_its_value_and_gradient_once() -> None:
    quadratic = quadratics(1)[0]
    plain = quadratic.problem()
    bent = Problem(
        FlatModel(Linear()),
        plain.loss,
        plain.inputs,
        plain.targets,
        penalty=lambda w: 0.3 * (w**2 / (1 + w**2)).sum(),
    )
    w = np.array([1.5, -2.0, 0.25, 3.0, -0.5])
    for problem in (plain, bent):
        problem.model.vector.copy_(torch.tensor(w))
    loss, _ = bent.gradient(bent.inputs, bent.targets)
    penalty = 0.3 * (w**2 / (1 + w**2)).sum()
    slope = 0.3 * 2 * w / (1 + w**2) ** 2
    assert float(loss) == pytest.approx(quadratic.value(w) + penalty, rel=1e-13)
    np.testing.assert_allclose(bent.model.gradient, quadratic.gradient(w) + slope, rtol=1e-12)
    assert bent.evaluate().loss - plain.evaluate().loss == pytest.approx(penalty, rel=1e-11)


def idle_problem() -> Problem:
    torch.manual_seed(8)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    return Problem(FlatModel(Idle().double()), mean_square, x, y)


@pytest.mark.parametrize("make", [net_problem, idle_problem])
def test_to_descend_is_a_step_along_the_gradient_to_the_bit(make: Callable[[], Problem]) -> None:
    one, other = make(), make()
    one.model.module.train()
    other.model.module.train()
    loss, outputs = one.gradient(one.inputs, one.targets)
    one.model.trained.add_(one.model.trained_gradient, alpha=-0.3)
    other_loss, other_outputs = other.descend(other.inputs, other.targets, 0.3)
    assert torch.equal(other.model.trained, one.model.trained)
    assert torch.equal(other_loss, loss)
    assert torch.equal(other_outputs, outputs)


@pytest.mark.parametrize("pull", [0.0, 0.5])
def test_a_gradient_that_a_problem_was_given_is_asked_for_at_each_step(
    pull: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, asked = net_problem(), list[int]()
    own = problem.gradient
    monkeypatch.setattr(problem, "gradient", lambda x, y: asked.append(len(y)) or own(x, y))
    start = problem.model.vector.clone()
    training = LocalTraining(lr=0.1, steps=3)
    solve(problem, start, Subproblem(pull=pull, centre=start), training, stream(1, "local"))
    assert len(asked) == 3
    batch = problem.on(*problem.whole)
    solve(batch, start, Subproblem(pull=pull, centre=start), training, stream(1, "local"))
    assert len(asked) == 6


def test_evaluation_counts_right_answers_and_changes_nothing() -> None:
    problem = net_problem()
    model = problem.model
    before = [array.copy() for array in model.arrays(model.vector)]
    twin = copy.deepcopy(model.module).eval()
    right = sum(
        int(twin(problem.inputs[i : i + 1]).argmax()) == int(problem.targets[i])
        for i in range(len(problem))
    )
    result = problem.evaluate()
    assert result.accuracy == right / len(problem)
    each = cross_entropy(twin(problem.inputs), problem.targets, reduction="none").detach()
    assert result.loss == pytest.approx(float(each.mean()), rel=1e-12)
    for ours, theirs in zip(model.arrays(model.vector), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_full_gradient_leaves_statistics_and_generators_alone() -> None:
    torch.manual_seed(9)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    problem = Problem(FlatModel(module), cross_entropy, torch.randn(7, 3), torch.arange(7) % 2)
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
        problem = Problem(FlatModel(copy.deepcopy(module)), cross_entropy, inputs, y)
        assert problem.inputs.dtype == inputs.dtype
        assert all(x.dtype == inputs.dtype for x, _ in problem.batches(stream(1, "b"), 3))
        problem.gradient(problem.inputs, problem.targets)
        gradients.append((problem.model.gradient.clone(), problem.evaluate().loss))
    assert gradients[0][0].abs().max() > 0
    for gradient, loss in gradients[1:]:
        assert torch.equal(gradient, gradients[0][0])
        assert loss == gradients[0][1]


def test_numbers_of_inputs_and_targets_must_agree() -> None:
    model = FlatModel(Linear())
    x = torch.zeros(3, DIM)
    for inputs, targets, message in (
        (x, torch.zeros(2), "got 3 and 2"),
        (x[:0], torch.zeros(0), "got 0 and 0: of a client without test samples, test=None$"),
    ):
        with pytest.raises(ValueError, match=message):
            Problem(model, mean_square, inputs, targets)


def test_batches_part_the_examples_in_an_order_of_the_stream() -> None:
    problem = net_problem(7)
    drawn = [list(problem.batches(stream(s, "b"), 3)) for s in (1, 1, 2)]
    for batches in drawn:
        assert [len(y) for _, y in batches] == [3, 3, 1]
        pairs = {(float(x[i].sum()), int(y[i])) for x, y in batches for i in range(len(y))}
        together = zip(problem.inputs, problem.targets, strict=True)
        assert pairs == {(float(x.sum()), int(y)) for x, y in together}
        assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in batches)
    orders = [torch.cat([y for _, y in batches]).tolist() for batches in drawn]
    assert orders[0] == orders[1] != orders[2]
    ((x, y),) = problem.batches(stream(1, "b"), 0)
    assert torch.equal(x, problem.inputs)
    assert torch.equal(y, problem.targets)


def test_the_hessians_product_is_the_quadratics() -> None:
    (q,) = quadratics(1)
    v = np.arange(1.0, DIM + 1)
    product = q.problem().hessian_product(torch.tensor(q.X), torch.tensor(q.y), torch.tensor(v))
    np.testing.assert_allclose(product, q.A @ v, rtol=1e-12)


def test_the_penalty_adds_its_second_derivative_once() -> None:
    (q,) = quadratics(1)
    problem = Problem(
        FlatModel(Linear()), q.problem().loss, torch.tensor(q.X), torch.tensor(q.y),
        penalty=lambda w: (w**4).sum(),
    )  # fmt: skip
    w, v = np.linspace(-1, 2, DIM), np.arange(1.0, DIM + 1)
    problem.model.vector.copy_(torch.tensor(w))
    product = problem.hessian_product(problem.inputs, problem.targets, torch.tensor(v))
    np.testing.assert_allclose(product, q.A @ v + 12 * w**2 * v, rtol=1e-12)


def test_a_gradient_of_its_own_needs_a_hessian_product_of_its_own() -> None:
    class Doubled(Problem):
        def gradient(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
            found = super().gradient(inputs, targets)
            self.model.gradient.mul_(2.0)
            return found

    class Complete(Doubled):
        def hessian_product(self, inputs: Any, targets: Tensor, v: Tensor) -> Tensor:
            return 2.0 * super().hessian_product(inputs, targets, v)

    (q,) = quadratics(1)
    v = torch.ones(DIM, dtype=torch.float64)
    parts = FlatModel(Linear()), q.problem().loss, torch.tensor(q.X), torch.tensor(q.y)
    for problem in (one := Doubled(*parts)), one.on(*one.whole):
        with pytest.raises(ValueError, match="Doubled has a gradient of f of its own, and needs"):
            problem.hessian_product(*one.whole, v)
    for problem in (two := Complete(*parts)), two.on(*two.whole):
        product = problem.hessian_product(*two.whole, v)
        np.testing.assert_allclose(product, 2.0 * q.A @ v.numpy(), rtol=1e-12)


def test_a_gradient_that_is_the_same_everywhere_has_no_second_derivative() -> None:
    x, y = torch.ones(4, 3), torch.ones(4)
    problem = Problem(
        FlatModel(nn.Linear(3, 1)), lambda o, y: (y - o[:, 0]).mean(), x, y, penalty=torch.sum
    )
    assert not problem.hessian_product(x, y, torch.ones(4)).any()
    stack = Stack([problem, problem])
    samples = stack.batches(np.array([[0, 1], [2, 3]]), np.array([2, 2]))
    assert not stack.hessian_product(torch.ones(2, 4), torch.ones(2, 4), samples).any()


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
        model = FlatModel(Sentence(), dtype=torch.float64)
        problem = Problem(model, cross_entropy, words, torch.arange(3))
    else:
        model = FlatModel(Tied(), dtype=torch.float64)
        problem = Problem(model, mean_square, torch.randn(4, 3), torch.randn(4, 3))
    model, h = problem.model, 1e-5
    model.module.train()
    w, v = model.vector.clone(), torch.randn_like(model.vector)
    product = problem.hessian_product(problem.inputs, problem.targets, v)

    def gradient(at: Tensor) -> Tensor:
        model.vector.copy_(at)
        problem.gradient(problem.inputs, problem.targets)
        return model.gradient.clone()

    difference = (gradient(w + h * v) - gradient(w - h * v)) / (2 * h)
    torch.testing.assert_close(product, difference, rtol=1e-5, atol=1e-8)
    assert product.abs().max() > 1e-2


def test_pieces_of_a_large_batch_add_up_to_its_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    (q,) = quadratics(1)
    problem, v = q.problem(), torch.arange(1.0, DIM + 1, dtype=torch.float64)
    whole = problem.hessian_product(problem.inputs, problem.targets, v)
    monkeypatch.setattr("clients.learning.passes.CHUNK", 3)  # 7 examples: 3 + 2 + 2
    pieces = problem.hessian_product(problem.inputs, problem.targets, v)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=0.0)


def test_one_sample_has_a_hessian_with_batchnorm() -> None:
    problem = one_value_per_channel()
    problem.model.module.train()
    v = torch.ones_like(problem.model.vector)
    assert torch.isfinite(problem.hessian_product(problem.inputs, problem.targets, v)).all()
    module = problem.model.module
    assert all(part.training for part in module.modules())
    assert isinstance(module, Net)
    assert module.norm.num_batches_tracked == 0


def test_a_problem_on_a_batch_is_that_batchs_and_leaves_the_whole_as_it_was() -> None:
    (q,) = quadratics(1)
    problem = q.problem()
    part = problem.on(problem.inputs[2:5], problem.targets[2:5])
    w = np.linspace(-1, 2, DIM)
    problem.model.vector.copy_(torch.tensor(w))
    part.full_gradient()
    X, y = q.X[2:5], q.y[2:5]
    np.testing.assert_allclose(problem.model.gradient, X.T @ (X @ w - y) / 3, rtol=1e-12)
    problem.full_gradient()
    np.testing.assert_allclose(problem.model.gradient, q.gradient(w), rtol=1e-12)
    assert (len(part), len(problem)) == (3, 7)


# ---- a user's metrics ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 700])
def test_metrics_get_all_samples_at_once(count: int) -> None:
    model = FlatModel(nn.Linear(2, 3))
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
        ({"f1": "high"}, "the metric 'f1' must be a number, got 'high'"),
        ({"f1": torch.ones(2)}, "the metric 'f1' must be a number, got tensor"),
    ],
    ids=str,
)
def test_mistakes_in_metrics_are_told(returned: Any, told: str) -> None:
    model = FlatModel(nn.Linear(2, 3))
    x, y = torch.randn(4, 2), torch.arange(4) % 3
    problem = Problem(model, cross_entropy, x, y, metrics=lambda outputs, targets: returned)
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        problem.evaluate()


@pytest.mark.parametrize("federation", [one_by_one, stacked])
def test_a_clients_metrics_are_those_of_the_global_and_of_its_personalized_model(
    federation: Callable[..., InProcessGrid],
) -> None:
    model = FlatModel(nn.Linear(2, 3))
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
