"""The default settings of runs, per data set and algorithm."""

from __future__ import annotations

from typing import Any

from fl_strategies.solvers.local import RATES, TAKES

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
    "random_epochs": "false",
    "penalty": 0.0,
    "gradient_norm": "false",
}

FEDPD: dict[str, Any] = {
    "model": "binary",
    "partition": "natural",
    "fraction": 1.0,
    "solver": "gd",
    "lr": 0.07,
    "epochs": 8,
    "penalty": 0.1,
    "gradient_norm": "true",
}
"""The problem of FedPD, Fig. 2 (for the figure's own settings: ``simulations.lab.reproduce``)."""

FEMNIST: dict[str, Any] = {
    "model": "cnn-leaf",
    "partition": "natural",
    "lr": 0.05,
    "batch_size": 20,
}
NEWS: dict[str, Any] = {
    "model": "distilbert",
    "partition": "dirichlet",
    "lr": 0.05,
    "epochs": 1,
    "batch_size": 64,
}

DATASETS: dict[str, dict[str, Any]] = {
    "digits": {"model": "logistic", "lr": 0.5, "batch_size": 10, "target": 0.9},
    "synthetic": {"model": "logistic", "partition": "natural", "batch_size": 20, "target": 0.8},
    "mnist": {"model": "cnn1", "batch_size": 200, "random_epochs": "true", "target": 0.97},
    "fashion_mnist": {"model": "cnn1", "batch_size": 200, "random_epochs": "true", "target": 0.8},
    "cifar10": {"model": "cnn2", "batch_size": 50, "random_epochs": "true", "target": 0.45},
    "cifar100": {
        "model": "resnet18",
        "partition": "dirichlet",
        "batch_size": 64,
        "epochs": 1,
        "target": 0.4,
    },
    "femnist": FEMNIST | {"target": 0.75},
    "mnist_writers": FEMNIST | {"target": 0.95},
    "shakespeare": {
        "model": "lstm",
        "partition": "natural",
        "lr": 0.8,
        "epochs": 1,
        "batch_size": 20,
        "target": 0.4,
    },
    "ag_news": NEWS | {"target": 0.85},
    "dbpedia": NEWS | {"target": 0.95},
    "fedpd-weak": FEDPD | {"target": 0.55},
    "fedpd-strong": FEDPD | {"target": 0.55},
    "fcube": {
        "model": "logistic",
        "partition": "natural",
        "fraction": 1.0,
        "epochs": 10,
        "batch_size": 64,
        "target": 0.99,
    },
}
"""Overrides ``ANY``: the papers' models and targets (FedADMM, Table II; FedPD, Section V), and
NIID-Bench's script (fcube.sh), whose rate of 0.01 with momentum 0.9 is one of 0.1 without."""

TWO_CLASSES: dict[str, dict[str, Any]] = {
    "fedsgd": {"lr": 1.0},
    "fedpd": {"lr": 0.3, "params": "eta=1"},
    "fedbcd": {"lr": 0.3, "params": "gamma=0.1 eta_z=1.0"},
    "fedbcd-i": {"lr": 0.07, "params": "gamma=0.1 eta_z=1.0"},
    "fedbcd-async": {
        "fraction": 0.5,
        "lr": 0.3,
        "params": "servers=2 first=1 gamma=0.1 eta_z=1.0",
    },
    "fedbcd-i-async": {
        "fraction": 0.5,
        "lr": 0.07,
        "params": "servers=2 first=1 gamma=0.1 eta_z=1.0",
    },
    "pfedme": {"lr": 0.3, "params": "lam=1 eta=1"},
}
"""For each algorithm on the data sets of two classes."""

