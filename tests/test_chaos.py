"""A deployment whose components are killed and restarted ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from deployed_apps import ALL, HELD, LATE, MORTAL, app_with, until
from flwr.app import Message
from problems import CLIENT_OF
from safetensors.numpy import load_file

from clients import DirectoryStore, Owner
from clients.node.in_process import InProcessGrid
from fl_strategies.core.files import read_lines
from fl_strategies.core.reasons import brief
from simulations import client_app, experiment, problems
from simulations.config import RunConfig
from simulations.lab import chaos
from simulations.lab.deployment import Federation

KILLS = 4


@pytest.mark.release
@pytest.mark.xdist_group("deployment")  # one at a time
def test_a_deployment_under_kills_ends_with_the_undisturbed_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chaos.main(["--minutes", "2.5", "--rounds", "4", "--output", str(tmp_path)])
    *_, counts, starts, verdict, results = capsys.readouterr().out.splitlines()
    assert int(counts.split()[0]) >= 2
    assert starts.endswith("flwr run")
    assert re.fullmatch(r"(\d+) of \1 runs equal to the bit; nothing is left running", verdict)
    assert results == f"results: {tmp_path}"


@pytest.mark.parametrize(
    ("first", "rounds"),
    [
        pytest.param(1, 8, marks=pytest.mark.release),
        pytest.param(KILLS, 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.xdist_group("deployment")
def test_fedadmm_whose_server_is_killed_ends_with_the_in_process_model(
    first: int, rounds: int, federation: Federation, tmp_path: Path
) -> None:
    """A run whose ServerApp is dead is stopped by `flwr stop` and started again; after the last
    kill nobody stops it, and the SuperLink takes note by itself within a minute. All of the four
    kills, or the last alone."""
    for i in range(2):
        federation.register(f"node-{i}")
        federation.supernode(f"node-{i}", i, 2)
    config = RunConfig.parse(
        {
            "params": "eta=fraction",
            "clients": 2,
            "rounds": rounds,
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
    for life in range(1, first):
        (tmp_path / f"lives/{life}").touch()

    def stop(run_id: str, life: int) -> None:
        note = tmp_path / f"lives/{life}"
        until(lambda: note.exists() and note.read_text())
        federation.start(["flwr", "stop", run_id]).wait()

    def stop_the_dead(pool: ThreadPoolExecutor, life: int, line: str) -> None:
        if started := re.search(r"started run (\d+)", line):
            pool.submit(stop, started[1], life)

    for life in range(first, KILLS + 1):
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


@pytest.mark.release
@pytest.mark.xdist_group("deployment")
def test_async_fedbcd_by_arrival_goes_on_without_a_late_device_and_loses_nothing(
    federation: Federation, tmp_path: Path
) -> None:
    """Device 3 begins its first training after two rounds; cloud server 1 waits for it."""
    for i in range(4):
        federation.register(f"node-{i}")
        federation.supernode(f"node-{i}", i, 4)

    def on_line(line: str) -> None:
        if "round 2/6:" in line:
            (tmp_path / "run" / "go").touch()

    config = RunConfig.parse(
        {
            "algorithm": "fedbcd-async",
            "params": "servers=2 first=1 staleness=3 order=arrival",
            "clients": 4,
            "rounds": 6,
            **ALL,
            "state-dir": str(tmp_path / "state"),
            "output": str(tmp_path / "run"),
        }
    )
    app = app_with(tmp_path / "app", client_app=LATE)
    federation.run(app, config.to_run_config(), on_line=on_line)
    history = read_lines(tmp_path / "run" / "history.jsonl")
    assert len(history) == 6
    assert all(row["clients-lost"] == row["clients-rejected"] == 0 for row in history)
    mixed: dict[int, set[int]] = {n: set() for n in range(1, 7)}
    for row in read_lines(tmp_path / "run" / "clients.jsonl"):
        mixed[row["round"]].add(row["client"])
    assert (mixed[1], mixed[2]) == ({0, 2}, {0, 2})
    assert 3 in mixed[3]  # cloud server 1 is waited for: it mixes in one of every three rounds
    assert 3 in mixed[4] | mixed[5] | mixed[6]
    times = [row["virtual-seconds"] for row in history]
    assert times == sorted(times)


@pytest.mark.release
@pytest.mark.xdist_group("deployment")
def test_killed_restarted_and_replaced_clients_are_named_and_leave_the_state_as_the_rule_says(
    federation: Federation, tmp_path: Path
) -> None:
    """In round 2 client 0's process is killed in mid-training, and client 1's SuperNode, which is
    started again with its key after the round; client 2's is killed after it has answered, and
    another, with another key and the same state directory, takes its place."""
    output = tmp_path / "run"
    ids = [federation.register(name) for name in ("node-0", "node-1", "node-2", "spare")]
    nodes = [federation.supernode(f"node-{i}", i, 3) for i in range(3)]
    log: list[str] = []

    def pid_of(client: int) -> int:
        path = output / f"{client}.pid"
        return int(path.read_text() or 0) if path.exists() else 0

    def logged(text: str) -> int:
        return (federation.home / "superlink.log").read_text().count(text)

    def on_line(line: str) -> None:
        log.append(line)
        if "round 1/5:" in line:
            os.kill(until(lambda: pid_of(0)), signal.SIGKILL)
            until(lambda: pid_of(1))
            nodes[1].kill()
            until(lambda: logged("Sent successfully") == 10)  # two queries, round 1, client 2's
            nodes[2].kill()
            federation.supernode("spare", 2, 3)
        if "round 2/5:" in line:
            federation.supernode("node-1", 1, 3)

    config = RunConfig.parse(
        {
            "algorithm": "fedadmm",
            "params": "eta=fraction",
            "clients": 3,
            "rounds": 5,
            **ALL,
            "timeout": 900.0,
            "state-dir": str(tmp_path / "state"),
            "output": str(output),
        }
    )
    app = app_with(tmp_path / "app", client_app=HELD)
    federation.run(app, config.to_run_config(), on_line=on_line)

    rounds = read_lines(output / "history.jsonl")
    used: dict[int, set[int]] = {n: set() for n in range(1, 6)}
    for row in read_lines(output / "clients.jsonl"):
        used[row["round"]].add(row["client"])
    everyone = {0, 1, 2}
    assert (used[1], used[2], used[5]) == (everyone, {2}, everyone)
    lost, rejected = ([row[f"clients-{name}"] for row in rounds] for name in ("lost", "rejected"))
    assert (lost[:2], rejected) == ([0, 1], [0, 1, 0, 0, 0])
    # until the SuperLink gives client 2's old node up, that one is asked
    assert lost[2] in (0, 1)
    assert lost[3:] == [0, 0]
    said = "\n".join(log)
    assert re.search(r"reply of client 0 left out: ClientApp stopped responding", said)
    assert "reply of client 1 left out: none came: " in said
    assert f"client 2 is now node {brief(ids[3])} and no longer node {brief(ids[2])}" in said

    # theta = mean of w_i + y_i/rho of the states that count
    acked = {client: max(n for n in used if client in used[n]) for client in everyone}
    u = []
    for client, number in acked.items():
        store = DirectoryStore(tmp_path / "state/fedadmm", client)
        owner = Owner(**json.loads((tmp_path / "state/fedadmm/owner.json").read_text()))
        fields = store.load(owner, number)
        u.append(fields["w"] + fields["y"] / fields["rho"])
    arrays, model = load_file(output / "model.safetensors"), problems.fresh_model(config)
    theta = model.load([arrays[name] for name in model.names]).numpy()
    np.testing.assert_allclose(theta, np.mean(u, axis=0), atol=1e-4)

    def lose(request: Message, reply: Message) -> Message | None:
        number = request.content.config_records.get("config", {}).get("server-round")
        client = CLIENT_OF[request.metadata.dst_node_id]
        return None if number and client not in used[int(number)] else reply

    again = replace(config, output=str(tmp_path / "again"), state_dir="")
    grid = InProcessGrid(client_app.app, 3, run_config=again.to_run_config(), fault=lose)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["model_sha256"] == experiment.run(again, grid).model_sha256


def test_a_model_that_differs_ends_the_command_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "endured", lambda *_, **__: False)
    with pytest.raises(SystemExit, match="a model differs") as ended:
        chaos.main(["--minutes", "1", "--output", str(tmp_path)])
    assert ended.value.code != 0
