"""`flwr_run` runs an app on Flower's real path, tells how it went, and leaves no process behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import descendants, groups, members

from simulations.lab.superlink import flwr_run

pytestmark = pytest.mark.xdist_group("ray")  # one at a time: each takes all cores

PYPROJECT = """
    [project]
    name = "echo"
    version = "0.0.0"
    description = "every node says its number"
    license = "Apache-2.0"

    [tool.flwr.app]
    publisher = "test"

    [tool.flwr.app.components]
    serverapp = "echo.app:server"
    clientapp = "echo.app:client"

    [tool.flwr.app.config]
    text = ""
    rate = 0.0
    nodes = 2
    then = "end"
"""

APP = """
    import os
    import time

    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    server = ServerApp()
    client = ClientApp()

    @client.query()
    def say(message, context):
        number = context.node_config["partition-id"]
        record = ConfigRecord({"number": number, "group": os.getpgid(0)})
        return Message(RecordDict({"said": record}), reply_to=message)

    @server.main()
    def main(grid, context):
        print("text", context.run_config["text"])
        print("rate", repr(context.run_config["rate"]))
        while len(nodes := list(grid.get_node_ids())) < context.run_config["nodes"]:
            time.sleep(0.05)  # Flower starts the app before all nodes are there
        ask = [Message(RecordDict(), node, "query") for node in nodes]
        said = [reply.content["said"] for reply in grid.send_and_receive(ask)]
        print("numbers", sorted(record["number"] for record in said))
        print("groups", {os.getpgid(0)} | {record["group"] for record in said}, flush=True)
        if context.run_config["then"] == "wait":
            time.sleep(600)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    root = tmp_path / "echo"
    (root / "echo").mkdir(parents=True)
    (root / "pyproject.toml").write_text(textwrap.dedent(PYPROJECT))
    (root / "echo" / "__init__.py").touch()
    (root / "echo" / "app.py").write_text(textwrap.dedent(APP))
    return root


def group_in(lines: list[str]) -> int:
    """The one process group in which the server and all clients said to be."""
    (line,) = [line for line in lines if line.startswith("groups")]
    (group,) = re.findall(r"\d+", line)
    return int(group)


@pytest.mark.slow
def test_a_run_completes_and_leaves_nothing(app: Path) -> None:
    lines: list[str] = []
    groups_meanwhile: set[int] = set()
    names: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line.startswith("groups"):
            groups_meanwhile.update(groups(descendants()))
            names.extend(members(group_in(lines)))

    text = "two words, a \"quote\", an 'other', ρ 🌻"
    before = groups(descendants())  # a helper process of multiprocessing, of an earlier test
    config = {"text": text, "rate": 1e-05, "nodes": 5}
    flwr_run(config, num_supernodes=5, workers=2, app=app, on_line=on_line)
    assert f"text {text}" in lines
    assert "rate 1e-05" in lines
    assert "numbers [0, 1, 2, 3, 4]" in lines
    assert groups_meanwhile - before == {group_in(lines)}  # the group holds all,
    assert {"gcs_server", "raylet"} <= set(names)  # Ray's own processes too,
    assert members(group_in(lines)) == []  # and none of it is left


@pytest.mark.slow
def test_a_refused_run_raises_with_the_reason(app: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)not started.*Key 'colour' is not present"):
        flwr_run({"colour": "blue"}, num_supernodes=2, app=app)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_no_signal_leaves_anything(app: Path, number: signal.Signals) -> None:
    program = (
        "import signal\n"
        # a shell starts what runs in its background with SIGINT ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from simulations.lab.superlink import flwr_run\n"
        "def show(line): print(line, flush=True)\n"
        f"flwr_run({{'then': 'wait'}}, num_supernodes=2, workers=1, app={str(app)!r}, on_line=show)"
    )
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as runner:
        assert runner.stdout is not None
        for line in runner.stdout:
            lines.append(line)
            if line.startswith("groups"):
                runner.send_signal(number)
        code = runner.wait()
    assert code in (-number, 128 + number), lines
    deadline = time.monotonic() + 60.0  # after SIGKILL nobody waits for the rest
    while members(group_in(lines)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(group_in(lines)) == []
