"""Mutants are caught where a test fails, and said to be stale where the source has moved on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS
from trials import ROOT, mutated

MADE = """
from trials import main, of

MUTANTS = of(
    "fl_strategies/rule.py",
    "tests/test_rule.py",
    {"2 * x": "3 * x", "x: float": "x: int", "2 * y": "3 * y", "return": "raise"},
)

raise SystemExit(main(MUTANTS, "", large=()))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder with a package of one rule, its test, and four mutants of it."""
    for folder in ("fl_strategies", "clients", "simulations", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "fl_strategies/__init__.py").touch()
    rule = "def double(x: float) -> float:\n    return 2 * x\n"
    (tmp_path / "fl_strategies/rule.py").write_text(rule)
    (tmp_path / "tests/test_rule.py").write_text(
        "from fl_strategies.rule import double\n\n"
        "def test_it_doubles():\n    assert double(3.0) == 6.0\n"
    )
    (tmp_path / "tests/mutants.py").write_text(MADE)
    shutil.copy(ROOT / "tests/trials.py", tmp_path / "tests")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def tried(tree: Path, *options: str) -> tuple[int, list[str]]:
    """Return the exit code, and the lines by their first words."""
    command = [sys.executable, tree / "tests/mutants.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree)
    return done.returncode, sorted(done.stdout.splitlines())


@pytest.mark.slow
def test_each_mutant_is_caught_or_survives_or_is_stale(tree: Path) -> None:
    code, (total, *lines) = tried(tree)
    assert code == 1
    assert total == "4 mutants: 2 caught, 1 stale, 1 survived; 50.0% caught, at least 95% must be"
    assert [line.split(" ")[0] for line in lines] == ["caught", "caught", "stale:", "survived"]
    assert "its text is there 0 times" in lines[2]
    assert "x: float -> x: int" in lines[3]


@pytest.mark.slow
def test_with_every_mutant_caught_the_exit_code_is_0(tree: Path) -> None:
    assert tried(tree, "--only", "3 * x")[0] == 0
    assert tried(tree, "--sound")[0] == 0


def test_every_mutants_text_is_there_once() -> None:
    for mutant in MUTANTS:
        assert mutated((ROOT / mutant.file).read_text(), mutant), str(mutant)


def test_every_rule_has_mutants() -> None:
    """Write those of a new algorithm into ``mutants_of_rules.py``."""
    rules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fl_strategies").rglob("*.py")
        if re.search(r"^def (client|server)_rule\(", path.read_text(), re.MULTILINE)
    }
    assert {"fl_strategies/scaffold.py", "fl_strategies/bcd/fedbcd.py"} <= rules
    assert rules - {mutant.file for mutant in MUTANTS} == set()
