"""Small runs of the Flower App, and comparisons of such."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from simulations.config import RunConfig
from simulations.lab.compare import main

SMALL: dict[str, Any] = {"clients": 20, "rounds": 3, "fraction": 0.25}


def small(tmp_path: Path, **others: Any) -> RunConfig:
    return RunConfig.parse(SMALL | {"output": str(tmp_path / "run")} | others)


COMPARED = "--dataset digits --clients 5 --rounds 2 --epochs 1"


def compare(folder: Path, line: str) -> list[dict[str, Any]]:
    return main([*COMPARED.split(), *line.split(), "--output", str(folder)])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
