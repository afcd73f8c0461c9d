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
- a round with fewer than ``min_replies`` usable replies is void: model and state stay as they were;
- ``averages`` says what the server rule takes the mean of, and so which of Flower's wrappers and
  mods (clipping, noise, masks) may come between the clients and it.

Of the server half, this module, ``nodes``, ``replies``, ``composition``, ``checkpoints`` and
``legacy`` use Flower.
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
from fl_strategies.checkpoints import Checkpoint, Checkpoints
from fl_strategies.clipping import clip, norm
from fl_strategies.composition import Averages, Composition
from fl_strategies.layout import Arrays, BufferMean, Layout
from fl_strategies.nodes import Nodes
from fl_strategies.randomness import stream
from fl_strategies.replies import SPREAD, Asked, by_client, only, sift, spread, word_of
from fl_strategies.schedules import Knob, at, check, one_of
from fl_strategies.subproblem import Vector
from fl_strategies.wire import BadReply, check_scalars, decode, decode_model

Scalar: TypeAlias = bool | int | float | str
Knobs: TypeAlias = dict[str, Scalar | Mapping[int, float]]
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
    checkpoints: Checkpoints | None
    clipping_norm: float | None


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
    checkpoints : Checkpoints, optional
        Where to write checkpoints, from which ``start(resume=True)`` goes on; none by default.
    clipping_norm : float > 0 or None (default None: no bound)
        Bound on the norm of the change that one upload makes to the model, and of that of the
        floats among ``buffers``: a larger one is scaled down to it (``fl_strategies.clipping``).
        Where server and clients both book uploads (``books_changes``), and for what travels beside
        the model, the reply is left out instead: of a change scaled down, the server's sum and the
        clients' state would disagree for good, whereas clients undo what was left out.

    Raises
    ------
    ValueError
        For an argument outside its range, before anything is sent.
    """

    algorithm: ClassVar[str]
    """Name by which clients know the algorithm."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Names of vectors [d] that travel beside the model, in training requests and replies."""
    averages: Averages = ""
    """What the server rule depends on the (weighted) mean of alone: models, trained from the one
    received; or changes, of models or states, which must add up; "" if it is none of both."""
    scalar_bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """Metrics that each reply must carry, with the range that each must be in."""
    books_changes: ClassVar[bool] = False
    """Whether uploads are changes which server and client both add to what they keep."""
    saved: ClassVar[tuple[str, ...]] = ("_acked", "_nonces")
    """Names of the attributes that a checkpoint holds: what the server keeps from round to round.
    Numbers, texts, arrays, lists and dicts of them. A subclass names its own, without these."""

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
        checkpoints: Checkpoints | None = None,
        clipping_norm: float | None = None,
    ) -> None:
        check("fraction_train", fraction_train, above=0.0, high=1.0)
        check("fraction_evaluate", fraction_evaluate, low=0.0, high=1.0)
        check("node_wait", node_wait, above=0.0)
        if clipping_norm is not None:
            check("clipping_norm", clipping_norm, above=0.0)
        check("seed", seed, low=0, integer=True)
        for name, least in (
            ("min_train_nodes", min_train_nodes),
            ("min_evaluate_nodes", min_evaluate_nodes),
            ("min_available_nodes", min_available_nodes),
            ("min_replies", min_replies),
        ):
            check(name, least, low=1, integer=True)
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
            value = cast(Knob, self.local.get(name, 1))  # text is refused by the check
            check(name, value, above=0.0, scheduled=True)
        for name, setting in self.local.items():
            if isinstance(setting, Mapping):
                check(name, setting, scheduled=True)
        self.lost_state, self.callbacks = lost_state, tuple(callbacks)
        self.acknowledge, self.checkpoints = acknowledge, checkpoints
        self.clipping_norm = clipping_norm
        self.nodes = Nodes(node_wait)
        self._rounds_before = self._round = self.num_rounds = 0
        self._acked: dict[int, int] = {}
        self._nonces: dict[int, str] = {}
        self._layout: Layout | None = None
        self._wire: Layout | None = None
        self._model: Arrays = {}
        self._asked = Asked({}, 0, 0.0)
        self.result = Result()
        self.composition = Composition()
        self.faults: dict[int | None, str] = {}
        self._clients: dict[int, dict[str, float]] = {}

    @property
    def num_clients(self) -> int:
        """Number m of clients that were ever connected."""
        return len(self.nodes.known)

    # ---- what an algorithm adds -------------------------------------------------------------

    def client_knobs(self) -> Knobs:
        """Return what the algorithm's clients must be told, schedules as such."""
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

    def reference(self, theta: Vector, upload: Upload) -> Vector | float:
        """Return from where ``clipping_norm`` measures ``upload``, [d] or 0: the model it got."""
        return 0.0 if self.books_changes else theta

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
        *,
        resume: bool = False,
    ) -> Result:
        """Run ``num_rounds`` rounds, as Flower's ``Strategy.start``, with callbacks.

        Called again, it goes on: clients keep their state, and rounds count on for schedules,
        streams and acknowledgement (callbacks and results count from 1 in each call).

        ``resume`` goes on from the last of ``checkpoints``, in a new process after the old one was
        killed, to the result that the run would have come to; with no checkpoint yet, it begins.
        ``num_rounds`` counts those before as well. Clients must still have their states
        (``clients.DirectoryStore``). A callback with a method ``recall`` is handed the metrics of
        the rounds before, by round.

        Raises ``ValueError`` for a model with arrays that cannot be trained, a config that sets
        what the strategy itself sends, and checkpoints that are another run's.
        """
        self.open(initial_arrays, num_rounds)
        ours = self.request(1, 0).keys()
        for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
            if clash := sorted(ours & set(config or ())):
                raise ValueError(f"{name} must not set {clash}: the strategy does")
        stopped = self._resume() if resume else self._begin()
        self.num_rounds = self.exchanges_in(num_rounds)
        arrays = self.result.arrays
        log(INFO, "%s: %d rounds, from round %d", self.algorithm, self.num_rounds, self._round + 1)
        if self._round == 0:
            self._evaluate(0, arrays, evaluate_fn)
        try:
            while self._round < self.num_rounds and not stopped:
                number = self._round = self._round + 1
                new = self.train_round(
                    number, arrays, grid, timeout, train_config or ConfigRecord()
                )
                arrays = arrays if new is None else new
                asked = self.configure_evaluate(
                    number, arrays, evaluate_config or ConfigRecord(), grid
                )
                replies = grid.send_and_receive(asked, timeout=timeout)
                self.aggregate_evaluate(number, replies)
                self._evaluate(number, arrays, evaluate_fn)
                stopped = self.close_round(number, arrays)
            if stopped:
                log(INFO, "a callback ended the run after round %d", self._round)
        finally:
            self._rounds_before += self._round
            self._round = 0
            self.composition.opened = False
        return self.result

    def train_round(
        self,
        server_round: int,
        arrays: ArrayRecord,
        grid: Grid,
        timeout: float,
        config: ConfigRecord,
    ) -> ArrayRecord | None:
        """Have clients train, and return the next model; None when the round is void."""
        requests = self.configure_train(server_round, arrays, config, grid)
        replies = grid.send_and_receive(requests, timeout=timeout)
        return self.aggregate_train(server_round, replies)[0]

    def _evaluate(self, number: int, arrays: ArrayRecord, evaluate_fn: EvaluateFn | None) -> None:
        metrics = evaluate_fn(number, arrays) if evaluate_fn else None
        if metrics is not None:
            self.result.evaluate_metrics_serverapp[number] = metrics

    def exchanges_in(self, num_rounds: int) -> int:
        """Return how many rounds of messages a run of ``num_rounds`` takes."""
        return num_rounds

    def open(self, initial_arrays: ArrayRecord, num_rounds: int) -> None:
        """Begin a run: take the initial model, and forget the result of the last."""
        self.num_rounds = num_rounds
        self._layout = None
        self._read_model(initial_arrays)
        assert self._layout is not None
        self.begin(self._layout.pack(self._model))
        self.result = Result(arrays=initial_arrays)
        self.composition.opened = True

    def close_round(self, server_round: int, arrays: ArrayRecord) -> bool:
        """End a round: callbacks, checkpoint; return whether a callback ends the run."""
        self.result.arrays = arrays
        metrics = self._metrics(server_round)
        told = [f"{n}={value:.6g}" for n, value in metrics.items() if not n.endswith(SPREAD)]
        log(INFO, "round=%d algorithm=%s %s", server_round, self.algorithm, " ".join(told))
        info = RoundInfo(server_round, self.num_rounds, arrays, metrics, self._clients)
        # every callback sees the round, also when an earlier one wants to stop
        stopped = True in [callback(info) for callback in self.callbacks]
        if self.checkpoints and (
            stopped or server_round % self.checkpoints.every == 0 or server_round == self.num_rounds
        ):
            number = self._rounds_before + server_round
            self.checkpoints.save(number, self._checkpoint(server_round, stopped))
        return stopped

    def _metrics(self, server_round: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for phase in self._phases_of_result():
            for name, value in phase.get(server_round, {}).items():
                if not isinstance(value, list):
                    metrics[name] = value
        return metrics

    def _phases_of_result(self) -> list[dict[int, MetricRecord]]:
        return [
            self.result.train_metrics_clientapp,
            self.result.evaluate_metrics_clientapp,
            self.result.evaluate_metrics_serverapp,
        ]

    # ---- checkpoints --------------------------------------------------------------------------

    def _identity(self) -> dict[str, Scalar]:
        """Return what a checkpoint and the run that goes on from it must have in common."""
        assert self._layout is not None
        return {
            "algorithm": self.algorithm,
            "seed": self.seed,
            "model": self._layout.signature,
        }

    def _saved(self) -> list[str]:
        return [name for cls in reversed(type(self).__mro__) for name in vars(cls).get("saved", ())]

    def _checkpoint(self, server_round: int, stopped: bool) -> Checkpoint:
        run = {
            **self._identity(),
            "rounds-before": self._rounds_before,
            "round": server_round,
            "stopped": stopped,
            "clients": sorted(self.nodes.known),
            "metrics": self._metrics(server_round),
            "history": [
                [[number, dict(record)] for number, record in phase.items()]
                for phase in self._phases_of_result()
            ],
        }
        model = {name: array.numpy() for name, array in self.result.arrays.items()}
        return Checkpoint(model, {name: getattr(self, name) for name in self._saved()}, run)

    def _begin(self) -> bool:
        if self.checkpoints and not self._rounds_before:
            self.checkpoints.begin()
        return False

    def _resume(self) -> bool:
        """Go back to the last checkpoint, if there is one; return whether the run ended there."""
        if self.checkpoints is None:
            raise ValueError("resume needs checkpoints: give the strategy some")
        found = self.checkpoints.last()
        if found is None:
            return self._begin()
        run, identity = found.run, self._identity()
        if other := {name: run[name] for name in identity if run[name] != identity[name]}:
            ours = {name: identity[name] for name in other}
            raise ValueError(f"{self.checkpoints.directory} is of a run with {other}, not {ours}")
        for name, value in found.state.items():
            setattr(self, name, value)
        self.nodes.known |= set(run["clients"])
        self._rounds_before, self._round = run["rounds-before"], run["round"]
        self.result.arrays = ArrayRecord({name: Array(a) for name, a in found.model.items()})
        for phase, rows in zip(self._phases_of_result(), run["history"], strict=True):
            phase.update({number: MetricRecord(row) for number, row in rows})
        rows = {number: self._metrics(number) for number in range(1, self._round + 1)}
        for callback in self.callbacks:
            if recall := getattr(callback, "recall", None):
                recall(rows)
        return bool(run["stopped"])

    # ---- training -----------------------------------------------------------------------------

    def request(self, server_round: int, client: int) -> dict[str, Scalar]:
        """Return the config that ``client`` is sent in ``server_round``."""
        knobs = {
            name: at(value, server_round) if isinstance(value, Mapping) else value
            for name, value in {**self.local, **self.client_knobs()}.items()
        }
        request: dict[str, Scalar] = {
            **knobs,
            "algorithm": self.algorithm,
            "server-round": server_round,
            "seed": self.seed,
        }
        if self.acknowledge:
            request["acked-round"] = self._acked.get(client, -1)
        if self.checkpoints:
            rounds = self.checkpoints.kept_rounds(client)
            request["kept-rounds"] = " ".join(map(str, rounds))
        if self._wire is not None and self.composition.intact(self, self._wire):
            request["checksums"] = True
        return request

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to the clients sampled for this round."""
        if server_round == 1:
            self.composition.wrapped = False
            if not self.composition.opened:
                self.composition.wrap(self)
                self._rounds_before += self._round
                self.open(arrays, 0)
                self.composition.opened = False
        self.composition.begin_round(config)
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
        self.composition.settle(self.asked, bool(self._acked))
        number = self._rounds_before + server_round
        arrays = None
        self._clients = by_client(good, {self.weighted_by_key: "examples"}, {})
        if len(good) < (needed := self.replies_needed()):
            self._void(server_round, f"{len(good)} usable replies, at least {needed} needed")
        elif self.faults and self.composition.exact:
            why = (
                "cannot be taken out of a masked sum, nor the noise of a wrapper be made for fewer"
            )
            self._void(server_round, f"{len(self.faults)} unusable replies {why}")
        else:
            arrays = self._next_model(number, good)
        if arrays is not None:
            self.commit(number)
            for client, content in good.items():
                self._acked[client] = self._asked.rounds.get(client, number)
                if nonce := word_of(content, "state-nonce"):
                    self._nonces[client] = nonce
            by_size = sorted(self._clients.values(), key=lambda row: row["examples"])
            if unequal := self.composition.unequal([row["weight-share"] for row in by_size]):
                self._say(server_round, unequal)
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
                arrays = decode_model(only(content.array_records), wire)
                upload = self._clipped(theta, self._upload(client, content, arrays))
                buffers = {name: arrays[name] for name in layout.buffers}
                merged.add(self._clipped_buffers(buffers), upload.num_examples)
                weights[client] = self.weight(upload)
                yield upload

        theta = layout.pack(self._model)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found just below
            vector = self.aggregate(server_round, theta, uploads(), len(good))
            model = layout.unpack(np.asarray(vector), merged.value())
        if not all(np.isfinite(array).all() for array in model.values()):
            self._void(server_round, "the aggregated model is not finite")
            return None
        total, examples = sum(weights.values()), sum(r["examples"] for r in self._clients.values())
        for client, row in self._clients.items():
            row["weight-share"] = weights.get(client, 0.0) / total if total else 1 / len(good)
            row["data-share"] = row["examples"] / examples
        return ArrayRecord({name: Array(array) for name, array in model.items()})

    def model_record(self, vector: Vector, buffers: Arrays | None = None) -> ArrayRecord:
        """Return the model with its trainable arrays out of ``vector`` [d], and its ``buffers``."""
        assert self._layout is not None
        model = self._layout.unpack(vector, {**self._model, **(buffers or {})})
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

    def _upload(self, client: int, content: RecordDict, arrays: Arrays) -> Upload:
        assert self._wire is not None
        scalars = only(content.metric_records)
        vector, *further = np.split(self._wire.pack(arrays), 1 + len(self.beside))
        beside = dict(zip(self.beside, further, strict=True))
        return Upload(client, vector, int(scalars[self.weighted_by_key]), scalars, beside)

    def _clipped(self, theta: Vector, upload: Upload) -> Upload:
        """Return ``upload`` within ``clipping_norm``: the same, to the bit, if it is."""
        if self.clipping_norm is None or self.books_changes:
            return upload
        reference = self.reference(theta, upload)
        change = upload.vector - reference
        if norm(change) <= self.clipping_norm:
            return upload
        return upload._replace(vector=reference + clip(change, self.clipping_norm))

    def _clipped_buffers(self, buffers: Arrays) -> Arrays:
        before = {
            name: self._model[name]
            for name, array in buffers.items()
            if np.issubdtype(array.dtype, np.floating)
        }
        if self.clipping_norm is None or not before:
            return buffers
        layout = Layout.of(before)
        start = layout.pack(before)
        change = layout.pack(buffers) - start
        if norm(change) <= self.clipping_norm:
            return buffers
        return {**buffers, **layout.unpack(start + clip(change, self.clipping_norm), {})}

    def _check_upload(self, client: int, content: RecordDict) -> None:
        assert self._layout is not None
        assert self._wire is not None
        self._check_metrics(content, self.scalar_bounds)
        if len(content.array_records) != 1:
            raise BadReply(f"{len(content.array_records)} ArrayRecords, expected one")
        arrays = decode_model(only(content.array_records), self._wire)
        theta = self._layout.pack(self._model)
        self.composition.check(self, client, content, arrays, self._wire)
        self.composition.check_clipped(client, content, arrays, self._layout, theta)
        if self.clipping_norm is not None and (self.books_changes or self.beside):
            upload = self._upload(client, content, arrays)
            parts = dict(upload.beside)
            if self.books_changes:
                reference = self.reference(theta, upload)
                parts["update"] = upload.vector - reference
            for name, vector in parts.items():
                if not (size := norm(vector)) <= self.clipping_norm:
                    raise BadReply(
                        f"the norm of its {name} is {size:g}, at most {self.clipping_norm:g}"
                        " (clipping_norm) is taken"
                    )

    def _check_train(self, client: int, content: RecordDict) -> None:
        self._check_upload(client, content)
        nonce, booked = word_of(content, "state-nonce"), self._nonces.get(client)
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
        self._asked = Asked(
            {nodes[client]: client for client in chosen}, size * len(chosen), time.monotonic()
        )
        messages = [
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
        # request() may look at who is asked
        self._asked = replace(
            self._asked, requests={m.metadata.dst_node_id: m.metadata for m in messages}
        )
        return messages

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
