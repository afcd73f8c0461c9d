"""One run on any engine: the server's half, and how a client gets its data and model."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    DirectoryStore,
    FlatModel,
    Owner,
    Problem,
    client_app,
    client_id,
)
from fl_strategies import ClientHistory, EarlyStop, History, RoundInfo
from fl_strategies.callbacks import Callback, model_bytes
from fl_strategies.files import write_atomically
from simulations import data, models, partitions
from simulations.config import RunConfig, parse_params
from simulations.figures import draw_curve
from simulations.in_process import InProcessGrid

SAVE_SECONDS = 10.0
"""How often a running experiment saves its model and summary."""


@dataclass(frozen=True)
class Summary:
    """What one run came to. Accuracies are shares of the test set; bytes are of all rounds."""

    algorithm: str
    final_accuracy: float
    best_accuracy: float
    final_loss: float
    rounds: int
    rounds_to_target: int | None
    target: float
    bytes_up: int
    bytes_down: int
    seconds: float
    model_sha256: str
    finished: bool


def run(config: RunConfig, grid: Grid, callbacks: Sequence[Callback] = ()) -> Summary:
    """Run ``config`` on ``grid``, write its results folder, and return the summary.

    ``callbacks`` are called at the end of each round, beside the ones that write the results.

    The folder holds ``config.json``, ``history.jsonl`` (a line a round, written as it ends),
    ``clients.jsonl`` (a line for each client that took part in a round),
    ``model.safetensors``, ``summary.json`` and ``curve.png``, also when the run is interrupted; one
    that is killed leaves model and summary of the last ``SAVE_SECONDS`` or earlier.
    """
    parts(config)  # a split that cannot be made is an error here, not in every client
    test = problem(config, "test")
    model = fresh_model(config)
    if config.state_dir:
        DirectoryStore.check(config.state_dir, Owner(config.algorithm, model.layout.signature))
    folder = results_folder(config)
    write_atomically(folder / "config.json", json.dumps(asdict(config), indent=2).encode())
    progress = _Progress(config, folder)
    if config.stop_at_target:
        callbacks = [*callbacks, EarlyStop(target=config.target)]
    strategy = config.strategy(
        buffers=model.buffers,
        callbacks=[
            History(folder / "history.jsonl"),
            ClientHistory(folder / "clients.jsonl"),
            progress,
            *callbacks,
        ],
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        test.model.load([array.numpy() for array in arrays.values()])
        loss, accuracy = test.evaluate()
        if server_round == 0:
            progress.arrays = arrays
        return MetricRecord({"test-loss": loss, "test-accuracy": accuracy})

    initial = ArrayRecord(model.module.state_dict())
    finished = False
    try:
        strategy.start(grid, initial, config.rounds, evaluate_fn=evaluate)
        finished = True
    finally:
        summary = progress.save(finished)
        draw_curve(folder / "history.jsonl", folder / "curve.png", config.algorithm)
        print(f"results: {folder}", flush=True)
    return summary


def run_in_process(config: RunConfig, callbacks: Sequence[Callback] = ()) -> Summary:
    """Run ``config`` in this process, without Ray."""
    torch.set_num_threads(1)
    grid = InProcessGrid(app, config.clients, run_config=config.to_run_config())
    return run(config, grid, callbacks)


class _Progress:
    """Prints one line a round, and saves summary and model now and then."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.started = self.saved = time.monotonic()
        self.arrays: ArrayRecord | None = None
        self.rows: list[dict[str, float]] = []

    def __call__(self, info: RoundInfo) -> None:
        self.arrays = info.arrays
        self.rows.append(dict(info.metrics))
        spent = time.monotonic() - self.started
        left = spent / info.server_round * (info.num_rounds - info.server_round)
        print(
            f"{self.config.algorithm} round {info.server_round}/{info.num_rounds}"
            f"  accuracy {info.metrics['test-accuracy']:.4f}"
            f"  loss {info.metrics['test-loss']:.4f}  {left:.0f} s left",
            flush=True,
        )
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save(finished=False)

    def save(self, finished: bool) -> Summary:
        summary = self.summary(finished)
        text = json.dumps(asdict(summary), indent=2)
        write_atomically(self.folder / "summary.json", text.encode())
        if self.arrays is not None:
            write_atomically(self.folder / "model.safetensors", model_bytes(self.arrays))
        self.saved = time.monotonic()
        return summary

    def summary(self, finished: bool) -> Summary:
        accuracies = [row["test-accuracy"] for row in self.rows]
        target = self.config.target
        reached = (r for r, accuracy in enumerate(accuracies, start=1) if accuracy >= target)
        return Summary(
            algorithm=self.config.algorithm,
            final_accuracy=accuracies[-1] if accuracies else math.nan,
            best_accuracy=max(accuracies, default=math.nan),
            final_loss=self.rows[-1]["test-loss"] if self.rows else math.nan,
            rounds=len(accuracies),
            rounds_to_target=next(reached, None),
            target=target,
            bytes_up=int(sum(row["bytes-up"] for row in self.rows)),
            bytes_down=int(sum(row["bytes-down"] for row in self.rows)),
            seconds=round(time.monotonic() - self.started, 3),
            model_sha256=model_sha256(self.arrays) if self.arrays is not None else "",
            finished=finished,
        )


