"""The file for containers: without containers, its commands train a model on two SuperNodes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from simulations.lab.superlink import LOOPBACK, ROOT, SuperLink, free_port, running

pytestmark = pytest.mark.xdist_group("deployment")  # one at a time

FOLDER = ROOT / "simulations"
SERVICES = yaml.safe_load((FOLDER / "compose.yml").read_text())["services"]


def test_the_services_are_built_by_the_dockerfile_of_what_the_app_needs() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[2:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "fl_strategies", "clients"} <= {*copied}
    assert all((ROOT / name).exists() for name in copied)
    for service in SERVICES.values():
        assert (FOLDER / service["volumes"][0].split(":")[0]).resolve() == ROOT / "federation"
        if build := service.get("build"):
            assert (FOLDER / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]).is_file()


def words(name: str, replaced: dict[str, str]) -> list[str]:
    """Return a service's command, with other places and ports."""
    command = SERVICES[name]["command"]
    text = "\0".join(shlex.split(command) if isinstance(command, str) else command)
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text.replace("$$", "$").split("\0")


@pytest.mark.release
def test_the_commands_run_two_supernodes_and_a_run_to_its_end(tmp_path: Path) -> None:
    page = (FOLDER / "DEPLOYMENT.md").read_text()
    keys = [b for b in re.findall(r"```\n(.*?)```", page, re.DOTALL) if b.startswith("openssl")]
    further = 'ssh-keygen -t ecdsa -b 384 -N "" -f node-1'
    script = "\n".join([*keys, further])
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True)
    port = str(free_port())
    places = {"server.example": LOOPBACK, "9092": port, "0.0.0.0": LOOPBACK, "/app": str(ROOT)}
    with running(SuperLink) as link:
        shell = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path)]
        link.start([*shell, *words("superlink", places)])
        for node in ("supernode-0", "supernode-1"):
            again = f"while true; do {shlex.join(words(node, places | {'9094': str(free_port())}))}"
            link.start([*shell, "sh", "-c", f"{again}; sleep 1; done"])
        config = SERVICES["run"]["environment"]["CONFIG"].replace(
            "server.example:9092", f"{LOOPBACK}:{port}"
        )
        link.env["CONFIG"] = config.replace("/federation", str(tmp_path))
        run = words("run", places | {"/federation": str(tmp_path)})
        done = link.start([*shell, *run], stdout=subprocess.PIPE)
        output, _ = done.communicate(timeout=500)
        assert done.returncode == 0, output
    summary = json.loads((tmp_path / "results/summary.json").read_text())
    assert summary["finished"] is True, summary
    assert {path.name for path in (tmp_path / "state/fedadmm").iterdir()} >= {"0", "1"}
