"""What an algorithm tells of itself, and the hooks by which it takes part in a run."""

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
"""What an algorithm's server keeps: an immutable record of named fields (a named tuple or a frozen
dataclass of numbers, texts, arrays, lists and dicts of them), None if it keeps nothing."""


NUM_CLIENTS: Any = number(
    default=0,
    about="m, where known (0: not); counts if it is more than the clients ever connected.",
    integer=True,
    low=0,
)
"""The hyperparameter ``num_clients`` of algorithms whose rule divides by :attr:`population`."""


class Card(NamedTuple):
    """What a table of algorithms says of one."""

    title: str
    about: str
    when: str
    """When to use it."""
    keeps: str
    """What its clients keep from round to round."""
    paper: str


class Algorithm(Options):
    """What the server half of an algorithm is, beside its hyperparameters.

    Attributes
    ----------
    state : record or None
        What the algorithm's server keeps (:data:`State`), as of the last round that stands.
    ledger : fl_strategies.core.ledger.Ledger
        Which reply of each client was used last.
    run : fl_strategies.server.run.Run
        What the run has come to.
    nodes : fl_strategies.server.nodes.Nodes
        Who is connected, and who ever was.
    theta : ndarray [d]
        The global model of the present round.
    """

    algorithm: ClassVar[str]
    """Name by which clients know the algorithm."""
    card: ClassVar[Card]
    """What a table of algorithms says of it; one that is in none needs no card."""
    client_module: ClassVar[str] = ""
    """Module of its client half, by default that of the same name in ``clients``."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Names of vectors [d] that travel beside the model, in training requests and replies."""
    averages: ClassVar[Averages] = ""
    """What the server rule depends on the (weighted) mean of alone: models, trained from the one
    received; or changes, of models or states, which must add up; "" if it is neither."""
    books_changes: ClassVar[bool] = False
    """Whether uploads are changes which server and client both add to what they keep."""
    unnamed: ClassVar[str] = ""
    """What a client that does not say which algorithm it ran is trusted with, "" to refuse it."""
    num_clients = 0
    """Number of clients that there are at least, as far as the user knows."""

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
        """Number m of clients: ever connected, departed or not, and ``num_clients`` at least."""
        return max(len(self.nodes.known), self.num_clients)

    def aggregate(self, state: State, theta: Vector, uploads: Uploads) -> tuple[Vector, State]:
        """Return the next global model [d] and server state, from the present ones and a round's.

        Nothing that is handed in is written to.
        """
        raise TypeError(f"{type(self).__name__} must define aggregate")

    def first_state(self, theta: Vector) -> State:
        """Return the server state before the first round, on the initial model [d]."""
        return None

    def begin(self, state: State, theta: Vector) -> State:
        """Return the state to begin a run with, given that of before; ``ValueError`` if none can.

        ``theta`` [d] is the initial model. Called by each ``start``, which goes on by default.
        """
        return state

    def meet(self, state: State, clients: Iterable[int]) -> State:
        """Return the state once these ``clients`` are connected, before a round asks any."""
        return state

    def tell(self, state: State, server_round: int, client: int) -> Mapping[str, Any]:
        """Return what ``client`` must be told beside the hyperparameters declared as sent."""
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
        """Return the upload as the rule takes it; raise :class:`BadReply` if it must not.

        Called in the order of clients, for uploads that have passed all else.
        """
        return upload

    def weight(self, upload: Upload) -> float:
        """Return what ``upload`` weighs among the others in :meth:`aggregate`, for the history."""
        return 1.0

    @property
    def folds_by(self) -> str:
        """:meth:`weight` in words, where the rule needs sum_i weight_i v_i alone of uploads v_i.

        "1", a number that clients report, or a quotient "n / a" (:mod:`.folding`); "" where the
        rule needs more.
        """
        return ""

    def reference(self, upload: Upload) -> Vector | float:
        """Return from where ``clipping_norm`` measures ``upload``, [d] or 0: the model it got."""
        return 0.0 if self.books_changes else self.theta

    def end_round(
        self, before: State, state: State, uploads: Uploads, metrics: Mapping[str, Any]
    ) -> tuple[State, dict[str, float]]:
        """Return the state with what passes in every round, void ones too, and further metrics.

        ``before`` is the state before the round, and after a void one ``state`` is the same.
        """
        return state, {}

    @property
    def scalar_bounds(self) -> Mapping[str, tuple[float, float]]:
        """Metrics that each reply must carry, with the range that each must be in."""
        return NOTHING

    def check_clients(self, clients: int) -> None:
        """Raise ``ValueError`` if the algorithm cannot run with that many clients."""

    def replies_needed(self) -> int:
        """Return the number of usable replies below which the round is void."""
        return self.min_replies

    def exchanges_in(self, num_rounds: int) -> int:
        """Return how many communication rounds a run of ``num_rounds`` takes."""
        return num_rounds
