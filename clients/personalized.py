"""Personalized models, to be used: from the state that each client keeps.

>>> net.load_state_dict(personalized_model(DirectoryStore("states", 3), net))  # doctest: +SKIP
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clients.any_algorithm import CLIENTS, client_of
from clients.base import FederatedClient
from clients.keeping import UNSHARED, from_fields
from clients.learning.border import Border
from clients.node.in_process import InProcessGrid
from clients.node.state import (
    ContextStore,
    DirectoryStore,
    Fields,
    Owner,
    StateError,
    client_id,
)
from fl_strategies import Checkpoints
from fl_strategies.core.log import log


def personalizes(client: type[FederatedClient]) -> bool:
    """Return whether clients of a class keep a personalized model."""
    return client.personalized_model is not FederatedClient.personalized_model


PERSONALIZED = frozenset(name for name, client in CLIENTS.items() if personalizes(client))
"""The algorithms whose clients keep a personalized model."""


class PersonalizedModel(dict[str, Tensor]):
    """A client's model as a state dict, on the CPU, and which it is.

    A file by ``torch.save``, like any copy by pickle, holds the plain state dict.

    Attributes
    ----------
    client : int
    round : int
        The round in which the client made it.
    acknowledged : bool
        Whether the server used that round's reply; False if it is not known, without a checkpoint.
    """

    def __init__(
        self, arrays: Mapping[str, Tensor], client: int, number: int, acknowledged: bool
    ) -> None:
        super().__init__(arrays)
        self.client, self.round, self.acknowledged = client, number, acknowledged

    def __reduce__(self) -> Any:  # torch.load reads no classes but its own and Python's
        return OrderedDict, (), None, None, iter(self.items())


def personalized_model(
    store: ContextStore | DirectoryStore,
    module: nn.Module | Border,
    *,
    checkpoints: Path | str | None = None,
) -> PersonalizedModel:
    """Return a client's personalized model: the one that the client itself would evaluate.

    It consists of the model that the algorithm keeps and of the arrays that are the client's own
    (``share=...``: FedPer's head, FedBN's statistics). All other arrays, running statistics that
    travel among them, are those of the last checkpoint, or of ``module`` without one: load the
    global model into it first.

    Parameters
    ----------
    store : ContextStore or DirectoryStore
        The client's: ``ContextStore(context)`` in a ClientApp, ``DirectoryStore(directory, 3)`` for
        client 3 of a state directory.
    module : torch.nn.Module or Border
        The model; the client's Border if that was made with options. It is not changed.
    checkpoints : path, optional
        The server's directory of checkpoints. The last one tells which reply of the client the
        server used, and the model is that reply's. Without it the model is the newest, which the
        server may not have used, if the reply was lost.

    Returns
    -------
    PersonalizedModel
        For ``load_state_dict``, with the ``round`` that it is of; the log says this, too.

    Raises
    ------
    StateError
        If there is no state of this client, or none of the acknowledged round; if the state, or the
        checkpoint, belongs to another run, algorithm or model; if it is damaged.
    ValueError
        If the algorithm has no personalized model, and no array is the client's own.
    """
    model = _model_of(store, _border(module), _last(checkpoints))
    if model is None:
        raise StateError(
            f"the server used no reply of client {_where(store)[1]} up to the last checkpoint in"
            f" {checkpoints}"
        )
    how = "which the server used" if model.acknowledged else "its newest"
    log(INFO, "personalized model of client %d: of round %d, %s", model.client, model.round, how)
    return model


def personalized_models(
    states: InProcessGrid | Path | str,
    module: nn.Module | Border,
    *,
    checkpoints: Path | str | None = None,
) -> dict[int, PersonalizedModel]:
    """Return the personalized models of all clients that have a state, by client id.

    ``states`` is the grid on which a run ended, if clients had a ``ContextStore``, or a directory
    of states; the rest is as for :func:`personalized_model`.
    """
    flat, last = _border(module), _last(checkpoints)
    stores = [*_stores(states)]
    made = (_model_of(store, flat, last) for store in stores)
    models = {model.client: model for model in made if model is not None}
    if not models:
        unused = f"{checkpoints} used no client's reply"
        raise StateError(unused if last and stores else f"{_named(states)} holds no client's state")
    return models


def _stores(states: InProcessGrid | Path | str) -> Iterator[ContextStore | DirectoryStore]:
    """Yield the stores that hold a state."""
    if isinstance(states, InProcessGrid):
        stores = map(ContextStore, states.client_contexts())
        yield from (store for store in stores if store.owner() is not None)
    else:
        names = (path.name for path in Path(states).glob("*") if path.is_dir())
        for client in sorted(int(name) for name in names if name.isdecimal()):
            yield DirectoryStore(states, client)


def _named(states: InProcessGrid | Path | str) -> str:
    if isinstance(states, InProcessGrid):
        return "the grid (whose clients need a ContextStore; else name their directory)"
    return str(states)


def _border(module: nn.Module | Border) -> Border:
    return module if isinstance(module, Border) else Border(copy.deepcopy(module))


def _last(checkpoints: Path | str | None) -> Any:
    """Return the last checkpoint; None if no directory is named."""
    if checkpoints is None:
        return None
    if (last := Checkpoints(checkpoints).last()) is None:
        raise StateError(f"{checkpoints} holds no checkpoint")
    return last


def _model_of(
    store: ContextStore | DirectoryStore, model: Border, last: Any
) -> PersonalizedModel | None:
    """Return a client's model; None if ``last``, a checkpoint, has used no reply of the client."""
    where, client = _where(store)
    owner = _owner(store)
    if owner is None:
        raise StateError(f"{where} holds no state: no client has trained and kept one there")
    if model.signature != owner.model:
        raise StateError(
            f"{where} holds states of model {owner.model}, and the module is {model.signature}:"
            " give the clients' Border if it has options (share, train)"
        )
    check_promises(owner.algorithm, model)
    if last is not None and last.run["run-id"] != owner.run:
        raise StateError(
            f"the checkpoint is of run {last.run['run-id']!r}, and {where} holds states of run"
            f" {owner.run!r}"
        )
    rounds = store.rounds(owner)
    if not rounds:
        raise StateError(f"{where} holds no state of client {client}")
    number = rounds[-1] if last is None else last.ledger["acked"].get(client)
    if number is None:
        return None
    if number not in rounds:
        raise StateError(
            f"{where} holds client {client}'s states of rounds {rounds}, not that of round"
            f" {number}, which the server used"
        )
    arrays = _arrays(owner.algorithm, model, store.load(owner, number), last)
    return PersonalizedModel(arrays, client, number, acknowledged=last is not None)


