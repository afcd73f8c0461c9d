"""Per-FedAvg: the meta-gradient, the first-order form's bias, the rule, the model after a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from federations import lose
from laws import RATE, START, local, quiet, train
from problems import (
    DIM,
    NODES,
    Formula,
    Quadratic,
    grid,
    oracle_of,
    quadratics,
    to_record,
    to_vector,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import Border, LocalTraining, Problem
from fl_strategies import FedAvg, PerFedAvg, PerFedBC, PFedMe, per_fedavg
from fl_strategies.core.randomness import stream

A_RATE = 0.07


strategy = partial(quiet, PerFedAvg, inner_rate=A_RATE)


def meta_curvature(q: Quadratic, order: int = 2) -> np.ndarray:
    """Return C of grad F = C (w - b) at order 2; the direction of the first-order form at 1."""
    return q.A @ np.linalg.matrix_power(np.eye(DIM) - A_RATE * q.A, order)


def step(q: Quadratic, w: np.ndarray, *, exact: bool, rate: float = 1.0) -> np.ndarray:
    form = "exact" if exact else "first-order"
    made = per_fedavg.client_rule(
        w, replace(q.oracle(), lr=rate, steps=1), inner_rate=A_RATE, meta_gradient=form
    )
    moved: np.ndarray = made.upload
    return moved


def test_an_exact_step_is_gradient_descent_on_the_loss_after_adaptation() -> None:
    """F(w) = f(w - a A (w - b)), differentiated by torch; and (I - a A) A (w - a A (w - b) - b)."""
    (q,) = quadratics(1)
    w = torch.tensor(START, requires_grad=True)
    A, b = torch.tensor(q.A), torch.tensor(q.b)
    u = w - A_RATE * A @ (w - b)
    (0.5 * (u - b) @ A @ (u - b)).backward()
    assert w.grad is not None
    moved = START - step(q, START, exact=True, rate=0.11)
    np.testing.assert_allclose(moved, 0.11 * w.grad.numpy(), rtol=1e-10)
    adapted = START - A_RATE * q.gradient(START)
    closed = (np.eye(DIM) - A_RATE * q.A) @ q.A @ (adapted - q.b)
    np.testing.assert_allclose(moved, 0.11 * closed, rtol=1e-10)


def test_the_first_order_direction_lacks_the_hessian_times_itself() -> None:
    (q,) = quadratics(1)
    exact, first = (START - step(q, START, exact=exact) for exact in (True, False))
    np.testing.assert_allclose(first, meta_curvature(q, 1) @ (START - q.b), rtol=1e-10)
    np.testing.assert_allclose(exact - first, -A_RATE * q.A @ first, rtol=1e-9)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "first-order"])
def test_the_meta_optimum_is_a_fixed_point_of_exact_steps_and_of_no_others(exact: bool) -> None:
    """With K = 1. The first-order form moves to where its own directions cancel."""
    problems = quadratics(3)

    def solved(order: int) -> np.ndarray:
        C = [meta_curvature(q, order) for q in problems]
        return np.linalg.solve(sum(C), sum(c @ q.b for c, q in zip(C, problems, strict=True)))

    best = solved(2)
    after = np.mean([step(q, best, exact=exact, rate=0.3) for q in problems], axis=0)
    biased = solved(1)
    assert np.abs(best - biased).max() > 1e-2
    if exact:
        np.testing.assert_allclose(after, best, atol=1e-12)
    else:
        assert np.abs(after - best).max() > 1e-3
        there = np.mean([step(q, biased, exact=False, rate=0.3) for q in problems], axis=0)
        np.testing.assert_allclose(there, biased, atol=1e-12)


def test_on_a_network_the_direction_is_the_derivative_of_the_loss_after_adaptation() -> None:
    """Against autograd through the whole of f(w - a grad f(w)), the network written out."""
    torch.manual_seed(0)
    model = Border(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 3
    problem = Problem(model, cross_entropy, x, y)

    def f(w: Tensor) -> Tensor:
        hidden = torch.tanh(x @ w[:12].view(4, 3).T + w[12:16])
        return cross_entropy(hidden @ w[16:28].view(3, 4).T + w[28:], y)

    theta, a = model.vector.clone(), 0.5
    w = theta.clone().requires_grad_()
    adapted = w - a * torch.autograd.grad(f(w), w, create_graph=True)[0]
    (expected,) = torch.autograd.grad(f(adapted), w)

    def direction(exact: bool) -> Tensor:
        settings = {"meta_gradient": "exact" if exact else "first-order"}
        oracle = oracle_of(problem, LocalTraining(solver="gd", lr=0.2, steps=1))
        made = per_fedavg.client_rule(theta, oracle, inner_rate=a, **settings)
        found: Tensor = (theta - made.upload) / 0.2
        return found

    torch.testing.assert_close(direction(exact=True), expected, rtol=1e-9, atol=1e-12)
    assert (direction(exact=False) - expected).abs().max() > 1e-3


def test_without_an_inner_step_it_is_fedavg() -> None:
    problems, options = quadratics(3), {"fraction_evaluate": 0.0, "local": local()}
    for weights in ("uniform", "samples"):
        averaged = train(FedAvg(weights=weights, **options), grid(problems), 3)
        for form in ("exact", "first-order"):
            one = strategy(inner_rate=0.0, meta_gradient=form, weights=weights)
            np.testing.assert_allclose(train(one, grid(problems), 3), averaged, rtol=1e-13)


@pytest.mark.parametrize("form", ["exact", "first-order"])
def test_a_run_equals_the_pure_rule_on_fresh_mini_batches_whatever_gets_lost(form: str) -> None:
    """Client 0's reply is lost in round 2, client 2 is absent in it: neither leaves a trace."""
    problems = quadratics(3)
    settings = local(solver="sgd", epochs=2, **{"batch-size": 4})

    federation = grid(problems, fault=lose((2, 0)))
    one = strategy(local=settings, meta_gradient=form, node_wait=1e-3)
    theta = train(one, federation, 1)
    absent = federation.contexts.pop(NODES[2])
    theta = to_vector(one.start(federation, to_record(theta), 1).arrays)
    federation.contexts[NODES[2]] = absent
    theta = to_vector(one.start(federation, to_record(theta), 1).arrays)

    expected = START
    for server_round, used in ((1, (0, 1, 2)), (2, (1,)), (3, (0, 1, 2))):
        uploads = []
        for i in used:
            q, rng = problems[i], stream(0, "meta", server_round, i)
            queue: list[np.ndarray] = []

            def batch(q: Quadratic = q, rng: Any = rng, queue: Any = queue) -> Quadratic:
                if not queue:
                    order = rng.permutation(q.n)
                    queue.extend(order[k : k + 4] for k in range(0, q.n, 4))
                rows = queue.pop(0)
                return Quadratic(q.X[rows], q.y[rows])

            def gradient(w: np.ndarray, batch: Any = batch) -> np.ndarray:
                b = batch()
                slope: np.ndarray = b.X.T @ (b.X @ w - b.y) / b.n
                return slope

            def product(w: np.ndarray, v: np.ndarray, batch: Any = batch) -> np.ndarray:
                curved: np.ndarray = batch().A @ v
                return curved

            uploads.append(
                per_fedavg.client_rule(
                    expected,
                    Formula(gradient, product=product, lr=RATE, steps=2 * -(-q.n // 4)),
                    inner_rate=A_RATE,
                    meta_gradient=form,
                ).upload
            )
        expected = np.mean(uploads, axis=0)
    np.testing.assert_allclose(theta, expected, rtol=1e-11)


@pytest.mark.parametrize(("hyperparameters", "rate"), [({}, A_RATE), ({"fine-tune-lr": 0.2}, 0.2)])
def test_the_model_after_one_step_of_the_inner_rate_is_measured(
    hyperparameters: dict[str, float], rate: float
) -> None:
    problems = quadratics(3)
    seen: list[Any] = []
    one = strategy(fraction_evaluate=1.0, local=local(**hyperparameters), callbacks=[seen.append])
    theta = to_vector(one.start(grid(problems), to_record(START), 1).arrays)
    for q, row in zip(problems, seen[-1].clients.values(), strict=True):
        assert row["eval-loss"] == pytest.approx(q.value(theta), rel=1e-12)
        adapted = theta - rate * q.gradient(theta)
        assert row["tuned-loss"] == pytest.approx(q.value(adapted), rel=1e-12)
        assert "own-loss" not in row


def test_what_the_caller_says_about_measuring_stands_and_its_settings_stay_its_own() -> None:
    settings = local(**{"fine-tune": "off"})
    one = strategy(local=settings)
    assert one.local["fine-tune"] == "off"
    assert settings == local(**{"fine-tune": "off"})


def test_the_training_loss_is_the_mean_over_the_gradients_of_a_step() -> None:
    (q,) = quadratics(1)
    result = strategy(local=local(epochs=1)).start(grid([q]), to_record(START), 1)
    metrics = result.train_metrics_clientapp[1]
    losses = q.value(START), q.value(START - A_RATE * q.gradient(START))
    assert metrics["train-loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert metrics["steps"] == 1


@pytest.mark.parametrize("kind", [PerFedAvg, PerFedBC, PFedMe])
def test_outer_steps_may_be_drawn_by_the_clients_own_stream(kind: Any) -> None:
    seen: list[float] = []
    one = kind(
        local={"lr": 0.01, "steps": 9, "random-steps": True, "batch-size": 3},
        callbacks=[lambda info: seen.extend(row["steps"] for row in info.clients.values())],
        fraction_evaluate=0.0,
        **({"inner_steps": 1} if kind is PFedMe else {}),
    )
    train(one, grid(quadratics(5)), 4)
    assert min(seen) >= 1
    assert max(seen) <= 9
    assert len(set(seen)) > 3


@pytest.mark.parametrize("kind", [PerFedAvg, PerFedBC])
def test_a_client_set_up_for_more_than_plain_steps_says_so(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    training = LocalTraining(momentum=0.5)
    train(kind(fraction_evaluate=0.0), grid(quadratics(2), training=training), 1)
    assert "momentum must be 0.0, got 0.5: " in caplog.text


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"inner_rate": -0.1}, r"inner_rate must be >= 0, got -0.1"),
        ({"meta_gradient": "hf"}, r"meta_gradient must be one of \['exact', 'first-order'\], got"),
        ({"weights": "equal"}, r"weights must be one of \['samples', 'uniform'\], got 'equal'"),
        (
            {"local": {"solver": "adam"}},
            r"solver .*'gd'\], got 'adam': per-fedavg takes plain",
        ),
        ({"local": {"momentum": 0.5}}, r"momentum must be 0.0, got 0.5"),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PerFedAvg(**hyperparameters)
