"""Flower's wrappers and mods for differential privacy clip and add noise as their papers say."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Error, Message
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)
from laws import START, TABLE, Row, local, train
from problems import NODES, grid, to_record, to_vector
from wrapped import (
    OF_MODELS,
    PROBLEMS,
    QUIET,
    Side,
    both_sides,
    legacy_run,
    legacy_sides,
    rows,
    server_side,
)

from fl_strategies import FedAvg, FederatedStrategy, FedProx

SIZES = np.array([q.n for q in PROBLEMS])
BY_SIZE = SIZES / SIZES.sum()


def update(i: int, theta: np.ndarray, mu: float = 0.0) -> np.ndarray:
    """What client i's model has moved by after its steps."""
    w = theta
    for _ in range(4):
        w = w - 0.1 * (PROBLEMS[i].gradient(w) + mu * (w - theta))
    return w - theta


def clip(v: np.ndarray, bound: float) -> np.ndarray:
    return v * min(1.0, bound / np.linalg.norm(v))


def same_noise(seed: int) -> np.random.RandomState:
    """Seed the global generator, which Flower draws noise from, and return its twin."""
    np.random.seed(seed)  # noqa: NPY002
    return np.random.RandomState(seed)


def noise(rng: np.random.RandomState, deviation: float) -> np.ndarray:
    """One draw as Flower makes it, array by array."""
    return deviation * np.concatenate([rng.normal(size=4), rng.normal(size=1)])


@functools.cache
def alone(name: str) -> np.ndarray:
    """Return the model of three rounds of the algorithm without any privacy."""
    (row,) = (row for row in TABLE if row.name == name)
    return train(row.strategy(local=local(), fraction_evaluate=1.0), grid(PROBLEMS), 3)


# ---- central differential privacy, fixed clipping ------------------------------------------------


@both_sides
@rows(OF_MODELS)
@pytest.mark.sampled
def test_a_bound_that_nothing_reaches_leaves_the_run_as_it_is(side: Side, row: Row) -> None:
    wrapper, mods = side(row.strategy(local=local(), fraction_evaluate=1.0), 0.0, 1e6)
    result = wrapper.start(grid(PROBLEMS, mods=mods), to_record(START), 3)
    np.testing.assert_allclose(to_vector(result.arrays), alone(row.name), rtol=1e-12)
    evaluations = result.evaluate_metrics_clientapp.values()  # which mods leave alone
    assert [metrics["eval-clients-used"] for metrics in evaluations] == [3, 3, 3]


@both_sides
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_clipping_and_noise_are_those_of_the_papers(side: Side, mu: float) -> None:
    bound, multiplier = 0.7, 1.5
    strategy = FedProx(mu=mu, weights="uniform", **QUIET)
    wrapper, mods = side(strategy, multiplier, bound)
    rng = same_noise(7)
    result = wrapper.start(grid(PROBLEMS, mods=mods), to_record(START), 3)
    theta = START
    for _ in range(3):
        updates = [update(i, theta, mu) for i in range(3)]
        assert min(np.linalg.norm(u) for u in updates) > bound  # all are clipped
        mean = sum(clip(u, bound) for u in updates) / 3
        theta = theta + mean + noise(rng, multiplier * bound / 3)
    np.testing.assert_allclose(to_vector(result.arrays), theta, rtol=1e-9)


@both_sides
def test_one_client_moves_the_model_by_the_bound(side: Side) -> None:
    wrapper, mods = side(FedAvg(**QUIET), 0.0, 0.25)
    result = wrapper.start(grid(PROBLEMS[:1], mods=mods), to_record(START), 1)
    moved = to_vector(result.arrays) - START
    assert np.linalg.norm(moved) == pytest.approx(0.25, rel=1e-12)


def test_weights_that_differ_are_named_as_the_noise_counts_on_equal_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def words(strategy: FederatedStrategy, wrapped: bool = True) -> str:
        caplog.clear()
        runs = server_side(strategy, 0.0, 1.0)[0] if wrapped else strategy
        runs.start(grid(PROBLEMS), to_record(START), 1)
        return caplog.text

    low, high = BY_SIZE.min(), BY_SIZE.max()
    assert f"weights from {low:.3g} to {high:.3g}, where a wrapper's" in words(FedAvg(**QUIET))
    assert "weights from" not in words(FedAvg(weights="uniform", **QUIET))
    assert "weights from" not in words(FedAvg(**QUIET), wrapped=False)


