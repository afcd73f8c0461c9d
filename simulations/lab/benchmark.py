"""What the engines cost, against plain PyTorch doing the same gradient steps.

    python -m simulations.lab.benchmark cnn | small | half | aggregation | nodes | startup | memory
        | load | slow-node | delta-sgd | coding | stack | rounds | scale | flute | pfl

Each prints one Markdown table. Run them on an idle machine; MNIST is found as ``simulations.data``
says (``FL_DATA``). Times are of the rounds after the first, the first one loading data and code.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn.functional import cross_entropy

from clients import LocalTraining, solve
from clients.learning.problem import laid_out
from fl_strategies.core.files import read_lines
from fl_strategies.core.log import mute_below
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from simulations import data, models
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.lab import (
    benchmark_coding,
    benchmark_memory,
    benchmark_published,
    benchmark_scale,
    benchmark_server,
    benchmark_slow_node,
    benchmark_stack,
)
from simulations.lab.benchmark_memory import memory_of
from simulations.lab.command_line import Command
from simulations.lab.deployment import Federation
from simulations.lab.superlink import ROOT, flwr_run, running
from simulations.problems import problem
from simulations.tables import grid

SAMPLES = 60_000
"""MNIST's for training."""
POLL = 0.1
"""Seconds between two looks of Flower's simulation at its queue."""
CNN: dict[str, Any] = {
    "dataset": "mnist",
    "model": "cnn1",
    "partition": "iid",
    "lr": 0.1,
    "momentum": 0.0,
    "epochs": 5,
    "random-epochs": "true",
    "batch-size": 200,
    "rounds": 7,
}
SMALL: dict[str, Any] = {
    "dataset": "mnist",
    "model": "mlp",
    "partition": "iid",
    "lr": 0.1,
    "momentum": 0.0,
    "epochs": 1,
    "random-epochs": "false",
    "batch-size": 20,
    "rounds": 21,
}


def plain_loop(config: RunConfig, steps: list[int]) -> float:
    """Return the seconds of ``steps[i]`` SGD steps for client i, one client after the other.

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

    def client(count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        while count > 0:
            for batch in torch.split(torch.from_numpy(rng.permutation(samples)), config.batch_size):
                optimizer.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                count -= 1
                if count == 0:
                    return

    client(3)  # warm
    started = time.perf_counter()
    for count in steps:
        client(count)
    return time.perf_counter() - started


def plain_on_two(config: RunConfig, steps: list[int]) -> float:
    """Return the seconds of the same on two processes, each with every other client."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        return max(pool.starmap(plain_loop, [(config, steps[0::2]), (config, steps[1::2])]))


