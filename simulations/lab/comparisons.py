"""Comparisons that nobody published: settings of the board with equal budgets.

Every federated rule of a setting has the same learning rates to choose from, and every rule the
same seeds; other hyperparameters are stated here and are not tuned. ``FEDADMM_NEEDS`` shows what
FedADMM's results depend on (``notebooks/pages/fedadmm-needs.md``), ``GLOBAL_MODELS`` and
``PERSONALIZED_MODELS`` are the README's comparison.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fl_strategies import FedADMM
from simulations.lab.measured import Figure
from simulations.lab.settings import DRAWN, FIXED, Rule, Setting, centralised

FEDADMM_PAPER: dict[str, Any] = {"local_start": "client", "tracking": "client"}
FEDADMM_AUTHORS: dict[str, Any] = {
    name: FedADMM.authors_rule[name] for name in ("local_start", "tracking")
}
"""The two forms without their rho and eta, which settings state."""


def _fedadmm(**params: Any) -> Rule:
    """Return a variant of the paper's FedADMM, which is no baseline of the others."""
    hyperparameters = {**FEDADMM_PAPER, "rho": 0.1, "eta": 1.0, **params}
    return Rule("fedadmm", hyperparameters, DRAWN, reference=True)


RULES: dict[str, Rule] = {
    "fedavg": Rule("fedavg"),
    "fedavg-drawn": Rule("fedavg", config=DRAWN),
    "scaffold": Rule("scaffold"),
    "fedadmm": _fedadmm()._replace(reference=False),
    "rho-0.01": _fedadmm(rho=0.01),
    "rho-1": _fedadmm(rho=1.0),
    "eta-0.5": _fedadmm(eta=0.5),
    "eta-fraction": _fedadmm(eta="fraction"),
    "authors": _fedadmm(**FEDADMM_AUTHORS),
    "authors-rho-0.01": _fedadmm(**FEDADMM_AUTHORS, rho=0.01),
    "authors-eta-0.5": _fedadmm(**FEDADMM_AUTHORS, eta=0.5),
    "start-global": _fedadmm(local_start="global"),
    "feddyn": Rule("feddyn", {"alpha": 0.1}, DRAWN, reference=True),
    "a-fedpd": Rule("a-fedpd", {"rho": 0.1}, DRAWN, reference=True),
}
"""``fedadmm`` is the paper's form with rho = 0.1 and eta = 1. The names of its variants say what is
different; ``authors`` is the form of the authors' code. ``fedavg-drawn`` takes as many local steps
as FedADMM."""


DECIDING = ("fedavg-drawn", "scaffold", "fedadmm", "rho-0.01", "authors", "feddyn", "a-fedpd")
"""The rules that decide when to choose FedADMM; the settings that cost more have these alone."""


BATCH_SIZES = {"iid": 0, "shards": 10}
"""Of FedADMM's Table III with 1,000 clients; 0: all samples of a client, which are 60."""


def two_passes(partition: str) -> Rule:
    """Return centralised training, with a round of as many steps as Table III has with E = 20."""
    config = {"epochs": 2, "batch-size": BATCH_SIZES[partition] or 60, **FIXED}
    rates = (0.01, 0.1)  # no mean of clients damps larger ones
    return centralised(**config)._replace(tune={"lr": rates})


def fedadmm_needs(
    dataset: str, model: str, partition: str, rounds: int, rules: Collection[str] = tuple(RULES)
) -> Setting:
    """Return the variants on 1,000 clients of 60 samples, 100 a round, E = 20, as in Table III."""
    return Setting(
        name=f"fedadmm-needs-{dataset}-{model}-{partition}",
        where=f"FedADMM's variants: {dataset}, {model}, 1,000 clients, {partition}",
        figure="late_accuracy",
        ours="fedadmm",
        rules={
            **{name: RULES[name] for name in rules},
            "centralised": two_passes(partition),
        },
        published={},
        config={
            "dataset": dataset,
            "clients": 1000,
            "partition": partition,
            "fraction": 0.1,
            "rounds": rounds,
            "epochs": 20,
            "random-epochs": "false",
            "batch-size": BATCH_SIZES[partition],
            "momentum": 0.0,
            "model": model,
            "stack": "auto",
        },
        tune={"lr": (0.1, 0.5)},
        curves=("round",),
    )


FEDADMM_NEEDS = [
    fedadmm_needs("fashion_mnist", "logistic", "shards", 30),
    fedadmm_needs("fashion_mnist", "logistic", "iid", 30, DECIDING),
    fedadmm_needs("mnist", "logistic", "shards", 30, DECIDING),
    fedadmm_needs("fashion_mnist", "mlp", "shards", 30, DECIDING)._replace(seeds=(1, 2, 3)),
]


