"""One run on any engine: the server's half, and how a client gets its data and model."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
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
    CLIENTS,
    AnyAlgorithmClient,
    ContextStore,
    DirectoryStore,
    FlatModel,
    Owner,
    Problem,
    client_app,
    client_id,
)
from fl_strategies import Checkpoints, ClientHistory, EarlyStop, History, RoundInfo
from fl_strategies.callbacks import Callback, Rows, finite, model_bytes
from fl_strategies.files import write_atomically
from fl_strategies.params import parse_params
from simulations import data, models, partitions
from simulations.cells import differences
from simulations.config import RunConfig, Scalar
from simulations.figures import PANELS, draw_curves
from simulations.in_process import InProcessGrid
from simulations.stationarity import stationarity
from simulations.tables import curve

SAVE_SECONDS = 10.0
"""How often a running experiment saves its model and summary."""
NODES_SECONDS = 30.0
"""How long a run waits for its nodes."""


@dataclass(frozen=True)
class Summary:
    """What one run came to. Accuracies are shares of the test set; bytes are of all rounds."""

    algorithm: str
    final_accuracy: float | None
    best_accuracy: float | None
    final_loss: float | None
    rounds: int
    rounds_to_target: int | None
    target: float
    bytes_up: int
    bytes_down: int
    seconds: float
    model_sha256: str
    finished: bool
    gradient_norm2: float | None = None
    """||grad f||^2 at the end, where it was measured."""


def run(config: RunConfig, grid: Grid, callbacks: Sequence[Callback] = ()) -> Summary:
    """Run ``config`` on ``grid``, write its results folder, and return the summary.

    ``callbacks`` are called at the end of each round in which the model was tested, beside the ones
    that write the results, which are called in every round.

    The folder holds ``config.json``, ``history.jsonl`` (a line a round, written as it ends),
    ``clients.jsonl`` (a line for each client that took part in a round),
    ``model.safetensors``, ``summary.json`` and ``curve.png``, also when the run is interrupted; one
    that is killed leaves model and summary of the last ``SAVE_SECONDS`` or earlier. Async-cloud
    FedBCD adds ``cloud-N.safetensors``, the model of each cloud server, and ``checkpoint-every``
    the folder ``checkpoints``.
    """
    check_nodes(config, grid)
    model, folder = prepare(config)
    test = problem(config, "test")
    checkpoints = None
    if config.checkpoint_every:
        every, keep = config.checkpoint_every, config.checkpoint_keep
        where = folder / "checkpoints"
        checkpoints = Checkpoints(where, every=every, keep=keep, best="test-accuracy")
        if config.resume and checkpoints.rounds():
            check_resumes(config, folder)
    (folder / "summary.json").unlink(missing_ok=True)  # an earlier run's, of other settings perhaps
    write_atomically(folder / "config.json", json.dumps(asdict(config), indent=2).encode())
    progress = _Progress(config, folder)
    clients = parts(config) if config.gradient_norm == "true" else []
    train = [problem(config, "train", rows) for rows, _ in clients]
    if config.stop_at_target:
        callbacks = [*callbacks, EarlyStop(target=config.target)]

    def someone_works(info: RoundInfo) -> None:
        reasons = list(strategy.faults.values())
        broken = all(reason.startswith("error ") for reason in reasons)
        if info.metrics["clients-used"] == 0 and reasons and broken:
            raise RuntimeError(f"every client failed in round {info.server_round}: {reasons[0]}")

    strategy = config.strategy(
        buffers=model.buffers,
        callbacks=[
            History(folder / "history.jsonl"),
            ClientHistory(folder / "clients.jsonl"),
            progress,
            someone_works,
            *(_IfTested(callback) for callback in callbacks),
        ],
        checkpoints=checkpoints,
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round % config.evaluate_every and server_round < strategy.num_rounds:
            return MetricRecord()
        w = test.model.load([array.numpy() for array in arrays.values()])
        loss, accuracy = test.evaluate()
        if server_round == 0:
            progress.arrays = arrays
        metrics = MetricRecord({"test-loss": loss, "test-accuracy": accuracy})
        if train:
            metrics["gradient-norm2"] = stationarity(train, w).gradient
        return metrics

    initial = ArrayRecord(model.module.state_dict())
    finished = False
    try:
        result = strategy.start(
            grid,
            initial,
            config.rounds,
            config.timeout,
            evaluate_fn=evaluate,
            resume=config.resume,
        )
        progress.arrays, finished = result.arrays, True
    finally:
        summary = progress.save(finished)
        for n, arrays in enumerate(getattr(strategy, "cloud_models", [])):
            write_atomically(folder / f"cloud-{n}.safetensors", model_bytes(arrays))
        draw_curves(curve(replace(config, output=str(folder))), folder / "curve.png", PANELS[:2])
        print(f"results: {folder}", flush=True)
    return summary


class _IfTested:
    """A callback for the rounds in which the model was tested."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback

    def __call__(self, info: RoundInfo) -> bool | None:
        return self.callback(info) if "test-accuracy" in info.metrics else None

    def recall(self, rows: Rows) -> None:
        if recall := getattr(self.callback, "recall", None):
            recall({number: row for number, row in rows.items() if "test-accuracy" in row})


