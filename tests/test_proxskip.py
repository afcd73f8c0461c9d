"""ProxSkip: its control variates, SCAFFOLD as its twin, the paper's program, its optimum.

Mistakes these laws are written against: (1) by the received model of a client that was away, by the
rate of another round, a lost reply whose control variate stays, steps of each client's own number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from federations import drop
from laws import RATE, START, local, quiet, train
from problems import (
    NODES,
    forget,
    grid,
    kept,
    optimum,
    quadratics,
    to_record,
    to_vector,
    used_states,
)

from clients.node.in_process import InProcessGrid
from fl_strategies import SCAFFOLD, ProxSkip
from fl_strategies.core.randomness import stream
from fl_strategies.parts import Adam

P = 0.25
strategy = partial(quiet, ProxSkip, p=P, local=local(epochs=1))


def drawn(rounds: int, p: float = P, seed: int = 0) -> list[int]:
    """Return K of each round."""
    return [int(stream(seed, "local-steps", t + 1).geometric(p)) for t in range(rounds)]


def finished(one: ProxSkip, federation: InProcessGrid) -> list[np.ndarray]:
    """Return each client's h after its last participation, by (1)."""
    found, models = [], one.state.models
    states = used_states(federation, one.ledger.acked)
    for fields, last in zip(states, one.ledger.acked.values(), strict=True):
        found.append(fields["h"] + P / fields["rate"] * (models[last] - fields["x"]))
    return found


@pytest.mark.parametrize("rate", [RATE, {1: RATE, 4: 0.03}], ids=["fixed", "scheduled"])
def test_the_control_variates_sum_to_0_also_when_replies_are_lost(rate: Any) -> None:
    federation = grid(quadratics(6), fault=drop(0.3))
    one = strategy(fraction_train=0.5, local={"solver": "gd", "lr": rate})
    train(one, federation, 20)
    variates = finished(one, federation)
    assert np.abs(variates).max() > 0.1
    np.testing.assert_allclose(np.sum(variates, axis=0), 0.0, atol=1e-11)


def test_it_computes_what_the_papers_program_does() -> None:
    """Algorithm 2, step by step: a coin after each step, all clients, x_i and h_i in lists."""
    problems, rounds = quadratics(4), 12
    x, h = [START] * 4, [0.0 * START] * 4
    coins = [k == last for last in drawn(rounds) for k in range(1, last + 1)]
    for communicates in coins:
        ahead = [x[i] - RATE * (q.gradient(x[i]) - h[i]) for i, q in enumerate(problems)]
        x = (
            [np.mean([a - RATE / P * v for a, v in zip(ahead, h, strict=True)], 0)] * 4
            if (communicates)
            else ahead
        )
        h = [v + P / RATE * (new - a) for v, new, a in zip(h, x, ahead, strict=True)]
    federation = grid(problems)
    one = strategy()
    np.testing.assert_allclose(train(one, federation, rounds), x[0], rtol=1e-12)
    np.testing.assert_allclose(finished(one, federation), h, rtol=1e-10, atol=1e-12)
    assert len({*drawn(rounds)}) > 3


def test_if_the_number_of_steps_were_always_1_over_p_it_would_be_scaffold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def steps(self: ProxSkip, state: Any, round: Any, client: int) -> dict[str, float]:
        return {"steps": 4, "lr": RATE}

    monkeypatch.setattr(ProxSkip, "client_config", steps)
    problems, other = quadratics(4), quiet(SCAFFOLD, local=local(epochs=4))
    found = train(strategy(), grid(problems), 9)
    np.testing.assert_allclose(found, train(other, grid(problems), 9), rtol=1e-11)


def test_with_p_1_it_is_gradient_descent_on_the_mean_loss() -> None:
    problems, w = quadratics(3), START
    for _ in range(7):
        w = w - RATE * np.mean([q.gradient(w) for q in problems], axis=0)
    np.testing.assert_allclose(train(strategy(p=1.0), grid(problems), 7), w, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_it_comes_to_the_optimum_with_some_of_the_clients_a_round(share: float) -> None:
    problems = quadratics(4)
    one, federation = strategy(fraction_train=share), grid(problems)
    np.testing.assert_allclose(train(one, federation, 250), optimum(problems), atol=1e-8)
    gradients = [q.gradient(optimum(problems)) for q in problems]
    states = kept(federation, one.ledger.acked)
    np.testing.assert_allclose([s["h"] for s in states], gradients, atol=1e-6)


def away(federation: InProcessGrid, one: ProxSkip, theta: np.ndarray, client: int) -> np.ndarray:
    """Return the model after a round from ``theta`` in which a client is not connected."""
    absent = federation.contexts.pop(NODES[client])
    result = one.start(federation, to_record(theta), 1)
    federation.contexts[NODES[client]] = absent
    return to_vector(result.arrays)


def test_a_client_that_lost_its_state_begins_with_none() -> None:
    federation = grid(quadratics(3))
    one = strategy(node_wait=0.01)
    theta = away(federation, one, train(one, federation, 3), 1)
    forget(federation, 1)
    one.start(federation, to_record(theta), 1)
    states = kept(federation, one.ledger.acked)
    assert {len(s["h"]) for s in states} == {5}
    assert [bool(np.any(s["h"])) for s in states].count(False) == 1


def test_a_run_that_resumes_with_another_model_keeps_the_sum() -> None:
    federation = grid(quadratics(3))
    one = strategy(node_wait=0.01)
    train(one, federation, 3)
    away(federation, one, START + 1.0, 2)
    result = one.start(federation, to_record(START - 2.0), 1)
    np.testing.assert_allclose(np.sum(finished(one, federation), axis=0), 0.0, atol=1e-11)
    models = [s["x"] for s in kept(federation, one.ledger.acked)]
    np.testing.assert_allclose(to_vector(result.arrays), np.mean(models, axis=0), rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local": {"epochs": 5}}, r"epochs must be 1, got 5: ProxSkip takes 1/p plain"),
        ({"local": {"steps": 5}}, r"steps must be 0, got 5"),
        ({"local": {"momentum": 0.5}}, r"momentum must be 0.0, got 0.5"),
        ({"p": 0.0}, "p must be > 0 and <= 1, got 0"),
        ({"server_step": Adam()}, "computes each next model from what the server keeps"),
    ],
)
def test_what_it_cannot_use_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProxSkip(**settings)
