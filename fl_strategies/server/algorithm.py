"""An algorithm's description of itself, and the hooks by which it takes part in a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from fl_strategies.core.hyperparameters import number
from fl_strategies.core.ledger import Ledger
from fl_strategies.core.records import NOTHING, Upload, Uploads
from fl_strategies.core.vectors import Vector
from fl_strategies.server.composition import Averages
from fl_strategies.server.nodes import Nodes
from fl_strategies.server.options import Options
from fl_strategies.server.run import Run

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


GETS_UPLOADS = ("accept", "aggregate", "aggregate_train", "end_round")
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


class Algorithm(Options):
    """The server half of an algorithm, besides its hyperparameters.

    Attributes
    ----------
    state : record or None
        The state of the algorithm's server (:data:`State`) after the last successful round.
    ledger : fl_strategies.core.ledger.Ledger
        Which reply of each client was used last.
    run : fl_strategies.server.run.Run
        The run so far.
    nodes : fl_strategies.server.nodes.Nodes
        The clients that are connected, and those that ever were.
    theta : ndarray [d]
        The global model of the current round.
    """

    algorithm: ClassVar[str]
    """Name by which clients know the algorithm."""
    card: ClassVar[Card]
    """Its row in a table of algorithms; an algorithm that is in no table needs no card."""
    client_module: ClassVar[str] = ""
    """Module of its client half; by default the module of the same name in ``clients``."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Names of vectors [d] that travel beside the model, in training requests and replies."""
    averages: ClassVar[Averages] = ""
    """The uploads if the server rule depends only on their (weighted) mean: "models" trained from
    the received one, or "changes", of models or states, which must add up. Else "". A class that
    overrides one of :data:`GETS_UPLOADS` says it anew."""
    books_changes: ClassVar[bool] = False
    """Whether uploads are changes that the server and the client both add to their states."""
    folds_distances: ClassVar[bool] = False
    """Whether the rule also needs ||v_i - theta||^2 of each upload (``Upload.distance2``)."""
    unnamed: ClassVar[str] = ""
    """What a client may do that does not say which algorithm it ran; "" if it is refused."""
    num_clients = 0
    """The number of clients that the user declared, a lower bound."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
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

    def __post_init__(self) -> None:
        kept_rounds = self.checkpoints.kept_rounds if self.checkpoints else None
        lost_state = self.lost_state or ("warn" if self.books_changes else "reset")
        self.lost_state = lost_state
        self.state: State = None
        self.ledger = Ledger(lost_state, self.acknowledge, kept_rounds)
        self.nodes = Nodes(self.node_wait, self.shared_population)
        self.run = Run(self.algorithm)
        self.theta: Vector = np.zeros(0)

    @property
    def population(self) -> int:
        """Number m of clients that were ever connected, and at least ``num_clients``."""
        return max(len(self.nodes.known), self.num_clients)

    def aggregate(self, state: State, theta: Vector, uploads: Uploads) -> tuple[Vector, State]:
        """Return the next global model [d] and server state, from the current ones and the uploads.

        The arguments must not be changed.
        """
        raise TypeError(f"{type(self).__name__} must define aggregate")

    def first_state(self, theta: Vector) -> State:
        """Return the server state before the first round, on the initial model [d]."""
        return None

    def begin(self, state: State, theta: Vector) -> State:
        """Return the state at a run's beginning, given the state before; may raise ``ValueError``.

        ``theta`` [d] is the initial model. Each ``start`` calls this; by default the state stays.
        """
        return state

    def meet(self, state: State, clients: Iterable[int]) -> State:
        """Return the state when these ``clients`` are connected, before a round asks any."""
        return state

    def tell(self, state: State, server_round: int, client: int) -> Mapping[str, Any]:
        """Return what ``client`` is told besides the hyperparameters that are declared as sent."""
        return NOTHING

    def vectors(self, state: State) -> Mapping[str, Vector]:
        """Return the vectors [d] that a training request carries, one for each of ``beside``."""
        return NOTHING

    def missed(self, state: State, since: int) -> Vector | None:
        """Return the vector [d] that a client is sent, whose last reply used is of round ``since``.

        -1: none was used. A training request carries it for that client alone, where it is not
        None, of the model's types; the client's ``step`` finds it in ``received.missed``.
        """
        return None

    def accept(self, upload: Upload) -> Upload:
        """Return the upload for the rule; raise :class:`BadReply` if the rule cannot use it.

        Called in the order of clients, for uploads that have passed all other checks.
        """
        return upload

    def weight(self, upload: Upload) -> float:
        """Return the weight of ``upload`` in :meth:`aggregate`, for the history."""
        return 1.0

    @property
    def folds_by(self) -> str:
        """:meth:`weight` as text, if the rule needs only sum_i weight_i v_i of the uploads v_i.

        "1", a number that clients report, a power "(n + c)^q" of one, or a quotient "... / a" of
        these (:mod:`fl_strategies.messages.folding`); "" if the rule needs more.
        """
        return ""

    def reference(self, upload: Upload) -> Vector | float:
        """Return the point, [d] or 0, from which ``clipping_norm`` measures ``upload``."""
        return 0.0 if self.books_changes else self.theta

    def end_round(
        self, before: State, state: State, uploads: Uploads, metrics: Mapping[str, Any]
    ) -> tuple[State, dict[str, float]]:
        """Return the state with the changes of every round, even a void one, and further metrics.

        ``before`` is the state before the round; after a void round ``state`` is equal to it.
        """
        return state, {}

    @property
    def scalar_bounds(self) -> Mapping[str, tuple[float, float]]:
        """Metrics that each reply must carry, and the range of each."""
        return NOTHING

    def check_clients(self, clients: int) -> None:
        """Raise ``ValueError`` if the algorithm cannot run with this number of clients."""

    def replies_needed(self) -> int:
        """Return the number of usable replies below which the round is skipped."""
        return self.min_replies

    def exchanges_in(self, num_rounds: int) -> int:
        """Return the number of communication rounds in a run of ``num_rounds``."""
        return num_rounds
