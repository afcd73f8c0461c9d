"""A run under a server of Flower's own, with our clients (``SERVERS``).

Our clients take a request that names no algorithm for FedAvg's, so that Flower's server optimizers
work with every local solver. The results are those of any run (``simulations.experiment``), but
without ``clients.jsonl``; sizes of messages are not measured, and stand as 0.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam, FedAvg

from clients import FlatModel, InProcessGrid
from fl_strategies import History, RoundInfo
from fl_strategies.core.files import FolderLock
from fl_strategies.core.reasons import root_cause
from simulations.client_app import app
from simulations.config import RunConfig
from simulations.experiment import prepare
from simulations.folders import clear
from simulations.problems import compute_repeatably, kept_flags, problem
from simulations.results import Progress, Summary

SERVERS: Mapping[str, Callable[..., FedAvg]] = {"fedadam": partial(FedAdam, eta=0.01, tau=1e-3)}
"""beta_1 = 0.9 and beta_2 = 0.99 are Flower's defaults."""
UNUSED = ("params", "fraction_evaluate", "stop_at_target", "checkpoint_every", "resume")
"""Settings that a server of Flower's does not follow."""


def run_under_flower(config: RunConfig, server: str, *, quiet: bool = False) -> Summary:
    """Run ``config`` in this process with ``SERVERS[server]``; return the summary.

    The clients of a round are drawn by Flower, from the generator of ``random``; a seed fixes them.
    Raises ``ValueError`` for an algorithm other than FedAvg, whose clients they are, and for
    settings that would do nothing; ``RuntimeError`` when a client fails.
    """
    if config.algorithm != "fedavg":
        raise ValueError(f"{server} takes the clients of fedavg, got {config.algorithm}")
    plain = RunConfig()
    for name in UNUSED:
        if (value := getattr(config, name)) != getattr(plain, name):
            raise ValueError(f"{server} does not follow {name.replace('_', '-')}, got {value!r}")
    config.check_device()
    torch.set_num_threads(1)
    model, folder = prepare(config)
    with FolderLock(folder).held(server):
        return _run(config, server, model, folder, quiet)


def _run(config: RunConfig, server: str, model: FlatModel, folder: Path, quiet: bool) -> Summary:
    clear(config, folder)
    strategy = SERVERS[server](
        fraction_train=config.fraction,
        fraction_evaluate=0.0,
        min_available_nodes=config.clients,
    )
    with kept_flags():
        compute_repeatably(config.torch_device)
        watch = _Watch(config, folder, quiet)
        run_config = config.to_run_config()
        grid = InProcessGrid(app, config.clients, run_config=run_config, fault=watch.answered)
        request = ConfigRecord({"seed": config.seed, **config.local()})
        kept = random.getstate()
        random.seed(config.seed)
        try:
            strategy.start(
                grid,
                ArrayRecord(model.state_dict()),
                config.rounds,
                config.timeout,
                train_config=request,
                evaluate_fn=watch,
            )
        finally:
            random.setstate(kept)
    return watch.progress.save(finished=True)


class _Watch:
    """Tests the global model after a round, and notes the round."""

    def __init__(self, config: RunConfig, folder: Path, quiet: bool) -> None:
        self.config = config
        self.test = problem(config, "test")
        self.progress = Progress(config, folder, quiet)
        self.history = History(folder / "history.jsonl")
        self.began = time.monotonic()
        self.asked = 0

    def answered(self, request: Message, reply: Message) -> Message:
        """Count a request; raise ``RuntimeError`` if the client failed, which Flower would skip."""
        self.asked += 1
        if reply.has_error():
            raise RuntimeError(f"a client failed: {root_cause(reply.error.reason)}")
        return reply

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        now = time.monotonic()
        seconds, self.began = now - self.began, now
        if server_round == 0:
            self.progress.arrays = arrays
            return MetricRecord()
        row: dict[str, float] = {
            "round": server_round,
            "seconds": seconds,
            "bytes-up": 0.0,
            "bytes-down": 0.0,
            "clients-asked": float(self.asked),
            "clients-lost": 0.0,
        }
        self.asked = 0
        tested = MetricRecord()
        last = server_round == self.config.rounds
        if server_round % self.config.evaluate_every == 0 or last:
            self.test.model.load([array.numpy() for array in arrays.values()])
            loss, accuracy, _ = self.test.evaluate()
            tested = MetricRecord({"test-loss": loss, "test-accuracy": accuracy})
            row |= {"test-loss": loss, "test-accuracy": accuracy}
        info = RoundInfo(server_round, self.config.rounds, arrays, row)
        self.history(info)
        self.progress(info)
        return tested
