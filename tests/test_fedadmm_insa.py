"""FedADMM-InSa: its mean of all clients, its stopping test, its penalties, the authors' equations.

Mistakes these laws are written against: a part counted with another rho_i than the server's sum, a
newcomer counted from the received model, a test against another start, a residual of another sign.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from federations import drop
from laws import RATE, START, local, quiet, train
from own_loops import descend, own_app
from problems import (
    DIM,
    Quadratic,
    grid,
    kept,
    optimum,
    quadratics,
    to_record,
    to_vector,
    used_states,
)

from clients.node.in_process import InProcessGrid
from fl_strategies import FedADMM, FedADMMInSa, NothingUsable, fedadmm_insa
from fl_strategies.fedadmm_insa import State
from fl_strategies.parts import Buffered, Clock

strategy = partial(quiet, FedADMMInSa, rho=0.2, mu=1.5)
FIXED: dict[str, Any] = {"tau": 1.0, "convexity": 0.0}


def mean_of_all(one: FedADMMInSa, federation: InProcessGrid, clients: int) -> np.ndarray:
    """Return (5), from the clients' states, with theta^0 = START for those that never took part."""
    states = used_states(federation, one.ledger.acked)
    away = clients - len(states)
    total = away * one.rho * START + sum(s["rho"] * s["w"] + s["y"] for s in states)
    return np.asarray(total / (away * one.rho + sum(s["rho"] for s in states)))


@pytest.mark.parametrize("pace", [None, Buffered(size=2, concurrency=4)], ids=["rounds", "late"])
def test_the_model_is_the_weighted_mean_of_all_clients_whoever_takes_part(pace: Any) -> None:
    federation = grid(quadratics(6), fault=drop(0.3))
    late = {"pace": pace, "clock": Clock()} if pace else {"fraction_train": 0.5}
    one = strategy(num_clients=7, node_wait=0.01, **late)
    for rounds in (1, 2, 9):
        theta = train(one, federation, rounds)
        np.testing.assert_allclose(theta, mean_of_all(one, federation, 7), rtol=1e-11)
    assert len({*one.state.penalties.values()}) > 1  # which differ


@pytest.mark.parametrize("start", ["client", "global"])
def test_with_equal_fixed_penalties_it_is_fedadmm(start: str) -> None:
    options = {"rho": 0.4, "local_start": start, "fraction_train": 0.5}
    both = quiet(FedADMM, eta="fraction", **options), strategy(**FIXED, **options)
    ends = [train(one, grid(quadratics(5), fault=drop(0.3)), 12) for one in both]
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-12)


def test_the_optimum_is_a_fixed_point_for_any_penalties() -> None:
    problems, named = quadratics(4), {"rho": 1.0, "convexity": 0.0, "mu": 5.0, "tau": 2.0}
    best, changes, penalties = optimum(problems), [], [0.1, 3.0, 0.7, 20.0]
    for q, rho in zip(problems, penalties, strict=True):
        state = State(best, -q.gradient(best), rho, 1.3 * rho)
        step = fedadmm_insa.client_rule(state, best, q.oracle(), **named)
        changes.append((step.upload, 1.0))
        np.testing.assert_allclose(step.state.w, best, rtol=1e-12)
        np.testing.assert_allclose(step.state.y, state.y, atol=1e-12)
    theta, _ = fedadmm_insa.server_rule(best, 0.0 * best, changes, penalties=sum(penalties))
    np.testing.assert_allclose(theta, best, rtol=1e-12)


def local_work(
    q: Quadratic, w: np.ndarray, y: np.ndarray, rho: float, theta: np.ndarray, most: int, c: float
) -> tuple[np.ndarray, int]:
    """Return w after steps of descent on (1), and their number by (2)."""

    def e(u: np.ndarray) -> np.ndarray:
        return q.gradient(u) + y + rho * (u - theta)

    enough = 0.999 * np.sqrt(2) / (np.sqrt(2) + np.sqrt(rho / c)) * np.linalg.norm(e(w))
    for done in range(1, most + 1):
        w = w - RATE * e(w)
        if np.linalg.norm(e(w)) <= enough:
            return w, done
    return w, most