def check_resumes(config: RunConfig, folder: Path) -> None:
    """Raise ``ValueError`` unless the run in ``folder`` had these settings, but for its rounds."""
    stored = json.loads((folder / "config.json").read_text())
    if found := differences(stored | {"rounds": config.rounds}, asdict(config)):
        raise ValueError(f"{folder} cannot be resumed with other settings: {'; '.join(found)}")


def prepare(config: RunConfig) -> tuple[FlatModel, Path]:
    """Return the initial model and the results folder; raise for what could not run, before it."""
    parts(config)
    model = fresh_model(config)
    if (states := state_folder(config)) is not None:
        DirectoryStore.check(states, Owner(config.algorithm, model.layout.signature))
        writable(states, "state directory")
    return model, results_folder(config)


def check_nodes(config: RunConfig, grid: Grid) -> None:
    """Raise ``ValueError`` unless as many nodes are connected, or soon will be, as clients."""
    deadline = time.monotonic() + NODES_SECONDS
    while (nodes := len(list(grid.get_node_ids()))) < config.clients:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if nodes != config.clients:
        raise ValueError(
            f"clients={config.clients}, but {nodes} nodes are connected: flwr run . --stream"
            f' --federation-config "num-supernodes={config.clients} client-resources-num-cpus=1"'
        )


def run_in_process(config: RunConfig, callbacks: Sequence[Callback] = ()) -> Summary:
    """Run ``config`` in this process, without Ray."""
    torch.set_num_threads(1)
    grid = InProcessGrid(app, config.clients, run_config=config.to_run_config())
    return run(config, grid, callbacks)


def metrics_of(**keys: Scalar) -> list[Mapping[str, float]]:
    """Run in this process, printing nothing and leaving no files; return each round's metrics.

    ``keys`` are those of the run-config, spelt with underscores: ``metrics_of(batch_size=10)``.
    """
    rows: list[Mapping[str, float]] = []
    config = {name.replace("_", "-"): value for name, value in keys.items()}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        given = RunConfig.parse(config | {"output": folder})
        run_in_process(given, [lambda info: rows.append(info.metrics)])
    return rows


class _Progress:
    """Prints one line a round, and saves summary and model now and then."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.label = folder.name if config.output else config.algorithm
        self.started = self.saved = time.monotonic()
        self.arrays: ArrayRecord | None = None
        self.rows: list[dict[str, float]] = []
        self.before = 0

    def recall(self, rows: Rows) -> None:
        self.rows, self.before = [dict(row) for row in rows.values()], len(rows)

    def __call__(self, info: RoundInfo) -> None:
        self.arrays = info.arrays
        self.rows.append(dict(info.metrics))
        spent = time.monotonic() - self.started
        done = info.server_round - self.before
        left = spent / done * (info.num_rounds - info.server_round)
        tested = ""
        if "test-accuracy" in info.metrics:
            tested = "  accuracy {test-accuracy:.4f}  loss {test-loss:.4f}".format_map(info.metrics)
        print(
            f"{self.label} round {info.server_round}/{info.num_rounds}{tested}  {left:.0f} s left",
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
        tested = {r: row for r, row in enumerate(self.rows, start=1) if "test-accuracy" in row}
        accuracies = [row["test-accuracy"] for row in tested.values()]
        target = self.config.target
        reached = (
            int(row.get("algorithm-round", number))  # FedPD skips the exchange of some rounds
            for number, row in tested.items()
            if row["test-accuracy"] >= target
        )
        return Summary(
            algorithm=self.config.algorithm,
            final_accuracy=accuracies[-1] if accuracies else None,
            best_accuracy=max(accuracies, default=None),
            final_loss=finite([*tested.values()][-1]["test-loss"]) if tested else None,
            rounds=len(self.rows),
            rounds_to_target=next(reached, None),
            target=target,
            bytes_up=int(sum(row["bytes-up"] for row in self.rows)),
            bytes_down=int(sum(row["bytes-down"] for row in self.rows)),
            seconds=round(time.monotonic() - self.started, 3),
            model_sha256=model_sha256(self.arrays) if self.arrays is not None else "",
            finished=finished,
            gradient_norm2=self.rows[-1].get("gradient-norm2") if self.rows else None,
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
    writable(folder, "results folder")
    return folder


def state_folder(config: RunConfig) -> Path | None:
    """Return where clients keep their state, if the algorithm has any and it is in a directory."""
    stateful = CLIENTS[config.algorithm].state_type is not None
    return Path(config.state_dir) / config.algorithm if config.state_dir and stateful else None


def writable(folder: Path, what: str) -> None:
    """Make ``folder``; raise ``ValueError`` if nothing can be written to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / ".probe", b"")
        (folder / ".probe").unlink()
    except OSError as error:
        raise ValueError(f"the {what} {folder} cannot be written: {error}") from None


# ---- data and model, made once per process ----------------------------------------------------


