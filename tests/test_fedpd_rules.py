"""FedPD's and FedPDVR's equations: fixed points, convergence, and the problem of Fig. 2."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from laws import RATE, START
from problems import DIM, Formula, Linear, Quadratic, half_mean_square, optimum, quadratics
from torch import nn

from clients import Border, ClientOracle, FedPDVRClient, Problem, Received, Step
from fl_strategies import FedPDVR, fedpd, fedpd_vr, skipping
from fl_strategies.core.subproblem import Subproblem
from simulations import data, problems
from simulations.config import RunConfig
from simulations.stationarity import stationarity

# ---- the rules ---------------------------------------------------------------------------------

ETA = 0.12
"""Below the theory's bound (sqrt5 - 1)/(4 L) = 0.1236 for L = 2.5."""


FULL: dict[str, Any] = {
    "gamma": 0.3, "inner_steps": 4, "inner_batch": 0, "full_every": 2, "round": 1
}  # fmt: skip
"""FedPDVR with all samples in every step."""


def descent(q: Quadratic) -> Formula:
    """Four steps of gradient descent."""
    A, b = q.A, q.b
    return Formula(lambda w: A @ (w - b), lr=RATE)


def oracles_of(problems: list[Quadratic], kind: str) -> list[Formula]:
    return [q.oracle() if kind == "exact" else descent(q) for q in problems]


def one_round(
    oracles: list[Formula], kept: list[Any], x0: np.ndarray, kind: str, **rule: Any
) -> tuple[list[Any], np.ndarray]:
    made = [
        fedpd_vr.client_rule(state, x0, oracle, eta=ETA, **FULL, **rule)
        if kind == "VR"
        else fedpd.client_rule(state, x0, oracle, eta=ETA, **rule)
        for state, oracle in zip(kept, oracles, strict=True)
    ]
    return [step.state for step in made], skipping.server_rule(step.upload for step in made)


KINDS = pytest.mark.parametrize("kind", ["exact", "descent", "VR"])
RULES = pytest.mark.parametrize("x0_rule", ["paper", "authors"])


@KINDS
@RULES
def test_a_stationary_point_with_its_duals_is_a_fixed_point(kind: str, x0_rule: str) -> None:
    problems = quadratics(3)
    best = optimum(problems)
    kept: list[Any] = [fedpd.State(best, -q.gradient(best)) for q in problems]
    if kind == "VR":
        kept = [fedpd_vr.State(*s, q.gradient(best)) for s, q in zip(kept, problems, strict=True)]
    after, x0 = one_round(oracles_of(problems, kind), kept, best, kind, x0_rule=x0_rule)
    np.testing.assert_allclose(x0, best, atol=1e-12)
    for before, state in zip(kept, after, strict=True):
        np.testing.assert_allclose(state, before, atol=1e-11)


@cache
def averaged_for(rounds: int) -> np.ndarray:
    """Return what FedAvg comes to on four problems, computed once."""
    oracles, averaged = oracles_of(quadratics(4), "descent"), START
    for _ in range(rounds):
        averaged = np.mean([one.solve(averaged, Subproblem()).w for one in oracles], axis=0)
    return averaged


@KINDS
@RULES
@pytest.mark.sampled("descent")
def test_with_eta_below_the_bound_the_gradient_vanishes_where_fedavg_stalls(
    kind: str, x0_rule: str
) -> None:
    problems, x0 = quadratics(4), START
    oracles = oracles_of(problems, kind)
    first_state = fedpd_vr.first_state if kind == "VR" else fedpd.first_state
    kept: list[Any] = [first_state(START) for _ in problems]
    for _ in range(500):
        kept, x0 = one_round(oracles, kept, x0, kind, x0_rule=x0_rule)

    def norm2(w: np.ndarray) -> float:
        return float((np.mean([q.gradient(w) for q in problems], axis=0) ** 2).sum())

    assert norm2(x0) < 1e-20
    assert norm2(averaged_for(500)) > 1e-3
    np.testing.assert_allclose([state.x for state in kept], [x0] * 4, atol=1e-9)
    duals = [-q.gradient(x0) for q in problems]
    np.testing.assert_allclose([state.lam for state in kept], duals, atol=1e-9)


def test_fedpd_vr_with_one_sample_a_step_reaches_the_optimum_exactly() -> None:
    """Its noise is that of gradient differences, which vanish; SGD's stays."""
    problems = quadratics(3)
    x0, rng = START, np.random.default_rng(1)

    def change(new: np.ndarray, old: np.ndarray, q: Quadratic) -> np.ndarray:
        row = q.X[rng.integers(q.n)]
        return row * (row @ (new - old))

    oracles = [
        Formula(descent(q).slope, change=lambda new, old, q=q: change(new, old, q))
        for q in problems
    ]
    kept = [fedpd_vr.first_state(START) for _ in problems]
    for r in range(800):
        made = [
            fedpd_vr.client_rule(
                state, x0, oracle,
                eta=0.05, gamma=0.05, inner_steps=2, inner_batch=1, full_every=2, round=r,
            )
            for state, oracle in zip(kept, oracles, strict=True)
        ]  # fmt: skip
        kept, x0 = [step.state for step in made], skipping.server_rule(step.upload for step in made)
    np.testing.assert_allclose(x0, optimum(problems), atol=1e-6)


