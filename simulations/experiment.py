"""One run on any engine: the server half."""

from __future__ import annotations

import io
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from clients import (
    Border,
    DirectoryStore,
    LocalTraining,
    Owner,
)
from clients.learning.replay import drawing_from
from clients.node.in_process import InProcessGrid
from clients.personalized import PERSONALIZED
from fl_strategies import (
    Checkpoints,
    ClientHistory,
    EarlyStop,
    FederatedStrategy,
    History,
    NothingUsable,
    RoundInfo,
)
from fl_strategies.core.files import FolderLock, write_atomically
from fl_strategies.core.log import LOGGER, quiet_log
from fl_strategies.core.randomness import stream
from fl_strategies.core.reasons import NOT_FINITE
from fl_strategies.server.callbacks import Callback, Rows, model_bytes
from simulations.config import RunConfig, Scalar
from simulations.figures import PANELS, draw_curves
from simulations.folders import CHECKPOINTS, clear, results_folder, resumes, room, writable
from simulations.handed import app_with_data
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
from simulations.results import Progress, Summary, Together, _lost
from simulations.stationarity import stationarity
from simulations.tables import curve


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
    directory that holds another run's states, and ``RuntimeError`` if all rounds were skipped or a
    disk is full.
    """
    with room(state_folder(config)), quiet_log(quiet):
        by_workers = is_simulated(grid) and not isinstance(grid, InProcessGrid)
        model, folder = prepare(config, partition=not by_workers)
        initial = ArrayRecord(model.state_dict())
        del model  # as large as all else that the server keeps
        shared = shared_population(config, grid, resumes=resumes(config, folder))
        if by_workers and not shared:
            parts(config)  # hosts would have said what is wrong with it
        lock = FolderLock(folder)
        before = lock.take()
        try:
            clear(config, folder)
            one = _Run(config, grid, folder, shared, quiet)
            one.begin(callbacks)
            lock.sign(one.called(before))
            return one.finish(initial)
        finally:
            lock.release()


class _Run:
    """A run in its folder: its strategy, and what is tested, noted and saved."""

    def __init__(
        self, config: RunConfig, grid: Grid, folder: Path, shared: int, quiet: bool
    ) -> None:
        compute_repeatably(config.torch_device)
        self.config, self.grid, self.folder, self.shared = config, grid, folder, shared
        self.quiet, self.simulated = quiet, is_simulated(grid)
        self.test = problem(config, "test")
        self.progress = Progress(config, folder, quiet)
        clients = parts(config) if config.gradient_norm == "true" else []
        self.train = [problem(config, "train", rows) for rows, _ in clients]
        self.ridge = LocalTraining().updated(config.local()).ridge
        self.rounds_with_losses = 0
        self.strategy: FederatedStrategy

    def begin(self, callbacks: Sequence[Callback]) -> None:
        """Build the strategy, whose ``callbacks`` are called when the model was tested."""
        config, folder = self.config, self.folder
        if config.algorithm in PERSONALIZED and state_folder(config) is None:
            LOGGER.info("clients' personalized models go with this run: %s", HOW_TO_KEEP)
        if config.stop_at_target:
            callbacks = [*callbacks, EarlyStop(target=config.target)]
        history, clients = (
            History(folder / "history.jsonl"),
            ClientHistory(folder / "clients.jsonl"),
        )
        # hosts of a simulation make all clients' data first
        settings = replace(config, node_wait=config.timeout) if self.shared else config
        self.strategy = settings.strategy(
            # on a busy machine some nodes answer late, and sampling must not depend on that
            min_available_nodes=config.clients if self.simulated else 1,
            callbacks=[
                self.note_devices,
                Together(history, clients, self.progress),
                self.end_if_clients_are_lost,
                *(_IfTested(callback) for callback in callbacks),
            ],
            checkpoints=self.checkpoints(),
            shared_population=self.shared,
        )

    def checkpoints(self) -> Checkpoints | None:
        """Return where the run writes checkpoints, if it does."""
        if not self.config.checkpoint_every:
            return None
        every, keep = self.config.checkpoint_every, self.config.checkpoint_keep
        return Checkpoints(self.folder / CHECKPOINTS, every=every, keep=keep, best="test-accuracy")

    def called(self, before: str) -> str:
        """Return the run's name: that of the run ``before`` in this folder, if it is resumed."""
        if self.config.resume and before.rpartition("-")[0] == self.config.algorithm:
            self.strategy.run.id = before
        return self.strategy.run.id

    def note_devices(self, info: RoundInfo) -> None:
        """Note on which devices clients compute."""
        self.progress.note_devices(self.strategy.run.devices)

    def end_if_clients_are_lost(self, info: RoundInfo) -> None:
        """Raise ``RuntimeError`` after ``lost-rounds`` rounds of a simulation with lost clients."""
        lost = _lost(info.metrics)
        self.rounds_with_losses = self.rounds_with_losses + 1 if lost else 0
        if self.simulated and 0 < self.config.lost_rounds <= self.rounds_with_losses:
            faults = Counter(self.strategy.run.faults.values()).most_common()
            reasons = [*(reason for reason, _ in faults), "see the log"]
            why = next((reason for reason in reasons if NOT_FINITE in reason), reasons[0])
            text = (
                f"clients were lost in {self.rounds_with_losses} rounds in a row, in round"
                f" {info.server_round} {lost} of {info.metrics['clients-asked']:.0f}: {why}"
                " (lost-rounds=0 continues without them)"
            )
            raise NothingUsable(text, diverged=True) if NOT_FINITE in why else RuntimeError(text)

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Test the global model, in the rounds in which it is tested."""
        if (
            server_round % self.config.evaluate_every
            and server_round < self.strategy.run.num_rounds
        ):
            return MetricRecord()
        w = self.test.model.load([array.numpy() for array in arrays.values()])
        with drawing_from(stream(self.config.seed, "test", server_round), w):
            loss, accuracy, _ = self.test.evaluate()
        if server_round == 0:
            self.progress.arrays = arrays
        metrics = MetricRecord({"test-loss": loss, "test-accuracy": accuracy})
        if self.train:
            metrics["gradient-norm2"] = stationarity(self.train, w, ridge=self.ridge).gradient
        return metrics

    def finish(self, initial: ArrayRecord) -> Summary:
        """Run all rounds and return the summary; what was computed is saved in any case."""
        try:
            with _one_line_a_round(), shared_states(self.config, self.grid, shared=self.shared > 0):
                result = self.strategy.start(
                    self.grid,
                    initial,
                    self.config.rounds,
                    self.config.timeout,
                    evaluate_fn=self.evaluate,
                    resume=self.config.resume,
                )
        except BaseException as error:
            self.save_after(error)
            raise
        self.progress.arrays = result.arrays
        used = self.progress.used()
        summary = self.save(finished=used)
        if not used:
            raise RuntimeError(
                f"every round was skipped ({summary.rounds} of {summary.rounds}): the model is the"
                " initial one; the log says what was wrong with the replies"
            )
        return summary

    def save_after(self, error: BaseException) -> None:
        """Save what there is when an error ends the run, which is the error that is reported."""
        progress = self.progress
        if isinstance(error, NothingUsable) and (progress.used() or error.diverged):
            progress.given_up = str(error)
        try:
            self.save(finished=bool(progress.given_up))
        except Exception as later:
            error.add_note(f"nor could its results be saved: {type(later).__name__}: {later}")

    def save(self, finished: bool) -> Summary:
        """Write the summary, the model, those of cloud servers, and the figure."""
        with undivided():
            summary = self.progress.save(finished)
            for n, arrays in enumerate(getattr(self.strategy, "cloud_models", [])):
                write_atomically(self.folder / f"cloud-{n}.safetensors", model_bytes(arrays))
            if self.progress.rows:
                rows = curve(replace(self.config, output=str(self.folder)))
                draw_curves(rows, self.folder / "curve.png", PANELS[:2])
            if not self.quiet:
                print(f"results: {self.folder}", flush=True)
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

    def run_ended(self) -> None:
        if run_ended := getattr(self.callback, "run_ended", None):
            run_ended()


def prepare(config: RunConfig, *, partition: bool = True) -> tuple[Border, Path]:
    """Return the initial model and the results folder; raise for settings that cannot run.

    The model is on the CPU: no GPU is used here. Without ``partition`` the clients' data are not
    made (flwr-datasets and what it needs take 150 MB).
    """
    if partition:
        parts(config)
    dataset(config).check()
    model = fresh_model(config)
    if (states := state_folder(config)) is not None:
        if (former := DirectoryStore.owner(states)) is not None:
            owner = Owner(config.algorithm, model.layout.signature, former.run)
            DirectoryStore.check(states, owner)
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

    More ``workers`` are as many processes, each with a node that hosts any client. The model is the
    same to the bit unless clients are trained at once (``stack``) or folded (``fold``).
    """
    config.check_device()
    torch.set_num_threads(1)
    grid = InProcessGrid(
        app_with_data(config) if workers > 1 else "simulations.client_app:app",
        config.clients,
        hosts=workers if workers < config.clients else 0,
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
        run_config = RunConfig.parse(config | {"output": folder})
        run_in_process(run_config, [lambda info: rows.append(info.metrics)], quiet=True)
    return rows
