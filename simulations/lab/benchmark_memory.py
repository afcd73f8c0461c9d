"""What the memory of a simulation's server process consists of."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from simulations import problems
from simulations.config import RunConfig
from simulations.lab.superlink import flwr_run
from simulations.server_app import return_memory

SETTING: dict[str, Any] = {
    "dataset": "mnist",
    "model": "cnn1",
    "partition": "iid",
    "algorithm": "fedadmm",
    "clients": 1000,
    "lr": 0.1,
    "momentum": 0.0,
    "random-epochs": "false",
    "steps": 1,
    "batch-size": 20,
}
EVERY = 10
"""Rounds between two rows."""
BARE = {
    "pyproject.toml": """\
[project]
name = "bare"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "bare.apps:server"
clientapp = "bare.apps:client"
""",
    "bare/__init__.py": "",
    "bare/apps.py": """\
import time
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
client = ClientApp()
server = ServerApp()
@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    time.sleep(5)
    print("it is ready", flush=True)
    time.sleep(2)
""",
}
"""A Flower App of PyTorch that does nothing."""


def memory_of(program: str) -> tuple[float, float]:
    """Return resident and peak memory, in MB, of the youngest process of that name below this."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # gone meanwhile
            if program in " ".join(process.cmdline()):
                pids.append(process.pid)
    status = Path(f"/proc/{max(pids)}/status").read_text()  # psutil does not know the peak
    sizes = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+)", status))
    return int(sizes["VmRSS"]) * 1024 / 1e6, int(sizes["VmHWM"]) * 1024 / 1e6


def memory(folder: Path, rounds: int = 50) -> list[list[str]]:
    """1,000 clients x CNN1, 100 a round, FedADMM, state in a directory, one step each, on Ray with
    two workers: MB of the server process, and of what they are."""
    bare = without_clients(folder / "bare")
    rows = [["server process", "MB resident", "its peak, MB"]]
    rows.append(["PyTorch, Flower and Ray, without clients", f"{bare:.0f}", ""])
    rows += [[what, f"+ {mb:.0f}", ""] for what, mb in parts_of(SETTING)]
    keys = {"rounds": rounds, "state-dir": str(folder / "state"), "output": str(folder / "run")}
    config = RunConfig.parse(SETTING | keys)

    def look(line: str) -> None:
        if match := re.search(r" round (\d+)/", line):
            sizes = [f"{mb:.0f}" for mb in memory_of("flwr-simulation")]
            print(line, sizes, file=sys.stderr, flush=True)
            if (number := int(match[1])) == 1 or number % EVERY == 0:
                rows.append([f"after round {number}", *sizes])

    flwr_run(config.to_run_config(), num_supernodes=2, workers=2, on_line=look)
    return rows


def without_clients(folder: Path) -> float:
    """Return the MB of a server process in which nothing is computed."""
    for name, text in BARE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    rows: list[float] = []

    def look(line: str) -> None:
        if line == "it is ready":
            rows.append(memory_of("flwr-simulation")[0])

    flwr_run({}, num_supernodes=2, workers=2, on_line=look, app=folder)
    return rows[0]


def parts_of(setting: dict[str, Any]) -> list[tuple[str, float]]:
    """Return what a server does before the first round, and by how many MB its process grows."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown, (setting,))


def _grown(setting: dict[str, Any]) -> list[tuple[str, float]]:
    for name in ("torch", "ray", "flwr.serverapp", "flwr.clientapp"):
        importlib.import_module(name)
    sizes: list[tuple[str, float]] = []

    def note(what: str, step: Callable[[], Any]) -> Any:
        before = _resident()
        made = step()
        sizes.append((what, _resident() - before))
        return made

    return_memory()
    config = RunConfig.parse(setting)
    note("then the data set, without its images", lambda: problems.dataset(config))
    test = note("then test images and a model", lambda: problems.problem(config, "test"))
    note("then a test of the model", test.evaluate)
    note("the partition, by flwr-datasets: not on Ray", lambda: problems.parts(config))
    return sizes


def _resident() -> float:
    return float(psutil.Process().memory_info().rss / 1e6)
