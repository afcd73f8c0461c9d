"""FedBCD: every device keeps a model of its own, tied to a common one by a quadratic penalty.

The problem is, over the devices' models x_i in a box X and the common model z,

    min  sum_i f_i(x_i) + (gamma_i/2) ||x_i - z||^2                             (1)

by block coordinate descent: active devices move their x_i, then z moves towards all of them. Round
with the model z received, for each active device i, K_i ~ U{1..K} times (ASPG):

    e  = x + zeta (x - x_prev)                                                  (2)
    x+ = Proj_X( e - eta_x ( grad f_i(e) + gamma_i (e - z) ) )                  (3)

and at the server, over ALL devices, those that were not active with their last x_i, K_z times:

    z <- z - eta_z sum_i gamma_i (z - x_i)                              "sum"   (4)
    z <- z - eta_z (z - sum_i gamma_i x_i / sum_i gamma_i)              "mean"  (5)

x_i, x_prev  device's model [d] and the iterate before it, kept by the device between rounds, so
             that its momentum goes on; X = [-box, box]^d
z            common model [d]; a point where (2)-(5) rest is a stationary point of (1)
K            local epochs (``local={"epochs": 5, "random-epochs": True}``, the paper's experiments),
             or mini-batches (``{"steps": 5, "random-steps": True}``, its Algorithm 1)
eta_x        ``lr``; (2)-(3) are the step of the solver ``sgd`` or ``gd``. Another solver takes its
             own step from e in place of (3)'s gradient step, and is projected alike

The server keeps S = sum_i gamma_i x_i, not every x_i: devices upload x_i+ - x_i, and an upload
whose reply was lost is undone by its device, so that S stays the sum of the devices' x_i.

- A device that never took part counts with x_i = x^0, the model the run began with. Its first
  message uploads x_i whole, in whose stead the server takes x^0 out of S. It starts from the z
  received, as x^0 does not travel again (the paper starts it from x^0; the same in round 1).
- A device that lost its state cannot subtract what it last sent. It begins anew as one device more,
  whose x_i is added to S and gamma_i to sum gamma_i; what it was before counts on as a device that
  is never active again, with its last x_i. So S stays a sum over devices and z between them all,
  with a bias of one part in their number per loss. ``lost_state="refuse"`` leaves such a one out.

(4) is the paper's; (5), the default, is its authors' code, and is (4) with eta_z / sum gamma_i. (4)
needs eta_z gamma |Q| <= 1 (Assumption 4), with |Q| all devices here, as the paper's synchronous
form is that of one server. Other deviations of the authors' code, each an option: a penalty
gamma ||x - z||^2 with gamma = 2, which under (5) is gamma = 4 here; K counts mini-batches; heavy
ball 0.9 with weight decay 1e-4 in place of (2); no box: ``FedBCD.authors_rule``, ``authors_local``.

Reference: Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma, "Federated Block Coordinate Descent Scheme
for Learning Global and Personalized Models", AAAI 2021, Algorithm 1 and eqs. 4-5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Unpack

from fl_strategies.clouds import CloudOptions, CloudStrategy, Reduce
from fl_strategies.strategy import Scalar, Upload
from fl_strategies.subproblem import Iterates, Solve, Subproblem, Vector


class State(NamedTuple):
    """What a device keeps: x, the iterate before it, and whether the server's sum holds x (1)."""

    x: Vector
    previous: Vector
    booked: float


class Sum(NamedTuple):
    """What a server keeps of its devices: S = sum_i gamma_i x_i [d], and sum_i gamma_i."""

    total: Vector = 0.0
    weight: float = 0.0


def first_state(z: Vector) -> State:
    """Return the state of a device that has never taken part, or that lost its state."""
    return State(x=z, previous=z, booked=0.0)