def test_a_wrapper_started_again_goes_on_counting_rounds() -> None:
    options = {**QUIET, "fraction_train": 0.34}
    seen: list[tuple[int, int]] = []

    def watch(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            config = request.content.config_records["config"]
            seen.append((int(config["server-round"]), request.metadata.dst_node_id))
        return reply

    strategy = FedAvg(seed=1, **options)
    wrapper, on = server_side(strategy, 0.0, 1e6)[0], grid(PROBLEMS, fault=watch)
    for _ in range(2):
        wrapper.start(on, to_record(START), 3)
    again, seen = seen, []
    FedAvg(seed=1, **options).start(grid(PROBLEMS, fault=watch), to_record(START), 6)
    assert [number for number, _ in again] == [1, 2, 3, 4, 5, 6]
    assert again == seen


MOON = next(row for row in TABLE if row.name == "moon")
IN_BATCHES: dict[str, Any] = {"local": local(solver="sgd", **{"batch-size": 4})}


@functools.cache
def moon_without_round_2() -> np.ndarray:
    """Return MOON's model after four rounds, of the second of which all replies are lost."""

    def silent_in_round_2(request: Message, reply: Message) -> Message | None:
        config = request.content.config_records.get("config", {})
        lost = request.metadata.message_type == "train" and config.get("server-round") == 2
        return None if lost else reply

    return train(MOON.strategy(**IN_BATCHES), grid(PROBLEMS, fault=silent_in_round_2), 4)


@pytest.mark.parametrize("unusable", [False, True])
def test_a_failed_client_costs_the_round_and_no_state(unusable: bool) -> None:
    """Noise is made for all replies. A wrapper itself drops a round with an error."""

    def fails_in_round_2(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("config", {})
        train_2 = request.metadata.message_type == "train" and config.get("server-round") == 2
        if not (train_2 and request.metadata.dst_node_id == NODES[0]):
            return reply
        if not unusable:
            return Message(Error(2, "out of memory"), reply_to=request)
        reply.content.metric_records["metrics"]["num-examples"] = 0
        return reply

    wrapper, _ = server_side(MOON.strategy(**IN_BATCHES), 0.0, 1e6)
    found = wrapper.start(grid(PROBLEMS, fault=fails_in_round_2), to_record(START), 4)
    np.testing.assert_allclose(to_vector(found.arrays), moon_without_round_2(), rtol=1e-12)


# ---- adaptive clipping ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "mods"),
    [
        (DifferentialPrivacyServerSideAdaptiveClipping, []),
        (DifferentialPrivacyClientSideAdaptiveClipping, [adaptiveclipping_mod]),
    ],
    ids=["server", "client"],
)
@pytest.mark.parametrize("multiplier", [0.0, 0.5])
def test_adaptive_clipping_moves_its_bound_by_the_share_of_clipped_updates(
    wrapper: Any, mods: list[Any], multiplier: float
) -> None:
    """As Flower has it: the updates above the bound count, and noise goes by the next bound.

    Andrew et al. count those below it, and scale noise by the bound that clipped.
    """
    bound, rate, quantile, theta = 3.8, 0.3, 0.2, START
    count_deviation = 0.8 if multiplier else 0.0
    on_models = (multiplier**-2 - (2 * count_deviation) ** -2) ** -0.5 if multiplier else 0.0
    around = wrapper(
        FedAvg(weights="uniform", local=local()),
        multiplier,
        3,
        bound,
        quantile,
        rate,
        count_deviation,
    )
    rng, shares = same_noise(5), []
    result = around.start(grid(PROBLEMS, mods=mods), to_record(START), 4)
    for _ in range(4):
        updates = [update(i, theta) for i in range(3)]
        theta = theta + np.mean([clip(u, bound) for u in updates], axis=0)
        shares.append(sum(np.linalg.norm(u) > bound for u in updates) / 3)
        counted = shares[-1] + rng.normal(0.0, count_deviation) / 3
        bound *= np.exp(-rate * (counted - quantile))
        theta = theta + noise(rng, on_models * bound / 3)
    assert result.evaluate_metrics_clientapp[4]["eval-clients-used"] == 3
    assert len(set(shares)) > 1  # the bound moves by different steps
    assert around.clipping_norm == pytest.approx(bound, rel=1e-12)
    np.testing.assert_allclose(to_vector(result.arrays), theta, rtol=1e-9)


# ---- local differential privacy ------------------------------------------------------------------


@pytest.mark.parametrize("sensitivity", [0.0, 0.5])
def test_local_privacy_clips_and_adds_noise_at_each_client(sensitivity: float) -> None:
    epsilon, delta, bound = 2.0, 1e-3, 0.7
    mod = LocalDpMod(bound, sensitivity, epsilon, delta)
    strategy = FedAvg(local=local())
    rng = same_noise(11)
    result = strategy.start(grid(PROBLEMS, mods=[mod]), to_record(START), 2)
    deviation = sensitivity * np.sqrt(2 * np.log(1.25 / delta)) / epsilon
    theta = START
    for _ in range(2):
        replies = [clip(update(i, theta), bound) + noise(rng, deviation) for i in range(3)]
        theta = theta + BY_SIZE @ replies
    np.testing.assert_allclose(to_vector(result.arrays), theta, rtol=1e-9)
    assert result.evaluate_metrics_clientapp[2]["eval-clients-used"] == 3


@rows({"fedprox", "ditto", "fedpd"})
def test_local_privacy_that_does_nothing_changes_nothing(row: Row) -> None:
    mods = [LocalDpMod(1e6, 0.0, 1.0, 0.1)]
    found = train(row.strategy(local=local()), grid(PROBLEMS, mods=mods), 3)
    np.testing.assert_allclose(found, alone(row.name), rtol=1e-12)


# ---- legacy wrappers -----------------------------------------------------------------------------


@legacy_sides
@pytest.mark.parametrize("own_evaluation", [False, True])
def test_noise_of_a_legacy_wrapper_stays_in_the_model(
    wrapper: Any, mods: list[Any], own_evaluation: bool
) -> None:
    class Around(wrapper):  # type: ignore[misc]
        def evaluate(self, server_round: int, parameters: Any) -> Any:
            return None if own_evaluation else super().evaluate(server_round, parameters)

    evaluated = [START]

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        evaluated.append(to_vector(arrays))

    rng = same_noise(7)
    strategy = FedAvg(weights="uniform", min_available_nodes=3, local=local())
    found = legacy_run(
        strategy, lambda adapter: Around(adapter, 1.5, 0.7, 3), 3, evaluate, mods=mods
    )
    np.testing.assert_array_equal(evaluated[-1], START if own_evaluation else found)
    theta = START
    for _ in range(3):
        mean = sum(clip(update(i, theta), 0.7) for i in range(3)) / 3
        theta = theta + mean + noise(rng, 1.5 * 0.7 / 3)
    np.testing.assert_allclose(found, theta, rtol=1e-9)
    assert strategy.result.evaluate_metrics_clientapp[3]["eval-clients-used"] == 3
