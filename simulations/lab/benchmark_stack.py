"""Where clients that are trained as one stack are faster than one by one, and by how much."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from clients import Border, FedAvgClient, Problem
from clients.stacking import choice
from clients.stacking.fit import fit_all
from fl_strategies.core.randomness import stream
from simulations import models

SAMPLES, EPOCHS, BATCHES, COUNTS = 50, 2, (10, 50), (5, 10, 30, 100)
"""Of a client; mini-batch sizes, of which a row has the lesser gain; clients of a stack."""

GAINS = Path(choice.__file__).with_name("gains.json")

MODELS: dict[str, tuple[tuple[int, ...], Callable[[tuple[int, ...]], nn.Module]]] = {
    "logistic": ((60,), lambda shape: models.build("logistic", shape, 10, seed=1)),
    "logistic on 784": ((784,), lambda shape: models.build("logistic", shape, 10, seed=1)),
    "mlp 784-32-10": (
        (784,),
        lambda shape: nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)),
    ),
    "mlp": ((784,), lambda shape: models.build("mlp", shape, 10, seed=1)),
    "mlp 784-200-200-10": (
        (784,),
        lambda shape: nn.Sequential(
            nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
        ),
    ),
    "small cnn": (
        (1, 28, 28),
        lambda shape: nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10)
        ),
    ),
    "layer norm": (
        (60,),
        lambda shape: nn.Sequential(
            nn.Linear(60, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)
        ),
    ),
    "cnn-6-16": ((1, 28, 28), lambda shape: models.build("cnn-6-16", shape, 10, seed=1)),
}


def gain(model: Border, shape: tuple[int, ...], clients: int, batch_size: int) -> float:
    """Return how many times faster a stack trains FedAvg's clients: the median of five turns."""
    rng = stream(0, "benchmark-stack")
    x = torch.from_numpy(rng.normal(size=(clients * SAMPLES, *shape)).astype(np.float32))
    x, y = x.to(model.device), torch.from_numpy(rng.integers(10, size=len(x)))
    rows = torch.split(torch.arange(len(x)), SAMPLES)
    members = [
        FedAvgClient(Problem(model, cross_entropy, x, y, rows=samples), client_id=i)
        for i, samples in enumerate(rows)
    ]
    settings: dict[str, Any] = {"epochs": EPOCHS, "batch-size": batch_size, "lr": 0.01}
    arrays = model.arrays(model.vector)
    configs = [settings | {"server-round": 1, "seed": 1}] * clients

    on_gpu = model.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time

    def seconds(stack: choice.Setting) -> float:
        started = clock()
        fit_all(members, arrays, configs, stack=stack)  # uploads are on the host when it ends
        return clock() - started

    ratios = []
    for turn in range(6):  # the first warms up
        stacked, alone = seconds(clients), seconds("off")
        ratios += [alone / stacked] * (turn > 0)
    return statistics.median(ratios)


def stack(folder: Path, write: bool = False) -> list[list[str]]:
    """Gain of a stack over one by one, FedAvg, 50 samples a client, CPU time or a GPU's; the
    lesser of that with B = 10 and B = 50."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    others = [row for row in choice.table() if row["device"] != device.type]
    rows = [["model", "kind", "d", *(f"{clients} clients" for clients in COUNTS)]]
    for name, (shape, build) in MODELS.items():
        model = Border(build(shape).to(device))
        kind, d = choice.kind_of(model.module), model.size
        gains = [min(gain(model, shape, n, size) for size in BATCHES) for n in COUNTS]
        rows.append([name, kind, f"{d:,}", *(f"{g:.2f}" for g in gains)])
        others += [
            {"device": device.type, "kind": kind, "d": d, "clients": n, "gain": round(g, 2)}
            for n, g in zip(COUNTS, gains, strict=True)
        ]
    if write:
        lines = ",\n".join(f" {json.dumps(row)}" for row in others)
        GAINS.write_text(f"[\n{lines}\n]\n")
    return rows