def test_an_exact_oracle_leaves_minus_the_gradient_as_dual() -> None:
    """Then the authors' x0+ is one gradient step of rate eta, taken at x+."""
    (q,) = quadratics(1)
    state = fedpd.State(START, 0.3 * START)
    made = fedpd.client_rule(state, START + 1, q.oracle(), eta=ETA)
    new = made.state
    np.testing.assert_allclose(new.lam, -q.gradient(new.x), rtol=1e-10)
    np.testing.assert_allclose(made.upload, new.x - ETA * q.gradient(new.x), rtol=1e-10)
    authors = fedpd.client_rule(state, START + 1, q.oracle(), eta=ETA, x0_rule="authors")
    np.testing.assert_allclose(authors.upload, START + 1 - ETA * q.gradient(new.x), rtol=1e-10)


def test_on_the_problem_of_claim_ii_2_fedavg_diverges_and_fedpd_does_not() -> None:
    """f1 = x^2, f2 = -x^2: every point is stationary, gradients differ without bound (L = 2)."""
    eta, start, rounds = 0.12, np.array([1.0]), 200
    curvatures = (2.0, -2.0)
    averaged, x0 = start, start
    kept = [fedpd.first_state(start)] * 2
    for _ in range(rounds):
        twice = [(1 - eta * c) ** 2 * averaged for c in curvatures]
        averaged = np.mean(twice, axis=0)
        pairs = []
        for c, state in zip(curvatures, kept, strict=True):

            def exact(start: Any, sub: Subproblem, c: float = c) -> Any:
                return (sub.pull * sub.centre - sub.slope) / (c + sub.pull)

            pairs.append(fedpd.client_rule(state, x0, Formula(minimiser=exact), eta=eta))
        kept = [step.state for step in pairs]
        x0 = skipping.server_rule(step.upload for step in pairs)
    np.testing.assert_allclose(averaged, (1 + 4 * eta**2) ** rounds, rtol=1e-9)
    assert averaged[0] > 1e4
    assert 0.1 < abs(x0[0]) < 10
    for c, state in zip(curvatures, kept, strict=True):
        np.testing.assert_allclose(state.x, x0, atol=1e-9)
        np.testing.assert_allclose(state.lam, -c * x0, atol=1e-9)


# ---- FedPDVR's client ---------------------------------------------------------------------------


def request(**others: Any) -> dict[str, Any]:
    first = {"first-algorithm-round": 1, "algorithm-rounds": 1, "round": 1}
    two = {"gamma": 1.0, "inner-steps": 4, "inner-batch": 3, "full-every": 5}
    return {"eta": 1.0, "x0-rule": "paper", **first, **two, **others}


def stepped(client: FedPDVRClient, state: fedpd_vr.State, x0: torch.Tensor) -> Step:
    """Return the client's step in algorithm round 1."""
    rng = np.random.default_rng(0)
    asked_by = f"fedpd-vr asks client {client.client_id}"
    oracle = ClientOracle(
        client.problem, client.training, rng, lambda purpose: rng, asked_by=asked_by
    )
    return client.step(state, Received(x0), oracle, request())


def test_both_gradients_of_a_difference_see_the_same_dropout_masks() -> None:
    """Where the model does not move, g must not either: x = x0 and lam = -g make x' = x."""
    (q,) = quadratics(1)
    model = Border(nn.Sequential(nn.Dropout(0.5), Linear()))
    problem = Problem(model, half_mean_square, torch.tensor(q.X), torch.tensor(q.y))
    client = FedPDVRClient(problem, client_id=0)
    x, g = torch.tensor(START), torch.tensor(START**2)
    with torch.random.fork_rng():
        step = stepped(client, fedpd_vr.State(x, -g, g), x)
    assert torch.equal(step.state.g, g)
    assert torch.equal(step.state.x, x)


def test_fedpd_vr_updates_running_statistics_once_a_step() -> None:
    norm = nn.BatchNorm1d(2, dtype=torch.float64)
    inputs = torch.tensor(np.random.default_rng(0).normal(size=(6, 2)))
    module = nn.Sequential(norm, nn.Linear(2, 2, dtype=torch.float64))
    problem = Problem(Border(module), nn.functional.cross_entropy, inputs, torch.arange(6) % 2)
    x = problem.model.vector.clone()
    step = stepped(FedPDVRClient(problem, client_id=0), fedpd_vr.first_state(x), x)
    assert norm.num_batches_tracked == 4
    assert step.solved is not None
    assert 0 <= float(step.solved.accuracy) <= 1


