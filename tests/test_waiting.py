"""A round in a deployment ends when no other reply can come."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flwr
import pytest
from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from laws import START, local
from problems import NODES, make_client_app, quadratics, to_record

from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, FedBCDAsync
from fl_strategies.core.log import FLOWER
from fl_strategies.messages.internals import REPLY_LOST
from fl_strategies.parts import Buffered, Deadline
from fl_strategies.server import nodes, waiting

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


class Clock:
    """Time that passes by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Starting(InProcessGrid):
    """A simulation whose client i answers from the second ``up[i]`` on."""

    closed = False
    pull_interval = 0.1  # the simulation's grid alone has one

    def __init__(self, clock: Clock, up: list[float]) -> None:
        super().__init__(make_client_app(quadratics(CLIENTS)), CLIENTS)
        self.clock, self.up = clock, dict(zip(self.contexts, up, strict=True))

    def pull_messages(self, *args: Any, **options: Any) -> Iterable[Message]:
        replies = list(super().pull_messages(*args, **options))
        late = [r for r in replies if self.up[r.metadata.src_node_id] > self.clock.now]
        self._replies |= {reply.metadata.reply_to_message_id: reply for reply in late}
        return [reply for reply in replies if reply not in late]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        ids, replies = {*self.push_messages(messages)}, list[Message]()
        end = self.clock.now + (timeout or 1e6)
        while len(replies) < len(ids) and self.clock.now < end:
            replies += self.pull_messages(ids)
            self.clock.sleep(1.0)
        return replies


@pytest.mark.parametrize(
    ("up", "used"), [([50, 50, 58, 100], 4), ([70, 75, 75, 110], 4), ([5, 5, 50, 1e9], 3)]
)
def test_the_first_round_waits_while_clients_still_come(
    up: list[float], used: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a slow machine a process may answer a minute after the first one does."""
    clock = Clock()
    for module in (waiting, nodes):
        monkeypatch.setattr(module, "time", clock)
    strategy = FedAvg(local=local(), fraction_evaluate=0.0, node_wait=60.0)
    result = strategy.start(Starting(clock, up), to_record(START), 1)
    assert result.train_metrics_clientapp[1]["clients-used"] == used
    assert ("3 clients are connected, and no other came for 60 s" in caplog.text) == (used < 4)


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
    source = (Path(flwr.__file__).parent / "superlink/grid/http_grid.py").read_text()
    assert "MESSAGE_UNAVAILABLE" in source or f'log(ERROR, "{REPLY_LOST}"' in source
