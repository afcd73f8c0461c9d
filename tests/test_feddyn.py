"""FedDyn: its invariant, what it has in common with FedADMM, its optimum.

Mistakes these laws are written against: h or the pull of another sign, h over |S| for m, a dual
step by another penalty than the pull, h of the round before in (4), a lost reply recorded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from federations import drop
from laws import START, local, quiet, train
from problems import NODES, grid, kept, optimum, quadratics, to_record, to_vector

from clients.node.in_process import InProcessGrid
from fl_strategies import FedADMM, FedDyn, feddyn

strategy = partial(quiet, FedDyn, alpha=0.5)


def duals(one: FedDyn, federation: InProcessGrid) -> list[np.ndarray]:
    return [fields["y"] for fields in kept(federation, one.ledger.acked)]


@pytest.mark.parametrize("alpha", [0.5, {1: 0.5, 4: 1.5}], ids=["fixed", "scheduled"])
def test_h_is_minus_the_mean_of_the_duals_also_when_replies_are_lost(alpha: Any) -> None:
    federation = grid(quadratics(6), fault=drop(0.3))
    one = strategy(alpha=alpha, fraction_train=0.5)
    train(one, federation, 20)
    np.testing.assert_allclose(one.state.duals, np.sum(duals(one, federation), axis=0), atol=1e-11)
    assert np.abs(one.state.duals).max() > 1e-2


def test_with_all_clients_it_is_fedadmm_that_starts_from_the_global_model() -> None:
    """After each round."""
    admm = FedADMM(rho=0.5, local_start="global", fraction_evaluate=0.0, local=local())

    def models(one: FedDyn | FedADMM) -> list[np.ndarray]:
        seen: list[np.ndarray] = []
        one.callbacks = (lambda info: seen.append(to_vector(info.arrays)),)
        train(one, grid(quadratics(5)), 8)
        return seen

    found = models(strategy())
    np.testing.assert_allclose(found, models(admm), rtol=1e-11)
    assert len(found) == 8


@pytest.mark.slow
def test_it_comes_to_the_optimum_with_half_of_the_clients_a_round() -> None:
    problems = quadratics(4)
    one = strategy(alpha=1.0, fraction_train=0.5, num_clients=4)
    np.testing.assert_allclose(train(one, grid(problems), 200), optimum(problems), atol=1e-6)


def test_a_client_that_joins_later_counts_in_m() -> None:
    federation = grid(quadratics(4))
    absent = federation.contexts.pop(NODES[3])
    one = strategy(node_wait=0.01)
    theta = train(one, federation, 3)
    before = one.state.duals
    federation.contexts[NODES[3]] = absent
    after = one.start(federation, to_record(theta), 1)
    moves = [fields["y"] for fields in kept(federation, one.ledger.acked)]
    np.testing.assert_allclose(one.state.duals, np.sum(moves, axis=0), atol=1e-12)
    mean_move = (one.state.duals - before) / 0.5 / 4
    expected = theta + mean_move + one.state.duals / (4 * 0.5)
    found = np.concatenate([np.ravel(a.numpy()) for a in after.arrays.values()])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_server_rule_is_the_papers_on_numbers() -> None:
    theta, h = np.array([1.0]), np.array([-0.3])  # of m = 4 clients, alpha = 0.5
    models = [np.array([2.0]), np.array([0.0])]
    h_new = h - 0.5 / 4 * sum(w - theta for w in models)
    expected = np.mean(models, axis=0) - h_new / 0.5
    moves = [w - theta for w in models]
    found, duals = feddyn.server_rule(theta, -4 * h, moves, alpha=0.5, clients=4)
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    np.testing.assert_allclose(duals, -4 * h_new, rtol=1e-14)


def test_a_penalty_out_of_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="alpha must be > 0, got 0"):
        FedDyn(alpha=0)


def test_the_start_is_not_its_end() -> None:
    assert np.abs(train(strategy(), grid(quadratics(3)), 1) - START).max() > 0.1
