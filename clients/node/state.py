"""What a client keeps between rounds, so that lost replies can be undone.

The next request tells a client which of its replies the server used last (``acked-round``); until
then the client does not know. So it keeps one *version* of its state per round that the server may
still refer to: the acknowledged version and those made since. A request settles them: the version
of the acknowledged round becomes the state, and later versions are undone. Earlier ones are
dropped, except those that a checkpoint of the server would go back to (``kept-rounds``).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt
from flwr.app import ConfigRecord, Context

from fl_strategies.core.files import DamagedFile, load_arrays, save_arrays, write_atomically
from fl_strategies.core.schedules import check
from fl_strategies.messages.encoding import recorded
from fl_strategies.messages.wire import decode

Fields: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""A state as named arrays (a number is an array of shape ())."""
ELSEWHERE = "choose another state directory, or delete that one if its run is over"
"""What to do about the state of another run in a directory."""


class StateError(RuntimeError):
    """A stored state cannot be used: damaged, or of another algorithm, model, run or client."""


class DamagedState(StateError):
    """A stored state is not what was written; its client begins anew."""


@dataclass(frozen=True)
class Owner:
    """What a state belongs to: the algorithm's name, the signature of the model's layout, the run.

    The run is the request's ``run-id``, or "" if the server sends none.
    """

    algorithm: str
    model: str
    run: str = ""


class Store(Protocol):
    """Keeps the versions of one client's state."""

    def rounds(self, owner: Owner) -> list[int]:
        """Return the rounds of the kept versions, ascending; check their owner."""

    def load(self, owner: Owner, server_round: int) -> Fields:
        """Return the version of ``server_round``."""

    def save(self, owner: Owner, server_round: int, fields: Fields) -> None:
        """Keep ``fields`` as the version of ``server_round``."""

    def drop(self, server_round: int) -> None:
        """Forget the version of ``server_round``."""


def peek(store: Store, owner: Owner, acked_round: int | None) -> tuple[int, Fields | None]:
    """Return the round and fields of the acknowledged version, and change nothing.

    ``acked_round`` comes from the server: -1 for none; with ``None``, if the server does not send
    it, the newest version counts. The round is -1 and the fields are ``None`` for a new client and
    for a client that lost the acknowledged state.
    """
    rounds = store.rounds(owner)
    if acked_round is None and rounds:
        acked_round = rounds[-1]
    if acked_round not in rounds:
        return -1, None
    return acked_round, store.load(owner, acked_round)


def settle(
    store: Store,
    owner: Owner,
    acked_round: int | None,
    kept_rounds: Collection[int] = (),
    server_round: int | None = None,
) -> tuple[int, Fields | None]:
    """As :func:`peek`, and drop the other versions, except those of ``kept_rounds``.

    Versions newer than ``server_round``, the request's round, also stay: another host may have
    written them for a later request before a late host gets here.
    """
    standing, fields = peek(store, owner, acked_round)
    for version in store.rounds(owner):
        late = server_round is not None and version > server_round
        if version != standing and version not in kept_rounds and not late:
            store.drop(version)
    return standing, fields


def fresh_nonce() -> str:
    """Return a name for a new state, by which the server sees that it is not the recorded one."""
    return secrets.token_hex(8)


def client_id(context: Context) -> int:
    """Return a client's stable id: its ``partition-id`` if it has one, else the node's id."""
    return int(context.node_config.get("partition-id", context.node_id))


@dataclass
class ContextStore:
    """Versions in Flower's ``context.state``, which lives as long as the run and the node."""

    context: Context
    prefix: str = field(default="fl-strategies-state", init=False)

    def _key(self, server_round: int) -> str:
        return f"{self.prefix}-{server_round}"

    def owner(self) -> Owner | None:
        """Return the owner of the versions; None if there never was a version."""
        about: Any = self.context.state.get(self.prefix)
        if about is None:
            return None
        return Owner(*(str(about[name]) for name in ("algorithm", "model", "run")))

    def _check(self, owner: Owner) -> bool:
        """Return whether an owner is recorded; raise :class:`StateError` if it is another one."""
        if (written := self.owner()) is not None:
            advice = "a new strategy is a new run, and needs a new InProcessGrid or run of the app"
            _check_owner(owner, written, "context.state", advice)
        return written is not None

    def rounds(self, owner: Owner) -> list[int]:
        """As :meth:`Store.rounds`."""
        self._check(owner)
        start = len(self.prefix) + 1
        keys = [key for key in self.context.state if key.startswith(f"{self.prefix}-")]
        return sorted(int(key[start:]) for key in keys)

    def load(self, owner: Owner, server_round: int) -> Fields:
        """As :meth:`Store.load`."""
        record: Any = self.context.state[self._key(server_round)]
        return {name: decode(array).copy() for name, array in record.items()}

    def save(self, owner: Owner, server_round: int, fields: Fields) -> None:
        """As :meth:`Store.save`."""
        if not self._check(owner):
            self.context.state[self.prefix] = ConfigRecord(asdict(owner))
        self.context.state[self._key(server_round)] = recorded(fields)

    def drop(self, server_round: int) -> None:
        """As :meth:`Store.drop`."""
        del self.context.state[self._key(server_round)]