def dataset(config: RunConfig) -> data.Dataset:
    """Return the run's data set (``data.load`` keeps it)."""
    options = parse_params(config.dataset_params)
    if config.dataset in data.GENERATED:
        options = {"clients": config.clients, "seed": config.seed} | options
    found = data.load(config.dataset, normalise=config.normalise, **options)
    return _pooled(found) if config.pooled else found


@functools.lru_cache(maxsize=4)
def _pooled(found: data.Dataset) -> data.Dataset:
    """Return the data set with its test rows put behind its training rows."""
    owner = None
    if found.owner is not None and found.test_owner is not None:
        owner = np.concatenate([found.owner, found.test_owner])
    x, y = np.concatenate([found.x, found.test_x]), np.concatenate([found.y, found.test_y])
    return replace(found, x=x, y=y, owner=owner, test_owner=None)


@functools.lru_cache(maxsize=4)
def placed(
    found: data.Dataset, test: bool, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of the training or test set, once per process, on ``device``."""
    x, y = (found.test_x, found.test_y) if test else (found.x, found.y)
    inputs = torch.as_tensor(x)
    inputs = inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)
    return inputs, torch.as_tensor(y).to(device)


def parts(config: RunConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the rows of each client: (for training, held out for its own tests)."""
    return _split(config)[0]


def validation_rows(config: RunConfig) -> np.ndarray:
    """Return the clients' rows on which the run is tested, where ``validation`` holds some out."""
    return _split(config)[1]


def _split(config: RunConfig) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    return _parts(dataset(config), config.partition, config.partition_params, config.clients,
                  config.seed, config.local_test, config.validation)  # fmt: skip


@functools.lru_cache(maxsize=4)
def _parts(
    found: data.Dataset,
    kind: str,
    params: str,
    clients: int,
    seed: int,
    local_test: float,
    validation: float,
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    options = parse_params(params)
    if kind == "natural":
        options["owner"] = found.owner
    try:
        rows = partitions.partition(kind, found.y, clients, seed=seed, **options)
    except TypeError as error:
        raise ValueError(f"partition-params {params!r}: {error}") from None
    held_out = np.empty(0, np.int64)
    if validation > 0.0:
        split = partitions.train_test(rows, validation, seed)
        rows = [train for train, _ in split]
        held_out = np.concatenate([test for _, test in split])
        if not len(held_out):
            raise ValueError(
                f"validation={validation} holds out nothing: clients have too few rows"
            )
    return partitions.train_test(rows, local_test, seed), held_out


def draw_partition(config: RunConfig, path: Path) -> None:
    """Draw how many examples of each class each client trains on."""
    partitions.draw([train for train, _ in parts(config)], dataset(config).y, path)


def fresh_model(config: RunConfig) -> FlatModel:
    """Return the run's initial model."""
    found = dataset(config)
    module = models.build(
        config.model,
        found.x.shape[1:],
        found.num_classes,
        seed=config.seed,
        vocabulary=found.vocabulary,
        **parse_params(config.model_params),
    )
    return FlatModel(module, device=config.torch_device, dtype=getattr(torch, config.dtype))


@functools.lru_cache(maxsize=1)
def worker_model(config: RunConfig) -> FlatModel:
    """Return the model that all clients of a process share: each loads what it receives."""
    return fresh_model(config)


def problem(config: RunConfig, which: str, rows: np.ndarray | None = None) -> Problem:
    """Return the problem of the ``"train"`` or ``"test"`` set, or of some ``rows`` of it.

    Where training rows are held out for validation, they are the test set; of pooled data, all
    that the clients hold out.
    """
    found, test = dataset(config), which == "test"
    if test and rows is None and config.validation > 0.0:
        rows, test = validation_rows(config), False
    elif test and config.pooled:
        rows, test = np.concatenate([held_out for _, held_out in parts(config)]), False
    device, dtype = config.torch_device, getattr(torch, config.dtype)
    x, y = placed(found, test, device, dtype)
    if rows is not None:
        index = torch.from_numpy(rows).to(device)
        x, y = x[index], y[index]
    autocast = getattr(torch, config.autocast) if config.autocast else None

    def penalty(w: torch.Tensor) -> torch.Tensor:
        return config.penalty * (w**2 / (1 + w**2)).sum()

    bent = penalty if config.penalty > 0.0 else None
    return Problem(worker_model(config), cross_entropy, x, y, penalty=bent, autocast=autocast)


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
    states = state_folder(config)
    store = DirectoryStore(states, me) if states else ContextStore(context)
    test = problem(config, "train", held_out) if len(held_out) else None
    found = dataset(config)
    if config.partition == "natural" and config.local_test == 0.0 and found.test_owner is not None:
        assert found.owner is not None
        own = np.flatnonzero(found.test_owner == found.owner[train[0]])
        test = problem(config, "test", own) if len(own) else None
    return AnyAlgorithmClient(problem(config, "train", train), client_id=me, test=test, store=store)


@functools.lru_cache(maxsize=8)
def parsed(items: tuple[tuple[str, Any], ...]) -> RunConfig:
    """Return the run-config, parsed once per process."""
    return RunConfig.parse(dict(items))


app = client_app(client_fn)
