"""A machine without the real data sets runs the tests all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_without_data_sets_the_tests_of_data_pass_and_say_what_they_ran_on(tmp_path: Path) -> None:
    files = ["tests/test_data.py", "tests/test_page_commands.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "data", *files]
    command += ["-k", "test_data or power-law"]  # of the comparisons, some
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"FL_DATA": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    said = [line for line in done.stdout.splitlines() if f"there is no {tmp_path}/none: " in line]
    assert [line.partition(",")[0] for line in said] == ["left out", "on stand-ins"]
    for line, file in zip(said, files, strict=True):
        assert line.endswith(f" of {file}")
