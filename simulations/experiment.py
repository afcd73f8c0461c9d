"""One run on any engine: the server half."""

from __future__ import annotations

import io
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from clients import (
    DirectoryStore,
    FlatModel,
    LocalTraining,
    Owner,
    StateError,
)
from clients.node.in_process import InProcessGrid
from clients.personalized import PERSONALIZED
from fl_strategies import (
    Checkpoints,
    ClientHistory,
    EarlyStop,
    History,
    NothingUsable,
    RoundInfo,
)
from fl_strategies.core.files import FolderLock, write_atomically
from fl_strategies.core.log import LOGGER, quiet_log
from fl_strategies.server.callbacks import Callback, Rows, model_bytes
from simulations.config import RunConfig, Scalar
from simulations.differences import differences
from simulations.figures import PANELS, draw_curves
from simulations.interrupts import undivided
from simulations.population import (
    HOW_TO_KEEP,
    is_simulated,
    shared_population,
    shared_states,
    state_folder,
)
from simulations.problems import (
    compute_repeatably,
    dataset,
    fresh_model,
    kept_flags,
    parts,
    problem,
)
from simulations.results import (
    EARLIER,
    Progress,
    Summary,
    Together,
    _lost,
    results_folder,
    room,
    writable,
)
from simulations.stationarity import stationarity
from simulations.tables import curve

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""


def run(
    config: RunConfig, grid: Grid, callbacks: Sequence[Callback] = (), *, quiet: bool = False
) -> Summary:
    """Run ``config`` on ``grid``, write its results folder, and return the summary.

    Each round prints a line; with ``quiet`` only rounds with lost clients do, which are clients
    that gave no reply or an error, and the log leaves out what is only informative.
    ``lost-rounds`` such rounds in a row end a simulation with ``RuntimeError``.

    ``callbacks`` are called at the end of each round in which the model was tested. The callbacks
    that write the results are called in every round.

    The folder holds ``config.json``, ``history.jsonl`` (a line per round, written at its end),
    ``clients.jsonl`` (a line for each client that took part in a round), ``model.safetensors``,
    ``summary.json`` and ``curve.png``, also after an interrupted run. A killed run leaves a model
    and a summary that are ``SAVE_SECONDS`` old or older. Async-cloud FedBCD adds
    ``cloud-N.safetensors``, the model of each cloud server; ``checkpoint-every`` adds the folder
    ``checkpoints``. ``run.json`` names the run, and ``run.lock`` is locked during the run.

    Raises ``ValueError`` for a folder that another run is writing to, ``StateError`` for a state
    directory that holds another run's states, and ``RuntimeError`` if all rounds were void or a
    disk is full.
    """
    with room(state_folder(config)), quiet_log(quiet):
        return _run(config, grid, callbacks, quiet)


def _run(config: RunConfig, grid: Grid, callbacks: Sequence[Callback], quiet: bool) -> Summary:
    by_workers = is_simulated(grid) and not isinstance(grid, InProcessGrid)
    model, folder = prepare(config, partition=not by_workers)
    initial = ArrayRecord(model.state_dict())
    del model  # as large as all else that the server keeps
    shared = shared_population(config, grid, resumes=_resumes(config, folder))
    if by_workers and not shared:
        parts(config)  # hosts would have said what is wrong with it
    lock = FolderLock(folder)
    before = lock.take()
    try:
        return _run_in(config, grid, callbacks, initial, lock, before, quiet, shared)
    finally:
        lock.release()


