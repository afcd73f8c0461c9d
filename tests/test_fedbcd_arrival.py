"""Async-cloud FedBCD by arrival: slow, late and lost devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from arrivals import Slow
from bcd import async_, devices, mixed_in, sum_of_last_models
from flwr.app import Error, Message
from laws import START, train
from problems import CLIENT_OF, NODES, grid, quadratics, to_record

from fl_strategies import FedBCDAsync, RoundInfo
from fl_strategies.server import phases


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "PAUSE", 0.0)


def test_unfinished_work_waits_for_devices_that_are_away_at_the_next_start() -> None:
    """And is then asked for with the round in which it was begun."""
    asked: list[tuple[int, int]] = []

    def note(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            config = request.content["config"]
            asked.append((CLIENT_OF[request.metadata.dst_node_id], config["server-round"]))
        return reply

    federation = grid(quadratics(4), fault=note)
    one = async_(servers=2, first=1, seed=1, node_wait=0.01)
    theta = train(one, federation, 3)
    ((cloud, (begun, clients, _)),) = one.state.unfinished.items()
    away = {NODES[client]: federation.contexts.pop(NODES[client]) for client in clients}
    one.callbacks = (lambda info: federation.contexts.update(away),)
    asked.clear()
    one.start(federation, to_record(theta), 3)
    assert cloud not in {one.state.cloud_of[client] for client, _ in asked[:2]}
    assert [pair for pair in asked if pair[0] in clients][:2] == [(c, begun) for c in clients]


def test_by_arrival_a_slow_cloud_server_is_not_waited_for_and_its_work_is_not_lost() -> None:
    mixes: list[list[int]] = []
    federation = Slow(6, {0: 3, 3: 3})  # both devices of cloud server 0 of 3
    one = async_(servers=3, first=1, order="arrival")
    one.callbacks = (lambda info: mixes.append(mixed_in(one, info)),)
    train(one, federation, 6)
    assert [0] in mixes
    assert mixes[0] != [0]
    first = mixes.index([0]) + 1  # its devices were asked in round 1 and used now
    asked = [t for t, client in federation.asked if client == 0]
    assert asked[:2] == [1, first + 1] if first < 6 else asked == [1]
    kept = devices(federation, one.ledger.acked)
    assert set(kept) >= {0, 3}
    total = sum(book.total for book in one.state.sums)
    np.testing.assert_allclose(
        total, sum_of_last_models(federation, one.ledger.acked, 6), rtol=1e-12
    )


def test_the_round_of_a_reply_used_late_is_that_of_its_request() -> None:
    federation = Slow(4, {0: 5, 2: 5})
    one = async_(servers=2, first=1, order="arrival", staleness=4)
    train(one, federation, 4)
    assert one.ledger.acked[0] == one.ledger.acked[2] == 1
    assert one.ledger.acked[1] > 1


def test_by_arrival_a_cloud_server_that_would_go_too_long_without_a_mix_is_waited_for() -> None:
    mixes: list[list[int]] = []
    federation = Slow(4, {0: 100, 2: 100})  # both devices of cloud server 0 of 2
    one = async_(servers=2, first=1, order="arrival", staleness=3)
    one.callbacks = (lambda info: mixes.append(mixed_in(one, info)),)
    train(one, federation, 6)
    assert mixes == [[1], [1], [0], [1], [1], [0]]


class Named(Slow):
    """Requests and replies have ids, as Flower's have."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message_id, message in zip(ids, messages, strict=True):
            message.metadata.__dict__["_message_id"] = message_id
            self._replies[message_id].metadata.__dict__["_reply_to_message_id"] = message_id
        return ids


