"""What the laws of all algorithms are stated on: a row of TABLE for each, with its known limit.

Each row says where the algorithm converges to on quadratics under full participation with K steps
of gradient descent, worked out by linear algebra (MOON's by running its equations in NumPy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from problems import (
    DIM,
    Quadratic,
    optimum,
    to_record,
    to_vector,
)

from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FederatedStrategy

STEPS, RATE = 4, 0.1

START = np.array([2.0, -1.0, 0.5, 3.0, -2.0])


def biased(mu: float) -> Callable[[list[Quadratic]], np.ndarray]:
    """The fixed point of averaging after K steps on f_i + (mu/2) ||w - theta||^2."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        left, right, examples = np.zeros((DIM, DIM)), np.zeros(DIM), sum(q.n for q in problems)
        for q in problems:
            # K steps from theta: w = theta - P A (theta - b), P = lr sum_k (I - lr (A + mu I))^k
            shrink = np.eye(DIM) - RATE * (q.A + mu * np.eye(DIM))
            P = RATE * sum(np.linalg.matrix_power(shrink, k) for k in range(STEPS))
            left += q.n / examples * P @ q.A
            right += q.n / examples * P @ q.A @ q.b
        return np.linalg.solve(left, right)

    return limit


def penalised(gamma: float) -> Callable[[list[Quadratic]], np.ndarray]:
    """The z of min sum_i f_i(x_i) + (gamma/2) ||x_i - z||^2: the mean of its x_i."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
        for q in problems:
            # x_i = R (A b + gamma z), so that z - x_i = R A (z - b)
            R = np.linalg.inv(q.A + gamma * np.eye(DIM))
            left, right = left + R @ q.A, right + R @ q.A @ q.b
        return np.linalg.solve(left, right)

    return limit


def pulled(gamma: float, zeta: float) -> Callable[[list[Quadratic]], np.ndarray]:
    """FedBCD-I's fixed point: z is the mean of the x_i that STEPS of (1) and of (2) reproduce."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        unit, none, flat = np.eye(DIM), np.zeros((DIM, DIM)), np.zeros((DIM, 1))
        left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
        for q in problems:
            # both steps as matrices on (x, x_prev, z, 1)
            step = unit - RATE * q.A
            rest = [[none, none, unit, flat], [flat.T, flat.T, flat.T, np.ones((1, 1))]]
            train = [(1 + zeta) * step, -zeta * step, none, (RATE * q.A @ q.b)[:, None]]
            pull = [(1 - gamma) * unit, none, gamma * unit, flat]
            both = [np.block([row, [unit, none, none, flat], *rest]) for row in (train, pull)]
            cycle = np.linalg.matrix_power(both[1], STEPS) @ np.linalg.matrix_power(both[0], STEPS)
            n = 2 * DIM
            stays = np.linalg.solve(np.eye(n) - cycle[:n, :n], cycle[:n, n:])[:DIM]
            left, right = left + unit - stays[:, :DIM], right + stays[:, DIM]
        return np.linalg.solve(left, right)

    return limit


def pooled(problems: list[Quadratic]) -> np.ndarray:
    """Where the mean loss over all examples is least."""
    return optimum(problems, by_examples=True)


def mean_of_minimisers(problems: list[Quadratic]) -> np.ndarray:
    """Where every lambda has come down to 0, each client is at its own minimiser."""
    return np.mean([q.b for q in problems], axis=0)


def contrast_gradient(
    q: Quadratic, w: np.ndarray, theta: np.ndarray, previous: np.ndarray, tau: float
) -> np.ndarray:
    """The gradient at w of MOON's term, in features x_j w_j of an input x."""

    def length(v: np.ndarray) -> np.ndarray:
        return np.linalg.norm(q.X * v, axis=1, keepdims=True)

    def sim(v: np.ndarray) -> np.ndarray:
        return (q.X * w * q.X * v).sum(1, keepdims=True) / length(w) / length(v)

    def slope(v: np.ndarray) -> np.ndarray:  # of sim(v) by the features X w
        return q.X * v / length(w) / length(v) - sim(v) * q.X * w / length(w) ** 2

    wrong = 1 / (1 + np.exp((sim(theta) - sim(previous)) / tau))
    return (q.X * wrong * (slope(previous) - slope(theta)) / tau).mean(0)


def contrasted_steps(
    q: Quadratic, theta: np.ndarray, previous: np.ndarray, mu: float = 1.0, tau: float = 0.5
) -> np.ndarray:
    """What a client of MOON makes of theta in STEPS steps."""
    w = theta
    for _ in range(STEPS):
        w = w - RATE * (q.gradient(w) + mu * contrast_gradient(q, w, theta, previous, tau))
    return w


def contrasted(problems: list[Quadratic]) -> np.ndarray:
    """Where MOON's rounds leave theta and every w_i."""
    theta, examples = START, sum(q.n for q in problems)
    own = [START for _ in problems]
    for _ in range(400):
        own = [contrasted_steps(q, theta, w) for q, w in zip(problems, own, strict=True)]
        theta = sum(q.n / examples * w for q, w in zip(problems, own, strict=True))
    return theta


