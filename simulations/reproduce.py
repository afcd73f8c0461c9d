"""Studies: many runs from one command, whose table is committed.

    python -m simulations.reproduce STUDY --output DIR [--jobs 2] [--only TEXT]

A study is a list of cells. A cell that is finished under DIR is not run again, so that the command
can be repeated after an interruption; ``DIR/table.md`` is written anew after every cell. A cell
ends at its number of rounds, at its target, when all its clients diverge, or when as many rounds as
its patience bring no new best accuracy.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from fl_strategies import EarlyStop, FedADMM, FedBC, FedBCD, RoundInfo
from fl_strategies.params import format_params
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.figures import read_history


class Cell(NamedTuple):
    """One run: its name, which is also that of its folder, and what its run-config sets."""

    name: str
    config: dict[str, Any]
    patience: int | None = 10
    """Rounds without a new best test accuracy after which it ends, if it may end early."""
    marks: tuple[int, ...] = ()
    """Rounds whose test accuracy the table shows, beside the last clients' own accuracy."""


def fedadmm_mnist() -> list[Cell]:
    """FedADMM, Table III, first two columns: rounds to 97 % on MNIST with 100 clients.

    Rule x network x momentum x learning rate, one seed; FedAvg and FedProx are tuned the same way
    on the paper's network. Forward passes are in bfloat16, twice as fast on a CPU of this kind.
    """
    base = {
        "dataset": "mnist",
        "clients": 100,
        "fraction": 0.1,
        "rounds": 40,
        "epochs": 5,
        "random-epochs": "true",
        "batch-size": 200,
        "target": 0.97,
        "stop-at-target": True,
        "seed": 1,
        "autocast": "bfloat16",
    }
    authors: dict[str, Any] = dict(FedADMM.authors_rule)
    rules: dict[str, tuple[str, dict[str, Any]]] = {
        "fedadmm-paper": ("fedadmm", {"rho": 0.01}),
        "fedadmm-authors": ("fedadmm", {"rho": 0.01, **FedADMM.authors_rule}),
        "fedavg": ("fedavg", {}),
        "fedprox": ("fedprox", {"mu": 0.01}),
    }
    grid = [
        (partition, model, momentum, lr)
        for partition, rates in (("iid", (0.1, 0.2, 0.5)), ("shards", (0.1, 0.01)))
        for model in ("cnn1-linear", "cnn1")
        for momentum in (0.5, 0.0)
        for lr in rates
    ]

    def cell(
        rule: str, partition: str, model: str, momentum: float, lr: float, **others: Any
    ) -> Cell:
        algorithm, params = rules[rule]
        name = f"{rule}-{partition}-{model}-momentum{momentum}-lr{lr}"
        name += "".join(f"-{key}{value}" for key, value in others.items())
        settings = {"algorithm": algorithm, "params": format_params(params)}
        where = {"partition": partition, "model": model, "momentum": momentum, "lr": lr}
        return Cell(name, base | settings | where | others)

    cells = [
        cell(rule, *setting)
        for rule, (algorithm, _) in rules.items()
        for setting in grid
        if algorithm == "fedadmm" or setting[1] == "cnn1"
    ]
    # other server steps and penalties, at the settings that did best or could not be made to
    rules |= {
        "fedadmm-authors-eta0.5": ("fedadmm", {"rho": 0.01, "eta": 0.5, **authors}),
        "fedadmm-authors-rho0.1": ("fedadmm", {"rho": 0.1, **authors}),
        "fedadmm-paper-rho0.1": ("fedadmm", {"rho": 0.1}),
        "fedadmm-paper-fraction": ("fedadmm", {"rho": 0.01, "eta": "fraction"}),
    }
    cells += [
        cell("fedadmm-authors-eta0.5", "iid", "cnn1", 0.5, 0.2),
        cell("fedadmm-authors-rho0.1", "iid", "cnn1", 0.5, 0.1),
        cell("fedadmm-paper-rho0.1", "iid", "cnn1", 0.5, 0.1),
        cell("fedadmm-paper-fraction", "iid", "cnn1", 0.5, 0.1),
    ]
    # three seeds, in full precision, for the best of each rule
    for rule, momentum, lr in (
        ("fedadmm-authors", 0.5, 0.1),
        ("fedadmm-paper", 0.5, 0.1),
        ("fedavg", 0.5, 0.1),
    ):
        cells += [
            cell(rule, "iid", "cnn1", momentum, lr, autocast="", seed=seed) for seed in (1, 2, 3)
        ]
    return cells


