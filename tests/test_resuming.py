"""Callbacks, a second start and a run of the command line resume with their run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from laws import START, TABLE, Row
from problems import to_record, to_vector
from resumed import FEDADMM, federation, interrupted, loss, outcome, run, stop_at, strategy

from fl_strategies import BestModel, Checkpoints, EarlyStop, History, RoundInfo
from fl_strategies.core.files import FolderLock
from fl_strategies.parts import Buffered, Clock, Deadline
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.lab.runs import run_one


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a history, but for what a clock measured."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not name.startswith(("seconds", "busy-"))}
        for row in rows
    ]


# ---- what goes on beside ----------------------------------------------------------------------


@pytest.mark.slow
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


def test_a_finished_run_is_not_run_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = run(strategy(FEDADMM, tmp_path), tmp_path, 4)

    def fault(request: Message, reply: Message) -> Message | None:
        raise AssertionError("a client was asked")

    assert outcome(run(strategy(FEDADMM, tmp_path), tmp_path, 4, fault=fault)) == outcome(done)
    assert re.search(r"fedadmm: all 4 rounds of run fedadmm-\w+ are done", caplog.text)
    with pytest.raises(
        ValueError, match="num_rounds = 3 are 3 rounds with communication, and 4 are done"
    ):
        run(strategy(FEDADMM, tmp_path), tmp_path, 3)


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what eight rounds come to."""
    folder = tmp_path_factory.mktemp("whole")
    return outcome(run(strategy(FEDADMM, folder), folder, 8))


@pytest.mark.parametrize("fails", [1, 4, 5, 8])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.sampled("4")
def test_a_round_whose_callback_raises_has_its_checkpoint_and_is_seen_once_by_all(
    fails: int, place: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever ``every`` is. The run goes on, to the same end, with the next round."""
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
    assert outcome(found) == whole
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


# ---- the command line ---------------------------------------------------------------------------


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


def test_a_run_of_a_comparison_that_was_interrupted_continues_by_the_same_command(
    tmp_path: Path,
) -> None:
    def config(folder: str, **others: Any) -> RunConfig:
        keys = {"algorithm": "fedavg", "clients": 5, "rounds": 6, "checkpoint-every": 2, "steps": 1}
        return RunConfig.parse(keys | {"output": str(tmp_path / folder)} | others)

    run_one(config("whole"))
    history = tmp_path / "parts/history.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_in_process(config("parts"), [stop_at(5)])
    lines = history.read_text()
    with pytest.raises(ValueError, match=r"holds checkpoints of rounds .*: continue with resume"):
        run_in_process(config("parts"))
    assert history.read_text() == lines
    run_one(config("parts"))
    assert lines_of(history) == lines_of(tmp_path / "whole/history.jsonl")
    summary = json.loads((tmp_path / "parts/summary.json").read_text())
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    assert summary["seconds"] >= sum(row["seconds"] for row in rows)
    other = config("parts", lr=0.01)
    with FolderLock(tmp_path / "parts").held("one"), pytest.raises(ValueError, match="in use by"):
        run_one(other)
    assert [*(tmp_path / "parts/checkpoints").iterdir()]
    run_one(other)  # which takes the place of the former
    assert lines_of(history) != lines_of(tmp_path / "whole/history.jsonl")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"resume": True}, "resume needs checkpoint-every > 0, and output"),
        ({"checkpoint-every": 2}, "checkpoint-every needs state-dir: clients of fedadmm keep"),
        ({"checkpoint-every": -1}, "checkpoint-every must be an integer >= 0, got -1"),
        ({"checkpoint-keep": 0}, "checkpoint-keep must be an integer >= 1, got 0"),
    ],
)
def test_run_configs_that_could_not_resume_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.parse(keys)


PACES: list[Any] = [
    {"clock": Clock(step=1.0, spread=0.5), "pace": Deadline(over_select=1.5)},
    {"clock": Clock(step=1.0, spread=0.5), "pace": Buffered(size=2)},
    {"pace": Deadline(order="arrival", seconds=60.0)},
    {"pace": Buffered(order="arrival", size=2)},
]
ENDING = {"fedadmm", "fedpd", "fedbcd-async"}
"""A round of Flower's messages, one of several, and one that does not wait for all."""
STOPPED = [
    *(pytest.param(row, {}, id=row.name) for row in TABLE if row.name in ENDING),
    *(pytest.param(FEDADMM, pace, id=str(pace["pace"])) for pace in PACES),
]


@pytest.mark.parametrize(("row", "pace"), STOPPED)
def test_should_stop_makes_its_round_the_last(
    row: Row, pace: dict[str, Any], tmp_path: Path
) -> None:
    """The result is that of this round in a longer run; a resumed run stays ended."""
    models: list[list[float]] = []
    rounds: list[tuple[int, int]] = []

    def stop(number: int, result: Any) -> bool:
        rounds.append((number, max(result.train_metrics_clientapp)))
        return number == 3

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    note = [lambda info: models.append(to_vector(info.arrays).tolist())]
    run(strategy(row, whole, callbacks=note, **pace), whole, 8, resume=False)
    ended = run(strategy(row, parts, **pace), parts, 8, resume=False, should_stop=stop)
    assert rounds == [(1, 1), (2, 2), (3, 3)]
    assert to_vector(ended.arrays).tolist() == models[2]
    assert str(ended).startswith("Ended by should_stop after round 3\n")
    again = run(strategy(row, parts, **pace), parts, 8)
    assert (outcome(again), again.ended_by) == (outcome(ended), "should_stop")