def steps_of(config: RunConfig) -> list[int]:
    """Return the local steps of every client asked in rounds 2, 3, ..., as the engine's draws."""
    batches = -(-(SAMPLES // config.clients) // config.batch_size)
    steps = []
    for server_round in range(2, config.rounds + 1):
        clients = stream(config.seed, "sample", server_round).choice(
            range(config.clients), int(config.fraction * config.clients), replace=False
        )
        for client in sorted(int(c) for c in clients):
            epochs = config.epochs
            if config.random_epochs == "true":
                rng = stream(config.seed, "local", server_round, client)
                rng.integers(2**63)  # the draw that seeds dropout comes first
                epochs = int(rng.integers(1, config.epochs, endpoint=True))
            steps.append(epochs * batches)
    return steps


def history(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run's history after the first round."""
    return read_lines(folder / "history.jsonl")[1:]


def on_engine(config: RunConfig, engine: str, folder: Path) -> tuple[float, int]:
    """Return the seconds of the training phases after round 1, and the local steps in them."""
    config = replace(config, output=str(folder))
    if engine == "ray":
        flwr_run(config.to_run_config(), num_supernodes=2, workers=2, on_line=lambda line: None)
    else:
        run_in_process(config, workers=2 if engine == "two workers" else 1)
    rows = history(folder)
    steps = sum(row["steps-mean"] * row["clients-used"] for row in rows)
    return sum(row["seconds"] for row in rows), round(steps)


def cnn(folder: Path) -> list[list[str]]:
    """MNIST, CNN1, 10 of 100 clients, E ~ U{1..5}, B = 200: Ray with two workers."""
    config = RunConfig.parse(CNN | {"algorithm": "fedavg"})
    plain = plain_on_two(config, steps_of(config))
    rows = [["seconds", "local steps", "against plain"]]
    rows.append([f"plain loop, two processes: {plain:.1f}", f"{sum(steps_of(config))}", "1"])
    seconds = {}
    for algorithm in ("fedavg", "fedadmm"):
        config = RunConfig.parse(CNN | {"algorithm": algorithm})
        seconds[algorithm], steps = on_engine(config, "ray", folder / algorithm)
        ratio = seconds[algorithm] / plain
        rows.append([f"{algorithm} on Ray: {seconds[algorithm]:.1f}", str(steps), f"{ratio:.2f}"])
    rows.append(["FedADMM / FedAvg", "", f"{seconds['fedadmm'] / seconds['fedavg']:.2f}"])
    return rows


def small(folder: Path, turns: int = 5) -> list[list[str]]:
    """MNIST, MLP 784-128-10, 10 of 100 clients, E = 1, B = 20, where overhead is everything: ms a
    round, median and range of five turns; the ratio is that of the medians."""
    config = RunConfig.parse(SMALL | {"algorithm": "fedavg"})
    steps = steps_of(config)
    times: dict[str, list[float]] = {"plain loop": [], "in-process": []}
    counts = {"plain loop": sum(steps)}
    per_round = 1000 / (config.rounds - 1)
    for turn in range(turns):
        times["plain loop"].append(plain_loop(config, steps) * per_round)
        seconds, counts["in-process"] = on_engine(config, "in-process", folder / f"{turn}")
        times["in-process"].append(seconds * per_round)
    times["ray, two workers"] = []
    for turn in range(2):
        seconds, counts["ray, two workers"] = on_engine(config, "ray", folder / f"ray-{turn}")
        times["ray, two workers"].append(seconds * per_round)
    plain = statistics.median(times["plain loop"])
    rows = [["engine", "ms a round", "local steps", "against the plain loop"]]
    for name, durations in times.items():
        ratio = f"{statistics.median(durations) / plain:.2f}"
        if name.startswith("ray"):
            ratio = f"{2 * statistics.median(durations) / plain:.2f} of its half"
        rows.append([name, benchmark_server.shown(durations), f"{counts[name]}", ratio])
    for what, spent in of_a_round(folder / "ray-1", folder / f"{turns - 1}", plain / 2):
        rows.append([f"of the last Ray run's: {what}", f"{spent:.0f}", "", ""])
    most = plain / 2 + 1000 * 2 * POLL
    rows.append(["aim for Ray: half the loop and two polls", f"{most:.0f}", "", ""])
    return rows


def of_a_round(ray: Path, in_process: Path, compute: float) -> list[tuple[str, float]]:
    """Return what a round on Ray is made of, in ms, ``compute`` being that of its steps.

    The server's part is the in-process engine's: what is left of a round when its host is busy.
    """
    rows, alone = history(ray), history(in_process)
    whole = 1000 * statistics.fmean(row["seconds"] for row in rows)
    busy = 1000 * statistics.fmean(row["seconds"] * row["busy-share-max"] for row in rows)
    server = 1000 * statistics.fmean(row["seconds"] * (1 - row["busy-share-max"]) for row in alone)
    return [
        ("steps, half of the plain loop's", compute),
        ("the busier worker besides: data, checks, encoding", busy - compute),
        ("server: requests and replies, as in-process", server),
        ("Flower and Ray: polls, messages; the server's sums", whole - busy - server),
    ]


def half(folder: Path, turns: int = 3) -> list[list[str]]:
    """MNIST, MLP 784-128-10, 100 of 1,000 clients of 60 samples, B = 20, E = 1, 5, 20: ms a round
    of each engine, by turns, median and range; and times half of a plain PyTorch loop of the same
    steps on one thread."""
    engines = ("in-process", "two workers", "ray")
    rows = [["E", "half of the plain loop", *engines]]
    for epochs in (1, 5, 20):
        keys = {"clients": 1000, "fraction": 0.1, "epochs": epochs, "rounds": 8}
        config = RunConfig.parse(SMALL | keys | {"algorithm": "fedavg"})
        steps, per_round = steps_of(config), 1000 / (config.rounds - 1)
        plain: list[float] = []
        times: dict[str, list[float]] = {engine: [] for engine in engines}
        for turn in range(turns):
            plain.append(plain_loop(config, steps) * per_round / 2)
            for engine in engines:
                seconds, _ = on_engine(config, engine, folder / f"{epochs}-{engine}-{turn}")
                times[engine].append(seconds * per_round)
        base = statistics.median(plain)
        cells = [
            f"{benchmark_server.shown(each)}, x {statistics.median(each) / base:.2f}"
            for each in times.values()
        ]
        rows.append([f"{epochs}", benchmark_server.shown(plain), *cells])
    return rows


def startup(folder: Path) -> list[list[str]]:
    """MNIST, MLP, one round of 100 of 1,000 clients as a command, imports and data included: in one
    process and on two workers, and the largest memory that a worker shares with no other."""
    keys = SMALL | {"algorithms": "fedavg", "clients": 1000, "fraction": 0.1, "rounds": 1}
    options = [f"--{name}={value}" for name, value in keys.items()]
    rows = [["workers", "seconds", "MB of a worker"]]
    for workers in (1, 2, 1, 2, 1, 2):
        more = [f"--workers={workers}", "--quiet", f"--output={folder / f'{len(rows)}'}"]
        command = [sys.executable, "-m", "simulations.lab.compare", *options, *more]
        started, most = time.perf_counter(), 0.0
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            time.sleep(0.2)
            with suppress(psutil.Error):
                trainers = [child for child in process.children() if "-P" in child.cmdline()]
                sizes = [child.memory_full_info().uss / 1e6 for child in trainers]
                most = max(most, *sizes, 0.0)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        seconds = time.perf_counter() - started
        rows.append([f"{workers}", f"{seconds:.1f}", f"{most:.0f}" if workers > 1 else ""])
    return rows


def load(folder: Path, clients: int = 200, rounds: int = 20) -> list[list[str]]:
    """Digits, FedADMM, 200 clients, all of them in each of 20 rounds: one SuperLink with TLS and
    keys, its ServerApp, and the clients as threads of one process (``simulations.lab.load``)."""
    config = RunConfig.parse(
        {
            "algorithm": "fedadmm",
            "partition": "iid",
            "clients": clients,
            "rounds": rounds,
            "fraction": 1.0,
            "timeout": 900.0,
            "state-dir": str(folder / "state"),
            "output": str(folder / "run"),
        }
    )
    programs = {
        "ServerApp": "flwr-serverapp",
        "SuperLink": "flower-superlink",
        "all clients": "simulations.lab.load",
    }
    sizes: list[list[str]] = []
    with running(Federation) as link:
        link.open()
        command = [sys.executable, "-m", "simulations.lab.load"]
        ready = folder / "ready"
        process = link.start([*command, str(clients), link.address, str(link.home), str(ready)])

        def check_clients() -> None:
            if process.poll() is not None:
                raise RuntimeError("the clients ended:\n" + "\n".join(link.complaints()))

        while not ready.exists():
            check_clients()
            time.sleep(0.5)
        print(f"{clients} clients are connected", file=sys.stderr, flush=True)

        def look(line: str) -> None:
            check_clients()
            if " round " in line and "accuracy" in line:
                memory = [memory_of(program) for program in programs.values()]
                sizes.append([f"{resident:.0f}" for resident, _ in memory])
                print(line, sizes[-1], file=sys.stderr, flush=True)

        link.run(ROOT, config.to_run_config(), on_line=look)
    rows = [["round", "used of asked", "seconds", "MB down", "MB up"]]
    rows[0] += [f"{name}, MB resident" for name in programs]
    for row, size in zip(read_lines(folder / "run/history.jsonl"), sizes, strict=True):
        used = f"{row['clients-used']:.0f} of {row['clients-asked']:.0f}"
        sent = [f"{row[key] / 1e6:.3f}" for key in ("bytes-down", "bytes-up")]
        rows.append([f"{row['round']}", used, f"{row['seconds']:.1f}", *sent, *size])
    return rows


def delta_sgd(folder: Path) -> list[list[str]]:
    """MNIST, Delta-SGD's CNN, B = 64: local steps a second of one core, 8 a client, no engine."""
    torch.set_num_threads(1)
    config = RunConfig.parse(SMALL | {"algorithm": "fedavg", "model": "cnn-10-20"})
    task = problem(config, "train", np.arange(500))
    start = task.model.vector.clone()
    rates = {"sgd": 0.1, "sps": 1.0, "delta-sgd": 0.2}
    seconds = dict.fromkeys(rates, float("inf"))
    for turn in range(15):  # by turns, the best of each: the machine may be busy
        for solver, lr in rates.items():
            training = LocalTraining(solver=solver, lr=lr, batch_size=64)
            rng = stream(1, "local", turn)
            started = time.process_time()
            solved = solve(task, start, Subproblem(0.0, 0.0, start), training, rng)
            spent = (time.process_time() - started) / solved.steps
            seconds[solver] = min(spent, seconds[solver])
    rows = [["solver", "steps per CPU second", "against SGD"]]
    for solver, spent in seconds.items():
        rows.append([solver, f"{1 / spent:.0f}", f"{seconds['sgd'] / spent:.2f}"])
    return rows


BENCHMARKS: dict[str, Callable[[Path], list[list[str]]]] = {
    "cnn": cnn,
    "small": small,
    "aggregation": benchmark_server.aggregation,
    "nodes": benchmark_server.nodes,
    "half": half,
    "startup": startup,
    "memory": benchmark_memory.memory,
    "load": load,
    "slow-node": benchmark_slow_node.slow_node,
    "delta-sgd": delta_sgd,
    "coding": benchmark_coding.coding,
    "stack": benchmark_stack.stack,
    "rounds": benchmark_scale.rounds,
    "scale": benchmark_scale.scale,
    "flute": benchmark_published.flute,
    "pfl": benchmark_published.pfl,
}


def main() -> None:
    """Run one benchmark from the command line and print its table."""
    parser = Command("benchmark", __doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS, help="the benchmark")
    args = parser.read()
    mute_below(logging.ERROR)
    benchmark = BENCHMARKS[args.benchmark]
    with parser.explained(), tempfile.TemporaryDirectory() as folder:
        rows = benchmark(Path(folder))
    print(f"\n{benchmark.__doc__}\n")
    header, *body = rows
    print(grid(header, body), end="")
    print(f"\n({os.cpu_count()} cores, torch {torch.__version__})")


if __name__ == "__main__":
    main()