def fedbcd_mnist() -> list[Cell]:
    """FedBCD, Figs. 3 and 4: 10 cloud servers of 10 devices on MNIST, 300 rounds.

    Sync-cloud by the paper's rule and by its authors' code, async-cloud with beta = B/V of 0.3 and
    0.5, FedBCD-I, and FedProx with ASPG, as the paper has it, and FedAvg. Devices hold 3 or 6
    labels each, 3 or 6 of 10 are active. The time of Fig. 4 is ``virtual-seconds``.
    """
    base = {
        "dataset": "mnist",
        "model": "mlp3",
        "partition": "diversity",
        "clients": 100,
        "rounds": 300,
        "epochs": 5,
        "random-epochs": "true",
        "batch-size": 32,
        "lr": 0.005,
        "target": 0.9,
        "local-test": 0.15,
        "fraction-evaluate": 0.1,
        "seed": 1,
    }
    aspg = {"extrapolation": 0.9, "box": 2.0}
    authors = dict(FedBCD.authors_local)
    ten = {"servers": 10}
    rules: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "sync": ("fedbcd", ten, {}),
        "sync-authors": ("fedbcd", ten | dict(FedBCD.authors_rule), authors),
        "async-0.3": ("fedbcd-async", ten | {"first": 3}, {}),
        "async-0.5": ("fedbcd-async", ten | {"first": 5}, {}),
        "async-0.3-rigorous": ("fedbcd-async", ten | {"first": 3, "rigorous": True}, {}),
        "fedbcd-i": ("fedbcd-i", ten, {}),
        "fedprox": ("fedprox", {"mu": 5.0, "weights": "uniform"}, aspg),
        "fedavg": ("fedavg", {"weights": "uniform"}, {}),
    }
    return [
        Cell(
            f"diversity{labels}-active{active}-{rule}",
            base
            | local
            | {
                "algorithm": algorithm,
                "params": format_params(params),
                "partition-params": f"labels_per_client={labels}",
                "fraction": active / 10,
            },
            patience=None,
            marks=(50, 100, 300),
        )
        for labels, active in ((6, 3), (3, 3), (3, 6))
        for rule, (algorithm, params, local) in rules.items()
    ]


def fedpd_fig2() -> list[Cell]:
    """FedPD, Fig. 2: ||grad f||^2 on penalised logistic regression, 100 clients, 600 rounds.

    Weakly and strongly non-IID data, in float64. eta = 0.08 is the 8 of the authors' code, whose
    f_i carry a factor 1/100; the paper states no inner rate: gradient steps are of 0.07, gamma is
    4 eta.
    """
    base = {
        "clients": 100,
        "rounds": 600,
        "solver": "gd",
        "epochs": 8,
        "lr": 0.07,
        "penalty": 0.1,
        "dtype": "float64",
        "seed": 1,
    }
    rules: dict[str, tuple[str, dict[str, Any]]] = {
        "fedpd-gd-p0": ("fedpd", {"eta": 0.08}),
        "fedpd-gd-p0-authors": ("fedpd", {"eta": 0.08, "x0_rule": "authors"}),
        "fedpd-gd-p0.5": ("fedpd", {"eta": 0.08, "p": 0.5}),
        "fedpd-vr": (
            "fedpd",
            {"eta": 0.08, "oracle": "II", "gamma": 0.32, "inner_steps": 8, "inner_batch": 1}
            | {"full_every": 20},
        ),
        "fedavg-gd": ("fedavg", {"weights": "uniform"}),
    }
    return [
        Cell(
            f"{rule}-{kind}",
            base
            | {
                "algorithm": algorithm,
                "params": format_params(params),
                "dataset": f"fedpd-{kind}",
            },
            patience=None,
        )
        for kind in ("weak", "strong")
        for rule, (algorithm, params) in rules.items()
    ]


