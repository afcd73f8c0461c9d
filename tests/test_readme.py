"""What the README and the docstrings show works as shown."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import pkgutil
import re
import socket
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import torch

import clients
import fl_strategies
import simulations
from clients.keeping import to_fields
from fl_strategies.parts import STAGES, parts_for
from fl_strategies.proximity import State as FedBCState
from simulations.config import RunConfig
from simulations.lab.superlink import with_home

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


QUICKSTART = "notebooks/pages/quickstart.md"


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readme_is_short() -> None:
    """But for a row of its table for each algorithm."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) - len(fl_strategies.STRATEGIES) <= 143


def test_the_readmes_change_of_flowers_quickstart_is_the_pages() -> None:
    (shown,) = blocks("diff")
    page = "".join(blocks("diff", "notebooks/pages/flower-app.md")[:2]).splitlines()
    changed = [line for line in page if line[0] in "+-" and line != "+"]
    assert sorted(line for line in shown.splitlines() if line[0] in "+-") == sorted(changed)


def test_the_badges_say_what_pyproject_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, below = re.findall(r"3\.(\d+)", project["requires-python"])
    (flwr,) = re.findall(r"flwr>=([\d.]+),", " ".join(project["dependencies"]))
    citation = (ROOT / "CITATION.cff").read_text()
    (license,) = re.findall(r"^license: (.+)$", citation, re.MULTILINE)
    facts = [
        ("python", f"3.{low} to 3.{int(below) - 1}"),
        ("flwr", f">= {flwr}"),
        ("license", license),
    ]
    texts = [*ElementTree.parse(ROOT / "notebooks/badges.svg").iter(f"{SVG}text")]
    assert [text.text for text in texts] == [word for fact in facts for word in fact]
    said = "; ".join(" ".join(fact) for fact in facts).replace("python", "Python")
    assert f"![{said}](notebooks/badges.svg)" in (ROOT / "README.md").read_text()


def test_the_readmes_python_runs_as_one_program_and_prints_the_number_beside_it(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    (shown,) = re.findall(r"^print\(.*\)  # (.+)$", "\n".join(blocks("python")), re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == [shown]


@pytest.mark.slow
def test_the_readmes_comparison_runs(tmp_path: Path) -> None:
    (command,) = [b for b in blocks("bash") if b.startswith("python -m simulations.lab.compare")]
    arguments = command.split()
    arguments[0] = sys.executable
    arguments[arguments.index("results/digits")] = str(tmp_path)
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"results: {tmp_path}"


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_flwr_run_as_the_quickstart_types_it_works_and_is_stopped(tmp_path: Path) -> None:
    """In a clean clone, with a Flower home and ports of the test's own."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = [str(s.getsockname()[1]) for s in (one, two)]
    env = os.environ | {
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
    }
    run, stop = (
        next(b for b in blocks("bash", QUICKSTART) if b.startswith(start))
        for start in ("FLWR_DISABLE", "python -m fl_strategies.apps stop")
    )
    run = run.replace("supernodes=100", "supernodes=4").strip()
    try:
        for _ in range(5):
            done = subprocess.run(
                f"{run} --run-config 'clients=4 rounds=2 fraction=0.5 model=\"logistic\"'",
                shell=True,
                cwd=tmp_path / "clone",
                env=env,
                capture_output=True,
                text=True,
                timeout=600,
            )
            if "SuperLink within 15s" not in done.stderr:  # Flower's patience, on a busy machine
                break
            subprocess.run(["bash", "-c", stop], cwd=ROOT, env=env)
        assert "fedadmm round 2/2" in done.stdout, done.stdout + done.stderr
        results = re.findall(r"results: (\S+)", done.stdout)[-1]
        assert json.loads((Path(results) / "summary.json").read_text())["finished"]
    finally:
        subprocess.run(["bash", "-c", stop], cwd=ROOT, env=env)
        # Ray's actors end by themselves, soon after their raylet
        _, left = psutil.wait_procs(with_home(tmp_path / "home"), timeout=60)
        for process in left:
            process.kill()
    assert not left


def test_the_readmes_demo_is_the_command_that_is_tested() -> None:
    """The command runs in ``tests/test_engines.py``."""
    assert any("make demo\n" in block for block in blocks("bash"))
    assert "$(BIN)/python -m simulations.lab.demo\n" in (ROOT / "Makefile").read_text()


def test_the_readmes_table_is_that_of_the_code() -> None:
    rows = [
        f"| [{card.title}](notebooks/pages/algorithms/{name}.md) | `{name}` | {card.about}"
        f" | {card.when} |\n"
        for name, strategy in fl_strategies.STRATEGIES.items()
        for card in [strategy.card]
    ]
    text = (ROOT / "README.md").read_text()
    assert "".join(rows) in text
    assert f" {len(rows)} algorithms, each" in text
    assert f" {len(rows)} algorithms, each" in (ROOT / "notebooks/pages/home.md").read_text()
    assert list(fl_strategies.STRATEGIES) == list(clients.CLIENTS)


def test_the_readme_names_the_parts_of_each_argument() -> None:
    text = (ROOT / "README.md").read_text()
    for stage in STAGES:
        names = ", ".join(f"`{part.__name__}`" for part in parts_for(stage).values())
        assert f"| `{stage}` | {names} | " in text


def test_the_cards_count_the_numbers_that_clients_of_fedbc_keep() -> None:
    kept = [name for name, value in to_fields(FedBCState(torch.ones(3), 0.0, 0.0)).items()
            if not value.ndim]  # fmt: skip
    number = ("no", "one", "two", "three", "four", "five", "six")[len(kept)]
    for name in ("fedbc", "per-fedbc"):
        assert fl_strategies.STRATEGIES[name].card.keeps == f"model, {number} numbers"


def test_the_run_configs_table_is_that_of_the_code() -> None:
    text = (ROOT / "simulations/README.md").read_text()
    for key in fields(RunConfig):
        default = str(key.default).lower() if isinstance(key.default, bool) else key.default
        shown = f"`{default}`" if default != "" else '`""`'
        name = key.name.replace("_", "-")
        assert f"| `{name}` | {shown} | {key.metadata['declared'].about} |" in text


def test_every_docstring_example_is_true() -> None:
    finder, runner, found = doctest.DocTestFinder(), doctest.DocTestRunner(), 0
    for package in (fl_strategies, clients, simulations):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for shown in finder.find(importlib.import_module(info.name)):
                if shown.examples:  # most docstrings have none, and to run them takes longer
                    failed, tried = runner.run(shown)
                    assert failed == 0, shown.name
                    found += tried
    assert found > 0
