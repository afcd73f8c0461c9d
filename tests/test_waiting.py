"""A round in a deployment ends when no other reply can come."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.superlink.grid import http_grid
from laws import START, local
from problems import NODES, make_client_app, quadratics, to_record

from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, FedBCDAsync
from fl_strategies.core.log import FLOWER
from fl_strategies.messages.internals import REPLY_LOST
from fl_strategies.parts import Buffered, Deadline
from fl_strategies.server import waiting

CLIENTS, LOST = 4, 2
MOST = 20
"""Looks for replies within which a round ends."""


class Deployment(InProcessGrid):
    """Client ``LOST`` is asked in each round, and does not answer from round 2 on."""

    closed = False

    def __init__(self, fault: str) -> None:
        super().__init__(make_client_app(quadratics(CLIENTS)), CLIENTS)
        self.trouble, self.gone = fault, False
        self.restarts = self.looks = 0
        self.unreadable: set[str] = set()

    def get_nodes(self) -> list[NodeInfo]:
        here = [n for n in self.contexts if n != NODES[LOST] or not self.gone]
        self.gone = False  # the next round asks it again
        since = {node: "" if node != NODES[LOST] else str(self.restarts) for node in here}
        return [NodeInfo(node_id=node, last_activated_at=since[node]) for node in here]

    def get_node_ids(self) -> list[int]:
        return [*self.contexts]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages, self.looks = list(messages), 0
        ids = list(super().push_messages(messages))
        for name, message in zip(ids, messages, strict=True):
            config = message.content.config_records.get("config", {})
            trained = message.metadata.dst_node_id == NODES[LOST] and "server-round" in config
            if trained and config["server-round"] > 1:  # type: ignore[operator]
                del self._replies[name]
                self.gone = self.trouble == "offline"
                self.restarts += self.trouble == "came back"
                self.unreadable |= {name} if self.trouble == "unreadable" else set()
        return ids

    def pull_messages(self, *args: Any, **options: Any) -> Iterable[Message]:
        self.looks += 1
        assert self.looks < MOST, "the round does not end"
        for name in self.unreadable:
            FLOWER.error("Message %s objects unavailable: %s", f"reply to {name}", "timeout")
        self.unreadable = set()
        return super().pull_messages(*args, **options)


RUNS: dict[str, Any] = {
    "all replies": lambda: FedAvg(local=local(), fraction_evaluate=0.0),
    "evaluation": lambda: FedAvg(local=local()),
    "deadline": lambda: FedAvg(local=local(), pace=Deadline(order="arrival")),
    "buffered": lambda: FedAvg(local=local(), pace=Buffered(order="arrival", size=CLIENTS)),
    "cloud servers": lambda: FedBCDAsync(
        local=local(), box=None, servers=CLIENTS, first=CLIENTS, order="arrival"
    ),
}


@pytest.mark.parametrize("fault", ["offline", "came back", "unreadable"])
@pytest.mark.parametrize("run", RUNS)
def test_a_round_ends_when_nothing_can_come_any_more(
    run: str, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "LOOK", 0.0)
    monkeypatch.setattr(waiting, "PAUSE", 0.0)
    strategy = RUNS[run]()
    result = strategy.start(Deployment(fault), to_record(START), 3, timeout=3600.0)
    rows = result.train_metrics_clientapp
    assert [rows[n]["clients-used"] for n in rows] == [CLIENTS, CLIENTS - 1, CLIENTS - 1]
    assert [rows[n]["clients-lost"] for n in rows] == [0, 1, 1]
    assert "no reply from client 2" in caplog.text


def test_the_grid_pulls_the_replies_named_or_all_as_flower_1_43_does() -> None:
    federation = InProcessGrid(make_client_app(quadratics(CLIENTS)), CLIENTS)
    queries = [Message(RecordDict(), node, "query") for node in federation.get_node_ids()]
    first, second, *rest = federation.push_messages(queries)

    def pulled(*args: Any, **options: Any) -> set[str]:
        replies = federation.pull_messages(*args, **options)
        return {reply.metadata.reply_to_message_id for reply in replies}

    assert pulled([]) == set()
    assert pulled([first]) == {first}
    assert pulled(message_ids=[first, second]) == {second}
    assert pulled() == {*rest}
    assert pulled() == set()
    with pytest.raises(TypeError, match="or message_ids, got both"):
        pulled([first], message_ids=[first])


def test_flower_answers_for_a_reply_that_is_lost_or_logs_what_is_listened_for() -> None:
    source = inspect.getsource(http_grid)
    assert "MESSAGE_UNAVAILABLE" in source or f'log(ERROR, "{REPLY_LOST}"' in source
