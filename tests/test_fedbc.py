"""FedBC: its dual step, the KKT conditions, its reductions, and the rule itself."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from flwr.app import Message
from laws import DUAL, START, local, quiet, train
from limits import mean_of_minimisers
from problems import DIM, Formula, Quadratic, grid, optimum, quadratics
from scipy.optimize import minimize

from clients.keeping import to_fields
from fl_strategies import FedAvg, FedBC, FedProx, fedbc
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.proximity import (
    Dual,
    State,
    Turn,
    dual_step,
    first_state,
    idle_steps,
    server_rule,
)

strategy = partial(quiet, FedBC, alpha=0.01)


PLAIN = Dual(0.05, 0.05, "heuristic", 0.0, math.inf, 0.0)


# ---- the dual step ------------------------------------------------------------------------------


def test_lambda_climbs_by_the_squared_distance_beyond_gamma_and_gamma_by_the_old_lambda() -> None:
    """By hand: ||x - z||^2 = 9 + 16, lambda 2 + 0.1 (25 - 5), gamma 5 + 0.3 * 2."""
    dual = Dual(0.1, 0.3, "heuristic", 0.0, math.inf, 0.0)
    state = State(x=np.zeros(2), lam=2.0, gamma=5.0)
    new = dual_step(state, np.array([4.0, 1.0]), np.array([1.0, 5.0]), dual, Turn())
    assert new.lam == pytest.approx(4.0)
    assert new.gamma == pytest.approx(5.6)
    np.testing.assert_array_equal(new.x, [4.0, 1.0])


def test_lambda_stays_within_its_range_and_a_fixed_gamma_stays() -> None:
    z, x = np.zeros(2), np.array([3.0, 4.0])
    for gamma, expected in ((0.0, 0.7), (24.9, 0.51), (100.0, 0.2)):
        dual = Dual(0.1, 0.3, gamma, 0.2, 0.7, 0.0)
        new = dual_step(State(x=z, lam=0.5, gamma=gamma), x, z, dual, Turn())
        assert (new.lam, new.gamma) == (pytest.approx(expected), gamma)


def test_a_newcomer_has_z_and_lambda_zero_brought_into_its_range() -> None:
    assert first_state(START, dual=PLAIN)[1:] == (0.0, 0.0, 0.0, 0.0, 0)
    np.testing.assert_array_equal(first_state(START, dual=PLAIN).x, START)
    fixed = Dual(0.1, 0.1, 3.0, 0.25, 0.5, 0.0)
    assert first_state(START, dual=fixed)[1:3] == (0.25, 3.0)


@pytest.mark.parametrize("gamma", ["heuristic", 4.0])
def test_with_momentum_the_duals_are_those_of_one_sgd_over_all_clients(gamma: Any) -> None:
    """The authors' program: a vector of lambda and one of gamma, all stepped for each client."""
    rng = np.random.default_rng(4)
    clients, m, alpha = 5, 0.5, 0.3
    lam, gam = (torch.zeros(clients, dtype=torch.float64, requires_grad=True) for _ in range(2))
    if gamma != "heuristic":
        with torch.no_grad():
            gam += gamma
    optimizer = torch.optim.SGD([lam] if gamma != "heuristic" else [lam, gam], alpha, momentum=m)
    dual = Dual(alpha, alpha, gamma, 0.0, math.inf, m)
    kept: dict[int, State] = {}
    clock, z = 0, np.zeros(3)
    met_zero = False
    for _ in range(12):
        order = rng.permutation(clients)[:3]
        for place, i in enumerate(order):
            x = rng.normal(size=3) * rng.uniform(0, 3)
            turn = Turn(clock + place, len(order) - 1 - place)
            state = kept.get(i, first_state(z, dual=dual))
            state = idle_steps(state, dual, turn.clock - state.clock)
            assert state.lam == pytest.approx(
                lam[i].item(), rel=1e-12, abs=1e-12
            )  # what its training sees
            kept[i] = dual_step(state, x, z, dual, turn)
            optimizer.zero_grad()
            (-(float(x @ x) - gam[i]) * lam[i]).backward()
            if gam.grad is not None:  # the loss's own sign for gamma: it descends
                gam.grad.neg_()
            optimizer.step()
            with torch.no_grad():
                lam.clamp_(min=0.0)
        clock += len(order)
        for i in order:  # what it uploads, at the end of the round
            assert kept[i].lam == pytest.approx(lam[i].item(), rel=1e-12, abs=1e-12)
            assert kept[i].gamma == pytest.approx(gam[i].item(), rel=1e-12, abs=1e-12)
            met_zero |= kept[i].lam == 0.0
    assert met_zero