def _run_in(
    config: RunConfig,
    grid: Grid,
    callbacks: Sequence[Callback],
    initial: ArrayRecord,
    lock: FolderLock,
    before: str,
    quiet: bool,
    shared: int,
) -> Summary:
    folder = lock.folder
    compute_repeatably(config.torch_device)
    test = problem(config, "test")
    checkpoints, resumes = None, _resumes(config, folder)
    if config.checkpoint_every:
        every, keep = config.checkpoint_every, config.checkpoint_keep
        where = folder / CHECKPOINTS
        checkpoints = Checkpoints(where, every=every, keep=keep, best="test-accuracy")
        if resumes:
            check_resumes(config, folder)
    if not config.resume:
        check_no_states(config)
    for name in ("summary.json", *EARLIER * (not resumes)):  # of other settings perhaps
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / "config.json", json.dumps(asdict(config), indent=2).encode())
    progress = Progress(config, folder, quiet)
    clients = parts(config) if config.gradient_norm == "true" else []
    train = [problem(config, "train", rows) for rows, _ in clients]
    ridge = LocalTraining().updated(config.local()).ridge
    if config.algorithm in PERSONALIZED and state_folder(config) is None:
        LOGGER.info("clients' personalized models go with this run: %s", HOW_TO_KEEP)
    if config.stop_at_target:
        callbacks = [*callbacks, EarlyStop(target=config.target)]

    def note_devices(info: RoundInfo) -> None:
        progress.note_devices(strategy.run.devices)

    simulated = is_simulated(grid)
    in_a_row = 0

    def all_stay(info: RoundInfo) -> None:
        nonlocal in_a_row
        in_a_row = in_a_row + 1 if (lost := _lost(info.metrics)) else 0
        if simulated and 0 < config.lost_rounds <= in_a_row:
            reasons = Counter(strategy.run.faults.values()).most_common(1)
            why = reasons[0][0] if reasons else "see the log"
            raise RuntimeError(
                f"clients were lost in {in_a_row} rounds in a row, in round {info.server_round}"
                f" {lost} of {info.metrics['clients-asked']:.0f}: {why} (lost-rounds=0"
                " continues without them)"
            )

    strategy = config.strategy(
        # on a busy machine some nodes answer late, and sampling must not depend on that
        min_available_nodes=config.clients if simulated else 1,
        callbacks=[
            note_devices,
            Together(
                History(folder / "history.jsonl"),
                ClientHistory(folder / "clients.jsonl"),
                progress,
            ),
            all_stay,
            *(_IfTested(callback) for callback in callbacks),
        ],
        checkpoints=checkpoints,
        shared_population=shared,
        **({"node_wait": config.timeout} if shared else {}),  # hosts make all clients' data first
    )
    if config.resume and before.rpartition("-")[0] == config.algorithm:
        strategy.run.id = before
    lock.sign(strategy.run.id)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round % config.evaluate_every and server_round < strategy.run.num_rounds:
            return MetricRecord()
        w = test.model.load([array.numpy() for array in arrays.values()])
        loss, accuracy = test.evaluate()
        if server_round == 0:
            progress.arrays = arrays
        metrics = MetricRecord({"test-loss": loss, "test-accuracy": accuracy})
        if train:
            metrics["gradient-norm2"] = stationarity(train, w, ridge=ridge).gradient
        return metrics

    def save(finished: bool) -> Summary:
        with undivided():
            summary = progress.save(finished)
            for n, arrays in enumerate(getattr(strategy, "cloud_models", [])):
                write_atomically(folder / f"cloud-{n}.safetensors", model_bytes(arrays))
            if progress.rows:
                rows = curve(replace(config, output=str(folder)))
                draw_curves(rows, folder / "curve.png", PANELS[:2])
            if not quiet:
                print(f"results: {folder}", flush=True)
        return summary

    try:
        with _one_line_a_round(), shared_states(config, grid, shared=shared > 0):
            result = strategy.start(
                grid,
                initial,
                config.rounds,
                config.timeout,
                evaluate_fn=evaluate,
                resume=config.resume,
            )
        progress.arrays = result.arrays
        void = not progress.used()
    except BaseException as error:
        if isinstance(error, NothingUsable) and (progress.used() or error.diverged):
            progress.given_up = str(error)
        try:
            save(finished=bool(progress.given_up))
        except Exception as later:  # the error that ended the run is reported
            error.add_note(f"nor could its results be saved: {type(later).__name__}: {later}")
        raise
    summary = save(finished=not void)
    if void:
        raise RuntimeError(
            f"every round was skipped ({summary.rounds} of {summary.rounds}): the model is the"
            " initial one; the log says what was wrong with the replies"
        )
    return summary