def check_promises(algorithm: str, model: Border) -> None:
    """Raise ``ValueError`` if clients of ``algorithm`` have no model of their own."""
    if not personalizes(client_of(algorithm)) and not model.kept:
        raise ValueError(
            f"{algorithm} has no personalized model; these have one:"
            f" {', '.join(sorted(PERSONALIZED))}"
        )


def _where(store: ContextStore | DirectoryStore) -> tuple[str, int]:
    """Return where the states are, and the client's id."""
    if isinstance(store, DirectoryStore):
        return str(store.directory), store.client_id
    return "context.state", client_id(store.context)


def _owner(store: ContextStore | DirectoryStore) -> Owner | None:
    if isinstance(store, DirectoryStore):
        return DirectoryStore.owner(store.directory)
    return store.owner()


def _arrays(algorithm: str, model: Border, fields: Fields, last: Any) -> dict[str, Tensor]:
    """Return the state dict that has a client's arrays in the places that are its own."""
    known: dict[str, Any] = {} if last is None else dict(last.model)
    client, vector = client_of(algorithm), None
    if client.state_type is not None:
        vector = client.personalized_model(from_fields(client.state_type, fields, model.vector))
    if vector is not None:
        arrays = dict(zip(model.names, model.arrays(vector), strict=True))
        known |= {name: array for name, array in arrays.items() if name not in model.buffers}
    known |= {name: fields[UNSHARED + name] for name in model.kept}
    return {
        name: torch.as_tensor(known.get(name, tensor.detach()))
        .to("cpu", tensor.dtype, copy=True)
        .contiguous()
        for name, tensor in model.module.state_dict().items()
    }
