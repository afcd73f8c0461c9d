"""FedBCD: personalized models, tied to the global model by a quadratic penalty.

The problem is, over the devices' models x_i in a box X and the global model z,

    min  sum_i f_i(x_i) + (gamma_i/2) ||x_i - z||^2                             (1)

by block coordinate descent: active devices move their x_i, then z moves towards all of them. Round
with the model z received, for each active device i, K_i ~ U{1..K} times (ASPG):

    e  = x + zeta (x - x_prev)                                                  (2)
    x+ = Proj_X( e - eta_x ( grad f_i(e) + gamma_i (e - z) ) )                  (3)

and at the server K_z times, over ALL devices (with the last x_i of those that were not active):

    z <- z - eta_z sum_i gamma_i (z - x_i)                              "sum"   (4)
    z <- z - eta_z (z - sum_i gamma_i x_i / sum_i gamma_i)              "mean"  (5)

x_i, x_prev  device's model [d] and the iterate before it, kept by the device between rounds, so
             that its momentum continues; X = [-box, box]^d
z            global model [d]; a fixed point of (2)-(5) is a stationary point of (1)
K            local epochs (``local={"epochs": 5, "random-epochs": True}``, the paper's experiments),
             or mini-batches (``{"steps": 5, "random-steps": True}``, its Algorithm 1)
eta_x        ``lr``; (2)-(3) are the step of the solver ``sgd`` or ``gd``. Another solver takes its
             own step from e instead of (3)'s gradient step, and is projected in the same way

The server keeps S = sum_i gamma_i x_i, not every x_i: devices upload x_i+ - x_i, and a device whose
reply was lost undoes its change, so that S stays the sum of the devices' x_i.

- A device that never took part counts with x_i = x^0, the initial model. Its first upload is the
  whole x_i, and the server removes x^0 from S. The device starts from the received z, because x^0
  does not travel again (the paper starts it from x^0, which is the same in round 1).
- A device that lost its state cannot subtract what it last sent. It counts as one more device: its
  x_i is added to S, and its gamma_i to sum gamma_i. The old device remains in S with its last x_i,
  as a device that is never active again. So S stays a sum over devices, and each loss biases z by
  one part in the number of devices. ``lost_state="refuse"`` leaves such a device out.

(4) is the paper's; (5), the default, is its authors' code, and is (4) with eta_z / sum gamma_i. (4)
needs eta_z gamma |Q| <= 1 (Assumption 4); |Q| is the number of all devices here, because the
paper's synchronous form has one server. The bound is checked again when a device is added or begins
anew: a device without room does not take part, or its reply is left out as with
``lost_state="refuse"``.

Deviation from the paper, which draws the samples of each step (3) anew: an epoch's mini-batches are
a permutation of the device's samples.

Other deviations of the authors' code, each an option: a penalty gamma ||x - z||^2 with gamma = 2,
which under (5) is gamma = 4 here; K counts mini-batches; heavy ball 0.9 with weight decay 1e-4
instead of (2); no box: ``FedBCD.authors_rule``, ``authors_local``. The paper's ``paper_rule`` has
no eta_z: the printed 0.5 is above Assumption 4's bound from three devices on.

Reference: Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma, "Federated Block Coordinate Descent Scheme
for Learning Global and Personalized Models", AAAI 2021, Algorithm 1 and eqs. 4-5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from fl_strategies.bcd.clouds import PAPER_LOCAL, CloudState, CloudStrategy, Reduce
from fl_strategies.bcd.mixing import mix
from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Scalar
from fl_strategies.core.oracle import Oracle, Solved, Step
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Number, Vector
from fl_strategies.server.algorithm import Card, Next


class State(NamedTuple):
    """What a device keeps: x, the iterate before it, and 1 if the server's sum holds x."""

    x: Vector
    previous: Vector
    recorded: float


class Sum(NamedTuple):
    """What a server keeps of its devices: S = sum_i gamma_i x_i [d], and sum_i gamma_i."""

    total: Vector = 0.0
    weight: float = 0.0


def first_state(z: Vector) -> State:
    """Return the state of a device that has never taken part, or that lost its state."""
    return State(x=z, previous=z, recorded=0.0)


def work(solved: Solved, by_steps: bool) -> Number:
    """Return K, the work of a solve: its mini-batch steps, or its epochs where they are counted."""
    return solved.steps if by_steps or solved.epochs is None else solved.epochs


def client_rule(state: State, z: Vector, oracle: Oracle, *, gamma: float) -> Step:
    """Return the device's next state, by (2)-(3), and its upload: x+ - x, or x+ if not recorded."""
    pulled = Subproblem(pull=gamma, centre=z)
    solved = oracle.solve(state.x, pulled, previous=state.previous)
    scalars = {"work": work(solved, oracle.counts_steps), "fresh": 1 - state.recorded}
    upload = solved.w - state.recorded * state.x
    return Step(upload, State(solved.w, solved.previous, 1.0), scalars, solved)


def added(before: Sum, change: Vector, *, gamma: float, devices: int = 0) -> Sum:
    """Return the sum with a device's ``change``, and with ``devices`` more of its gamma."""
    return Sum(before.total + gamma * change, before.weight + devices * gamma)


