"""APFL: FedAvg's global model, and mixtures that each client makes of it.

Mistakes these laws are written against: a local model that steps by the gradient at itself, or
without alpha's factor; an alpha that goes up the gradient or out of [0, 1]; a mixture with the
shares exchanged; a global model that feels either.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
from federations import drop
from laws import RATE, START, STEPS, local, quiet, train
from problems import Quadratic, grid, kept, quadratics

from clients import APFLClient
from fl_strategies import APFL, FedAvg, RoundInfo, apfl

strategy = partial(quiet, APFL)


@cache
def of_fedavg() -> np.ndarray:
    return train(quiet(FedAvg), grid(quadratics(3), fault=drop(0.3)), 6)


def stepped(
    q: Quadratic, v: np.ndarray, alpha: float, w: np.ndarray, adaptive: bool
) -> tuple[np.ndarray, float, np.ndarray]:
    """Return v, alpha and the mixture after a round from the model w."""
    for _ in range(STEPS):
        g = q.gradient(alpha * v + (1 - alpha) * w)
        v, w, slope = v - RATE * alpha * g, w - RATE * q.gradient(w), (v - w) @ g
        alpha = float(np.clip(alpha - RATE * slope, 0.0, 1.0)) if adaptive else alpha
    return v, alpha, alpha * v + (1 - alpha) * w


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("adaptive", [True, False])
def test_local_models_and_shares_are_those_of_the_equations(alpha: float, adaptive: bool) -> None:
    """And the global model is FedAvg's, also when replies are lost."""
    problems = quadratics(3)
    federation, seen = grid(problems, fault=drop(0.3)), list[RoundInfo]()
    one = strategy(alpha=alpha, adaptive=adaptive, callbacks=[seen.append])
    found = train(one, federation, 6)
    np.testing.assert_allclose(found, of_fedavg(), rtol=1e-13)
    models = [np.concatenate([np.ravel(a.numpy()) for a in i.arrays.values()]) for i in seen]
    shares = set()
    for client, (q, state) in enumerate(
        zip(problems, kept(federation, one.ledger.acked), strict=True)
    ):
        mine: tuple[np.ndarray, float, np.ndarray] | None = None
        for info, theta in zip(seen, [START, *models[:-1]], strict=True):
            if client in info.clients:
                v, share, _ = mine or (theta, alpha, theta)
                mine = stepped(q, v, share, theta, adaptive)
        assert mine is not None
        for name, expected in zip(("v", "alpha", "u"), mine, strict=True):
            np.testing.assert_allclose(state[name], expected, rtol=1e-11, err_msg=name)
        shares.add(float(state["alpha"]))
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert (shares != {alpha}) == (adaptive and alpha == 0.3)


def test_the_mixtures_are_measured_beside_the_global_model() -> None:
    problems, seen = quadratics(3), list[RoundInfo]()
    federation = grid(problems)
    one = strategy(fraction_evaluate=1.0, callbacks=[seen.append])
    train(one, federation, 3)
    states = kept(federation, one.ledger.acked)
    values = [q.value(state["u"]) for q, state in zip(problems, states, strict=True)]
    expected = np.average(values, weights=[q.n for q in problems])
    assert seen[-1].metrics["own-loss"] == pytest.approx(expected, rel=1e-12)


def test_a_share_goes_down_its_gradient() -> None:
    """By finite differences of f at the mixture."""
    (q,) = quadratics(1)
    v, w, alpha, h = START + 1.0, START, 0.4, 1e-6
    oracle = q.oracle()
    oracle.steps, oracle.lr = 1, 1e-4
    state = apfl.client_rule(apfl.State(v, alpha, v), w, oracle, adaptive=True).state
    slope = (
        (q.value(apfl.mixture(v, alpha + h, w)) - q.value(apfl.mixture(v, alpha - h, w))) / 2 / h
    )
    assert (alpha - state.alpha) / 1e-4 == pytest.approx(slope, rel=1e-6)


def test_each_step_counts_two_gradients() -> None:
    client = APFLClient(quadratics(1)[0].problem(), client_id=0)
    assert client.most_steps({"algorithm": "apfl", "epochs": 3, "batch-size": 0}) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 1.5}, "alpha must be .*1.*, got 1.5"),
        ({"local": local(momentum=0.5)}, "momentum .* got 0.5.*apfl takes plain gradient steps"),
    ],
)
def test_what_it_cannot_use_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        APFL(**options)  # type: ignore[arg-type]
