"""Delta-SGD's point, one setting for every kind of data, with intervals: settings of the board.

Kim et al. tune each local solver on one task and keep its setting elsewhere. Here each solver's
learning rate is chosen at alpha = 0.1, on training samples held out, and kept at alpha = 1 and
0.01; Delta-SGD has the paper's setting and is not tuned. ``ALPHAS`` compares solvers under FedAvg,
``INSIDE`` compares SGD and Delta-SGD under other algorithms and under Flower's FedAdam, and
``CARRIED`` takes eight tuned solvers to clients of other sizes, to FedProx and to MOON.
"""

from __future__ import annotations

from typing import Any

from simulations.lab.comparisons import FEDADMM_PAPER
from simulations.lab.settings import Line, Rule, Setting, centralised
from simulations.lab.tuners import Space

PAPER: dict[str, Any] = {
    "solver": "delta-sgd",
    "lr": 0.2,
    "solver-params": "gamma=2 delta=0.1 theta_0=1",
}
SPS: dict[str, Any] = {"solver": "sps", "lr": 1.0, "solver-params": "c=0.5 growth=0"}
"""Without a cap on growth, as in the paper."""
SGD_RATES = (0.03, 0.1, 0.3)
SOLVERS: dict[str, tuple[dict[str, Any], Space]] = {
    "sgd": ({"solver": "sgd"}, {"lr": SGD_RATES}),
    "sgdm": ({"solver": "sgd", "momentum": 0.9}, {"lr": (0.01, 0.03, 0.1)}),
    "adam": ({"solver": "adam"}, {"lr": (0.0003, 0.001, 0.003)}),
    "delta-sgd": (PAPER, {}),
}
"""What the run-config sets, and what to choose from."""

ALL_ALPHAS = (1, 0.1, 0.01)
TUNED_AT = 0.1


def at(name: str, what: str, rules: dict[str, Rule], alpha: float, **config: Any) -> Setting:
    """Return the setting at ``alpha``: the clients of Delta-SGD's Table 1."""
    return Setting(
        name=f"{name}-alpha{alpha:g}",
        where=f"{what}, alpha = {alpha:g}",
        figure="late_accuracy",
        ours="delta-sgd",
        rules=rules,
        published={},
        config={
            "partition": "dirichlet",
            "partition-params": f"alpha={alpha:g} rows_per_client=500",
            "clients": 100,
            "fraction": 0.1,
            "epochs": 1,
            "random-epochs": "false",
            "batch-size": 64,
            "momentum": 0.0,
            "evaluate-every": 2,
            "stack": "auto",
            **config,
        },
        line=Line(name, "alpha", alpha),
    )


def at_all_alphas(name: str, what: str, rules: dict[str, Rule], **config: Any) -> list[Setting]:
    """Return a setting for each alpha; the one at ``TUNED_AT``, the first, tunes for all."""
    first = at(name, what, rules, TUNED_AT, **config)
    others = [alpha for alpha in ALL_ALPHAS if alpha != TUNED_AT]
    return [
        first,
        *(at(name, what, rules, a, **config)._replace(tuned_by=first) for a in others),
    ]


UNDER_FEDAVG = {
    name: Rule("fedavg", config=config, tune=tune) for name, (config, tune) in SOLVERS.items()
}
ALPHAS = at_all_alphas(
    "solvers-mlp", "Local solvers: Fashion-MNIST, MLP, 200 rounds",
    UNDER_FEDAVG | {"centralised": centralised(steps=80)._replace(tune={"lr": SGD_RATES})},
    dataset="fashion_mnist", model="mlp", rounds=200,
)  # fmt: skip


def _robust(delta: float = 0.1, epochs: int = 1) -> Rule:
    config = {**PAPER, "solver-params": f"gamma=2 delta={delta:g} theta_0=1", "epochs": epochs}
    return Rule("fedavg", config=config, reference=True)


