"""Federations for checks: replies that get lost, fail or come late, and clients of NumPy alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fl_strategies.core.randomness import stream
from fl_strategies.messages.one_process import OneProcessGrid, delivered, error_reply, node_ids
from fl_strategies.messages.wire import decode, decoded

Trouble: TypeAlias = Callable[[str, int, int], str]
"""``trouble(kind, phase, client)`` says what happens to a message, or "".

``kind`` is "train" or "evaluate"; the messages of a kind that are sent together are a phase, 1, 2
... "unreached": the client never gets the request. "lost": the client answers, and no reply
arrives. "late": the client answers before its next request, when nobody waits any more. "failed":
an error arrives in place of the reply. "diverged": the reply's numbers are NaN.
"""
PATIENCE = 10
"""How often a strategy may look for nodes without sending anything."""


def no_trouble(kind: str, phase: int, client: int) -> str:
    """Nothing happens to any message."""
    return ""


class Snapshot(NamedTuple):
    """What a message holds: its arrays and its numbers and texts, by key and name."""

    arrays: dict[str, np.ndarray]
    others: dict[str, object]


def snapshot(content: RecordDict) -> Snapshot:
    """Return a copy of what a message holds."""
    held = {
        f"{key}/{name}": value for key, record in content.items() for name, value in record.items()
    }
    return Snapshot(
        {key: decode(value).copy() for key, value in held.items() if isinstance(value, Array)},
        {key: value for key, value in held.items() if not isinstance(value, Array)},
    )


class Work(NamedTuple):
    """A request as it was sent, to train or to evaluate; its reply, and what that held at first."""

    kind: str
    phase: int
    client: int
    request: Message
    reply: Message
    held: Snapshot


class Federation(OneProcessGrid):
    """``clients`` nodes that run a ClientApp, whose messages meet ``trouble``.

    Parameters
    ----------
    app : ClientApp
        The node config of client i has ``partition-id`` i.
    clients : int >= 1
    trouble : callable, optional
    backwards : bool (default False)
        Whether replies arrive in reverse.

    Attributes
    ----------
    asked : list of list of int
        The clients of each phase of training.
    work : list of Work
        Whose reply arrived, and is no error.
    requests : dict of int to Message
        The first request to train that each client got.
    failures : list of str
        Why clients failed that had no trouble.
    """

    def __init__(
        self,
        app: ClientApp,
        clients: int,
        trouble: Trouble = no_trouble,
        *,
        backwards: bool = False,
    ) -> None:
        super().__init__()
        self.app, self.trouble, self.backwards = app, trouble, backwards
        self.contexts = {node: fresh(node, i, clients) for i, node in enumerate(node_ids(clients))}
        self.phases = {MessageType.TRAIN: 0, MessageType.EVALUATE: 0}
        self.asked: list[list[int]] = []
        self.work: list[Work] = []
        self.requests: dict[int, Message] = {}
        self.failures: list[str] = []
        self._client_of = {node: client for client, node in enumerate(self.contexts)}
        self._waiting: dict[int, list[Message]] = defaultdict(list)
        self._looked = 0

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes; raise ``AssertionError`` if a strategy waits for more."""
        self._looked += 1
        if self._looked > PATIENCE:
            raise AssertionError(
                f"the strategy waits for more than the {len(self.contexts)} clients that there are:"
                " check it with more by clients=..."
            )
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have each message answered, or meet its trouble; return the ids of the replies."""
        sent, self._looked = list(messages), 0
        kinds = {message.metadata.message_type for message in sent} & self.phases.keys()
        for kind in kinds:
            self.phases[kind] += 1
        if MessageType.TRAIN in kinds:
            self.asked.append([self._client_of[one.metadata.dst_node_id] for one in sent])
        return super().push_messages(sent)

    def pull_messages(self, *ids: Any, **named: Any) -> Iterable[Message]:
        """Return what the base does, perhaps in the opposite order."""
        return list(super().pull_messages(*ids, **named))[:: -1 if self.backwards else 1]

    def done(self, kind: str) -> list[Work]:
        """Return the work of this kind; raise ``AssertionError`` if there is none."""
        found = [one for one in self.work if one.kind == kind]
        if not found:
            why = f": {self.failures[0]}" if self.failures else ""
            raise AssertionError(f"no client answers a {kind} request{why}")
        return found

    def uploads(self, phase: int) -> dict[int, dict[str, np.ndarray]]:
        """Return what arrived from each client in a phase of training."""
        done = [one for one in self.work if (one.kind, one.phase) == (MessageType.TRAIN, phase)]
        return {one.client: one.held.arrays for one in done}

    def answer(self, message: Message) -> Message | None:
        """Return what arrives of the node's reply, or None."""
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        phase, client, what = self.phases.get(kind, 0), self._client_of[node], ""
        if phase:
            what = self.trouble(kind, phase, client)
        if what == "unreached":
            return None
        if what == "late":
            self._waiting[node].append(message)
            return None
        for older in self._waiting.pop(node, []):
            answered(self.app, older, self.contexts[node])
        sent = delivered(message)
        if kind == MessageType.TRAIN:
            self.requests.setdefault(client, sent)
        reply = answered(self.app, message, self.contexts[node])
        if what == "failed":
            return error_reply(message, "ValueError: out of memory")
        if what == "diverged" and reply.has_content():
            for record in reply.content.array_records.values():
                for name, array in record.items():
                    record[name] = Array(np.full_like(array.numpy(), np.nan))
        if reply.has_error():
            self.failures.append(str(reply.error.reason))
        elif phase and what != "lost":
            self.work.append(Work(kind, phase, client, sent, reply, snapshot(reply.content)))
        return None if what == "lost" else reply


