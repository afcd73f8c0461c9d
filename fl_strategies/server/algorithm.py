"""An algorithm's description of itself, and the hooks by which it takes part in a run.

A hook is a function of the server's state, the round and what is given; of the strategy it reads
declared hyperparameters alone. So a round can be computed without Flower, and several at once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import getattr_static
from typing import Any, ClassVar, NamedTuple, TypeAlias

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Hyperparameter, number
from fl_strategies.core.layout import Arrays
from fl_strategies.core.metric_names import in_evaluation, in_training
from fl_strategies.core.randomness import draw, share
from fl_strategies.core.records import CATCH_UP, NOTHING, Round, Upload
from fl_strategies.core.schedules import at, check_names
from fl_strategies.core.vectors import Vector
from fl_strategies.messages.bounds import NormBound
from fl_strategies.messages.codes import CODEC, DOWNLOAD, asked_for
from fl_strategies.messages.description import DESCRIBE, OWN_FIRST
from fl_strategies.messages.folding import DISTANCE, ROUNDING
from fl_strategies.messages.heeding import IN_EVALUATION, IN_TRAINING
from fl_strategies.messages.identity import Identity
from fl_strategies.messages.wire import Expected
from fl_strategies.parts.deadline import Deadline
from fl_strategies.parts.selection import Selection
from fl_strategies.server.asked import Policy
from fl_strategies.server.composition import Averages
from fl_strategies.server.options import Options
from fl_strategies.solvers.local import default_training

State: TypeAlias = Any
"""The state of an algorithm's server: an immutable record of named fields (a named tuple or frozen
dataclass of numbers, texts, arrays, lists and dicts of them), or None if it keeps nothing."""


NUM_CLIENTS: Any = number(
    default=0,
    about="m, if it is known (0: not known) and above the number of clients ever connected, which"
    " counts otherwise.",
    integer=True,
    low=0,
)
"""The hyperparameter ``num_clients`` of algorithms whose rule divides by :attr:`population`."""


GETS_UPLOADS = ("unusable", "aggregate", "skipped", "use", "aggregate_train")
"""The hooks that see uploads: a class that overrides one may have another rule than its base, and
inherits neither what it ``averages`` nor that it ``folds``."""


KEYS = frozenset(
    {
        "algorithm", "run-id", "server-round", "round", "acked-round", "kept-rounds", "seed",
        "layout", "frozen", "checksums", "clipping-norm", "secure-range", "secure-max-weight",
        "secure-alike", CATCH_UP, CODEC, DOWNLOAD, DESCRIBE, OWN_FIRST,
    }
)  # fmt: skip
"""Keys of a request that say no hyperparameter."""
OLDER = {
    "configure_fit": "select says who is asked, and client_config what a client is told",
    "aggregate_fit": "the server rule is aggregate(state, round, uploads), or on messages"
    " aggregate_train(server_round, replies)",
    "initialize_parameters": "start(grid, initial_arrays) gets the initial model",
    "evaluate": "start(evaluate_fn=...) tests the model, clients evaluate it by messages",
    "num_fit_clients": "fraction_train and min_train_nodes say how many are asked",
    "num_evaluation_clients": "fraction_evaluate and min_evaluate_nodes say how many are asked",
}
"""Hooks of Flower's older strategies (``flwr.server.strategy``), and what is in their place."""
CALLED = {"configure_train", "configure_evaluate", "aggregate_train", "aggregate_evaluate"}
"""Flower's hooks that are called."""
OWN = frozenset(
    {
        "state", "parts", "ledger", "nodes", "run", "sender", "reader", "phases", "caller", "model",
    }
)  # fmt: skip
"""Attributes that every strategy sets itself."""


class Card(NamedTuple):
    """An algorithm's row in a table of algorithms."""

    title: str
    about: str
    when: str
    """When to use it."""
    keeps: str
    """What the clients keep from round to round."""
    paper: str
    arxiv: str = ""
    """The paper's number on arXiv."""


Next: TypeAlias = tuple[Vector, State, Mapping[str, float]]
"""What a server rule returns: the next global model [d], the next state, the round's numbers."""


