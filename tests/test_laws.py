"""Laws that every algorithm owes. laws.py says what is known of each."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SAMPLE
from flwr.app import Array, ArrayRecord
from laws import RATE, START, TABLE, Row, every_algorithm, local, train
from problems import (
    CLIENT_OF,
    NODES,
    Linear,
    Quadratic,
    grid,
    make_client_app,
    quadratics,
    to_record,
    to_vector,
)
from torch.nn.functional import cross_entropy

from clients import (
    CLIENTS,
    AnyAlgorithmClient,
    Border,
    ContextStore,
    FederatedClient,
    Problem,
    client_app,
    client_id,
)
from clients.node.in_process import InProcessGrid
from clients.personalized import PERSONALIZED
from fl_strategies import STRATEGIES, FederatedStrategy
from fl_strategies.testing import STRATEGY_LAWS, Finding, check_client, check_strategy
from simulations import models
from simulations.config import hyperparameter_defaults


def test_every_strategy_has_its_row() -> None:
    assert [row.name for row in TABLE] == list(STRATEGIES)


STIFF: dict[str, tuple[dict[str, Any], int]] = {"fedadmm": ({"rho": 2.0}, 75)}
"""Hyperparameters that suit the first law's curvatures better than the row's; rounds with them."""


@every_algorithm
@pytest.mark.sampled
def test_an_algorithm_converges_to_its_known_limit_and_stays_there(row: Row) -> None:
    # stiff ones, on which RATE comes further in a round
    problems = [Quadratic(np.sqrt(3) * q.X, np.sqrt(3) * q.y) for q in quadratics(3)]
    hyperparameters, rounds = STIFF.get(row.name, ({}, row.rounds))
    one, on = row.strategy(local=local(), **hyperparameters), grid(problems)
    found, limit = train(one, on, rounds), row.limit(problems)
    np.testing.assert_allclose(found, limit, atol=1e-9)
    once_more = one.start(on, to_record(limit), 1).arrays
    np.testing.assert_allclose(to_vector(once_more), limit, atol=1e-9)


def models_of(row: Row, rounds: int, **hyperparameters: Any) -> list[np.ndarray]:
    """Return the model that four clients begin with, and that after each round."""
    models: list[np.ndarray] = []
    row.strategy(local=local(), **hyperparameters).start(
        grid(quadratics(4)),
        to_record(START),
        rounds,
        evaluate_fn=lambda _, arrays: models.append(to_vector(arrays)),
    )
    return models


@cache
def usual_models(algorithm: str, rounds: int, **needs: Any) -> list[np.ndarray]:
    """Return what ``models_of`` returns, computed once."""
    return models_of(next(row for row in TABLE if row.name == algorithm), rounds, **needs)


@pytest.mark.parametrize(
    ("row", "name"), [(row, name) for row in TABLE for name in row.others], ids=str
)
@pytest.mark.sampled
def test_every_hyperparameter_matters(row: Row, name: str) -> None:
    needs = row.needs.get(name, {})
    usual = usual_models(row.name, 3, **needs)[-1]
    changed = models_of(row, 3, **needs | {name: row.others[name]})[-1]
    assert np.abs(usual - changed).max() > 1e-3


def scheduled(row: Row, name: str) -> bool:
    """Whether the hyperparameter may be {first round: number}, as it is declared."""
    return STRATEGIES[row.name].declarations[name].scheduled


@pytest.mark.parametrize(
    ("row", "name"),
    [(row, name) for row in TABLE for name in row.others if scheduled(row, name)],
    ids=str,
)
@pytest.mark.sampled
def test_a_scheduled_hyperparameter_has_its_next_value_from_that_round_on(
    row: Row, name: str
) -> None:
    needs = row.needs.get(name, {})
    usual = {**hyperparameter_defaults(row.name), **row.hyperparameters, **needs}[name]
    rounds = 3 + (name == "alpha_gamma")  # what it does to a dual, the next model shows
    constant = usual_models(row.name, rounds, **needs)
    changed = models_of(row, rounds, **needs | {name: {1: usual, 3: row.others[name]}})
    same = [np.array_equal(one, other) for one, other in zip(changed, constant, strict=True)]
    assert same == [True] * rounds + [False]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (row, name)
        for row in TABLE
        for name, value in row.others.items()
        if not scheduled(row, name) and type(value) in (int, float)
    ],
    ids=str,
)
def test_every_other_number_refuses_to_be_scheduled(row: Row, name: str) -> None:
    hyperparameters = row.needs.get(name, {}) | {name: {1: row.others[name]}}
    with pytest.raises(ValueError, match=f"{name} must be"):
        row.strategy(local=local(), **hyperparameters)


@every_algorithm
def test_every_hyperparameter_is_in_the_table(row: Row) -> None:
    assert set(hyperparameter_defaults(row.name)) == set(row.others) | row.policies


PROCEED = {"fedpd": {"missing": "proceed"}, "fedpd-vr": {"missing": "proceed"}}
"""These would stop for who is missing."""


REPEATED = [law for law in STRATEGY_LAWS if law.__name__ == "rounds_without_replies"]
"""These compare rounds that ask the same clients."""


@pytest.mark.parametrize(
    ("fraction", "laws"),
    [(0.6, [law for law in STRATEGY_LAWS if law not in REPEATED]), (1.0, REPEATED)],
    ids=["some-clients", "all-clients"],
)
@every_algorithm
@pytest.mark.sampled("fedadmm", "scaffold", "fedbc")
def test_an_algorithm_keeps_the_laws_of_every_strategy(
    row: Row, fraction: float, laws: list[Any]
) -> None:
    def make(**options: Any) -> FederatedStrategy:
        options |= PROCEED.get(row.name, {})
        return row.strategy(
            local=local(), fraction_train=fraction, fraction_evaluate=1.0, **options
        )

    app, initial = make_client_app(quadratics(4)), to_record(START)
    findings = check_strategy(make, app=app, initial=initial, clients=4, laws=laws)
    refuses = STRATEGIES[row.name].averages != "models" and fraction < 1.0
    assert not_applicable(findings) == ({"wrapper"} if refuses else set())


def not_applicable(findings: list[Finding]) -> set[str]:
    return {one.law for one in findings if one.outcome == "not applicable"}


@pytest.mark.sampled
@every_algorithm
def test_another_seed_changes_the_run(row: Row) -> None:
    def run(seed: int) -> np.ndarray:
        settings = local(solver="sgd", **{"batch-size": 3, "random-epochs": True})
        strategy = row.strategy(local=settings, fraction_train=0.5, seed=seed)
        return train(strategy, grid(quadratics(6)), 1)

    assert np.abs(run(1) - run(2)).max() > 1e-6


@every_algorithm
@pytest.mark.sampled("fedadmm")
def test_an_algorithms_client_keeps_the_laws_of_every_client(row: Row) -> None:
    """With mini-batches of random numbers, drawn by the client."""
    problems, model = quadratics(4), Border(Linear(), head="out")

    def make(context: Any) -> FederatedClient:
        me = client_id(context)
        problem = problems[me].problem(model)
        return CLIENTS[STRATEGIES[row.name].runs or row.name](
            problem, client_id=me, test=problem, store=ContextStore(context)
        )

    def strategy() -> FederatedStrategy:
        settings = local(solver="sgd", **{"batch-size": 3, "random-epochs": True})
        options = {"local": settings, "fraction_evaluate": 1.0}
        return row.strategy(**PROCEED.get(row.name, {}), **options)

    findings = check_client(make, strategy=strategy, clients=4)
    without = set() if row.name in PERSONALIZED else {"personalized_model"}
    assert not_applicable(findings) == without


@pytest.mark.sampled("fedadmm")
@every_algorithm
def test_a_single_client_goes_to_its_own_minimiser(row: Row) -> None:
    (q,) = quadratics(1)
    found = train(row.strategy(local=local(lr=3 * RATE)), grid([q]), 120)
    np.testing.assert_allclose(found, q.b, atol=1e-9)


@every_algorithm
def test_a_client_with_one_example_takes_part(row: Row) -> None:
    first, second = quadratics(2)
    one = Quadratic(first.X[:1], first.y[:1])
    strategy = row.strategy(local=local(solver="sgd"))
    found = train(strategy, grid([one, second]), 2)
    assert np.isfinite(found).all()
    assert np.abs(found - train(row.strategy(local=local()), grid([second]), 2)).max() > 1e-3
    assert strategy.ledger.acked.keys() == {0, 1}  # replies of both were used


SIZES = (9, 5)


@cache
def normalised() -> tuple[list[Problem], ArrayRecord]:
    """Return the problems of two clients whose models have batch norm, and the first model."""
    rng = np.random.default_rng(0)
    inputs = [torch.tensor(rng.normal(i, 1 + i, (n, 1, 4, 4))) for i, n in enumerate(SIZES)]
    targets = [torch.tensor(rng.integers(0, 3, n)) for n in SIZES]
    first, second = (Border(models.build("cnn-bn", (1, 4, 4), 3, seed=0).double()) for _ in SIZES)
    state = {n: Array(t.detach().numpy().copy()) for n, t in first.module.state_dict().items()}
    pairs = zip((first, second), inputs, targets, strict=True)
    return [Problem(model, cross_entropy, x, y) for model, x, y in pairs], ArrayRecord(state)


@every_algorithm
def test_a_model_with_batch_norm_trains_and_its_buffers_are_merged(row: Row) -> None:
    """Statistics by number of examples, the counter of batches by maximum."""
    problems, initial = normalised()
    buffers = problems[0].model.buffers

    def client_fn(context: Any) -> AnyAlgorithmClient:
        i = client_id(context)
        return AnyAlgorithmClient(problems[i], client_id=i, store=ContextStore(context))

    federation = InProcessGrid(client_app(client_fn), 2)
    # batches of 4: client 0 takes 3 a round (4 + 4 + 1), client 1 takes 2
    settings = {"batch-size": 4, "epochs": 1, "lr": 0.01}
    strategy = row.strategy(local=settings)
    result = strategy.start(federation, initial, 1).arrays
    counter = next(name for name in buffers if name.endswith("num_batches_tracked"))
    assert result[counter].numpy() == row.updates
    mean = next(name for name in buffers if name.endswith("running_mean"))

    def alone(i: int) -> InProcessGrid:
        on = InProcessGrid(client_app(client_fn), 1)
        for context in on.contexts.values():
            context.node_config["partition-id"] = i
        return on

    apart = [
        row.strategy(local=settings).start(alone(i), initial, 1).arrays[mean].numpy()
        for i in range(2)
    ]
    merged = (SIZES[0] * apart[0] + SIZES[1] * apart[1]) / sum(SIZES)
    np.testing.assert_allclose(result[mean].numpy(), merged, rtol=1e-12)
    assert all(np.isfinite(array.numpy()).all() for array in result.values())


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.name in {*SAMPLE, "fedamp"}], ids=lambda row: row.name
)
def test_clients_may_be_known_by_64_bit_node_ids(row: Row) -> None:
    """A SuperNode without ``partition-id`` is known by its node id, half of which pass 2^63.

    FedAMP's server keeps a model of each.
    """
    problems = quadratics(4)
    federation = grid(problems, place=lambda context: CLIENT_OF[context.node_id])
    for context in federation.contexts.values():
        context.node_config.clear()
    strategy = row.strategy(fraction_train=0.5, local=local(), seed=1)
    strategy.start(federation, to_record(START), 4)
    assert strategy.nodes.known == set(NODES[:4])
    assert {node >= 2**63 for node in NODES[:4]} == {True, False}
    # FedPD's rounds may be fewer messages
    for metrics in strategy.result.train_metrics_clientapp.values():
        assert metrics["clients-used"] == metrics["clients-asked"] > 0