FEDBC_RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg-by-size": ("fedavg", {}),
    "fedavg-uniform": ("fedavg", {"weights": "uniform"}),
    "fedprox": ("fedprox", {"mu": 1.0}),
    "fedbc": ("fedbc", {"alpha": 1e-3}),
    "fedbc-authors": ("fedbc", {"alpha": 1e-3, **FedBC.authors_rule}),
}
"""mu and alpha are those of the authors' script for this data set."""

FEDBC_RATES = (0.001, 0.01, 0.1, 0.5, 1.0)


def fedbc_synthetic() -> list[Cell]:
    """FedBC, Table 1: synthetic(0.5, 0.5), 30 devices, 10 a round, E = 1 and 5, 50 rounds.

    Every rule at each rate of the paper's grid on data set 0 with seed 1; ``fedbc_table`` chooses
    the rates. Then four more seeds on data set 0, and one on data sets 1 and 2, at all rates that
    lie within a factor 10 of what is usual for it (0.01 and 0.1).
    """
    base = {
        "dataset": "synthetic",
        "clients": 30,
        "fraction": 1 / 3,
        "rounds": 50,
        "batch-size": 20,
        "momentum": 0.5,
        "fraction-evaluate": 1.0,
    }
    runs = [(0, 1, lr) for lr in FEDBC_RATES]
    runs += [(0, seed, lr) for seed in (2, 3, 4, 5) for lr in (0.01, 0.1)]
    runs += [(data, 1, lr) for data in (1, 2) for lr in (0.01, 0.1)]
    return [
        Cell(
            f"{rule}-E{epochs}-data{data}-seed{seed}-lr{lr}",
            base
            | {
                "algorithm": algorithm,
                "params": format_params(params),
                "epochs": epochs,
                "lr": lr,
                "seed": seed,
                "dataset-params": f"sizes=lognormal seed={data}",
            },
            patience=None,
        )
        for epochs in (1, 5)
        for data, seed, lr in runs
        for rule, (algorithm, params) in FEDBC_RULES.items()
    ]


STUDIES: dict[str, Callable[[], list[Cell]]] = {
    "fedadmm-mnist": fedadmm_mnist,
    "fedbc-synthetic": fedbc_synthetic,
    "fedbcd-mnist": fedbcd_mnist,
    "fedpd-fig2": fedpd_fig2,
}


def diverged(info: RoundInfo) -> bool:
    """Give a cell up when no client's reply was finite in a round."""
    return info.metrics["clients-used"] == 0


def run_cell(cell: Cell, folder: Path) -> None:
    """Run one cell, unless it is there."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = RunConfig.parse(cell.config | {"output": str(folder / cell.name)})
    patience = [EarlyStop(patience=cell.patience)] if cell.patience else []
    run_in_process(config, [diverged, *patience])


def table(cells: list[Cell], folder: Path) -> str:
    """Return the cells' results as a Markdown table."""
    marks = max((cell.marks for cell in cells), default=())
    names = [f"accuracy at {t}" for t in marks] + ["own accuracy", "virtual s"] * bool(marks)
    heads = ["cell", "rounds to target", "best accuracy", "after rounds", "‖∇f‖²", *names]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for cell in cells:
        path = folder / cell.name / "summary.json"
        if path.exists():
            summary = json.loads(path.read_text())
            to_target = summary["rounds_to_target"] or "-"
            best = 100 * summary["best_accuracy"]
            norm2 = summary.get("gradient_norm2")
            gradient = "-" if norm2 is None else f"{norm2:.1e}"
            line = (
                f"| {cell.name} | {to_target} | {best:.2f} % | {summary['rounds']} | {gradient} |"
            )
            if marks:
                history = read_history(path.parent / "history.jsonl")
                rows = {int(row["round"]): row for row in history}
                shown = [rows[t]["test-accuracy"] if t in rows else math.nan for t in marks]
                last = rows.get(summary["rounds"], {})
                shown.append(last.get("own-accuracy", last.get("eval-accuracy", math.nan)))
                line += "".join(f" {100 * share:.2f} % |" for share in shown)
                line += f" {last.get('virtual-seconds', math.nan):.0f} |"
            lines.append(line)
    return "\n".join(lines) + "\n"


