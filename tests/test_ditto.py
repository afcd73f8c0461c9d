"""Ditto: the global model is FedAvg's, and how far the personalized ones are from it.

Mistakes these laws are written against: a personalized model that starts from the global one, or
that is uploaded; a pull towards the client's own model; a global model that feels lambda; running
statistics of the personalized model sent.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
from federations import drop
from laws import RATE, START, STEPS, local, quiet, train
from problems import Quadratic, grid, kept, quadratics

from clients.node.in_process import InProcessGrid
from fl_strategies import Ditto, FedAvg, RoundInfo

strategy = partial(quiet, Ditto, lam=0.5)


def own(one: Ditto, federation: InProcessGrid) -> list[np.ndarray]:
    return [fields["v"] for fields in kept(federation, one.ledger.acked)]


def descended(q: Quadratic, v: np.ndarray, theta: np.ndarray, lam: float) -> np.ndarray:
    for _ in range(STEPS):
        v = v - RATE * (q.gradient(v) + lam * (v - theta))
    return v


BATCHES = local(solver="sgd", lr=0.01, epochs=2, **{"batch-size": 3})


@cache
def of_fedavg(weights: str) -> np.ndarray:
    """Return FedAvg's model after three rounds, computed once."""
    plain = FedAvg(weights=weights, fraction_evaluate=0.0, local=BATCHES)  # type: ignore[arg-type]
    return train(plain, grid(quadratics(4)), 3)


@pytest.mark.parametrize("lam", [0.0, 0.5, 50.0])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_the_global_model_is_fedavgs_whatever_lambda(lam: float, weights: str) -> None:
    one = strategy(lam=lam, weights=weights, local=BATCHES)
    found = train(one, grid(quadratics(4)), 3)
    np.testing.assert_array_equal(found, of_fedavg(weights))


def test_personalized_models_go_on_from_their_own_towards_the_global_one() -> None:
    problems = quadratics(3)
    federation, seen = grid(problems, fault=drop(0.3)), list[RoundInfo]()
    one = strategy(callbacks=[seen.append])
    sent = [START]
    train(one, federation, 6)
    models = [np.concatenate([np.ravel(a.numpy()) for a in i.arrays.values()]) for i in seen]
    for client, (q, found) in enumerate(zip(problems, own(one, federation), strict=True)):
        v = None
        for info, theta in zip(seen, sent + models[:-1], strict=True):
            if client in info.clients:
                v = descended(q, theta if v is None else v, theta, 0.5)
        np.testing.assert_allclose(found, v, rtol=1e-11)


def test_without_a_pull_a_client_trains_alone_and_with_a_strong_one_it_is_at_the_model() -> None:
    problems = quadratics(3)
    alone, tied = grid(problems), grid(problems)
    one = strategy(lam=0.0, local=local(lr=3 * RATE))
    train(one, alone, 20)
    for q, v in zip(problems, own(one, alone), strict=True):
        np.testing.assert_allclose(v, q.b, atol=1e-3)
    lam = 1e6
    settings = local(lr=1.0 / lam, epochs=3)
    other = strategy(lam=lam, local=settings)
    theta = train(other, tied, 3)
    for v in own(other, tied):
        np.testing.assert_allclose(v, theta, atol=1e-4)


def test_the_models_are_measured_beside_the_global_one() -> None:
    problems, seen = quadratics(3), list[RoundInfo]()
    federation = grid(problems)
    one = strategy(fraction_evaluate=1.0, callbacks=[seen.append])
    train(one, federation, 3)
    values = [q.value(v) for q, v in zip(problems, own(one, federation), strict=True)]
    expected = np.average(values, weights=[q.n for q in problems])
    assert seen[-1].metrics["own-loss"] == pytest.approx(expected, rel=1e-12)


def test_a_pull_out_of_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="lam must be >= 0, got -1"):
        Ditto(lam=-1.0)
