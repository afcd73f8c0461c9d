"""A run's folders: whose they are, and clients' states beyond memory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from small_runs import COMPARED, small

from clients import CLIENTS, StateError
from clients.node.in_process import InProcessGrid
from fl_strategies import RoundInfo
from simulations.client_app import app
from simulations.config import RunConfig
from simulations.experiment import run, run_in_process
from simulations.figures import read_history
from simulations.lab.compare import main
from simulations.rules import configs_for


def short(tmp_path: Path, **others: Any) -> RunConfig:
    """Return a small run in which a client takes one step a round."""
    return small(tmp_path, steps=1, **others)


def refused(error: type[Exception], said: str, config: RunConfig) -> None:
    with pytest.raises(error, match=said):
        run_in_process(config)


def test_a_results_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    """A second one is refused before it writes anything, and the first goes on to its end."""
    config = short(tmp_path, algorithm="fedavg")
    said = r"run is in use by run fedavg-[0-9a-f]{16} \(process \d+\): wait until"

    def second(info: RoundInfo) -> None:
        before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        refused(ValueError, said, config)
        refused(ValueError, said, short(tmp_path, algorithm="fedprox"))
        assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before

    run_in_process(config, [second])
    assert len(read_history(tmp_path / "run/history.jsonl")) == 3
    assert run_in_process(config).finished


def test_a_state_directory_is_one_runs(tmp_path: Path) -> None:
    """Also when that is over; another directory, or an emptied one, does for the next."""
    first = short(tmp_path, **{"state-dir": str(tmp_path / "state")})
    summary = run_in_process(first)
    second = replace(first, output=str(tmp_path / "second"))
    run_id = json.loads((tmp_path / "run/run.json").read_text())["run"]
    said = f"fedadmm holds the state of run '{run_id}': choose another state-dir, or delete"
    refused(StateError, said, second)
    refused(StateError, said, first)
    assert not (tmp_path / "second/history.jsonl").exists()
    shutil.rmtree(tmp_path / "state/fedadmm")
    assert run_in_process(second).model_sha256 == summary.model_sha256


@pytest.mark.slow
def test_a_comparison_replaces_the_states_of_its_own_cells_and_no_others(tmp_path: Path) -> None:
    command = ["--algorithms", "fedadmm", "--clients", "20", "--rounds", "2", "--fraction", "0.25"]
    states = ["--state-dir", str(tmp_path / "state")]
    main([*command, *states, "--output", str(tmp_path / "one")])
    (tmp_path / "one/fedadmm/summary.json").unlink()  # as if it had been killed
    main([*command, *states, "--output", str(tmp_path / "one")])
    before = sorted((tmp_path / "state").rglob("*"))
    with pytest.raises(SystemExit):
        main([*command, *states, "--output", str(tmp_path / "other")])
    assert sorted((tmp_path / "state").rglob("*")) == before


def test_a_run_whose_rounds_were_all_void_fails_and_is_not_finished(tmp_path: Path) -> None:
    def lost(request: Message, reply: Message) -> Message | None:
        return None if request.metadata.message_type == "train" else reply

    config = short(tmp_path, **{"lost-rounds": 0})
    federation = InProcessGrid(app, 20, run_config=config.to_run_config(), fault=lost)
    with pytest.raises(RuntimeError, match=r"every round was skipped \(3 of 3\): the model is"):
        run(config, federation)
    assert not json.loads((tmp_path / "run/summary.json").read_text())["finished"]
    assert len(read_history(tmp_path / "run/history.jsonl")) == 3


def test_a_run_without_legible_settings_is_not_resumed(tmp_path: Path) -> None:
    config = short(tmp_path, algorithm="fedavg", **{"checkpoint-every": 1, "resume": True})
    run_in_process(config)
    settings = tmp_path / "run/config.json"
    for stored in ("", "[]", '{"params": 3}', None):
        settings.unlink() if stored is None else settings.write_text(stored)
        refused(ValueError, r"config\.json, by which the run is resumed, is damaged", config)


def test_one_state_directory_serves_several_algorithms(tmp_path: Path) -> None:
    state = {"state-dir": str(tmp_path / "state")}
    for algorithm in ("fedadmm", "scaffold"):
        run_in_process(short(tmp_path, algorithm=algorithm, **state))
    found = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert found == ["fedadmm", "scaffold"]


def test_a_state_directory_is_for_algorithms_whose_clients_keep_state(tmp_path: Path) -> None:
    state = {"state-dir": str(tmp_path / "state")}
    for algorithm, client in CLIENTS.items():
        if client.state_type is None and not short(tmp_path, algorithm=algorithm).stateful:
            with pytest.raises(ValueError, match=r"state-dir is '.*', and no clients here keep a"):
                configs_for([algorithm], [], state, tmp_path)
            assert short(tmp_path, algorithm=algorithm, **state).state_dir == ""
            both = configs_for([algorithm, "fedadmm"], [], state, tmp_path)
            assert [config.state_dir for config in both] == ["", state["state-dir"]]


@pytest.mark.parametrize("megabytes", [0, 1, 1000])
@pytest.mark.slow
def test_states_beyond_a_size_go_to_a_file_without_a_name_and_the_model_is_the_same_to_the_bit(
    megabytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """120 states of 10 to 20 kB: above 1 MB, far below 1000."""
    keys = {"clients": 120, "rounds": 3, "fraction": 0.5, "model": "mlp"}
    expected = run_in_process(short(tmp_path, **keys)).model_sha256
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen: list[list[Path]] = []
    caplog.clear()
    config = short(tmp_path, **keys, **{"state-memory": megabytes})
    summary = run_in_process(config, [lambda info: seen.append(list(temporary.iterdir()))])
    assert summary.model_sha256 == expected
    assert seen == [[], [], []]  # so that nothing is left even where the process is killed
    said = [r.getMessage() for r in caplog.records if "temporary file" in r.getMessage()]
    assert len(said) == (megabytes < 1000)
    assert all(f"{megabytes} MB" in line and str(temporary) in line for line in said)


@pytest.mark.parametrize("limit", [0, 150, 10**9])
def test_never_are_more_states_in_memory_than_the_limit_and_none_is_lost(limit: int) -> None:
    """States that grow, shrink and end, of arrays, numbers and words."""
    app, sizes = ClientApp(), [0, 3, 5, 1, 0, 7, 2]
    expected: dict[int, RecordDict] = {}

    @app.train()
    def train(message: Message, context: Any) -> Message:
        node, turn = context.node_id, context.state.metric_records.get("turn", {"n": 0})["n"]
        assert context.state == expected.get(node, RecordDict())
        array = Array(np.arange(sizes[turn], dtype=np.float64) + turn)
        expected[node] = RecordDict(
            {
                "array": ArrayRecord({"w": array}),
                "turn": MetricRecord({"n": turn + 1}),
                "word": ConfigRecord({"said": f"{node} in {turn}"}),
            }
        )
        context.state = RecordDict(dict(expected[node]))
        return Message(RecordDict(), reply_to=message)

    federation = InProcessGrid(app, 5, state_memory=limit)
    for _ in sizes:
        requests = [Message(RecordDict(), node, "train") for node in federation.get_node_ids()]
        assert not any(reply.has_error() for reply in federation.send_and_receive(requests))
        held = [context.state.array_records for context in federation.contexts.values()]
        arrays = [
            array for records in held for record in records.values() for array in record.values()
        ]
        assert sum(len(array.data) for array in arrays) <= limit


def test_a_state_takes_the_room_that_another_outgrew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten states of 8 kB grow to 16 kB, ten others of 8 kB come, then the first grow to 24 kB."""
    files = []

    def noted(**options: Any) -> Any:
        files.append(made(**options))
        return files[-1]

    made = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", noted)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        longer = np.concatenate([*(r["w"].numpy() for r in context.state.values()), np.ones(1000)])
        context.state = RecordDict({"array": ArrayRecord({"w": Array(longer)})})
        return Message(RecordDict(), reply_to=message)

    federation = InProcessGrid(app, 20, state_memory=0)
    nodes = [*federation.get_node_ids()]
    for asked in (nodes[:10], nodes[:10], nodes[10:], nodes[:10]):
        requests = [Message(RecordDict(), node, "train") for node in asked]
        assert not any(reply.has_error() for reply in federation.send_and_receive(requests))
    assert files[0].seek(0, 2) < 1.1 * 8000 * (10 * 1 + 10 * 2 + 10 * 3)
    assert "of up to 0.000327 GB (20 clients, 0.00818 MB" in caplog.text