@contextmanager
def _one_line_a_round() -> Iterator[None]:
    """Keep the strategy's line for each round out of the log: the progress line replaces it."""

    def keep(record: logging.LogRecord) -> bool:
        return not hasattr(record, "round_line")

    LOGGER.addFilter(keep)
    try:
        yield
    finally:
        LOGGER.removeFilter(keep)


class _IfTested:
    """A callback for the rounds in which the model was tested."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback

    def __call__(self, info: RoundInfo) -> bool | None:
        return self.callback(info) if "test-accuracy" in info.metrics else None

    def recall(self, rows: Rows) -> None:
        if recall := getattr(self.callback, "recall", None):
            recall({number: row for number, row in rows.items() if "test-accuracy" in row})


def _resumes(config: RunConfig, folder: Path) -> bool:
    """Return whether the run continues from a checkpoint in its ``folder``."""
    kept = config.resume and config.checkpoint_every > 0
    return kept and bool(Checkpoints(folder / CHECKPOINTS).rounds())


def check_resumes(config: RunConfig, folder: Path) -> None:
    """Raise ``ValueError`` unless the run in ``folder`` had these settings, rounds excepted."""
    try:
        stored = json.loads((folder / "config.json").read_text())
        found = differences(stored | {"rounds": config.rounds}, asdict(config))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        path = folder / "config.json"
        raise ValueError(f"{path}, by which the run is resumed, is damaged: {error}") from None
    if found:
        raise ValueError(f"{folder} cannot be resumed with other settings: {'; '.join(found)}")


def check_no_states(config: RunConfig) -> None:
    """Raise ``StateError`` if the state directory holds the states of another run."""
    states = state_folder(config)
    if states is not None and (owner := DirectoryStore.owner(states)) is not None:
        raise StateError(
            f"{states} holds the state of run {owner.run!r}: choose another state-dir, or delete"
            " that folder if its run is over"
        )


def prepare(config: RunConfig, *, partition: bool = True) -> tuple[FlatModel, Path]:
    """Return the initial model and the results folder; raise for settings that cannot run.

    The model is on the CPU: no GPU is used here. Without ``partition`` the clients' data are not
    made (flwr-datasets and what it needs take 150 MB).
    """
    if partition:
        parts(config)
    dataset(config).check()
    model = fresh_model(config)
    if (states := state_folder(config)) is not None:
        if (found := DirectoryStore.owner(states)) is not None:
            mine = Owner(config.algorithm, model.layout.signature, found.run)
            DirectoryStore.check(states, mine)
        writable(states, "state directory")
    return model, results_folder(config)


def run_in_process(
    config: RunConfig,
    callbacks: Sequence[Callback] = (),
    *,
    workers: int = 1,
    quiet: bool = False,
) -> Summary:
    """Run ``config`` without Ray: on one node of this process that hosts all clients.

    More ``workers`` are as many processes, and each client is a node; the model is the same to the
    bit unless clients are trained at once (``stack``) or folded (``fold``), which hosts do.
    """
    config.check_device()
    torch.set_num_threads(1)
    grid = InProcessGrid(
        "simulations.client_app:app",
        config.clients,
        hosts=int(workers == 1),
        workers=workers,
        run_config=config.to_run_config(),
        state_memory=10**6 * config.state_memory,
    )
    with kept_flags():
        return run(config, grid, callbacks, quiet=quiet)


def metrics_of(**keys: Scalar) -> list[Mapping[str, float]]:
    """Run in this process, without output and files; return each round's metrics.

    ``keys`` are those of the run-config, with underscores: ``metrics_of(batch_size=10)``.
    """
    rows: list[Mapping[str, float]] = []
    config = {name.replace("_", "-"): value for name, value in keys.items()}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        given = RunConfig.parse(config | {"output": folder})
        run_in_process(given, [lambda info: rows.append(info.metrics)], quiet=True)
    return rows
