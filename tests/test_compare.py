"""Comparisons over seeds and learning rates: their tables, and what is not run twice.

Mutants that these tests caught. Tables: bytes of one direction; seconds not summed; Flower's rounds
for the algorithm's; a target that must be exceeded; the first evaluation for the last; the
population's deviation; all seeds said to have reached the target. Tuning: a fourth of the rounds,
or the fifth rounded down; the larger of equals; the worst score; ends of the grid unnamed or mixed
up; tuned on the last seed, or on test data; validation rows trained on, or not tested on. Cells:
always finished; settings ignored; unfinished ones counted; no neutral values of new keys; no
defaults of knobs; flags told apart from words; the folder as a setting; a stale summary left beside
new settings; children not ended on Ctrl-C. Figures: no band; x of one seed; panels that repeat or
say nothing. Compare: one seed for all.
"""

from __future__ import annotations

import csv
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

import numpy as np
import pytest

from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.figures import draw_curves, panels_by_line
from simulations.lab import compare as compare_module
from simulations.lab import reproduce, studies
from simulations.lab.cells import finished, run_cells
from simulations.lab.compare import main
from simulations.tables import algorithm_row, curve, markdown, run_figures, score, tuned
from simulations.worker import dataset, parts, problem, validation_rows

ROOT = Path(__file__).parents[1]
SMALL = "--dataset digits --clients 5 --rounds 2 --epochs 1"
COUNTED = ("final_accuracy", "best_accuracy", "rounds_to_target", "bytes_up", "model_sha256")


def compare(folder: Path, line: str) -> list[dict[str, Any]]:
    return main([*SMALL.split(), *line.split(), "--output", str(folder)])


def made(folder: Path, accuracies: list[float], **others: Any) -> RunConfig:
    """Write a history by hand, of one exchange a round unless ``others`` has columns for more."""
    config = RunConfig.parse({"algorithm": "fedavg", "target": 0.5, "output": str(folder)})
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for n, accuracy in enumerate(accuracies):
        row: dict[str, Any] = {"round": n + 1, "bytes-up": 3 + n, "bytes-down": 10, "seconds": 0.5}
        row |= {"test-accuracy": accuracy, "test-loss": 1.0 - accuracy}
        row |= {name: values[n] for name, values in others.items()}
        lines.append(json.dumps(row) + "\n")
    (folder / "history.jsonl").write_text("".join(lines))
    return config


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---- tables -----------------------------------------------------------------------------------


def test_a_target_is_counted_in_rounds_exchanges_bytes_seconds_and_virtual_time(
    tmp_path: Path,
) -> None:
    columns = {
        "algorithm-round": [2, 3, 7, 8],
        "exchanges": [1, 4, 5, 6],
        "virtual-seconds": [1.5, 4.0, 6.0, 9.0],
    }
    config = made(tmp_path, [0.1, 0.4, 0.6, 0.7], **columns)
    found = run_figures(config, {"final_accuracy": 0.7})
    assert found["rounds_to_target"] == 7
    assert found["exchanges_to_target"] == 5
    assert found["bytes_to_target"] == (3 + 10) + (4 + 10) + (5 + 10)
    assert found["seconds_to_target"] == 1.5
    assert found["virtual_seconds_to_target"] == 6.0
    assert found["virtual_seconds"] == 9.0
    unreached = run_figures(replace(config, target=0.71), {})
    assert all(value is None for name, value in unreached.items() if name.endswith("_to_target"))


