"""Whose a folder of checkpoints is, and what else may lie there."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from resumed import FEDADMM, outcome, run, strategy

from fl_strategies import Checkpoints, History, RoundInfo
from fl_strategies.core import files

Whole = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return ``whole(rounds)``: what a run comes to that nothing interrupts."""

    @functools.cache
    def outcome_of(rounds: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("whole")
        return outcome(run(strategy(FEDADMM, folder), folder, rounds))

    return outcome_of


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder that a run of four rounds leaves, and the run's id."""
    folder = tmp_path_factory.mktemp("four")
    one = strategy(FEDADMM, folder)
    run(one, folder, 4)
    return folder, one.run.id


@pytest.fixture
def after_four(four: tuple[Path, str], tmp_path: Path) -> str:
    """Make ``tmp_path`` the folder of a run that had four rounds; return the run's id."""
    folder, run_id = four
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return run_id


# ---- whose the folder is -----------------------------------------------------------------------


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_is_one_runs_at_a_time(resume: bool, tmp_path: Path, whole: Whole) -> None:
    """A second run is refused, by the first one's name, and the first goes on to its end."""
    said = []

    def second(info: RoundInfo) -> None:
        if info.server_round == 1:  # there is no checkpoint yet
            with pytest.raises(ValueError, match="is in use") as refused:
                run(strategy(FEDADMM, tmp_path), tmp_path, 4, resume=resume)
            said.append(str(refused.value))

    one = strategy(FEDADMM, tmp_path, callbacks=[second])
    found = run(one, tmp_path, 4)
    assert f"in use by run {one.run.id} (process {os.getpid()}): wait until" in said[0]
    assert outcome(found) == whole(4)
    run(strategy(FEDADMM, tmp_path), tmp_path, 5)


def killed(folder: Path) -> None:
    def callback(info: RoundInfo) -> None:
        if info.server_round == 3:
            (folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    run(strategy(FEDADMM, folder, callbacks=[callback], checkpoints={"every": 9}), folder, 5)


def test_a_killed_run_leaves_the_folder_free_and_goes_on_under_its_id(
    tmp_path: Path, whole: Whole
) -> None:
    """Although it had no checkpoint yet: its clients' states carry the id."""
    process = multiprocessing.get_context("fork").Process(target=killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    signed = json.loads((tmp_path / "checkpoints/run.json").read_text())
    assert signed["process"] == int((tmp_path / "pid").read_text())
    again = strategy(FEDADMM, tmp_path)
    found = run(again, tmp_path, 5)
    assert again.run.id == signed["run"]
    assert outcome(found) == whole(5)


@pytest.mark.parametrize(
    "lock", [None, b"", b"{", b"\xff\n", b'{"run": "fedadmm-x", "process": 1}']
)
def test_a_resumed_run_keeps_the_id_of_its_checkpoint(
    lock: bytes | None, tmp_path: Path, after_four: str
) -> None:
    """Whatever became of the lock's file."""
    file = tmp_path / "checkpoints/run.json"
    file.unlink() if lock is None else file.write_bytes(lock)
    again = strategy(FEDADMM, tmp_path)
    assert again.run.id != after_four
    used = run(again, tmp_path, 6).train_metrics_clientapp[6]["clients-used"]
    assert used == 3  # of the 3 asked, who have states
    assert again.run.id == after_four
    assert json.loads(file.read_text())["run"] == after_four


def test_a_second_start_keeps_the_id_and_the_folder_unless_it_is_anothers_now(
    tmp_path: Path,
) -> None:
    one = strategy(FEDADMM, tmp_path)
    run(one, tmp_path, 2)
    before = one.run.id
    run(one, tmp_path, 2, resume=False)
    assert one.run.id == before
    for path in (tmp_path / "checkpoints").glob("round-*"):
        path.unlink()
    other = strategy(FEDADMM, tmp_path / "b")
    other.checkpoints = Checkpoints(tmp_path / "checkpoints")
    run(other, tmp_path / "b", 2, resume=False)
    with pytest.raises(ValueError, match=f"is now of run {other.run.id}, not {before}"):
        run(one, tmp_path, 2, resume=False)


def test_an_interrupted_or_failed_start_leaves_the_folder_free(tmp_path: Path) -> None:
    def broken(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        raise ZeroDivisionError("a mistake")

    with pytest.raises(ZeroDivisionError) as kept:  # its frames hold the strategy
        run(strategy(FEDADMM, tmp_path), tmp_path, 2, evaluate_fn=broken)
    run(strategy(FEDADMM, tmp_path), tmp_path, 2)
    assert kept.traceback


def test_where_nothing_can_be_written_is_said_before_anybody_is_asked(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(ValueError, match=r"the folder .*checkpoints cannot be written: .*exists"):
        run(strategy(FEDADMM, tmp_path), tmp_path, 2)
    assert not (tmp_path / "states").exists()


def test_a_file_system_without_locks_is_worked_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    run(strategy(FEDADMM, tmp_path), tmp_path, 2)
    assert "cannot be locked (no locks available): make sure" in caplog.text


# ---- what else may lie there -------------------------------------------------------------------

STRAYS = [
    "round-00000004 (copy).safetensors", "round-4.safetensors", "round-.safetensors",
    "round-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0664.safetensors", "round-00000004",
    "round-00000004.safetensors.bak", "round--0000004.safetensors", "round-x\x1b\n.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
def test_strays_are_left_alone_with_a_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: Whole, after_four: str
) -> None:
    folder = tmp_path / "checkpoints"
    for path in [folder / name for name in STRAYS] + [folder / ".round-00000004.safetensors.x"]:
        if kind == "file":
            path.write_bytes(b"")
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(folder / "nothing")
    assert outcome(run(strategy(FEDADMM, tmp_path), tmp_path, 8)) == whole(8)
    lines = [r.getMessage() for r in caplog.records if "is no checkpoint and is" in r.getMessage()]
    assert len(lines) == len(STRAYS)
    assert all(line.isprintable() for line in lines)
    assert all((folder / name).is_symlink() or (folder / name).exists() for name in STRAYS)


@pytest.mark.parametrize("kind", ["a folder", "a link to nothing"])
@pytest.mark.parametrize("resume", [True, False])
def test_what_is_no_file_in_a_checkpoints_place_is_one_clear_error(
    resume: bool, kind: str, tmp_path: Path, after_four: str
) -> None:
    """Also where an earlier checkpoint could be used, as the pages say."""
    path = tmp_path / "checkpoints/round-00000006.safetensors"
    path.mkdir() if kind == "a folder" else path.symlink_to("nothing")
    pages = [
        (Path(__file__).parents[1] / name).read_text()
        for name in ("SECURITY.md", "notebooks/pages/faults.md")
    ]
    assert all(
        "A folder or a link to nothing that has a checkpoint's name" in page for page in pages
    )
    with pytest.raises(ValueError, match=r"round-00000006\.safetensors: no file, but in a checkpo"):
        run(strategy(FEDADMM, tmp_path), tmp_path, 8, resume=resume)


def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(strategy(FEDADMM, tmp_path), tmp_path, 6)
    opened = files.safe_open

    def denied(path: Path, **options: Any) -> Any:
        if path.name == "round-00000006.safetensors":
            raise PermissionError("Permission denied")
        return opened(path, **options)

    monkeypatch.setattr(files, "safe_open", denied)
    assert outcome(run(strategy(FEDADMM, tmp_path), tmp_path, 6)) == outcome(whole)
    assert "00000006.safetensors cannot be read: Permission denied; it is not" in caplog.text


TEXTS = ["", "{", "3", "{}", "[" * 100_000, '{"names": ["a"]}', '{"names": [], "state": {}}',
         '{"names": [], "state": {"map": []}, "run": {}}',
         '{"version": 7, "names": [], "states": {"map": []}, "ledger": {"map": []}, "run": {}}',
         '{"version": 7, "names": [], "states": {"array": "b"}, "ledger": {"map": []}, "run": 3}',
         '{"names": [], "state": {"array": "b"}, "run": 3}']  # fmt: skip


def test_a_made_up_checkpoint_is_passed_over(tmp_path: Path, whole: Whole, after_four: str) -> None:
    """Although its checksum is right."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for number, text in enumerate(TEXTS, start=5):
        files.save_arrays(checkpoints.path(number), {"b": np.zeros(2)}, text)
    assert outcome(run(strategy(FEDADMM, tmp_path), tmp_path, 4)) == whole(4)


def test_a_checkpoint_of_another_record_is_refused(tmp_path: Path, after_four: str) -> None:
    found = Checkpoints(tmp_path / "checkpoints").last()
    assert found is not None
    states = {"algorithm": {**found.states["algorithm"], "callbacks": []}}
    Checkpoints(tmp_path / "checkpoints").save(4, found._replace(states=states))
    with pytest.raises(ValueError, match=r"holds \[.*'callbacks'.*\] of the server, and this"):
        run(strategy(FEDADMM, tmp_path), tmp_path, 6)


@pytest.mark.parametrize("version", [1, 6, "7"])
def test_a_checkpoint_of_another_version_is_refused(
    tmp_path: Path, version: object, after_four: str
) -> None:
    path = Checkpoints(tmp_path / "checkpoints").path(4)
    arrays, text = files.load_arrays(path)
    files.save_arrays(path, arrays, json.dumps({**json.loads(text), "version": version}))
    with pytest.raises(ValueError, match=r"has version '?[1-7]'? of the format, and this version"):
        run(strategy(FEDADMM, tmp_path), tmp_path, 6)


def header_of(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.slow
def test_the_header_of_a_checkpoint_does_not_grow_with_its_rounds_or_clients(
    tmp_path: Path, after_four: str
) -> None:
    """Safetensors takes headers up to 100 MB."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    found = checkpoints.last()
    assert found is not None
    row = {f"metric-{n}": n / 7 for n in range(20)}
    sizes = {}
    for rounds in (10, 10_000):
        ledger = {**found.ledger, "acked": dict.fromkeys(range(rounds), 3)}
        history = [[[number, row] for number in range(rounds)]] * 3
        more = found._replace(ledger=ledger, run={**found.run, "history": history})
        checkpoints.save(6, more)
        again = Checkpoints(tmp_path / "checkpoints").last()
        assert again is not None
        assert (again.run, again.ledger) == (more.run, ledger)
        sizes[rounds] = header_of(checkpoints.path(6))
    assert sizes[10_000] <= sizes[10] + 30  # digits of a length


@pytest.mark.slow
def test_a_text_above_what_a_header_may_have_is_kept(tmp_path: Path) -> None:
    text = "x" * 110_000_000
    files.save_arrays(tmp_path / "file", {"a": np.ones(3)}, text)
    assert files.load_arrays(tmp_path / "file")[1] == text


@pytest.mark.slow
def test_no_flipped_bit_of_a_history_is_a_traceback(tmp_path: Path) -> None:
    """The run goes on, with a number changed perhaps, or says which line is damaged."""
    path = tmp_path / "history.jsonl"
    rows = {number: {"loss": 0.5, "steps": 3.0} for number in (1, 2)}
    lines = b"".join(json.dumps({"round": n, **row}).encode() + b"\n" for n, row in rows.items())
    faults = []
    for place, bit in itertools.product(range(len(lines)), range(8)):
        changed = bytearray(lines)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        with contextlib.suppress(files.DamagedFile):
            History(path).recall(rows)
            continue
        assert path.read_bytes() == changed
        with pytest.raises(files.DamagedFile) as fault:
            History(path).recall(rows)
        faults.append(str(fault.value))
    said = r".* is damaged in line [12]: .*; the run continues without it if it is moved away"
    assert all(re.fullmatch(said, fault) for fault in faults)
    assert len(faults) > len(lines)
    path.write_bytes(lines + b'{"round": 3, "lo')  # a kill cut it off
    History(path).recall(rows)
    assert path.read_bytes() == lines
