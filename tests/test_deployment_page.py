"""The page on deployment: its commands make what they need, and have options that Flower knows."""

from __future__ import annotations

import re
import ssl
import subprocess
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509

from simulations.lab.superlink import ROOT

pytestmark = pytest.mark.xdist_group("deployment")  # one at a time


def commands() -> dict[str, str]:
    """The deployment page's shell commands, by their first words; those of openssl together."""
    blocks = re.findall(
        r"```\n(.*?)```", (ROOT / "simulations/DEPLOYMENT.md").read_text(), re.DOTALL
    )
    found: dict[str, str] = {}
    for block in blocks:
        program = block.split(" -")[0].strip()
        found[program] = found.get(program, "") + block
    return found


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return a folder with what the page's commands make."""
    command = commands()["openssl req"]
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_the_page_makes_every_file_that_its_commands_read(made: Path) -> None:
    files = set(re.findall(r"[\w/-]+\.(?:pem|key|pub)", "".join(commands().values())))
    assert {"ca.pem", "server.pem", "server.key", "node.pem", "node.key", "node-0.pub"} <= files
    assert [file for file in files if not (made / Path(file).name).exists()] == []


@pytest.mark.parametrize(("name", "host"), [("server", "server.example"), ("server", "127.0.0.1"),
                                            ("node", "127.0.0.1")])  # fmt: skip
def test_the_pages_certificates_are_trusted_for_the_addresses_they_are_used_at(
    name: str, host: str, made: Path
) -> None:
    """By a TLS handshake with the page's own ca.pem."""
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(made / f"{name}.pem", made / f"{name}.key")
    here = ssl.create_default_context(cafile=str(made / "ca.pem"))
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = there.wrap_bio(up, down, server_side=True)
    client = here.wrap_bio(down, up, server_hostname=host)
    for _ in range(2):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert client.getpeercert()  # of a peer that is trusted alone


def test_the_pages_certificates_and_keys_are_made_as_shown(made: Path) -> None:
    server = x509.load_pem_x509_certificate((made / "server.pem").read_bytes())
    server.verify_directly_issued_by(x509.load_pem_x509_certificate((made / "ca.pem").read_bytes()))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example"]
    assert (made / "node-0.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


def test_data_are_decoded_once_a_node(tmp_path: Path) -> None:
    page = (ROOT / "notebooks/pages/deployment-at-scale.md").read_text()
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    calls = []

    def decode() -> Any:
        calls.append(1)
        return np.arange(6.0).reshape(2, 3)

    found = [names["decoded"](tmp_path, decode) for _ in range(2)]
    for array in found:
        np.testing.assert_array_equal(array, np.arange(6.0).reshape(2, 3))
    found[0][:] = 0.0  # a process's changes are its own
    np.testing.assert_array_equal(names["decoded"](tmp_path, decode), found[1])
    assert calls == [1]


@pytest.mark.slow
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
