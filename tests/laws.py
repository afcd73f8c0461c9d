"""What the laws of all algorithms are stated on: a row of TABLE for each, with its known limit.

An algorithm has a row because it is in ``STRATEGIES``. By default it is held to the optimum of the
mean loss, and each hyperparameter to another value in its declared range; ROWS say what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from conftest import SAMPLE
from flwr.app import Message
from limits import (
    RATE,
    START,
    STEPS,
    attentive,
    biased,
    contrasted,
    enveloped,
    fair,
    meta_biased,
    penalised,
    pooled,
    pulled,
)
from problems import Quadratic, optimum, to_record, to_vector

from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FederatedStrategy
from fl_strategies.core.hyperparameters import Hyperparameter
from fl_strategies.solvers.local import idle
from fl_strategies.solvers.own_steps import not_for_fine_tuning

Made = TypeVar("Made", bound=FederatedStrategy)


def another(name: str, declared: Hyperparameter, value: Any) -> Any:
    """Return a value that the hyperparameter may have, and which is not ``value``."""
    if declared.kind is bool:
        return not value
    if declared.kind is str:
        return next(word for word in declared.words if word != value)
    fresh = [9] if declared.kind is int else [0.5, 0.25]
    usual = value if isinstance(value, int | float) else 0
    for number in (*([2 * usual, usual / 2] if usual else []), *fresh):
        try:
            declared.check(name, number)
        except ValueError:
            continue
        return number
    raise ValueError(f"a row of ROWS must have another {name} than {value}")


@dataclass(frozen=True)
class Row:
    """An algorithm: its strategy's arguments, its limit, another value of each hyperparameter."""

    name: str
    limit: Callable[[list[Quadratic]], np.ndarray] = optimum
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    """Another value of each; those that are not given are ``another``'s."""
    needs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What else must be set for a hyperparameter to matter."""
    policies: frozenset[str] = frozenset()
    """Hyperparameters that matter only when something fails, tested in the algorithm's own file."""
    partial: bool = True
    """Whether a round can do with some of the clients."""
    updates: int = 3
    """Of running statistics, by a client with batches of 4, 4 and 1 examples in an epoch."""
    local: dict[str, Any] = field(default_factory=dict)
    """How its clients train, whatever a test asks for."""
    rounds: int = 240
    """In which it comes within 1e-9 of its limit on the problems of the first law."""

    def __post_init__(self) -> None:
        declared = STRATEGIES[self.name].declarations
        found = {
            name: another(name, declared[name], self.hyperparameters.get(name, default))
            for name, default in STRATEGIES[self.name].hyperparameters().items()
            if name not in self.policies and name not in self.others
        }
        object.__setattr__(self, "others", found | self.others)

    def __str__(self) -> str:
        return self.name

    def strategy(self, **options: Any) -> FederatedStrategy:
        if not self.partial:
            options.pop("fraction_train", None)
        settings = options["local"] | self.local
        useless = [] if STRATEGIES[self.name].uses_local else not_for_fine_tuning(settings)
        options["local"] = {n: value for n, value in settings.items() if n not in useless}
        return STRATEGIES[self.name](
            **{"fraction_evaluate": 0.0, **self.hyperparameters, **options}
        )


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

ASYNC: dict[str, Any] = {
    "first": 1,
    "rigorous": True,
    "staleness": 1,
    "order": "arrival",
    "mixing": (tuple(tuple(float(n == m) for m in range(4)) for n in range(4)),),  # the identity
}

ASYNC_NEED: dict[str, dict[str, Any]] = {
    "first": {"servers": 4},
    **{name: {"servers": 4, "first": 1} for name in ("rigorous", "staleness", "order")},
    "mixing": {"servers": 4, "first": 3},
}

OFFLINE: dict[str, Any] = {"fraction_available": 1.0, "offline_rounds": 1}

OFFLINE_NEED: dict[str, dict[str, Any]] = {name: {"fraction_train": 0.25} for name in OFFLINE}

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