def test_a_row_has_mean_and_deviation_over_seeds_and_says_how_many_reached_the_target(
    tmp_path: Path,
) -> None:
    runs = [[0.2, 0.6, 0.9], [0.55, 0.1, 0.3], [0.1, 0.2, 0.4]]
    configs = [made(tmp_path / str(n), run) for n, run in enumerate(runs)]
    summaries = [{"final_accuracy": run[-1], "best_accuracy": max(run)} for run in runs]
    row = algorithm_row(configs, summaries)
    assert row["final_accuracy"] == pytest.approx(np.mean([0.9, 0.3, 0.4]))
    assert row["final_accuracy_deviation"] == pytest.approx(np.std([0.9, 0.3, 0.4], ddof=1))
    assert (row["rounds_to_target"], row["reached"]) == (1.5, 2)  # of round 2 and round 1
    head, _, line = markdown([row]).splitlines()
    shown = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert shown["rounds to 50 %"] == "1.5 ± 0.7071 (2 of 3)"
    assert shown["final accuracy"] == "53.33 ± 32.15 %"
    assert "virtual s" not in shown


def test_a_row_of_one_seed_has_no_deviation(tmp_path: Path) -> None:
    row = algorithm_row([made(tmp_path, [0.25, 0.5])], [{"final_accuracy": 0.5}])
    assert (row["final_accuracy"], row["rounds_to_target"], row["reached"]) == (0.5, 2, 1)
    assert all(row[name] is None for name in row if name.endswith("_deviation"))
    assert "| 50.00 % |" in markdown([row])


def test_clients_figures_are_those_of_the_last_evaluation(tmp_path: Path) -> None:
    clients = {"eval-accuracy": 0.5, "eval-accuracy-mean": 0.45, "eval-accuracy-variance": 0.02,
               "eval-accuracy-min": 0.1, "eval-accuracy-smallest": 0.2,
               "eval-accuracy-largest": 0.7, "own-accuracy-mean": 0.9}  # fmt: skip
    config = made(tmp_path, [0.3, 0.4])
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    rows = [lines[0] | dict.fromkeys(clients, 0.0), lines[1] | clients]
    rows.append(lines[1] | {"round": 3})  # a round without evaluation
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run_figures(config, {})
    assert found["client_accuracy"] == 0.45
    assert found["own_accuracy"] == 0.9
    assert found["accuracy_variance"] == 0.02
    assert [found[f"accuracy_{who}"] for who in ("worst", "smallest", "largest")] == [0.1, 0.2, 0.7]


def test_figures_have_a_panel_for_each_column_that_says_something(tmp_path: Path) -> None:
    """And a mean over seeds, whose reports need not be of the same rounds nor as many."""
    seeds = {1: [0.2, 0.4, 0.9], 2: [0.4, 0.5]}
    rows = [
        row | {"seed": seed}
        for seed, run in seeds.items()
        for row in curve(made(tmp_path / str(seed), run, **{"algorithm-round": [seed, 5, 6]}))
    ]
    figure = draw_curves(rows, tmp_path / "curves.png")
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == [
        "round",
        "round",
        "communication round",
        "download and upload (MB)",
        "computing time (s)",
    ]
    line = figure.axes[0].lines[0]
    np.testing.assert_allclose(line.get_xdata(), [1.5, 5])
    np.testing.assert_allclose(line.get_ydata(), [30, 45])
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(30 - np.std([20, 40], ddof=1))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "curves.svg").read_text()
    assert "<svg" in text
    assert figure.get_supxlabel() == "Lines: means over 2 seeds; bands: ± one standard deviation."
    low, high = figure.axes[0].get_ylim()
    assert low < 30 < 45 < high
    widths = [axes.get_position().width for axes in figure.axes]
    assert sum(widths[:3]) == pytest.approx(sum(widths[3:]), rel=0.2)  # no place is empty


@pytest.mark.parametrize("count", range(8))
def test_panels_fill_their_lines(count: int) -> None:
    lines = panels_by_line(count)
    assert sum(lines) == count
    assert all(1 <= n <= 3 and max(lines) - n <= 1 for n in lines)


