"""What coding an upload costs, next to the local training that makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from clients import LocalTraining, solve
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.parts.compression import BFloat16, Compression, TopK
from fl_strategies.parts.qsgd import QSGD
from simulations.config import RunConfig
from simulations.lab.benchmark_server import in_turns, shown
from simulations.problems import problem

ROUND = {"algorithm": "fedavg", "dataset": "mnist", "model": "cnn1", "lr": 0.1, "batch-size": 200}
EPOCHS = 3
"""The mean of U{1..5}."""


def coded(codec: Compression, change: np.ndarray) -> None:
    """Do what is done of a change: code it, keep what is left, and decode it at the server."""
    code = codec.encode(change, np.random.default_rng(0))
    decoded = codec.decode(code, change.size, change.dtype)
    if codec.feedback:
        np.subtract(change, decoded)
    codec.decode(code, change.size, change.dtype)


def coding(folder: Path, turns: int = 3) -> list[list[str]]:
    """MNIST, CNN1, a client of 600 samples, E = 3, B = 200, one thread: ms of its local training,
    and of coding its change (client and server), by turns, median and range."""
    torch.set_num_threads(1)
    task = problem(RunConfig.parse(ROUND), "train", np.arange(600))
    start = task.model.vector.clone()
    training = LocalTraining(lr=0.1, batch_size=200, epochs=EPOCHS)
    rng = stream(1, "local", 0)
    change = (solve(task, start, Subproblem(), training, rng).w - start).numpy()
    codecs: list[Compression] = [TopK(share=0.01), BFloat16(), QSGD()]
    trained = partial(solve, task, start, Subproblem(), training, rng)
    candidates: dict[str, Callable[[], object]] = {"local training": trained}
    candidates |= {str(codec): partial(coded, codec, change) for codec in codecs}
    times = in_turns(candidates, turns)
    whole = median(times["local training"])
    rows = [["what", "ms", "of local training"]]
    return rows + [
        [name, shown(spent), f"{100 * median(spent) / whole:.1f} %"]
        for name, spent in times.items()
    ]
