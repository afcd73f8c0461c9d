"""How the in-process engine grows with the population and with the clients of a round."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from torch import nn
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    Border,
    DirectoryStore,
    InProcessGrid,
    Problem,
    client_app,
    client_id,
)
from fl_strategies import FedADMM, RoundInfo
from fl_strategies.core.randomness import stream

FEATURES, CLASSES = 60, 10
LOCAL: dict[str, Any] = {"lr": 0.03, "batch-size": 10, "epochs": 5}
POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
COUNTS = (10, 30, 100, 300, 1000)
ROUNDS = 20


class Clients:
    """A population whose clients' data, 20 to 60 samples, are made when a client is asked."""

    def __init__(self, model: Border, states: Path) -> None:
        self.model, self.states = model, states

    def data(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs [n, 60] and labels [n], by a model of the client's own."""
        rng = stream(0, "scale", client)
        x = rng.normal(rng.normal(), 1.0, (int(rng.integers(20, 61)), FEATURES))
        y = np.argmax(x @ rng.normal(size=(FEATURES, CLASSES)), axis=1)
        return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)

    def client_fn(self, context: Context) -> AnyAlgorithmClient:
        """Return a client."""
        me = client_id(context)
        store = DirectoryStore(self.states, me, durable=False)
        problem = Problem(self.model, cross_entropy, *self.data(me))
        return AnyAlgorithmClient(problem, client_id=me, store=store)


def logistic() -> Border:
    """Return the model: 60 features, 10 classes."""
    torch.manual_seed(0)
    return Border(nn.Linear(FEATURES, CLASSES))


def strategy(population: int, asked: int, callbacks: Sequence[Any]) -> FedADMM:
    """Return FedADMM that asks so many clients a round."""
    return FedADMM(
        rho=0.1,
        fraction_train=asked / population,
        min_train_nodes=asked,
        fraction_evaluate=0.0,
        local=LOCAL,
        callbacks=callbacks,
        shared_population=population,
    )


def one_population(population: int, asked: int) -> dict[str, float]:
    """Return seconds until the first round ends, seconds of a later round, and peak memory in MB.

    Run in a process of its own, so that memory is this population's.
    """
    torch.set_num_threads(1)
    ends: list[float] = []

    def note(info: RoundInfo) -> None:
        ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        model = logistic()
        app = client_app(Clients(model, Path(folder)).client_fn, hosts=population, stack="auto")
        started = time.perf_counter()
        grid = InProcessGrid(app, population, hosts=1)
        one = strategy(population, asked, [note])
        one.start(grid, ArrayRecord(model.state_dict()), ROUNDS + 1)
    rounds = np.diff(ends).tolist()
    return {
        "first": ends[0] - started,
        "round": statistics.median(rounds),
        "least": min(rounds),
        "most": max(rounds),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_a_process(population: int, asked: int) -> dict[str, float]:
    """Return what :func:`one_population` finds in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(one_population, (population, asked))


def scale(folder: Path) -> list[list[str]]:
    """FedADMM, logistic model of 60 features, clients of 20 to 60 samples made on the fly, B 10,
    E 5, one process that hosts all, states in a directory: seconds of a round (median and range of
    20), of the first, and peak memory."""
    rows = [["clients", "a round", "first round, s", "round, s", "peak memory, MB"]]
    cells = [(many, 100) for many in POPULATIONS] + [(10_000, asked) for asked in COUNTS]
    for population, asked in cells:
        made = in_a_process(population, asked)
        times = f"{made['round']:.3f} ({made['least']:.3f} ... {made['most']:.3f})"
        about = [f"{population:,}", f"{asked:,}", f"{made['first']:.2f}", times]
        rows.append([*about, f"{made['memory']:.0f}"])
    return rows
