"""Settings whose times other simulators have published, on this machine, which is another one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from torch import nn
from torch.nn.functional import cross_entropy

from clients import FedAvgClient, FlatModel, InProcessGrid, Problem, client_app, client_id
from fl_strategies import FedAvg, RoundInfo
from simulations import data

FLUTE = {
    "algorithms": "fedavg",
    "dataset": "mnist",
    "model": "logistic",
    "partition": "shards",
    "clients": "1000",
    "fraction": "0.01",
    "rounds": "100",
    "epochs": "1",
    "batch-size": "10",
    "lr": "0.03",
    "momentum": "0",
    "evaluate-every": "20",
}
PFL_ROUNDS, SAMPLES, ASKED = 1500, 50, 50


def flute(folder: Path) -> list[list[str]]:
    """FLUTE's MNIST setting: FedAvg, logistic model, 10 of 1,000 clients, B = 10, lr 0.03, 100
    rounds; here two classes a client, E = 1, a test every 20 rounds: seconds of the command."""
    rows = [["simulator", "machine", "seconds", "accuracy"]]
    rows.append(["FLUTE", "its authors', GPUs", "95", ""])
    rows.append(["FLUTE", "its authors', two GPUs", "91", ""])
    rows.append(["Flower, by FLUTE's authors", "its authors', two GPUs", "4,904", ""])
    engines = {
        "in one process": [],
        "in one process, stacked": ["--stack", "auto"],
        "Ray, two workers": ["--engine", "ray"],
    }
    for number, (name, options) in enumerate(engines.items()):
        output = folder / str(number)
        words = [word for name, value in FLUTE.items() for word in (f"--{name}", value)]
        command = [sys.executable, "-m", "simulations.lab.compare", *words, *options]
        started = time.perf_counter()
        subprocess.run([*command, "--output", str(output)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        (summary,) = output.glob("fedavg*/summary.json")
        accuracy = json.loads(summary.read_text())["final_accuracy"]
        rows.append([f"this, {name}", "this one", f"{seconds:.1f}", f"{accuracy:.3f}"])
    return rows


def pfl(folder: Path, rounds: int = 4) -> list[list[str]]:
    """pfl-research's CIFAR-10 setting: FedAvg with uniform weights, 50 clients a round, 50 samples
    each, E = 1, B = 10, lr 0.1, the layers of its CNN; on one thread. The subset at hand makes 140
    of its 1,000 clients: a round is as long. Its 1,500 rounds are extrapolated, without tests."""
    torch.set_num_threads(1)
    data_set = data.load("cifar10_subset")
    x, y = torch.from_numpy(data_set.inputs()), torch.from_numpy(data_set.y)
    clients = len(y) // SAMPLES
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(y)))
    model = FlatModel(cnn())

    def client_fn(context: Context) -> FedAvgClient:
        me = client_id(context)
        samples = order[me * SAMPLES : (me + 1) * SAMPLES]
        return FedAvgClient(Problem(model, cross_entropy, x, y, rows=samples), client_id=me)

    ends: list[float] = []

    def note(info: RoundInfo) -> None:
        ends.append(time.perf_counter())

    options: dict[str, Any] = {"fraction_evaluate": 0.0, "callbacks": [note], "weights": "uniform"}
    strategy = FedAvg(
        fraction_train=ASKED / clients,
        shared_population=clients,
        local={"lr": 0.1, "batch-size": 10, "epochs": 1},
        **options,
    )
    grid = InProcessGrid(client_app(client_fn, hosts=clients), clients, hosts=1)
    strategy.start(grid, ArrayRecord(model.state_dict()), rounds + 1)
    seconds = np.diff(ends)
    hours = PFL_ROUNDS * seconds.mean() / 3600
    return [
        ["clients here", "parameters", "seconds a round", "1,500 rounds, hours (extrapolated)"],
        [
            f"{clients}",
            f"{model.vector.numel():,}",
            f"{seconds.mean():.2f} ({seconds.min():.2f} ... {seconds.max():.2f})",
            f"{hours:.1f}",
        ],
    ]


def cnn() -> nn.Module:
    """Return two 3x3 convolutions (32 and 64 filters, no padding), 2x2 pooling and 128 units."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
