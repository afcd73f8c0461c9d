"""What papers publish, and how it is run here: the settings of the board.

Numbers are the papers' own; where a paper leaves something open, the setting's comment says what
was chosen. Every rule of a setting has the same rates to choose from, but for two kinds: local
solvers have the rates of their papers, and SCAFFOLD in ``deciding`` has small ones, as its network
diverges at larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from simulations.lab import (
    deadlines,
    fedadmm_rho,
    fedbc_tables,
    fedbcd_curves,
    fedpd_curves,
    local_solvers,
    niid_bench,
)
from simulations.lab.comparisons import (
    BATCH_SIZES,
    FEDADMM_AUTHORS,
    FEDADMM_NEEDS,
    FEDADMM_PAPER,
    GLOBAL_MODELS,
    PERSONALIZED_MODELS,
    two_passes,
)
from simulations.lab.measured import KINDS, Figure
from simulations.lab.settings import DRAWN, FIXED, Rule, Setting, centralised
from simulations.lab.tuners import Space

BEYOND = math.inf
""""100+" in FedADMM's tables: the target was not reached within their 100 rounds."""


def _rounds(rounds: int, published: int) -> str:
    return f"{rounds} rounds" if rounds == published else f"{rounds} of its {published:,} rounds"


# ---- FedADMM: Gong, Li, Freris, ICDE 2022, Table III --------------------------------------------

RATES = (0.01, 0.1, 0.2, 0.5)
PENALTY = {"rho": 0.01, "eta": 1.0, **FEDADMM_PAPER}


def fedadmm_rules(clients: int, partition: str) -> dict[str, Rule]:
    """Return the rules of Table III: E is drawn for FedADMM and FedProx and fixed elsewhere."""
    ten_clients_steps = centralised(steps=150, **FIXED)
    return {
        "fedadmm": Rule("fedadmm", PENALTY, DRAWN),
        "fedadmm-authors": Rule("fedadmm", PENALTY | FEDADMM_AUTHORS, DRAWN, True),
        "fedavg": Rule("fedavg", config=FIXED),
        "fedprox": Rule("fedprox", {"mu": 0.1}, DRAWN),
        "scaffold": Rule("scaffold", config=FIXED),
        "centralised": ten_clients_steps if clients == 100 else two_passes(partition),
    }


TABLE_III: dict[tuple[str, int, str], tuple[float, float, float, float]] = {
    ("mnist", 100, "iid"): (10, 19, 29, 27),
    ("mnist", 100, "shards"): (33, 77, BEYOND, 76),
    ("mnist", 1000, "iid"): (8, 61, 78, 61),
    ("mnist", 1000, "shards"): (13, 73, BEYOND, 84),
    ("fashion_mnist", 1000, "iid"): (3, 10, 14, 12),
    ("fashion_mnist", 1000, "shards"): (7, 33, 61, 40),
    ("cifar10", 1000, "iid"): (7, 24, 32, 37),
    ("cifar10", 1000, "shards"): (9, 50, 68, BEYOND),
}
"""Rounds to the target of FedADMM, FedAvg, FedProx (of the best mu) and SCAFFOLD."""

TARGETS = {"mnist": 0.97, "fashion_mnist": 0.8, "cifar10": 0.45}
FEW_IMAGES = "7,000 of the 50,000 training images are at hand"


def table_iii(model: Mapping[str, str], prefix: str) -> list[Setting]:
    """Return the settings of Table III with a model per data set.

    bfloat16 halves the time of large batches on a CPU; with batches of 10 it depends on the CPU.
    """
    return [
        Setting(
            name=f"{prefix}-{dataset}-{clients}-{partition}",
            where=f"FedADMM, Table III: {dataset}, {clients} clients, {partition}, "
            f"{model[dataset]}",
            figure="rounds_to_target",
            ours="fedadmm",
            rules=fedadmm_rules(clients, partition),
            published=dict(zip(("fedadmm", "fedavg", "fedprox", "scaffold"), rounds, strict=True)),
            config={
                "dataset": dataset,
                "clients": clients,
                "partition": partition,
                "fraction": 0.1,
                "rounds": 100,
                "epochs": 5 if clients == 100 else 20,
                "batch-size": 200 if clients == 100 else BATCH_SIZES[partition],
                "momentum": 0.0,  # not stated
                "model": model[dataset],
                "target": TARGETS[dataset],
                "stop-at-target": True,
                "autocast": "bfloat16" if model[dataset].startswith("cnn") else "",
            },
            tune={"lr": RATES},
            impossible=FEW_IMAGES if dataset == "cifar10" else "",
        )
        for (dataset, clients, partition), rounds in TABLE_III.items()
    ]