ROWS = [
    Row(
        "fedsgd",
        pooled,
        updates=1,
        local={"solver": "gd", "epochs": 1, "random-epochs": False, "batch-size": 0},
        rounds=70,
    ),
    Row("fedavg", biased(0.0), rounds=20),
    Row(
        "fedprox",
        biased(0.5),
        {"mu": 0.5},
        policies=frozenset({"proximal_mu"}),
        rounds=22,
    ),
    Row("fednova", biased(0.0), rounds=20),
    Row("scaffold", others={"eta_g": 0.5}, rounds=40),
    Row(
        "proxskip",
        hyperparameters={"p": 0.25},
        updates=4,  # steps, as drawn
        local={"epochs": 1, "random-epochs": False, "steps": 0},
        rounds=120,
    ),
    Row("q-fedavg", fair(1.0), rounds=125),
    Row(
        "fedadmm",
        optimum,
        {"rho": 0.5},
        {"eta": 0.5, "newcomer": "origin"},
        needs={"newcomer": {"fraction_train": 0.5}, "num_clients": {"eta": "fraction"}},
        rounds=240,
    ),
    Row("fedadmm-insa", hyperparameters={"rho": 0.5}, others={"convexity": 10.0}),
    Row("feddyn", hyperparameters={"alpha": 1.0}),
    Row("a-fedpd", hyperparameters={"rho": 1.0}),
    Row(
        "fedpd",
        optimum,
        {"eta": 0.5},
        policies=frozenset({"missing", "num_clients"}),
        partial=False,
        rounds=70,
    ),
    Row(
        "fedpd-vr",
        optimum,
        {"eta": 0.3, "gamma": 0.1, "inner_batch": 4, "full_every": 2},
        policies=frozenset({"missing", "num_clients"}),
        partial=False,
        updates=8,
        rounds=100,
    ),
    Row(
        "fedbc",
        biased(0.0, uniform=True),  # every lambda is 0 in the end
        DUAL,
        OTHER_DUAL | {"local_start": "client"},
        DUAL_NEEDS,
        rounds=255,
    ),
    Row(
        "per-fedbc",
        meta_biased(0.05, 1),
        DUAL | {"inner_rate": 0.05},
        OTHER_DUAL | {"inner_rate": 0.1, "inner_steps": 2},
        DUAL_NEEDS,
        updates=6,
        rounds=55,
    ),
    Row("fedbcd", penalised(1.0), {"box": None}, CLOUDS, CLOUDS_NEED, rounds=50),
    Row(
        "fedbcd-i",
        pulled(0.2, 0.9),
        {"box": None},
        CLOUDS | OFFLINE,
        CLOUDS_NEED | OFFLINE_NEED,
        rounds=100,
    ),
    Row(
        "fedbcd-async",
        penalised(1.0),
        {"box": None},
        CLOUDS | ASYNC,
        CLOUDS_NEED | ASYNC_NEED,
        rounds=50,
    ),
    Row(
        "fedbcd-i-async",
        pulled(0.2, 0.9),
        {"box": None},
        CLOUDS | ASYNC | OFFLINE,
        CLOUDS_NEED | ASYNC_NEED | OFFLINE_NEED,
        rounds=100,
    ),
    Row("ditto", biased(0.0), policies=frozenset({"lam"}), rounds=20),
    Row("fedrep", biased(0.0), policies=frozenset({"head_epochs"}), rounds=20),
    Row("fedbabu", biased(0.0), rounds=20),
    Row(
        "fedamp",
        attentive(0.5, 0.8, 30.0),
        {"lam": 0.5, "alpha": 0.8, "sigma": 30.0},
        policies=frozenset({"memory"}),
    ),
    Row(
        "apfl",
        biased(0.0),
        {"adaptive": False},
        policies=frozenset({"alpha", "adaptive"}),
        updates=6,
        rounds=20,
    ),
    Row(
        "moon",
        contrasted,
        {"mu": 1.0, "tau": 0.5},
        rounds=20,
    ),
    Row(
        "per-fedavg",
        meta_biased(0.05, 2),
        {"inner_rate": 0.05},
        updates=9,
        rounds=30,
    ),
    Row(
        "pfedme",
        enveloped(2.0, 0.2, 5),
        {"lam": 2.0, "eta": 0.2},
        {"eta": 0.1},
        updates=15,
        rounds=25,
    ),
]

TABLE = [{row.name: row for row in ROWS}.get(name) or Row(name) for name in STRATEGIES]


def _refusing(**settings: Any) -> set[str]:
    """Return the names of the algorithms that refuse these local settings."""
    refused = set()
    for row in TABLE:
        try:
            STRATEGIES[row.name](**row.hyperparameters, local=settings)
        except ValueError:
            refused.add(row.name)
    return refused


OWN_STEPS = _refusing(sam=0.1)
"""Algorithms whose clients take gradient steps of their own, not the local solver's."""
PLAIN_STEPS = _refusing(solver="adam")
"""Algorithms that are defined by plain gradient steps, or have their own."""

REVIEWED = {
    "fedsgd", "fedavg", "fedprox", "fednova", "scaffold", "q-fedavg", "fedadmm", "feddyn",
    "a-fedpd", "fedpd", "fedpd-vr", "fedbc", "per-fedbc", "fedbcd", "fedbcd-i", "fedbcd-async",
    "fedbcd-i-async", "ditto", "fedrep", "fedbabu", "apfl", "fedamp",
    "moon", "per-fedavg", "pfedme",
}  # fmt: skip
"""Algorithms of which tests know the answer; a new one may give either."""

every_algorithm = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
one_of_each_mechanism = pytest.mark.parametrize(
    "row", [row for row in TABLE if row.name in SAMPLE], ids=lambda row: row.name
)
"""For laws of what is around algorithms, in which those of one mechanism do not differ."""


def local(**others: Any) -> dict[str, Any]:
    """Return ``STEPS`` full-batch steps, but for ``others``, without what these make idle."""
    made = {"solver": "gd", "lr": RATE, "epochs": STEPS} | others
    return {name: value for name, value in made.items() if name not in idle(made)}


def quiet(make: Callable[..., Made], **options: Any) -> Made:
    """Return a strategy that trains by :func:`local` and does not evaluate."""
    return make(**{"fraction_evaluate": 0.0, "local": local(), **options})


def train(strategy: FederatedStrategy, on: InProcessGrid, rounds: int) -> np.ndarray:
    """Return the model [5] after ``rounds``."""
    return to_vector(strategy.start(on, to_record(START), rounds).arrays)


def rounds_of(strategy: FederatedStrategy, name: str) -> list[float]:
    """Return this number of each round of training."""
    rounds = strategy.result.train_metrics_clientapp.values()
    return [float(row[name]) for row in rounds]  # type: ignore[arg-type]


class Shuffled(InProcessGrid):
    """Replies arrive in reverse."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return list(super().send_and_receive(messages, timeout=timeout))[::-1]
