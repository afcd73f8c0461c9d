"""Requests: the model, the settings that clients are told, and which clients are asked.

Every request is a new message; the caller's arguments are never changed.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import DEBUG, INFO
from typing import Any, Protocol

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    RecordDict,
)
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fl_strategies.core.hyperparameters import Scalar, told
from fl_strategies.core.layout import Arrays, Layout, conventional_buffers, few
from fl_strategies.core.local import check_local
from fl_strategies.core.log import log
from fl_strategies.core.randomness import draw, share, stream
from fl_strategies.core.records import MISSED, NOTHING, Reply, Upload
from fl_strategies.core.schedules import at
from fl_strategies.core.spread import expected_work, spread
from fl_strategies.core.vectors import Vector
from fl_strategies.messages.bounds import NormBound
from fl_strategies.messages.encoding import encoded
from fl_strategies.messages.folding import Terms
from fl_strategies.messages.hosting import pack_request, per_message
from fl_strategies.messages.identity import Identity
from fl_strategies.messages.wire import decode
from fl_strategies.server.algorithm import Algorithm
from fl_strategies.server.composition import Composition
from fl_strategies.server.nodes import ANY_HOST
from fl_strategies.server.options import Options
from fl_strategies.server.patience import Patience
from fl_strategies.server.replies import (
    Asked,
    Request,
)


class Part(Protocol):
    """A part of a round besides the algorithm."""

    def ask(self, client: int) -> Mapping[str, Any]:
        """Return this part's addition to the request to ``client``."""

    def check(self, reply: Reply, upload: Upload) -> Upload:
        """Return the upload, perhaps changed; raise :class:`BadReply` to reject it."""

    def settle(self, used: Sequence[Upload]) -> None:
        """Note the uploads of a successful round."""