class DirectoryStore:
    """Versions in a directory: a folder per client, which holds a safetensors file per round.

    The directory survives restarts and keeps memory flat, and finds a client's versions at once,
    for any number of clients. A file is written completely or not at all, and only its owner can
    read it. ``check`` tells before a run whether the directory can be used.

    Parameters
    ----------
    directory : path
        The same for all clients of a run.
    client_id : int >= 0
    durable : bool (default True)
        Whether each write waits until the file is on disk. In a folder that is deleted with its run
        this is not needed; without it each client saves some milliseconds.
    """

    def __init__(self, directory: Path | str, client_id: int, *, durable: bool = True) -> None:
        check("client_id", client_id, low=0, integer=True)
        self.directory, self.client_id, self.durable = Path(directory), int(client_id), durable

    @classmethod
    def owner(cls, directory: Path | str) -> Owner | None:
        """Return the owner of the states in ``directory``; None if there never was a state."""
        manifest = Path(directory) / "owner.json"
        try:
            return _owner(json.loads(manifest.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OSError, RecursionError) as error:
            raise StateError(f"{manifest} is damaged: {error}") from None

    @classmethod
    def check(cls, directory: Path | str, owner: Owner) -> None:
        """Raise :class:`StateError` if ``directory`` holds states that are not ``owner``'s."""
        if (written := cls.owner(directory)) is not None:
            _check_owner(owner, written, str(directory))

    def _path(self, server_round: int) -> Path:
        return self.directory / str(self.client_id) / f"{server_round}.safetensors"

    def rounds(self, owner: Owner) -> list[int]:
        """As :meth:`Store.rounds`."""
        self.check(self.directory, owner)
        paths = (self.directory / str(self.client_id)).glob("*.safetensors")
        numbers = {path.name.split(".")[0]: path for path in paths if path.is_file()}
        rounds = {int(text): path for text, path in numbers.items() if text.isdecimal()}
        return sorted(number for number, path in rounds.items() if path == self._path(number))

    def load(self, owner: Owner, server_round: int) -> Fields:
        """As :meth:`Store.load`; raises :class:`DamagedState` for a damaged file."""
        path = self._path(server_round)
        try:
            fields, text = load_arrays(path)
            about = json.loads(text)
            client = about.pop("client")
            written = _owner(about)
        except DamagedFile as error:
            raise DamagedState(str(error)) from None
        except Exception as error:  # whatever a text made up by somebody makes its reader raise
            raise DamagedState(f"{path} is damaged: {error}") from None
        if client != self.client_id:
            raise StateError(
                f"{path} holds the state of client {client}, not of client {self.client_id}"
            )
        _check_owner(owner, written, str(path))
        return fields

    def save(self, owner: Owner, server_round: int, fields: Fields) -> None:
        """As :meth:`Store.save`."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        manifest = self.directory / "owner.json"
        if not manifest.exists():  # of two runs that begin at once, one is first
            write_atomically(manifest, json.dumps(asdict(owner)).encode(), new=True, private=True)
        self.check(self.directory, owner)
        path = self._path(server_round)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        about = json.dumps(asdict(owner) | {"client": self.client_id})
        save_arrays(path, fields, about, durable=self.durable)

    def drop(self, server_round: int) -> None:
        """As :meth:`Store.drop`."""
        self._path(server_round).unlink(missing_ok=True)


def _owner(about: Mapping[str, Any]) -> Owner:
    owner = Owner(**about)
    if not all(isinstance(value, str) for value in asdict(owner).values()):
        raise TypeError(f"{about} names no owner")
    return owner


def _check_owner(asked: Owner, written: Owner, where: str, advice: str = ELSEWHERE) -> None:
    if (asked.algorithm, asked.model) != (written.algorithm, written.model):
        raise StateError(
            f"{where} holds the state of algorithm {written.algorithm!r} and model"
            f" {written.model}, not of {asked.algorithm!r} and {asked.model}"
        )
    if asked.run != written.run:
        raise StateError(
            f"{where} holds the state of run {written.run!r}, not of {asked.run!r}: {advice}"
        )
