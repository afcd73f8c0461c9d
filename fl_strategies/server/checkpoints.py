"""Checkpoints of a run's server half, from which ``start(resume=True)`` continues.

A checkpoint is one safetensors file with a checksum, written completely or not at all. It holds the
global model, the server's states (their records, field by field), the ledger, the run's id
and history, and the version of this format; another version is refused. It holds no random state,
because every stream derives from the seed and the round. The directory is locked during a run.

Clients keep their own states, which a killed run leaves some rounds ahead of the last checkpoint.
So each request names the rounds (``kept-rounds``) that some checkpoint would go back to, and the
client keeps its state of these rounds: one more version for each checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from logging import INFO, WARNING
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fl_strategies.core.files import DamagedFile, FolderLock, load_arrays, save_arrays
from fl_strategies.core.log import log
from fl_strategies.core.schedules import check, shown
from fl_strategies.core.vectors import Pieces
from fl_strategies.server.callbacks import Watched

PREFIX, SUFFIX = "round-", ".safetensors"
RUN = frozenset(
    {"settings", "run-id", "rounds-before", "round", "ended-by", "clients", "metrics", "history",
     "devices", "roles"}
)  # fmt: skip
"""The content of ``Checkpoint.run``."""
PLAIN = frozenset({str, int, float, bool})
"""The types of the keys of a dict that a checkpoint gives back as they were."""
VERSION = 7
"""The version of the format."""


class Checkpoint(NamedTuple):
    """A file's content: the model's arrays by name, the states, the ledger, the run so far.

    ``states`` holds, by whose state it is ("algorithm", "clients" for what is known of them, a
    part's stage), the fields of its record by name; a state that is None has none.
    """

    model: dict[str, npt.NDArray[Any]]
    states: dict[str, dict[str, Any]]
    ledger: Mapping[str, Mapping[int, Any]]
    run: dict[str, Any]


class Checkpoints:
    """Where checkpoints are written, how often, and which of them are kept.

    Parameters
    ----------
    directory : path
        For one run; made when the run begins.
    every : int >= 1 (default 1)
        Rounds from one checkpoint to the next.
    keep : int >= 1 (default 2)
        How many of the last checkpoints are kept.
    best : str, optional
        A metric of ``RoundInfo.metrics``: the checkpoint with its best value is kept as well.
    smaller : bool (default False)
        Whether a smaller value of ``best`` is better.

    Raises
    ------
    ValueError
        For a number outside its range.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        every: int = 1,
        keep: int = 2,
        best: str | None = None,
        smaller: bool = False,
    ) -> None:
        check("every", every, low=1, integer=True)
        check("keep", keep, low=1, integer=True)
        self.directory, self.every, self.keep = Path(directory), every, keep
        self.best, self.smaller = best, smaller
        self._held: dict[int, tuple[dict[int, int], float]] = {}
        self._watched = Watched(type(self).__name__, best, "loss" if smaller else "accuracy")
        self._lock = FolderLock(self.directory)

    def path(self, number: int) -> Path:
        """Return the file of the checkpoint after round ``number``."""
        return self.directory / f"{PREFIX}{number:08d}{SUFFIX}"

    def rounds(self) -> list[int]:
        """Return the rounds after which there are checkpoints, ascending."""
        return sorted(self._found()[0])

    def _found(self) -> tuple[dict[int, Path], list[Path]]:
        """Return the checkpoints by round, and other entries whose names begin like theirs."""
        checkpoints, strays = {}, []
        for path in sorted(self.directory.glob(f"{PREFIX}*")):
            number = path.name[len(PREFIX) :].removesuffix(SUFFIX)
            if number.isdecimal() and self.path(int(number)) == path:
                checkpoints[int(number)] = path
            else:
                strays.append(path)
        return checkpoints, strays

    def take(self) -> str:
        """Lock the directory; return the id of the run that held it last, or "".

        Other files in it are left alone, with a line in the log. Raises ``ValueError`` if another
        run holds the directory, or if something that is not a file has a checkpoint's name.
        """
        run = self._lock.take()
        found, strays = self._found()
        if wrong := [str(path) for path in found.values() if not path.is_file()]:
            raise ValueError(f"{', '.join(wrong)}: no file, but in a checkpoint's place; remove it")
        for path in strays:
            log(WARNING, "%r is no checkpoint and is left alone", str(path))
        return run

    def sign(self, run: str) -> None:
        """Write the id of the run into its directory."""
        self._lock.sign(run)

    def release(self) -> None:
        """Unlock the directory."""
        self._lock.release()

    def begin(self) -> None:
        """Raise ``ValueError`` if a new run would mix its checkpoints with another run's."""
        if found := self.rounds():
            raise ValueError(
                f"{self.directory} holds checkpoints of rounds {found}: continue with"
                " resume, or choose another directory"
            )
        self._held = {}
        self._watched.begin()

    def save(self, number: int, checkpoint: Checkpoint) -> None:
        """Write the checkpoint after round ``number``, then delete those that are not kept."""
        arrays = {f"model/{name}": array for name, array in checkpoint.model.items()}
        kept = {
            "states": _pack(checkpoint.states, arrays),
            "ledger": _pack(checkpoint.ledger, arrays),
            "run": checkpoint.run,
        }
        about = json.dumps({"version": VERSION, "names": list(checkpoint.model), **kept})
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_arrays(self.path(number), arrays, about)
        self._hold(number, checkpoint)
        for old in self._dropped():
            del self._held[old]
            self.path(old).unlink(missing_ok=True)

    def last(self) -> Checkpoint | None:
        """Return the last checkpoint that is not damaged; None if there are no checkpoints.

        Writes nothing. Raises ``ValueError`` if all are damaged.
        """
        found, self._held = None, {}
        for number in self.rounds():
            try:
                found = self._load(number)
            except DamagedFile as fault:
                log(WARNING, "%s; it is not used", fault)
        if found is None and self.rounds():
            raise ValueError(f"every checkpoint in {self.directory} is damaged: {self.rounds()}")
        return found

    def kept_rounds(self, client: int) -> list[int]:
        """Return the rounds of ``client``'s states that the checkpoints would go back to."""
        return sorted({acked[client] for acked, _ in self._held.values() if client in acked})

    def _load(self, number: int) -> Checkpoint:
        arrays, text = load_arrays(self.path(number))
        try:
            about = json.loads(text)
            version = about["version"]
            model = {name: arrays[f"model/{name}"] for name in about["names"]}
            if version == VERSION:
                states, ledger = (_unpack(about[name], arrays) for name in ("states", "ledger"))
                found = Checkpoint(model, states, ledger, about["run"])
                if missing := sorted(RUN - found.run.keys()):
                    raise ValueError(f"it lacks {missing}")
                self._hold(number, found)
        except Exception as error:  # whatever a text made up by somebody makes its reader raise
            raise DamagedFile(f"{self.path(number)} is damaged: {error!r}") from None
        if version != VERSION:
            raise ValueError(
                f"{self.path(number)} has version {version!r} of the format, and this version of"
                f" fl_strategies reads {VERSION}: continue with the version that wrote it"
            )
        return found

    def _hold(self, number: int, checkpoint: Checkpoint) -> None:
        value = None if self.best is None else self._watched.value(checkpoint.run["metrics"])
        value = math.nan if value is None else value
        acked = dict(checkpoint.ledger["acked"])  # the ledger changes its own
        self._held[number] = (acked, -value if self.smaller else value)

    def run_ended(self) -> None:
        """Say where the last checkpoint and the best one are."""
        if self._held:
            log(INFO, "  %s, the last round", self.path(max(self._held)))
        if self.best is not None and self._watched.came("no checkpoint is the best"):
            for number in self._best():
                log(INFO, "  %s, round %d, the best %s", self.path(number), number, self.best)

    def _best(self) -> list[int]:
        """Return the round with the best value, if any round had a value."""
        rated = {n: value for n, (_, value) in self._held.items() if not math.isnan(value)}
        return [max(rated, key=lambda number: (rated[number], -number))] if rated else []

    def _dropped(self) -> list[int]:
        kept = {*sorted(self._held)[-self.keep :], *self._best()}
        return [number for number in self._held if number not in kept]