def test_by_arrival_an_error_reply_too_late_for_its_phase_is_of_the_client_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Flower's word that a node is gone comes from no node, and names the request alone."""

    def broken(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train" and request.metadata.dst_node_id == NODES[2]:
            reply = Message(Error(3, "the node died"), reply_to=request)
            reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    federation = Named(4, {2: 10**9}, fault=broken)
    one = async_(order="arrival")

    def let_it_come(info: RoundInfo) -> None:
        federation.looks, federation.due = {}, {}

    one.callbacks = (let_it_come,)
    one.start(federation, to_record(START), 2, timeout=0.05)
    assert "reply of client 2 left out: none came: the node died" in caplog.text


def test_a_device_too_late_for_its_phase_counts_in_the_next_and_is_not_asked_before() -> None:
    federation = Slow(4, {3: 10**9})
    seen: list[RoundInfo] = []
    acked: list[dict[int, int]] = []
    one = async_(order="arrival")

    def let_it_come_after_round_1(info: RoundInfo) -> None:
        seen.append(info)
        acked.append(dict(one.ledger.acked))
        federation.looks, federation.due = {}, {}

    one.callbacks = (let_it_come_after_round_1,)
    one.start(federation, to_record(START), 3, timeout=0.05)
    assert acked[0] == {0: 1, 1: 1, 2: 1}
    assert acked[1] == {0: 2, 1: 2, 2: 2, 3: 1}  # asked in round 1, used in round 2
    assert acked[2] == {0: 3, 1: 3, 2: 3, 3: 3}
    assert [t for t, client in federation.asked if client == 3] == [1, 3]
    assert [info.metrics["clients-used"] for info in seen] == [3, 4, 4]
    total = one.state.sums[0].total
    np.testing.assert_allclose(
        total, sum_of_last_models(federation, one.ledger.acked, 4), rtol=1e-12
    )


def test_by_arrival_an_error_reply_ends_the_wait_for_its_device() -> None:
    def broken(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train" and request.metadata.dst_node_id == NODES[1]:
            return Message(Error(3, "the node died"), reply_to=request)
        return reply

    one = async_(order="arrival")
    train(one, grid(quadratics(3), fault=broken), 3)
    assert one.ledger.acked == {0: 3, 2: 3}
    assert one.phases.underway == {}


def test_by_arrival_a_cloud_server_all_of_whose_devices_are_late_waits_for_one() -> None:
    federation = Slow(2, {0: 10**9, 1: 10**9})
    used: list[float] = []
    one = async_(order="arrival")

    def let_them_come_soon(info: RoundInfo) -> None:
        used.append(info.metrics["clients-used"])
        federation.due = dict.fromkeys(federation.due, federation.now + 3)

    one.callbacks = (let_them_come_soon,)
    one.start(federation, to_record(START), 2, timeout=0.5)
    assert used == [0, 2]
    assert one.ledger.acked == {0: 1, 1: 1}
    assert federation.asked == [(1, 0), (1, 1)]


class Lossy(Slow):
    """Requests to some clients cannot be sent in the first round: their ids are None."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[Any]:
        messages = list(messages)
        first = not self.asked and messages[0].metadata.message_type == "train"
        ids = list(super().push_messages(messages))
        return [None if first and i in (1, 2) else key for i, key in enumerate(ids)]


def test_by_arrival_a_request_that_could_not_be_sent_is_not_waited_for() -> None:
    federation = Lossy(3, {})
    acked: list[dict[int, int]] = []
    one = async_(order="arrival")
    one.callbacks = (lambda info: acked.append(dict(one.ledger.acked)),)
    train(one, federation, 2)
    assert acked == [{0: 1}, {0: 2, 1: 2, 2: 2}]
    total = one.state.sums[0].total
    np.testing.assert_allclose(
        total, sum_of_last_models(federation, one.ledger.acked, 3), rtol=1e-12
    )


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"servers": 4, "first": 5}, r"first must be an integer >= 1 and <= 4, got 5"),
        ({"servers": 4, "first": 0}, r"first must be an integer >= 1, got 0"),
        ({"servers": 4, "first": 1.5}, r"first must be an integer >= 1, got 1.5"),
        ({"staleness": 0}, r"staleness must be an integer >= 1, got 0"),
        ({"order": "random"}, r"order must be one of \['virtual', 'arrival'\], got 'random'"),
        ({"rigorous": True, "order": "arrival"}, r'rigorous needs order="virtual"'),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FedBCDAsync(**hyperparameters)
