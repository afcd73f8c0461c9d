"""What the server's aggregation costs next to Flower's own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fl_strategies import FedAvg
from fl_strategies.messages.one_process import become_server, node_ids

TURNS = 9


class Stub:
    """A grid of nodes that answer a query by their client's id, and nothing else."""

    def __init__(self, nodes: int) -> None:
        self.clients = {node: client for client, node in enumerate(node_ids(nodes))}

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(self.clients)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the answers."""
        return [
            Message(
                RecordDict(
                    {"client": ConfigRecord({"client-id": self.clients[m.metadata.dst_node_id]})}
                ),
                reply_to=m,
            )
            for m in messages
        ]


def in_turns(candidates: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Return the milliseconds of each, by turns, after one turn that does not count."""
    durations: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns + 1):
        for name, candidate in candidates.items():
            started = time.perf_counter()
            candidate()
            if turn:
                durations[name].append(1000 * (time.perf_counter() - started))
    return durations


def shown(times: Sequence[float]) -> str:
    """Return the median and the range."""
    return f"{statistics.median(times):.1f} ({min(times):.1f} ... {max(times):.1f})"


def aggregation(folder: Path, clients: int = 10) -> list[list[str]]:
    """FedAvg's aggregation of 10 replies of d float32 numbers in six arrays, ours with all checks,
    and Flower's own FedAvg, by turns: ms, median and range; the ratio is that of the medians."""
    rows = [["d", "Flower's FedAvg", "ours", "ours / Flower's"]]
    rng = np.random.default_rng(0)
    become_server()
    for d in (10**5, 10**6, 10**7):
        shape = (6, d // 6)
        sent = rng.normal(size=shape).astype(np.float32)
        model = ArrayRecord({f"layer-{n}": Array(part) for n, part in enumerate(sent)})
        grid = cast(Grid, Stub(clients))
        ours = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients)
        ours.open(model, 1)
        requests = list(ours.configure_train(1, model, ConfigRecord(), grid))
        replies = []
        for request in requests:
            trained = (sent + rng.normal(size=shape) / 100).astype(np.float32)
            arrays = ArrayRecord({f"layer-{n}": Array(part) for n, part in enumerate(trained)})
            metrics = MetricRecord({"num-examples": 600, "train-loss": 1.0})
            content = RecordDict({"arrays": arrays, "metrics": metrics})
            replies.append(Message(content, reply_to=request))
        aggregate = {"flower": FlowerFedAvg().aggregate_train, "ours": ours.aggregate_train}
        times = in_turns({n: partial(a, 1, replies) for n, a in aggregate.items()}, TURNS)
        ratio = statistics.median(times["ours"]) / statistics.median(times["flower"])
        rows.append([f"{d:.0e}", shown(times["flower"]), shown(times["ours"]), f"{ratio:.2f}"])
    return rows