def fresh(node: int, client: int, clients: int) -> Context:
    """Return the context of a client that has never taken part."""
    return Context(
        run_id=1,
        node_id=node,
        node_config={"partition-id": client, "num-partitions": clients},
        state=RecordDict(),
        run_config={},
    )


def answered(app: ClientApp, message: Message, context: Context) -> Message:
    """Return the app's reply, an error if it raises an exception."""
    try:
        return app(delivered(message), context)
    except Exception as error:
        return error_reply(message, f"{type(error).__name__}: {error}")


def numpy_app(mods: Sequence[Mod] = ()) -> ClientApp:
    """Return a ClientApp of NumPy alone, as one writes it for Flower's own strategies.

    Client i takes three steps of gradient descent on ||w - b_i||^2 / 2 from the arrays that it
    receives, and keeps nothing. Its b_i, and its number of samples, 7 + 2 i, differ from those of
    the others. It replies to training with arrays and the metrics ``num-examples`` and
    ``train_loss``, to evaluation with ``num-examples`` and ``eval_loss``. ``mods`` are Flower's.
    """
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        arrays = next(iter(message.content.array_records.values()))
        models, targets = arrays_of(arrays), _targets(arrays, context)
        trained = {
            name: w + np.asarray(1 - 0.7**3, w.dtype) * (targets[name] - w)
            for name, w in models.items()
        }
        record = ArrayRecord({name: Array(w) for name, w in trained.items()})
        metrics = _metrics("train_loss", trained, targets, context)
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    @app.evaluate(mods=list(mods))
    def evaluate(message: Message, context: Context) -> Message:
        arrays = next(iter(message.content.array_records.values()))
        metrics = _metrics("eval_loss", arrays_of(arrays), _targets(arrays, context), context)
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def torch_app() -> ClientApp:
    """Return the clients of this package: linear models of three features and two outputs."""
    import torch
    from torch import nn
    from torch.nn.functional import mse_loss

    from clients import AnyAlgorithmClient, Problem, client_app, client_id

    model = nn.Linear(3, 2)

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        rng, samples = stream(0, "samples", me), 7 + 2 * me
        inputs, noise = rng.normal(size=(samples, 3)), rng.normal(size=(samples, 2))
        targets = torch.tensor(noise + 3.0 * (-1) ** me)
        problem = Problem(model, mse_loss, torch.tensor(inputs), targets)
        return AnyAlgorithmClient(problem, test=problem)

    return client_app(client_fn)


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the record's arrays by name; they are not to be written into."""
    return decoded(record)


def _client(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _targets(arrays: ArrayRecord, context: Context) -> dict[str, np.ndarray]:
    rng = stream(0, "targets", _client(context))
    return {
        name: (3.0 * (-1) ** _client(context) + rng.normal(size=w.shape)).astype(w.dtype)
        for name, w in arrays_of(arrays).items()
    }


def _metrics(
    name: str, models: Mapping[str, np.ndarray], targets: Mapping[str, np.ndarray], context: Context
) -> MetricRecord:
    loss = sum(float(((w - targets[key]) ** 2).sum()) / 2 for key, w in models.items())
    return MetricRecord({"num-examples": 7 + 2 * _client(context), name: loss})


def an_initial_model() -> ArrayRecord:
    """Return the arrays, in float32, of a linear model of three features and two outputs."""
    rng = stream(0, "initial")
    return ArrayRecord(
        {
            "weight": Array(rng.normal(size=(2, 3)).astype(np.float32)),
            "bias": Array(rng.normal(size=2).astype(np.float32)),
        }
    )
