"""The results of a run: its summary, its model, and a progress line per round."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from logging import INFO, WARNING
from math import inf
from pathlib import Path
from statistics import fmean

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies import (
    ClientHistory,
    History,
    RoundInfo,
)
from fl_strategies.core.files import write_atomically
from fl_strategies.core.log import log
from fl_strategies.core.metric_names import SKIPPED
from fl_strategies.server.callbacks import Rows, finite, model_bytes
from fl_strategies.server.run import round_line
from simulations.config import RunConfig
from simulations.interrupts import undivided

SAVE_SECONDS = 10.0
"""How often a running experiment saves its model and summary."""


LAST_ROUNDS = 5
"""The estimate of the time left uses so many of the last rounds."""


@dataclass(frozen=True)
class Summary:
    """The result of a run. Accuracies are shares of the test set; bytes are those of all rounds."""

    algorithm: str
    final_accuracy: float | None
    best_accuracy: float | None
    final_loss: float | None
    rounds: int
    rounds_to_target: int | None
    target: float
    bytes_up: int
    bytes_down: int
    seconds: float
    model_sha256: str
    finished: bool
    gradient_norm2: float | None = None
    """||grad f||^2 at the end, if it was measured."""
    server_device: str = "cpu"
    """The kind of device that the server tested on."""
    client_devices: dict[str, int] = field(default_factory=dict)
    """How many clients reported that they trained on which device."""
    missing: float = 0.0
    """Share of the training requests without a reply or with an error."""
    epsilon: float | None = None
    """Epsilon of all rounds, if the run was private and it is finite."""
    given_up: str = ""
    """Why the run ended early, if no reply was usable any more (it diverged)."""


class Together:
    """Callbacks that Ctrl-C cannot separate: all are called or none, so that their files agree."""

    def __init__(self, *callbacks: History | ClientHistory | Progress) -> None:
        self.callbacks = callbacks

    def __call__(self, info: RoundInfo) -> None:
        with undivided():
            for callback in self.callbacks:
                callback(info)

    def recall(self, rows: Rows) -> None:
        for callback in self.callbacks:
            callback.recall(rows)


def _lost(metrics: Mapping[str, float]) -> int:
    """Return how many clients did not reply to a training request, or replied with an error."""
    return int(metrics["clients-lost"] + metrics.get("clients-failed", 0))


class Progress:
    """Prints one line per round, and saves summary and model at intervals."""

    def __init__(self, config: RunConfig, folder: Path, quiet: bool = False) -> None:
        self.config, self.folder, self.quiet = config, folder, quiet
        self.label = folder.name if config.output else config.rule
        self.started = self.saved = time.monotonic()
        self.arrays: ArrayRecord | None = None
        self.rows: list[dict[str, float]] = []
        self.ends: list[float] = []
        self.given_up = ""
        self.server_device, self.client_devices = config.torch_device.type, dict[str, int]()

    def note_devices(self, computes_on: Mapping[int, str]) -> None:
        """Count the clients by device; the log reports each new kind of device."""
        before, found = self.client_devices, Counter(sorted(computes_on.values()))
        self.client_devices = dict(found)
        if found.keys() == before.keys():
            return
        clients = ", ".join(f"{kind} ({count})" for kind, count in found.items())
        log(INFO, "the server computes on %s, clients on %s", self.server_device, clients)
        if "cpu" in found.keys() - before.keys() and self.server_device != "cpu":
            log(
                WARNING,
                "%d clients compute on the CPU, the server on %s: in Flower's simulation a share of"
                " the GPU (client-resources-num-gpus=0.25 in the federation config) shows it to"
                " clients; device=%s refuses clients without one",
                found["cpu"],
                self.server_device,
                self.server_device,
            )

    def recall(self, rows: Rows) -> None:
        self.rows = [dict(row) for row in rows.values()]
        self.started -= sum(row.get("seconds", 0.0) for row in self.rows)

    def __call__(self, info: RoundInfo) -> None:
        self.arrays = info.arrays
        self.rows.append(dict(info.metrics))
        self.ends.append(time.monotonic())
        line = round_line(info.server_round, info.num_rounds, info.metrics, info.seconds)
        left = seconds_left(self.ends, info.num_rounds - info.server_round)
        if _lost(info.metrics) or not self.quiet:
            print(self.label, line + (f", {left:.0f} s left" if left else ""), flush=True)
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save(finished=False)

    def used(self) -> bool:
        """Return whether any round was not skipped."""
        return any(SKIPPED not in row for row in self.rows)

    def save(self, finished: bool) -> Summary:
        summary = self.summary(finished)
        text = json.dumps(asdict(summary), indent=2)
        write_atomically(self.folder / "summary.json", text.encode())
        if self.arrays is not None:
            write_atomically(self.folder / "model.safetensors", model_bytes(self.arrays))
        self.saved = time.monotonic()
        return summary

    def summary(self, finished: bool) -> Summary:
        tested = {r: row for r, row in enumerate(self.rows, start=1) if "test-accuracy" in row}
        accuracies = [row["test-accuracy"] for row in tested.values()]
        target = self.config.target
        reached = (
            int(row.get("algorithm-round", number))  # FedPD skips communication in some
            for number, row in tested.items()
            if row["test-accuracy"] >= target
        )
        missing = sum(_lost(row) for row in self.rows)
        asked = sum(row["clients-asked"] for row in self.rows)
        return Summary(
            algorithm=self.config.rule,
            final_accuracy=accuracies[-1] if accuracies else None,
            best_accuracy=max(accuracies, default=None),
            final_loss=finite([*tested.values()][-1]["test-loss"]) if tested else None,
            rounds=len(self.rows),
            rounds_to_target=next(reached, None),
            target=target,
            bytes_up=int(sum(row["bytes-up"] for row in self.rows)),
            bytes_down=int(sum(row["bytes-down"] for row in self.rows)),
            seconds=round(time.monotonic() - self.started, 3),
            model_sha256=model_sha256(self.arrays) if self.arrays is not None else "",
            finished=finished,
            gradient_norm2=self.rows[-1].get("gradient-norm2") if self.rows else None,
            server_device=self.server_device,
            client_devices=self.client_devices,
            missing=missing / asked if asked else 0.0,
            epsilon=finite(self.rows[-1].get("epsilon", inf)) if self.rows else None,
            given_up=self.given_up,
        )


def seconds_left(ends: Sequence[float], rounds: int) -> float | None:
    """Return the time for ``rounds`` more rounds; None before two rounds have ended.

    The first round, in which data and workers are prepared, is not used for the estimate.
    """
    last = [end - begin for begin, end in pairwise(ends[-LAST_ROUNDS - 1 :])]
    return rounds * fmean(last) if last else None


def model_sha256(arrays: ArrayRecord) -> str:
    """Return the SHA-256 of a model's names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        values = array.numpy()
        digest.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()
