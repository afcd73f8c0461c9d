"""A real federation: SuperLink and SuperNodes with TLS and keys, on the loopback interface."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from test_superlink import members

from simulations.config import RunConfig
from simulations.deployment import Federation, main, write_certificates, write_node_key
from simulations.superlink import ROOT, running

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads processes from /proc"
)


@pytest.fixture
def federation() -> Iterator[Federation]:
    with running(Federation) as link:
        link.open()
        yield link
    assert members(link.group) == []


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_fedadmm_deployed_gives_the_in_process_model_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--supernodes", "2", "--rounds", "2", "--output", str(tmp_path)])
    *_, one, two, verdict, results = capsys.readouterr().out.splitlines()
    assert one.split()[-1] == two.split()[-1]
    assert len(one.split()[-1]) == 64
    assert verdict.startswith("equal to the bit")
    assert results == f"results: {tmp_path}"
    states = (tmp_path / "deployment/state/fedadmm").glob("*.safetensors")
    assert {path.name.partition(".")[0] for path in states} == {"0", "1"}


def test_async_fedbcd_by_arrival_goes_on_without_a_late_device_and_loses_nothing(
    federation: Federation, tmp_path: Path
) -> None:
    """Device 3's SuperNode is stopped from the first round to the third."""
    nodes = []
    for i in range(4):
        federation.register(f"node-{i}")
        nodes.append(federation.supernode(f"node-{i}", i, 4))

    def on_line(line: str) -> None:
        if " round 1/6 " in line:
            os.kill(nodes[3].pid, signal.SIGSTOP)
        if " round 3/6 " in line:
            os.kill(nodes[3].pid, signal.SIGCONT)

    config = RunConfig.parse(
        {
            "algorithm": "fedbcd-async",
            "params": "servers=2 first=1 staleness=3 order=arrival",
            "clients": 4,
            "rounds": 6,
            "fraction": 1.0,
            "state-dir": str(tmp_path / "state"),
            "output": str(tmp_path / "run"),
        }
    )
    federation.run(ROOT, config.to_run_config(), on_line=on_line)
    history = lines_of(tmp_path / "run" / "history.jsonl")
    assert len(history) == 6
    assert all(row["clients-lost"] == row["clients-rejected"] == 0 for row in history)
    late = [
        row["round"] for row in lines_of(tmp_path / "run" / "clients.jsonl") if row["client"] == 3
    ]
    assert max(late) > 4
    times = [row["virtual-seconds"] for row in history]
    assert times == sorted(times)


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


def commands() -> dict[str, str]:
    """The deployment page's shell commands, by their first words."""
    blocks = re.findall(
        r"```\n(.*?)```", (ROOT / "simulations/DEPLOYMENT.md").read_text(), re.DOTALL
    )
    return {block.split(" -")[0].strip(): block for block in blocks}


def test_the_pages_certificates_and_keys_are_made_as_shown(tmp_path: Path) -> None:
    command = commands()["openssl req"]
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True, capture_output=True)
    server = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    server.verify_directly_issued_by(
        x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    )
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example"]
    assert (tmp_path / "node-0.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


@pytest.mark.parametrize(
    "program",
    ["flower-superlink", "flower-supernode", "flwr supernode register node-0.pub", "flwr run ."],
)
def test_the_pages_commands_have_only_options_that_flower_knows(program: str) -> None:
    scripts = Path(sysconfig.get_path("scripts"))
    words = [word for word in program.split() if word not in ("node-0.pub", ".")]
    said = subprocess.run(
        [scripts / words[0], *words[1:], "--help"], capture_output=True, text=True, check=True
    ).stdout
    shown = re.findall(r" (--[a-z-]+)", commands()[program])
    assert shown or program.startswith("flwr supernode")
    assert [option for option in shown if option not in said] == []
