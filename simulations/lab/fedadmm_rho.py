"""FedADMM with rho and learning rate chosen together: settings of the board.

The paper's data and clients (MNIST, 100 clients of two label-sorted shards, 10 a round) with a
small model and the same five local epochs for every rule, so that a round is equal work for all.
The hyperparameters are chosen in 25 rounds; the runs that are compared go on to 60.
"""

from __future__ import annotations

from typing import Any

from simulations.lab.comparisons import FEDADMM_PAPER
from simulations.lab.settings import FIXED, Rule, Setting
from simulations.lab.tuners import Space

RATES: Space = {"lr": (0.03, 0.1, 0.3)}
CHOICE, EARLY = 25, 15
"""Rounds of the runs that choose, and of the early gain; schedules change after them."""


def _fedadmm(**params: Any) -> Rule:
    """Return a variant with given rho, which is no baseline."""
    return Rule("fedadmm", {"rho": 1.0, "eta": 1.0, **FEDADMM_PAPER, **params}, FIXED, True)


RULES: dict[str, Rule] = {
    "fedadmm": _fedadmm()._replace(reference=False, tune={"rho": (0.1, 0.3, 1.0), **RATES}),
    "fedavg": Rule("fedavg", config=FIXED),
    "fedprox": Rule("fedprox", config=FIXED, tune={"mu": (0.01, 0.1), **RATES}),
    "rho-0.01": _fedadmm(rho=0.01),
    "eta-later-0.3": _fedadmm(eta={1: 1.0, CHOICE + 1: 0.3}),
    "eta-later-0.1": _fedadmm(eta={1: 1.0, EARLY + 1: 0.1}),
    "rho-later-0.1": _fedadmm(rho={1: 1.0, EARLY + 1: 0.1}, eta={1: 1.0, EARLY + 1: 0.1}),
    "feddyn": Rule("feddyn", {"alpha": 1.0}, FIXED, True),
}
"""``rho-0.01`` has the paper's rho, ``eta-later-0.3`` rho = 1 and, after 25 rounds, eta = 0.3;
``eta-later-0.1`` has eta = |S|/m after 15 rounds, and ``rho-later-0.1`` rho = 0.1 in addition."""


def rho_and_rate(model: str) -> list[Setting]:
    """Return the rounds to 88 %, and the accuracy at the end of the same runs."""
    first = Setting(
        name=f"fedadmm-rho-{model}-rounds",
        where=f"FedADMM, rho and rate chosen together: MNIST, 100 clients of two shards, {model}",
        figure="rounds_to_target",
        ours="fedadmm",
        rules=RULES,
        published={},
        config={
            "dataset": "mnist",
            "clients": 100,
            "partition": "shards",
            "fraction": 0.1,
            "rounds": 60,
            "epochs": 5,
            "batch-size": 50,
            "momentum": 0.0,
            "model": model,
            "target": 0.88,
            "gradient-norm": "false",
            "stack": "auto",
        },
        tune=RATES,
        seeds=(1, 2, 3),
    )
    short = {**first.config, "rounds": CHOICE}
    first = first._replace(tuned_by=first._replace(name=f"{first.name}-choice", config=short))
    end = first._replace(
        name=f"fedadmm-rho-{model}-end",
        where=f"{first.where}, after 60 rounds",
        figure="late_accuracy",
        runs_in=first,
    )
    return [first, end]


SETTINGS = [*rho_and_rate("logistic"), *rho_and_rate("mlp")]
