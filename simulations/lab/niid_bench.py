"""NIID-Bench: Li, Diao, Chen, He, ICDE 2022.

All parties train in each of 50 rounds, 10 epochs with batches of 64, momentum 0.9. SCAFFOLD has
none here: ours takes plain steps alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulations.lab.settings import Rule, Setting, centralised

MOMENTUM = {"momentum": 0.9}
RULES: Mapping[str, Rule] = {
    "fedavg": Rule("fedavg", config=MOMENTUM),
    "fedprox": Rule("fedprox", {"mu": 0.01}, MOMENTUM),
    "scaffold": Rule("scaffold", config={"momentum": 0.0}),
    "fednova": Rule("fednova", config=MOMENTUM),
}
ROUNDS: Mapping[str, Any] = {
    "fraction": 1.0,
    "rounds": 50,
    "epochs": 10,
    "random-epochs": "false",
    "batch-size": 64,
}

TABLE_III = {
    "mnist": {"fedavg": 0.989, "fedprox": 0.989, "scaffold": 0.990, "fednova": 0.989},
    "fashion_mnist": {"fedavg": 0.881, "fedprox": 0.881, "scaffold": 0.884, "fednova": 0.885},
}


def label_skew(dataset: str) -> Setting:
    """Return a row of Table III: 10 parties, label skew by Dirichlet(0.5)."""
    return Setting(
        name=f"niid-bench-{dataset}",
        where=f"NIID-Bench, Table III: {dataset}, Dirichlet(0.5)",
        figure="final_accuracy",
        ours="",
        rules={
            **RULES,
            "moon": Rule("moon", {"mu": 1.0}, MOMENTUM),
            "centralised": centralised(**MOMENTUM),
        },
        published=TABLE_III[dataset],
        config={
            **ROUNDS,
            "dataset": dataset,
            "model": "cnn-6-16",
            "partition": "dirichlet",
            "partition-params": "alpha=0.5",
            "clients": 10,
            "lr": 0.01,
        },
        seeds=(1, 2, 3),
    )


RATES = (0.001, 0.01, 0.1)
FOUR_PARTIES = {"dataset-params": "clients=4"}
"""The generator draws as many parties as there are clients, unless it is told otherwise."""


def fcube(partition: str) -> Setting:
    """Return FCUBE with its four parties (``natural``), or all its samples split evenly (``iid``).

    The model is that of the authors' code (model.py), a linear one. Rates are chosen among that of
    their script (fcube.sh, 0.01), a tenth of it and ten times it; FedProx's mu among the script's
    four. The paper's accuracies were not available to us.
    """
    return Setting(
        name=f"niid-bench-fcube-{partition}",
        where=f"NIID-Bench: FCUBE, 4 parties, {partition}",
        figure="final_accuracy",
        ours="",
        rules={
            **RULES,
            "fedprox": Rule(
                "fedprox", {}, MOMENTUM, tune={"lr": RATES, "mu": (0.001, 0.01, 0.1, 1.0)}
            ),
            "centralised": centralised(**MOMENTUM, **FOUR_PARTIES),
        },
        published={},
        config={
            **ROUNDS,
            "dataset": "fcube",
            "model": "logistic",
            "partition": partition,
            "clients": 4,
        },
        tune={"lr": RATES},
        seeds=(1, 2, 3),
    )


SETTINGS = [*map(label_skew, TABLE_III), *map(fcube, ("natural", "iid"))]
