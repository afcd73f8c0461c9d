"""The commands that the pages show can begin: names, settings and numbers of clients fit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from simulations import problems
from simulations.config import RunConfig
from simulations.generated import BUILT_IN
from simulations.lab import board, compare, experiments, reproduce
from simulations.lab.experiments import Experiment

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "simulations").rglob("*.md")]
PAGES += sorted((ROOT / "notebooks/pages").rglob("*.md"))
STANDS_FOR = {"CHANGE": "epochs-5"}


def shown(program: str) -> list[str]:
    """Return the arguments of each command in a code block, a line each, of all pages."""
    lines: list[str] = []
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL):
            lines += block.replace("\\\n", " ").splitlines()
    found = [line.partition(f"simulations.lab.{program} ")[2] for line in lines]
    return list(dict.fromkeys(filter(None, found)))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", shown("reproduce"))
def test_a_study_of_a_page_has_the_cells_and_rules_that_are_named(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_no_trials(experiment: Experiment, rules: Sequence[str] = ()) -> list[RunConfig]:
        return []

    monkeypatch.setattr(Experiment, "waiting", run_no_trials)
    monkeypatch.setattr(experiments, "run_all", lambda work, **options: None)
    monkeypatch.setattr(board, "parts", lambda config: None)
    words = [STANDS_FOR.get(word, word) for word in shlex.split(arguments)]
    words[words.index("--output") + 1] = str(tmp_path)
    reproduce.main(words)


HERE = [line for line in shown("compare") if not re.search(r"\$|ag_news|my_study", line)]
"""Comparisons of data at hand, without variables of the shell, and files that a page shows."""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", HERE)
def test_a_comparison_of_a_page_has_settings_that_fit_its_data(
    arguments: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    datasets_folder: Path,
) -> None:
    made: list[compare.Comparison] = []

    def begun(comparison: compare.Comparison, jobs: int) -> list[dict[str, Any]]:
        made.append(comparison)
        raise SystemExit

    monkeypatch.setattr(compare.Comparison, "run", begun)
    words = shlex.split(arguments)
    words[words.index("--output") + 1] = str(tmp_path)
    with pytest.raises(SystemExit):
        compare.main(words)
    (comparison,) = made
    for config in comparison.configs.values():
        if config.dataset in {*BUILT_IN, "mnist"}:
            assert len(problems.parts(config)) == config.clients
