"""A run that is killed and resumed ends as if nothing had happened, for every algorithm."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result
from laws import START, TABLE, Row, every_algorithm, local
from problems import NODES, grid, quadratics, to_record, to_vector

from clients import DirectoryStore, client_id
from clients.node.in_process import Fault, InProcessGrid
from fl_strategies import (
    BestModel,
    Checkpoints,
    EarlyStop,
    FedAvg,
    FederatedStrategy,
    History,
    RoundInfo,
    as_legacy,
)
from fl_strategies.core import files
from simulations.config import RunConfig
from simulations.experiment import run_in_process

CLIENTS = 5
ROUNDS = 60

OPTIONS: dict[str, dict[str, Any]] = {
    "fedpd": {"p": 0.3},
    "fedbcd-async": {"servers": 5, "first": 2, "staleness": 3},
    "fedadmm": {"eta": "fraction"},
}
"""Settings with more to remember than the usual ones have."""


def federation(folder: Path, fault: Fault | None = None) -> InProcessGrid:
    def store(context: Any) -> DirectoryStore:
        return DirectoryStore(folder / "states", client_id(context))

    return grid(quadratics(CLIENTS), store=store, fault=fault)


def strategy(row: Row, folder: Path, **options: Any) -> FederatedStrategy:
    checkpoints = {"every": 2} | options.pop("checkpoints", {})
    return row.strategy(
        **{"local": local(), "fraction_train": 0.6, "seed": 3}
        | OPTIONS.get(row.name, {})
        | {"checkpoints": Checkpoints(folder / "checkpoints", **checkpoints)}
        | options
    )


def loss(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    w = to_vector(arrays)
    return MetricRecord({"test-loss": float(np.mean([q.value(w) for q in quadratics(CLIENTS)]))})


def run(one: FederatedStrategy, folder: Path, rounds: int = ROUNDS, **options: Any) -> Result:
    on, initial = federation(folder, options.pop("fault", None)), to_record(START)
    return one.start(on, initial, rounds, **{"evaluate_fn": loss, "resume": True} | options)


def outcome(result: Result) -> dict[str, Any]:
    """All that a run comes to, but for the time that it took."""
    phases = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    rows = {
        name: {
            number: {k: v for k, v in record.items() if k != "seconds"}
            for number, record in phase.items()
        }
        for name, phase in phases.items()
    }
    return {"model": to_vector(result.arrays).tolist(), **rows}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) | {"seconds": 0} for line in path.read_text().splitlines()]


# ---- killed at any moment ---------------------------------------------------------------------


class Countdown:
    """Sends this process SIGKILL at its n-th function call, or n-th call made by a file's write."""

    def __init__(self, calls: int, in_writes: bool) -> None:
        self.left, self.in_writes = calls, in_writes

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.in_writes or frame.f_code.co_name == "write_atomically":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def life(row: Row, folder: Path, rounds: int, countdown: Countdown) -> None:
    one = strategy(row, folder)
    sys.setprofile(countdown)
    found = outcome(run(one, folder, rounds))
    sys.setprofile(None)
    (folder / "outcome.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("times", "rounds"), [(2, 8), pytest.param(20, ROUNDS, marks=pytest.mark.slow)]
)
@every_algorithm
def test_a_run_that_is_killed_many_times_ends_as_if_never_killed(
    row: Row, times: int, rounds: int, tmp_path: Path
) -> None:
    """The kills come at random calls, every other one in the midst of writing a file."""
    whole = tmp_path / "whole"
    whole.mkdir()
    events = {in_writes: Countdown(0, in_writes) for in_writes in (False, True)}

    def count(frame: FrameType, event: str, arg: Any) -> None:
        for countdown in events.values():
            countdown(frame, event, arg)

    def begin(info: RoundInfo) -> None:
        sys.setprofile(count)  # from here: the first round of a process calls for much more

    one = strategy(row, whole)
    one.callbacks = (*one.callbacks, begin)
    try:
        expected = outcome(run(one, whole, rounds))
    finally:
        sys.setprofile(None)
    rng, kills = np.random.default_rng(1), 0
    fork = multiprocessing.get_context("fork")
    while not (tmp_path / "outcome.json").exists():
        in_writes = kills % 2 == 1
        most = -events[in_writes].left * 4 // (rounds - 1)
        calls = int(rng.integers(1, most)) if kills < times else 0
        process = fork.Process(
            target=life, args=(row, tmp_path, rounds, Countdown(calls, in_writes))
        )
        process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
    assert kills == times
    found = json.loads((tmp_path / "outcome.json").read_text())
    assert found == json.loads(json.dumps(expected))