# ---- tuning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "chosen", "remark"),
    [
        ({1.0: 0.5, 0.01: 0.2, 0.1: 0.7}, 0.1, ""),
        ({1.0: 0.5, 0.01: 0.2, 0.1: 0.5, 3.0: 0.1}, 0.1, ""),
        (
            {1.0: 0.5, 0.01: 0.9, 0.1: 0.7},
            0.01,
            "the smallest of the grid: one beyond may be better",
        ),
        ({1.0: 0.8, 0.01: 0.2, 0.1: 0.7}, 1.0, "the largest of the grid: one beyond may be better"),
        ({1.0: 0.5, 0.01: 0.5}, 0.01, "all rates score alike"),
    ],
)
def test_the_best_rate_is_chosen_the_smaller_of_equals_and_ends_of_the_grid_are_named(
    scores: dict[float, float], chosen: float, remark: str
) -> None:
    rows = tuned("fedavg", scores)
    assert [row["lr"] for row in rows] == sorted(scores)
    assert [(row["lr"], row["remark"]) for row in rows if row["chosen"]] == [(chosen, remark)]
    assert not any(row["remark"] for row in rows if not row["chosen"])


def test_a_score_is_the_mean_over_the_last_fifth_of_the_rounds(tmp_path: Path) -> None:
    accuracies = [0.1 * n**0.5 for n in range(13)]
    assert score(made(tmp_path, accuracies)) == pytest.approx(np.mean(accuracies[-3:]))
    assert score(made(tmp_path, accuracies[:2])) == pytest.approx(accuracies[1])


@pytest.mark.parametrize("pooled", [False, True])
def test_a_run_on_validation_rows_trains_on_the_others_and_is_tested_on_no_test_data(
    pooled: bool,
) -> None:
    config = RunConfig.parse({"clients": 8, "local-test": 0.2, "pooled": pooled})
    plain, split = parts(config), parts(held := replace(config, validation=0.3))
    held_out = validation_rows(held)
    everything = np.concatenate([held_out, *(rows for pair in split for rows in pair)])
    whole = np.concatenate([rows for pair in plain for rows in pair])
    assert np.array_equal(np.sort(everything), np.sort(whole))
    assert len(held_out) == pytest.approx(0.3 * len(whole), abs=8)
    ((_, targets),) = problem(held, "test").batches(np.random.default_rng(), 0)
    np.testing.assert_array_equal(targets, dataset(held).y[held_out])


@pytest.mark.slow
def test_validation_that_holds_out_nothing_is_refused() -> None:
    config = RunConfig.parse({"clients": 1437, "partition": "iid"})
    with pytest.raises(
        ValueError, match=r"validation=0\.3 holds out nothing: clients have too few"
    ):
        run_in_process(replace(config, validation=0.3))


@pytest.mark.slow
def test_seeds_and_rates_are_those_of_single_runs_and_all_tables_agree(tmp_path: Path) -> None:
    line = "--algorithms fedavg,fedpd --param fedpd.p=0.5 --rounds 3"
    evaluated = "--fraction-evaluate 1 --local-test 0.2"
    several = compare(tmp_path / "all", f"{line} {evaluated} --seeds 3,2 --tune-lr 0.2,0.005")
    tuning = json.loads((tmp_path / "all/tuning.json").read_text())
    chosen = {row["algorithm"]: row["lr"] for row in tuning if row["chosen"]}
    assert [(s["algorithm"], s["seed"]) for s in several] == [
        ("fedavg", 3), ("fedavg", 2), ("fedpd", 3), ("fedpd", 2)]  # fmt: skip
    assert [s["lr"] for s in several] == [chosen[s["algorithm"]] for s in several]
    for trial in tuning:
        folder = tmp_path / f"all/tuning/{trial['algorithm']}-lr{trial['lr']}"
        config = json.loads((folder / "config.json").read_text())
        assert (config["seed"], config["validation"]) == (3, 0.2)
        assert trial["score"] == score(RunConfig(**config))
    one = compare(
        tmp_path / "one",
        f"--algorithms fedavg --rounds 3 {evaluated} --seed 2 --lr {chosen['fedavg']}",
    )
    assert [one[0][name] for name in COUNTED] == [several[1][name] for name in COUNTED]
    table = json.loads((tmp_path / "all/table.json").read_text())
    for row, (first, second) in zip(table, (several[:2], several[2:]), strict=True):
        both = [first["final_accuracy"], second["final_accuracy"]]
        assert row["final_accuracy"] == pytest.approx(np.mean(both))
    for csv_row, row in zip(read(tmp_path / "all/table.csv"), table, strict=True):
        assert csv_row == {name: "" if v is None else str(v) for name, v in row.items()}
    text = (tmp_path / "all/table.md").read_text()
    assert "Mean ± standard deviation over seeds 3, 2." in text
    assert "tuned per algorithm on seed 3 alone: 20 % of each client's training samples" in text
    runs = {(row["algorithm"], row["seed"]) for row in read(tmp_path / "all/curves.csv")}
    assert runs == {(s["algorithm"], str(s["seed"])) for s in several}
    labels = {row["run"] for row in read(tmp_path / "all/fairness.csv")}
    assert labels == {f"{s['algorithm']}-seed{s['seed']}" for s in several}


