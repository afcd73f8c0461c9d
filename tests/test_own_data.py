"""Data sets and models of one's own: `module:function` in place of a name."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from simulations import data, models
from simulations.config import RunConfig
from simulations.experiment import prepare
from simulations.lab import compare

TEXT = (Path(__file__).parents[1] / "simulations/README.md").read_text()
BROKEN = """
from simulations.generated import Dataset


def of_nothing():
    return [1, 2]


def positional(rows):
    return rows


def no_module(shape, classes):
    return shape
"""


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the file that the page shows; return the arguments of its command."""
    section = TEXT.partition("## Your own data and model")[2]
    file, command = re.findall(r"```\w*\n(.*?)```", section, re.DOTALL)[:2]
    (tmp_path / "my_study.py").write_text(file)
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    return str(command.partition("simulations.lab.compare ")[2])


def test_the_pages_comparison_runs_on_them(shown: str, tmp_path: Path) -> None:
    words = shlex.split(shown)
    words[words.index("--output") + 1] = str(tmp_path / "out")
    compare.main([*words, "--quiet"])
    rows = json.loads((tmp_path / "out/table.json").read_text())
    assert [row["algorithm"] for row in rows] == ["fedavg", "scaffold", "fedadmm"]
    assert all(row["final_accuracy"] > 0.85 for row in rows)


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_workers_find_them_by_their_names(shown: str, tmp_path: Path) -> None:
    found = set()
    for further in ("", "--jobs 2", "--workers 2"):
        words = shlex.split(f"{shown} {further}")
        words[words.index("--algorithms") + 1] = "fedavg,fedprox"
        words[words.index("--output") + 1] = str(tmp_path / f"out{further}")
        compare.main([*words, "--quiet"])
        summaries = json.loads((tmp_path / f"out{further}/summary.json").read_text())
        found.add(tuple(summary["model_sha256"] for summary in summaries))
    assert len(found) == 1


def test_a_seed_draws_the_model_and_options_reach_it(shown: str) -> None:
    nets = [
        models.build("my_study:net", (3,), 2, seed=seed, hidden=hidden)
        for seed, hidden in ((1, 4), (1, 4), (2, 4), (1, 5))
    ]
    first, again, other, wider = (next(net.parameters()) for net in nets)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert wider.shape == (5, 3)
    assert len(data.load("my_study:cancer", held_out=50).test_y) == 50


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("dataset", "my_study:cancr", r"no function 'cancr' \(did you mean 'cancer'\?\)"),
        ("dataset", "my_studi:cancer", "No module named 'my_studi'; it is looked for where"),
        ("dataset", "broken:of_nothing", "a function that returns a simulations.generated.Dataset"),
        ("dataset", "broken:positional", "a function of keyword-only arguments"),
        ("model", "my_study:nt", r"no function 'nt' \(did you mean 'net'\?\)"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(
    key: str, name: str, message: str, shown: str, tmp_path: Path
) -> None:
    settings = {"dataset": "my_study:cancer", "model": "my_study:net", "clients": 5, key: name}
    with pytest.raises(ValueError, match=message):
        prepare(RunConfig.parse(settings | {"output": str(tmp_path / "out")}))


def test_what_builds_no_module_is_refused(shown: str) -> None:
    with pytest.raises(ValueError, match="a function that returns a Module"):
        models.build("broken:no_module", (3,), 2, seed=1)