# ---- what is kept, and what is refused --------------------------------------------------------

FEDADMM = next(row for row in TABLE if row.name == "fedadmm")


def stop_at(number: int) -> Callable[[RoundInfo], None]:
    def callback(info: RoundInfo) -> None:
        if info.server_round == number:
            raise KeyboardInterrupt

    return callback


def interrupted(one: FederatedStrategy, folder: Path, at: int, **options: Any) -> None:
    one.callbacks = (*one.callbacks, stop_at(at))
    with pytest.raises(KeyboardInterrupt):
        run(one, folder, **options)


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    losses = iter([9.0, 5.0, 1.0, 4.0, math.nan, 3.0, 2.0, 8.0])

    def measured(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"test-loss": next(losses)})

    kept_ones = {"every": 1, "keep": 2, "best": "test-loss", "smaller": True}
    one = strategy(FEDADMM, tmp_path, checkpoints=kept_ones)
    one.start(federation(tmp_path), to_record(START), 7, evaluate_fn=measured)
    assert Checkpoints(tmp_path / "checkpoints").rounds() == [2, 6, 7]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()} - {"run.lock"}
    assert names == {f"round-0000000{number}.safetensors" for number in (2, 6, 7)}


def test_the_last_round_has_a_checkpoint_whatever_every_is(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path, checkpoints={"every": 4}), tmp_path, 6)
    assert Checkpoints(tmp_path / "checkpoints").rounds() == [4, 6]


def test_a_client_keeps_what_the_checkpoints_would_go_back_to_and_no_more(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path, fraction_train=1.0, checkpoints={"every": 3}), tmp_path, 11)
    # 9 and 6 for the checkpoints, 10 as the one that stood in round 11, and that round's
    names = sorted(path.name for path in (tmp_path / "states").glob("0.*"))
    assert names == [f"0.{number}.safetensors" for number in (10, 11, 6, 9)]


def test_replies_lost_before_and_after_a_checkpoint_are_undone(tmp_path: Path) -> None:
    """Client 1's replies of rounds 4, 5 and 7 are lost, and the run is cut off in round 8."""

    def fault(request: Message, reply: Message) -> Message | None:
        config = request.content.config_records.get("config", {})
        lost = config.get("server-round") in (4, 5, 7) and request.metadata.dst_node_id == NODES[1]
        return None if lost else reply

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    options = {"fraction_train": 1.0, "checkpoints": {"every": 5}}
    whole = run(
        strategy(FEDADMM, tmp_path / "whole", **options), tmp_path / "whole", 9, fault=fault
    )
    interrupted(
        strategy(FEDADMM, tmp_path / "parts", **options), tmp_path / "parts", 8, fault=fault
    )
    again = strategy(FEDADMM, tmp_path / "parts", **options)
    assert outcome(run(again, tmp_path / "parts", 9, fault=fault)) == outcome(whole)


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(strategy(FEDADMM, tmp_path / "whole"), tmp_path / "whole", 12)
    interrupted(strategy(FEDADMM, tmp_path / "parts"), tmp_path / "parts", 9)
    newest = Checkpoints(tmp_path / "parts" / "checkpoints").path(8)
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    resumed = run(strategy(FEDADMM, tmp_path / "parts"), tmp_path / "parts", 12)
    assert "round-00000008.safetensors is damaged: its checksum differs; it is not" in caplog.text
    assert outcome(resumed) == outcome(whole)


def test_a_run_does_not_begin_anew_where_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path), tmp_path, 4)
    for path in (tmp_path / "checkpoints").glob("round-*"):
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged: \[2, 4\]"):
        run(strategy(FEDADMM, tmp_path), tmp_path, 6)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"seed": 4}, r"of a run with \{'seed': 3\}, not \{'seed': 4\}"),
        ({"buffers": ["tail"]}, r"of a run with \{'model': .*\}, not \{'model'"),
    ],
)
def test_another_runs_checkpoints_are_refused(
    others: dict[str, Any], said: str, tmp_path: Path
) -> None:
    run(strategy(FEDADMM, tmp_path), tmp_path, 4)
    with pytest.raises(ValueError, match=said):
        run(strategy(FEDADMM, tmp_path, **others), tmp_path, 6)


def test_another_algorithms_checkpoints_are_refused(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path), tmp_path, 4)
    with pytest.raises(ValueError, match=r"'algorithm': 'fedadmm'\}, not \{'algorithm': 'fedavg'"):
        run(FedAvg(seed=3, checkpoints=Checkpoints(tmp_path / "checkpoints")), tmp_path, 6)


