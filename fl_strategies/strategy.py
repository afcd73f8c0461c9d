"""The base of all strategies: who is asked, which replies count, and what a round reports.

An algorithm adds two methods: :meth:`FederatedStrategy.client_knobs` (what its clients must be
told) and :meth:`FederatedStrategy.aggregate` (its server rule). What lies between them and Flower
is here:

- it waits for the nodes, learns their stable client ids by one query, and samples among these ids
  by a generator seeded with (seed, round), so that a seed fixes who takes part;
- every request is a message of its own: what the caller passed in is never written to;
- replies are sorted by client id, checked, and a bad one is left out with one log line;
- each request carries ``acked-round``, the round of that client's last reply that the server used
  (-1: none), so that a client can undo training whose reply was lost;
- a round with fewer than ``min_replies`` usable replies is void: model and state stay as they were.

This module, ``nodes``, ``replies`` and ``legacy`` are those of the server half that use Flower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict, cast

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from fl_strategies.callbacks import Callback, RoundInfo
from fl_strategies.layout import Arrays, BufferMean, Layout
from fl_strategies.nodes import Nodes
from fl_strategies.randomness import stream
from fl_strategies.replies import Asked, by_client, nonce_of, only, sift, spread
from fl_strategies.schedules import Knob, at, check, one_of
from fl_strategies.subproblem import Vector
from fl_strategies.wire import BadReply, check_scalars, decode, decode_model

Scalar: TypeAlias = bool | int | float | str
MetricsAggregation: TypeAlias = Callable[[list[RecordDict], str], MetricRecord]
EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


LOCAL_KEYS = frozenset(
    {
        "solver",
        "solver-params",
        "lr",
        "epochs",
        "random-epochs",
        "steps",
        "random-steps",
        "batch-size",
        "momentum",
        "nesterov",
        "weight-decay",
        "extrapolation",
        "box",
        "residual",
        "fine-tune",
        "fine-tune-lr",
    }
)
"""What ``local`` may set: the fields of ``clients.LocalTraining``. A client of your own is told
things through ``train_config`` instead."""


class Upload(NamedTuple):
    """One client's reply: its trainable arrays as one vector [d], weight and scalars.

    ``beside`` holds the further vectors [d] by name, where the algorithm has any.
    """

    client: int
    vector: Vector
    num_examples: int
    scalars: Mapping[str, float]
    beside: Mapping[str, Vector] = MappingProxyType({})


class Options(TypedDict, total=False):
    """The arguments that every strategy takes; documented in :class:`FederatedStrategy`."""

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsAggregation | None
    evaluate_metrics_aggr_fn: MetricsAggregation | None
    seed: int
    min_replies: int
    buffers: Iterable[str]
    local: Mapping[str, Scalar | Mapping[int, float]]
    lost_state: Literal["reset", "refuse", "warn"]
    callbacks: Sequence[Callback]
    acknowledge: bool
    node_wait: float


class _Stop(Exception):
    """Raised by a callback's wish to stop, caught in ``start``."""