def fill(monkeypatch: pytest.MonkeyPatch, files: str, *, at: int = 1) -> None:
    """Let the disk be full from the ``at``-th write of ``files``, a pattern, on."""
    synced, opened, count = os.fsync, Path.open, 0
    folder, _, name = files.rpartition("/")

    def no_room(handle: int) -> None:
        nonlocal count
        count += (full := fnmatch(os.readlink(f"/proc/self/fd/{handle}"), f"{folder}/.{name}.*"))
        if full and count >= at:
            raise OSError(28, "No space left on device")
        synced(handle)

    def elsewhere(path: Path, mode: str = "r", *others: Any, **options: Any) -> Any:
        full = str(path) == files and mode in ("w", "a")
        return opened(Path("/dev/full") if full else path, mode, *others, **options)

    monkeypatch.setattr(os, "fsync", no_room)
    monkeypatch.setattr(Path, "open", elsewhere)


@pytest.mark.parametrize(
    "file",
    [
        *("run/config.json", "run/run.json", "run/history.jsonl", "run/clients.jsonl"),
        *("run/summary.json", "run/model.safetensors"),
        *("run/checkpoints/run.json", "run/checkpoints/round-00000002.safetensors"),
    ],
)
def test_where_the_disk_of_the_results_is_full_the_run_names_file_and_setting(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / file
    fill(monkeypatch, str(path))
    said = rf"^{path} cannot be written \(No space left on device\): .* choose another output$"
    options = {"checkpoint-every": 1, "state-dir": str(tmp_path / "states")}
    with pytest.raises(RuntimeError, match=said):
        run_in_process(short(tmp_path, **options))


def test_where_the_disk_of_the_states_is_full_the_run_names_file_and_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(monkeypatch, f"{tmp_path}/states/*/*.safetensors")
    with pytest.raises(RuntimeError, match=rf"No space left on device: '{tmp_path}/states/\S+'"):
        run_in_process(short(tmp_path, **{"state-dir": str(tmp_path / "states"), "fraction": 1.0}))


@pytest.mark.parametrize(
    ("file", "at"),
    [
        ("run.json", 1),
        ("config.json", 1),
        ("summary.json", 1),
        ("summary.json", 2),
        ("table.md", 1),
    ],
)
def test_a_comparison_on_a_full_disk_is_a_failed_run_and_no_bad_argument(
    file: str,
    at: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(monkeypatch, f"{tmp_path}/*/{file}", at=at)
    with pytest.raises(SystemExit) as ended:
        main(["--algorithms", "fedavg", *COMPARED.split(), "--output", str(tmp_path / "all")])
    assert ended.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{file} cannot be written (No space left on device): free some space, or" in last
    assert last.endswith(("choose another output", "choose another output)"))


def test_where_a_disk_is_full_the_error_names_it_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(data: bytes) -> int:
        raise OSError(28, "No space left on device")

    file = SimpleNamespace(seek=int, write=no_room, flush=int, close=list)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: file)
    federation = InProcessGrid(ClientApp(), 1, state_memory=0)
    (context,) = federation.contexts.values()
    context.state["array"] = ArrayRecord({"w": Array(np.ones(3))})
    request = Message(RecordDict(), context.node_id, "train")
    with pytest.raises(OSError, match=r"states do not fit into .* \(TMPDIR names another .* space"):
        federation.push_messages([request])