CNN = {"mnist": "cnn1", "fashion_mnist": "cnn1", "cifar10": "cnn2"}
MLP = {"mnist": "mlp", "fashion_mnist": "mlp", "cifar10": "mlp"}


def deciding(
    dataset: str,
    clients: int,
    partition: str,
    rounds: int,
    others: Mapping[str, Any] = {},
    rates: tuple[float, ...] = RATES,
    scaffold: tuple[float, ...] = (0.01, 0.1),
) -> Setting:
    """Return a cell of Table III with the rules that decide, its CNN and three seeds.

    Every rule's rate is chosen from ``rates``, SCAFFOLD's from ``scaffold``, with which the CNN
    does not diverge. They are chosen with the MLP 784-128-10, a twentieth of the cost, in half the
    rounds. ``others`` are set in the cell's place.
    """
    cell = next(
        one for one in table_iii(CNN, "") if one.name == f"-{dataset}-{clients}-{partition}"
    )
    config = {**cell.config, "rounds": rounds} | dict(others)
    setting = cell._replace(
        name=f"fedadmm-deciding-{config['dataset']}-{config['clients']}-{partition}",
        where=f"{cell.where}, {_rounds(rounds, cell.horizon)}",
        ours="authors",
        rules={
            "authors": Rule("fedadmm", PENALTY | FEDADMM_AUTHORS, DRAWN),
            "fedavg": Rule("fedavg", config=FIXED),
            "scaffold": Rule("scaffold", config=FIXED, tune={"lr": scaffold}),
            "fedadmm": Rule("fedadmm", PENALTY | {"rho": 0.1}, DRAWN, reference=True),
            "fedavg-drawn": Rule("fedavg", config=DRAWN, reference=True),
            "centralised": cell.rules["centralised"],
        },
        published={
            "authors" if rule == "fedadmm" else rule: rounds
            for rule, rounds in cell.published.items()
            if rule != "fedprox"
        },
        config=config,
        tune={"lr": rates},
        seeds=(1, 2, 3),
        impossible="",
    )
    small = {"model": "mlp", "autocast": "", "rounds": rounds // 2, "stack": "auto"}
    return setting._replace(
        tuned_by=setting._replace(name=f"{setting.name}-rates", config={**config, **small})
    )


def cifar10_subset(partition: str) -> Setting:
    """Return Table III's cell of CIFAR-10 on 7,000 of its images.

    A client has 50 of them, as in the paper, which makes 140 clients. The published numbers are
    those of 50,000 images, and so are not this setting's.
    """
    images = {"dataset": "cifar10_subset", "clients": 140}
    setting = deciding("cifar10", 1000, partition, 30, images, rates=(0.01, 0.1))
    return setting._replace(
        where=f"FedADMM, Table III: 7,000 images of CIFAR-10, 140 clients, {partition}, 30 rounds",
        published={},
    )


def rho_chosen(partition: str) -> Setting:
    """Return Table III's cell of MNIST and 1,000 clients with an MLP, and rho chosen with the rate.

    They are chosen in 20 of the 100 rounds. The MLP's target is 95 % in place of the CNN's 97 %.
    """
    (cell,) = (one for one in table_iii(MLP, "") if one.name == f"-mnist-1000-{partition}")
    rates: Space = {"lr": (0.1, 0.3)}
    rho: Space = {"rho": (0.1, 0.3, 1.0)}
    params = {"rho": 0.3, "eta": 1.0, **FEDADMM_PAPER}
    setting = cell._replace(
        name=f"fedadmm-rho-mnist-1000-{partition}",
        where=f"FedADMM, Table III: MNIST, 1,000 clients, {partition}, rho chosen, mlp, 95 %",
        rules={
            "fedadmm": Rule("fedadmm", params, DRAWN, tune={**rho, **rates}),
            "fedavg": Rule("fedavg", config=FIXED),
            "fedprox": Rule("fedprox", {"mu": 0.1}, DRAWN),
        },
        published={},
        config={**cell.config, "target": 0.95},
        tune=rates,
        seeds=(1, 2, 3),
    )
    short = {**setting.config, "rounds": 20}
    return setting._replace(tuned_by=setting._replace(name=f"{setting.name}-choice", config=short))


# ---- Delta-SGD: Kim et al., Table 1 -------------------------------------------------------------

SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {"solver": "sgd", "lr": 0.1},
    "sgd-decay": {"solver": "sgd", "lr": 0.1, "lr-decay": True},
    "sgdm": {"solver": "sgd", "lr": 0.1, "momentum": 0.9},
    "sgdm-decay": {"solver": "sgd", "lr": 0.1, "momentum": 0.9, "lr-decay": True},
    "adam": {"solver": "adam", "lr": 0.001},
    "adagrad": {"solver": "adagrad", "lr": 0.01},
    "sps": local_solvers.SPS,
    "delta-sgd": local_solvers.PAPER,
}
"""One setting for all data, which is the paper's point. The paper tunes the first four on CIFAR-10
and states the grids, not the rates: these are the ones with which its authors' code runs all of
them (run.sh, for CIFAR-100). Their SPS has no cap on growth."""