class FederatedStrategy(FlowerFedAvg):
    """Base of all strategies.

    Parameters
    ----------
    fraction_train : float in (0, 1] (default 1.0)
        Share of the connected clients that train in a round.
    fraction_evaluate : float in [0, 1] (default 1.0)
        Share of the connected clients that evaluate after a round.
    min_train_nodes, min_evaluate_nodes, min_available_nodes : int >= 1 (default 1)
        Fewest clients asked to train, asked to evaluate, and connected before a round starts.
    weighted_by_key, arrayrecord_key, configrecord_key : str
        As in Flower: "num-examples", "arrays", "config".
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        As in Flower; by default means weighted by ``weighted_by_key``.
    seed : int >= 0 (default 0)
        Fixes client sampling and, through the requests, all randomness of our clients.
    min_replies : int >= 1 (default 1)
        Usable replies below which a training round is void.
    buffers : iterable of str (default none)
        Names of the model's arrays that are not trained (running statistics, counters, frozen
        weights): floats are averaged by number of examples, integers take the largest.
    local : mapping (default empty)
        How clients train, sent to them in every request (``clients.LocalTraining``): ``solver``,
        ``lr``, ``epochs``, ``batch-size`` ...; a number may be a schedule {first round: number}.
    lost_state : "reset", "refuse" or "warn" (default "reset")
        What to do with a reply of a client that no longer has the state which the server booked
        (restarted without its files, replaced): count it as a newcomer, leave its replies out, or
        count it as a newcomer with a warning. What its lost state had put into the model stays
        there; the server keeps no copy that it could take out.
    callbacks : sequence of callables (default none)
        Called with a :class:`RoundInfo` at the end of each round; ``True`` ends the run.
    acknowledge : bool (default True)
        Whether requests say which reply was used last. Off, lost replies corrupt clients' state.
    node_wait : float > 0, seconds (default 60)
        How long a query for a client's id may take, and how long the first round waits for nodes
        that the connected ones say exist.

    Raises
    ------
    ValueError
        For an argument outside its range, before anything is sent.
    """

    algorithm: ClassVar[str]
    """Name by which clients know the algorithm."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Names of vectors [d] that travel beside the model, in training requests and replies."""
    scalar_bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """Metrics that each reply must carry, with the range that each must be in."""

    def __init__(
        self,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 1,
        min_evaluate_nodes: int = 1,
        min_available_nodes: int = 1,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregation | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregation | None = None,
        seed: int = 0,
        min_replies: int = 1,
        buffers: Iterable[str] = (),
        local: Mapping[str, Scalar | Mapping[int, float]] | None = None,
        lost_state: Literal["reset", "refuse", "warn"] = "reset",
        callbacks: Sequence[Callback] = (),
        acknowledge: bool = True,
        node_wait: float = 60.0,
    ) -> None:
        check("fraction_train", fraction_train, above=0.0, high=1.0, scheduled=False)
        check("fraction_evaluate", fraction_evaluate, low=0.0, high=1.0, scheduled=False)
        check("node_wait", node_wait, above=0.0, scheduled=False)
        check("seed", seed, low=0, integer=True, scheduled=False)
        for name, least in (
            ("min_train_nodes", min_train_nodes),
            ("min_evaluate_nodes", min_evaluate_nodes),
            ("min_available_nodes", min_available_nodes),
            ("min_replies", min_replies),
        ):
            check(name, least, low=1, integer=True, scheduled=False)
        one_of("lost_state", lost_state, ("reset", "refuse", "warn"))
        super().__init__(
            fraction_train,
            fraction_evaluate,
            min_train_nodes,
            min_evaluate_nodes,
            min_available_nodes,
            weighted_by_key,
            arrayrecord_key,
            configrecord_key,
            train_metrics_aggr_fn or spread,
            evaluate_metrics_aggr_fn or spread,
        )
        self.seed, self.min_replies, self.buffers = seed, min_replies, tuple(buffers)
        self.local = dict(local or {})
        if unknown := sorted(self.local.keys() - LOCAL_KEYS):
            raise ValueError(f"unknown local settings {unknown}; known: {sorted(LOCAL_KEYS)}")
        for name in ("lr", "epochs"):
            check(name, cast(Knob, self.local.get(name, 1)), above=0.0)  # which refuses text
        for name, value in self.local.items():
            if isinstance(value, Mapping):
                check(name, value)
        self.lost_state, self.callbacks = lost_state, tuple(callbacks)
        self.acknowledge = acknowledge
        self.nodes = Nodes(node_wait)
        self._rounds_before = self._round = self.num_rounds = 0
        self._acked: dict[int, int] = {}
        self._nonces: dict[int, str] = {}
        self._layout: Layout | None = None
        self._wire: Layout | None = None
        self._model: Arrays = {}
        self._asked = Asked({}, 0, 0.0)
        self.result = Result()
        self.faults: dict[int | None, str] = {}
        self._clients: dict[int, dict[str, float]] = {}

    @property
    def num_clients(self) -> int:
        """Number m of clients that were ever connected."""
        return len(self.nodes.known)

    # ---- what an algorithm adds -------------------------------------------------------------

    def client_knobs(self, server_round: int) -> dict[str, Scalar]:
        """Return what the algorithm's clients must be told in ``server_round``."""
        return {}

    def vectors(self) -> Mapping[str, Vector]:
        """Return the vectors [d] that a training request carries, one for each of ``beside``."""
        return {}

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        """Return the next model [d] from the present one and ``used`` uploads, sorted by client.

        ``uploads`` can be read once: each is decoded when its turn comes.
        """
        raise TypeError(f"{type(self).__name__} must define aggregate")

    def commit(self, server_round: int) -> None:
        """Keep what the last :meth:`aggregate` worked out: its model stands, the round counts."""

    def weight(self, upload: Upload) -> float:
        """Return what ``upload`` weighs among the others in :meth:`aggregate`, for the history."""
        return 1.0

    @property
    def asked(self) -> list[int]:
        """The clients asked in the present phase of the round, ascending."""
        return list(self._asked.clients.values())

    def begin(self, theta: Vector) -> None:
        """Take note of the initial model [d] before anything is sent; raise if it cannot do."""

    def check_clients(self, clients: int) -> None:
        """Raise ``ValueError`` if the algorithm cannot run with that many clients."""

    def replies_needed(self) -> int:
        """Return the number of usable replies below which the round is void."""
        return self.min_replies

    # ---- the run ------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run ``num_rounds`` rounds, as Flower's ``Strategy.start``, with callbacks.

        Called again, it goes on: clients keep their state, and rounds count on for schedules,
        streams and acknowledgement (callbacks and results count from 1 in each call).

        Raises ``ValueError`` for a model with arrays that cannot be trained, or a config that sets
        what the strategy itself sends.
        """
        self.open(initial_arrays, num_rounds)
        ours = self.request(1, 0).keys()
        for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
            if clash := sorted(ours & set(config or ())):
                raise ValueError(f"{name} must not set {clash}: the strategy does")

        def evaluate_and_call(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays) if evaluate_fn else None
            if metrics is not None:
                self.result.evaluate_metrics_serverapp[server_round] = metrics
            if server_round > 0 and self.close_round(server_round, arrays):
                raise _Stop
            return metrics

        try:
            self._rounds(
                grid,
                initial_arrays,
                num_rounds,
                timeout,
                train_config or ConfigRecord(),
                evaluate_config or ConfigRecord(),
                evaluate_and_call,
            )
        except _Stop:
            log(INFO, "Stopped by a callback")
        finally:
            self._rounds_before += self._round
            self._round = 0
        return self.result

    def _rounds(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn,
    ) -> None:
        """Run the rounds one after another, as Flower does."""
        super().start(grid, arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def open(self, initial_arrays: ArrayRecord, num_rounds: int) -> None:
        """Begin a run: take the initial model, and forget the result of the last."""
        self.num_rounds = num_rounds
        self._layout = None
        self._read_model(initial_arrays)
        assert self._layout is not None
        self.begin(self._layout.pack(self._model))
        self.result = Result(arrays=initial_arrays)

    def close_round(self, server_round: int, arrays: ArrayRecord) -> bool:
        """End a round: call the callbacks, and return whether one of them ends the run."""
        self.result.arrays = arrays
        metrics: dict[str, float] = {}
        for phase in (
            self.result.train_metrics_clientapp,
            self.result.evaluate_metrics_clientapp,
            self.result.evaluate_metrics_serverapp,
        ):
            for name, value in phase.get(server_round, {}).items():
                if not isinstance(value, list):
                    metrics[name] = value
        info = RoundInfo(server_round, self.num_rounds, arrays, metrics, self._clients)
        # every callback sees the round, also when an earlier one wants to stop
        return True in [callback(info) for callback in self.callbacks]

    # ---- training -----------------------------------------------------------------------------

    def request(self, server_round: int, client: int) -> dict[str, Scalar]:
        """Return the config that ``client`` is sent in ``server_round``."""
        local = {
            name: at(value, server_round) if isinstance(value, Mapping) else value
            for name, value in self.local.items()
        }
        request: dict[str, Scalar] = {
            **local,
            **self.client_knobs(server_round),
            "algorithm": self.algorithm,
            "server-round": server_round,
            "seed": self.seed,
        }
        if self.acknowledge:
            request["acked-round"] = self._acked.get(client, -1)
        return request

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to the clients sampled for this round."""
        self._read_model(arrays)
        self._round = server_round
        nodes = self.nodes.wait(grid, max(self.min_available_nodes, self.min_train_nodes))
        number = self._rounds_before + server_round
        chosen = self._sample("sample", number, nodes, self.fraction_train, self.min_train_nodes)
        if len(chosen) < self.min_replies:
            raise ValueError(
                f"min_replies is {self.min_replies}, but only {len(chosen)} clients are asked"
            )
        return self._requests(number, arrays, config, nodes, chosen, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model and the round's metrics; no model when the round is void."""
        good, metrics = self._sift(replies, self._check_train, self.train_metrics_aggr_fn)
        number = self._rounds_before + server_round
        arrays = None
        self._clients = by_client(good, {self.weighted_by_key: "examples"}, {})
        if len(good) < (needed := self.replies_needed()):
            self._void(server_round, f"{len(good)} usable replies, at least {needed} needed")
        else:
            arrays = self._next_model(number, good)
        if arrays is not None:
            self.commit(number)
            for client, content in good.items():
                self._acked[client] = self._asked.rounds.get(client, number)
                if nonce := nonce_of(content):
                    self._nonces[client] = nonce
            by_size = sorted(self._clients.values(), key=lambda row: row["examples"])
            for name in ("weight-share", "data-share"):
                metrics[f"{name}-smallest"], metrics[f"{name}-largest"] = (
                    by_size[0][name],
                    by_size[-1][name],
                )
        metrics["seconds"] = time.monotonic() - self._asked.started
        self.result.train_metrics_clientapp[server_round] = metrics
        return arrays, metrics

    def _next_model(self, server_round: int, good: dict[int, RecordDict]) -> ArrayRecord | None:
        assert self._layout is not None
        assert self._wire is not None
        layout, wire, merged = self._layout, self._wire, BufferMean()
        weights: dict[int, float] = {}

        def uploads() -> Iterator[Upload]:
            for client, content in good.items():
                scalars = only(content.metric_records)
                arrays = decode_model(only(content.array_records), wire)
                examples = int(scalars[self.weighted_by_key])
                merged.add({name: arrays[name] for name in layout.buffers}, examples)
                vector, *further = np.split(wire.pack(arrays), 1 + len(self.beside))
                beside = dict(zip(self.beside, further, strict=True))
                upload = Upload(client, vector, examples, scalars, beside)
                weights[client] = self.weight(upload)
                yield upload

        theta = layout.pack(self._model)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found just below
            vector = self.aggregate(server_round, theta, uploads(), len(good))
            model = layout.unpack(np.asarray(vector), merged.value())
        if not all(np.isfinite(model[name]).all() for name in layout.trainable):
            self._void(server_round, "the aggregated model is not finite")
            return None
        total, examples = sum(weights.values()), sum(r["examples"] for r in self._clients.values())
        for client, row in self._clients.items():
            row["weight-share"] = weights.get(client, 0.0) / total if total else 1 / len(good)
            row["data-share"] = row["examples"] / examples
        return ArrayRecord({name: Array(array) for name, array in model.items()})

    def model_record(self, vector: Vector) -> ArrayRecord:
        """Return the model with its trainable arrays out of ``vector`` [d]."""
        assert self._layout is not None
        model = self._layout.unpack(vector, self._model)
        return ArrayRecord({name: Array(array) for name, array in model.items()})

    def _with_vectors(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return ``arrays`` followed by those of the vectors that travel beside the model."""
        assert self._layout is not None
        assert self._wire is not None
        vectors = self.vectors()
        all_of_them = [self._layout.pack(self._model), *(vectors[name] for name in self.beside)]
        found = self._wire.unpack(np.concatenate(all_of_them), self._model)
        return ArrayRecord({name: Array(array) for name, array in found.items()} | dict(arrays))

    def _void(self, server_round: int, reason: str) -> None:
        self._say(server_round, f"is void: {reason}; model and state unchanged")

    def _say(self, server_round: int, what: str) -> None:
        log(WARNING, "round %d %s", server_round, what)

    def _check_train(self, client: int, content: RecordDict) -> None:
        assert self._wire is not None
        self._check_metrics(content, self.scalar_bounds)
        if len(content.array_records) != 1:
            raise BadReply(f"{len(content.array_records)} ArrayRecords, expected one")
        decode_model(only(content.array_records), self._wire)
        nonce, booked = nonce_of(content), self._nonces.get(client)
        if nonce and booked and nonce != booked:
            if self.lost_state == "refuse":
                raise BadReply("the state which the server booked for it is lost")
            level = WARNING if self.lost_state == "warn" else INFO
            log(level, "client %d lost its state and counts as a newcomer", client)

    def _check_metrics(
        self, content: RecordDict, bounds: Mapping[str, tuple[float, float]]
    ) -> None:
        if len(content.metric_records) != 1:
            raise BadReply(f"{len(content.metric_records)} MetricRecords, expected one")
        check_scalars(only(content.metric_records), self.weighted_by_key, bounds)

    # ---- evaluation ---------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to the clients sampled to evaluate; none if the fraction is 0."""
        if self.fraction_evaluate == 0.0:
            self._asked = Asked({}, 0, time.monotonic())
            return []
        nodes = self.nodes.wait(grid, max(self.min_available_nodes, self.min_evaluate_nodes))
        number = self._rounds_before + server_round
        chosen = self._sample(
            "evaluate", number, nodes, self.fraction_evaluate, self.min_evaluate_nodes
        )
        return self._requests(number, arrays, config, nodes, chosen, MessageType.EVALUATE)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the clients' evaluation: weighted means, and the spread over clients."""
        if not self._asked.clients:
            return None

        def check_reply(client: int, content: RecordDict) -> None:
            self._check_metrics(content, {})

        good, metrics = self._sift(replies, check_reply, self.evaluate_metrics_aggr_fn)
        self._clients = by_client(good, {self.weighted_by_key: "eval-examples"}, self._clients)
        metrics = MetricRecord(
            {
                f"eval-{n}" if n.startswith(("clients-", "bytes-")) else n: v
                for n, v in metrics.items()
            }
        )
        self.result.evaluate_metrics_clientapp[server_round] = metrics
        return metrics

    # ---- shared -------------------------------------------------------------------------------

    def _read_model(self, arrays: ArrayRecord) -> None:
        self._model = {name: decode(array) for name, array in arrays.items()}
        if self._layout is None:
            self._layout = Layout.of(self._model, self.buffers)
            self._wire = self._layout.beside(self.beside)

    def _sample(
        self, purpose: str, server_round: int, nodes: dict[int, int], fraction: float, least: int
    ) -> list[int]:
        clients = sorted(nodes)
        # 1e-9 keeps 0.29 of 100 at 29, whatever the rounding of the product
        size = max(int(fraction * len(clients) + 1e-9), least)
        chosen = stream(self.seed, purpose, server_round).choice(clients, size, replace=False)
        log(INFO, "%s: %d of %d clients", purpose, size, len(clients))
        return sorted(int(client) for client in chosen)

    def _requests(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        nodes: dict[int, int],
        chosen: list[int],
        message_type: str,
    ) -> list[Message]:
        if self.beside and message_type == MessageType.TRAIN:
            arrays = self._with_vectors(arrays)
        size = sum(len(array.data) for array in arrays.values())
        clients = {nodes[client]: client for client in chosen}
        self._asked = Asked(clients, size * len(chosen), time.monotonic())
        requests = [
            Message(
                RecordDict(
                    {
                        self.arrayrecord_key: arrays,
                        self.configrecord_key: ConfigRecord(
                            {**config, **self.request(server_round, client)}
                        ),
                    }
                ),
                dst_node_id=nodes[client],
                message_type=message_type,
            )
            for client in chosen
        ]
        self._asked = replace(self._asked, requests=requests)
        return requests

    def _sift(
        self,
        replies: Iterable[Message],
        check_reply: Callable[[int, RecordDict], None],
        aggregate_metrics: MetricsAggregation,
    ) -> tuple[dict[int, RecordDict], MetricRecord]:
        """Return the usable replies by client, in the order of ids, and the phase's metrics."""
        good, self.faults, counts = sift(replies, self._asked, check_reply)
        found: Mapping[str, Any] = {}
        if good:
            found = aggregate_metrics(list(good.values()), self.weighted_by_key)
        return good, MetricRecord({**found, **counts})
