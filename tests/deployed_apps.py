"""This repository's Flower App with other clients or another server, to be deployed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulations.lab.superlink import ROOT

ALL = {"fraction": 1.0, "node-wait": 900.0}
"""All clients take part in round 1, however slowly their SuperNodes start."""
HELD = """
import os
import time
from pathlib import Path

from clients import client_app, client_id
from simulations import plain_client_app


def client_fn(context):
    client, me = plain_client_app.client_fn(context), client_id(context)
    (problem,), fit, gradient = client._args, client.fit, client._args[0].gradient

    def one_batch(*batch):
        gradient(*batch)
        Path(context.run_config["output"], f"{me}.pid").write_text(str(os.getpid()))
        time.sleep(600)

    def held(parameters, config):
        if config["server-round"] == 2 and me in (0, 1):
            problem.gradient = one_batch
        return fit(parameters, config)

    client.fit = held
    return client


app = client_app(client_fn)
"""
"""This repository's ClientApp, but clients 0 and 1 stay in mid-training in round 2."""

LATE = """
import time
from pathlib import Path

from clients import client_app, client_id
from simulations import plain_client_app


def client_fn(context):
    client = plain_client_app.client_fn(context)
    fit = client.fit

    def late(parameters, config):
        while not Path(context.run_config["output"], "go").exists():
            time.sleep(0.1)
        return fit(parameters, config)

    if client_id(context) == 3:
        client.fit = late
    return client


app = client_app(client_fn)
"""
"""This repository's ClientApp, but client 3 does not begin to train before it is told to."""

MORTAL = """
import os
import random
import signal
import threading
from pathlib import Path

from flwr.serverapp import ServerApp

from simulations import experiment
from simulations.config import RunConfig

app = ServerApp()


@app.main()
def main(grid, context):
    config = RunConfig.parse(context.run_config)
    lives = Path(config.output).with_name("lives")
    life = len(list(lives.iterdir())) + 1
    note, moments, replace = lives / str(life), random.Random(life), os.replace
    note.touch()

    def die():
        note.write_text("killed")
        os.kill(os.getpid(), signal.SIGKILL)

    def name(temporary, path):
        nonlocal rounds
        if path.name.startswith("round-"):
            rounds -= 1
            if rounds == 0:
                die()
        replace(temporary, path)

    def push(messages):
        nonlocal pushes
        pushes -= 1
        if pushes == 0:
            timer = threading.Timer(moments.uniform(0.0, 3.0), die)
            timer.daemon = True
            timer.start()
        return pushed(messages)

    if life <= KILLS and life % 2:
        pushes, pushed, grid.push_messages = moments.randrange(1, 4), grid.push_messages, push
    elif life <= KILLS:
        rounds, os.replace = 2, name  # the checkpoint of a life's first round is kept
    experiment.run(config, grid)
"""
"""This repository's ServerApp, but each of its first lives is ended by SIGKILL: at a random moment
after its first, second or third messages to the nodes, or, every other one, in the midst of writing
the checkpoint of its second round."""


def app_with(folder: Path, **modules: str) -> Path:
    """Return a copy of this repository's Flower App with other modules in `simulations`.

    `plain_NAME` is the module that is replaced.
    """
    for name in ("fl_strategies", "clients", "simulations"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name, source in modules.items():
        path = folder / f"simulations/{name}.py"
        path.rename(path.with_stem(f"plain_{name}"))
        path.write_text(source)
    return folder


def until(found: Callable[[], Any]) -> Any:
    """Return what ``found`` returns once that is something."""
    deadline = time.monotonic() + 300
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value