class Requests(Algorithm, FlowerFedAvg):  # type: ignore[misc]  # None for its default
    """The outgoing half of a round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        flowers = inspect.signature(FlowerFedAvg).parameters
        given = {name: getattr(self, name) for name in Options.declarations if name in flowers}
        # Flower warns of 0, which is no mistake
        FlowerFedAvg.__init__(self, **given | {"fraction_evaluate": 1.0})
        vars(self).update(given)
        self.buffers = None if self.buffers is None else tuple(self.buffers)
        self.frozen = dict(self.frozen)
        self.ties = tuple(tuple(group) for group in self.ties)
        self.local = dict(self.local or {})
        check_local(self.local)
        self.callbacks = tuple(self.callbacks)
        name = type(self).__name__
        trust = self.unnamed or ("to implement it" if self.assume_algorithm else "")
        self.identity = Identity(name, self.algorithm, trust)
        self.composition = Composition(name, self.averages)
        self.patience = Patience(self.max_unusable_rounds)
        self.faults: dict[int | None, str] = {}
        """The faults of the last phase's unusable replies, by client."""
        self.layout: Layout | None = None
        self._wire: Layout | None = None
        self._model: Arrays = NOTHING
        self._checks: list[Part] = []
        self._folds: dict[int, Upload] = {}  # the means that were checked, by id(Fold)
        self._asked = Asked((), 0, 0.0)
        self._said_taken = self._said_folds = False
        if self.fold == "on" and not self.folds_by:
            raise ValueError(
                f'fold must be "auto" or "off" for {name}, whose rule needs each upload, got "on"'
            )

    @property
    def asked(self) -> list[int]:
        """The clients asked in the current phase of the round, ascending."""
        return sorted(self._asked.clients)

    @property
    def parts(self) -> list[Part]:
        """The parts of a round besides the algorithm, in the order in which they are called."""
        return [self.identity, *self._checks, self.ledger]

    @property
    def untrained(self) -> list[str]:
        """The names of the model's buffers, once the run has begun."""
        return [] if self.layout is None else self.layout.untrained

    def read_model(self, arrays: ArrayRecord) -> None:
        """Make ``arrays`` the global model of the round."""
        self._model = {name: decode(array) for name, array in arrays.items()}
        if self.layout is None:
            buffers = self.buffers
            if buffers is None and (buffers := conventional_buffers(self._model)):
                log(INFO, "buffers, which no client trains, by PyTorch's names: %s", few(buffers))
            self.layout = Layout.of(self._model, buffers or (), self.ties, self.frozen)
            self._wire = self.layout.beside(self.beside)
            self.identity.layout = self.composition.layout = self.layout
            self.composition.wire = self._wire
        self.theta = self.layout.pack(self._model)
        self._checks = [self.composition]
        if (bound := self.clipping_norm) is not None:
            limit = NormBound(bound, self.reference, self.books_changes, self._model)
            self._checks.append(limit)

    def model_record(self, vector: Vector, buffers: Arrays = NOTHING) -> ArrayRecord:
        """Return the model with trainable arrays from ``vector`` [d], and with ``buffers``."""
        assert self.layout is not None
        model = self.layout.unpack(vector, {**self._model, **buffers})
        return ArrayRecord({name: encoded(array) for name, array in model.items()})

    def asked_of(self, clients: int) -> int:
        """Return how many of so many connected clients are asked to train in a round."""
        return min(clients, max(share(self.fraction_train, clients), self.min_train_nodes))

    def choose(self, server_round: int, nodes: Mapping[int, int]) -> list[int]:
        """Return the connected clients that train in the round, ascending."""
        return self.sample("sample", server_round, nodes, self.fraction_train, self.min_train_nodes)

    def sample(
        self, purpose: str, server_round: int, nodes: Iterable[int], fraction: float, least: int
    ) -> list[int]:
        """Return a random share of the connected clients, ascending, by the stream ``purpose``."""
        clients = sorted(nodes)
        size = max(share(fraction, len(clients)), least)
        log(DEBUG, "%s: %d of %d clients", purpose, size, len(clients))
        return sorted(draw(stream(self.seed, purpose, server_round), clients, size))

    def request(self, server_round: int, client: int) -> dict[str, Scalar]:
        """Return the config for ``client`` in ``server_round``."""
        return self._alike(server_round) | self._own(server_round, client)

    def _alike(self, server_round: int) -> dict[str, Scalar]:
        """Return what every client is told."""
        own = told(type(self).declarations, lambda name: getattr(self, name))
        return _at({**self.local, **own}, server_round) | {
            "run-id": self.run.id,
            "server-round": server_round,
            "seed": self.seed,
        }

    def _own(self, server_round: int, client: int) -> dict[str, Scalar]:
        """Return what ``client`` is told besides or instead of that."""
        state = self.first_state(self.theta) if self.state is None else self.state
        request = _at(self.tell(state, server_round, client), server_round)
        for part in self.parts:
            request |= part.ask(client)
        return request

    def requests(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        nodes: Mapping[int, int],
        chosen: Sequence[int],
        message_type: str,
    ) -> list[Message]:
        """Return the messages to the clients ``chosen``, and note who is asked.

        Each client has its own message, except clients of a host: a host gets the model once.
        """
        trains = message_type == MessageType.TRAIN
        if self.beside and trains:
            arrays = self._with_vectors(arrays)
        size = sum(len(array.data) for array in arrays.values())
        self._asked = Asked(tuple(chosen), 0, time.monotonic())  # tell() may look at who is asked
        alike = {**config, **self._alike(server_round)}
        configs: dict[int, dict[str, Any]] = {
            client: {**alike, **self._own(server_round, client)} for client in chosen
        }
        if trains:
            self._add_missed(configs)
        found, messages, sent = [], [], 0
        terms = self._terms(configs, nodes, size) if trains else None
        work = self._expected(configs, trains=trains)
        for node, clients in self._by_node(nodes, work, size if trains else 0):
            hosted = node in self.nodes.hosts
            keys = self.arrayrecord_key, self.configrecord_key
            if hosted:
                mine = {client: configs[client] for client in clients}
                content = pack_request(keys, arrays, mine, self._fold(terms, clients))
            else:
                content = RecordDict({keys[0]: arrays, keys[1]: ConfigRecord(configs[clients[0]])})
            message = Message(content, dst_node_id=node, message_type=message_type)
            messages.append(message)
            folds = hosted and terms is not None
            found.append(Request(node, tuple(clients), message.metadata, hosted, folds))
            missed = [configs[client].get(MISSED, b"") for client in clients]
            if nodes[clients[0]] == ANY_HOST:  # hosts stand for as many nodes as clients
                sent += size * len(clients) + sum(map(len, missed))
            else:
                sent += size + sum(map(len, {*missed}))
        self._asked = replace(self._asked, bytes_down=sent, requests=found)
        return messages

    def _add_missed(self, configs: Mapping[int, dict[str, Any]]) -> None:
        """Tell each client what it missed: the same bytes to all that were last used together."""
        assert self.layout is not None
        known: dict[int, bytes] = {}
        for client, config in configs.items():
            since = self.ledger.acked.get(client, -1)
            if since not in known:
                vector = self.missed(self.state, since)
                known[since] = b"" if vector is None else self.layout.to_bytes(vector)
            if known[since]:
                config[MISSED] = known[since]

    def _terms(
        self, configs: dict[int, dict[str, Any]], nodes: Mapping[int, int], size: int
    ) -> Terms | None:
        """Return the terms by which hosts fold, or None if they do not."""
        hosted = [c for c in configs if nodes[c] == ANY_HOST or nodes[c] in self.nodes.hosts]
        memory = size * len(hosted) / 1e6
        if self.fold == "off" or not self.folds_by or not hosted:
            return None
        if self.fold == "auto" and memory <= self.fold_memory:
            return None
        if not self._said_folds:
            self._said_folds = True
            why = f", more than fold_memory={self.fold_memory}" if self.fold == "auto" else ""
            told = "uploads of %d clients take %.0f MB%s: hosts send weighted means in their place"
            log(INFO, told, len(hosted), memory, why)
        for client in hosted:
            configs[client].pop("checksums", None)  # nothing is between a client and its host
        return Terms(
            by=self.folds_by,
            weighted_by=self.weighted_by_key,
            strategy=self.identity.strategy,
            algorithm=self.algorithm,
            trust=self.identity.trust,
            buffers=self.untrained,
            ties=[[*group] for group in self.ties],
            frozen=dict(self.frozen),
            beside=self.beside,
            bounds=dict(self.scalar_bounds),
            clipping_norm=self.clipping_norm,
            max_samples=self.max_samples,
            books_changes=self.books_changes,
            distances=self.folds_distances,
        )

    def _fold(self, terms: Terms | None, clients: Sequence[int]) -> str:
        """Return the ``terms`` for a request to the host of ``clients``."""
        if terms is None:
            return ""
        booked = self.ledger.nonces if self.lost_state == "refuse" else {}
        nonces = {str(client): booked[client] for client in clients if client in booked}
        return replace(terms, nonces=nonces).to_text()

    def _expected(
        self, configs: Mapping[int, Mapping[str, Any]], *, trains: bool
    ) -> dict[int, float]:
        """Return each asked client's expected work, from its samples.

        A client whose samples are unknown gets the mean of the others.
        """
        known = [n for client in configs if (n := self.nodes.samples.get(client)) is not None]
        usual = sum(known) / len(known) if known else 1.0
        return {
            client: expected_work(self.nodes.samples.get(client, usual), config, trains=trains)
            for client, config in configs.items()
        }

    def _by_node(
        self, nodes: Mapping[int, int], work: Mapping[int, float], size: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the node and the clients of each message; ``size`` is that of a client's upload."""
        of: dict[int, list[int]] = {}
        for client in work:
            if nodes[client] != ANY_HOST:
                of.setdefault(nodes[client], []).append(client)
        hosts = sorted(node for node, any_client in self.nodes.hosts.items() if any_client)
        shared = {client: each for client, each in work.items() if nodes[client] == ANY_HOST}
        of |= spread(shared, hosts)
        most = min(self.clients_per_message, per_message(size))
        for node, clients in of.items():
            for start in range(0, len(clients), most):
                yield node, clients[start : start + most]

    def _with_vectors(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return ``arrays``, followed by the arrays of the vectors beside the model."""
        assert self._wire is not None
        vectors = self.vectors(self.state)
        all_of_them = [self.theta, *(vectors[name] for name in self.beside)]
        found = self._wire.unpack(np.concatenate(all_of_them), self._model)
        return ArrayRecord({name: encoded(array) for name, array in found.items()} | dict(arrays))


def _at(values: Mapping[str, Any], server_round: int) -> dict[str, Scalar]:
    """Return ``values`` with each schedule's value in the round."""
    return {n: at(v, server_round) if isinstance(v, Mapping) else v for n, v in values.items()}
