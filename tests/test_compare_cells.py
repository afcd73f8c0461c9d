"""The runs of a comparison: what is not run twice, what fails, and what is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import COMPARED, compare, read
from trials import ROOT

from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.lab import reproduce, runs
from simulations.lab.compare import main
from simulations.lab.runs import finished, run_all
from simulations.lab.studies import Rule, Setting


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the runs that ``compare`` really starts."""
    names: list[str] = []

    def spy(config: RunConfig, **options: Any) -> None:
        names.append(Path(config.output).name)
        run_in_process(config, **options)

    monkeypatch.setattr(runs, "run_in_process", spy)
    return names


@pytest.mark.slow
def test_a_finished_cell_is_not_run_again_and_a_changed_or_interrupted_one_is(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--algorithms fedavg,fedprox"
    first = compare(tmp_path, line)
    assert started == ["fedavg", "fedprox"]
    assert compare(tmp_path, line) == first
    assert started == ["fedavg", "fedprox"]
    assert "2 of 2 runs were finished before" in capsys.readouterr().out

    compare(tmp_path, f"{line} --param mu=0.5")
    assert started[2:] == ["fedprox"]
    out = capsys.readouterr().out
    assert "fedprox is run anew because its settings have changed: mu was " in out

    summary = tmp_path / "fedavg/summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"finished": False}))
    (tmp_path / "fedprox/summary.json").write_text("{")
    again = compare(tmp_path, line)
    assert started[3:] == ["fedavg", "fedprox"]
    assert [s["model_sha256"] for s in again] == [s["model_sha256"] for s in first]


def test_a_run_that_starts_anew_is_no_longer_finished(tmp_path: Path) -> None:
    config = RunConfig.parse({"clients": 5, "rounds": 1, "steps": 1, "output": str(tmp_path)})
    run_in_process(config)
    assert finished(config)

    def interrupt(info: Any) -> None:
        assert not finished(replace(config, lr=0.3))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(replace(config, lr=0.3), [interrupt])
    assert not finished(replace(config, lr=0.3))
    assert not finished(config)


def test_cells_of_an_earlier_version_count_where_their_settings_come_to_the_same(
    tmp_path: Path,
) -> None:
    keys = {"algorithm": "fedadmm", "clients": 5, "rounds": 1, "epochs": 1, "random-epochs": "true"}
    config = RunConfig.parse(keys | {"params": "rho=0.1 eta=1.0", "output": str(tmp_path)})
    run_in_process(config)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    del stored["validation"], stored["box"]
    path.write_text(
        json.dumps(stored | {"random_epochs": True, "params": "rho=0.1", "output": "x"})
    )
    assert finished(config)
    assert not finished(replace(config, validation=0.1))
    assert not finished(replace(config, params="rho=0.1 eta=0.5"))
    assert not finished(replace(config, random_epochs="false"))
    path.write_text(json.dumps(stored | {"a_key_of_a_later_version": 1}))
    assert not finished(config)


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_jobs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = "--algorithms fedadmm,fedbc --seeds 1,2"
    by_one = compare(tmp_path / "1", line)
    by_two = compare(tmp_path / "2", f"{line} --jobs 2")
    for one, two in zip(by_one, by_two, strict=True):
        assert one | {"seconds": 0} == two | {"seconds": 0}
    out = capfd.readouterr().out
    assert "fedbc-seed2 round 2/2" in out
    assert "3 of 4 runs done, about " in out


def boom() -> None:
    raise OSError("no space left")


def test_a_cell_that_fails_leaves_the_others_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [
        RunConfig.parse({"clients": 5, "rounds": 1, "output": str(tmp_path / name)})
        for name in ("bad", "good")
    ]
    ran: list[str] = []
    with pytest.raises(
        RuntimeError, match=r"1 of 2 runs failed: bad \(OSError: no space left\)"
    ) as caught:
        run_all({configs[0]: boom, configs[1]: lambda: ran.append("good")})
    assert isinstance(caught.value.__cause__, OSError)
    assert ran == ["good"]
    assert "bad failed: OSError: no space left" in capsys.readouterr().out


def test_a_comparison_whose_runs_all_fail_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "run_in_process", lambda config, **_: boom())
    with pytest.raises(SystemExit) as stop:
        compare(tmp_path, "--algorithms fedavg --seeds 1,2")
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: 2 of 2 runs failed: fedavg-seed1 (OSError: no space left), fed" in line
    with pytest.raises(RuntimeError, match="2 of 2 runs failed") as error:
        compare(tmp_path, "--algorithms fedavg --seeds 1,2 --verbose")
    assert isinstance(error.value.__cause__, OSError)
    assert (tmp_path / "table.md").read_text().startswith("No run has finished.")
    assert json.loads((tmp_path / "summary.json").read_text()) == []


