"""A real federation: SuperLink and SuperNodes with TLS and keys, on the loopback interface."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from deployed_apps import ALL
from processes import groups

from fl_strategies.core.files import read_lines
from simulations import experiment
from simulations.config import RunConfig
from simulations.lab.deployment import Federation, main, write_certificates, write_node_key
from simulations.lab.superlink import ROOT, running, with_home

pytestmark = pytest.mark.xdist_group("deployment")  # one at a time


@pytest.mark.release
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


@pytest.mark.release
def test_supernodes_that_host_clients_and_parts_give_the_in_process_model_to_the_bit(
    federation: Federation, tmp_path: Path
) -> None:
    """Two hosts and a SuperNode of one client, each with the states of its own clients: what top-k
    leaves out. The server keeps Adam's moments; downloads are rounded."""
    for name, hosts in (("gateway", "0-2 4"), ("alone", ""), ("other", "5")):
        federation.register(name)
        federation.supernode(name, 3, 6, hosts)
    keys = {"algorithm": "fedprox", "clients": 6, "rounds": 2, "epochs": 1, **ALL}
    parts = {"server-step": "adam lr=0.01", "compression": "topk share=0.1", "download": "bfloat16"}
    places = {"state-dir": str(tmp_path / "state"), "output": str(tmp_path / "run")}
    config = RunConfig.parse({**keys, **parts, **places})
    federation.run(ROOT, config.to_run_config())
    alone = replace(config, output=str(tmp_path / "in-process"), state_dir="")
    model = experiment.run_in_process(alone).model_sha256
    assert json.loads((tmp_path / "run/summary.json").read_text())["model_sha256"] == model
    rows = read_lines(tmp_path / "run/history.jsonl")
    assert [row["clients-used"] for row in rows] == [6, 6]
    up, down = (sorted({row[f"bytes-{way}"] for row in rows}) for way in ("up", "down"))
    assert (up, down) == (
        [6 * 65 * (4 + 4) + 3 * 256],
        [3 * (650 * 2 + 256)],
    )  # d = 650; by message


@pytest.mark.release
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