def test_a_new_run_does_not_write_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path), tmp_path, 4)
    with pytest.raises(ValueError, match=r"holds checkpoints of rounds \[2, 4\]: go on from them"):
        run(strategy(FEDADMM, tmp_path), tmp_path, 4, resume=False)


def test_resuming_needs_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume needs checkpoints"):
        run(FEDADMM.strategy(local=local()), tmp_path)


@pytest.mark.parametrize("name", ["every", "keep"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_numbers_of_checkpoints_out_of_range_are_refused(
    name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be an integer >= 1, got {value}"):
        Checkpoints(tmp_path, **{name: value})


def test_a_legacy_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoints need Strategy\.start"):
        as_legacy(strategy(FEDADMM, tmp_path), to_record(START))


# ---- what goes on beside ----------------------------------------------------------------------


def test_a_second_start_that_was_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    row = next(row for row in TABLE if row.name == "fedpd")
    found = []
    for folder, cut in ((tmp_path / "whole", None), (tmp_path / "parts", 7)):
        one = strategy(row, folder)
        first = run(one, folder, 9, resume=False)
        if cut is not None:
            one.callbacks = (stop_at(cut),)
        on = federation(folder)
        try:
            found.append(one.start(on, first.arrays, 20, evaluate_fn=loss))
        except KeyboardInterrupt:
            again = strategy(row, folder)
            found.append(again.start(on, to_record(START), 20, evaluate_fn=loss, resume=True))
    assert outcome(found[0]) == outcome(found[1])


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    done = run(strategy(FEDADMM, tmp_path), tmp_path, 4)

    def fault(request: Message, reply: Message) -> Message | None:
        raise AssertionError("a client was asked")

    assert outcome(run(strategy(FEDADMM, tmp_path), tmp_path, 4, fault=fault)) == outcome(done)


def test_a_run_that_a_callback_ended_stays_ended(tmp_path: Path) -> None:
    stop = EarlyStop("test-loss", target=1e9, smaller=True)
    done = run(strategy(FEDADMM, tmp_path, callbacks=[stop]), tmp_path, 9)
    assert len(done.train_metrics_clientapp) == 1
    again = run(strategy(FEDADMM, tmp_path), tmp_path, 9)
    assert outcome(again) == outcome(done)


def test_history_best_model_and_early_stop_go_on(tmp_path: Path) -> None:
    def callbacks(folder: Path) -> list[Any]:
        return [
            History(folder / "history.jsonl"),
            BestModel(folder / "best", "test-loss", smaller=True),
            EarlyStop("loss-that-rises", patience=11),
        ]

    def rising(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({**loss(0, arrays), "loss-that-rises": -float(server_round)})

    found = []
    for folder, cut in ((tmp_path / "whole", None), (tmp_path / "parts", 8)):
        folder.mkdir()
        one = strategy(FEDADMM, folder, callbacks=callbacks(folder), checkpoints={"every": 3})
        if cut is not None:
            interrupted(one, folder, cut, evaluate_fn=rising)
            assert len((folder / "history.jsonl").read_text().splitlines()) == cut
            one = strategy(FEDADMM, folder, callbacks=callbacks(folder), checkpoints={"every": 3})
        result = run(one, folder, evaluate_fn=rising)
        assert len(result.train_metrics_clientapp) == 12
        best = one.callbacks[1]
        rows = lines_of(folder / "history.jsonl")
        found.append((rows, best.best, best.best_round, (folder / "best").read_bytes()))
    assert found[0] == found[1]


# ---- a round's callbacks and its checkpoint ----------------------------------------------------


class Seen:
    """Notes down the rounds that it sees, over all lives of a run; raises once, after one."""

    def __init__(self, seen: list[int], fails: int = 0, error: Exception | None = None) -> None:
        self.seen, self.fails, self.error = seen, fails, error

    def __call__(self, info: RoundInfo) -> None:
        self.seen.append(info.server_round)
        if self.error is not None and info.server_round == self.fails:
            raise self.error


@pytest.mark.parametrize("fails", [1, 4, 5, 8])
@pytest.mark.parametrize("place", [0, 1])
def test_a_round_whose_callback_raises_has_its_checkpoint_and_is_seen_once_by_all(
    fails: int, place: int, tmp_path: Path
) -> None:
    """Whatever ``every`` is. The run goes on, to the same end, with the next round."""
    whole = run(strategy(FEDADMM, tmp_path / "whole"), tmp_path / "whole", 8)
    error, seen = ConnectionError("the tracker is away"), [list[int](), list[int]()]

    def callbacks(error: Exception | None) -> list[Any]:
        failing = [Seen(rows, fails, error if n == place else None) for n, rows in enumerate(seen)]
        return [*failing, History(tmp_path / "history.jsonl")]

    with pytest.raises(ConnectionError) as raised:
        run(strategy(FEDADMM, tmp_path, callbacks=callbacks(error)), tmp_path, 8)
    assert raised.value is error
    assert raised.value.__context__ is None
    assert Checkpoints(tmp_path / "checkpoints").rounds()[-1] == fails
    found = run(strategy(FEDADMM, tmp_path, callbacks=callbacks(None)), tmp_path, 8)
    assert outcome(found) == outcome(whole)
    assert seen == [list(range(1, 9))] * 2
    assert [row["round"] for row in lines_of(tmp_path / "history.jsonl")] == list(range(1, 9))


@pytest.mark.parametrize("stops", [True, False])
def test_of_several_errors_the_first_is_raised_and_a_stop_is_not_forgotten(
    stops: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [KeyError("metric"), OSError("disk\x1b[2J")]
    callbacks = [lambda _: stops, *(Seen([], 1, error) for error in errors)]
    with pytest.raises(KeyError, match="metric"):
        run(strategy(FEDADMM, tmp_path, callbacks=callbacks), tmp_path, 3)
    assert r"another callback raised OSError: disk\x1b[2J" in caplog.text
    again = run(strategy(FEDADMM, tmp_path), tmp_path, 3)
    assert len(again.train_metrics_clientapp) == (1 if stops else 3)


# ---- whose the folder is -----------------------------------------------------------------------


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_is_one_runs_at_a_time(resume: bool, tmp_path: Path) -> None:
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
    assert outcome(found) == outcome(run(strategy(FEDADMM, tmp_path / "b"), tmp_path / "b", 4))
    run(strategy(FEDADMM, tmp_path), tmp_path, 5)


def killed(folder: Path) -> None:
    def callback(info: RoundInfo) -> None:
        if info.server_round == 3:
            (folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    run(strategy(FEDADMM, folder, callbacks=[callback], checkpoints={"every": 9}), folder, 5)


def test_a_killed_run_leaves_the_folder_free_and_goes_on_under_its_id(tmp_path: Path) -> None:
    """Although it had no checkpoint yet: its clients' states carry the id."""
    process = multiprocessing.get_context("fork").Process(target=killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    signed = json.loads((tmp_path / "checkpoints/run.lock").read_text())
    assert signed["process"] == int((tmp_path / "pid").read_text())
    again = strategy(FEDADMM, tmp_path)
    found = run(again, tmp_path, 5)
    assert again.run.id == signed["run"]
    assert outcome(found) == outcome(run(strategy(FEDADMM, tmp_path / "b"), tmp_path / "b", 5))


@pytest.mark.parametrize(
    "lock", [None, b"", b"{", b"\xff\n", b'{"run": "fedadmm-x", "process": 1}']
)
def test_a_resumed_run_keeps_the_id_of_its_checkpoint(lock: bytes | None, tmp_path: Path) -> None:
    """Whatever became of the lock's file."""
    one = strategy(FEDADMM, tmp_path)
    run(one, tmp_path, 4)
    file = tmp_path / "checkpoints/run.lock"
    file.unlink() if lock is None else file.write_bytes(lock)
    again = strategy(FEDADMM, tmp_path)
    assert again.run.id != one.run.id
    used = run(again, tmp_path, 6).train_metrics_clientapp[6]["clients-used"]
    assert used == 3  # of the 3 asked, who have states
    assert again.run.id == one.run.id
    assert json.loads(file.read_text())["run"] == one.run.id


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
    assert "cannot be locked (no locks available): see to it yourself" in caplog.text


# ---- what else may lie there -------------------------------------------------------------------

STRAYS = [
    "round-00000004 (copy).safetensors", "round-4.safetensors", "round-.safetensors",
    "round-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0664.safetensors", "round-00000004",
    "round-00000004.safetensors.bak", "round--0000004.safetensors", "round-x\x1b\n.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
def test_strays_are_left_alone_with_a_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(strategy(FEDADMM, tmp_path / "b"), tmp_path / "b", 8)
    run(strategy(FEDADMM, tmp_path), tmp_path, 4)
    folder = tmp_path / "checkpoints"
    for path in [folder / name for name in STRAYS] + [folder / ".round-00000004.safetensors.x"]:
        if kind == "file":
            path.write_bytes(b"")
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(folder / "nothing")
    assert outcome(run(strategy(FEDADMM, tmp_path), tmp_path, 8)) == outcome(whole)
    lines = [r.getMessage() for r in caplog.records if "is no checkpoint and is" in r.getMessage()]
    assert len(lines) == len(STRAYS)
    assert all(line.isprintable() for line in lines)
    assert all((folder / name).is_symlink() or (folder / name).exists() for name in STRAYS)


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_in_a_checkpoints_place_is_one_clear_error(resume: bool, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/round-00000006.safetensors").mkdir(parents=True)
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
         '{"version": 2, "names": [], "state": {"map": []}, "ledger": {"map": []}, "run": {}}',
         '{"version": 2, "names": [], "state": {"array": "b"}, "ledger": {"map": []}, "run": 3}',
         '{"names": [], "state": {"array": "b"}, "run": 3}']  # fmt: skip


def test_a_made_up_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """Although its checksum is right."""
    whole = run(strategy(FEDADMM, tmp_path), tmp_path, 4)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for number, text in enumerate(TEXTS, start=5):
        files.save_arrays(checkpoints.path(number), {"b": np.zeros(2)}, text)
    assert outcome(run(strategy(FEDADMM, tmp_path), tmp_path, 4)) == outcome(whole)


def test_a_checkpoint_of_another_record_is_refused(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path), tmp_path, 4)
    found = Checkpoints(tmp_path / "checkpoints").last()
    assert found is not None
    state = {**found.state, "callbacks": []}
    Checkpoints(tmp_path / "checkpoints").save(4, found._replace(state=state))
    with pytest.raises(ValueError, match=r"holds \[.*'callbacks'.*\] of the server, and this"):
        run(strategy(FEDADMM, tmp_path), tmp_path, 6)


@pytest.mark.parametrize("version", [None, 1, 3, "2"])
def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path, version: object) -> None:
    run(strategy(FEDADMM, tmp_path), tmp_path, 4)
    path = Checkpoints(tmp_path / "checkpoints").path(4)
    arrays, text = files.load_arrays(path)
    about = {name: value for name, value in json.loads(text).items() if name != "version"}
    if version is not None:
        about["version"] = version
    files.save_arrays(path, arrays, json.dumps(about))
    with pytest.raises(ValueError, match=r"has version '?[123]'? of the format, and this version"):
        run(strategy(FEDADMM, tmp_path), tmp_path, 6)


def header_of(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


def test_the_header_of_a_checkpoint_does_not_grow_with_its_rounds_or_clients(
    tmp_path: Path,
) -> None:
    """Safetensors takes headers up to 100 MB."""
    run(strategy(FEDADMM, tmp_path), tmp_path, 4)
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


def test_a_text_above_what_a_header_may_have_is_kept(tmp_path: Path) -> None:
    text = "x" * 110_000_000
    files.save_arrays(tmp_path / "file", {"a": np.ones(3)}, text)
    assert files.load_arrays(tmp_path / "file")[1] == text


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
    said = r".* is damaged in line [12]: .*; the run goes on without it if it is moved away"
    assert all(re.fullmatch(said, fault) for fault in faults)
    assert len(faults) > len(lines)
    path.write_bytes(lines + b'{"round": 3, "lo')  # a kill cut it off
    History(path).recall(rows)
    assert path.read_bytes() == lines


def test_a_run_of_the_command_line_goes_on(tmp_path: Path) -> None:
    """Settings that matter must be the same; more rounds may be asked for."""

    def config(folder: str, **others: Any) -> RunConfig:
        keys = {"clients": 5, "rounds": 6, "checkpoint-every": 2, "seed": 2, "resume": True}
        lies = {"output": str(tmp_path / folder), "state-dir": str(tmp_path / folder / "states")}
        return RunConfig.parse(keys | lies | others)

    whole = run_in_process(config("whole"))
    with pytest.raises(KeyboardInterrupt):
        run_in_process(config("parts"), [stop_at(5)])
    with pytest.raises(ValueError, match=r"resumed with other settings: lr was .*, is 0.01"):
        run_in_process(config("parts", lr=0.01))
    run_in_process(config("parts", rounds=5))
    summary = run_in_process(config("parts"))
    assert replace(summary, seconds=0) == replace(whole, seconds=0)
    for name in ("history.jsonl", "clients.jsonl"):
        assert lines_of(tmp_path / "parts" / name) == lines_of(tmp_path / "whole" / name)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"resume": True}, "resume needs checkpoint-every > 0, and output"),
        ({"checkpoint-every": 2}, "checkpoint-every needs state-dir: clients of fedadmm keep"),
        ({"checkpoint-every": -1}, "checkpoint_every must be >= 0, got -1"),
        ({"checkpoint-keep": 0}, "checkpoint_keep must be >= 1, got 0"),
    ],
)
def test_run_configs_that_could_not_resume_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.parse(keys)
