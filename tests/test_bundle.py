"""What travels with the code: every file that it reads, in the wheel and in the app's bundle."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
"""Of what Flower calls to build a bundle."""

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
TYPES = ("fl_strategies/py.typed", "clients/py.typed", "clients/algorithms.pyi")
LEFT_OUT = ("fl_strategies/apps/", *TYPES)
"""Templates for a beginner, who has the wheel, and what only type checkers look for."""


def files_of(*folders: str) -> dict[str, bytes | Path]:
    """Return the files below ``folders``, and what an app needs beside them."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths += [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    return {path.relative_to(ROOT).as_posix(): path for path in paths if path.suffix != ".pyc"}


def bundle() -> zipfile.ZipFile:
    from flwr.cli.build import build_fab_from_files

    found, _ = build_fab_from_files(files_of("fl_strategies", "clients", "simulations"))
    return zipfile.ZipFile(io.BytesIO(found))


def test_every_file_of_the_packages_is_in_the_wheel_and_in_the_bundle() -> None:
    """What the wheel leaves out are the pages and commands of a clone."""
    assert SETTINGS["hatch"]["build"]["targets"]["wheel"] == {
        "packages": ["fl_strategies", "clients", "simulations"],
        "exclude": [
            "simulations/lab",
            "simulations/*.md",
            "simulations/Dockerfile",
            "simulations/compose.yml",
        ],
    }
    wanted = {
        name for name in files_of("fl_strategies", "clients") if not name.startswith(LEFT_OUT)
    }
    assert any(not name.endswith(".py") for name in wanted if name.startswith("clients/"))
    assert wanted <= {*bundle().namelist()}


@pytest.mark.slow
def test_an_app_runs_from_its_unpacked_bundle(tmp_path: Path) -> None:
    """By the program of the release check."""
    program = runpy.run_path(str(ROOT / ".ci/release-check"))["RUN"]
    bundle().extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
