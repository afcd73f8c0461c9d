"""Comparisons over seeds and learning rates: their tables, figures and tuning."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import compare, read

from fl_strategies import STRATEGIES
from fl_strategies.core.settings_text import parse_params
from simulations.config import RunConfig, hyperparameter_defaults, hyperparameters_of
from simulations.experiment import run_in_process
from simulations.figures import draw_curves, panels_by_line
from simulations.lab.compare import main
from simulations.lab.tuning import score
from simulations.problems import dataset, parts, problem, validation_rows
from simulations.rules import configs_for
from simulations.tables import algorithm_row, curve, markdown, run_figures

COUNTED = ("final_accuracy", "best_accuracy", "rounds_to_target", "bytes_up", "model_sha256")


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


# ---- tables -----------------------------------------------------------------------------------


def test_a_target_is_counted_in_rounds_exchanges_bytes_seconds_and_virtual_time(
    tmp_path: Path,
) -> None:
    columns = {
        "algorithm-round": [2, 3, 7, 8],
        "communication-rounds": [1, 4, 5, 6],
        "virtual-seconds": [1.5, 4.0, 6.0, 9.0],
    }
    config = made(tmp_path, [0.1, 0.4, 0.6, 0.7], **columns)
    found = run_figures(config, {"final_accuracy": 0.7})
    assert found["rounds_to_target"] == 7
    assert found["communication_rounds_to_target"] == 5
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


@pytest.mark.parametrize("algorithm", STRATEGIES)
def test_a_rows_settings_name_every_hyperparameter_that_is_not_off(
    algorithm: str, tmp_path: Path
) -> None:
    config = replace(made(tmp_path, [0.5]), algorithm=algorithm, params="")
    words = set(algorithm_row([config], [{}])["settings"].split())
    for name, value in hyperparameter_defaults(algorithm).items():
        assert (f"{name}={value}" in words) == bool(value)


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


@pytest.mark.slow
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


def test_a_score_is_the_mean_over_the_last_fifth_of_the_rounds(tmp_path: Path) -> None:
    accuracies = [0.1 * n**0.5 for n in range(13)]
    (tmp_path / "summary.json").write_text('{"given_up": ""}')
    assert score(made(tmp_path, accuracies)) == pytest.approx(np.mean(accuracies[-3:]))
    assert score(made(tmp_path, accuracies[:2])) == pytest.approx(accuracies[1])
    (tmp_path / "summary.json").write_text('{"given_up": "all clients diverged"}')
    assert score(made(tmp_path, accuracies)) == 0.0


@pytest.mark.parametrize("pooled", [False, True])
def test_a_run_on_validation_rows_trains_on_the_others_and_is_tested_on_no_test_data(
    pooled: bool,
) -> None:
    config = RunConfig.parse({"clients": 8, "local-test": 0.2, "pooled": pooled})
    plain, split = parts(config), parts(held := replace(config, validation=0.3))
    held_out = validation_rows(held)
    for (train, _), (less, own) in zip(plain, split, strict=True):  # no client's test samples
        np.testing.assert_array_equal(np.sort(np.concatenate([less, own])), train)
    np.testing.assert_array_equal(held_out, np.concatenate([own for _, own in split]))
    assert len(held_out) == pytest.approx(0.3 * sum(len(train) for train, _ in plain), abs=8)
    ((_, targets, _),) = problem(held, "test").data.batches(np.random.default_rng(), 0)
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
    several = compare(tmp_path / "all", f"{line} {evaluated} --seeds 3,2 --tune lr=0.2,0.005")
    tuning = json.loads((tmp_path / "all/tuning.json").read_text())
    chosen = {row["algorithm"]: row["lr"] for row in tuning if row["chosen"]}
    assert [(s["algorithm"], s["seed"]) for s in several] == [
        ("fedavg", 3), ("fedavg", 2), ("fedpd", 3), ("fedpd", 2)]  # fmt: skip
    assert [s["lr"] for s in several] == [chosen[s["algorithm"]] for s in several]
    for trial in tuning:
        folder = tmp_path / f"all/tuning/{trial['algorithm']}-lr{trial['lr']:g}"
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


def test_compare_gives_each_hyperparameter_to_the_algorithms_that_have_it(tmp_path: Path) -> None:
    params = ["mu=0.3", "fedadmm.rho=0.2", "weights=uniform"]
    avg, prox, admm = configs_for(["fedavg", "fedprox", "fedadmm"], params, {}, tmp_path)
    assert parse_params(avg.params) == {"weights": "uniform"}
    assert parse_params(prox.params) == {"mu": 0.3, "weights": "uniform"}
    assert parse_params(admm.params)["rho"] == 0.2
    with pytest.raises(ValueError, match="param: no algorithm here has the hyperparameter 'sigma'"):
        configs_for(["fedavg"], ["sigma=1"], {}, tmp_path)
    for given, message in (
        (["fedadm.rho=1"], r"no algorithm 'fedadm' \(did you mean 'fedadmm'\?\) here"),
        (["fedavg.rho=1"], r"no algorithm here has the hyperparameter 'rho'; .*'weights'"),
        (["lr=0.5"], r"no algorithm here has the hyperparameter 'lr'.*; a local setting: --lr"),
        (["krum.attackers=2"], r"of a part behind its name: --combine 'krum attackers=2'"),
        (["rho=1", "rho=2"], "param 'rho=2' gives fedadmm a second rho"),
        (["fedadmm.rho=1", "fedadmm.rho=2"], "param 'fedadmm.rho=2' gives fedadmm a second rho"),
        (["rho=1 rho=2"], "each option once, got 'rho' twice in 'rho=1 rho=2'"),
        (["rho=1:1;60"], "a schedule is given as 1:1.0;60:0.5, got 'rho=1:1;60'"),
        (["rho=1:1;1:2"], "a schedule has each round once, got 'rho=1:1;1:2'"),
    ):
        with pytest.raises(ValueError, match=message):
            configs_for(["fedadmm", "fedavg"], given, {}, tmp_path)
    assert all("rho" not in hyperparameters_of(name) for name in ("fedavg", "fedprox"))
    found = configs_for(["fedadmm", "a-fedpd"], ["fedadmm.rho=0.3", "rho=0.2"], {}, tmp_path)
    assert [parse_params(one.params)["rho"] for one in found] == [0.3, 0.2]


def test_a_setting_goes_to_the_algorithms_of_a_comparison_that_use_it(tmp_path: Path) -> None:
    measured = {"fraction-evaluate": 0.5, "local-test": 0.2}
    settings = {"dataset": "digits", "batch-size": 17, "fine-tune-lr": 0.5, **measured}
    average, one_step = configs_for(["per-fedavg", "fedsgd"], [], settings, tmp_path)
    assert (average.batch_size, average.fine_tune_lr) == (17, 0.5)
    assert "batch-size" not in one_step.local()
    for name, setting, why in (
        ("fedsgd", {"batch-size": 17}, "{'batch-size': 17}: gd takes all samples in each step"),
        ("fedavg", {"fine-tune-lr": 0.5}, "{'fine-tune-lr': 0.5}: fine-tune is off"),
        ("fedavg", {"fine-tune": "train"}, "{'fine-tune': 'train'}: fraction-evaluate is 0"),
        ("fedavg", {"state-dir": "/s"}, "state-dir is '/s', and no clients here keep a state"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            configs_for([name], [], {"dataset": "digits", **setting}, tmp_path)


@pytest.mark.figures
@pytest.mark.slow
def test_compare_writes_a_summary_a_table_and_figures(tmp_path: Path) -> None:
    line = "--dataset digits --partition shards --clients 10 --rounds 2 --seed 1"
    names = list(STRATEGIES)
    arguments = [*line.split(), "--algorithms", ",".join(names), "--output", str(tmp_path)]
    summaries = main(arguments)
    assert json.loads((tmp_path / "summary.json").read_text()) == summaries
    assert [summary["algorithm"] for summary in summaries] == names
    wanted = {
        "algorithm",
        "final_accuracy",
        "best_accuracy",
        "rounds_to_target",
        "bytes_up",
        "bytes_down",
        "seconds",
        "model_sha256",
    }
    assert wanted <= summaries[0].keys()
    assert len((tmp_path / "table.md").read_text().splitlines()) == 2 + len(names)
    for name in ("curves.png", "partition.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_compare_takes_zeros_as_they_are(tmp_path: Path) -> None:
    line = f"--algorithms fedavg --output {tmp_path} --rounds 1 --clients 20"
    line += " --seed 0 --batch-size 0 --momentum 0 --random-epochs false"
    main(line.split())
    config = json.loads((tmp_path / "fedavg/config.json").read_text())
    assert (config["seed"], config["batch_size"], config["momentum"]) == (0, 0, 0.0)
    assert config["random_epochs"] == "false"


@pytest.mark.parametrize(
    "arguments",
    [
        "--algorithms fedavg,fedsvrg",
        "--algorithms fedavg,fedavg",
        "--algorithms fedavg --fraction 0",
        "--algorithms fedavg --lr 0",
        "--algorithms fedavg --model resnet-1000",
        "--algorithms fedavg --dataset no-such-set",
        "--algorithms fedavg --partition dirichlet --partition-params alpha=x",
        "--algorithms fedadmm --param eta=a:b",
        "--algorithms fedavg+adam --server-step yogi",
    ],
)
def test_compare_refuses_bad_arguments_with_exit_code_2(
    arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*arguments.split(), "--output", str(tmp_path)])
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err
