"""pFedMe: the Moreau envelope, its minimiser, what a client keeps, and whatever gets lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from federations import lose
from laws import RATE, START, local, quiet, train
from problems import DIM, NODES, Quadratic, forget, grid, kept, quadratics, to_record, to_vector

from clients.node.in_process import InProcessGrid
from fl_strategies import PFedMe, pfedme
from fl_strategies.core.randomness import stream
from fl_strategies.core.records import Round, Upload
from fl_strategies.parts import FedExP

LAM, ETA = 2.0, 0.2


strategy = partial(quiet, PFedMe, lam=LAM, eta=ETA)


def inner(oracle: Any, state: pfedme.State, w: Any, **hyperparameters: Any) -> Any:
    """Return the next theta and the upload of the rule."""
    made = pfedme.client_rule(state, w, oracle, **{"inner_steps": 1, **hyperparameters})
    return made.state.theta, made.upload


def envelope_curvature(q: Quadratic) -> np.ndarray:
    """Return E of F(w) = 1/2 (w - b)^T E (w - b) + F(b): E = (A^-1 + I/lambda)^-1."""
    return np.linalg.inv(np.linalg.inv(q.A) + np.eye(DIM) / LAM)


def envelopes_minimiser(problems: list[Quadratic]) -> np.ndarray:
    E = [envelope_curvature(q) for q in problems]
    return np.linalg.solve(sum(E), sum(e @ q.b for e, q in zip(E, problems, strict=True)))


def mean(
    vectors: list[np.ndarray], w: np.ndarray, weights: Any = "uniform", beta: float = 1.0
) -> np.ndarray:
    uploads = [Upload(i, v, 1 + i, {}) for i, v in enumerate(vectors)]
    strategy = PFedMe(weights=weights, beta=beta)
    return strategy.aggregate(None, Round(theta=w), uploads)[0]


def test_with_the_inner_problem_solved_a_step_is_gradient_descent_on_the_envelope() -> None:
    (q,) = quadratics(1)
    state = pfedme.State(START + 3.0)
    theta, w = inner(replace(q.oracle(), steps=3), state, START, lam=LAM, eta=ETA)
    expected = START
    for _ in range(3):
        before, expected = expected, expected - ETA * envelope_curvature(q) @ (expected - q.b)
    np.testing.assert_allclose(w, expected, rtol=1e-11)
    np.testing.assert_allclose(theta, q.argmin(pull=LAM, centre=before), rtol=1e-12)


def test_the_envelope_is_what_its_name_says() -> None:
    """Its value at w is the least f(theta) + (lambda/2) ||theta - w||^2, up to f(b)."""
    (q,) = quadratics(1)
    theta, away = q.argmin(pull=LAM, centre=START), START - q.b
    least = q.value(theta) + LAM / 2 * ((theta - START) ** 2).sum()
    curved = away @ envelope_curvature(q) @ away / 2
    assert curved + q.value(q.b) == pytest.approx(least, rel=1e-12)


def test_the_minimiser_of_the_mean_envelope_is_a_fixed_point_of_the_rules() -> None:
    """Whatever eta and beta, with R = 1; with R = 2 it is not, as clients drift apart."""
    problems = quadratics(3)
    best = envelopes_minimiser(problems)
    for steps, eta, beta in ((1, 0.1, 1.0), (1, 0.5, 2.0), (2, 0.5, 1.0)):
        uploads = [
            inner(oracle, pfedme.first_state(best), best, lam=LAM, eta=eta)[1]
            for oracle in (replace(q.oracle(), steps=steps) for q in problems)
        ]
        moved = np.abs(mean(uploads, best, beta=beta) - best).max()
        assert moved < 1e-12 if steps == 1 else moved > 1e-3


@pytest.mark.slow
def test_a_run_of_few_inner_steps_ends_at_the_minimiser_of_the_mean_envelope() -> None:
    """R = 1: theta starts where it was, so that K = 2 steps a round are exact in the end."""
    problems = quadratics(3)
    one = strategy(local=local(epochs=1), inner_steps=2, eta=0.5, beta=1.5)
    federation = grid(problems)
    found = train(one, federation, 120)
    np.testing.assert_allclose(found, envelopes_minimiser(problems), atol=1e-8)
    for q, theta in zip(problems, thetas(federation, one.ledger.acked), strict=True):
        np.testing.assert_allclose(theta, q.argmin(pull=LAM, centre=found), atol=1e-8)


def test_with_a_strong_pull_it_is_gradient_descent_on_the_loss() -> None:
    (q,) = quadratics(1)
    lam = 1e7
    oracle = replace(q.oracle(), steps=1)
    _, w = inner(oracle, pfedme.first_state(START), START, lam=lam, eta=0.1)
    np.testing.assert_allclose(w, START - 0.1 * q.gradient(START), rtol=1e-5)


def test_the_server_moves_by_beta_towards_the_mean_and_beyond() -> None:
    w, uploads = START, [START + 1.0, START - 4.0]
    np.testing.assert_allclose(mean(uploads, w, beta=0.5), START - 0.75)
    np.testing.assert_allclose(mean(uploads, w, beta=2.0), START - 3.0)
    np.testing.assert_allclose(mean(uploads, w, weights="samples"), START - 7 / 3)


# ---- through Flower -----------------------------------------------------------------------------


def thetas(federation: InProcessGrid, acked: Mapping[int, int]) -> list[np.ndarray]:
    """Return the theta of each client that the server counts on."""
    return [fields["theta"] for fields in kept(federation, acked)]


class Twin:
    """The whole algorithm on NumPy's quadratics: a fresh mini-batch a step, K GD steps on it."""

    def __init__(self, problems: list[Quadratic], epochs: int = 2, batch: int = 4) -> None:
        self.problems, self.epochs, self.batch = problems, epochs, batch
        self.theta: dict[int, np.ndarray] = {}
        self.w = START

    def round(self, number: int, used: tuple[int, ...], inner_steps: int = 3) -> None:
        uploads = []
        for i in used:
            q, rng = self.problems[i], stream(0, "meta", number, i)
            theta, w = self.theta.get(i, self.w), self.w
            for _ in range(self.epochs):
                order = rng.permutation(q.n)
                for start in range(0, q.n, self.batch):
                    X, y = (part[order[start : start + self.batch]] for part in (q.X, q.y))
                    for _ in range(inner_steps):
                        slope = X.T @ (X @ theta - y) / len(y)
                        theta = theta - RATE * (slope + LAM * (theta - w))
                    w = (1 - ETA * LAM) * w + ETA * LAM * theta
            self.theta[i] = theta
            uploads.append(w)
        self.w = np.mean(uploads, axis=0)