def can_hold(value: Any) -> bool:
    """Return whether a checkpoint can hold ``value``, a field of a state, and give it back."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        json.dumps(_pack(value, arrays))
    except (TypeError, ValueError, RecursionError):
        return False
    return all(array.dtype.kind in "biuf" for array in arrays.values())


def _pack(value: Any, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    """Return ``value`` in a form for JSON; its arrays are put into ``arrays``.

    Raises ``TypeError`` for what :func:`_unpack` would not give back; a named tuple comes back as a
    tuple.
    """
    if isinstance(value, np.ndarray | Pieces):
        name = f"state/{len(arrays)}"
        arrays[name] = np.asarray(value)
        return {"array": name}
    if type(value) in (dict, MappingProxyType) and all(type(key) in PLAIN for key in value):
        return {"map": [[key, _pack(item, arrays)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_pack(item, arrays) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is not None and not isinstance(value, bool | int | float | str):
        must = "numbers, texts, NumPy arrays, and lists, tuples and dicts (by texts or numbers)"
        raise TypeError(f"a state must be made of {must}, got {shown(value)}")
    return value


def _unpack(value: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "tuple" in value:
        return tuple(_unpack(value["tuple"], arrays))
    return {key: _unpack(item, arrays) for key, item in value["map"]}


def fields_of(state: Any) -> dict[str, Any]:
    """Return a server state's fields by name; the state None has none."""
    if state is None:
        return {}
    if is_dataclass(state):
        return {f.name: getattr(state, f.name) for f in fields(state)}
    found: dict[str, Any] = state._asdict()
    return found


def check_state(hook: str, state: Any) -> None:
    """Raise ``TypeError`` unless a checkpoint can hold the ``state`` that ``hook`` returned."""
    if not (state is None or is_dataclass(state) or hasattr(state, "_asdict")):
        must = f"{hook} must return a state that is a named tuple, a frozen dataclass or None"
        raise TypeError(f"{must}, got {shown(state)}")
    for name, value in fields_of(state).items():
        if not can_hold(value):
            must = f"{hook} must return a state of numbers, texts, NumPy arrays, lists and dicts"
            raise TypeError(f"{must}, got {shown(value)} as {name}")


def restored(state: Any, saved: Mapping[str, Any], where: object) -> Any:
    """Return a record like ``state`` with the fields that a checkpoint ``saved``.

    Raises ``ValueError``, which names the file ``where``, if the fields are another record's.
    """
    ours = fields_of(state)
    if ours.keys() != saved.keys():
        raise ValueError(
            f"{where} holds {sorted(saved)} of the server, and this version keeps {sorted(ours)}"
        )
    return state if state is None else type(state)(**saved)