def test_a_trial_that_fails_leaves_other_rules_their_whole_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: RunConfig, **options: Any) -> None:
        if "/fedprox" in config.output:
            boom()
        run_in_process(config, **options)

    monkeypatch.setattr(runs, "run_in_process", run)
    with pytest.raises(SystemExit):
        compare(tmp_path, "--algorithms fedprox,fedavg --tune lr=0.1,0.3 --trials 3")
    assert "2 of 4 runs failed: fedprox-lr0.1" in capsys.readouterr().err
    assert len(list((tmp_path / "tuning").glob("fedavg-*"))) == 3
    (summary,) = json.loads((tmp_path / "summary.json").read_text())
    assert summary["algorithm"] == "fedavg"


@pytest.mark.slow
def test_a_rate_that_diverges_ends_its_run_alone_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first round is usable; afterwards no reply is finite."""
    common = "--algorithms fedavg --model logistic --batch-size 0 --rounds 9"
    compare(tmp_path, f"{common} --tune lr=0.1,1e36")
    said = capsys.readouterr().out
    assert re.search(r"fedavg-lr1e\+36 ended early: no reply of 3 rounds in a row was usable", said)
    (summary,) = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["lr"], summary["rounds"]) == (0.1, 9)
    compare(tmp_path / "alone", f"{common} --lr 1e36")
    assert "fedavg ended early: no reply of 3 rounds" in (tmp_path / "alone/table.md").read_text()


def test_ctrl_c_in_one_process_keeps_what_is_finished_in_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def until(config: RunConfig, **options: Any) -> None:
        if config.algorithm == "fedprox":
            raise KeyboardInterrupt
        run_in_process(config, **options)

    monkeypatch.setattr(runs, "run_in_process", until)
    with pytest.raises(SystemExit) as stop:
        compare(tmp_path, "--algorithms fedavg,fedprox")
    assert stop.value.code == 130
    assert f"interrupted; {tmp_path} has what was computed" in capsys.readouterr().out
    (summary,) = json.loads((tmp_path / "summary.json").read_text())
    assert summary["algorithm"] == "fedavg"
    assert len(read(tmp_path / "table.csv")) == 1


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_each_saves_what_it_had(tmp_path: Path) -> None:
    line = f"{COMPARED} --rounds 1000000 --algorithms fedavg --seeds 1,2,3 --jobs 2"
    program = (
        "import signal, sys; from simulations.lab.compare import main;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # it may start out ignored
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, *line.split(), "--output", str(tmp_path)]
    process = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    try:
        running = [tmp_path / f"fedavg-seed{seed}" for seed in (1, 2)]
        wait_for(lambda: all(lines(run / "history.jsonl") >= 2 for run in running), 300)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 130
        assert "interrupted" in out
        for run in running:
            summary = json.loads((run / "summary.json").read_text())
            assert not summary["finished"]
            assert summary["rounds"] == lines(run / "history.jsonl") >= 2
        assert not (tmp_path / "fedavg-seed3/history.jsonl").exists()
        wait_for(lambda: not group_lives(process.pid), 30)
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_study_continues_from_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"dataset": "digits", "clients": 5, "rounds": 2, "epochs": 1, "fraction": 1.0}
    rules = {f"lr{lr}": Rule({"algorithm": "fedavg", "lr": lr}) for lr in (0.1, 0.2)}
    setting = Setting("one", "One", "final_accuracy", "lr0.1", rules, {}, config, seeds=(1, 2))
    other = setting._replace(name="two", where="Two", config={**config, "rounds": 1})
    monkeypatch.setattr(reproduce, "load", lambda study: [setting, other])
    output = ["fedpd-fig2", "--output", str(tmp_path)]
    command = [*output, "--only", "one"]
    reproduce.main([*command, "--rules", "lr0.1"])
    stamp = (tmp_path / "one/lr0.1-seed1/summary.json").stat().st_mtime_ns
    assert not (tmp_path / "one/lr0.2-seed1").exists()
    capsys.readouterr()
    reproduce.main(command)
    out = capsys.readouterr().out
    assert "2 of 4 runs were finished before" in out
    assert "lr0.2-seed2 round 2/2" in out
    assert (tmp_path / "one/lr0.1-seed1/summary.json").stat().st_mtime_ns == stamp
    board = (tmp_path / "board.md").read_text()
    assert out.rstrip().endswith(board.rstrip())
    assert "### One" in board
    assert "### Two" not in board  # neither chosen nor run
    reproduce.main([*output, "--only", "two"])
    board = (tmp_path / "board.md").read_text()
    assert "### One" in board
    assert "### Two" in board


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seeds 1,1", "each number once, got '1,1'"),
        ("--seeds 1,x", "numbers with commas, got '1,x'"),
        ("--seeds 1,-2", "seed must be an integer >= 0 and <= 9.22337e+18, got -2"),
        ("--seed 1 --seeds 2,3", "either --seed or --seeds"),
        ("--lr 0.1 --tune lr=0.1,1", "either a value of lr or --tune lr"),
        ("--tune lr=0.1,0.10", "each value once, got 'lr=0.1,0.10'"),
        ("--tune lr=0.1", "lr needs at least two values, got 'lr=0.1'"),
        ("--tune lr=0,0.1", "lr must be > 0, got 0"),
        ("--tune lr=nan,0.1", "lr must be "),
        ("--tune lr=0.1,1 --tune-share 1", "tune-share must be > 0 and < 1, got 1"),
        ("--tune lr=0.1,1 --validation 0.1", "tune holds out training samples itself"),
        ("--validation 1", "validation must be >= 0 and < 1, got 1"),
        ("--local-test 1.2", "local-test must be >= 0 and < 1, got 1.2"),
        ("--tune-share 0.3", "--tune-share is for --tune"),
        ("--trials 3", "--trials is for --tune"),
        ("--tuner optuna", "--tuner is for --tune"),
        ("--trials 0 --tune lr=0.1,1", "--trials must be >= 1, got 0"),
        ("--tune batch-size=1,2.5", "batch_size must be of type int, got 2.5"),
        ("--tune weights=uniform,none", "weights must be one of "),
        ("--tune rho=0.1,1", "tune: no algorithm here has the hyperparameter 'rho'"),
        ("--tune momentun=0,0.5", "'momentun' (did you mean 'momentum'?)"),
        ("--tune fedavgg.lr=0.1,1", "no algorithm 'fedavgg' (did you mean 'fedavg'?) here"),
        ("--tune lr", "an option is given as name=value, got 'lr='"),
        ("--param weights=uniform --tune weights=uniform,samples", "either a value of weights or"),
        ("--workers 2 --jobs 2", "either --jobs, which does several runs at a time, or --workers"),
        ("--tune lr=-1,1", "lr must be > 0, got -1"),
        ("--algorithms fedavg,", "--algorithms has an empty name, got 'fedavg,'"),
        ("--param rho", "an option is given as name=value, got 'rho'"),
        ("--jobs 0", "--jobs must be >= 1, got 0"),
        ("--jobs 2 --engine ray", "--jobs is for --engine in-process; Ray has --workers"),
        ("--output /proc/results", "the results folder /proc/results/fedavg cannot be written"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: str, message: str, tmp_path: Path, started: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line = [*COMPARED.split(), "--output", str(tmp_path), "--algorithms", "fedavg"]
    with pytest.raises(SystemExit) as stop:
        main([*line, *arguments.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert started == []


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_workers_train_the_same_models_also_at_once(tmp_path: Path) -> None:
    line = "--algorithms fedavg --engine in-process --fraction 1.0 --quiet"
    (alone,) = compare(tmp_path / "1", f"{line} --workers 1")
    (shared,) = compare(tmp_path / "2", f"{line} --workers 2")
    (stacked,) = compare(tmp_path / "3", f"{line} --workers 2 --stack 2")
    assert shared["model_sha256"] == alone["model_sha256"]
    assert stacked["final_accuracy"] == pytest.approx(alone["final_accuracy"], abs=0.02)


def test_fewer_than_one_job_is_refused_by_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["fedpd-fig2", "--output", str(tmp_path), "--jobs", "0"])
    assert "jobs must be >= 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_each_seed_keeps_its_clients_states_apart(tmp_path: Path) -> None:
    states = tmp_path / "states"
    compare(tmp_path / "out", f"--algorithms fedadmm --seeds 1,2 --state-dir {states}")
    assert {path.name for path in states.iterdir()} == {"fedadmm-seed1", "fedadmm-seed2"}


@pytest.mark.slow
def test_compare_refuses_bad_input_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simulations.lab.compare", "--algorithms", "fedavg,fedsvrg"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "unknown algorithms 'fedsvrg'; known: ['a-fedpd'" in done.stderr
    assert "Traceback" not in done.stderr
