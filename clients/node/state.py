"""What a client keeps between rounds, so that lost replies can be undone.

A client never learns whether the server used its reply until the next request says which reply
was used last (``acked-round``). So it keeps one *version* of its state per round that may still be
asked for: the acknowledged one and what it produced since. A request settles them: the version of
the acknowledged round stands, later ones are undone, earlier ones are dropped, but for those that a
checkpoint of the server would have it go back to (``kept-rounds``).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Context

from fl_strategies.core.files import DamagedFile, load_arrays, save_arrays, write_atomically
from fl_strategies.server.encoding import encoded
from fl_strategies.server.wire import decode

Fields: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""A state as named arrays (a number is an array of shape ())."""


class StateError(RuntimeError):
    """A stored state that cannot be used: of another algorithm, model, run or client; damaged."""


class DamagedState(StateError):
    """A stored state that is not what was written; its client begins anew."""


@dataclass(frozen=True)
class Owner:
    """What a state belongs to: the algorithm's name, the signature of the model's layout, the run.

    The run is that of the request's ``run-id``, "" where a server does not say.
    """

    algorithm: str
    model: str
    run: str = ""


class Store(Protocol):
    """Where the versions of one client's state lie."""

    def rounds(self, owner: Owner) -> list[int]:
        """Return the rounds of which a version is kept, ascending; check whose they are."""

    def load(self, owner: Owner, server_round: int) -> Fields:
        """Return the version of ``server_round``."""

    def save(self, owner: Owner, server_round: int, fields: Fields) -> None:
        """Keep ``fields`` as the version of ``server_round``."""

    def drop(self, server_round: int) -> None:
        """Forget the version of ``server_round``."""


def peek(store: Store, owner: Owner, acked_round: int | None) -> tuple[int, Fields | None]:
    """Return the round and fields of the version that stands, and change nothing.

    ``acked_round`` is the server's word: -1 for none, ``None`` where it does not say, which takes
    the newest version there is. The round is -1 and the fields ``None`` for a newcomer and for a
    client that lost the acknowledged state.
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
    """As :func:`peek`, and drop the other versions but those of ``kept_rounds``.

    Nor are those dropped that are newer than ``server_round``, the request's: a host that is late
    finds what another has made of a later request.
    """
    standing, fields = peek(store, owner, acked_round)
    for version in store.rounds(owner):
        late = server_round is not None and version > server_round
        if version != standing and version not in kept_rounds and not late:
            store.drop(version)
    return standing, fields


def fresh_nonce() -> str:
    """Return a name for a state begun anew, by which the server tells it from the one it booked."""
    return secrets.token_hex(8)


@dataclass
class ContextStore:
    """Versions in Flower's ``context.state``: lives as long as the run and the node."""

    context: Context
    prefix: str = field(default="fl-strategies-state", init=False)

    def _key(self, server_round: int) -> str:
        return f"{self.prefix}-{server_round}"

    def owner(self) -> Owner | None:
        """Return whose the versions are; None if there never was one."""
        about: Any = self.context.state.get(self.prefix)
        if about is None:
            return None
        return Owner(*(str(about[name]) for name in ("algorithm", "model", "run")))

    def _check(self, owner: Owner) -> bool:
        """Return whether the owner is written there; raise :class:`StateError` if another is."""
        if (written := self.owner()) is not None:
            _check_owner(owner, written, "context.state")
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
        self.context.state[self._key(server_round)] = ArrayRecord(
            {name: encoded(value) for name, value in fields.items()}
        )

    def drop(self, server_round: int) -> None:
        """As :meth:`Store.drop`."""
        del self.context.state[self._key(server_round)]


class DirectoryStore:
    """Versions in a directory: a folder per client, in it a safetensors file per round.

    Survives restarts and keeps memory flat; a client's versions are found at once, however many
    clients there are. Files are written whole or not at all and are readable by their owner only.
    ``check`` tells beforehand whether the directory can be used.

    Parameters
    ----------
    directory : path
        One for all clients of a run.
    client_id : int >= 0
    durable : bool (default True)
        Whether files are on disk, and not with the operating system alone, when they count as
        written. In a folder that is deleted with its run they need not, which saves milliseconds
        a client.
    """

    def __init__(self, directory: Path | str, client_id: int, *, durable: bool = True) -> None:
        if not isinstance(client_id, int) or isinstance(client_id, bool) or client_id < 0:
            raise ValueError(f"client_id must be an int >= 0, got {client_id!r}")
        self.directory, self.client_id, self.durable = Path(directory), client_id, durable

    @classmethod
    def owner(cls, directory: Path | str) -> Owner | None:
        """Return whose states lie in ``directory``; None where there never was one."""
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
            write_atomically(manifest, json.dumps(asdict(owner)).encode(), new=True)
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


def _check_owner(asked: Owner, written: Owner, where: str) -> None:
    if (asked.algorithm, asked.model) != (written.algorithm, written.model):
        raise StateError(
            f"{where} holds the state of algorithm {written.algorithm!r} and model"
            f" {written.model}, not of {asked.algorithm!r} and {asked.model}"
        )
    if asked.run != written.run:
        raise StateError(
            f"{where} holds the state of run {written.run!r}, not of {asked.run!r}: choose another"
            " state directory, or delete that one if its run is over"
        )
