"""What the benchmarks make of a run's files and of the machine's processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulations.lab import benchmark
from simulations.lab.benchmark_memory import memory_of


def written(folder: Path, rows: list[dict[str, float]]) -> Path:
    folder.mkdir()
    first = {"seconds": 100.0, "busy-share-max": 0.5}  # which loads data and code, and is left out
    lines = [json.dumps({"round": n} | row) for n, row in enumerate((first, *rows), start=1)]
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_the_parts_of_a_round_on_ray_add_up_to_it(tmp_path: Path) -> None:
    ray = [{"seconds": 0.2, "busy-share-max": 0.4}, {"seconds": 0.3, "busy-share-max": 0.6}]
    alone = [{"seconds": 0.1, "busy-share-max": 0.9}, {"seconds": 0.1, "busy-share-max": 0.8}]
    found = benchmark.of_a_round(
        written(tmp_path / "ray", ray), written(tmp_path / "alone", alone), 70.0
    )
    steps, worker, server, between = (spent for _, spent in found)
    assert steps == 70.0
    assert steps + worker == pytest.approx((80.0 + 180.0) / 2)
    assert server == pytest.approx((10.0 + 20.0) / 2)
    assert steps + worker + server + between == pytest.approx(250.0)


def test_memory_is_that_of_the_youngest_process_of_the_name_below_this_one() -> None:

    held = "x = bytearray(60_000_000); print(flush=True); input()"
    sizes = []
    for program in (held.replace("60", "1"), held):
        process = subprocess.Popen(
            [sys.executable, "-c", program, "of-these"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        sizes.append(memory_of("of-these"))
        process.communicate(b"\n")
    (_, small), (resident, peak) = sizes
    assert resident - small == pytest.approx(59.0, abs=3.0)
    assert peak >= resident
