"""How evenly a global model serves clients: a table and a figure (FedBC, Figs. 3 and 4) of runs.

    python -m simulations.lab.fairness RESULTS... --output DIR

RESULTS are results folders of runs in which clients evaluated (``--fraction-evaluate``). DIR gets

``fairness.csv``  a row per run and round: training loss, the variance over clients of the global
                  model's accuracy, its accuracy at the smallest and at the largest client, and the
                  weights and sample shares of the smallest and the largest client of the round
``clients.csv``   a row per run and client that ever trained: its samples, and its weight and share
                  of samples in its last round
``fairness.png``  figures of both tables
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulations.figures import read_history, save, styled
from simulations.lab.command_line import Command
from simulations.tables import write_csv

ROUND = {
    "train-loss": "train-loss",
    "accuracy": "eval-accuracy",
    "own-accuracy": "own-accuracy-mean",
    "accuracy-variance": "eval-accuracy-variance",
    "accuracy-smallest": "eval-accuracy-smallest",
    "accuracy-largest": "eval-accuracy-largest",
    "weight-smallest": "weight-share-smallest",
    "weight-largest": "weight-share-largest",
    "data-smallest": "data-share-smallest",
    "data-largest": "data-share-largest",
}
"""Columns of ``fairness.csv``, and their names in a history."""


def fairness(runs: Mapping[str, Path], folder: Path) -> None:
    """Write the two tables and the figure of ``runs`` (results folders by label) into ``folder``.

    Raises ``ValueError`` for a run in which no client evaluated.
    """
    rounds: list[dict[str, Any]] = []
    clients: list[dict[str, Any]] = []
    for label, run in runs.items():
        if not (run / "history.jsonl").is_file():
            raise ValueError(f"{run} is no results folder: it has no history.jsonl")
        history = read_history(run / "history.jsonl")
        if not any("eval-accuracy" in row for row in history):
            if any(row.get("eval-clients-asked") for row in history):
                raise ValueError(f"no evaluation of a client could be used in {run}: see its log")
            raise ValueError(f"no client evaluated in {run}: set fraction-evaluate")
        if not any("weight-share-largest" in row for row in history):
            raise ValueError(f"all {len(history)} rounds of {run} were skipped: nothing to measure")
        for row in history:
            columns = {column: row.get(name, "") for column, name in ROUND.items()}
            rounds.append({"run": label, "round": row["round"], **columns})
        last: dict[int, dict[str, float]] = {}
        for row in read_history(run / "clients.jsonl"):
            if "weight-share" in row:
                last[int(row["client"])] = row
        for client, row in sorted(last.items()):
            names = ("samples", "weight-share", "data-share")
            clients.append({"run": label, "client": client} | {n: row[n] for n in names})
    write_csv(folder / "fairness.csv", rounds)
    write_csv(folder / "clients.csv", clients)
    draw(rounds, clients, folder / "fairness.png")


@styled
def draw(
    rounds: Sequence[Mapping[str, Any]], clients: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Draw the rows of the two tables."""
    from matplotlib.figure import Figure  # here: most who import the tables draw nothing

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    (loss, weights, by_size), (spread, smallest, largest) = figure.subplots(2, 3)
    for label in dict.fromkeys(row["run"] for row in rounds):
        of_run = [row for row in rounds if row["run"] == label]
        for axes, column in (
            (loss, "train-loss"),
            (spread, "accuracy-variance"),
            (smallest, "accuracy-smallest"),
            (largest, "accuracy-largest"),
        ):
            seen = [row for row in of_run if row[column] != ""]
            axes.plot([row["round"] for row in seen], [row[column] for row in seen], label=label)
        seen = [row for row in of_run if row["weight-smallest"] != ""]
        (line,) = weights.plot(
            [row["round"] for row in seen], [row["weight-smallest"] for row in seen], label=label
        )
        weights.plot(
            [row["round"] for row in seen],
            [row["weight-largest"] for row in seen],
            color=line.get_color(),
            linestyle="--",
        )
        dots = [row for row in clients if row["run"] == label]
        by_size.scatter(
            [row["samples"] for row in dots], [row["weight-share"] for row in dots], s=10
        )
    loss.set(xlabel="round", ylabel="training loss", yscale="log")
    weights.set(xlabel="round", ylabel="weight of smallest (-) and largest (--)", yscale="log")
    by_size.set(xlabel="client's samples", ylabel="its weight", xscale="log")
    spread.set(xlabel="round", ylabel="variance of accuracy over clients")
    smallest.set(xlabel="round", ylabel="accuracy at the smallest client", ylim=(-0.02, 1.02))
    largest.set(xlabel="round", ylabel="accuracy at the largest client", ylim=(-0.02, 1.02))
    lines = loss.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2, fontsize="small")
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write tables and figure from the command line."""
    parser = Command("fairness", __doc__)
    parser.add_argument("results", nargs="+", type=Path, help="results folders")
    parser.add_argument("--output", required=True, type=Path, help="folder for tables and figure")
    args = parser.read(arguments)
    names = [run.resolve().name for run in args.results]
    labels = names if len({*names}) == len(names) else [str(run) for run in args.results]
    with parser.explained():
        args.output.mkdir(parents=True, exist_ok=True)
        fairness(dict(zip(labels, args.results, strict=True)), args.output)
    print(f"results: {args.output.absolute()}")


if __name__ == "__main__":
    main()