MINI = local(solver="sgd", epochs=2, **{"batch-size": 4})


def test_a_run_equals_the_twin_with_lost_replies_newcomers_and_clients_that_come_back() -> None:
    """Round 2: client 0's reply is lost. 3 and 4: client 1 is away. Client 3 is new in round 4."""
    problems = quadratics(4)

    federation = grid(problems, fault=lose((2, 0)))
    one = strategy(local=MINI, inner_steps=3, node_wait=1e-3)
    contexts, twin, w = dict(federation.contexts), Twin(problems), START
    plan = [((0, 1, 2), (0, 1, 2)), ((0, 1, 2), (1, 2)), ((0, 2), (0, 2)),
            ((0, 2, 3), (0, 2, 3)), ((0, 1, 2, 3), (0, 1, 2, 3))]  # fmt: skip
    for number, (there, used) in enumerate(plan, start=1):
        federation.contexts.clear()
        federation.contexts.update({NODES[i]: contexts[NODES[i]] for i in there})
        w = to_vector(one.start(federation, to_record(w), 1).arrays)
        twin.round(number, used)
        np.testing.assert_allclose(w, twin.w, rtol=1e-11)
    for i, found in enumerate(thetas(federation, one.ledger.acked)):
        np.testing.assert_allclose(found, twin.theta[i], rtol=1e-11)


