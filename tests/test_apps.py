"""The apps that ``python -m fl_strategies.apps`` writes: `flwr run` starts each of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fl_strategies import apps
from simulations.lab.superlink import flwr_run

ROUNDS = {
    "flower": r"accuracy: \[([0-9., ]+)\]",
    "strategy": r"accuracy: \[([0-9., ]+)\]",
    "problem": r"accuracy: \[([0-9., ]+)\]",
    "legacy": r"History \(loss, distributed\)",
}
"""What the log says of a run that came to its end."""


def written(kind: str, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "fl_strategies.apps", kind, str(folder / "my-app")], check=True
    )
    return folder / "my-app"


@pytest.mark.slow
@pytest.mark.xdist_group("engine")
@pytest.mark.parametrize("kind", apps.KINDS)
def test_flwr_run_starts_the_app_and_the_clients_train(kind: str, tmp_path: Path) -> None:
    lines: list[str] = []
    flwr_run({}, num_supernodes=4, on_line=lines.append, app=written(kind, tmp_path))
    log = "\n".join(lines)
    found = re.search(ROUNDS[kind], log)
    assert found, log
    if found.groups():
        accuracies = [float(number) for number in found[1].split(",")]
        assert len(accuracies) == 3
        assert accuracies[-1] > 0.2, log
    assert "left out" not in log


def test_the_app_with_another_strategy_differs_from_flowers_in_two_lines() -> None:
    before, after = (
        (apps.HERE / kind / "my_app/server_app.py").read_text().splitlines()
        for kind in ("flower", "strategy")
    )
    new = [line for line in after if line not in before]
    assert len(new) == 2
    for line, words in zip(new, ("import FedAvg", "clipping_norm"), strict=True):
        assert words in line
    assert (apps.HERE / "flower/my_app/client_app.py").read_text() == (
        apps.HERE / "strategy/my_app/client_app.py"
    ).read_text()


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        apps.write("problem", tmp_path)
    with pytest.raises(ValueError, match="must be one of flower, strategy, problem, legacy"):
        apps.write("other", tmp_path / "new")
    assert not list(tmp_path.iterdir())