def equal(upload: Upload) -> float:
    """Return 1: each upload counts alike."""
    return 1.0


class Algorithm(Options):
    """The server half of an algorithm, besides its hyperparameters."""

    algorithm: ClassVar[str]
    """Name by which strategies, commands and replies know the algorithm."""
    runs: ClassVar[str] = ""
    """The algorithm whose clients train, if it is another: this one changes the server alone."""
    client_half: ClassVar[ClientHalf | None] = None
    """What clients do. Their class is derived from it, unless one is written."""
    card: ClassVar[Card]
    """Its row in a table of algorithms; an algorithm that is in no table needs no card."""
    uses_local: ClassVar[bool] = True
    """Whether clients train as ``local`` says; else it may hold only what ``fine-tune`` needs."""
    reports: ClassVar[tuple[str, ...]] = ()
    """Names of the numbers that the algorithm adds to a round's metrics."""
    extra_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of vectors [d] that travel with the model, in training requests and replies."""
    averages: ClassVar[Averages] = ""
    """The uploads if the server rule depends only on their (weighted) mean: "models" trained from
    the received one, or "changes", of models or states, which must add up. Else "". A class that
    overrides one of :data:`GETS_UPLOADS` says it anew."""
    accumulates_changes: ClassVar[bool] = False
    """Whether uploads are changes that the server and the client both add to their states."""
    needs_exact_model: ClassVar[bool] = False
    """Whether clients compare the model with their uploads, so that it must not be rounded."""
    compresses: ClassVar[bool] = True
    """Whether all uploads of a client are models, or all are changes: compressed in one way."""
    moves_received: ClassVar[bool] = False
    """Whether an uploaded model is the received one as training moved it. Then the rule is one of
    these moves: if the received model was rounded, they count from the exact one. It is so where
    ``averages`` is "models", unless the class says otherwise."""
    weight: ClassVar[Callable[..., float]] = staticmethod(equal)
    """The weight of an upload in the rule. Its keyword arguments are hyperparameters."""
    weighs: ClassVar[bool] = False
    """Whether :meth:`aggregate` has the weights from :meth:`weighted`, so that a class of its own
    may override :attr:`weight` alone. A class with an ``aggregate`` of its own says it anew."""
    folds: ClassVar[bool] = False
    """Whether the rule needs only sum_i weight_i v_i of the uploads v_i: hosts may send means."""
    fixes_own: ClassVar[bool] = False
    """Whether arrays that are each client's own keep their first values, which must then be the
    initial model's."""
    folds_distances: ClassVar[bool] = False
    """Whether the rule also needs ||v_i - theta||^2 of each upload (``Upload.distance2``)."""
    unnamed: ClassVar[str] = ""
    """What a client may do that does not say which algorithm it ran; "" if it is refused. An
    algorithm with a name of its own does not inherit it."""
    num_clients = 0
    """The number of clients that the user declared, a lower bound."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_declared(cls, cls.declarations)
        declared = added(cls)
        check_clients_half(cls, declared)
        if declared.get("averages") == "models" and "moves_received" not in declared:
            cls.moves_received = True
        if "algorithm" in declared and not cls.runs and "unnamed" not in declared:
            cls.unnamed = ""
        if {*GETS_UPLOADS} & declared.keys() and "folds" not in declared:
            cls.folds = False
        if "aggregate" in declared and "weighs" not in declared:
            cls.weighs = False
        for base in cls.__mro__:
            if "averages" in vars(base) or not cls.averages:
                break
            if hook := next((name for name in GETS_UPLOADS if name in vars(base)), ""):
                raise TypeError(
                    f"{cls.__name__} has its own {hook}, and must say by `averages` what Flower's"
                    ' privacy wrappers and secure aggregation may assume: averages = "models" if'
                    " the next model is the mean of the uploaded models and the server keeps"
                    ' nothing else of them, "changes" if the rule needs only the sum of changes,'
                    f' else ""; it inherits "{cls.averages}"'
                )

    @property
    def mean_of(self) -> Averages:
        """:attr:`averages`, with these hyperparameters."""
        return self.averages

    @property
    def uploads_changes(self) -> bool:
        """Whether uploads are changes, not models."""
        return self.accumulates_changes or self.averages == "changes"

    @property
    def model_from_state(self) -> bool:
        """Whether the next model follows from the server's state, and not from the last model."""
        return False

    @property
    def chooses_clients(self) -> bool:
        """Whether the algorithm itself says which clients are asked."""
        cls = type(self)
        return (cls.select, cls.sample) != (Algorithm.select, Algorithm.sample)

    @property
    def takes_late_changes(self) -> bool:
        """Whether the model follows from the sum of all changes, each as of its own request."""
        return False

    @property
    def equal_weights(self) -> bool:
        """Whether each upload has the same weight in the rule."""
        return type(self).weight is equal

    @property
    def overlaps(self) -> bool:
        """Whether the algorithm itself has work of several rounds under way."""
        return False

    @property
    def needs_everyone(self) -> bool:
        """Whether a round is skipped in which one client is missing."""
        return False

    @property
    def counts_draws(self) -> bool:
        """Whether a client that is drawn k times has weight k."""
        return isinstance(self.selection, Selection) and self.selection.counts

    @property
    def needs_each_upload(self) -> bool:
        """Whether a part needs each upload by itself, as its client sent it."""
        parts = self.combine, self.compression, self.privacy
        loses = self.pace is not None or (self.clock is not None and self.clock.loses)
        return parts != (None, None, None) or self.counts_draws or loses

    @property
    def can_fold(self) -> bool:
        """Whether hosts may send means: the rule and the parts need no upload by itself, and hosts
        know its weights and where ``clipping_norm`` measures from."""
        name, cls = self.runs or self.algorithm, type(self)
        bases: Iterable[type[Any]] = cls.__mro__
        named = next((base for base in bases if vars(base).get("algorithm") == name), cls)
        known = cls.weight is named.weight and cls.reference is named.reference
        return self.folds and known and not self.needs_each_upload

    @property
    def sends_distances(self) -> bool:
        """Whether a host that sends a mean adds ||v_i - theta||^2 of each upload v_i."""
        step = self.server_step
        return self.folds_distances or (step is not None and step.needs_distances)

    @property
    def trust(self) -> str:
        """What a client that names no algorithm is trusted to do; "" if it is refused."""
        changes = " and to upload changes, not models" if self.uploads_changes else ""
        return self.unnamed or (f"to implement it{changes}" if self.assume_algorithm else "")

    # ---- the rule -----------------------------------------------------------------------------

    def aggregate(self, state: State, round: Round, uploads: Sequence[Upload]) -> Next:
        """Return the next global model [d], the next server state and numbers of the round.

        ``uploads`` are ascending by client. The arguments must not be changed.
        """
        raise TypeError(f"{type(self).__name__} must define aggregate")

    def skipped(
        self, state: State, round: Round, uploads: Sequence[Upload]
    ) -> tuple[State, Mapping[str, float]]:
        """Return the state after a round that was skipped, and numbers of that round.

        ``uploads`` were usable, and are not used.
        """
        return state, NOTHING

    def weight_options(self, server_round: int) -> dict[str, Any]:
        """Return the values of the hyperparameters that :attr:`weight` takes, in the round."""
        names = inspect.signature(type(self).weight).parameters
        return {name: at(getattr(self, name), server_round) for name in [*names][1:]}

    def weights_of(self, round: Round, uploads: Iterable[Upload]) -> list[float]:
        """Return the weight of each of ``uploads`` in :meth:`aggregate`."""
        options = self.weight_options(round.number)
        return [type(self).weight(upload, **options) for upload in uploads]

    def weighted(self, round: Round, uploads: Sequence[Upload]) -> Iterator[tuple[Vector, float]]:
        """Yield the vector [d] and the weight of each of ``uploads``, for :meth:`aggregate`."""
        weights = self.weights_of(round, uploads)
        return zip((upload.vector for upload in uploads), weights, strict=True)

    def proximal_rate(self, server_round: int) -> float | None:
        """Return c, if argmin_v g(v) + (1/(2 c)) ||v - theta||^2 of each aggregated theta is the
        algorithm's own method for the clients' mean loss plus g; else None."""
        return None

    # ---- the server's state -------------------------------------------------------------------

    def first_state(self, theta: Vector) -> State:
        """Return the server state before the first round, on the initial model [d]."""
        return None

    def begin(self, state: State, round: Round, num_rounds: int) -> State:
        """Return the state at the beginning of a ``start``, given the state before.

        ``round`` is the last of earlier calls; its theta is the initial model [d]. May raise
        ``ValueError``. By default the state stays.
        """
        return state

    def on_connect(self, state: State, clients: Collection[int]) -> State:
        """Return the state when ``clients`` are all that were ever connected, before a round."""
        return state

    # ---- requests -----------------------------------------------------------------------------

    def select(self, state: State, round: Round) -> list[int]:
        """Return which of ``round.connected`` train in the round, ascending."""
        return self.sample("sample", round, self.fraction_train, self.min_train_nodes)

    def sample(self, purpose: str, round: Round, fraction: float, least: int) -> list[int]:
        """Return a random share of the connected clients, ascending, by the stream ``purpose``."""
        there = len(round.connected)
        size = min(max(share(fraction, there), least), there)
        return sorted(draw(round.stream(purpose), round.connected, size))

    def client_config(self, state: State, round: Round, client: int) -> Mapping[str, Any]:
        """Return what ``client`` is told besides the hyperparameters that are declared as sent."""
        return NOTHING

    def vectors(self, state: State, round: Round) -> Mapping[str, Vector]:
        """Return the vectors [d] of a training request, one for each of ``extra_vectors``."""
        return NOTHING

    def catch_up(self, state: State, since: int) -> Vector | None:
        """Return the vector [d] that a client is sent, whose last reply used is of round ``since``.

        -1: none was used. A training request carries it for that client alone, where it is not
        None, of the model's types; the client rule gets it as ``catch_up``.
        """
        return None

    def for_client(self, state: State, round: Round, client: int) -> Vector | None:
        """Return the vector [d] that ``client`` alone is sent, in place of a ``catch_up``.

        As by that, where it is not None; the client rule gets it as ``for_client``.
        """
        return None

    # ---- replies ------------------------------------------------------------------------------

    @property
    def scalar_bounds(self) -> Mapping[str, tuple[float, float]]:
        """Metrics that each reply must carry, and the range of each."""
        return NOTHING

    def unusable(self, state: State, round: Round, uploads: Iterable[Upload]) -> Mapping[int, str]:
        """Return why the rule cannot use some of ``uploads``, by client.

        The uploads, ascending by client, have passed all other checks.
        """
        return {}

    def reference(self, state: State, round: Round, upload: Upload) -> Vector | float:
        """Return the point, [d] or 0, from which ``clipping_norm`` measures ``upload``."""
        return 0.0 if self.uploads_changes else round.received

    def replies_needed(self, round: Round) -> int:
        """Return the number of usable replies below which the round is skipped."""
        return self.uploads_needed(round.rejected)

    def uploads_needed(self, rejected: int = 0) -> int:
        """Return the fewest uploads that the parts and ``min_replies`` allow a round.

        In the round so many replies were ``rejected``.
        """
        if self.privacy is not None:
            return 0
        least = 1 if self.combine is None else self.combine.after(rejected).least
        return max(self.min_replies, least)

    def policy(self, state: State, round: Round, model: Arrays) -> Policy:
        """Return what the replies to training requests must hold, and how they count.

        ``model`` are the arrays of the global model as they are sent.
        """
        assert round.layout is not None
        every, most = self.evaluation_policy(round), self.clipping_norm
        most = math.inf if most is None else most
        reference = partial(self.reference, state, round)
        bound = NormBound(most, reference, self.accumulates_changes, model)
        codec, changes = self.compression, self.uploads_changes
        bounds = dict(self.scalar_bounds)
        expected = every.expected._replace(bounds=bounds, admit=every.identity.admit)
        farthest = most * (1.0 + ROUNDING)
        squares = {DISTANCE: (0.0, farthest * farthest)}  # infinite where ** overflows
        return replace(
            every,
            expected=expected,
            called=partial(in_training, reports=self.reports),
            phase="",
            aggregation=self.train_metrics_aggr_fn,
            heeded=IN_TRAINING,
            settings=tuple(self.local),
            extra_vectors=self.extra_vectors,
            codec=codec,
            coded="" if codec is None else asked_for(codec, changes=changes),
            uploads_changes=changes,
            bound=None if most == math.inf else bound,
            folded=expected._replace(bounds=bounds | squares) if self.sends_distances else None,
            most_work=self.most_work if "work" in bounds else None,
            unusable=partial(self.unusable, state, round),
            weights=partial(self.weights_of, round),
            clock=None if self.counts_time else self.clock,
            deadline=self.pace if isinstance(self.pace, Deadline) else None,
            most_steps=self.most_steps,
        )

    def evaluation_policy(self, round: Round) -> Policy:
        """Return what the replies to evaluation requests must hold, and how they count."""
        assert round.layout is not None
        wire = round.layout.with_vectors(self.extra_vectors)
        name = self.runs or self.algorithm
        return Policy(
            Identity(type(self).__name__, name, self.trust, round.layout),
            wire,
            Expected(len(wire.shapes), self.weighted_by_key, self.max_samples, {}),
            called=in_evaluation,
            phase="eval-",
            aggregation=self.evaluate_metrics_aggr_fn,
            heeded=IN_EVALUATION,
        )

    # ---- time ---------------------------------------------------------------------------------

    counts_time: ClassVar[bool] = False
    """Whether the algorithm itself counts virtual seconds."""

    @classmethod
    def most_steps(cls, config: Mapping[str, Any], local: float, samples: int) -> float:
        """Return the most local steps, each one gradient on a mini-batch, that a request allows.

        ``config`` is the request, ``local`` the steps of local training by its settings, and
        ``samples`` the number of the client's samples. By default the client trains once.
        """
        return local

    def most_work(self, config: Mapping[str, Any]) -> float:
        """Return the most ``work`` that a reply to a request may report, if it must report any."""
        return math.inf

    def virtual_seconds(self, state: State) -> float | None:
        """Return the virtual seconds so far, if the algorithm counts them itself."""
        return None

    # ---- numbers of clients and rounds --------------------------------------------------------

    def asked_of(self, clients: int) -> int:
        """Return how many of so many connected clients are asked to train in a round."""
        return min(clients, max(share(self.fraction_train, clients), self.min_train_nodes))

    def check_clients(self, clients: int) -> None:
        """Raise ``ValueError`` if the algorithm cannot run with this number of clients."""

    def communication_rounds(self, state: State, num_rounds: int) -> int:
        """Return the number of communication rounds in a run of ``num_rounds``."""
        return num_rounds