def server_rule(
    zs: Sequence[Vector],
    sums: Sequence[Sum],
    *,
    rate: float,
    reduce: Reduce,
    repeats: int = 1,
    weights: Sequence[tuple[float, ...]] = ((1.0,),),
) -> list[Vector]:
    """Return the servers' models after ``repeats`` steps by (4) or (5).

    Each step of server n is from the mean of all models by the n-th of ``weights``. A sum over
    nobody makes no step.
    """
    for _ in range(repeats):
        means = {row: mix(zs, row) for row in {*weights}}
        ws = [means[row] for row in weights]
        apart = [s.weight * w - s.total for w, s in zip(ws, sums, strict=True)]
        by = [1.0 if reduce == "sum" else s.weight or 1.0 for s in sums]
        zs = [w - rate * (a / b) for w, a, b in zip(ws, apart, by, strict=True)]
    return list(zs)


@dataclass(frozen=True)
class ServerState(CloudState):
    """What the server keeps in addition: each cloud server's sum."""

    sums: tuple[Sum, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", tuple(Sum(*fields) for fields in self.sums))


Kept = TypeVar("Kept", bound=ServerState)


class SummingStrategy(CloudStrategy):
    """A strategy whose cloud servers keep the sums of all their devices' last models."""

    accumulates_changes = True
    compresses = False
    paper_rule: ClassVar[Mapping[str, Any]] = {
        "gamma": 1.0,
        "zeta": 0.9,
        "box": 2.0,
        "reduce": "sum",
    }
    paper_local: ClassVar[Mapping[str, Scalar]] = PAPER_LOCAL
    authors_rule: ClassVar[Mapping[str, Any]] = {
        "gamma": 4.0,
        "zeta": 0.0,
        "box": None,
        "reduce": "mean",
    }
    authors_local: ClassVar[Mapping[str, Scalar]] = {
        "momentum": 0.9,
        "weight-decay": 1e-4,
        "steps": 5,
        "random-steps": True,
    }

    @property
    def scalar_bounds(self) -> Mapping[str, tuple[float, float]]:
        return {**super().scalar_bounds, "fresh": (0.0, 1.0)}

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState({}, theta, sums=(Sum(),) * self.servers)

    def joined(self, state: Any, client: int) -> Any:
        gamma, sums = self.gamma_of(client), list(state.sums)
        cloud = state.cloud_of[client]
        sums[cloud] = added(sums[cloud], state.origin, gamma=gamma, devices=1)
        return replace(state, sums=tuple(sums))

    def weight_of(self, state: ServerState, cloud: int) -> float:
        weight: float = state.sums[cloud].weight
        return weight

    def unusable(self, state: Any, round: Round, uploads: Iterable[Upload]) -> Mapping[int, str]:
        """Return which devices lost their state and would be one more than the bound allows."""
        anew: dict[int, float] = {}
        faults = {}
        for upload in uploads:
            if upload.newcomer or upload.scalars["fresh"] == 0.0:
                continue
            cloud, gamma = state.cloud_of[upload.client], self.gamma_of(upload.client)
            among = [cloud] if self.step_per_cloud else list(anew)
            begun = sum(anew.get(n, 0.0) for n in among)
            try:
                self.check_one_more(state, cloud, begun + gamma)
            except ValueError as error:
                faults[upload.client] = f"it lost its state and would be one more device: {error}"
            else:
                anew[cloud] = anew.get(cloud, 0.0) + gamma
        return faults

    def with_uploads(self, state: Kept, uploads: Iterable[Upload]) -> Kept:
        """Return the state with the uploads added to the cloud servers' sums."""

        sums = list(state.sums)
        for upload in uploads:
            vector, fresh = upload.vector, upload.scalars["fresh"] > 0.0
            cloud, gamma = state.cloud_of[upload.client], self.gamma_of(upload.client)
            change = vector - state.origin if fresh and upload.newcomer else vector
            again = int(fresh and not upload.newcomer)
            sums[cloud] = added(sums[cloud], change, gamma=gamma, devices=again)
        return replace(state, sums=tuple(sums))

    def reference(self, state: Any, round: Round, upload: Upload) -> Vector | float:
        fresh = upload.scalars["fresh"] > 0.0  # which uploads its model whole
        return round.received if fresh else 0.0


class FedBCD(SummingStrategy):
    """FedBCD's server half, sync-cloud; see the module's docstring for the rule."""

    algorithm = "fedbcd"
    client_half = ClientHalf(client_rule, State, first_state, own="x")
    card = Card(
        "FedBCD",
        "personalized models, tied to the global model by a penalty",
        when="each client needs a personalized model",
        keeps="model, last iterate",
        paper="Wu et al., AAAI 2021",
        arxiv="2012.13900",
    )

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        state = self.with_uploads(state, uploads)
        total = sum(cloud.total for cloud in state.sums)
        everyone = Sum(total, sum(cloud.weight for cloud in state.sums))
        (z,) = server_rule([round.theta], [everyone], **self.step(round.number))
        return z, *self.timed(state, round, uploads)
