"""Nodes that lie about the client they are, or about the number of partitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from hosted import federation
from laws import START, quiet, train
from problems import NODES, make_client_app, quadratics, to_record
from scripted import Reply, as_message

from clients.node.in_process import InProcessGrid
from clients.node.records import become_server
from fl_strategies import FedAvg
from fl_strategies.server.nodes import Nodes


class Claims(InProcessGrid):
    """Nodes that answer the query for their client's id as ``claims`` says."""

    def __init__(self, claims: Mapping[int, list[Message]]) -> None:
        super().__init__(make_client_app(quadratics(1)), len(claims))
        self.claims = list(claims.values())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"query-{node}"
        return []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for replies in self.claims for reply in replies]


def claim(node: int, request: int | None = None, **about: Any) -> Message:
    content = RecordDict(
        {"client": ConfigRecord({k.replace("_", "-"): v for k, v in about.items()})}
    )
    return as_message(Reply(node, f"query-{node if request is None else request}", content))


@pytest.mark.parametrize(
    "client_id", [-1, True, "0", 0.0, [0], b"0", 2, 2**70], ids=lambda value: repr(value)
)
def test_a_client_id_that_cannot_be_is_replaced_by_the_nodes_own(client_id: Any) -> None:
    """Of two partitions, 2 is none."""
    first, second = NODES[0], NODES[1]
    federation = Claims(
        {
            0: [claim(first, client_id=0, num_partitions=2)],
            1: [claim(second, client_id=client_id, num_partitions=2)],
        }
    )
    assert Nodes(1.0).connected(federation) == {0: first, second: second}


def test_an_answer_to_a_query_counts_once_and_from_who_was_asked() -> None:
    first, second = NODES[0], NODES[1]
    nothing = as_message(Reply(second, f"query-{second}", None))
    federation = Claims(
        {
            0: [claim(first, second, client_id=7), claim(first, client_id=3)],
            1: [claim(first, client_id=8), claim(5, 5, client_id=9), nothing],
        }
    )
    nodes = Nodes(1.0)
    assert nodes.connected(federation) == {3: first}
    assert nodes.connected(federation) == {3: first, second: second}  # it has failed twice


@pytest.mark.parametrize("partitions", [-4, True, "9", 2.5, [3]])
def test_a_number_of_partitions_that_is_none_is_not_waited_for(partitions: Any) -> None:
    federation = Claims({0: [claim(NODES[0], client_id=0, num_partitions=partitions)]})
    nodes = Nodes(100.0)
    assert nodes.wait(federation, 1) == {0: NODES[0]}


# ---- every field of an introduction, and every odd value ----------------------------------------

MISSING = object()
ODD: list[Any] = [
    *(5, 0, -1, 2**63, 2**64, 10**400, True, False, 0.5, 3.0, -1e300, math.nan, math.inf, None),
    *("", "3", "1, 2, 3", b"", b"\1\2\3", {}, {"a": 1}, object(), MISSING),
    *([], [1], [1, 2], [1, 2, 3, 4], [1, 2, 2], [1, 2, -3], [1, 2, True], [1, 2, 0.5], [[1], 2, 3]),
    *(
        [1, 2, math.nan],
        [1, 2, "3"],
        ["a", "b", "c"],
        [None] * 3,
        [2**64, 2**63, 10**400],
        (1, 2, 3),
    ),
]
INTRODUCTIONS: dict[str, dict[str, Any]] = {
    "one client": {"client-id": 3, "num-partitions": 4},
    "a host": {"client-ids": [3, 4, 5], "samples": [9, 8, 7], "num-partitions": 1},
    "a host that shares": {"any-of": 3, "samples": [9, 8, 7], "num-partitions": 2},
}
FIELDS = sorted({field for about in INTRODUCTIONS.values() for field in about})
HONEST = 7


class Told:
    """A Grid whose nodes answer queries by what ``about`` says of each; others are not there."""

    def __init__(self, about: Mapping[int, Mapping[str, Any]]) -> None:
        self.about = about

    def get_node_ids(self) -> list[int]:
        return list(self.about)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float) -> list[Message]:
        return [self._reply(message) for message in messages]

    def _reply(self, message: Message) -> Message:
        record = ConfigRecord()
        vars(record)["_data"].update(self.about[message.metadata.dst_node_id])
        return Message(RecordDict({"client": record}), reply_to=message)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", INTRODUCTIONS)
def test_no_odd_value_in_a_nodes_introduction_harms_the_clients_of_another(
    kind: str, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither at the start nor when the node comes back."""
    caplog.set_level("CRITICAL", "flwr")
    become_server()
    shares = kind == "a host that shares"
    honest = {"any-of": 3} if shares else {"client-ids": [0, 1, 2]}
    liar_node = 6 if shares else 8  # asked before the other where no node owns a client
    usual = INTRODUCTIONS[kind]
    for value in ODD:
        odd = {**usual, field: value}
        if value is MISSING:
            odd.pop(field)
        for first in (odd, usual):
            strategy = quiet(FedAvg, node_wait=0.01, shared_population=3 * shares)
            strategy.open(to_record(START), 3)
            for number, liar in enumerate([first, None, odd], start=1):
                about = {HONEST: honest} | ({} if liar is None else {liar_node: liar})
                requests = strategy.configure_train(
                    number, to_record(START), ConfigRecord(), Told(about)
                )
                assert HONEST in {request.metadata.dst_node_id for request in requests}
                assert {0, 1, 2} <= {*strategy.run.asked.clients}
                numbers = [*strategy.nodes.known, *strategy.nodes.samples.values()]
                assert all(type(one) is int and 0 <= one < 2**64 for one in numbers), value
                assert max(strategy.nodes.samples.values(), default=0) <= 10**9


@pytest.mark.parametrize("samples", [5, 0.5, True])
def test_samples_that_are_no_list_end_no_run(
    samples: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "query":
            reply.content["client"] = ConfigRecord({**reply.content["client"], "samples": samples})
        return reply

    train(quiet(FedAvg), federation("1 host", fault=lie), 1)
    assert "gives no usable numbers of its clients' samples" in caplog.text
