"""An algorithm's description of itself, and the hooks by which it takes part in a run.

A hook is a function of the server's state, the round and what is given; of the strategy it reads
declared hyperparameters alone. So a round can be computed without Flower, and several at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from fl_strategies.core.hyperparameters import number
from fl_strategies.core.randomness import draw, share, stream
from fl_strategies.core.records import NOTHING, Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.core.vectors import Vector
from fl_strategies.parts.selection import Selection
from fl_strategies.server.composition import Averages
from fl_strategies.server.declared import check_declared
from fl_strategies.server.options import Options

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
"""The hooks that see uploads: a class that overrides one may have another rule than its base."""


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
    compresses: ClassVar[bool] = True
    """Whether all uploads of a client are models, or all are changes, so that codes fit them."""
    moves_received: ClassVar[bool] = False
    """Whether an uploaded model is the received one as training moved it. Then the rule is one of
    these moves: if the received model was rounded, they count from the exact one. It is so where
    ``averages`` is "models", unless the class says otherwise."""
    weight: ClassVar[Callable[..., float]] = staticmethod(equal)
    """The weight of an upload in the rule. Its keyword arguments are hyperparameters."""
    folds: ClassVar[bool] = False
    """Whether the rule needs only sum_i weight_i v_i of the uploads v_i: hosts may send means."""
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
        declared = vars(cls)
        if declared.get("averages") == "models" and "moves_received" not in declared:
            cls.moves_received = True
        if "algorithm" in declared and not cls.runs and "unnamed" not in declared:
            cls.unnamed = ""
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
        return type(self).select is not Algorithm.select

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
        """Whether hosts may send means: the rule and the parts need no upload by itself."""
        return self.folds and not self.needs_each_upload

    @property
    def sends_distances(self) -> bool:
        """Whether a host that folds sends ||v_i - theta||^2 of each upload v_i."""
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
        return sorted(draw(stream(round.seed, purpose, round.number), round.connected, size))

    def client_config(self, state: State, round: Round, client: int) -> Mapping[str, Any]:
        """Return what ``client`` is told besides the hyperparameters that are declared as sent."""
        return NOTHING

    def vectors(self, state: State, round: Round) -> Mapping[str, Vector]:
        """Return the vectors [d] of a training request, one for each of ``extra_vectors``."""
        return NOTHING

    def catch_up(self, state: State, since: int) -> Vector | None:
        """Return the vector [d] that a client is sent, whose last reply used is of round ``since``.

        -1: none was used. A training request carries it for that client alone, where it is not
        None, of the model's types; the client's ``step`` finds it in ``received.catch_up``.
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
        return self.min_replies

    # ---- time ---------------------------------------------------------------------------------

    counts_time: ClassVar[bool] = False
    """Whether the algorithm itself counts virtual seconds."""

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
