"""Deadlines on slow clients: what waiting, dropping and less work come to (no paper's table).

Clients' speeds are lognormal with spread 1. A median client takes 3 virtual seconds for its five
epochs, the slowest of ten some 14. Learning rates and rho are chosen for each rule in 25 rounds.
"""

from __future__ import annotations

from simulations.lab.settings import FIXED, Rule, Setting
from simulations.lab.tuners import Space

RATES: Space = {"lr": (0.03, 0.1, 0.3)}
DROP = {**FIXED, "pace": "deadline seconds=3"}
CUT = {**FIXED, "pace": "deadline seconds=3 cut=true"}
FORM = {"eta": "fraction", "rho": 0.1, "local_start": "global", "tracking": "global"}
ADMM: Space = {"rho": (0.1, 0.3, 1.0), **RATES}
RULES = {
    "fedavg": Rule("fedavg", config=FIXED),
    "fedavg-drop": Rule("fedavg", config=DROP),
    "fedavg-cut": Rule("fedavg", config=CUT),
    "fednova-cut": Rule("fednova", config=CUT),
    "fedadmm": Rule("fedadmm", FORM, FIXED, tune=ADMM),
    "fedadmm-cut": Rule("fedadmm", FORM, CUT, tune=ADMM),
}
"""All are waited for; those later than 3 s are dropped (``drop``); each request says how many steps
fit into 3 s (``cut``)."""


SETTING = Setting(
    name="deadlines",
    where="Deadlines: MNIST, 100 clients of two shards, 10 a round, MLP, lognormal speeds",
    figure="late_accuracy",
    ours="fedadmm-cut",
    rules=RULES,
    published={},
    config={
        "dataset": "mnist",
        "model": "mlp",
        "clients": 100,
        "partition": "shards",
        "fraction": 0.1,
        "rounds": 100,
        "epochs": 5,
        "batch-size": 50,
        "momentum": 0.0,
        "clock": "clock step=0.05 spread=1",
        "target": 0.9,
        "gradient-norm": "false",
    },
    tune=RATES,
    seeds=(1, 2, 3),
    curves=("virtual_seconds",),
)
SETTING = SETTING._replace(
    tuned_by=SETTING._replace(name="deadlines-choice", config={**SETTING.config, "rounds": 25})
)