# ---- cells ------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the runs that ``compare`` really starts."""
    names: list[str] = []

    def spy(config: RunConfig, **options: Any) -> None:
        names.append(Path(config.output).name)
        run_in_process(config, **options)

    monkeypatch.setattr(compare_module, "run_in_process", spy)
    return names


def test_a_finished_cell_is_not_run_again_and_a_changed_or_interrupted_one_is(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--algorithms fedavg,fedprox"
    first = compare(tmp_path, line)
    assert started == ["fedavg", "fedprox"]
    assert compare(tmp_path, line) == first
    assert started == ["fedavg", "fedprox"]
    assert "2 of 2 cells were finished before" in capsys.readouterr().out

    compare(tmp_path, f"{line} --param mu=0.5")
    assert started[2:] == ["fedprox"]
    out = capsys.readouterr().out
    assert "fedprox is run anew, its settings have changed: mu was " in out

    summary = tmp_path / "fedavg/summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"finished": False}))
    (tmp_path / "fedprox/summary.json").write_text("{")
    again = compare(tmp_path, line)
    assert started[3:] == ["fedavg", "fedprox"]
    assert [s["model_sha256"] for s in again] == [s["model_sha256"] for s in first]


def test_a_run_that_starts_anew_is_no_longer_finished(tmp_path: Path) -> None:
    config = RunConfig.parse({"clients": 5, "rounds": 1, "output": str(tmp_path)})
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
    assert "3 of 4 cells done, about " in out


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
        RuntimeError, match=r"1 of 2 cells failed: bad \(OSError: no space left\)"
    ) as caught:
        run_cells({configs[0]: boom, configs[1]: lambda: ran.append("good")})
    assert isinstance(caught.value.__cause__, OSError)
    assert ran == ["good"]
    assert "bad failed: OSError: no space left" in capsys.readouterr().out


def test_a_comparison_whose_runs_all_fail_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_module, "run_in_process", lambda config, **_: boom())
    with pytest.raises(SystemExit) as stop:
        compare(tmp_path, "--algorithms fedavg --seeds 1,2")
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: 2 of 2 cells failed: fedavg-seed1 (OSError: no space left), fed" in line
    with pytest.raises(RuntimeError, match="2 of 2 cells failed") as error:
        compare(tmp_path, "--algorithms fedavg --seeds 1,2 --verbose")
    assert isinstance(error.value.__cause__, OSError)
    assert (tmp_path / "table.md").read_text().startswith("No run has finished.")
    assert json.loads((tmp_path / "summary.json").read_text()) == []


