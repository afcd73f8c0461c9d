"""What an algorithm's results depend on: variants of it beside the baselines, with equal budgets.

The settings are the board's (``simulations.lab.board``), without published numbers: every rule has
the same learning rates to choose from and the same seeds. What came of them is in
``notebooks/pages/fedadmm-needs.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_strategies import FedADMM
from simulations.lab.board import Rule, Setting

DRAWN = {"random-epochs": "true"}
"""E is drawn from 1..20: about half the local steps."""
PAPER = {"local_start": "client", "tracking": "client"}


def _fedadmm(rho: float, eta: float | str = 1.0, *, authors: bool = False) -> Rule:
    """Return a variant of FedADMM, which is no baseline of the others."""
    form: Mapping[str, Any] = dict(FedADMM.authors_rule) if authors else PAPER
    return Rule("fedadmm", {**form, "rho": rho, "eta": eta}, DRAWN, reference=True)


RULES: dict[str, Rule] = {
    "fedavg": Rule("fedavg"),
    "fedavg-drawn": Rule("fedavg", config=DRAWN),
    "scaffold": Rule("scaffold"),
    "fedadmm": Rule("fedadmm", {**PAPER, "rho": 0.1, "eta": 1.0}, DRAWN),
    "rho-0.01": _fedadmm(0.01),
    "rho-1": _fedadmm(1.0),
    "eta-0.5": _fedadmm(0.1, 0.5),
    "eta-fraction": _fedadmm(0.1, "fraction"),
    "authors": _fedadmm(0.1, authors=True),
    "authors-rho-0.01": _fedadmm(0.01, authors=True),
    "authors-eta-0.5": _fedadmm(0.1, 0.5, authors=True),
    "start-global": Rule(
        "fedadmm", {**PAPER, "local_start": "global", "rho": 0.1, "eta": 1.0}, DRAWN, reference=True
    ),
    "feddyn": Rule("feddyn", {"alpha": 0.1}, DRAWN, reference=True),
    "a-fedpd": Rule("a-fedpd", {"rho": 0.1}, DRAWN, reference=True),
}
"""``fedadmm`` is the paper's form with rho = 0.1 and eta = 1. The names of its variants say what is
different; ``authors`` is the form of the authors' code. ``fedavg-drawn`` takes as many local steps
as FedADMM."""


def fedadmm_needs(dataset: str, model: str, partition: str, rounds: int) -> Setting:
    """Return the variants on 1,000 clients of 60 samples, 100 a round, E = 20, as in Table III."""
    return Setting(
        name=f"fedadmm-needs-{dataset}-{model}-{partition}",
        where=f"FedADMM's variants: {dataset}, {model}, 1,000 clients, {partition}",
        figure="late_accuracy",
        ours="fedadmm",
        rules=RULES,
        published={},
        config={
            "dataset": dataset,
            "clients": 1000,
            "partition": partition,
            "fraction": 0.1,
            "rounds": rounds,
            "epochs": 20,
            "random-epochs": "false",
            "batch-size": {"iid": 0, "shards": 10}[partition],
            "momentum": 0.0,
            "model": model,
            "cohort": "auto",
        },
        rates=(0.1, 0.5),
    )


FEDADMM_NEEDS = [
    fedadmm_needs("fashion_mnist", "logistic", "shards", 30),
    fedadmm_needs("fashion_mnist", "logistic", "iid", 30),
    fedadmm_needs("mnist", "logistic", "shards", 30),
    fedadmm_needs("fashion_mnist", "mlp", "shards", 30),
]
