"""``make demo``: FedADMM against FedAvg on 100 clients that hold two label-sorted shards each.

Runs ``flwr run .`` (Flower's Ray simulation) once per algorithm on scikit-learn's digits, and ends
with a table. No process stays behind. Options of ``simulations.lab.compare`` may be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from simulations.lab import compare
from simulations.lab.command_line import Command

SETTINGS = (
    "--engine ray --dataset digits --partition shards --clients 100 --rounds 30"
    " --algorithms fedadmm,fedavg"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo from the command line."""
    folder = Path.home() / "fl-strategies-results" / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    preset = [*SETTINGS.split(), "--output", str(folder)]
    compare.main(arguments, parser=Command("demo", __doc__, preset))


if __name__ == "__main__":
    main()