def test_a_rate_that_diverges_ends_its_run_alone_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first round is usable; afterwards no reply is finite."""
    common = "--algorithms fedavg --model logistic --batch-size 0 --rounds 9"
    compare(tmp_path, f"{common} --tune-lr 0.1,1e36")
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

    monkeypatch.setattr(compare_module, "run_in_process", until)
    with pytest.raises(SystemExit) as stop:
        compare(tmp_path, "--algorithms fedavg,fedprox")
    assert stop.value.code == 130
    assert f"interrupted; {tmp_path} has what was computed" in capsys.readouterr().out
    (summary,) = json.loads((tmp_path / "summary.json").read_text())
    assert summary["algorithm"] == "fedavg"
    assert len(read(tmp_path / "table.csv")) == 1


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_each_saves_what_it_had(tmp_path: Path) -> None:
    line = f"{SMALL} --rounds 1000000 --algorithms fedavg --seeds 1,2,3 --jobs 2"
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


def test_a_study_goes_on_from_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"algorithm": "fedavg", "clients": 5, "rounds": 2, "epochs": 1}
    cells = [studies.Cell(f"lr{lr}", base | {"lr": lr}, None) for lr in (0.1, 0.2)]
    monkeypatch.setitem(studies.STUDIES, "fedpd-fig2", lambda: cells)
    command = ["fedpd-fig2", "--output", str(tmp_path)]
    reproduce.main([*command, "--only", "lr0.1"])
    stamp = (tmp_path / "lr0.1/summary.json").stat().st_mtime_ns
    assert not (tmp_path / "lr0.2").exists()
    capsys.readouterr()
    reproduce.main(command)
    out = capsys.readouterr().out
    assert "1 of 2 cells were finished before" in out
    assert "lr0.2 round 2/2" in out
    assert (tmp_path / "lr0.1/summary.json").stat().st_mtime_ns == stamp
    assert out.rstrip().endswith((tmp_path / "table.md").read_text().rstrip())
    assert [line.split(" | ")[0] for line in out.splitlines()[-3:-1]] == ["| lr0.1", "| lr0.2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seeds 1,1", "each number once, got '1,1'"),
        ("--seeds 1,x", "numbers with commas, got '1,x'"),
        ("--seeds 1,-2", "seed must be >= 0, got -2"),
        ("--seed 1 --seeds 2,3", "either --seed or --seeds"),
        ("--lr 0.1 --tune-lr 0.1,1", "either --lr or --tune-lr"),
        ("--tune-lr 0.1,0.10", "each number once, got '0.1,0.10'"),
        ("--tune-lr 0.1", "tune-lr needs at least two rates, got 0.1"),
        ("--tune-lr 0,0.1", "lr must be > 0, got 0"),
        ("--tune-lr nan,0.1", "lr must be "),
        ("--tune-lr 0.1,1 --tune-share 1", "tune-share must be > 0 and < 1, got 1"),
        ("--tune-lr 0.1,1 --validation 0.1", "tune-lr holds out training samples itself"),
        ("--validation 1", "validation must be < 1, got 1"),
        ("--jobs 0", "--jobs must be >= 1, got 0"),
        ("--jobs 2 --engine ray", "--jobs is for --engine in-process; Ray has --workers"),
        ("--output /proc/results", "the results folder /proc/results/fedavg cannot be written"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: str, message: str, tmp_path: Path, started: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line = [*SMALL.split(), "--output", str(tmp_path), "--algorithms", "fedavg"]
    with pytest.raises(SystemExit) as stop:
        main([*line, *arguments.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert started == []


def test_fewer_than_one_job_is_refused_by_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["fedpd-fig2", "--output", str(tmp_path), "--jobs", "0"])
    assert "jobs must be >= 1, got 0" in capsys.readouterr().err


def test_each_seed_keeps_its_clients_states_apart(tmp_path: Path) -> None:
    states = tmp_path / "states"
    compare(tmp_path / "out", f"--algorithms fedadmm --seeds 1,2 --state-dir {states}")
    assert {path.name for path in states.iterdir()} == {"fedadmm-seed1", "fedadmm-seed2"}