ROBUST = [
    one._replace(seeds=(1, 2, 3), line=None)
    for one in at_all_alphas(
        "delta-sgd-robust", "Delta-SGD, Figs. 4 and 6: Fashion-MNIST, MLP, 200 rounds",
        {
            "delta-sgd": _robust()._replace(reference=False),
            "delta-0.01": _robust(delta=0.01),
            "delta-1": _robust(delta=1.0),
            "epochs-2": _robust(epochs=2),
            "epochs-3": _robust(epochs=3),
        },
        dataset="fashion_mnist", model="mlp", rounds=200,
    )
]  # fmt: skip
"""Delta-SGD with other values of delta (Fig. 4) and of E (Fig. 6)."""

AROUND: dict[str, tuple[str, dict[str, Any], str]] = {
    "fedadam": ("fedavg", {}, "fedadam"),
    "fedprox": ("fedprox", {"mu": 0.1}, ""),
    "fedadmm": ("fedadmm", {"rho": 0.1, "eta": 1.0, **FEDADMM_PAPER}, ""),
    "scaffold": ("scaffold", {"option": "I"}, ""),  # option II takes plain steps alone
    "moon": ("moon", {"mu": 1.0}, ""),
}
"""Algorithm, hyperparameters and Flower's server; none of them was tuned."""


def inside(name: str) -> list[Setting]:
    """Return Delta-SGD against SGD in the algorithm ``name`` of ``AROUND``, for each alpha."""
    algorithm, params, server = AROUND[name]
    rules = {
        solver: Rule(algorithm, params, config, tune=tune, server=server)
        for solver, (config, tune) in SOLVERS.items()
        if solver in ("sgd", "delta-sgd")
    }
    what = f"Delta-SGD in {name}: Fashion-MNIST, MLP, 50 rounds"
    config = {"dataset": "fashion_mnist", "model": "mlp", "rounds": 50}
    return at_all_alphas(f"inside-{name}", what, rules, **config)


INSIDE = [one for name in AROUND for one in inside(name)]


DECAY = {"lr-decay": True}
EIGHT: dict[str, tuple[dict[str, Any], Space]] = {
    "sgd": SOLVERS["sgd"],
    "sgd-decay": (SOLVERS["sgd"][0] | DECAY, SOLVERS["sgd"][1]),
    "sgdm": SOLVERS["sgdm"],
    "sgdm-decay": (SOLVERS["sgdm"][0] | DECAY, SOLVERS["sgdm"][1]),
    "adam": SOLVERS["adam"],
    "adagrad": ({"solver": "adagrad"}, {"lr": (0.003, 0.01, 0.03)}),
    "sps": (SPS, {}),
    "delta-sgd": SOLVERS["delta-sgd"],
}
"""The solvers of the paper's tables. SPS has nothing to tune."""


def carried() -> list[Setting]:
    """Return the solvers tuned with 500 samples a client, and where their rates are kept.

    Table 3 has clients of 100 to 500 samples, Table 2b is inside FedProx, Table 4 inside MOON. mu
    is not stated: it is that of ``AROUND``.
    """

    def of(name: str, what: str, algorithm: str, params: dict[str, Any], rows: str) -> Setting:
        rules = {
            solver: Rule(algorithm, params, config, tune=tune)
            for solver, (config, tune) in EIGHT.items()
        }
        config = {"dataset": "fashion_mnist", "model": "mlp", "rounds": 100}
        return at(
            f"delta-sgd-carried-{name}", f"Delta-SGD, {what}: Fashion-MNIST, MLP", rules, TUNED_AT,
            **config, **{"partition-params": f"alpha={TUNED_AT:g} rows_per_client={rows}"},
        )._replace(line=None, seeds=(1, 2, 3))  # fmt: skip

    first = of("equal", "equal sizes", "fedavg", {}, "500")
    others = [
        of("sizes", "Table 3, 100 to 500 samples", "fedavg", {"weights": "samples"}, "100-500"),
        of("fedprox", "Table 2b, inside FedProx", "fedprox", AROUND["fedprox"][1], "500"),
        of("moon", "Table 4, inside MOON", "moon", AROUND["moon"][1], "500"),
    ]
    return [first, *(other._replace(tuned_by=first) for other in others)]


CARRIED = carried()
