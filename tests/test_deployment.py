"""A real federation: SuperLink and SuperNodes with TLS and keys, on the loopback interface."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from deployed_apps import HELD, LATE, app_with, until
from flwr.app import Message
from problems import CLIENT_OF
from processes import groups
from safetensors.numpy import load_file

from clients import DirectoryStore, Owner
from clients.node.in_process import InProcessGrid
from fl_strategies.core.files import read_lines
from fl_strategies.core.reasons import brief
from simulations import client_app, experiment, problems
from simulations.config import RunConfig
from simulations.lab import benchmark
from simulations.lab.deployment import Federation, main, write_certificates, write_node_key
from simulations.lab.superlink import ROOT, running, with_home

pytestmark = pytest.mark.xdist_group("engine")  # one at a time: each takes all cores

ALL = {"fraction": 1.0, "node-wait": 900.0}
"""All clients take part in round 1, however slowly their SuperNodes start."""


@pytest.mark.slow
def test_fedadmm_deployed_gives_the_in_process_model_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--supernodes", "2", "--rounds", "2", "--output", str(tmp_path)])
    *_, one, two, verdict, results = capsys.readouterr().out.splitlines()
    assert one.split()[-1] == two.split()[-1]
    assert len(one.split()[-1]) == 64
    assert verdict.startswith("equal to the bit")
    assert results == f"results: {tmp_path}"
    states = (tmp_path / "deployment/state/fedadmm").glob("*/*.safetensors")
    assert {path.parent.name for path in states} == {"0", "1"}


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_supernodes_that_host_clients_and_parts_give_the_in_process_model_to_the_bit(
    federation: Federation, tmp_path: Path
) -> None:
    """Two hosts and a SuperNode of one client, each with the states of its own clients: what top-k
    leaves out. The server keeps Adam's moments; downloads are rounded."""
    for name, hosts in (("gateway", "0-2 4"), ("alone", ""), ("other", "5")):
        federation.register(name)
        federation.supernode(name, 3, 6, hosts)
    keys = {"algorithm": "fedprox", "clients": 6, "rounds": 3, "epochs": 1, **ALL}
    parts = {"server-step": "adam lr=0.01", "compression": "topk share=0.1", "download": "bfloat16"}
    places = {"state-dir": str(tmp_path / "state"), "output": str(tmp_path / "run")}
    config = RunConfig.parse({**keys, **parts, **places})
    federation.run(ROOT, config.to_run_config())
    alone = replace(config, output=str(tmp_path / "in-process"), state_dir="")
    model = experiment.run_in_process(alone).model_sha256
    assert json.loads((tmp_path / "run/summary.json").read_text())["model_sha256"] == model
    rows = read_lines(tmp_path / "run/history.jsonl")
    assert [row["clients-used"] for row in rows] == [6, 6, 6]
    up, down = (sorted({row[f"bytes-{way}"] for row in rows}) for way in ("up", "down"))
    assert (up, down) == (
        [6 * 65 * (4 + 4) + 3 * 256],
        [3 * (650 * 2 + 256)],
    )  # d = 650; by message


@pytest.mark.slow
def test_many_clients_in_one_process_do_the_work_of_as_many_supernodes(tmp_path: Path) -> None:
    _, *rows = benchmark.load(tmp_path, clients=3, rounds=2)
    assert [row[:2] for row in rows] == [["1", "3 of 3"], ["2", "3 of 3"]]
    assert all(float(number) > 0 for row in rows for number in row[2:])
    settings = json.loads((tmp_path / "run/config.json").read_text())
    usual = {"output": str(tmp_path / "in-process"), "state_dir": ""}
    model = experiment.run_in_process(RunConfig(**settings | usual)).model_sha256
    assert json.loads((tmp_path / "run/summary.json").read_text())["model_sha256"] == model


@pytest.mark.slow
def test_a_deployment_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """The ServerApp runs in a process group of its own."""
    config = RunConfig.parse({"clients": 1, "rounds": 3, "fraction": 1.0, "output": str(tmp_path)})
    homes: list[str] = []
    groups_meanwhile: set[int] = set()

    def interrupt(line: str) -> None:
        if "round 1/3:" in line:
            groups_meanwhile.update(groups(with_home(Path(homes[0]))))
            raise KeyboardInterrupt

    def run() -> None:
        with running(Federation) as link:
            homes.append(str(link.home))
            link.open()
            link.register("node")
            link.supernode("node", 0, 1)
            link.run(ROOT, config.to_run_config(), on_line=interrupt)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(groups_meanwhile) > 1
    assert with_home(Path(homes[0])) == []


@pytest.mark.slow
def test_a_supernode_whose_key_was_not_registered_is_not_let_in(federation: Federation) -> None:
    federation.register("known")
    write_node_key(federation.home / "stranger")
    node = federation.supernode("stranger", 0, 1)
    assert node.wait(timeout=60) != 0


def test_private_keys_are_for_their_owner_alone_and_the_certificate_is_for_the_loopback(
    tmp_path: Path,
) -> None:
    write_certificates(tmp_path)
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    server = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
