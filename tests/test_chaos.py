"""A deployment whose components are killed and restarted ends as if nothing had happened."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from deployed_apps import MORTAL, app_with, until

from fl_strategies.core.files import read_lines
from simulations import experiment
from simulations.config import RunConfig
from simulations.lab import chaos
from simulations.lab.deployment import Federation

KILLS = 4


@pytest.mark.slow
@pytest.mark.xdist_group("waits")  # most of its minutes are waits
def test_a_deployment_under_kills_ends_with_the_undisturbed_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chaos.main(["--minutes", "2.5", "--rounds", "4", "--output", str(tmp_path)])
    *_, counts, starts, verdict, results = capsys.readouterr().out.splitlines()
    assert int(counts.split()[0]) >= 2
    assert starts.endswith("flwr run")
    assert re.fullmatch(r"(\d+) of \1 runs equal to the bit; nothing is left running", verdict)
    assert results == f"results: {tmp_path}"


@pytest.mark.slow
@pytest.mark.xdist_group("waits")
def test_fedadmm_whose_server_is_killed_four_times_ends_with_the_in_process_model(
    federation: Federation, tmp_path: Path
) -> None:
    """A run whose ServerApp is dead is stopped by `flwr stop` and started again; after the last
    kill nobody stops it, and the SuperLink takes note by itself within a minute."""
    for i in range(2):
        federation.register(f"node-{i}")
        federation.supernode(f"node-{i}", i, 2)
    config = RunConfig.parse(
        {
            "params": "eta=fraction",
            "clients": 2,
            "rounds": 8,
            "fraction": 0.5,
            "node-wait": 900.0,
            "epochs": 1,
            "checkpoint-every": 1,
            "resume": True,
            "state-dir": str(tmp_path / "state"),
            "output": str(tmp_path / "run"),
        }
    )
    app = app_with(tmp_path / "app", server_app=MORTAL.replace("KILLS", str(KILLS)))
    (tmp_path / "lives").mkdir()

    def stop(run_id: str, life: int) -> None:
        note = tmp_path / f"lives/{life}"
        until(lambda: note.exists() and note.read_text())
        federation.start(["flwr", "stop", run_id]).wait()

    def stop_the_dead(pool: ThreadPoolExecutor, life: int, line: str) -> None:
        if started := re.search(r"started run (\d+)", line):
            pool.submit(stop, started[1], life)

    for life in range(1, KILLS + 1):
        with ThreadPoolExecutor() as pool:
            watched = partial(stop_the_dead, pool, life)
            on_line, end = (watched, "stopped") if life < KILLS else (print, "failed")
            with pytest.raises(RuntimeError, match=f"finished:{end}"):
                federation.run(app, config.to_run_config(), on_line=on_line)
    federation.run(app, config.to_run_config())
    assert len(list((tmp_path / "lives").iterdir())) == KILLS + 1
    rows = read_lines(tmp_path / "run/history.jsonl")
    assert [row["round"] for row in rows] == list(range(1, config.rounds + 1))
    assert all(row["clients-used"] == 1 for row in rows)
    again = replace(config, output=str(tmp_path / "again"), state_dir=str(tmp_path / "others"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["model_sha256"] == experiment.run_in_process(again).model_sha256


def test_a_model_that_differs_ends_the_command_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "endured", lambda *_, **__: False)
    with pytest.raises(SystemExit, match="a model differs") as ended:
        chaos.main(["--minutes", "1", "--output", str(tmp_path)])
    assert ended.value.code != 0
