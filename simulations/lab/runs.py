"""Runs with a folder each; finished runs are not run again.

A run counts as finished when its folder says so (``summary.json``) and was made with the same
settings (``config.json``); anything else in its place is replaced. The code is not a setting: after
a change of the code choose another folder.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType

from clients import DirectoryStore
from clients.any_algorithm import Registered, register, registered
from fl_strategies.core.files import FolderLock
from fl_strategies.core.log import mute_below
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.folders import CHECKPOINTS, UNREADABLE, changes, continued
from simulations.lab.superlink import flwr_run, gpu_share, print_progress
from simulations.population import state_folder

ENGINES = {"in-process": 1, "ray": 2}
"""The engines, each with its number of worker processes unless another is given."""
STATES = "state"
"""The folder of clients' states in a run's folder, on Ray."""


def finished(config: RunConfig) -> bool:
    """Return whether the run's folder holds a finished run with these settings."""
    return _changes(config) == []


@contextmanager
def diverging_allowed(config: RunConfig) -> Iterator[None]:
    """Let a run end early if no reply is usable any more: this is a result, and is reported."""
    try:
        yield
    except RuntimeError:
        path = Path(config.output) / "summary.json"
        given_up = json.loads(path.read_text())["given_up"] if finished(config) else ""
        if not given_up:
            raise
        print(f"{Path(config.output).name} ended early: {given_up}", flush=True)


def run_one(
    config: RunConfig,
    *,
    engine: str = "in-process",
    workers: int = 0,
    verbose: bool = False,
    quiet: bool = False,
) -> None:
    """Run one on ``engine``: from its last checkpoint, if it was interrupted after one.

    ``workers`` are processes, 0: as many as ``ENGINES`` says. That the run diverges is a result.
    ``verbose`` leaves Flower's log as it is; ``quiet`` shows only rounds with lost clients.
    """
    workers = workers or ENGINES[engine]
    if not verbose:
        mute_below(logging.WARNING)
    config = continued(config)
    if not config.resume:
        _drop_former(config)
    with diverging_allowed(config):
        if engine == "in-process":
            run_in_process(config, workers=workers, quiet=quiet)
        else:
            flwr_run(
                config.to_run_config(),
                num_supernodes=min(workers, config.clients),
                gpus=gpu_share(workers, gpus) if (gpus := config.gpus()) else 0.0,
                workers=workers,
                on_line=print if verbose else partial(print_progress, quiet=quiet),
            )


def _drop_former(config: RunConfig) -> None:
    """Delete checkpoints and states of the folder's former run, which is replaced; never another's.

    Raises ``ValueError`` if it is running.
    """
    states, lock = state_folder(config), FolderLock(Path(config.output))
    former = lock.take()
    try:
        shutil.rmtree(Path(config.output) / CHECKPOINTS, ignore_errors=True)
        if makes_states(config):
            shutil.rmtree(config.state_dir, ignore_errors=True)
        elif states and (owner := DirectoryStore.owner(states)) and owner.run == former:
            shutil.rmtree(states)
    finally:
        lock.release()


def makes_states(config: RunConfig) -> bool:
    """Return whether the run makes its own states anew."""
    return config.state_dir == str(Path(config.output) / STATES)


def run_all(
    work: Mapping[RunConfig, Callable[[], object]],
    *,
    jobs: int = 1,
    later: int = 0,
    on_done: Callable[[], object] = lambda: None,
) -> None:
    """Run those that are not finished, and print the progress.

    Parameters
    ----------
    work : each run's settings, with its own folder as output, and the function that runs it; the
        result must not depend on the process
    jobs : int >= 1
        Runs at a time. A single job runs in this process; several jobs run in processes of one
        thread each, which get the function by pickle.
    later : how many runs the caller makes afterwards, for the estimate of the time left
    on_done : called in this process after each run

    Raises
    ------
    ValueError
        For fewer than one job.
    RuntimeError
        At the end, with the names of the runs that failed; at once, if a process was killed.
    KeyboardInterrupt
        On Ctrl-C, after all processes have ended and saved their results so far.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be >= 1, got {jobs}")
    todo: dict[str, Callable[[], object]] = {}
    for config, run in work.items():
        changes = _changes(config)
        if changes:
            name = Path(config.output).name
            print(f"{name} is run anew because its settings have changed: {'; '.join(changes)}")
        if changes != []:
            todo[config.output] = run
    if len(todo) < len(work):
        print(f"{len(work) - len(todo)} of {len(work)} runs were finished before", flush=True)
    started = time.monotonic()
    failed: dict[str, BaseException] = {}
    with closing(_outcomes(todo, jobs)) as outcomes:
        for done, (output, error) in enumerate(outcomes, start=1):
            name = Path(output).name
            if error is not None:
                failed[name] = error
                print(f"{name} failed: {_error_text(error)}", flush=True)
            on_done()
            left = (time.monotonic() - started) / done * (len(todo) - done + later)
            print(f"{done} of {len(todo) + later} runs done, about {left:.0f} s left", flush=True)
    if failed:
        names = ", ".join(f"{name} ({_error_text(error)})" for name, error in failed.items())
        first = next(iter(failed.values()))
        raise RuntimeError(f"{len(failed)} of {len(work)} runs failed: {names}") from first


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def interrupted(folder: Path) -> int:
    """Print what Ctrl-C leaves behind; return its exit code."""
    print(f"interrupted; {folder} has what was computed, the same command continues from there")
    return 130


def _changes(config: RunConfig) -> list[str] | None:
    """Return how the settings of this folder's finished run differ; None without such a run."""
    folder = Path(config.output)
    try:
        if not json.loads((folder / "summary.json").read_text())["finished"]:
            return None
        (folder / "history.jsonl").stat()
        return changes(config, folder)
    except UNREADABLE:
        return None


def _outcomes(
    work: Mapping[str, Callable[[], object]], jobs: int
) -> Generator[tuple[str, BaseException | None], None, None]:
    """Yield the key of each run as it ends, with its error if it failed."""
    if jobs == 1 or len(work) <= 1:
        for key, run in work.items():
            try:
                run()
            except Exception as fault:
                yield key, fault
            else:
                yield key, None
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(work)), context, _become_worker, (registered(),))
    try:
        waiting = iter(work.items())
        running = {pool.submit(run): key for key, run in islice(waiting, jobs)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise RuntimeError(
                        f"a process was killed (out of memory?); jobs was {jobs}"
                    ) from error
                yield running.pop(future), error
                running |= {pool.submit(run): key for key, run in islice(waiting, 1)}
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown()


def _become_worker(algorithms: Registered) -> None:
    """Know the parent's algorithms; leave Ctrl-C to it, which sends SIGTERM; end without it."""
    register(algorithms)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _leave(_signum: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is being saved is saved
    raise SystemExit


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