@pytest.mark.parametrize("start", ["client", "global"])
def test_it_computes_what_the_authors_program_does(start: str) -> None:
    """A twin in their notation: u, z, beta, lambda = -y; all clients, no memory, equal weights."""
    problems, mu, tau, c, most = quadratics(4), 1.5, 1.7, 0.05, 30
    z, beta, epochs = START, [0.2] * 4, []
    u, lam = [START] * 4, [np.zeros(DIM)] * 4
    for _ in range(6):
        parts = []
        for i, q in enumerate(problems):
            begun = u[i] if start == "client" else z
            new, done = local_work(q, begun, -lam[i], beta[i], z, most, c)
            epochs.append(done)
            lam[i] = lam[i] - beta[i] * (new - z)
            parts.append((beta[i] * new - lam[i], beta[i]))
            moved, far = beta[i] * np.linalg.norm(new - u[i]), np.linalg.norm(new - z)
            if mu * moved < far:
                beta[i] *= tau
            elif mu * far < moved:
                beta[i] /= tau
            u[i] = new
        z = sum(part for part, _ in parts) / sum(weight for _, weight in parts)
    settings = local(epochs=most)
    one = strategy(mu=mu, tau=tau, convexity=c, local_start=start, local=settings)
    federation = grid(problems)
    np.testing.assert_allclose(train(one, federation, 6), z, rtol=1e-10)
    states = kept(federation, one.ledger.acked)
    np.testing.assert_allclose([float(s["next_rho"]) for s in states], beta, rtol=1e-12)
    assert len({*epochs}) > 3
    assert max(epochs) < most
    assert len({*beta}) > 1


def test_a_larger_c_ends_local_work_sooner_and_0_never_does() -> None:
    counts = []
    for c in (0.0, 0.01, 1.0):
        one = strategy(convexity=c, local=local(epochs=40))
        result = one.start(grid(quadratics(3)), to_record(START), 1)
        counts.append(result.train_metrics_clientapp[1]["epochs"])
        assert ("residual" in result.train_metrics_clientapp[1]) is (c > 0.0)
    assert counts[0] == 40
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize(("rho", "expected"), [(900.0, 1000.0), (0.0015, 0.001)])
def test_a_penalty_stays_within_a_thousandth_and_a_thousand_of_the_first(
    rho: float, expected: float
) -> None:
    q, named = quadratics(1)[0], {"rho": 1.0, "convexity": 0.0, "mu": 5.0, "tau": 2.0}
    grows, y = rho > 1.0, -q.gradient(START)  # theta is kept, and with grows w is
    w = q.argmin(y, rho, START + 1.0) if grows else START + 3.0
    theta = START + 1.0 if grows else START
    step = fedadmm_insa.client_rule(State(w, y, rho, rho), theta, q.oracle(), **named)
    assert step.state.next_rho == expected
    assert step.scalars == {"penalty": rho}
    assert FedADMMInSa(rho=1.0).scalar_bounds == {"penalty": (0.001, 1000.0)}


def test_a_client_that_joins_later_counts_from_the_first_model() -> None:
    federation = grid(quadratics(4))
    node, absent = federation.contexts.popitem()
    one = strategy(node_wait=0.01)
    theta = train(one, federation, 3)
    np.testing.assert_allclose(theta, mean_of_all(one, federation, 3), rtol=1e-11)
    federation.contexts[node] = absent
    result = one.start(federation, to_record(theta), 2)
    expected = mean_of_all(one, federation, 4)
    np.testing.assert_allclose(to_vector(result.arrays), expected, rtol=1e-11)


def test_a_loop_of_ones_own_serves_it_without_the_test(caplog: pytest.LogCaptureFixture) -> None:
    problems, settings = quadratics(3), {"convexity": 0.0, "fraction_train": 0.7}
    federation = InProcessGrid(own_app(problems, descend), 3)
    found = train(strategy(**settings, local={}), federation, 4)
    np.testing.assert_allclose(found, train(strategy(**settings), grid(problems), 4), rtol=1e-11)
    with pytest.raises(NothingUsable):
        train(strategy(local={}), InProcessGrid(own_app(problems, descend), 3), 3)
    assert "a test on all samples that ends its work, which a training loop of" in caplog.text


def test_hyperparameters_out_of_their_range_are_refused() -> None:
    for name, value, bound in (("rho", 0.0, "> 0"), ("mu", 0.5, ">= 1"), ("tau", 0.5, ">= 1")):
        with pytest.raises(ValueError, match=f"{name} must be {bound}, got {value:g}"):
            FedADMMInSa(**{name: value})
