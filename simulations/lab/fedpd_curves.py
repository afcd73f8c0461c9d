"""FedPD's Figs. 2, 4 and 5 (the paper has curves alone): settings of the board."""

from __future__ import annotations

from simulations.lab.settings import Rule, Setting, centralised


def fig_2(kind: str) -> Setting:
    """Return Fig. 2: ||grad f||^2 on penalised logistic regression, weakly or strongly non-IID.

    eta = 0.08 is the 8 of the authors' code, whose f_i carry a factor 1/100; the paper states no
    inner rate: gradient steps are of 0.07, those on one sample of 0.01, gamma is 4 eta. FedProx
    takes its 8 steps along SVRG's gradients, with the mu of the paper's Appendix D.
    """
    steps = {"solver": "gd", "epochs": 8, "random-epochs": "false", "momentum": 0.0, "lr": 0.07}
    single = {"solver": "sgd", "batch-size": 1, "momentum": 0.0}
    sgd = {**single, "steps": 600, "lr": 0.01}
    svrg = {**single, "steps": 8, "lr": 0.07, "variance-reduction": "svrg"}
    variance_reduced = {"gamma": 0.32, "inner_steps": 8, "inner_batch": 1, "full_every": 20}
    return Setting(
        name=f"fedpd-fig2-{kind}",
        where=f"FedPD, Fig. 2: {kind}ly non-IID data, 600 rounds",
        figure="gradient_norm2",
        ours="fedpd",
        rules={
            "fedpd": Rule("fedpd", {"eta": 0.08}, steps),
            "authors": Rule("fedpd", {"eta": 0.08, "x0_rule": "authors"}, steps, reference=True),
            "p-0.5": Rule("fedpd", {"eta": 0.08, "p": 0.5}, steps, reference=True),
            "fedpd-vr": Rule("fedpd-vr", {"eta": 0.08, **variance_reduced}, reference=True),
            "fedavg": Rule("fedavg", {"weights": "uniform"}, steps),
            "fedpd-sgd": Rule("fedpd", {"eta": 0.08}, sgd, reference=True),
            "fedavg-sgd": Rule("fedavg", {"weights": "uniform"}, sgd),
            "fedprox-vr": Rule("fedprox", {"mu": 1.0, "weights": "uniform"}, svrg),
        },
        published={},
        config={
            "dataset": f"fedpd-{kind}",
            "clients": 100,
            "fraction": 1.0,
            "rounds": 600,
            "penalty": 0.1,
            "dtype": "float64",
            "gradient-norm": "true",
            "stack": "auto",
        },
    )


def writers() -> Setting:
    """Return Figs. 4 and 5: SGD at all clients, with communication skipped or not.

    Local steps, batch size, rates, eta and mu are the paper's (Appendix D). The data stand in for
    FEMNIST: 100 writers of digits, 113 samples each, and logistic regression for its CNN.
    """
    steps = {"lr": 0.01}
    return Setting(
        name="fedpd-writers",
        where="FedPD, Figs. 4 and 5: 100 writers of digits, logistic, 50 rounds",
        figure="final_accuracy",
        ours="fedpd",
        rules={
            "fedpd": Rule("fedpd", {"eta": 1.0, "p": 0.0}, steps),
            "p-0.25": Rule("fedpd", {"eta": 1.0, "p": 0.25}, steps, reference=True),
            "p-0.5": Rule("fedpd", {"eta": 1.0, "p": 0.5}, steps, reference=True),
            "fedavg": Rule("fedavg", {"weights": "uniform"}, {"lr": 0.001}),
            "fedavg-0.01": Rule("fedavg", {"weights": "uniform"}, steps),
            "fedprox": Rule("fedprox", {"weights": "uniform", "mu": 1.0}, steps),
            "centralised": centralised(**steps, **{"batch-size": 200}),  # as all clients' steps
        },
        published={},
        config={
            "dataset": "mnist_writers",
            "model": "logistic",
            "clients": 100,
            "fraction": 1.0,
            "rounds": 50,
            "steps": 300,
            "batch-size": 2,
            "momentum": 0.0,
            "gradient-norm": "false",
            "stack": "auto",
        },
        seeds=(1, 2, 3),
        curves=("round", "communication_rounds"),
    )
