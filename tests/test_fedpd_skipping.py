"""FedPD and FedPDVR: exchanges that are skipped cost no message and change no round."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import Result
from laws import START, train
from pd import SETTINGS, both, same, states, strategy
from problems import CLIENT_OF, grid, quadratics, to_record, to_vector

from fl_strategies import skipping
from fl_strategies.core.randomness import stream


class OneMessageARound(skipping.SkippingStrategy):
    """Sends each client its own x0 in every algorithm round, and averages when the coin says so."""

    averages = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.own = dict[int, ArrayRecord]()

    def next_rounds(self, state: skipping.ServerState) -> range:
        return range(state.done, state.done + 1)

    def communication_rounds(self, state: Any, num_rounds: int) -> int:
        return num_rounds

    def send(self, *args: Any) -> Any:
        asked = super().send(*args)
        for message in asked.messages:
            client = CLIENT_OF[message.metadata.dst_node_id]
            if client in self.own:
                message.content["arrays"] = self.own[client]
        return asked

    def aggregate(self, state: skipping.ServerState, round: Any, uploads: Any) -> Any:
        mean, after, info = super().aggregate(state, round, uploads)
        if skipping.communicates_after(state.done, p=self.p, seed=self.seed):
            self.own = {}
            return mean, after, info
        self.own = {upload.client: to_record(upload.vector) for upload in uploads}
        return round.theta, after, info


@both
def test_skipped_rounds_inside_one_message_are_those_of_one_message_each(name: str) -> None:
    problems = quadratics(3)
    one, federation = strategy(name, p=0.6, seed=3), grid(problems)
    model = train(one, federation, 12)
    done = one.state.done
    assert one.state.communication_rounds < done - 2
    split = type("Split", (OneMessageARound, type(one)), {})
    options = {"eta": 0.5, "fraction_evaluate": 0.0, **SETTINGS[name]}
    twin, apart = split(p=0.6, seed=3, **options), grid(problems)
    np.testing.assert_array_equal(train(twin, apart, done), model)
    same(states(federation, one.ledger.acked), states(apart, twin.ledger.acked))


@functools.cache
def twenty_rounds() -> tuple[Result, list[int]]:
    """Return a run of as many, and of each message to a client its number of rounds."""
    asked: list[int] = []

    def count(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            asked.append(int(request.content.config_records["config"]["algorithm-rounds"]))
        return reply

    one = strategy(p=0.5, seed=1)
    return one.start(grid(quadratics(3), fault=count), to_record(START), 20), asked


def test_skipped_rounds_cost_no_message_and_are_reported() -> None:
    rounds, (result, asked) = 20, twenty_rounds()
    coins = [stream(1, "coin", r).random() >= 0.5 for r in range(rounds)]
    last = max(np.flatnonzero(coins)) + 1
    assert not coins[-1]  # so that there are rounds after the last exchange
    assert len(asked) == 3 * sum(coins)
    assert sum(asked) == 3 * last
    metrics = result.train_metrics_clientapp
    assert list(metrics) == list(range(1, sum(coins) + 1))
    final = metrics[sum(coins)]
    assert final["communication-rounds"] == sum(coins)
    assert final["algorithm-round"] == last
    saved = sum(float(record["bytes-saved"]) for record in metrics.values())  # type: ignore[arg-type]
    model = sum(len(array.data) for array in to_record(START).values())
    assert saved == 2 * 3 * model * (last - sum(coins))


def test_about_one_minus_p_of_the_rounds_exchange() -> None:
    for p in (0.0, 0.25, 0.9):
        share = np.mean([skipping.communicates_after(r, p=p, seed=5) for r in range(4000)])
        assert abs(share - (1 - p)) <= 4 * np.sqrt(p * (1 - p) / 4000)


def test_the_coins_follow_the_seed() -> None:
    def coins(seed: int) -> list[bool]:
        return [skipping.communicates_after(r, p=0.5, seed=seed) for r in range(40)]

    assert coins(1) == coins(1) != coins(2)


def test_starts_of_one_round_each_come_to_every_exchange() -> None:
    problems, short, whole = quadratics(3), strategy(p=0.5), strategy(p=0.5)
    federation, arrays = grid(problems), to_record(START)
    for _ in range(12):
        arrays = short.start(federation, arrays, 1).arrays
    np.testing.assert_array_equal(to_vector(arrays), train(whole, grid(problems), 12))
    assert short.state.communication_rounds == whole.state.communication_rounds > 3


def test_a_second_start_goes_on_with_the_rounds_that_were_left() -> None:
    in_two, federation = strategy(p=0.5, seed=1), grid(quadratics(3))
    half = in_two.start(federation, to_record(START), 7).arrays
    found = in_two.start(federation, half, 13).arrays
    at_once, _ = twenty_rounds()
    np.testing.assert_array_equal(to_vector(found), to_vector(at_once.arrays))


def test_a_run_without_any_exchange_leaves_the_model_as_it_was_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seed = next(s for s in range(99) if not skipping.communicates_after(0, p=0.9, seed=s))
    np.testing.assert_array_equal(train(strategy(p=0.9, seed=seed), grid(quadratics(2)), 1), START)
    assert "none of 1 rounds communicates: the model stays as it is" in caplog.text
