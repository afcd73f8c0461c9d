"""The apps that ``python -m fl_strategies.apps`` writes: `flwr run` starts each of them."""

from __future__ import annotations

import importlib
import io
import json
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from flwr.app import Context, RecordDict

from clients import InProcessGrid
from fl_strategies import apps
from fl_strategies.apps.stop import stop
from simulations.lab.superlink import flwr_run

ROOT = Path(__file__).parents[1]
PAGE = "".join(
    (ROOT / f"notebooks/pages/{n}.md").read_text() for n in ("app-clients", "flower-app")
)
STEPS = {"flower": "", "attach": "a", "strategy": "b", "problem": "c", "legacy": "cd"}
"""The page's sections whose changes, one after the other, make an app of Flower's quickstart."""


def written(kind: str, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "fl_strategies.apps", kind, str(folder / "my-app")], check=True
    )
    return folder / "my-app"


def changed(app: Path, section: str) -> None:
    """Change the app as a section of the page says: by its diffs, and by whole files."""
    (text,) = re.findall(rf"^## \({section}\)(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    block = r"^.*`(\w+\.py)`.*:\n\n```(diff|\{literalinclude\}) ?(.*)\n((?:.*\n)*?)```"
    for name, kind, path, diff in re.findall(block, text, re.MULTILINE):
        if kind == "diff":
            patch(app / "my_app" / name, diff.splitlines())
        else:
            whole = (ROOT / "notebooks/pages" / path).read_text()
            (app / "my_app" / name).write_text(whole)


def patch(path: Path, diff: Sequence[str]) -> None:
    """Apply the hunks of a unified diff, each of which has one place."""
    text = path.read_text()
    for hunk in re.split(r"^@@.*\n", "\n".join([*diff, ""]), flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = (
            "".join(line[1:] for line in lines if line[0] in of) for of in (" -", " +")
        )
        assert text.count(before) == 1, hunk
        text = text.replace(before, after)
    path.write_text(text)


def files(app: Path) -> dict[str, str]:
    return {
        str(path.relative_to(app)): path.read_text()
        for path in app.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.mark.parametrize("kind", apps.KINDS)
def test_the_pages_changes_make_the_app_of_flowers_quickstart(kind: str, tmp_path: Path) -> None:
    apps.write("flower", tmp_path / "changed")
    apps.write(kind, tmp_path / "written")
    for section in STEPS[kind]:
        changed(tmp_path / "changed", section)
    assert files(tmp_path / "changed") == files(tmp_path / "written")


def module(name: str, app: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module of this app, not of another whose package has the same name."""
    monkeypatch.syspath_prepend(app)
    loaded = importlib.import_module("my_app")
    if Path(loaded.__file__ or "").parent != app / "my_app":
        for other in [one for one in sys.modules if one.partition(".")[0] == "my_app"]:
            monkeypatch.delitem(sys.modules, other)
    return importlib.import_module(f"my_app.{name}")


SHORT = {"num-server-rounds": 2, "local-epochs": 2}


def run_in_one_process(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    clients: int = 2,
    settings: Mapping[str, Any] = SHORT,
) -> Any:
    """Run the app in ``folder / "app"``; return its module ``task``."""
    monkeypatch.chdir(folder)
    task, client, server = (
        module(half, folder / "app", monkeypatch) for half in ("task", "client_app", "server_app")
    )
    project = tomllib.loads((folder / "app/pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"] | settings
    context = Context(
        run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config)
    )
    torch.manual_seed(0)
    grid = InProcessGrid(client.app, clients, run_config=config)
    grid.set_run(SimpleNamespace(run_id=1))  # which a legacy server reads
    server.app(grid, context)
    return task


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k == "problem" else pytest.mark.slow) for k in apps.KINDS],
)
def test_the_changed_app_trains_in_one_process(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apps.write("flower", tmp_path / "app")
    for section in STEPS[kind]:
        changed(tmp_path / "app", section)
    task = run_in_one_process(tmp_path, monkeypatch)
    assert "left out" not in caplog.text
    if kind == "legacy":
        assert "[ROUND 2]" in caplog.text
        return
    assert accuracy(task, torch.load("final_model.pt")) > 0.3


def accuracy(task: Any, state: Any) -> float:
    """Return the accuracy of the model on the samples that no client has."""
    net = task.Net()
    net.load_state_dict(state)
    found: float = task.test(net, task.load_centralized_dataset(), "cpu")[1]
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(  # of `problem` the quickstart runs all
    "kind",
    [
        "attach",
        pytest.param("legacy", marks=pytest.mark.release),
        pytest.param("strategy", marks=pytest.mark.release),
    ],
)
def test_flwr_run_starts_the_app_and_the_clients_train(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    app = written(kind, tmp_path)
    monkeypatch.chdir(tmp_path)
    # a legacy server looks for replies every three seconds
    rounds = {"num-server-rounds": 1} if kind == "legacy" else {}
    flwr_run(rounds, num_supernodes=4, on_line=lines.append, app=app)
    log = "\n".join(lines)
    assert "left out" not in log
    if kind == "legacy":
        assert "History (loss, distributed)" in log
        return
    task = module("task", app, monkeypatch)
    assert accuracy(task, torch.load("final_model.pt")) > 0.3, log


def test_the_app_with_another_strategy_differs_from_flowers_in_two_statements(
    tmp_path: Path,
) -> None:
    for kind in ("flower", "strategy"):
        apps.write(kind, tmp_path / kind)
    before, after = (files(tmp_path / kind) for kind in ("flower", "strategy"))
    assert [name for name in before if before[name] != after[name]] == ["my_app/server_app.py"]
    lines = before["my_app/server_app.py"].splitlines()
    new = [line for line in after["my_app/server_app.py"].splitlines() if line not in lines]
    assert len(new) == 2
    for line, words in zip(new, ("import FedAvg", "clipping_norm"), strict=True):
        assert words in line


@pytest.mark.slow
def test_a_written_app_names_where_the_package_comes_from(tmp_path: Path) -> None:
    """The clone that runs here; of an installed wheel the path that pip recorded."""
    project = tomllib.loads((written("problem", tmp_path) / "pyproject.toml").read_text())
    path = Path(project["tool"]["uv"]["sources"]["fl-strategies"]["path"])
    assert path == ROOT


@pytest.mark.parametrize("url", ["file:///{}/fl%20a.whl", "https://example.org/fl.whl", ""])
def test_a_wheel_of_this_machine_is_a_source_and_an_index_is_not(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "fl a.whl"
    wheel.touch()
    record = json.dumps({"url": url.format(str(tmp_path)[1:])}) if url else None
    monkeypatch.setattr(apps, "HERE", tmp_path / "site-packages/fl_strategies/apps")
    installed = SimpleNamespace(read_text=lambda name: record)
    monkeypatch.setattr(apps, "distribution", lambda name: installed)
    assert apps.source() == (wheel if url.startswith("file") else None)


LICENSES = {"0": 'license = "Apache-2.0"', "1": 'license = { file = "LICENSE" }'}
"""The forms of an app's metadata: Flower's format 0 takes both."""


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
@pytest.mark.parametrize(("form", "license"), [("0", "0"), ("0", "1"), ("1", "1")])
@pytest.mark.slow
def test_flower_builds_an_app_of_both_forms_and_would_publish_it(
    form: str, license: str, tmp_path: Path
) -> None:
    from flwr.cli.build import build_fab_from_files

    app = written("problem", tmp_path)
    text = (app / "pyproject.toml").read_text()
    assert LICENSES["1"] in text
    assert "fab-format-version = 1" in text
    text = text.replace("fab-format-version = 1", f"fab-format-version = {form}")
    (app / "pyproject.toml").write_text(text.replace(LICENSES["1"], LICENSES[license]))
    paths = {p.relative_to(app).as_posix(): p for p in app.rglob("*") if p.is_file()}
    content, _ = build_fab_from_files(paths)
    with zipfile.ZipFile(io.BytesIO(content)) as fab:
        assert "LICENSE" in fab.namelist() or (form, license) == ("0", "0")
    runpy.run_path(str(ROOT / ".ci/release-check"))["publishable"](app)


@pytest.mark.slow
def test_stop_ends_the_superlink_of_its_port_and_what_it_started_and_no_other() -> None:
    def link(port: str) -> subprocess.Popen[str]:
        script = f"exec -a flower-superlink {sys.executable} -c '{CHILD}' --port {port}"
        return subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)

    meant, other = link("7"), link("8")
    try:
        assert meant.stdout
        assert other.stdout
        child = int(meant.stdout.readline())
        other.stdout.readline()
        assert stop("7") == 2
        meant.wait(10)
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"
        assert other.poll() is None
        assert stop("8") == 2
    finally:
        meant.kill()
        other.kill()
        for process in (meant, other):
            process.communicate()


CHILD = (
    "import subprocess, time; "
    'child = subprocess.Popen(["sleep", "100"], start_new_session=True); '
    "print(child.pid, flush=True); time.sleep(100)"
)


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        apps.write("problem", tmp_path)
    with pytest.raises(
        ValueError, match="must be one of flower, attach, strategy, problem, legacy"
    ):
        apps.write("other", tmp_path / "new")
    assert not list(tmp_path.iterdir())
