"""Interrupted and failing runs: what they leave agrees, and the first cause is what is told.

Mutants that these tests caught: Ctrl-C let through between the callbacks that write results, or in
one of them; kept back for good; SIGTERM let through; an error while saving told in place of the one
that ended the run; an earlier run's history left beside a run that failed in its first test.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from clients import Problem
from fl_strategies import ClientHistory, History, RoundInfo
from simulations import experiment, results
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.figures import read_history
from simulations.interrupts import STOPS, undivided
from simulations.lab.compare import main
from simulations.results import Progress, Summary, Together, model_sha256

TINY: dict[str, Any] = {"clients": 2, "rounds": 2, "steps": 1, "fraction": 0.5}
WRITERS = ("Together.", "_Lines.", "History.", "ClientHistory.", "Progress.")


class Stopped(BaseException):
    """What the handler of a signal raises here."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Have both signals raise ``Stopped``."""

    def handle(signum: int, _frame: FrameType | None) -> None:
        raise Stopped(signum)

    before = {number: signal.signal(number, handle) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class AtLine:
    """A tracer that sends SIGINT at the n-th line of what writes the results of round 2."""

    def __init__(self, n: int) -> None:
        self.left, self.rounds = n, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_qualname
        self.rounds += name == "Together.__call__"
        return self.line if self.rounds == 2 and name.startswith(WRITERS) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.line


def stopped_at(line: int, work: Callable[[], object]) -> bool:
    """Return whether there are so many lines; the work is stopped at this one."""
    before = sys.gettrace()
    sys.settrace(AtLine(line))
    try:
        work()
    except Stopped:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
def test_wherever_an_interrupt_lands_history_summary_and_model_are_of_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every line that writes results; a whole run is stopped at every tenth."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    config = RunConfig.parse(TINY | {"output": str(tmp_path)})
    infos: list[RoundInfo] = []
    run_in_process(config, [infos.append])
    whole = read_history(tmp_path / "history.jsonl")

    def write() -> None:
        progress = Progress(config, tmp_path)
        history, clients = (tmp_path / f"{name}.jsonl" for name in ("history", "clients"))
        together = Together(History(history), ClientHistory(clients), progress)
        try:
            for info in infos:
                together(info)
        finally:
            progress.save(finished=False)

    def check() -> int:
        found = Summary(**json.loads((tmp_path / "summary.json").read_text()))
        rows = read_history(tmp_path / "history.jsonl")
        accuracies = [row["test-accuracy"] for row in whole[: found.rounds]]
        assert [row["test-accuracy"] for row in rows] == accuracies
        assert found.final_accuracy == accuracies[-1]
        assert found.model_sha256 == model_sha256(infos[found.rounds - 1].arrays)
        clients = read_history(tmp_path / "clients.jsonl")
        assert {row["round"] for row in clients} == {row["round"] for row in rows}
        return found.rounds

    seen: list[int] = []
    while stopped_at(len(seen) + 1, write):
        seen.append(check())
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    assert len(seen) > 20
    for line in range(1, len(seen), 10):
        assert stopped_at(line, lambda: run_in_process(config))
        assert check() == seen[line - 1]


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_takes_effect_once_when_undivided_work_has_ended(number: int) -> None:
    done = []

    def work() -> None:
        with undivided():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append("inside")
        done.append("after")

    with pytest.raises(Stopped, match=str(int(number))):
        work()
    assert done == ["inside"]
    with pytest.raises(Stopped):  # and no longer
        signal.raise_signal(number)


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with undivided():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_threads_which_no_signal_reaches_may_do_undivided_work() -> None:
    done = []

    def work() -> None:
        with undivided():
            done.append(threading.current_thread())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [thread]


# ---- the first cause --------------------------------------------------------------------------


class Broken(RuntimeError):
    """An error of the library's own kind, such as CUDA's when memory is short."""


def broken(*_: Any, **__: Any) -> None:
    raise Broken("out of GPU memory")


@pytest.mark.parametrize(
    ("stage", "saves"),
    [("the first test", True), ("a later test", True), ("a callback", False)],
)
@pytest.mark.sampled("a later test")
def test_what_ended_a_run_is_what_is_told_of_it(
    stage: str, saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Not what the lack of its results led to, even where an earlier run left some."""
    words = [
        "--algorithms",
        "fedavg",
        "--clients",
        "2",
        "--rounds",
        "2",
        "--steps",
        "1",
        "--fraction",
        "1",
    ]
    words += ["--output", str(tmp_path)]
    main(words)
    capsys.readouterr()
    evaluate, tests = Problem.evaluate, []

    def test(problem: Problem) -> tuple[float, float]:
        tests.append(problem)
        if len(tests) == {"the first test": 1, "a later test": 2}.get(stage, 0):
            broken()
        return evaluate(problem)

    monkeypatch.setattr(Problem, "evaluate", test)
    if stage == "a callback":
        monkeypatch.setattr(experiment.ClientHistory, "__call__", broken)
    if not saves:
        monkeypatch.setattr(results.Progress, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(SystemExit) as stop:
        main([*words, "--lr", "0.2"])
    assert stop.value.code == 1
    out, err = capsys.readouterr()
    (told,) = err.splitlines()
    assert told.endswith("error: 1 of 1 runs failed: fedavg (Broken: out of GPU memory)")
    assert "fedavg failed: Broken: out of GPU memory" in out
    assert "history.jsonl" not in out + err
    if saves:
        summary = json.loads((tmp_path / "fedavg/summary.json").read_text())
        history = tmp_path / "fedavg/history.jsonl"
        assert not summary["finished"]
        assert history.exists() == (stage == "a callback")  # the earlier run's is gone
    tests.clear()
    with pytest.raises(RuntimeError) as error:
        main([*words, "--lr", "0.2", "--verbose"])
    notes = getattr(error.value.__cause__, "__notes__", [])
    assert isinstance(error.value.__cause__, Broken)
    assert notes == ([] if saves else ["nor could its results be saved: ZeroDivisionError: "
                                       "division by zero"])  # fmt: skip