DELTA_SGD_TABLE_1: dict[tuple[str, float], dict[str, float]] = {
    key: dict(zip(SOLVERS, accuracies, strict=True))
    for key, accuracies in {
        ("mnist", 1): (0.983, 0.978, 0.985, 0.984, 0.947, 0.643, 0.101, 0.984),
        ("mnist", 0.1): (0.981, 0.980, 0.976, 0.980, 0.964, 0.899, 0.960, 0.981),
        ("mnist", 0.01): (0.968, 0.972, 0.779, 0.940, 0.808, 0.724, 0.697, 0.975),
        ("fashion_mnist", 1): (0.865, 0.863, 0.852, 0.872, 0.718, 0.455, 0.859, 0.873),
        ("fashion_mnist", 0.1): (0.836, 0.847, 0.836, 0.861, 0.804, 0.463, 0.850, 0.864),
        ("fashion_mnist", 0.01): (0.790, 0.793, 0.757, 0.795, 0.606, 0.459, 0.440, 0.802),
    }.items()
}


def delta_sgd_table_1(dataset: str, alpha: float, rounds: int, rules: tuple[str, ...]) -> Setting:
    """Return a column of Table 1 for one alpha: 500 rounds there on MNIST, 1,000 on FMNIST."""
    of = {"mnist": 500, "fashion_mnist": 1000}[dataset]
    return Setting(
        name=f"delta-sgd-{dataset}-alpha{alpha:g}-rounds{rounds:,}",
        where=f"Delta-SGD, Table 1: {dataset}, alpha = {alpha:g}, {_rounds(rounds, of)}",
        figure="final_accuracy",
        ours="delta-sgd",
        rules={
            **{name: Rule("fedavg", config=SOLVERS[name]) for name in rules},
            "centralised": centralised(**SOLVERS["sgd"], steps=80),  # as many as the 10 clients'
        },
        published={name: DELTA_SGD_TABLE_1[dataset, alpha][name] for name in rules},
        config={
            "dataset": dataset,
            "model": "cnn-10-20",
            "partition": "dirichlet",
            "partition-params": f"alpha={alpha:g} rows_per_client=500",
            "clients": 100,
            "fraction": 0.1,
            "rounds": rounds,
            "epochs": 1,
            "random-epochs": "false",
            "batch-size": 64,
            "momentum": 0.0,
            "evaluate-every": 5,
        },
        # 500 rounds take over 20 minutes; MNIST's contrast, alpha 0.01, has five seeds anyway
        seeds=(1, 2, 3) if rounds == of and (of > 500 or alpha > 0.01) else (1, 2, 3, 4, 5),
    )


# ---- q-FedAvg: Li et al., ICLR 2020, Table 1 ----------------------------------------------------