CHANGES: dict[str, dict[str, Any]] = {
    "epochs-1": {"epochs": 1},
    "epochs-5": {"epochs": 5},
    "momentum": {"momentum": 0.5},
    "unnormalised": {"normalise": "none"},
    "softmax": {"model": "logistic-authors"},
    "clients-200": {"clients": 200},
    "clients-500": {"clients": 500},
}
"""What else FedADMM's results may depend on: one change to the first of ``FEDADMM_NEEDS``."""


def _changed(name: str, change: dict[str, Any]) -> Setting:
    setting = FEDADMM_NEEDS[0]
    penalties = ("rho-1",) if "clients" in change else ()  # Table V
    return setting._replace(
        name=f"fedadmm-needs-{name}",
        where=f"FedADMM's variants: {name}",
        rules={rule: RULES[rule] for rule in ("fedavg-drawn", "fedadmm", "rho-0.01", *penalties)},
        config={**setting.config, **change},
    )


FEDADMM_NEEDS += [_changed(name, change) for name, change in CHANGES.items()]


# ---- the README's comparison --------------------------------------------------------------------

DATA: dict[str, dict[str, Any]] = {
    "digits": {"partition": "dirichlet", "partition-params": "alpha=0.1", "batch-size": 10},
    "synthetic": {"partition": "natural", "batch-size": 20},
}
"""Both with 50 clients and logistic regression: 1,437 images of digits, and FedBC's generator."""


def _comparison(name: str, data: str, figure: Figure, ours: str, rules: dict[str, Rule]) -> Setting:
    return Setting(
        name=f"{name}-{data}",
        where=f"{name.replace('-', ' ').capitalize()}: {data}, 50 clients, 10 a round, 50 rounds",
        figure=figure,
        ours=ours,
        rules=rules,
        published={},
        config={
            "dataset": data,
            **DATA[data],
            "clients": 50,
            "fraction": 0.2,
            "rounds": 50,
            "epochs": 5,
            "random-epochs": "false",
            "momentum": 0.0,
            "model": "logistic",
            "stack": "auto",
        },
        tune={"lr": (0.03, 0.1, 0.3, 1.0)},
    )


FEDBC: dict[str, Any] = {"alpha": 0.1, "local_start": "client"}

GLOBAL_RULES = {
    "fedavg": Rule("fedavg"),
    "fedprox": Rule("fedprox", {"mu": 0.1}),
    "fednova": Rule("fednova"),
    "scaffold": Rule("scaffold"),
    "q-fedavg": Rule("q-fedavg", {"q": 0.1}),
    "feddyn": Rule("feddyn", {"alpha": 0.1}),
    "fedadmm": Rule("fedadmm", {"rho": 0.1}),
    "fedbc": Rule("fedbc", FEDBC),
    "a-fedpd": Rule("a-fedpd", {"rho": 0.1}),
}
CENTRALISED = centralised(epochs=1)
"""As many passes over all samples in a round as the clients make together."""
GLOBAL_MODELS = [
    _comparison("global-models", data, "late_accuracy", "a-fedpd", rules)
    for data, rules in (
        ("digits", GLOBAL_RULES | {"centralised": CENTRALISED}),
        ("synthetic", GLOBAL_RULES),  # the generator makes other data for one client
    )
]

CLIENTS_TEST = {"local-test": 0.2, "fraction-evaluate": 1.0}
"""A fifth of each client's samples test the models that this client has in the end."""
PERSONALIZED_RULES = {
    "fedavg": Rule("fedavg", config=CLIENTS_TEST),
    "ditto": Rule("ditto", {"lam": 0.1}, CLIENTS_TEST),
    "pfedme": Rule("pfedme", {"lam": 1.0, "eta": 1.0}, CLIENTS_TEST),
    "fedbc": Rule("fedbc", FEDBC, CLIENTS_TEST),
    "fedbcd": Rule("fedbcd", {"gamma": 0.1, "eta_z": 1.0, "reduce": "mean"}, CLIENTS_TEST),
    "fedadmm": Rule("fedadmm", {"rho": 0.1}, CLIENTS_TEST),
    "alone": Rule("ditto", {"lam": 0.0}, CLIENTS_TEST, reference=True),
}
PERSONALIZED_MODELS = [
    _comparison("personalized-models", data, "own_accuracy", "fedbc", PERSONALIZED_RULES)
    for data in DATA
]