def test_a_client_whose_state_is_lost_starts_from_the_common_model_again() -> None:
    problems = quadratics(3)
    federation, one, twin = grid(problems), strategy(local=MINI, inner_steps=3), Twin(problems)
    w = train(one, federation, 2)
    forget(federation, 1)
    w = to_vector(one.start(federation, to_record(w), 1).arrays)
    for number in (1, 2):
        twin.round(number, (0, 1, 2))
    del twin.theta[1]
    twin.round(3, (0, 1, 2))
    np.testing.assert_allclose(w, twin.w, rtol=1e-11)


def test_the_own_model_is_theta_by_value_and_not_the_upload() -> None:
    problems = quadratics(3)
    seen: list[Any] = []
    one = strategy(local=MINI, inner_steps=3, fraction_evaluate=1.0, callbacks=[seen.append])
    w, twin = to_vector(one.start(grid(problems), to_record(START), 1).arrays), Twin(problems)
    twin.round(1, (0, 1, 2))
    for i, (q, row) in enumerate(zip(problems, seen[-1].clients.values(), strict=True)):
        assert row["own-loss"] == pytest.approx(q.value(twin.theta[i]), rel=1e-10)
        assert row["eval-loss"] == pytest.approx(q.value(w), rel=1e-10)
        assert row["own-loss"] < row["eval-loss"]


def test_training_starts_from_the_common_model_where_that_is_asked_for() -> None:
    problems, twin = quadratics(3), Twin(quadratics(3))
    found = train(strategy(local=MINI, inner_steps=3, local_start="global"), grid(problems), 2)
    for number in (1, 2):
        twin.theta.clear()
        twin.round(number, (0, 1, 2))
    np.testing.assert_allclose(found, twin.w, rtol=1e-11)


def test_any_solver_does_the_inner_steps_and_may_end_them_early() -> None:
    """L-BFGS solves (1) to the end; a residual that any theta meets leaves one of five."""
    (q,) = quadratics(1)
    options = {"epochs": 1, "residual": 1e-8}
    one = strategy(local=local(solver="lbfgs", lr=1.0, **options), inner_steps=20)
    result = one.start(grid([q]), to_record(START), 1)
    expected = START - ETA * envelope_curvature(q) @ (START - q.b)
    # |theta - argmin| <= 1e-4 / (lambda + 0.4), and w moves by eta lambda of it
    np.testing.assert_allclose(to_vector(result.arrays), expected, atol=ETA * LAM * 1e-4 / LAM)
    assert result.train_metrics_clientapp[1]["residual"] <= 1e-8
    for residual, steps in (({"residual": 1e9}, 2), ({}, 10)):
        one = strategy(local=local(steps=2, **residual))
        metrics = one.start(grid([q]), to_record(START), 1).train_metrics_clientapp[1]
        assert metrics["steps"] == steps


def test_the_training_loss_is_thetas_before_its_last_step() -> None:
    (q,) = quadratics(1)
    one = strategy(local=local(epochs=2), inner_steps=1)
    metrics = one.start(grid([q]), to_record(START), 1).train_metrics_clientapp[1]
    theta = START - RATE * q.gradient(START)
    assert metrics["train-loss"] == pytest.approx((q.value(START) + q.value(theta)) / 2, rel=1e-12)
    assert metrics["steps"] == 2


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"lam": 0.0}, r"lam must be > 0, got 0.0"),
        ({"eta": -1.0}, r"eta must be > 0, got -1.0"),
        ({"beta": 0.0}, r"beta must be > 0, got 0.0"),
        ({"beta": {1: 1.0, 3: 0.0}}, r"beta must be > 0, got 0.0"),
        ({"beta": 0.1, "server_step": FedExP()}, r"FedExP sets how long .* must be 1, got 0.1"),
        ({"inner_steps": 0}, r"inner_steps must be an integer >= 1, got 0"),
        ({"inner_steps": 1.5}, r"inner_steps must be an integer >= 1, got 1.5"),
        ({"local_start": "w"}, r"local_start must be one of \['client', 'global'\], got 'w'"),
        ({"weights": "equal"}, r"weights must be one of \['samples', 'uniform'\], got 'equal'"),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PFedMe(**hyperparameters)
