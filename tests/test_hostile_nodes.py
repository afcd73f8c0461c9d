"""Nodes that lie about the client they are, or about the number of partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from problems import NODES, make_client_app, quadratics
from scripted import Reply, as_message

from clients.node.in_process import InProcessGrid
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
