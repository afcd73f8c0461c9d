"""What one slow SuperNode costs a deployment, by what the server waits for."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from fl_strategies.core.files import read_lines
from simulations.config import RunConfig
from simulations.lab.deployment import Federation
from simulations.lab.superlink import ROOT, running

WORK, SLOWED = 3.0, 10.0
"""Seconds for which a client works, and how many times as long the last one does."""
PACES: dict[str, dict[str, Any]] = {
    "FedAvg, all are waited for": {"rounds": 5},
    "FedAvg, the first 2 count": {
        "rounds": 13,
        "pace": "deadline over_select=1.5 order=arrival",
        "fraction": 0.7,
    },
    "FedAvg, buffered": {"rounds": 25, "pace": "buffered size=1 concurrency=3 order=arrival"},
    "FedADMM, asynchronous": {
        "rounds": 25,
        "algorithm": "fedadmm",
        "params": "eta=fraction",
        "pace": "buffered size=1 concurrency=3 order=arrival",
    },
}
CLIENT = f"""
import time

from clients import client_app, client_id
from simulations import client_app as plain


def client_fn(context):
    client = plain.client_fn(context)
    fit, slow = client.fit, client_id(context) == 2

    def slowed(parameters, config):
        time.sleep({WORK} * ({SLOWED} if slow else 1.0))
        return fit(parameters, config)

    client.fit = slowed
    return client


app = client_app(client_fn)
"""


def app_of(folder: Path) -> Path:
    """Return a Flower App of this repository's server, of clients that work so long."""
    folder.mkdir()
    text = (ROOT / "pyproject.toml").read_text()
    text = text.replace("simulations.client_app:app", "slowed:app")
    text = re.sub(r"fab-include = \[.*?\]", 'fab-include = ["/*.py", "/LICENSE"]', text, flags=re.S)
    (folder / "pyproject.toml").write_text(re.sub(r"fab-exclude = .*", "", text))
    (folder / "slowed.py").write_text(CLIENT)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def slow_node(folder: Path) -> list[list[str]]:
    """Three SuperNodes on this machine, whose clients work 3 s, the third one 30 s: rounds a minute
    after the first round, and how many replies of each client were used."""
    rows = [["the server", "rounds a minute", "replies used of client 0, 1, 2"]]
    with running(Federation) as link:
        link.open()
        for i in range(3):
            link.register(f"node-{i}")
            link.supernode(f"node-{i}", i, 3)
        app = app_of(folder / "app")
        for place, (name, settings) in enumerate(PACES.items()):
            output = folder / str(place)
            common = {"clients": 3, "fraction": 1.0, "node-wait": 900.0}
            states = {"state-dir": str(output / "state")} if "algorithm" in settings else {}
            given = {"algorithm": "fedavg", **common, **settings, **states, "output": str(output)}
            link.run(app, RunConfig.parse(given).to_run_config(), on_line=print_to_stderr)
            rounds = read_lines(output / "history.jsonl")[1:]
            seconds = sum(row["seconds"] for row in rounds)
            used = read_lines(output / "clients.jsonl")
            counts = [sum(row["client"] == client for row in used) for client in range(3)]
            each = ", ".join(map(str, counts))
            rows.append([name, f"{60 * len(rounds) / seconds:.1f}", each])
    return rows


def print_to_stderr(line: str) -> None:
    """Show that the runs go on."""
    if " round " in line:
        print(line, file=sys.stderr, flush=True)
