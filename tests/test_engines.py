"""One Strategy, several engines: the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.superlink import flwr_run


def test_ray_and_in_process_give_the_same_model(tmp_path: Path) -> None:
    """FedADMM, so that state is kept too; a CNN on real images of digits, so that threads count."""
    config = RunConfig.parse(
        {
            "algorithm": "fedadmm",
            "model": "cnn1",
            "clients": 8,
            "rounds": 3,
            "fraction": 0.5,
            "random-epochs": True,
            "epochs": 2,
            "momentum": 0.5,
            "lr": 0.05,
            "output": str(tmp_path / "ray"),
        }
    )
    lines: list[str] = []
    flwr_run(config.to_run_config(), num_supernodes=8, workers=2, on_line=lines.append)
    on_ray = json.loads((tmp_path / "ray/summary.json").read_text())
    assert any(line.endswith(f"results: {tmp_path / 'ray'}") for line in lines)
    assert on_ray["finished"]
    assert on_ray["model_sha256"] == run_in_process(config).model_sha256
