"""What a run takes where it is not told: sensible settings per data set and algorithm."""

from __future__ import annotations

from typing import Any

ANY: dict[str, Any] = {
    "partition": "shards",
    "model": "mlp",
    "fraction": 0.1,
    "solver": "sgd",
    "lr": 0.1,
    "momentum": 0.0,
    "epochs": 5,
    "batch_size": 50,
    "target": 0.9,
}

DATASETS: dict[str, dict[str, Any]] = {
    "digits": {"model": "logistic", "lr": 0.5, "batch_size": 10, "target": 0.9},
    "synthetic": {"model": "logistic", "partition": "natural", "batch_size": 20, "target": 0.8},
    "mnist": {"model": "cnn1", "batch_size": 200, "random_epochs": True, "target": 0.97},
    "fashion_mnist": {"model": "cnn1", "batch_size": 200, "random_epochs": True, "target": 0.8},
    "cifar10": {"model": "cnn2", "batch_size": 50, "random_epochs": True, "target": 0.45},
}
"""Over ``ANY``: the paper's models and targets (FedADMM, Table II)."""

ALGORITHMS: dict[tuple[str, str], dict[str, Any]] = {
    ("fedadmm", "digits"): {"params": "rho=0.1"},
    ("fedbc", "digits"): {"params": "alpha=0.1"},
}
"""Over those, for (algorithm, data set)."""


def defaults(algorithm: str, dataset: str, partition: str) -> dict[str, Any]:
    """Return the default of each key that has one for this data set and algorithm."""
    found = ANY | DATASETS.get(dataset, {})
    return found | ALGORITHMS.get((algorithm, dataset), {})
