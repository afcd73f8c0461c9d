"""The apps for Flower Hub: Flower builds and would publish each, and each trains."""

from __future__ import annotations

import importlib
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from clients import InProcessGrid
from fl_strategies import apps

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", apps.HUB)
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
@pytest.mark.slow
def test_flower_builds_the_app_and_would_publish_it(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fl_strategies.apps", kind, str(tmp_path / kind)]
    subprocess.run(command, check=True)
    project = tomllib.loads((tmp_path / kind / "pyproject.toml").read_text())["project"]
    assert project["name"] == kind
    assert project["description"] in (tmp_path / kind / "README.md").read_text()
    text = "".join(path.read_text() for path in (tmp_path / kind).rglob("*.*") if path.is_file())
    assert all(after in text for after in apps.CHANGES.get(kind, {}).values())
    flwr = shutil.which("flwr", path=Path(sys.executable).parent)
    assert flwr
    subprocess.run([flwr, "build", "--app", tmp_path / kind], check=True, cwd=tmp_path)
    assert len([*tmp_path.glob("*.fab")]) == 1
    runpy.run_path(str(ROOT / ".ci/release-check"))["publishable"](tmp_path / kind)


@pytest.mark.parametrize("kind", apps.HUB)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by peft
@pytest.mark.slow
def test_the_app_trains(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "lora":
        pytest.importorskip("peft")
    apps.write(kind, tmp_path / kind)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / kind)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_app"]:
        monkeypatch.delitem(sys.modules, name)
    client = importlib.import_module("my_app.client_app")
    server = importlib.import_module("my_app.server_app")
    accuracies = []

    def evaluate(server_round: int, arrays: Any) -> Any:
        metrics = global_evaluate(server_round, arrays)
        accuracies.append(metrics["accuracy"])
        return metrics

    global_evaluate = server.global_evaluate
    monkeypatch.setattr(server, "global_evaluate", evaluate)
    settings = tomllib.loads((tmp_path / kind / "pyproject.toml").read_text())
    config = settings["tool"]["flwr"]["app"]["config"]
    context = Context(
        run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config)
    )
    torch.manual_seed(0)
    server.app(InProcessGrid(client.app, 2, run_config=config), context)
    assert accuracies[-1] > max(0.3, accuracies[0])
