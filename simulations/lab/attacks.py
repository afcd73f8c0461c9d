"""What attackers do to a model under each combining part: the table of SECURITY.md.

    python -m simulations.lab.attacks --output DIR

A fifth of 20 clients are attackers. They train as the others do, see all honest uploads, and upload
instead, with u_i a client's change w_i - theta, mean and deviation those of the honest changes:

large          theta + 1e30
sign flip      theta - 5 u_i
ALIE           theta + mean - 1.5 deviation, number by number     (Baruch et al., NeurIPS 2019)
inner product  theta - 0.5 mean                                   (Xie et al., UAI 2020)

FedAvg, 20 rounds, logistic regression on scikit-learn's digits, Dirichlet(1) partition. DIR gets
``attacks.md``, ``.csv`` and ``.json``: test accuracy in per cent after the last round, the mean
over ``--seeds``, by attack and part. A run that has no finite model
any more counts with the accuracy of its last one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Message, MessageType

from clients.node.in_process import InProcessGrid
from fl_strategies import NothingUsable
from simulations.client_app import app
from simulations.config import RunConfig
from simulations.experiment import run
from simulations.lab.command_line import Command, numbers
from simulations.problems import kept_flags
from simulations.tables import grid, write_table

CLIENTS, ATTACKERS = 20, 4
PARTS = {
    "mean": "",
    "median": "median",
    "trimmed mean": f"trimmed-mean share={ATTACKERS / CLIENTS}",
    "geometric median": "geometric-median",
    "Krum": f"krum attackers={ATTACKERS}",
    "multi-Krum": f"multi-krum attackers={ATTACKERS}",
}
Stack = npt.NDArray[np.float64]
Attack = Callable[[Stack, Stack], Stack]
"""The attackers' changes [f, d], from their own [f, d] and the honest ones [n - f, d]."""

ATTACKS: dict[str, Attack] = {
    "none": lambda own, honest: own,
    "large": lambda own, honest: np.full_like(own, 1e30),
    "sign flip": lambda own, honest: -5.0 * own,
    "ALIE": lambda own, honest: np.tile(honest.mean(0) - 1.5 * honest.std(0), (len(own), 1)),
    "inner product": lambda own, honest: np.tile(-0.5 * honest.mean(0), (len(own), 1)),
}
CONFIG: Mapping[str, Any] = {
    "algorithm": "fedavg",
    "params": "weights=uniform",
    "dataset": "digits",
    "model": "logistic",
    "partition": "dirichlet",
    "partition-params": "alpha=1",
    "clients": CLIENTS,
    "fraction": 1.0,
    "rounds": 20,
    "epochs": 1,
    "lr": 0.1,
    "evaluate-every": 1,
}


class Attacked(InProcessGrid):
    """A federation, a node per client, the first ``ATTACKERS`` of which attack."""

    def __init__(self, attack: Attack, **options: Any) -> None:
        super().__init__(app, CLIENTS, **options)
        self.attack = attack
        self.attackers = {*[*self.contexts][:ATTACKERS]}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sent = list(messages)
        replies = list(super().send_and_receive(sent, timeout=timeout))
        if sent and sent[0].metadata.message_type == MessageType.TRAIN:
            theta = packed(next(iter(sent[0].content.array_records.values())))
            good = [reply for reply in replies if reply.has_content()]
            changes = {r.metadata.src_node_id: packed(_arrays(r)) - theta for r in good}
            own = np.array([u for node, u in changes.items() if node in self.attackers])
            honest = np.array([u for node, u in changes.items() if node not in self.attackers])
            theirs = iter(self.attack(own, honest) if len(own) and len(honest) else own)
            for reply in good:
                if reply.metadata.src_node_id in self.attackers:
                    unpack_into(_arrays(reply), theta + next(theirs))
        return replies


def packed(record: ArrayRecord) -> Stack:
    """Return all arrays of a record as one vector."""
    return np.concatenate([array.numpy().ravel() for array in record.values()]).astype(np.float64)


def unpack_into(record: ArrayRecord, vector: Stack) -> None:
    """Replace the record's arrays by those of ``vector``."""
    start = 0
    for name, array in record.items():
        like = array.numpy()
        part = vector[start : start + like.size].reshape(like.shape).astype(like.dtype)
        record[name], start = Array(part), start + like.size


def _arrays(reply: Message) -> ArrayRecord:
    return next(iter(reply.content.array_records.values()))


def accuracy(part: str, attack: Attack, seed: int, **config: Any) -> float:
    """Return the test accuracy after the last round in which the model could be used."""
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        given = {**CONFIG, "combine": part, "seed": seed, "output": folder, **config}
        parsed = RunConfig.parse(given)
        try:
            with kept_flags():
                on = Attacked(attack, run_config=parsed.to_run_config())
                run(parsed, on, [lambda i: found.append(i.metrics["test-accuracy"])], quiet=True)
        except NothingUsable:
            pass
    return found[-1] if found else 0.0


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run every attack against every part from the command line."""
    parser = Command("attacks", __doc__)
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="results folder")
    about = "seeds of each run (1,2,3)"
    parser.add_argument("--seeds", type=numbers(int), default=[1, 2, 3], metavar="N,N", help=about)
    args = parser.read(arguments)
    rows: list[dict[str, Any]] = []
    with parser.explained(verbose=False):
        args.output.mkdir(parents=True, exist_ok=True)
        for name, attack in ATTACKS.items():
            row: dict[str, Any] = {"attack": name}
            for column, part in PARTS.items():
                row[column] = 100 * fmean(accuracy(part, attack, seed) for seed in args.seeds)
                print(f"{name}, {column}: {row[column]:.1f} %", flush=True)
            rows.append(row)
        shown = [[row["attack"], *(f"{row[part]:.1f}" for part in PARTS)] for row in rows]
        write_table(args.output / "attacks", rows, grid(["attack", *PARTS], shown))
    return rows


if __name__ == "__main__":
    main()
