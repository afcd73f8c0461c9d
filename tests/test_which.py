"""The costs of a target, from the files of comparisons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulations.lab import which

HEAD = "algorithm,seed,round,bytes,seconds,test_accuracy"


def comparison(folder: Path, *rows: str) -> None:
    folder.mkdir()
    (folder / "table.json").write_text(json.dumps([{"target": 0.8}]))
    (folder / "curves.csv").write_text("\n".join([HEAD, *rows, ""]))


@pytest.fixture
def comparisons(tmp_path: Path) -> Path:
    """FedAvg is at the target in round 2 and 4; SCAFFOLD in round 1, and once not in its 3."""
    comparison(
        tmp_path / "digits",
        "fedavg,1,1,1e6,1.5,0.5", "fedavg,1,2,2e6,3.0,0.8", "fedavg,1,3,3e6,4.5,0.9",
        "fedavg,2,2,2e6,3.0,", "fedavg,2,4,4e6,6.0,0.9",
        "scaffold,1,1,2e6,1.0,0.8", "scaffold,2,3,6e6,3.0,0.7",
    )  # fmt: skip
    comparison(tmp_path / "mnist", "fedavg,1,30,15e6,45,0.8", "fedadmm,1,10,5e6,15,0.8")
    return tmp_path


def test_costs_are_means_over_the_seeds_and_lower_bounds_are_said(
    comparisons: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    which.main([str(comparisons)])
    assert capsys.readouterr().out.splitlines() == [
        "| rule | digits | mnist |",
        "|---|---|---|",
        "| fedavg | 3, 3 MB, 4.5 s | 30, 15 MB, 45 s |",
        "| scaffold | more than 2, 4 MB, 2 s | - |",
        "| fedadmm | - | 10, 5 MB, 15 s |",
    ]


def test_the_figure_is_written_as_vectors(comparisons: Path) -> None:
    which.main([str(comparisons), "--output", str(comparisons)])
    assert (comparisons / "rounds-and-bytes.svg").read_text().count("FedADMM") == 1
    assert not (comparisons / "rounds-and-bytes.png").exists()


def test_a_folder_without_comparisons_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        which.main([str(tmp_path)])
    assert f"no comparison in the folders of {tmp_path}" in capsys.readouterr().err


def test_what_a_comparison_lacks_is_said(
    comparisons: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison(comparisons / "femnist", "scaffold,1,1,2e6,1.0,0.8")
    with pytest.raises(SystemExit):
        which.main([str(comparisons), "--output", str(comparisons / "new")])
    out, err = capsys.readouterr()
    assert "| scaffold | more than 2, 4 MB, 2 s | 1, 2 MB, 1 s | - |" in out
    assert "the figure has shares of fedavg's, which ['femnist'] lack" in err
    (comparisons / "femnist/table.json").write_text("[]")
    with pytest.raises(SystemExit):
        which.main([str(comparisons)])
    assert f"{comparisons / 'femnist'} has no finished run" in capsys.readouterr().err
