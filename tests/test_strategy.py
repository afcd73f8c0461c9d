"""The base of all strategies: which replies count, who is asked, and what a round reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from laws import START, local, train
from problems import CLIENT_OF, NODES, grid, make_client_app, quadratics, to_record, to_vector
from tampering import put, tampered

from clients.node.in_process import InProcessGrid
from fl_strategies import (
    FedADMM,
    FedAvg,
    FedBC,
    FederatedStrategy,
    FedProx,
    RoundInfo,
)
from fl_strategies.core.reasons import brief
from fl_strategies.server.nodes import Nodes


def averaging(**options: Any) -> FedAvg:
    return FedAvg(**{"fraction_evaluate": 0.0, "local": local(), **options})


def test_an_answer_of_a_stranger_and_a_second_answer_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Crowded(InProcessGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: Any = None) -> Any:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if replies and replies[0].metadata.message_type == "train":
                replies.append(replies[0])
                stranger = Message(replies[0].content, 1, "train")
                replies.append(stranger)
            return replies

    problems = quadratics(2)
    found = train(averaging(), Crowded(make_client_app(problems), 2), 1)
    assert "reply of client 0 left out: it answered before in this round" in caplog.text
    assert "left out: node 1 was not asked" in caplog.text
    np.testing.assert_array_equal(found, train(averaging(), grid(problems), 1))


def test_a_round_below_min_replies_is_void_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    problems = quadratics(3)
    one = averaging(min_replies=3)
    result = one.start(tampered(problems, 1, put("tail", np.array([np.nan]))), to_record(START), 2)
    np.testing.assert_array_equal(to_vector(result.arrays), START)
    assert "round 1 is skipped: 2 usable replies, at least 3 needed" in caplog.text
    assert one.ledger.acked == {}


def test_a_reply_so_large_that_the_sum_overflows_makes_the_round_void(
    caplog: pytest.LogCaptureFixture,
) -> None:
    huge = put("tail", np.array([1.7e308]))
    result = averaging().start(tampered(quadratics(2), 1, huge), to_record(START), 1)
    assert np.isfinite(to_vector(result.arrays)).all()


def test_sampling_is_by_fraction_never_below_the_minimum_and_differs_by_round() -> None:
    seen: list[list[int]] = []

    class Listening(InProcessGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: Any = None) -> Any:
            messages = list(messages)
            if messages and messages[0].metadata.message_type == "train":
                seen.append([CLIENT_OF[m.metadata.dst_node_id] for m in messages])
            return super().send_and_receive(messages, timeout=timeout)

    app = make_client_app(quadratics(100))
    train(averaging(fraction_train=0.29), Listening(app, 100), 2)
    assert [len(clients) for clients in seen] == [29, 29]
    assert seen[0] != seen[1]
    assert all(clients == sorted(set(clients)) for clients in seen)
    seen.clear()
    train(averaging(fraction_train=0.01, min_train_nodes=7), Listening(app, 100), 1)
    assert len(seen[0]) == 7


def test_the_first_round_waits_for_the_nodes_that_the_others_know_of() -> None:
    class Slow(InProcessGrid):
        looks = 0

        def get_node_ids(self) -> list[int]:
            self.looks += 1
            return list(super().get_node_ids())[: self.looks]

    result = averaging().start(Slow(make_client_app(quadratics(4)), 4), to_record(START), 1)
    assert result.train_metrics_clientapp[1]["clients-asked"] == 4


def test_a_node_that_comes_back_under_a_new_id_is_the_same_client() -> None:
    problems = quadratics(3)
    restarted, usual = grid(problems), grid(problems)
    one, other = FedADMM(rho=0.5, local=local()), FedADMM(rho=0.5, local=local())
    theta, expected = train(one, restarted, 2), train(other, usual, 2)
    restarted.contexts[9999] = restarted.contexts.pop(NODES[1])
    after = one.start(restarted, to_record(theta), 1).arrays
    np.testing.assert_array_equal(
        to_vector(after), to_vector(other.start(usual, to_record(expected), 1).arrays)
    )
    assert one.population == 3


def test_a_connected_clients_id_is_not_taken_over_before_its_node_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    federation, nodes = grid(quadratics(3)), Nodes(5.0)
    of_client = {0: NODES[0], 1: NODES[1], 2: NODES[2]}
    assert nodes.connected(federation) == of_client
    again = federation.contexts[9999] = federation.contexts[NODES[1]]
    for _ in range(3):
        assert nodes.connected(federation) == of_client
    node = brief(NODES[1])
    said = f"node 9999 calls itself client 1, which is node {node} as long as that is connected"
    assert caplog.text.count(said) == 1
    del federation.contexts[9999]
    assert nodes.connected(federation) == of_client
    federation.contexts[9999] = again
    assert nodes.connected(federation) == of_client
    del federation.contexts[NODES[1]]
    assert nodes.connected(federation) == of_client | {1: 9999}
    assert "client 1 is now node 9999" in caplog.text
    assert nodes.known == {0, 1, 2}


def test_a_query_that_fails_once_does_not_change_who_a_client_is() -> None:
    failed: set[int] = set()

    def fault(request: Message, reply: Message) -> Message:
        node = request.metadata.dst_node_id
        if request.metadata.message_type == "query" and node not in failed:
            failed.add(node)
            return Message(Error(2, "starting up"), reply_to=request)
        return reply

    one = averaging()
    train(one, grid(quadratics(3), fault=fault), 1)
    assert one.nodes.known == {0, 1, 2}


def test_an_app_without_queries_is_known_by_its_node_ids() -> None:
    def fault(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "query":
            return Message(Error(2, "no query function"), reply_to=request)
        return reply

    one = averaging()
    train(one, grid(quadratics(2), fault=fault), 1)
    assert one.nodes.known == {NODES[0], NODES[1]}


def test_metrics_hold_the_mean_by_examples_and_the_spread_over_clients() -> None:
    problems = quadratics(3)
    result = averaging(local=local(epochs=1)).start(grid(problems), to_record(START), 1)
    losses = np.array([q.value(START) for q in problems])
    metrics = result.train_metrics_clientapp[1]
    expected = {
        "train-loss": np.average(losses, weights=[q.n for q in problems]),
        "train-loss-mean": losses.mean(),
        "train-loss-variance": losses.var(),
        "train-loss-min": losses.min(),
        "train-loss-max": losses.max(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    size = sum(len(array.data) for array in to_record(START).values())
    assert (metrics["bytes-down"], metrics["bytes-up"]) == (3 * size, 3 * size)


def test_a_flower_metrics_function_is_used_where_one_is_given() -> None:
    def largest(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        return MetricRecord({"largest": max(c["metrics"][weighted_by] for c in contents)})

    result = averaging(train_metrics_aggr_fn=largest).start(
        grid(quadratics(3)), to_record(START), 1
    )
    assert result.train_metrics_clientapp[1]["largest"] == 11


def test_callbacks_see_every_round_and_may_end_the_run() -> None:
    seen: list[RoundInfo] = []

    def stop_at_two(info: RoundInfo) -> bool:
        return info.server_round == 2

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"test-loss": float(np.abs(to_vector(arrays)).sum())})

    strategy = averaging(callbacks=[stop_at_two, seen.append], fraction_evaluate=1.0)
    result = strategy.start(grid(quadratics(2)), to_record(START), 9, evaluate_fn=evaluate)
    assert [info.server_round for info in seen] == [1, 2]
    assert to_vector(seen[-1].arrays).tolist() == to_vector(result.arrays).tolist()
    assert {"train-loss", "eval-loss", "test-loss", "clients-used"} <= seen[0].metrics.keys()
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2]


def test_local_settings_may_follow_a_schedule() -> None:
    problems = quadratics(2)
    scheduled = averaging(local=local(lr={1: 0.1, 2: 0.02}))
    by_hand = train(averaging(local=local(lr=0.1)), grid(problems), 1)
    by_hand = to_vector(
        averaging(local=local(lr=0.02)).start(grid(problems), to_record(by_hand), 1).arrays
    )
    np.testing.assert_array_equal(train(scheduled, grid(problems), 2), by_hand)


@pytest.mark.parametrize(
    ("arrays", "buffers", "message"),
    [
        ({"n": np.arange(3)}, (), "array 'n' has type int64: only floating-point"),
        ({"w": np.ones(2)}, ("v",), r"buffers \['v'\] are not among the model's arrays \['w'\]"),
        ({"w": np.ones(2)}, ("w",), "the model has no trainable array"),
        ({"w": np.array([1.0, np.nan])}, (), "array 'w' of the initial model is not finite"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    arrays: dict[str, np.ndarray], buffers: tuple[str, ...], message: str
) -> None:
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    with pytest.raises(ValueError, match=message):
        averaging(buffers=buffers, ties=(), frozen={}).start(grid(quadratics(1)), record, 1)


@pytest.mark.parametrize(
    ("one", "name"), [(FedAvg(), "seed"), (FedBC(), "lambda-max"), (FedProx(), "proximal-mu")]
)
def test_a_config_may_not_set_what_the_strategy_sends(one: FederatedStrategy, name: str) -> None:
    """Also what it leaves absent."""
    config = ConfigRecord({name: 3})
    with pytest.raises(ValueError, match=rf"train_config must not set \['{name}'\]"):
        one.start(grid(quadratics(1)), to_record(START), 1, train_config=config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction_train": 1.5}, "fraction_train must be > 0 and <= 1, got 1.5"),
        ({"fraction_evaluate": -0.1}, "fraction_evaluate must be >= 0 and <= 1, got -0.1"),
        ({"min_replies": 0}, "min_replies must be an integer >= 1, got 0"),
        ({"min_replies": {1: 3}}, "min_replies must be an integer >= 1, got"),
        ({"min_train_nodes": 2.5}, "min_train_nodes must be an integer >= 1, got 2.5"),
        ({"fraction_train": {1: 0.5}}, "fraction_train must be a finite number > 0 and <= 1, got"),
        (
            {"local": {"epoch": 3}},
            r"unknown local settings 'epoch' \(did you mean 'epochs'\?\); known: \['batch-size', ",
        ),
        ({"local": {"lr": {1: 0.1, 50: 0.0}}}, "lr must be > 0, got 0.0"),
        ({"seed": -1}, r"seed must be an integer >= 0 and <= 9.22337e\+18, got -1"),
        ({"seed": 1.5}, r"seed must be an integer >= 0 and <= 9.22337e\+18, got 1.5"),
        ({"lost_state": "ignore"}, "lost_state must be one of"),
        ({"weights": "size"}, r"weights must be one of \['samples', 'uniform'\], got 'size'"),
    ],
)
def test_bad_options_are_refused_with_bound_and_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FedAvg(**options)