def meta_biased(inner_rate: float, order: int) -> Callable[[list[Quadratic]], np.ndarray]:
    """The fixed point of plain averaging after K outer steps of MAML, of first or second order."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        left, right, one = np.zeros((DIM, DIM)), np.zeros(DIM), np.eye(DIM)
        for q in problems:
            # w - b = (I - RATE A (I - inner_rate A)^order) (w - b) in each outer step
            adapted = np.linalg.matrix_power(one - inner_rate * q.A, order)
            moved = one - np.linalg.matrix_power(one - RATE * q.A @ adapted, STEPS)
            left += moved
            right += moved @ q.b
        return np.linalg.solve(left, right)

    return limit


def enveloped(lam: float, eta: float, inner_steps: int) -> Callable[[list[Quadratic]], np.ndarray]:
    """pFedMe's fixed point: z is the mean of the uploads of clients whose theta_i stays."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        one, none, flat = np.eye(DIM), np.zeros((DIM, DIM)), np.zeros((DIM, 1))
        left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
        for q in problems:
            # both steps as matrices on (theta, w, 1)
            descend = [
                one - RATE * (q.A + lam * one),
                RATE * lam * one,
                RATE * (q.A @ q.b)[:, None],
            ]
            follow = [eta * lam * one, (1 - eta * lam) * one, flat]
            last = [flat.T, flat.T, np.ones((1, 1))]
            inner = np.block([descend, [none, one, flat], last])
            outer = np.block([[one, none, flat], follow, last])
            cycle = np.linalg.matrix_power(
                outer @ np.linalg.matrix_power(inner, inner_steps), STEPS
            )
            theta = np.linalg.solve(one - cycle[:DIM, :DIM], cycle[:DIM, DIM:])
            upload = cycle[DIM:-1, DIM:] + cycle[DIM:-1, :DIM] @ theta
            left, right = left + one - upload[:, :DIM], right + upload[:, DIM]
        return np.linalg.solve(left, right)

    return limit


def fair(q: float) -> Callable[[list[Quadratic]], np.ndarray]:
    """q-FedAvg's fixed point: ``biased``'s, with F_i^q for a client's weight."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        theta, one = START, np.eye(DIM)
        for _ in range(500):
            left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
            for problem in problems:
                # theta - w = (I - (I - lr A)^K) (theta - b)
                moved = one - np.linalg.matrix_power(one - RATE * problem.A, STEPS)
                weight = problem.value(theta) ** q
                left, right = left + weight * moved, right + weight * moved @ problem.b
            theta = (theta + np.linalg.solve(left, right)) / 2
        return theta

    return limit


@dataclass(frozen=True)
class Row:
    """One algorithm: its strategy's arguments, its limit, and other values for each knob."""

    name: str
    limit: Callable[[list[Quadratic]], np.ndarray]
    knobs: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What else must be set for a knob to matter."""
    policies: frozenset[str] = frozenset()
    """Knobs that matter only when something fails, tested in the algorithm's own file."""
    partial: bool = True
    """Whether a round can do with some of the clients."""
    updates: int = 2
    """Of running statistics, by a client with batches of 4, 4 and 1 examples in an epoch."""
    local: dict[str, Any] = field(default_factory=dict)
    """How its clients train, whatever a test asks for."""
    rounds: int = 100
    """In which it comes within 1e-9 of its limit on the problems of the first law."""

    def __str__(self) -> str:
        return self.name

    def strategy(self, **options: Any) -> FederatedStrategy:
        if not self.partial:
            options.pop("fraction_train", None)
        own_steps = options.get("oracle") == "II"
        options["local"] = {} if own_steps else options["local"] | self.local
        return STRATEGIES[self.name](**{"fraction_evaluate": 0.0, **self.knobs, **options})


CLOUDS: dict[str, Any] = {
    "gamma": 0.4,
    "eta_z": 0.2,
    "zeta": 0.3,
    "box": 3.0,
    "reduce": "sum",
    "repeats": 2,
    "servers": 2,
    "assignment": "blocks",
}

CLOUDS_NEED: dict[str, dict[str, Any]] = {
    "reduce": {"eta_z": 0.2},
    "servers": {"fraction_train": 0.25},
    "assignment": {"servers": 2, "fraction_train": 0.5},
}

DUAL = {"alpha": 0.02, "alpha_gamma": 0.5, "lambda_max": 2.0, "dual_momentum": 0.5}

OTHER_DUAL = {
    "alpha": 0.01,
    "alpha_gamma": 5.0,
    "gamma": 5.0,
    "lambda_min": 0.5,
    "lambda_max": 0.1,
    "dual_momentum": 0.0,
}

