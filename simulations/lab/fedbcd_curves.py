"""FedBCD's Figs. 3 and 4 (MNIST; the paper has curves alone): settings of the board."""

from __future__ import annotations

from fl_strategies import FedBCD
from simulations.lab.settings import FIXED, Rule, Setting, centralised

TEN = {"servers": 10, "reduce": "mean"}
CLOCK = {"clock": "exponential mean_work=0.061"}
"""FedBCD's clock where work is counted in steps: a second per epoch, of 16 or 17 (mean 16.4)."""
STEPS = {"random-epochs": "false", **FedBCD.authors_local}
RULES = {
    "sync": Rule("fedbcd", TEN),
    "sync-authors": Rule("fedbcd", TEN | dict(FedBCD.authors_rule), STEPS),
    "async-0.3": Rule("fedbcd-async", TEN | {"first": 3}),
    "async-0.5": Rule("fedbcd-async", TEN | {"first": 5}),
    "async-0.3-rigorous": Rule("fedbcd-async", TEN | {"first": 3, "rigorous": True}),
    "fedbcd-i": Rule("fedbcd-i", TEN),
    "fedprox": Rule(
        "fedprox", {"mu": 5.0, "weights": "uniform"}, {"extrapolation": 0.9, "box": 2.0, **CLOCK}
    ),
    "fedavg": Rule("fedavg", {"weights": "uniform"}, CLOCK),
}
"""Sync-cloud by the paper's rule and by its authors' code, async-cloud with beta = B/V of 0.3 and
0.5, FedBCD-I, FedProx with ASPG, as the paper has it, and FedAvg; the last two on FedBCD's clock,
as in Fig. 4 (d)."""


def curves(labels: int, active: int) -> Setting:
    """Return all eight rules, for 100 rounds, and training in one place.

    10 cloud servers have 10 devices each. A device has samples of ``labels`` labels; ``active`` of
    10 devices train in a round. In one place a round is one epoch, about as many passes as 3 of 10
    devices make together.
    """
    return Setting(
        name=f"fedbcd-labels{labels}-active{active}",
        where=f"FedBCD, Figs. 3 and 4: MNIST, {labels} labels, {active} of 10 active, 100 rounds",
        figure="final_accuracy",
        ours="fedbcd-i",
        rules={**RULES, "centralised": centralised(epochs=1, **FIXED)},
        published={},
        config={
            "dataset": "mnist",
            "model": "mlp3",
            "partition": "diversity",
            "partition-params": f"labels_per_client={labels}",
            "clients": 100,
            "fraction": active / 10,
            "rounds": 100,
            "epochs": 5,
            "random-epochs": "true",
            "batch-size": 32,
            "lr": 0.005,
            "momentum": 0.0,  # FedAvg's is not stated
            "target": 0.9,
            "local-test": 0.15,
            "fraction-evaluate": 0.1,
        },
        seeds=(1, 2, 3),
        curves=("round", "virtual_seconds"),
    )


def personalized(setting: Setting) -> Setting:
    """Return the personalized models of the setting's runs, against FedAvg and FedProx.

    ``alone`` is Ditto with lambda = 0: each device trains without the others, in as many rounds.
    """
    ours = {
        name: rule._replace(reference=rule.algorithm.startswith("fedbcd"))
        for name, rule in setting.rules.items()
        if name != "centralised"
    }
    return setting._replace(
        name=f"{setting.name}-personalized",
        where=setting.where.replace("FedBCD,", "FedBCD's personalized models,"),
        figure="own_accuracy",
        rules={**ours, "alone": Rule("ditto", {"lam": 0.0}, reference=True)},
        runs_in=setting,
        curves=(),
    )


def fig_4() -> Setting:
    """Return the rules of Fig. 4 for its 300 rounds."""
    base = curves(6, 3)
    return base._replace(
        name="fedbcd-300-rounds-labels6",
        where=base.where.replace("100 rounds", "300 rounds"),
        rules={name: RULES[name] for name in ("sync", "async-0.5", "fedbcd-i", "fedprox")},
        config={**base.config, "rounds": 300},
    )


SETTINGS = [curves(6, 3), curves(3, 3), curves(3, 6), fig_4()]
SETTINGS += [personalized(setting) for setting in SETTINGS]
