"""A run that is killed and resumed ends as if nothing had happened, for every algorithm."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
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
from problems import grid, quadratics, to_record, to_vector
from test_laws import START, TABLE, Row, every_algorithm, local

from clients import DirectoryStore, client_id
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
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.in_process import Fault, InProcessGrid

CLIENTS = 5
ROUNDS = 60
KILLS = 20

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


def life(row: Row, folder: Path, countdown: Countdown) -> None:
    one = strategy(row, folder)
    sys.setprofile(countdown)
    found = outcome(run(one, folder))
    sys.setprofile(None)
    (folder / "outcome.json").write_text(json.dumps(found))


@every_algorithm
def test_killed_twenty_times_it_ends_as_if_never(row: Row, tmp_path: Path) -> None:
    """The kills come at random calls, every other one in the midst of writing a file."""
    whole = tmp_path / "whole"
    whole.mkdir()
    events = {in_writes: Countdown(0, in_writes) for in_writes in (False, True)}

    def count(frame: FrameType, event: str, arg: Any) -> None:
        for countdown in events.values():
            countdown(frame, event, arg)

    one = strategy(row, whole)
    sys.setprofile(count)
    try:
        expected = outcome(run(one, whole))
    finally:
        sys.setprofile(None)
    rng, kills = np.random.default_rng(1), 0
    fork = multiprocessing.get_context("fork")
    while not (tmp_path / "outcome.json").exists():
        in_writes = kills % 2 == 1
        most = -events[in_writes].left * 4 // ROUNDS
        calls = int(rng.integers(1, most)) if kills < KILLS else 0
        process = fork.Process(target=life, args=(row, tmp_path, Countdown(calls, in_writes)))
        process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
    assert kills == KILLS
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
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"round-0000000{number}.safetensors" for number in (2, 6, 7)}


def test_the_last_round_has_a_checkpoint_whatever_every_is(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path, checkpoints={"every": 4}), tmp_path, 6)
    assert Checkpoints(tmp_path / "checkpoints").rounds() == [4, 6]


def test_a_client_keeps_what_the_checkpoints_would_go_back_to_and_no_more(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path, fraction_train=1.0, checkpoints={"every": 3}), tmp_path, 11)
    # 9 and 6 for the checkpoints, 10 as the one that stood in round 11, and that round's
    names = sorted(path.name for path in (tmp_path / "states").glob("0.*"))
    assert names == [f"0.{number}.safetensors" for number in (10, 11, 6, 9)]


def test_replies_lost_before_and_after_a_checkpoint_are_undone_all_the_same(tmp_path: Path) -> None:
    """Client 1's replies of rounds 4, 5 and 7 are lost, and the run is cut off in round 8."""

    def fault(request: Message, reply: Message) -> Message | None:
        config = request.content.config_records.get("config", {})
        lost = config.get("server-round") in (4, 5, 7) and request.metadata.dst_node_id == 1002
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


def test_it_does_not_begin_anew_where_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path), tmp_path, 4)
    for path in (tmp_path / "checkpoints").iterdir():
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


def test_a_second_start_that_was_killed_goes_on_too(tmp_path: Path) -> None:
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
