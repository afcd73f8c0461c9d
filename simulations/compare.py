"""Several algorithms on the same split and seed: one table, one figure.

    python -m simulations.compare --dataset digits --partition shards --clients 50 --rounds 15 \\
        --algorithms fedavg,fedprox,fedadmm --seed 1 --engine in-process --output DIR

DIR gets ``summary.json`` (a list with one object per algorithm), ``table.md``, ``curves.png`` and
``partition.png``, and one results folder per algorithm; where clients evaluate also the tables and
the figure of ``simulations.fairness``.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fl_strategies import STRATEGIES
from fl_strategies.files import write_atomically
from fl_strategies.params import format_params, parse_params
from simulations.config import RunConfig, knobs
from simulations.experiment import draw_partition, prepare, run_in_process
from simulations.fairness import fairness
from simulations.figures import draw_curves
from simulations.superlink import flwr_run

ENGINES = ("in-process", "ray")


def compare(
    configs: Sequence[RunConfig], folder: Path, *, engine: str = "in-process", workers: int = 2
) -> list[dict[str, Any]]:
    """Run every config into ``folder / algorithm``; write and return the summaries.

    ``engine`` is ``"in-process"`` or ``"ray"`` (with ``workers`` worker processes).
    """
    draw_partition(configs[0], folder / "partition.png")
    summaries: list[dict[str, Any]] = []
    for config in configs:
        if engine == "ray":
            if not config.state_dir:  # what is in `context.state` travels with every message
                config = replace(config, state_dir=str(Path(config.output) / "state"))
                shutil.rmtree(config.state_dir, ignore_errors=True)
            flwr_run(
                config.to_run_config(),
                num_supernodes=config.clients,
                gpus=1 / workers if config.torch_device.type == "cuda" else 0.0,
                workers=workers,
                on_line=_print_progress,
            )
        else:
            run_in_process(config)
        summaries.append(json.loads((Path(config.output) / "summary.json").read_text()))
        write_atomically(folder / "summary.json", json.dumps(summaries, indent=2).encode())
    (folder / "table.md").write_text(table(summaries, configs))
    histories = {config.algorithm: Path(config.output) / "history.jsonl" for config in configs}
    draw_curves(histories, folder / "curves.png")
    if configs[0].fraction_evaluate > 0.0:
        fairness({config.algorithm: Path(config.output) for config in configs}, folder)
    return summaries


def table(summaries: Sequence[dict[str, Any]], configs: Sequence[RunConfig]) -> str:
    """Return the summaries as a Markdown table, with the settings that each was run with."""
    target = f"rounds to {100 * configs[0].target:g} %"
    lines = [
        f"| algorithm | final accuracy | best | {target} | MB up | MB down | seconds | ‖∇f‖²"
        " | settings |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for summary, config in zip(summaries, configs, strict=True):
        solver = f"{config.solver} {config.solver_params}".strip()
        settings = f"{config.model}, {solver} lr {config.lr:g}, momentum {config.momentum:g}"
        norm2 = summary["gradient_norm2"]
        gradient = "-" if norm2 is None else f"{norm2:.1e}"
        lines.append(
            f"| {summary['algorithm']} | {100 * summary['final_accuracy']:.2f} %"
            f" | {100 * summary['best_accuracy']:.2f} % | {summary['rounds_to_target'] or '-'}"
            f" | {summary['bytes_up'] / 1e6:.2f} | {summary['bytes_down'] / 1e6:.2f}"
            f" | {summary['seconds']:.1f} | {gradient} | {settings} {config.params} |"
        )
    return "\n".join(lines) + "\n"


def configs_for(
    algorithms: Sequence[str], params: Sequence[str], common: dict[str, Any], folder: Path
) -> list[RunConfig]:
    """Return one checked config per algorithm, before anything runs.

    Each of ``params`` ("name=value", or "algorithm.name=value") goes to every algorithm that has
    the knob; one that no algorithm has is refused.
    """
    if unknown := sorted(set(algorithms) - STRATEGIES.keys()):
        raise ValueError(f"unknown algorithms {unknown}; known: {sorted(STRATEGIES)}")
    if len(set(algorithms)) < len(algorithms):
        raise ValueError(f"each algorithm once, got {list(algorithms)}")
    mine: dict[str, dict[str, Any]] = {algorithm: {} for algorithm in algorithms}
    for item in params:
        owner, dot, bare = item.partition("=")[0].rpartition(".")
        value = parse_params(item[len(owner) + 1 :] if dot else item)
        name = next(iter(value))
        takers = [a for a in algorithms if name in knobs(a) and owner in ("", a)]
        if not takers:
            known = {algorithm: knobs(algorithm) for algorithm in algorithms}
            raise ValueError(f"no algorithm here has the knob {bare!r}; knobs: {known}")
        for algorithm in takers:
            mine[algorithm] |= value
    return [
        RunConfig.parse(
            common
            | {
                "algorithm": algorithm,
                "params": format_params(mine[algorithm]),
                "output": str(folder / algorithm),
            }
        )
        for algorithm in algorithms
    ]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Compare from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", required=True, help=f"of {','.join(sorted(STRATEGIES))}")
    parser.add_argument("--output", required=True, type=Path, help="folder for the results")
    parser.add_argument("--engine", choices=ENGINES, default="in-process")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of Ray")
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="knob of an algorithm"
    )
    parser.add_argument("--verbose", action="store_true", help="show Flower's log")
    for key in fields(RunConfig):
        if key.name in ("algorithm", "params", "output"):
            continue
        flag, default = "--" + key.name.replace("_", "-"), getattr(RunConfig, key.name)
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=key.metadata["about"])
        else:
            parser.add_argument(flag, type=type(default), help=key.metadata["about"])
    args = parser.parse_args(arguments)
    given = {
        key.name.replace("_", "-"): getattr(args, key.name)
        for key in fields(RunConfig)
        if getattr(args, key.name, None) is not None
    }
    del given["output"]
    folder: Path = args.output.expanduser().absolute()
    try:
        configs = configs_for(args.algorithms.split(","), args.param, given, folder)
        for config in configs:
            prepare(config)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if not args.verbose:
        logging.getLogger("flwr").setLevel(logging.WARNING)
    summaries = compare(configs, folder, engine=args.engine, workers=args.workers)
    print(table(summaries, configs))
    print(f"results: {folder}")
    return summaries


def _print_progress(line: str) -> None:
    if " round " in line or line.startswith("results:"):
        print(line, flush=True)


if __name__ == "__main__":
    main()
