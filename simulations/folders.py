"""A run's results folder: what begins or continues in it, and whether it can be written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from clients import DirectoryStore, StateError
from fl_strategies import Checkpoints
from fl_strategies.core.files import NO_ROOM, write_atomically
from simulations.config import RunConfig
from simulations.differences import differences
from simulations.population import state_folder

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading a file of a run's folder raises if it is missing or damaged."""
EARLIER = ("history.jsonl", "clients.jsonl", "model.safetensors", "curve.png", "curve.svg")
"""The files that a new run removes from its folder."""


def clear(config: RunConfig, folder: Path) -> None:
    """Make a run's ``folder`` that of ``config``; raise if it cannot be resumed or begun there."""
    if continues := resumes(config, folder):
        check_resumes(config, folder)
    if not config.resume:
        check_no_states(config)
        if config.checkpoint_every:
            Checkpoints(folder / CHECKPOINTS).begin()
    for name in ("summary.json", *EARLIER * (not continues)):  # of other settings perhaps
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / "config.json", json.dumps(asdict(config), indent=2).encode())


def resumes(config: RunConfig, folder: Path) -> bool:
    """Return whether the run continues from a checkpoint in its ``folder``."""
    kept = config.resume and config.checkpoint_every > 0
    return kept and bool(Checkpoints(folder / CHECKPOINTS).rounds())


def continued(config: RunConfig) -> RunConfig:
    """Return the settings, with ``resume`` if their run was interrupted after a checkpoint."""
    again, folder = replace(config, resume=bool(config.checkpoint_every)), Path(config.output)
    try:
        same = not changes(config, folder)
    except UNREADABLE:
        same = False
    return again if same and resumes(again, folder) else config


def changes(config: RunConfig, folder: Path, **alike: int) -> list[str]:
    """Return how the settings of the run in ``folder`` differ, those ``alike`` excepted.

    Raises one of ``UNREADABLE`` if its ``config.json`` cannot be read.
    """
    stored = json.loads((folder / "config.json").read_text())
    return differences(stored | alike, asdict(config))


def check_resumes(config: RunConfig, folder: Path) -> None:
    """Raise ``ValueError`` unless the run in ``folder`` had these settings, rounds excepted."""
    try:
        found = changes(config, folder, rounds=config.rounds)
    except UNREADABLE as error:
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


def results_folder(config: RunConfig) -> Path:
    """Make and return the run's results folder; raise ``ValueError`` if it cannot be written."""
    name = f"{config.rule}-{Path(config.dataset).name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    default = Path.home() / "fl-strategies-results" / name
    folder = Path(config.output).expanduser().absolute() if config.output else default
    writable(folder, "results folder")
    return folder


@contextmanager
def room(states: Path | None = None) -> Iterator[None]:
    """Turn a full disk into a ``RuntimeError`` that names the file and the setting of its folder.

    ``states`` is the folder of clients' states, if it is one of its own.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is None:
            raise
        path = Path(error.filename)
        setting = "state-dir" if states in path.parents else "output"
        raise RuntimeError(
            f"{path} cannot be written ({error.strerror}): free some space, or choose another"
            f" {setting}"
        ) from error


def writable(folder: Path, what: str) -> None:
    """Make ``folder``; raise ``ValueError`` if nothing can be written to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / ".probe", b"")
        (folder / ".probe").unlink()
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise ValueError(f"the {what} {folder} cannot be written: {error}") from None
