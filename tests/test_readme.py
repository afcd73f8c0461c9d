"""What the README and the docstrings show works as shown."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import clients
import fl_strategies
import simulations
from simulations.config import RunConfig

ROOT = Path(__file__).parents[1]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readmes_python_runs_as_one_program(capsys: Any) -> None:
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0


def test_the_readmes_comparison_runs(tmp_path: Path) -> None:
    (command,) = [b for b in blocks("bash") if b.startswith("python -m simulations.compare")]
    arguments = command.split()
    arguments[0] = sys.executable
    arguments[arguments.index("results/digits")] = str(tmp_path)
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"results: {tmp_path}"


def test_the_readmes_table_names_every_algorithm() -> None:
    names = re.findall(r"^\| [^|]+ \| `([a-z-]+)` \|", (ROOT / "README.md").read_text(), re.M)
    assert names == list(fl_strategies.STRATEGIES) == list(clients.CLIENTS)


def test_the_run_configs_table_is_that_of_the_code() -> None:
    text = (ROOT / "simulations/README.md").read_text()
    for key in fields(RunConfig):
        default = str(key.default).lower() if isinstance(key.default, bool) else key.default
        shown = f"`{default}`" if default != "" else '`""`'
        name = key.name.replace("_", "-")
        assert f"| `{name}` | {shown} | {key.metadata['about']} |" in text


def test_every_docstring_example_is_true() -> None:
    found = 0
    for package in (fl_strategies, clients, simulations):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            failed, tried = doctest.testmod(importlib.import_module(info.name))
            assert failed == 0, info.name
            found += tried
    assert found > 0