def test_fedpd_vr_is_refused_without_access_to_full_gradients() -> None:
    """Examples come and go: f_i is an expectation."""
    (q,) = quadratics(1)
    problem = Problem(Border(Linear()), half_mean_square, [*zip(q.X, q.y, strict=True)])
    client = FedPDVRClient(problem, client_id=4)
    message = "fedpd-vr asks client 4 for a full gradient: a Dataset or DataLoader gives no fixed"
    with pytest.raises(ValueError, match=message):
        stepped(client, fedpd_vr.first_state(problem.model.vector), problem.model.vector)


# ---- hyperparameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"eta": 0.0}, r"eta must be > 0, got 0.0"),
        ({"p": -0.1}, r"p must be >= 0 and < 1, got -0.1"),
        ({"p": 1.0}, r"p must be >= 0 and < 1, got 1.0"),
        ({"p": float("nan")}, r"p must be a finite number >= 0 and < 1, got nan"),
        ({"gamma": -1.0}, r"gamma must be > 0, got -1.0"),
        ({"inner_steps": 0}, r"inner_steps must be an integer >= 1, got 0"),
        ({"inner_batch": -1}, r"inner_batch must be an integer >= 0, got -1"),
        ({"full_every": 0}, r"full_every must be an integer >= 1, got 0"),
        ({"x0_rule": "mine"}, r"x0_rule must be one of \['paper', 'authors'\], got 'mine'"),
        ({"missing": "wait"}, r"missing must be one of \['skip', 'proceed'\], got 'wait'"),
        ({"fraction_train": 0.5}, r"fraction_train must be 1: FedPDVR asks all clients, got 0.5"),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FedPDVR(**hyperparameters)


# ---- the benchmark of Fig. 2 -------------------------------------------------------------------


def test_stationarity_is_the_squared_norm_of_the_mean_gradient_and_the_consensus_error() -> None:
    problems = quadratics(3)
    w, own = START, [START + i for i in (1, 2, 4)]
    found = stationarity(
        [q.problem() for q in problems], torch.tensor(w), [torch.tensor(x) for x in own]
    )
    mean = sum(q.A @ (w - q.b) for q in problems) / 3
    assert found.gradient == pytest.approx(mean @ mean, rel=1e-11)
    assert found.consensus == pytest.approx(DIM * (1 + 4 + 16) / 3, rel=1e-12)
    assert found.gap == found.gradient + found.consensus
    with pytest.raises(ValueError, match="problems must be >= 1, got 0"):
        stationarity([], torch.tensor(w))


def test_the_problem_of_fig_2_is_the_penalised_logistic_loss() -> None:
    config = RunConfig.parse(
        {"algorithm": "fedpd", "dataset": "fedpd-strong", "clients": 3, "dtype": "float64"}
    )
    rows, _ = problems.parts(config)[1]
    made = problems.problem(config, "train", rows)
    found = problems.dataset(config)
    a, b = found.x[400:800].astype(float), 2 * found.y[400:800] - 1
    np.testing.assert_array_equal(found.owner[rows], 1)  # type: ignore[index]
    w = np.random.default_rng(0).normal(size=20)
    made.model.write(torch.tensor(w))
    loss, accuracy, _ = made.evaluate()
    z = b * (a @ w)
    expected = np.log1p(np.exp(-z)).mean() + 0.1 * (w**2 / (1 + w**2)).sum()
    assert loss == pytest.approx(expected, rel=1e-12)
    assert accuracy == pytest.approx((z > 0).mean())


def test_weak_labels_are_random_and_strong_ones_follow_a_model_per_client() -> None:
    for name, low, high in (("fedpd-weak", 0.45, 0.65), ("fedpd-strong", 0.9, 1.0)):
        found = data.load(name, clients=4, seed=2)
        assert found.x.shape == (1600, 20)
        assert found.test_x.shape == (400, 20)
        assert (found.x[:, -1] == 1).all()
        assert abs(found.x[:, :-1].mean()) < 0.03
        assert abs(found.x[:, :-1].std() - 1) < 0.03
        for i in range(4):
            x, y = found.x[found.owner == i], found.y[found.owner == i]
            w = np.linalg.lstsq(x, 2.0 * y - 1, rcond=None)[0]
            assert low < ((x @ w > 0) == y).mean() <= high
    with pytest.raises(ValueError, match="samples must be an integer >= 1, got 0"):
        data.load(name, samples=0)


def test_fedpd_asks_all_clients_by_default_on_every_data_set() -> None:
    for name in ("digits", "mnist", "fedpd-weak"):
        for algorithm in ("fedpd", "fedpd-vr"):
            assert RunConfig.parse({"algorithm": algorithm, "dataset": name}).fraction == 1.0
