"""What the engines cost, against plain PyTorch doing the same gradient steps.

    python -m simulations.lab.benchmark half | aggregation | memory | scale | peers | stack

Each prints one Markdown table. Run them on an idle machine; MNIST is found as ``simulations.data``
says (``FL_DATA``). Times are of the rounds after the first, the first one loading data and code.
"""

from __future__ import annotations

import inspect
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fl_strategies.core.files import read_lines
from fl_strategies.core.log import mute_below
from simulations import data, models
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.lab import (
    benchmark_memory,
    benchmark_peers,
    benchmark_scale,
    benchmark_server,
    benchmark_stack,
)
from simulations.lab.command_line import Command
from simulations.lab.superlink import flwr_run
from simulations.problems import laid_out
from simulations.tables import grid

SAMPLES = 60_000
"""MNIST's for training."""
SETTING: dict[str, Any] = {
    "algorithm": "fedavg",
    "dataset": "mnist",
    "model": "mlp",
    "partition": "iid",
    "clients": 1000,
    "fraction": 0.1,
    "lr": 0.1,
    "momentum": 0.0,
    "random-epochs": "false",
    "batch-size": 20,
    "rounds": 8,
}


def plain_loop(config: RunConfig) -> float:
    """Return the seconds of the SGD steps of rounds 2, 3, ..., one client after the other.

    One thread, channels-last, a fresh optimizer a client, as an experienced user writes it.
    """
    torch.set_num_threads(1)
    data_set = data.load(config.dataset)
    model = models.build(config.model, data_set.x.shape[1:], data_set.num_classes, seed=1)
    model = model.to(memory_format=torch.channels_last)
    samples = SAMPLES // config.clients
    x = laid_out(torch.from_numpy(data_set.inputs(slice(samples))))
    y = torch.from_numpy(data_set.y[:samples])
    rng = np.random.default_rng(0)

    def client(epochs: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(epochs):
            for batch in torch.split(torch.from_numpy(rng.permutation(samples)), config.batch_size):
                optimizer.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    client(1)  # warm
    started = time.perf_counter()
    for _ in range(int(config.fraction * config.clients) * (config.rounds - 1)):
        client(config.epochs)
    return time.perf_counter() - started


def on_engine(config: RunConfig, engine: str, folder: Path) -> float:
    """Return the seconds of the training phases after round 1."""
    config = replace(config, output=str(folder))
    if engine == "ray":
        flwr_run(config.to_run_config(), num_supernodes=2, workers=2, on_line=lambda line: None)
    else:
        run_in_process(config, workers=2 if engine == "two workers" else 1)
    rows: list[dict[str, float]] = read_lines(folder / "history.jsonl")
    return sum(row["seconds"] for row in rows[1:])


def half(folder: Path, turns: int = 3) -> list[list[str]]:
    """MNIST, MLP 784-128-10, 100 of 1,000 clients of 60 samples, B = 20, E = 1, 5, 20: ms a round
    of each engine, by turns, median and range; and times half of a plain PyTorch loop of the same
    steps on one thread."""
    engines = ("in-process", "two workers", "ray")
    rows = [["E", "half of the plain loop", *engines]]
    for epochs in (1, 5, 20):
        config = RunConfig.parse(SETTING | {"epochs": epochs})
        per_round = 1000 / (config.rounds - 1)
        plain: list[float] = []
        times: dict[str, list[float]] = {engine: [] for engine in engines}
        for turn in range(turns):
            plain.append(plain_loop(config) * per_round / 2)
            for engine in engines:
                seconds = on_engine(config, engine, folder / f"{epochs}-{engine}-{turn}")
                times[engine].append(seconds * per_round)
        base = statistics.median(plain)
        cells = [
            f"{benchmark_server.shown(each)}, x {statistics.median(each) / base:.2f}"
            for each in times.values()
        ]
        rows.append([f"{epochs}", benchmark_server.shown(plain), *cells])
    return rows


BENCHMARKS: dict[str, Callable[..., list[list[str]]]] = {
    "half": half,
    "aggregation": benchmark_server.aggregation,
    "memory": benchmark_memory.memory,
    "scale": benchmark_scale.scale,
    "peers": benchmark_peers.peers,
    "stack": benchmark_stack.stack,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one benchmark from the command line and print its table."""
    parser = Command("benchmark", __doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS, help="the benchmark")
    about = (
        "of stack: put the gains into clients/stacking/gains.json, by which stack=auto decides; of"
        " peers: put the table on the page of simulation at scale"
    )
    parser.add_argument("--write", action="store_true", help=about)
    about = (
        "of peers: the folder that holds pfl-research, pip install --no-deps --target FOLDER"
        " pfl prv-accountant dp-accounting; without it this row is left out"
    )
    parser.add_argument("--peers", type=benchmark_peers.with_pfl, metavar="FOLDER", help=about)
    args = parser.read(arguments)
    options = {name: value for name in ("write", "peers") if (value := getattr(args, name))}
    for name in options.keys() - inspect.signature(BENCHMARKS[args.benchmark]).parameters:
        takes = [n for n, made in BENCHMARKS.items() if name in inspect.signature(made).parameters]
        parser.error(f"--{name} is for {' and '.join(takes)}")
    mute_below(logging.ERROR)
    benchmark = BENCHMARKS[args.benchmark]
    with parser.explained(), tempfile.TemporaryDirectory() as folder:
        rows = benchmark(Path(folder), **options)
    print(f"\n{benchmark.__doc__}\n")
    header, *body = rows
    print(grid(header, body), end="")
    print(f"\n({os.cpu_count()} cores, torch {torch.__version__})")


if __name__ == "__main__":
    main()
