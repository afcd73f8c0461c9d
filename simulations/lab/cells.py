"""Cells: runs with a folder each; finished cells are not run again.

``compare`` and ``reproduce`` are lists of cells. A cell counts as finished when its folder says so
(``summary.json``) and was made with the same settings (``config.json``); anything else in its place
is replaced. The code is not a setting: after a change of the code choose another folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from types import FrameType

from simulations.config import RunConfig
from simulations.differences import differences


def finished(config: RunConfig) -> bool:
    """Return whether the run's folder holds a finished run with these settings."""
    return _changes(config) == []


def trial(
    config: RunConfig, rate: float, *, seed: int, share: float, own: bool = False
) -> RunConfig:
    """Return the run that tries a learning rate: ``share`` of the training samples is held out.

    It measures nothing but what the choice needs, and runs to its end. With ``own``, the clients'
    own models are tested on what each client holds out.
    """
    return replace(
        config,
        lr=rate,
        seed=seed,
        validation=share,
        stop_at_target=False,
        fraction_evaluate=config.fraction_evaluate if own else 0.0,
        fine_tune="off",
        fine_tune_lr=-1.0,
        gradient_norm="false",
    )


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


def run_cells(
    cells: Mapping[RunConfig, Callable[[], object]],
    *,
    jobs: int = 1,
    later: int = 0,
    on_done: Callable[[], object] = lambda: None,
) -> None:
    """Run the cells that are not finished, and print the progress.

    Parameters
    ----------
    cells : each cell's settings, with its own folder as output, and the function that runs it; the
        result must not depend on the process
    jobs : int >= 1
        Cells at a time. A single job runs in this process; several jobs run in processes of one
        thread each, which get the function by pickle.
    later : how many cells the caller runs afterwards, for the estimate of the time left
    on_done : called in this process after each cell

    Raises
    ------
    ValueError
        For fewer than one job.
    RuntimeError
        At the end, with the names of the cells that failed; at once, if a process was killed.
    KeyboardInterrupt
        On Ctrl-C, after all processes have ended and saved their results so far.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be >= 1, got {jobs}")
    todo: dict[str, Callable[[], object]] = {}
    for config, run in cells.items():
        changes = _changes(config)
        if changes:
            name = Path(config.output).name
            print(f"{name} is run anew because its settings have changed: {'; '.join(changes)}")
        if changes != []:
            todo[config.output] = run
    if len(todo) < len(cells):
        print(f"{len(cells) - len(todo)} of {len(cells)} runs were finished before", flush=True)
    started = time.monotonic()
    failed: dict[str, BaseException] = {}
    with closing(_outcomes(todo, jobs)) as outcomes:
        for done, (output, error) in enumerate(outcomes, start=1):
            name = Path(output).name
            if error is not None:
                failed[name] = error
                print(f"{name} failed: {_told(error)}", flush=True)
            on_done()
            left = (time.monotonic() - started) / done * (len(todo) - done + later)
            print(f"{done} of {len(todo) + later} runs done, about {left:.0f} s left", flush=True)
    if failed:
        names = ", ".join(f"{name} ({_told(error)})" for name, error in failed.items())
        first = next(iter(failed.values()))
        raise RuntimeError(f"{len(failed)} of {len(cells)} runs failed: {names}") from first


def _told(error: BaseException) -> str:
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
        stored = json.loads((folder / "config.json").read_text())
        (folder / "history.jsonl").stat()
        return differences(stored, asdict(config))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _outcomes(
    cells: Mapping[str, Callable[[], object]], jobs: int
) -> Generator[tuple[str, BaseException | None], None, None]:
    """Yield the key of each cell as it ends, with its error if it failed."""
    if jobs == 1 or len(cells) <= 1:
        for key, run in cells.items():
            try:
                run()
            except Exception as fault:
                yield key, fault
            else:
                yield key, None
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(cells)), context, initializer=_become_worker)
    try:
        waiting = iter(cells.items())
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


def _become_worker() -> None:
    """Leave Ctrl-C to the parent, which sends SIGTERM; end without it."""
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