FEDBC_FIGURES = {
    "test-accuracy": "accuracy",
    "eval-accuracy-variance": "variance over clients",
    "eval-accuracy-smallest": "smallest client",
    "eval-accuracy-largest": "largest client",
    "own-accuracy-mean": "own models",
    "weight-share-smallest": "smallest's weight",
    "weight-share-largest": "largest's weight",
}

LAST = 10
"""Last rounds of a run that ``fedbc_table`` averages: partial participation is noisy."""


def fedbc_table(cells: list[Cell], folder: Path) -> str:
    """Return a row per rule, E and data set, at the rule's best rate on data set 0 with seed 1.

    Figures are means over the last ten rounds, then mean and standard deviation over seeds.
    """
    found: dict[tuple[str, int, int], dict[float, list[dict[str, float]]]] = {}
    for cell in cells:
        path = folder / cell.name / "summary.json"
        if path.exists() and json.loads(path.read_text())["finished"]:
            rows = read_history(folder / cell.name / "history.jsonl")[-LAST:]
            figures = {n: _mean_of_rows(rows, n) for n in FEDBC_FIGURES}
            rule, *_ = cell.name.partition("-E")
            data = int(cell.config["dataset-params"][-1])
            key = (rule, cell.config["epochs"], data)
            found.setdefault(key, {}).setdefault(cell.config["lr"], []).append(figures)
    lines = [
        "| E | data set | rule | lr | " + " | ".join(FEDBC_FIGURES.values()) + " | seeds |",
        "|---" * (5 + len(FEDBC_FIGURES)) + "|",
    ]
    for epochs in (1, 5):
        for data in (0, 1, 2):
            for rule in FEDBC_RULES:
                tuned = found.get((rule, epochs, 0), {})
                if not tuned:
                    continue
                lr = max(tuned, key=lambda rate: tuned[rate][0]["test-accuracy"])
                runs = found.get((rule, epochs, data), {}).get(lr, [])
                if runs:
                    shown = [_mean_and_deviation([r[name] for r in runs]) for name in FEDBC_FIGURES]
                    cells_of_row = [str(epochs), str(data), rule, f"{lr:g}", *shown, str(len(runs))]
                    lines.append("| " + " | ".join(cells_of_row) + " |")
    return "\n".join(lines) + "\n"


def _mean_of_rows(rows: list[dict[str, float]], name: str) -> float:
    """Return the mean of a column; NaN where a row lacks it or has null."""
    values = [row.get(name) for row in rows]
    return sum(math.nan if value is None else value for value in values) / len(rows)


def _mean_and_deviation(values: list[float]) -> str:
    if math.isnan(values[0]):
        return "-"
    mean = f"{100 * statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


TABLES: dict[str, Callable[[list[Cell], Path], str]] = {"fedbc-synthetic": fedbc_table}
"""Tables of studies for which a row per cell would not do."""


def main() -> None:
    """Run a study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, one thread each")
    parser.add_argument("--only", default="", help="cells whose name has this text")
    args = parser.parse_args()
    folder: Path = args.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    cells = STUDIES[args.study]()

    def finished(cell: Cell) -> bool:
        path = folder / cell.name / "summary.json"
        return path.exists() and json.loads(path.read_text())["finished"]

    todo = [cell for cell in cells if args.only in cell.name and not finished(cell)]
    make_table = TABLES.get(args.study, table)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(run_cell, cell, folder) for cell in todo]
        for done, future in enumerate(as_completed(futures), start=1):
            if (error := future.exception()) is not None:
                print(f"a cell failed: {error}", flush=True)
            (folder / "table.md").write_text(make_table(cells, folder))
            print(f"{done} of {len(todo)} cells done", flush=True)
    print(make_table(cells, folder))


if __name__ == "__main__":
    main()
