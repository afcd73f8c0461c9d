"""Federations whose clients are late, away or strange, lost replies, a legacy server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Code, Status, parameters_to_ndarrays
from flwr.server import History, Server, ServerConfig, SimpleClientManager
from flwr.server.compat.app import start_grid
from laws import START, Row, local, train
from problems import CLIENT_OF, DIM, grid, make_client_app, quadratics, to_record, to_vector

from clients.node.in_process import Fault, InProcessGrid
from fl_strategies import FederatedStrategy, RoundInfo, as_legacy

ROUNDS, CLIENTS = 12, 4

KNOBS: dict[str, dict[str, Any]] = {"fedadmm": {"eta": "fraction"}}
"""FedADMM's other steps leave the optimum when some are missing, with or without failures."""

Trouble = Callable[[int, int], bool]
"""``trouble(round, client)``: whether that client has it in that round."""


def never(server_round: int, client: int) -> bool:
    return False


class Troubled(InProcessGrid):
    """A federation in which a client may be away, lose its reply, or work only after the timeout.

    A late one handles its requests as a SuperNode does, in the order in which they came, once it
    is no longer late; nobody reads those answers.
    """

    def __init__(
        self,
        clients: int = CLIENTS,
        *,
        away: Trouble = never,
        lost: Trouble = never,
        late: Trouble = never,
    ) -> None:
        super().__init__(make_client_app(quadratics(clients)), clients)
        self.away, self.lost, self.late = away, lost, late
        self.now = 1
        self.waiting: dict[int, list[Message]] = defaultdict(list)
        self.counts: list[list[float]] = []
        self.acked: list[dict[int, int]] = []

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if not self.away(self.now, CLIENT_OF[node])]

    def answer(self, message: Message) -> Message | None:
        if message.metadata.message_type != MessageType.TRAIN:
            return super().answer(message)
        node = message.metadata.dst_node_id
        client = CLIENT_OF[node]
        if self.late(self.now, client):
            self.waiting[node].append(message)
            return None
        for older in self.waiting.pop(node, []):
            super().answer(older)
        reply = super().answer(message)
        return None if self.lost(self.now, client) else reply

    def run(self, row: Row, rounds: int = ROUNDS, **options: Any) -> np.ndarray:
        """Return the model [5] after ``rounds``; note each round's counts, and what is acked."""

        def ended(info: RoundInfo) -> None:
            self.now += 1
            names = ("asked", "used", "rejected", "lost")
            self.counts.append([info.metrics[f"clients-{name}"] for name in names])
            self.acked.append(dict(strategy.ledger.acked))

        hyperparameters = KNOBS.get(row.name, {}) | options
        strategy = row.strategy(local=local(), callbacks=[ended], node_wait=0.01, **hyperparameters)
        return train(strategy, self, rounds)


def run_legacy(
    strategy: FederatedStrategy,
    rounds: int,
    *,
    on: InProcessGrid | None = None,
    initial: ArrayRecord | None = None,
    **options: Any,
) -> tuple[np.ndarray, History]:
    """Return the model [5] and history of Flower's legacy Server."""
    adapter = as_legacy(strategy, initial or to_record(START), **options)
    return serve(adapter, on or grid(quadratics(CLIENTS)), rounds)


def serve(adapter: Any, on: InProcessGrid, rounds: int) -> tuple[np.ndarray, History]:
    server = Server(client_manager=SimpleClientManager(), strategy=adapter)
    server.set_max_workers(1)  # the clients of this process share one module
    on.set_run(SimpleNamespace(run_id=1))
    history = start_grid(grid=on, server=server, config=ServerConfig(num_rounds=rounds))
    return to_vector(parameters_to_ndarrays(server.parameters)), history


class Strangers(NumPyClient):
    """A user's own client, written for Flower's FedAvg."""

    def __init__(self, problem: Any, client_id: int, **_: Any) -> None:
        self.target = torch.arange(DIM).numpy() * (client_id + 1.0)

    def fit(self, parameters: Any, config: Any) -> Any:
        head, tail = parameters
        w = np.concatenate([head.ravel(), tail])
        w = w - 0.5 * (w - self.target)
        return [w[:4].reshape(2, 2), w[4:]], 7, {}


def descending(
    clients: int, *, steps: int = 3, rate: float = 0.1, samples: int | None = None
) -> ClientApp:
    """Return clients of Flower's own, which take steps of gradient descent.

    They say that they have so many ``samples``; by default those that they have.
    """
    app, problems = ClientApp(), quadratics(clients)

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        q = problems[CLIENT_OF[context.node_id]]
        w = to_vector(message.content["arrays"])
        for _ in range(steps):
            w = w - rate * q.gradient(w)
        metrics = MetricRecord({"num-examples": q.n if samples is None else samples})
        content = RecordDict({"arrays": to_record(w), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def same_as_flowers(
    theirs: Any, ours: FederatedStrategy, clients: int, rounds: int, **options: Any
) -> None:
    """Assert that Flower's strategy and ours give one model with :func:`descending` clients."""
    app = descending(clients, **options)
    expected, model = (
        to_vector(s.start(InProcessGrid(app, clients), to_record(START), rounds).arrays)
        for s in (theirs, ours)
    )
    np.testing.assert_allclose(model, expected, rtol=1e-12)


def drop(share: float, *, after: int = 0) -> Fault:
    """Return a fault that loses this share of the replies to training after so many rounds."""
    rng = np.random.default_rng(7)

    def fault(request: Message, reply: Message) -> Message | None:
        number = request.content.config_records.get("config", {}).get("server-round")
        trained = request.metadata.message_type == "train" and number not in range(1, after + 1)
        return None if trained and rng.random() < share else reply

    return fault


def lose(*which: tuple[int, int], masked: bool = False) -> Fault:
    """Return a fault that loses the replies to training of each (round, client)."""

    def fault(request: Message, reply: Message) -> Message | None:
        config = request.content.config_records.get("fitins.config" if masked else "config", {})
        about = (config.get("server-round"), CLIENT_OF[request.metadata.dst_node_id])
        return None if request.metadata.message_type == "train" and about in which else reply

    return fault


class Proxy:
    """A client of two numbers' worth of work, as a legacy server sees it."""

    def __init__(self, node: int, *, fails: bool) -> None:
        self.cid, self.node_id, self.fails = str(node), node, fails

    def get_properties(self, *_: Any) -> Any:
        return SimpleNamespace(status=status("not implemented"), properties={})

    def fit(self, ins: Any, *_: Any) -> Any:
        return SimpleNamespace(
            status=status("out of disk" if self.fails else ""),
            parameters=ins.parameters,
            num_examples=3,
            metrics={"train-loss": 1.0},
        )


def status(message: str) -> Any:
    return Status(Code.FIT_NOT_IMPLEMENTED if message else Code.OK, message)