def model_sha256(arrays: ArrayRecord) -> str:
    """Return the SHA-256 of a model's names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        values = array.numpy()
        digest.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def results_folder(config: RunConfig) -> Path:
    """Return the run's results folder, made; raise ``ValueError`` if it cannot be written."""
    name = f"{config.algorithm}-{Path(config.dataset).name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    default = Path.home() / "fl-strategies-results" / name
    folder = Path(config.output).expanduser().absolute() if config.output else default
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.json", b"{}")
    except OSError as error:
        raise ValueError(f"the results folder {folder} cannot be written: {error}") from None
    return folder


# ---- data and model, made once per process ----------------------------------------------------


@functools.lru_cache(maxsize=4)
def dataset(config: RunConfig) -> data.Dataset:
    """Return the run's data set."""
    options = parse_params(config.dataset_params)
    if config.dataset == "synthetic":
        options = {"clients": config.clients, "seed": config.seed} | options
    found = data.load(config.dataset, normalise=config.normalise, **options)
    if config.pooled:
        owner = None
        if found.owner is not None and found.test_owner is not None:
            owner = np.concatenate([found.owner, found.test_owner])
        x, y = np.concatenate([found.x, found.test_x]), np.concatenate([found.y, found.test_y])
        found = replace(found, x=x, y=y, owner=owner, test_owner=None)
    return found


@functools.lru_cache(maxsize=4)
def tensors(config: RunConfig) -> dict[str, torch.Tensor]:
    """Return inputs and labels, train and test, on the run's device."""
    found = dataset(config)
    if config.pooled:
        held_out = np.concatenate([test for _, test in parts(config)])
        found = replace(found, test_x=found.x[held_out], test_y=found.y[held_out])
    device, dtype = config.torch_device, getattr(torch, config.dtype)
    return {
        "x": torch.as_tensor(found.x).to(device, dtype),
        "y": torch.as_tensor(found.y).to(device),
        "test_x": torch.as_tensor(found.test_x).to(device, dtype),
        "test_y": torch.as_tensor(found.test_y).to(device),
    }


@functools.lru_cache(maxsize=4)
def parts(config: RunConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the rows of each client: (for training, held out for its own tests)."""
    found = dataset(config)
    options = parse_params(config.partition_params)
    if config.partition == "natural":
        options["owner"] = found.owner
    rows = partitions.partition(
        config.partition, found.y, config.clients, seed=config.seed, **options
    )
    return partitions.train_test(rows, config.local_test, config.seed)


def draw_partition(config: RunConfig, path: Path) -> None:
    """Draw how many examples of each class each client trains on."""
    partitions.draw([train for train, _ in parts(config)], dataset(config).y, path)


def fresh_model(config: RunConfig) -> FlatModel:
    """Return the run's initial model."""
    found = dataset(config)
    module = models.build(config.model, found.x.shape[1:], found.num_classes, seed=config.seed)
    if len(found.x.shape) == 4 and config.torch_device.type == "cuda":
        module = module.to(memory_format=torch.channels_last)
    return FlatModel(module, device=config.torch_device, dtype=getattr(torch, config.dtype))


worker_model = functools.lru_cache(maxsize=2)(fresh_model)
"""The model that all clients of a worker process share: each loads what it receives."""


def problem(config: RunConfig, which: str, rows: np.ndarray | None = None) -> Problem:
    """Return the problem of all, or of some ``rows``, of the ``"train"`` or ``"test"`` set."""
    prefix = "test_" if which == "test" else ""
    x, y = (tensors(config)[prefix + name] for name in "xy")
    if rows is not None:
        index = torch.from_numpy(rows).to(x.device)
        x, y = x[index], y[index]
    autocast = getattr(torch, config.autocast) if config.autocast else None
    return Problem(worker_model(config), cross_entropy, x, y, autocast=autocast)


def client_fn(context: Context) -> AnyAlgorithmClient:
    """Return the client of this node, as its run-config describes it."""
    torch.set_num_threads(1)
    config = parsed(tuple(sorted(context.run_config.items())))
    me = client_id(context)
    if me >= config.clients:
        raise ValueError(
            f"this node is client {me}, but the run has clients={config.clients}: start as many"
            " SuperNodes as clients (--federation-config num-supernodes=...)"
        )
    train, held_out = parts(config)[me]
    store = DirectoryStore(config.state_dir, me) if config.state_dir else ContextStore(context)
    test = problem(config, "train", held_out) if len(held_out) else None
    found = dataset(config)
    if config.partition == "natural" and config.local_test == 0.0 and found.test_owner is not None:
        assert found.owner is not None
        test = problem(config, "test", np.flatnonzero(found.test_owner == found.owner[train[0]]))
    return AnyAlgorithmClient(problem(config, "train", train), client_id=me, test=test, store=store)


@functools.lru_cache(maxsize=8)
def parsed(items: tuple[tuple[str, Any], ...]) -> RunConfig:
    """Return the run-config, parsed once per process."""
    return RunConfig.parse(dict(items))


app = client_app(client_fn)
