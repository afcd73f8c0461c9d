"""A run that is killed and resumed ends as if nothing had happened, for every algorithm."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from conftest import SAMPLE
from federations import lose
from flwr.app import ArrayRecord, MetricRecord
from laws import START, TABLE, Row, local
from problems import to_record
from resumed import FEDADMM, ROUNDS, federation, interrupted, outcome, run, strategy

from fl_strategies import Checkpoints, FedAvg, RoundInfo, as_legacy
from fl_strategies.parts import TopK

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
    ("row", "times"),
    [
        (FEDADMM, 2),
        *(pytest.param(row, 20, marks=pytest.mark.slow) for row in TABLE if row.name in SAMPLE),
    ],
    ids=str,
)
def test_a_run_that_is_killed_many_times_ends_as_if_never_killed(
    row: Row, times: int, tmp_path: Path
) -> None:
    """The kills come at random calls, every other one in the midst of writing a file."""
    rounds = 8 if times == 2 else ROUNDS
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


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    losses = iter([9.0, 5.0, 1.0, 4.0, math.nan, 3.0, 2.0, 8.0])

    def measured(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"test-loss": next(losses)})

    kept_ones = {"every": 1, "keep": 2, "best": "test-loss", "smaller": True}
    one = strategy(FEDADMM, tmp_path, checkpoints=kept_ones)
    one.start(federation(tmp_path), to_record(START), 7, evaluate_fn=measured)
    assert Checkpoints(tmp_path / "checkpoints").rounds() == [2, 6, 7]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()} - {"run.lock", "run.json"}
    assert names == {f"round-0000000{number}.safetensors" for number in (2, 6, 7)}


def test_the_last_round_has_a_checkpoint_whatever_every_is(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path, checkpoints={"every": 4}), tmp_path, 6)
    assert Checkpoints(tmp_path / "checkpoints").rounds() == [4, 6]


def test_a_client_keeps_what_the_checkpoints_would_go_back_to_and_no_more(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path, fraction_train=1.0, checkpoints={"every": 3}), tmp_path, 11)
    # 9 and 6 for the checkpoints, 10 as the one that stood in round 11, and that round's
    names = sorted(path.name for path in (tmp_path / "states/0").iterdir())
    assert names == [f"{number}.safetensors" for number in (10, 11, 6, 9)]


def test_replies_lost_before_and_after_a_checkpoint_are_undone(tmp_path: Path) -> None:
    """Client 1's replies of rounds 4, 5 and 7 are lost, and the run is cut off in round 8."""
    fault = lose((4, 1), (5, 1), (7, 1))
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
    whole = run(strategy(FEDADMM, tmp_path / "whole"), tmp_path / "whole", 6)
    interrupted(strategy(FEDADMM, tmp_path / "parts"), tmp_path / "parts", 5)
    newest = Checkpoints(tmp_path / "parts" / "checkpoints").path(4)
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    resumed = run(strategy(FEDADMM, tmp_path / "parts"), tmp_path / "parts", 6)
    assert "round-00000004.safetensors is damaged: its checksum differs; it is not" in caplog.text
    assert outcome(resumed) == outcome(whole)


@pytest.fixture(scope="module")
def four_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of four rounds, which no test may change."""
    folder = tmp_path_factory.mktemp("four")
    run(strategy(FEDADMM, folder), folder, 4)
    return folder


def test_a_run_does_not_begin_anew_where_every_checkpoint_is_damaged(
    four_rounds: Path, tmp_path: Path
) -> None:
    shutil.copytree(four_rounds, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "checkpoints").glob("round-*"):
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged: \[2, 4\]"):
        run(strategy(FEDADMM, tmp_path), tmp_path, 6)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"seed": 4}, r"cannot be resumed with other settings: seed was 3, is 4$"),
        ({"buffers": ["tail"]}, r"settings: model was .*, is "),
        ({"rho": 1.0}, r"settings: rho was 0\.5, is 1$"),
        ({"local": local(lr=0.01)}, r"settings: local 'lr' was .*, is 0\.01$"),
        ({"compression": TopK()}, r"settings: compression was None, is TopK\("),
    ],
)
def test_another_runs_checkpoints_are_refused(
    others: dict[str, Any], said: str, four_rounds: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        run(strategy(FEDADMM, four_rounds, **others), four_rounds, 6)


def test_another_algorithms_checkpoints_are_refused(four_rounds: Path) -> None:
    with pytest.raises(ValueError, match="algorithm was fedadmm, is fedavg; "):
        run(FedAvg(seed=3, checkpoints=Checkpoints(four_rounds / "checkpoints")), four_rounds, 6)


def test_a_new_run_does_not_write_among_the_checkpoints_of_another(four_rounds: Path) -> None:
    with pytest.raises(ValueError, match=r"of rounds \[2, 4\]: continue with resume"):
        run(strategy(FEDADMM, four_rounds), four_rounds, 4, resume=False)


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