ALGORITHMS: dict[tuple[str, str], dict[str, Any]] = {
    ("fedsgd", ""): {"solver": "gd", "epochs": 1, "random_epochs": "false"},
    ("fedsgd", "digits"): {"fraction": 1.0, "lr": 1.0},
    ("proxskip", ""): {"epochs": 1, "random_epochs": "false", "momentum": 0.0},
    ("q-fedavg", ""): {"params": "q=0.1"},  # q = 1 takes much smaller steps
    ("fedpd", ""): {"fraction": 1.0},
    # B = 1 and gamma = 1 diverge on networks
    ("fedpd-vr", ""): {"fraction": 1.0, "params": "gamma=0.05 inner_batch=20"},
    ("fedpd", "digits"): {"params": "eta=10"},
    ("fedadmm", "mnist"): {
        "params": "rho=0.01 eta=0.5 local_start=global tracking=global",  # the authors' rule
        "lr": 0.2,
        "momentum": 0.5,
    },
    ("fedavg", "mnist"): {"lr": 0.2, "momentum": 0.5},
    ("fedprox", "mnist"): {"momentum": 0.5},
    ("fedbc", "digits"): {"params": "alpha=0.03"},
    ("fedbc", "synthetic"): {"params": "alpha=0.1"},
    ("moon", "digits"): {"params": "mu=0.1"},  # tells on models with a hidden layer alone
    ("fedbcd", ""): {"fraction": 0.3, "lr": 0.01},
    ("fedbcd-i", ""): {"fraction": 0.3, "lr": 0.01},
    ("fedbcd-async", ""): {"fraction": 0.3, "lr": 0.01, "params": "servers=10 first=5"},
    ("fedbcd-i-async", ""): {"fraction": 0.3, "lr": 0.01, "params": "servers=10 first=5"},
    ("fedbcd", "digits"): {"lr": 0.5, "params": "gamma=0.1 eta_z=1.0"},
    ("fedbcd-i", "digits"): {"lr": 0.2, "params": "eta_z=1.0"},
    ("fedbcd-async", "digits"): {
        "fraction": 1.0,
        "lr": 0.5,
        "params": "servers=2 first=1 gamma=0.1 eta_z=1.0",
    },
    ("fedbcd-i-async", "digits"): {
        "fraction": 0.3,
        "lr": 0.2,
        "params": "servers=2 first=1 eta_z=1.0",
    },
    ("fedbcd", "synthetic"): {"lr": 0.3, "params": "gamma=1.0 eta_z=1.0"},
    ("fedbcd-i", "synthetic"): {"lr": 0.1, "params": "gamma=0.1 eta_z=1.0"},
    ("fedbcd-async", "synthetic"): {
        "fraction": 1.0,
        "lr": 0.3,
        "params": "servers=2 first=1 gamma=0.1 eta_z=1.0",
    },
    ("fedbcd-i-async", "synthetic"): {
        "fraction": 0.5,
        "lr": 0.2,
        "params": "servers=2 first=1 gamma=0.1 eta_z=1.0",
    },
    ("fedrep", ""): {"share": "body"},
    ("fedbabu", ""): {"share": "body", "fine_tune": "train", "fine_tune_epochs": 5},
    ("per-fedavg", ""): {"fine_tune": "train"},
    ("per-fedavg", "digits"): {"params": "inner_rate=0.1"},
    ("pfedme", ""): {"lr": 0.05},  # lr (lam + curvature) < 2 at the paper's lam of 15
    ("pfedme", "digits"): {"lr": 0.5, "params": "lam=1 eta=1"},
    **{
        (algorithm, dataset): {"model": "mlp", "lr": 0.1}  # a linear model has no body
        for algorithm in ("fedrep", "fedbabu")
        for dataset in ("digits", "synthetic", "fedpd-weak", "fedpd-strong", "fcube")
    },
    **{
        (algorithm, dataset): found
        for dataset in ("fedpd-weak", "fedpd-strong", "fcube")
        for algorithm, found in TWO_CLASSES.items()
    },
}
"""Overrides those, for (algorithm, data set), and for (algorithm, "") on any data set. On the
built-in data sets no algorithm is far behind FedAvg:
simulations/lab/notes/comparisons.md."""


SOLVERS: dict[str, dict[str, Any]] = {solver: {"lr": rate} for solver, rate in RATES.items()}
"""Overrides those, for a solver that the user names: it has one setting for all data sets."""


def defaults(algorithm: str, dataset: str, solver: str = "") -> dict[str, Any]:
    """Return the default of each key that has one for this data set, algorithm and solver."""
    values = ANY | DATASETS.get(dataset, {})
    for key in ((algorithm, ""), (algorithm, dataset)):
        values |= ALGORITHMS.get(key, {})
    if solver and "momentum" not in TAKES.get(solver, ()):
        values["momentum"] = 0.0  # the one above is plain gradient descent's
    return values | SOLVERS.get(solver, {})
