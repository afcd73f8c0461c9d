"""FedAMP: each client's own model, and the cloud model that pulls it.

Mistakes these laws are written against: a client that gets another's cloud model; a pull towards
the mean of all; models of absent clients that are lost; weights above 1; a pull without 1/alpha.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from federations import drop
from laws import START, local, quiet, train
from limits import attended
from problems import Linear, Quadratic, grid, kept, make_client_app, quadratics

from clients import Border
from clients.node.in_process import InProcessGrid
from fl_strategies import FedAMP, RoundInfo, fedamp
from fl_strategies.core.records import Round
from fl_strategies.core.vectors import Vector

SETTINGS = {"lam": 0.5, "alpha": 0.8, "sigma": 30.0}
strategy = partial(quiet, FedAMP, **SETTINGS)


@pytest.mark.parametrize("hosts", [None, 1])
def test_models_are_those_of_the_equations_whoever_takes_part(hosts: int | None) -> None:
    """Lost replies leave a client's model on the server as it was. One host gets four vectors."""
    problems, seen = quadratics(4), list[RoundInfo]()
    app = make_client_app(problems, hosts=hosts and (lambda context: [0, 1, 2, 3]))
    federation = InProcessGrid(app, hosts or 4, fault=None if hosts else drop(0.3))
    one = strategy(callbacks=[seen.append])
    train(one, federation, 6)
    models: dict[int, np.ndarray] = {}
    theta = START
    for info in seen:
        there = {client: models.get(client, theta) for client in {*models, *info.clients}}
        known = {client: w for client, w in there.items() if client in models}
        fresh = {}
        for client in info.clients:
            mine = known if client in known else {client: theta}
            order = sorted(mine)
            of = [problems[other] for other in order]
            made = attended(of, [mine[other] for other in order], *SETTINGS.values())
            fresh[client] = made[order.index(client)]
        models |= fresh
        theta = np.mean([models[client] for client in sorted(models)], axis=0)
        found = np.concatenate([np.ravel(a.numpy()) for a in info.arrays.values()])
        np.testing.assert_allclose(found, theta, rtol=1e-11)
    for client, w in models.items():
        np.testing.assert_allclose(one.state.models[client], w, rtol=1e-11)
    if not hosts:
        for client, fields in enumerate(kept(federation, one.ledger.acked)):
            np.testing.assert_allclose(fields["w"], models[client], rtol=1e-11)


def at_rest(problems: list[Quadratic], *, lam: float, alpha: float, sigma: float) -> list[Vector]:
    """Return the models after many rounds of the two rules, with exact solves."""
    models = {client: START + client for client in range(len(problems))}
    for _ in range(400):
        clouds = [fedamp.server_rule(i, models, alpha=alpha, sigma=sigma) for i in models]
        for i, (q, u) in enumerate(zip(problems, clouds, strict=True)):
            state = fedamp.State(models[i])
            made = fedamp.client_rule(
                state, START, q.oracle(), for_client=u - START, lam=lam, alpha=alpha
            )
            models[i] = made.upload
    return [models[i] for i in sorted(models)]


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_at_rest_the_objective_with_attention_is_stationary(alpha: float) -> None:
    """Its gradient is 0 whatever alpha is, by finite differences of the objective."""
    problems, lam, sigma, h = quadratics(3), 0.7, 40.0, 1e-5
    models = at_rest(problems, lam=lam, alpha=alpha, sigma=sigma)

    def objective(W: np.ndarray) -> float:
        near = sum(
            1 - np.exp(-((W[i] - W[j]) ** 2).sum() / sigma) for i in range(3) for j in range(i)
        )
        return sum(q.value(w) for q, w in zip(problems, W, strict=True)) + lam / 2 * float(near)

    W = np.array(models)
    for place in np.ndindex(*W.shape):
        step = np.zeros_like(W)
        step[place] = h
        assert abs(objective(W + step) - objective(W - step)) / 2 / h < 1e-7
    assert max(np.abs(w - q.b).max() for w, q in zip(W, problems, strict=True)) > 1e-2


def test_clients_of_alike_data_find_each_other() -> None:
    """Two groups of two, far apart: each cloud model is the mean of the other one of its group."""
    models = {i: START + 100.0 * (i % 2) + 0.01 * i for i in range(4)}
    for i in range(4):
        u = fedamp.server_rule(i, models, alpha=50.0, sigma=10.0)
        np.testing.assert_allclose(u, models[(i + 2) % 4], rtol=1e-12)


def test_a_client_that_nobody_is_near_stays_alone() -> None:
    models = {0: START, 1: START + 1e3}
    np.testing.assert_array_equal(fedamp.server_rule(0, models, alpha=1.0, sigma=1.0), START)


def test_a_client_adds_to_the_model_as_it_received_it() -> None:
    one, layout = strategy(), Border(Linear()).layout
    state = fedamp.ServerState({0: START, 1: START + 3.0})
    rounded = START + 0.01
    there = Round(theta=START + 1.0, rounded=rounded, layout=layout, population=2)
    vector = one.for_client(state, there, 1)
    assert vector is not None
    u = fedamp.server_rule(1, state.models, alpha=0.8, sigma=30.0)
    np.testing.assert_allclose(rounded + vector, u, rtol=1e-14)
    assert one.for_client(state, there, 2) is None  # a newcomer begins at the model received


def test_more_models_than_the_memory_takes_are_refused_before_anything_is_sent() -> None:
    """Four models of five doubles are 160 bytes."""
    with pytest.raises(ValueError, match="models of 4 clients take 0 MB, and the server keeps"):
        train(strategy(memory=1.5e-4), grid(quadratics(4)), 1)
    train(strategy(memory=1.6e-4, local=local()), grid(quadratics(4)), 1)