def q_fedavg(figure: Figure) -> Setting:
    """Return the paper's comparison on synthetic(1, 1) for one of its figures, without its numbers.

    Generator, batch size, clients a round and the figures are those of the authors' code
    (github.com/litian96/fair_flearn: generate_synthetic.py, plot_fairness.py, README). There, q = 0
    is FedAvg by size; devices are sampled by size, also with q = 1, and here evenly; a tenth of a
    device's samples are for testing, and here a fifth; rounds are 20,000.
    """
    name = "average" if figure == "late_accuracy" else figure.replace("_", "-")
    return Setting(
        name=f"q-fedavg-{name}",
        where=f"q-FedAvg on synthetic(1, 1), {_rounds(300, 20_000)}: {KINDS[figure].name}",
        figure=figure,
        ours="q-fedavg",
        rules={
            "fedavg": Rule("fedavg"),
            "fedavg-uniform": Rule("fedavg", {"weights": "uniform"}),
            "q-fedavg": Rule("q-fedavg", {"q": 1.0}),
        },
        published={},
        config={
            "dataset": "synthetic",
            "dataset-params": "alpha=1 beta=1 sizes=lognormal",
            "clients": 100,
            "fraction": 0.1,
            "fraction-evaluate": 1.0,
            "rounds": 300,
            "epochs": 1,
            "random-epochs": "false",
            "batch-size": 10,
            "momentum": 0.0,
            "stack": "auto",
        },
        tune={"lr": (0.01, 0.03, 0.1, 0.3)},
    )


FAIRNESS: tuple[Figure, ...] = ("worst_tenth", "best_tenth", "variance")
Q_FEDAVG = q_fedavg("late_accuracy")


BOARD: dict[str, list[Setting]] = {
    "fedadmm": table_iii(CNN, "fedadmm"),
    "fedadmm-mlp": table_iii(MLP, "fedadmm-mlp"),
    "fedadmm-deciding": [
        deciding("fashion_mnist", 1000, "iid", 30),
        deciding("fashion_mnist", 1000, "shards", 30),
        # CNN1 stays at 10 % with 0.2, and diverges with 0.1 in SCAFFOLD
        deciding("mnist", 100, "shards", 100, rates=(0.01, 0.1), scaffold=(0.01,)),
        cifar10_subset("iid"),
        cifar10_subset("shards"),
    ],
    "fedadmm-needs": FEDADMM_NEEDS,
    "fedadmm-rho": [*fedadmm_rho.SETTINGS, *map(rho_chosen, ("iid", "shards"))],
    "global-models": GLOBAL_MODELS,
    "personalized-models": PERSONALIZED_MODELS,
    **fedbc_tables.STUDIES,
    "local-solvers": local_solvers.ALPHAS,
    "delta-sgd-inside": local_solvers.INSIDE,
    "delta-sgd-robust": local_solvers.ROBUST,
    "delta-sgd-carried": local_solvers.CARRIED,
    "q-fedavg": [Q_FEDAVG, *(q_fedavg(figure)._replace(runs_in=Q_FEDAVG) for figure in FAIRNESS)],
    "delta-sgd": [
        *(delta_sgd_table_1("mnist", a, 100, tuple(SOLVERS)) for a in (1, 0.1, 0.01)),
        *(
            delta_sgd_table_1("mnist", a, 500, ("sgdm", "adam", "delta-sgd"))
            for a in (1, 0.1, 0.01)
        ),
        *(delta_sgd_table_1("fashion_mnist", a, 200, tuple(SOLVERS)) for a in (1, 0.1, 0.01)),
        *(
            delta_sgd_table_1("fashion_mnist", a, 1000, ("sgd-decay", "sgdm-decay", "delta-sgd"))
            for a in (1, 0.1, 0.01)
        ),
    ],
    "fedbcd": fedbcd_curves.SETTINGS,
    "fedpd-fig2": [fedpd_curves.fig_2(kind) for kind in ("weak", "strong")],
    "fedpd-writers": [fedpd_curves.writers()],
    "deadlines": [deadlines.SETTING],
    "niid-bench": niid_bench.SETTINGS,
}
"""Settings by study."""