def test_a_round_through_flower_takes_each_clients_turn_from_the_clock() -> None:
    """With momentum and 2 of 5 clients a round, all lambda are those of the sequential program."""
    problems = quadratics(5)
    one = strategy(alpha=0.02, dual_momentum=0.5, fraction_train=0.4, lambda_max=3.0)
    uploads: dict[int, dict[int, float]] = {}
    one.callbacks = (
        lambda info: uploads.update(
            {info.server_round: {c: row["lambda"] for c, row in info.clients.items()}}
        ),
    )
    turns: dict[int, dict[int, Turn]] = {}

    def watch(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("config", {})
        if request.metadata.message_type == "train":
            turn = Turn(config["dual-clock"], config["dual-after"])
            turns.setdefault(config["server-round"], {})[request.metadata.dst_node_id] = turn
        return reply

    train(one, grid(problems, fault=watch), 6)
    for server_round, asked in turns.items():
        places = sorted(turn.clock for turn in asked.values())
        assert places == [2 * server_round - 2, 2 * server_round - 1]
        assert all(turn.clock + 1 + turn.after == 2 * server_round for turn in asked.values())
    firsts = {min(asked, key=lambda node: asked[node].clock) for asked in turns.values()}
    assert len(firsts) > 1  # the order is drawn, not the clients' own
    assert all(0.0 <= lam <= 3.0 for round_ in uploads.values() for lam in round_.values())


# ---- where it goes ------------------------------------------------------------------------------


Gammas: TypeAlias = tuple[float, float, float]


def constrained(problems: list[Quadratic], gammas: Gammas) -> tuple[np.ndarray, np.ndarray]:
    """Return z and the x_i that minimise sum f_i(x_i) within ||x_i - z||^2 <= gamma_i."""
    clients = len(problems)

    def split(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return v[:DIM], v[DIM:].reshape(clients, DIM)

    def value(v: np.ndarray) -> float:
        return sum(q.value(x) for q, x in zip(problems, split(v)[1], strict=True))

    def slope(v: np.ndarray) -> np.ndarray:
        pairs = zip(problems, split(v)[1], strict=True)
        return np.concatenate([np.zeros(DIM), *(q.gradient(x) for q, x in pairs)])

    def room(v: np.ndarray) -> np.ndarray:
        z, x = split(v)
        return np.array(gammas) - ((x - z) ** 2).sum(1)

    middle = optimum(problems)
    start = np.concatenate([middle, *(middle + 1e-2 * (q.b - middle) for q in problems)])
    found = minimize(
        value,
        start,
        jac=slope,
        method="SLSQP",
        constraints={"type": "ineq", "fun": room},
        options={"ftol": 1e-11, "maxiter": 500},
    )
    assert found.success
    return split(found.x)


@pytest.mark.parametrize(
    ("gammas", "alpha"),
    [((0.5, 0.5, 0.5), 0.2), ((12.0, 12.0, 12.0), 0.02), ((0.5, 2.0, 0.1), 0.2)],
)
@pytest.mark.slow
def test_with_fixed_gammas_it_solves_the_constrained_problem(gammas: Gammas, alpha: float) -> None:
    problems = quadratics(3)
    duals = [Dual(alpha, 0.0, gamma, 0.0, math.inf, 0.0) for gamma in gammas]
    z = START
    kept = [first_state(START, dual=dual) for dual in duals]
    for _ in range(4000):
        kept = [
            fedbc.client_rule(state, z, q.oracle(), dual=dual).state
            for q, state, dual in zip(problems, kept, duals, strict=True)
        ]
        z, _ = server_rule((state.x, state.lam) for state in kept)
    best_z, best_x = constrained(problems, gammas)
    np.testing.assert_allclose([state.x for state in kept], best_x, atol=1e-4)
    if any(state.lam > 0 for state in kept):
        np.testing.assert_allclose(z, best_z, atol=1e-4)
    gradients = np.array([q.gradient(s.x) for q, s in zip(problems, kept, strict=True)])
    np.testing.assert_allclose(gradients.sum(0), 0.0, atol=1e-7)  # stationary in z
    for g, state, gamma in zip(gradients, kept, gammas, strict=True):
        np.testing.assert_allclose(g + 2 * state.lam * (state.x - z), 0.0, atol=1e-7)
        distance = ((state.x - z) ** 2).sum()
        assert distance <= gamma + 1e-7
        assert state.lam * (distance - gamma) == pytest.approx(0.0, abs=1e-6)


def test_a_small_gamma_brings_z_to_the_optimum_of_the_sum() -> None:
    problems = quadratics(3)
    gaps = [np.abs(constrained(problems, g)[0] - optimum(problems)).max() for g in (1.0, 0.01)]
    assert gaps[1] < 0.1 * gaps[0]
    assert gaps[1] < 0.05


@pytest.mark.slow
def test_started_at_x_every_client_ends_at_its_own_minimiser() -> None:
    problems = [Quadratic(np.sqrt(3) * q.X, np.sqrt(3) * q.y) for q in quadratics(3)]
    found = train(strategy(**DUAL, local_start="client"), grid(problems), 255)
    np.testing.assert_allclose(found, mean_of_minimisers(problems), atol=1e-9)


# ---- what it reduces to -------------------------------------------------------------------------


def test_with_lambda_zero_it_is_fedavg_with_uniform_weights() -> None:
    problems, options = quadratics(3), {"fraction_evaluate": 0.0, "local": local()}
    averaged = train(FedAvg(weights="uniform", **options), grid(problems), 4)
    found = train(strategy(lambda_max=0.0), grid(problems), 4)
    np.testing.assert_array_equal(found, averaged)


def test_with_lambda_half_of_mu_it_is_fedprox_with_uniform_weights() -> None:
    problems, options = quadratics(3), {"fraction_evaluate": 0.0, "local": local()}
    pulled = train(FedProx(mu=0.5, weights="uniform", **options), grid(problems), 4)
    fixed = {"lambda_min": 0.25, "lambda_max": 0.25}
    found = train(strategy(**fixed), grid(problems), 4)
    np.testing.assert_array_equal(found, pulled)


# ---- the rule -----------------------------------------------------------------------------------


def test_the_local_problem_is_f_plus_lambda_times_the_squared_distance() -> None:
    """Its minimiser has grad f + 2 lambda (x - z) = 0."""
    (q,) = quadratics(1)
    state = State(x=START, lam=0.35, gamma=1.0)
    z = START + 1.0
    new = fedbc.client_rule(state, z, q.oracle(), dual=PLAIN).state
    np.testing.assert_allclose(q.gradient(new.x) + 2 * 0.35 * (new.x - z), 0.0, atol=1e-12)
    starts = []

    def remember(start: Any, sub: Subproblem) -> Any:
        starts.append(start)
        return start

    oracle = Formula(minimiser=remember)
    fedbc.client_rule(state, z, oracle, dual=PLAIN)
    fedbc.client_rule(state, z, oracle, dual=PLAIN, local_start="client")
    np.testing.assert_array_equal(starts, [z, START])


def test_training_sees_the_lambda_that_others_steps_have_moved() -> None:
    """Two steps of others since the client's last: lambda + alpha (m + m^2) v, by hand."""
    pulls = []

    def remember(start: Any, sub: Subproblem) -> Any:
        pulls.append(sub.pull)
        return start

    dual = PLAIN._replace(alpha=0.1, dual_momentum=0.5)
    state = State(x=START, lam=0.4, gamma=1.0, v=2.0, clock=3)
    oracle = Formula(minimiser=remember)
    fedbc.client_rule(state, START, oracle, dual=dual, turn=Turn(5, 0))
    assert pulls == [pytest.approx(2 * (0.4 + 0.1 * 0.75 * 2.0))]


def test_lambda_does_not_leave_its_range_by_rounding_to_float32() -> None:
    dual = Dual(1.0, 1.0, "heuristic", 0.0, 0.1, 0.0)
    x = torch.full((3,), 5.0)
    state = dual_step(State(x, 0.0, 0.0), x, 0 * x, dual, Turn())
    fields = to_fields(state)
    assert fields["lam"].item() == 0.1
    assert fields["lam"].dtype == np.float64
