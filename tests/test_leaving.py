"""Clients that leave, never come, or lose their state, where the server keeps a sum over all.

Limits are linear solves: each client that is away, or has lost its state, is a term of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from federations import CLIENTS, Trouble
from flwr.app import Message
from laws import START, local, train
from members import RHO, Members, admm, before_round
from problems import DIM, NODES, Quadratic, forget, optimum, quadratics, to_record, to_vector

from fl_strategies import SCAFFOLD, FederatedStrategy, FedPD


def scaffold_(federation: Members, **hyperparameters: Any) -> SCAFFOLD:
    usual = {"local": local(lr=0.2), "fraction_evaluate": 0.0, "node_wait": 0.01}
    return SCAFFOLD(**{**usual, **hyperparameters, "callbacks": [federation.watch]})


def limit(
    problems: list[Quadratic],
    *,
    pulls: list[tuple[float, np.ndarray]] | None = None,
    slope: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Return argmin of sum_i f_i(w) + <slope, w> + sum_j (r_j/2) ||w - c_j||^2."""
    left = sum(q.A for q in problems)
    right = sum(q.A @ q.b for q in problems) - slope
    for pull, centre in pulls or []:
        left, right = left + pull * np.eye(DIM), right + pull * centre
    return np.linalg.solve(left, right)


def from_round(first: int, *clients: int) -> Trouble:
    return lambda number, client: client in clients and number >= first


def test_a_client_that_left_counts_on_with_its_last_u() -> None:
    federation = Members(away=from_round(4, 2))
    one = admm(federation, fraction_train=1.0)
    found = train(one, federation, 40)
    present = [q for i, q in enumerate(quadratics(CLIENTS)) if i != 2]
    expected = limit(present, pulls=[(RHO, federation.u(one)[2])])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found - optimum(quadratics(CLIENTS))).max() > 1e-2


@pytest.mark.slow
def test_clients_that_do_not_exist_pull_towards_the_first_model() -> None:
    federation = Members()
    found = train(admm(federation, fraction_train=1.0, num_clients=6), federation, 60)
    expected = limit(quadratics(CLIENTS), pulls=2 * [(RHO, START)])
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.sampled("0.5")
def test_a_state_lost_by_fedadmm_leaves_its_u_in_the_sum_for_good(share: float) -> None:
    """Nor is theta - theta^0 added for it a second time."""
    federation = Members()
    one = admm(federation, fraction_train=share)
    theta = train(one, federation, 5)
    assert 2 in one.ledger.acked
    u = federation.u(one)[2]
    forget(federation, 2)
    seen: list[np.ndarray] = []

    def received(request: Message, reply: Message) -> Message:
        mine = request.metadata.dst_node_id == NODES[2]
        if request.metadata.message_type == "train" and mine:
            seen.append(to_vector(request.content["arrays"]))
        return reply

    federation.fault = received
    found = to_vector(one.start(federation, to_record(theta), 90).arrays)
    expected = limit(quadratics(CLIENTS), slope=-RHO * (u - seen[0]))
    np.testing.assert_allclose(found, expected, atol=1e-6)


MAKE: dict[str, Callable[..., FederatedStrategy]] = {
    "fedadmm": lambda on, **hyperparameters: admm(on, fraction_train=1.0, **hyperparameters),
    "scaffold": scaffold_,
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("policy", [None, "refuse"])
@pytest.mark.sampled("fedadmm")
def test_a_state_lost_late_costs_the_optimum_unless_it_is_refused(
    name: str, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Begun anew, f_i counts twice: as it is, and by its gradient at the optimum, for good.

    The size is the docstrings': 1.1 off on this problem, whose clients start 3.8 off. A client that
    is refused leaves what it had put in, which at the optimum is right.
    """
    problems = quadratics(CLIENTS)
    best = optimum(problems)
    federation = Members(forgets=lambda number, client: number == 31 and client == 1)
    one = MAKE[name](federation, lost_state=policy)
    with caplog.at_level(logging.WARNING):
        found = train(one, federation, 60)
    if policy == "refuse":
        np.testing.assert_allclose(found, best, atol=1e-5)
    else:
        np.testing.assert_allclose(
            found, limit(problems, slope=problems[1].gradient(best)), atol=1e-5
        )
        assert round(float(np.abs(found - best).max()), 1) == 1.1
        assert "client 1 lost its state and is treated as new" in caplog.text
    assert round(float(np.abs(START - best).max()), 1) == 3.8


@pytest.mark.slow
def test_scaffolds_late_client_brings_the_optimum_and_one_that_left_its_last_c() -> None:
    problems = quadratics(CLIENTS)
    federation = Members(away=before_round(6, 3))
    found = train(scaffold_(federation), federation, 35)
    np.testing.assert_allclose(found, optimum(problems), atol=1e-7)
    federation = Members(away=from_round(4, 3))
    one = scaffold_(federation)
    found = train(one, federation, 35)
    left = federation.state_of(3, one.ledger.acked[3])["c"]
    np.testing.assert_allclose(found, limit(problems[:3], slope=left), atol=1e-7)


def test_scaffolds_c_is_over_m_clients() -> None:
    for told, m in ((0, 4), (3, 4), (7, 7)):
        federation = Members(away=from_round(3, 3))
        one = scaffold_(federation, num_clients=told)
        train(one, federation, 5)
        each = [federation.state_of(i, acked)["c"] for i, acked in one.ledger.acked.items()]
        np.testing.assert_allclose(
            one.vectors(one.state, one.make_round(1))["control"],
            np.sum(each, axis=0) / m,
            rtol=1e-10,
        )


@pytest.mark.parametrize("told", [0, 4])
@pytest.mark.slow
def test_fedpd_waits_for_those_it_was_told_of_and_comes_to_the_optimum_of_all(told: int) -> None:
    """A late client, one that lost its state: duals sum to 0 again after one exchange."""
    problems = quadratics(CLIENTS)
    federation = Members(
        away=before_round(5, 3), forgets=lambda number, client: number == 10 and client == 1
    )
    one = FedPD(
        eta=0.8,
        local=local(lr=0.3, epochs=6),
        num_clients=told,
        node_wait=0.01,
        fraction_evaluate=0.0,
        callbacks=[federation.watch],
    )
    result = one.start(federation, to_record(START), 45)
    np.testing.assert_allclose(to_vector(result.arrays), optimum(problems), atol=1e-6)
    assert one.state.communication_rounds == (45 - 4 if told else 45)
