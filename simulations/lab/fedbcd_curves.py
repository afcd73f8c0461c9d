"""FedBCD's Figs. 3 and 4 (MNIST; the paper has curves alone): settings of the board."""

from __future__ import annotations

from simulations.lab.settings import FIXED, Rule, Setting, centralised
from simulations.lab.studies import FEDBCD, FEDBCD_RULES

RULES = {name: Rule(*rule) for name, rule in FEDBCD_RULES.items()}


def curves(labels: int, active: int) -> Setting:
    """Return all eight rules, for 100 rounds, and training in one place.

    A device has samples of ``labels`` labels; ``active`` of 10 devices train in a round. In one
    place a round is one epoch, about as many passes as 3 of 10 devices make together.
    """
    return Setting(
        name=f"fedbcd-labels{labels}-active{active}",
        where=f"FedBCD, Figs. 3 and 4: MNIST, {labels} labels, {active} of 10 active, 100 rounds",
        figure="final_accuracy",
        ours="fedbcd-i",
        rules={**RULES, "centralised": centralised(epochs=1, **FIXED)},
        published={},
        config={
            **FEDBCD,
            "partition-params": f"labels_per_client={labels}",
            "fraction": active / 10,
            "rounds": 100,
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
        for name, rule in RULES.items()
    }
    return setting._replace(
        name=f"{setting.name}-personalized",
        where=setting.where.replace("FedBCD,", "FedBCD's personalized models,"),
        figure="own_accuracy",
        rules={**ours, "alone": Rule("ditto", {"lam": 0.0}, reference=True)},
        runs_in=setting,
        curves=(),
    )


SETTINGS = [curves(6, 3), curves(3, 3), curves(3, 6)]
SETTINGS += [personalized(setting) for setting in SETTINGS]