DUAL_NEEDS: dict[str, dict[str, Any]] = {
    "alpha": {"dual_momentum": 0.0},
    "alpha_gamma": {"dual_momentum": 0.0},
    "gamma": {"alpha_gamma": None},  # a fixed gamma takes no steps
}

TABLE = [
    Row(
        "fedsgd",
        pooled,
        updates=1,
        local={"solver": "gd", "epochs": 1, "random-epochs": False},
        rounds=70,
    ),
    Row("fedavg", biased(0.0), others={"weights": "uniform"}, rounds=20),
    Row(
        "fedprox",
        biased(0.5),
        {"mu": 0.5},
        {"mu": 1.0, "weights": "uniform"},
        policies=frozenset({"proximal_mu"}),
        rounds=22,
    ),
    Row("fednova", biased(0.0), others={"mu": 0.5}, rounds=20),
    Row("scaffold", optimum, others={"eta_g": 0.5, "option": "I", "num_clients": 9}, rounds=40),
    Row("q-fedavg", fair(1.0), others={"q": 2.0}, rounds=125),
    Row(
        "fedadmm",
        optimum,
        {"rho": 0.5},
        {
            "rho": 1.0,
            "eta": 0.5,
            "local_start": "global",
            "tracking": "global",
            "newcomer": "origin",
            "num_clients": 9,
        },
        beside={"newcomer": {"fraction_train": 0.5}, "num_clients": {"eta": "fraction"}},
        rounds=240,
    ),
    Row("feddyn", optimum, {"alpha": 1.0}, {"alpha": 2.0, "num_clients": 9}, rounds=240),
    Row(
        "fedpd",
        optimum,
        {"eta": 0.5},
        {
            "eta": 1.0,
            "p": 0.5,
            "oracle": "II",
            "x0_rule": "authors",
            "gamma": 2.0,
            "inner_steps": 4,
            "inner_batch": 0,
            "full_every": 2,
        },
        beside={
            "gamma": {"oracle": "II", "gamma": 1.0},
            **{knob: {"oracle": "II"} for knob in ("inner_steps", "inner_batch", "full_every")},
        },
        policies=frozenset({"missing", "num_clients"}),
        partial=False,
        rounds=70,
    ),
    Row(
        "fedbc",
        mean_of_minimisers,
        DUAL,
        OTHER_DUAL | {"local_start": "global"},
        DUAL_NEEDS,
        rounds=255,
    ),
    Row(
        "per-fedbc",
        meta_biased(0.05, 1),
        DUAL | {"inner_rate": 0.05},
        OTHER_DUAL | {"inner_rate": 0.1, "inner_steps": 2},
        DUAL_NEEDS,
        updates=4,
        rounds=55,
    ),
    Row("fedbcd", penalised(1.0), {"box": None}, CLOUDS, CLOUDS_NEED, rounds=50),
    Row(
        "fedbcd-i",
        pulled(0.2, 0.9),
        {"box": None},
        CLOUDS | {"fraction_available": 1.0, "offline_rounds": 1},
        CLOUDS_NEED
        | {
            "fraction_available": {"fraction_train": 0.25},
            "offline_rounds": {"fraction_train": 0.25},
        },
        rounds=100,
    ),
    Row(
        "fedbcd-async",
        penalised(1.0),
        {"box": None},
        CLOUDS | {"first": 1, "rigorous": True, "staleness": 1, "order": "arrival"},
        CLOUDS_NEED
        | {"first": {"servers": 4}}
        | {name: {"servers": 4, "first": 1} for name in ("rigorous", "staleness", "order")},
        rounds=50,
    ),
    Row(
        "ditto", biased(0.0), others={"weights": "uniform"}, policies=frozenset({"lam"}), rounds=20
    ),
    Row(
        "moon",
        contrasted,
        {"mu": 1.0, "tau": 0.5},
        {"mu": 2.0, "tau": 1.0, "weights": "uniform"},
        rounds=20,
    ),
    Row(
        "per-fedavg",
        meta_biased(0.05, 2),
        {"inner_rate": 0.05},
        {"inner_rate": 0.1, "meta_gradient": "first-order", "weights": "examples"},
        updates=6,
        rounds=30,
    ),
    Row(
        "pfedme",
        enveloped(2.0, 0.2, 5),
        {"lam": 2.0, "eta": 0.2},
        {
            "lam": 4.0,
            "eta": 0.1,
            "beta": 0.5,
            "inner_steps": 10,
            "local_start": "global",
            "weights": "examples",
        },
        updates=10,
        rounds=25,
    ),
]

every_algorithm = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


def local(**others: Any) -> dict[str, Any]:
    return {"solver": "gd", "lr": RATE, "epochs": STEPS} | others


def train(strategy: FederatedStrategy, on: InProcessGrid, rounds: int) -> np.ndarray:
    """Return the model [5] after ``rounds``."""
    return to_vector(strategy.start(on, to_record(START), rounds).arrays)


class Shuffled(InProcessGrid):
    """Replies arrive in reverse."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return list(super().send_and_receive(messages, timeout=timeout))[::-1]
