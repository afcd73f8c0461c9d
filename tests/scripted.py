"""Federations whose replies are written down beforehand, and what a run comes to with them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Error, Message, RecordDict
from laws import START, TABLE, Row, local
from problems import NODES, make_client_app, quadratics, to_record, to_vector
from tampering import Tamper, fresh, silence

from clients.node.in_process import InProcessGrid
from fl_strategies import FederatedStrategy
from fl_strategies.messages.one_process import become_server

HONEST, HOSTILE = 4, 8
"""Clients 0 ... 3 answer as they should; 4 ... 11 send one malformed reply each."""
CLIENTS = HONEST + HOSTILE

KNOBS: dict[str, dict[str, Any]] = {
    "fedpd": {"missing": "proceed"},
    "fedpd-vr": {"missing": "proceed"},
    "fedbcd-async": {"servers": 2, "first": 1},
    "fedbcd-i-async": {"servers": 2, "first": 1},
}
"""Beside those of the table: FedPD and FedPDVR would stop for who is missing."""

ROWS = {row.name: row for row in TABLE}


def made(row: Row, **options: Any) -> FederatedStrategy:
    return row.strategy(local=local(), **{**KNOBS.get(row.name, {}), **options})


class Reply(NamedTuple):
    """What arrives: from which node, to the request with which id, and what is in it."""

    node: int
    request: str
    content: RecordDict | Error | None


Script = list[list[Reply]]


class Scripted(InProcessGrid):
    """Gives messages ids as Flower does, and answers the t-th training phase by ``script[t]``.

    Without a script the clients themselves answer, and ``seen`` keeps what they said.
    """

    def __init__(self, script: Script | None = None) -> None:
        super().__init__(make_client_app(quadratics(CLIENTS)), CLIENTS)
        self.script, self.phase = script, 0
        self.seen: dict[int, RecordDict] = {}
        self.pending: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        train = False
        for message in messages:
            about = message.metadata
            train = about.message_type == "train"
            about.__dict__["_message_id"] = request_id(self.phase, about.dst_node_id)
            ids.append(about.message_id)
            if self.script is None or not train:
                reply = self.answer(message)
                assert reply is not None
                if train:
                    # which of the arrays stand for running statistics is up to the strategy here
                    for record in reply.content.config_records.values():
                        record.pop("layout", None)
                    self.seen[about.dst_node_id] = reply.content
                self.pending.append(reply)
        if train and self.script is not None:
            self.pending += [as_message(reply) for reply in self.script[self.phase]]
        self.phase += train
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        pulled, self.pending = self.pending, []
        return pulled


def request_id(phase: int, node: int) -> str:
    return f"{phase}-{node}"


def as_message(reply: Reply) -> Message:
    become_server()
    about = Message(RecordDict(), dst_node_id=reply.node, message_type="train")
    about.metadata.__dict__["_message_id"] = reply.request
    if reply.content is None:
        message = Message(RecordDict(), reply_to=about)
        message.__dict__["_content"] = None
        return message
    return Message(reply.content, reply_to=about)


def answered(contents: Mapping[int, RecordDict | Error | None], phase: int = 0) -> list[Reply]:
    """Return replies of a phase that answer what was asked, by node."""
    return [Reply(node, request_id(phase, node), content) for node, content in contents.items()]


class World(NamedTuple):
    """A strategy after two rounds of all clients, and what these answer in the third."""

    strategy: FederatedStrategy
    theta: ArrayRecord
    answers: Mapping[int, RecordDict]


def world(strategy: FederatedStrategy) -> World:
    federation = Scripted()
    with silence():
        theta = strategy.start(federation, to_record(START), 2).arrays
        copy.deepcopy(strategy).start(federation, theta, 1)
    for content in federation.seen.values():  # who lies about its arrays does so about their sums
        for record in content.config_records.values():
            record.pop("checksums", None)
    return World(strategy, theta, dict(federation.seen))


class Outcome(NamedTuple):
    theta: np.ndarray
    state: dict[str, Any]
    metrics: list[dict[str, Any]]


def outcome(before: World, script: Script) -> Outcome:
    """Return what a copy of the strategy comes to in as many rounds as ``script`` has."""
    strategy = copy.deepcopy(before.strategy)
    # by arrival, what is there at the first look is all that comes
    result = strategy.start(Scripted(script), before.theta, len(script), timeout=0.0)
    metrics = [
        {name: value for name, value in phase.items() if name not in COUNTED}
        for phase in result.train_metrics_clientapp.values()
    ]
    state = {name: value for name, value in vars(strategy).items() if name not in PASSING}
    state |= {"clients": strategy.run.clients, "devices": strategy.run.devices}
    return Outcome(to_vector(result.arrays), state, metrics)


COUNTED = {
    "clients-rejected",
    "clients-failed",
    "clients-lost",
    "bytes-up",
    "seconds",
    "virtual-seconds",
}
"""Metrics that tell a malformed reply from none."""
PASSING = {
    "clipping_norm",
    "phases",
    "reader",
    "run",
    "sender",
    "_asked",
}
"""Attributes that hold replies or a time; what they lead to is in the model a round later. And a
bound, to compare runs with and without."""


def same(a: Any, b: Any) -> bool:
    """Whether two values agree to the bit, all the way down."""
    if isinstance(a, np.ndarray | np.generic) or isinstance(b, np.ndarray | np.generic):
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if type(a).__module__.startswith("fl_strategies"):
        return same(vars(a), vars(b))
    return bool(a == b)


def assert_same(found: Outcome, expected: Outcome) -> None:
    for part, a, b in zip(Outcome._fields, found, expected, strict=True):
        if isinstance(a, dict):
            differ = [name for name in a.keys() | b.keys() if not same(a.get(name), b.get(name))]
            assert not differ, (differ, [(a.get(name), b.get(name)) for name in differ])
        assert same(a, b), (part, a, b)


def the_round(before: World, changes: Mapping[int, Tamper], leave: Iterable[int] = ()) -> Outcome:
    """Return the third round's outcome with ``changes`` to clients' replies, but for ``leave``."""
    contents = {}
    for client in set(range(CLIENTS)) - set(leave):
        content = fresh(before.answers[NODES[client]])
        contents[NODES[client]] = changes[client](content) if client in changes else content
    with silence():
        return outcome(before, [answered(contents)])


LAST = CLIENTS - 1
