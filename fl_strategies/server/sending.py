"""Sending: the model, the settings that clients are told, and the messages that carry both.

Every request is a new message; the caller's arguments are never changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fl_strategies.core.hyperparameters import Scalar, is_per_client, of_client, sent_values
from fl_strategies.core.ledger import Ledger
from fl_strategies.core.log import log
from fl_strategies.core.records import CATCH_UP, Round
from fl_strategies.core.schedules import at
from fl_strategies.core.spread import expected_work, spread
from fl_strategies.core.vectors import Vector
from fl_strategies.messages.description import OWN_FIRST
from fl_strategies.messages.encoding import encoded
from fl_strategies.messages.folding import Terms
from fl_strategies.messages.heeding import CHECKSUMS, STEP_LIMIT, asks_to_heed
from fl_strategies.messages.hosting import pack_request, per_message
from fl_strategies.messages.tables import in_common
from fl_strategies.messages.wire import decode
from fl_strategies.server.algorithm import Algorithm, State
from fl_strategies.server.asked import Asked, Policy, Request
from fl_strategies.server.composition import Caller, told_bound
from fl_strategies.server.model import Model
from fl_strategies.server.nodes import ANY_HOST, Nodes
from fl_strategies.server.round import checked_vector, checked_vectors
from fl_strategies.server.stages import requested, step_limits, wanted_replies


@dataclass
class Sender:
    """Makes the messages of a phase."""

    algorithm: Algorithm
    ledger: Ledger
    nodes: Nodes
    _said_folds: bool = field(default=False, repr=False)

    def send(
        self,
        state: State,
        round: Round,
        model: Model,
        config: Mapping[str, Any],
        nodes: Mapping[int, int],
        message_type: str,
        caller: Caller,
    ) -> Asked:
        """Return the messages to the clients ``round.asked``, by what each is told.

        Each client has its own message, except clients of a host: a host gets the model once.
        ``nodes`` gives each client's node.
        """
        trains, sent = message_type == MessageType.TRAIN, model
        if self.algorithm.download is not None:
            sent = model.rounded()
            round = replace(round, rounded=sent.theta)
        policy = self._policy(state, round, sent, config, caller, trains=trains)
        asked = Asked(round, policy, sent.arrays, started=time.monotonic())
        arrays = model.travelling
        if trains and self.algorithm.extra_vectors:
            arrays = self._with_vectors(state, asked, arrays)
        size = _bytes(arrays)  # an upload's
        arrays = arrays if sent is model else ArrayRecord({**arrays, **sent.travelling})
        each = _bytes(arrays)
        if trains and self.algorithm.fixes_own:
            config = {**config, OWN_FIRST: model.digests_of_unshared}
        configs = self._configs(state, round, config, caller)
        if trains:
            self._add_catch_up(state, asked, configs)
        bytes_of = {}
        if trains and policy.clock is not None:
            model_bytes = sum(decode(array).nbytes for array in arrays.values())
            bytes_of = {c: model_bytes + len(t.get(CATCH_UP, b"")) for c, t in configs.items()}
            for client, limit in step_limits(self.algorithm, round, bytes_of, policy.wire.nbytes):
                trainings = self.algorithm.most_steps(configs[client], 1.0, 1)
                configs[client][STEP_LIMIT] = max(1, int(limit / trainings))
        requests, messages, down = [], [], 0
        terms = self._terms(round, configs, nodes, size) if trains else None
        keys = self.algorithm.arrayrecord_key, self.algorithm.configrecord_key
        hosts = {ANY_HOST, *self.nodes.hosts}
        records = _config_records({c: told for c, told in configs.items() if nodes[c] not in hosts})
        for node, clients in self._by_node(nodes, configs, size if trains else 0, trains=trains):
            hosted = node in self.nodes.hosts
            if hosted:
                theirs = {client: configs[client] for client in clients}
                content = pack_request(keys, arrays, theirs, self._fold(terms, clients))
            else:
                content = RecordDict({keys[0]: arrays, keys[1]: records[clients[0]]})
            message = Message(content, dst_node_id=node, message_type=message_type)
            messages.append(message)
            folds = hosted and terms is not None
            stand_in = nodes[clients[0]] == ANY_HOST  # hosts stand for as many nodes as clients
            counts_as = policy.wire.nbytes if folds and stand_in else 0
            about = node, tuple(clients), message.metadata
            requests.append(Request(*about, hosted, folds, folded_bytes=counts_as))
            catch_ups = [configs[client].get(CATCH_UP, b"") for client in clients]
            if stand_in:
                down += each * len(clients) + sum(map(len, catch_ups))
            else:
                down += each + sum(map(len, {*catch_ups}))
        return replace(
            asked,
            messages=messages,
            requests=requests,
            bytes_down=down,
            bytes_of=bytes_of,
            configs=configs,
            told={
                key: {c for c, told in configs.items() if key in told and asks_to_heed(told, key)}
                for key in policy.heeded
            },
        )

    def _policy(
        self,
        state: State,
        round: Round,
        sent: Model,
        config: Mapping[str, Any],
        caller: Caller,
        *,
        trains: bool,
    ) -> Policy:
        """Return how the replies are to be read."""
        algorithm = self.algorithm
        if not trains:
            return algorithm.evaluation_policy(round)
        policy = algorithm.policy(state, round, sent.arrays)
        return replace(
            policy,
            intact=caller.intact(algorithm.mean_of, policy.wire),
            told_bound=told_bound(config),
            tells_bound=caller.legacy,
            hosts=tuple(sorted(self.nodes.hosts)),
            wanted=wanted_replies(algorithm, round),
        )

    # ---- what clients are told ----------------------------------------------------------------

    def request(self, state: State, round: Round, client: int, caller: Caller) -> dict[str, Scalar]:
        """Return the config for ``client``."""
        return self._configs(state, replace(round, asked=(client,)), {}, caller)[client]

    def _configs(
        self, state: State, round: Round, config: Mapping[str, Any], caller: Caller
    ) -> dict[int, dict[str, Any]]:
        """Return what each client is told: what all are, and besides or instead of that its own."""
        algorithm = self.algorithm
        declared = sent_values(type(algorithm).declarations, lambda name: getattr(algorithm, name))
        of_each = {name: value for name, value in declared.items() if is_per_client(value)}
        alike = {name: value for name, value in declared.items() if name not in of_each}
        alike = self._alike(round, caller, alike)
        if clash := sorted(config.keys() & alike.keys()):
            raise ValueError(f"the config of requests must not set {clash}: the strategy does")
        alike = {**config, **alike}

        configs: dict[int, dict[str, Any]] = {}
        for client in round.asked:
            own = {name: of_client(name, value, client) for name, value in of_each.items()}
            own |= algorithm.client_config(state, round, client)
            told = _at(own, round.number) if own else {}
            configs[client] = {**alike, **told, **self.ledger.request_fields(client)}
        return configs

    def _alike(
        self, round: Round, caller: Caller, declared: Mapping[str, Any]
    ) -> dict[str, Scalar]:
        """Return what every client is told."""
        algorithm, layout = self.algorithm, round.layout
        alike = _at({**(algorithm.local or {}), **declared}, round.number) | {
            "run-id": round.run,
            "server-round": round.number,
            "seed": round.seed,
            "algorithm": algorithm.runs or algorithm.algorithm,
            **requested(algorithm, layout),
        }
        if layout is not None:
            alike["layout"] = layout.signature
            if layout.frozen:
                alike["frozen"] = layout.frozen_digests
            if caller.intact(algorithm.mean_of, layout):
                alike[CHECKSUMS] = True
        return alike

    def _add_catch_up(
        self, state: State, asked: Asked, configs: Mapping[int, dict[str, Any]]
    ) -> None:
        """Add each client's vector: the same bytes for all clients that were last used together,
        unless the algorithm has one for each."""
        name = type(self.algorithm).__name__
        known: dict[int, bytes] = {}
        for client, config in configs.items():
            vector = self.algorithm.for_client(state, asked.round, client)
            data = _packed(f"{name}.for_client", vector, asked.round)
            since = asked.round.acked.get(client, -1)
            if not data and since not in known:
                vector = self.algorithm.catch_up(state, since)
                known[since] = _packed(f"{name}.catch_up", vector, asked.round)
            if data := data or known[since]:
                config[CATCH_UP] = data

    def _with_vectors(self, state: State, asked: Asked, arrays: ArrayRecord) -> ArrayRecord:
        """Return ``arrays``, followed by the arrays of the extra vectors."""
        theta, hook = asked.round.theta, f"{type(self.algorithm).__name__}.vectors"
        made, names = self.algorithm.vectors(state, asked.round), self.algorithm.extra_vectors
        every = [theta, *checked_vectors(hook, made, names, len(theta))]
        unpacked = asked.policy.wire.unpack(np.concatenate(every), asked.model)
        return ArrayRecord(
            {name: encoded(array) for name, array in unpacked.items()} | dict(arrays)
        )

    # ---- hosts --------------------------------------------------------------------------------

    def _terms(
        self,
        round: Round,
        configs: dict[int, dict[str, Any]],
        nodes: Mapping[int, int],
        size: int,
    ) -> Terms | None:
        """Return the terms by which hosts fold, or None if they do not."""
        algorithm, layout = self.algorithm, round.layout
        hosted = [c for c in configs if nodes[c] == ANY_HOST or nodes[c] in self.nodes.hosts]
        memory = size * len(hosted) / 1e6
        if algorithm.fold == "off" or not algorithm.can_fold or not hosted:
            return None
        if algorithm.fold == "auto" and memory <= algorithm.fold_memory:
            return None
        if not self._said_folds:
            self._said_folds = True
            limit = f", more than fold_memory={algorithm.fold_memory}"
            why = limit if algorithm.fold == "auto" else ""
            line = "uploads of %d clients take %.0f MB%s: hosts send weighted means in their place"
            log(INFO, line, len(hosted), memory, why)
        for client in hosted:
            configs[client].pop(CHECKSUMS, None)  # nothing is between a client and its host
        assert layout is not None
        return Terms(
            hyperparameters=algorithm.weight_options(round.number),
            weighted_by=algorithm.weighted_by_key,
            strategy=type(algorithm).__name__,
            algorithm=algorithm.runs or algorithm.algorithm,
            trust=algorithm.trust,
            buffers=layout.untrained,
            ties=[[*group] for group in layout.ties],
            frozen=dict(layout.frozen),
            extra_vectors=algorithm.extra_vectors,
            bounds=dict(algorithm.scalar_bounds),
            clipping_norm=algorithm.clipping_norm,
            max_samples=algorithm.max_samples,
            accumulates_changes=algorithm.accumulates_changes,
            uploads_changes=algorithm.uploads_changes,
            distances=algorithm.sends_distances,
        )

    def _fold(self, terms: Terms | None, clients: Sequence[int]) -> str:
        """Return the ``terms`` for a request to the host of ``clients``."""
        if terms is None:
            return ""
        required = self.ledger.nonces if self.ledger.lost_state == "refuse" else {}
        nonces = {str(client): required[client] for client in clients if client in required}
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
        self,
        nodes: Mapping[int, int],
        configs: Mapping[int, Mapping[str, Any]],
        size: int,
        *,
        trains: bool,
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the node and the clients of each message; ``size`` is that of a client's upload."""
        of: dict[int, list[int]] = {}
        for client in configs:
            of.setdefault(nodes[client], []).append(client)
        if shared := of.pop(ANY_HOST, None):
            work = self._expected(configs, trains=trains)
            hosts = sorted(node for node, any_client in self.nodes.hosts.items() if any_client)
            of |= spread({client: work[client] for client in shared}, hosts)
        most = min(self.algorithm.clients_per_message, per_message(size))
        for node, clients in of.items():
            for start in range(0, len(clients), most):
                yield node, clients[start : start + most]


def _packed(hook: str, vector: Vector | None, round: Round) -> bytes:
    """Return a hook's vector as it travels; nothing for None."""
    if vector is None:
        return b""
    assert round.layout is not None
    return round.layout.to_bytes(checked_vector(hook, "a vector", vector, len(round.theta)))


def _config_records(configs: Mapping[int, Mapping[str, Any]]) -> dict[int, ConfigRecord]:
    """Return each client's record; Flower checks what all are told once."""
    common, rows = in_common(configs) if configs else ({}, {})
    alike = ConfigRecord(common)
    records = {client: alike.copy() for client in rows}
    for client, row in rows.items():
        records[client].update(row)
    return records


def _bytes(arrays: ArrayRecord) -> int:
    return sum(len(array.data) for array in arrays.values())


def _at(values: Mapping[str, Any], server_round: int) -> dict[str, Scalar]:
    """Return ``values`` with each schedule's value in the round."""
    return {name: at(value, server_round) for name, value in values.items()}