def client_rule(state: State, z: Vector, solve: Solve, *, gamma: float) -> tuple[State, Vector]:
    """Return the device's next state, by (2)-(3), and its upload: x+ - x, or x+ if not booked."""
    start = Iterates(state.x, state.previous)
    x, previous = solve(start, Subproblem(pull=gamma, centre=z))
    return State(x, previous, 1.0), x - state.booked * state.x


def booked(book: Sum, change: Vector, *, gamma: float, devices: int = 0) -> Sum:
    """Return the sum with a device's ``change``, and with ``devices`` more of its gamma."""
    return Sum(book.total + gamma * change, book.weight + devices * gamma)


def mean(zs: Sequence[Vector]) -> Vector:
    """Return the mean of the servers' models."""
    return sum(zs[1:], zs[0]) / len(zs)


def server_rule(
    zs: Sequence[Vector], books: Sequence[Sum], *, rate: float, reduce: Reduce, repeats: int = 1
) -> list[Vector]:
    """Return the servers' models after ``repeats`` steps, each by (4) or (5) from their mean."""
    for _ in range(repeats):
        w = mean(zs)
        apart = [book.weight * w - book.total for book in books]
        by = [1.0 if reduce == "sum" else book.weight for book in books]
        zs = [w - rate * (a / b) for a, b in zip(apart, by, strict=True)]
    return list(zs)


class BookedStrategy(CloudStrategy):
    """A strategy whose cloud servers keep the sums of all their devices' last models."""

    books_changes = True
    saved: ClassVar[tuple[str, ...]] = ("books",)

    def __init__(self, **options: Unpack[CloudOptions]) -> None:
        super().__init__(**options)
        self._books = [Sum()] * self.servers
        self._next = self._books

    @property
    def books(self) -> list[Sum]:
        """Each cloud server's sum."""
        return self._books

    @books.setter
    def books(self, books: Iterable[Iterable[Vector]]) -> None:
        self._books = [Sum(*book) for book in books]

    def joined(self, client: int, cloud: int) -> None:
        gamma = self.gamma_of(client)
        self._books[cloud] = booked(self._books[cloud], self._origin, gamma=gamma, devices=1)

    def booked(self, uploads: Iterable[Upload]) -> list[Sum]:
        """Return the cloud servers' sums with the uploads taken in."""
        books = list(self._books)
        for upload in uploads:
            client, vector = upload.client, upload.vector
            cloud, gamma = self._cloud_of[client], self.gamma_of(client)
            fresh, known = upload.scalars["fresh"] > 0.0, client in self._acked
            change = vector - self._origin if fresh and not known else vector
            again = int(fresh and known)
            books[cloud] = booked(books[cloud], change, gamma=gamma, devices=again)
        return books

    def sent(self, theta: Vector, client: int) -> Vector:
        """Return the model [d] that ``client`` got, where theta is that of the run."""
        return theta

    def reference(self, theta: Vector, upload: Upload) -> Vector | float:
        fresh = upload.scalars["fresh"] > 0.0  # which uploads its model whole
        return self.sent(theta, upload.client) if fresh else 0.0

    def commit(self, server_round: int) -> None:
        self._books = self._next


class FedBCD(BookedStrategy):
    """FedBCD's server half, sync-cloud; see the module's docstring for the rule and every symbol.

    Takes the arguments of :class:`fl_strategies.clouds.CloudStrategy`.
    """

    algorithm = "fedbcd"
    authors_rule: ClassVar[Mapping[str, Any]] = {"gamma": 4.0, "zeta": 0.0, "box": None}
    authors_local: ClassVar[Mapping[str, Scalar]] = {
        "momentum": 0.9,
        "weight-decay": 1e-4,
        "steps": 5,
        "random-steps": True,
    }

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        self._next = self.booked(uploads)
        total = sum(book.total for book in self._next)
        everyone = Sum(total, sum(book.weight for book in self._next))
        (z,) = server_rule([theta], [everyone], **self.step(server_round))
        return z
