"""A deployment whose components are killed and restarted ends as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulations.lab import chaos


@pytest.mark.slow
@pytest.mark.xdist_group("waits")  # most of its minutes are waits
def test_a_deployment_under_kills_ends_with_the_undisturbed_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chaos.main(["--minutes", "2.5", "--rounds", "6", "--output", str(tmp_path)])
    *_, counts, starts, verdict, results = capsys.readouterr().out.splitlines()
    assert int(counts.split()[0]) >= 2
    assert starts.endswith("flwr run")
    assert re.fullmatch(r"(\d+) of \1 runs equal to the bit; nothing is left running", verdict)
    assert results == f"results: {tmp_path}"


def test_a_model_that_differs_ends_the_command_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "endured", lambda *_, **__: False)
    with pytest.raises(SystemExit, match="a model differs") as ended:
        chaos.main(["--minutes", "1", "--output", str(tmp_path)])
    assert ended.value.code != 0