# ---- what a class declares ----------------------------------------------------------------------


def added(cls: type) -> dict[str, Any]:
    """Return what the class has of its own and of its mixins, and not from another algorithm."""
    known = {one for base in cls.__bases__ if issubclass(base, Algorithm) for one in base.__mro__}
    new = {n: v for base in cls.__mro__[::-1] if base not in known for n, v in vars(base).items()}
    return {name: value for name, value in new.items() if getattr_static(cls, name) is value}


def check_clients_half(cls: type[Algorithm], declared: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for what clients would never get of what a class declares."""
    named = "algorithm" in declared or not getattr(cls, "algorithm", "")
    if declared.get("client_half") and (not named or declared.get("runs")):
        raise TypeError(
            f"{cls.__name__} has a client_half of its own, and needs an `algorithm` of its own, and"
            " no `runs`: by this name clients find it"
        )
    hooks = "catch_up", "for_client"
    if all(getattr(cls, hook) is not getattr(Algorithm, hook) for hook in hooks):
        raise TypeError(f"{cls.__name__} must have either a catch_up or a for_client: one is sent")
    if reserved := sorted({*hooks} & {*cls.extra_vectors}):
        raise TypeError(f"{cls.__name__}.extra_vectors must not be called {reserved}")


def check_declared(cls: type[Algorithm], declarations: Mapping[str, Hyperparameter]) -> None:
    """Raise ``TypeError`` for a declaration that would be misunderstood or overwritten."""
    for attribute in ("extra_vectors", "reports"):
        check_names(cls, attribute)
    taken = dict.fromkeys(KEYS, "the run itself")
    taken |= dict.fromkeys(default_training().settings, "a setting of `local`")
    for name, declaration in declarations.items():
        if whose := _owner(cls, name):
            raise TypeError(f"{cls.__name__}.{name} is {whose}: choose another name")
        if not (key := declaration.sent):
            continue
        told = f"{cls.__name__}.{name} is sent as {key!r}"
        if "_" in key:
            raise TypeError(f"{told}, and clients read {key.replace('_', '-')!r}: send it as that")
        if key in taken:
            raise TypeError(f"{told}, which requests use for {taken[key]}: choose another key")
        taken[key] = f"the hyperparameter {name!r}"
    _check_readers(cls)
    _check_calls(cls)


def _check_readers(cls: type[Algorithm]) -> None:
    """Raise ``TypeError`` for a hook that the class overrides, and that its rule does not read."""
    own = added(cls)
    rule = next(base for base in cls.__mro__ if "aggregate" in vars(base))
    inherited = "aggregate" not in own and rule.__name__ != "Algorithm"
    if "weight" in own and inherited and not cls.weighs:
        raise TypeError(
            f"{cls.__name__} has its own weight, and {rule.__name__}.aggregate does not read it:"
            " define aggregate as well, or derive from FedAvg, whose rule does; a rule that takes"
            " its weights from self.weighted says weighs = True"
        )
    takes = [*inspect.signature(cls.weight).parameters] if "weight" in own else []
    if unknown := [name for name in takes[1:] if not hasattr(cls, name)]:
        raise TypeError(
            f"{cls.__name__}.weight takes {unknown}, which are no hyperparameters: it is a"
            " staticmethod (upload, *, hyperparameter ...)"
        )
    if "asked_of" in own and not {"select", "sample"} & own.keys():
        raise TypeError(
            f"{cls.__name__} has its own asked_of, which select does not read: define select, too"
        )


def _check_calls(cls: type) -> None:
    """Raise ``TypeError`` for hooks of Flower's older strategies, which nobody calls."""
    methods = {name: method for name, method in added(cls).items() if inspect.isfunction(method)}
    for name in OLDER.keys() & methods.keys():
        # a helper of this name has other arguments
        if name != "evaluate" or _takes(methods[name], ["server_round", "parameters"]):
            raise TypeError(f"{cls.__name__}.{name} is never called: {OLDER[name]}")
    base = next(base for base in cls.__bases__ if issubclass(base, Algorithm))
    for name in CALLED & methods.keys():
        wanted = [*inspect.signature(getattr(base, name, methods[name])).parameters]
        if not _takes(methods[name], wanted[1:]):
            raise TypeError(
                f"{cls.__name__}.{name} takes {inspect.signature(methods[name])}, and is called"
                f" with ({', '.join(wanted[1:])}), as in Flower's strategies for messages"
            )


def _takes(method: Callable[..., Any], arguments: Sequence[str]) -> bool:
    """Return whether a method can be called with so many arguments."""
    try:
        inspect.signature(method).bind(None, *arguments)
    except TypeError:
        return False
    return True


def _owner(cls: type, name: str) -> str:
    """Return what else ``name`` is, if a class of an algorithm declares it; "" if nothing."""
    owners = [base for base in cls.__mro__ if name in vars(base)]
    ours = [base for base in owners if base.__module__.startswith("fl_strategies.server.")]
    if name == "num_clients" or owners[:1] == ours[:1]:
        return ""
    if name in OWN:
        return "an attribute of every strategy"
    if not ours:
        return ""
    option = isinstance(vars(ours[0])[name], Hyperparameter)
    return "an option of every strategy" if option else "a hook or attribute of every strategy"
