"""A client's state between rounds: it is read as the server acknowledged it, and written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clients.learning.arrays import to_numpy
from clients.node.state import DamagedState, Fields, Owner, Store, fresh_nonce, peek, settle
from clients.request import Config, round_of
from fl_strategies.core.log import log

State: TypeAlias = Any
"""A named tuple of tensors and numbers: what an algorithm's client keeps for the next round."""
Look: TypeAlias = Callable[[Store, Owner, int | None], tuple[int, Fields | None]]


UNSHARED = "unshared/"
"""Prefix, among a state's fields, of the names of the model's arrays that the client keeps."""
LEFT_OUT = "left-out"
RECEIVED = "received"


class Kept(NamedTuple):
    """What a client keeps; the defaults, if it keeps nothing."""

    state: State | None = None
    """The algorithm's state; None for a new client."""
    nonce: str = ""
    """The name of this state, drawn when the state began."""
    arrays: Mapping[str, npt.NDArray[Any]] | None = None
    """The model's arrays that the client keeps; None for a new client."""
    left_out: npt.NDArray[Any] | None = None
    """What compression left out of all uploads so far, [vectors, d]; None for a new client."""
    received: Tensor | None = None
    """The global model [d] that the client received in that round; None if it does not keep it."""


@dataclass(frozen=True)
class Keeper:
    """Keeps the states, of ``state_type``, of one client of ``algorithm`` in ``store``.

    ``kept`` names the model's arrays that the client keeps; they are part of its state.
    ``state_type`` is None if nothing else is. ``signature`` is the model's. A damaged state counts
    as lost, and a new nonce tells the server so; a state of another owner raises
    :class:`clients.StateError`.
    """

    store: Store | None
    client_id: int
    algorithm: str
    state_type: type[NamedTuple] | None
    signature: str
    kept: tuple[str, ...] = ()
    compresses: bool = False
    """Whether :attr:`Kept.left_out` is part of the state."""
    remembers: bool = False
    """Whether :attr:`Kept.received` is part of the state, as of the next round."""

    def settled(self, config: Config, like: Tensor) -> Kept:
        """Return what is kept of the acknowledged round, and drop what is kept of other rounds.

        The state's vectors have the type and device of ``like``.
        """
        if not self.keeps:
            return Kept()
        kept = [int(number) for number in str(config.get("kept-rounds", "")).split()]
        number = round_of(config) or None  # a server that names no round has no late request
        look = functools.partial(settle, kept_rounds=kept, server_round=number)
        return self._read(self._found(config, look), like)

    def peeked(self, config: Config, like: Tensor) -> Kept:
        """As :meth:`settled`, without dropping anything."""
        return self._read(self._found(config, peek), like) if self.keeps else Kept()

    def save(self, config: Config, kept: Kept) -> None:
        """Store ``kept`` as the version of the request's round."""
        if not self.keeps:
            return
        fields = {} if kept.state is None else to_fields(kept.state)
        fields |= {UNSHARED + name: array for name, array in (kept.arrays or {}).items()}
        if kept.left_out is not None:
            fields[LEFT_OUT] = kept.left_out
        if self.remembers and kept.received is not None:
            fields[RECEIVED] = to_numpy(kept.received)
        fields["nonce"] = np.frombuffer(kept.nonce.encode(), np.uint8)
        self._store.save(self.owner(config), round_of(config), fields)

    @property
    def keeps(self) -> bool:
        """Whether the client keeps anything."""
        owns = self.state_type is not None or bool(self.kept)
        return owns or self.compresses or self.remembers

    def _read(self, fields: Fields | None, like: Tensor) -> Kept:
        if fields is None:
            return Kept(nonce=fresh_nonce())
        state = from_fields(self.state_type, fields, like) if self.state_type else None
        arrays = {name: fields[UNSHARED + name] for name in self.kept}
        nonce, before = fields["nonce"].tobytes().decode(), fields.get(RECEIVED)
        received = None if before is None else torch.from_numpy(before).to(like)
        return Kept(state, nonce, arrays, fields.get(LEFT_OUT), received)

    def _found(self, config: Config, look: Look) -> Fields | None:
        try:
            fields = look(self._store, self.owner(config), config.get("acked-round"))[1]
            of_state = self.state_type._fields if self.state_type else ()
            names = {*of_state, *(UNSHARED + name for name in self.kept), "nonce"}
            names |= {LEFT_OUT} if self.compresses else set()
            if fields is not None and (missing := names - fields.keys()):
                raise DamagedState(f"the state lacks {sorted(missing)}")
            return fields
        except DamagedState as error:
            log(WARNING, "client %d begins anew: %s", self.client_id, error)
            return None

    @property
    def _store(self) -> Store:
        if self.store is None:
            what = "arrays that do not travel" if self.state_type is None else "state"
            raise ValueError(f"{self.algorithm} keeps {what} on its clients: give them a store")
        return self.store

    def owner(self, config: Config) -> Owner:
        """Return the owner of the states that a request is about."""
        return Owner(self.algorithm, self.signature, str(config.get("run-id", "")))


def to_fields(state: State) -> dict[str, npt.NDArray[Any]]:
    """Return a state's tensors and numbers as named arrays."""
    return {
        name: to_numpy(value) if isinstance(value, Tensor) else np.asarray(value)
        for name, value in state._asdict().items()
    }


def from_fields(state_type: Any, fields: Fields, like: Tensor) -> State:
    """Return the state made of named arrays; its vectors have the type and device of ``like``.

    Those of whole numbers and truth values keep their type.
    """
    values = {
        name: _vector(fields[name], like) if fields[name].ndim else fields[name].item()
        for name in state_type._fields
    }
    return state_type(**values)


def _vector(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    vector = torch.from_numpy(array)
    return vector.to(like) if vector.is_floating_point() else vector.to(like.device)
