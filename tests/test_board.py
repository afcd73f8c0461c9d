"""The board's intervals cover what they say, and its verdicts are those of its rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg

from clients import FederatedClient
from fl_strategies.core.params import parse_params
from simulations import defaults
from simulations.config import RunConfig
from simulations.figures import read_history
from simulations.lab import board, board_page, flower_server, measured
from simulations.lab.cells import finished
from simulations.lab.published import BOARD
from simulations.lab.reproduce import main
from simulations.lab.settings import Rule, Setting
from simulations.lab.studies import STUDIES
from simulations.lab.verdicts import Interval, Row, interval, judge

SETTINGS = [setting for settings in BOARD.values() for setting in settings]
RULES = {"new": Rule("fedadmm"), "old": Rule("fedavg"), "all": Rule("fedavg", reference=True)}
ACCURACY = Setting(
    "one", "A paper, Table 1", "final_accuracy", "new", RULES, {"new": 0.9, "old": 0.8},
    {"rounds": 100, "clients": 10}, seeds=(1, 2, 3),
)  # fmt: skip
ROUNDS = ACCURACY._replace(figure="rounds_to_target", published={"new": 10.0, "old": 20.0})
BENCHMARK = ACCURACY._replace(ours="")
VARIANTS = ACCURACY._replace(published={})


def rows(setting: Setting, new: tuple[float, ...], old: tuple[float, ...]) -> list[Row]:
    """Rows with a reference that is best of all, which no verdict looks at."""
    best = 0.0 if setting.figure == "rounds_to_target" else 1.0
    values = {"new": new, "old": old, "all": (best,) * 3}
    return [Row(name, setting.published.get(name), v, 0.1, 1.0) for name, v in values.items()]


@pytest.mark.parametrize("of_next", [False, True])
@pytest.mark.parametrize("n", [2, 5])
def test_intervals_hold_95_of_100_means_and_further_values(n: int, of_next: bool) -> None:
    rng = np.random.default_rng(n)
    drawn = rng.normal(3.0, 2.0, (4000, n + 1))
    found = [interval(list(values[:n]), of_next=of_next) for values in drawn]
    sought = drawn[:, n] if of_next else np.full(4000, 3.0)
    held = [one.low <= value <= one.high for one, value in zip(found, sought, strict=True)]
    assert np.mean(held) == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / 4000))


def test_one_value_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least two values, got 1"):
        interval([1.0])


@pytest.mark.parametrize(
    ("setting", "new", "old", "verdict"),
    [
        (ACCURACY, (0.89, 0.90, 0.91), (0.80, 0.81, 0.82), "reproduced"),
        (ACCURACY, (0.70, 0.71, 0.72), (0.60, 0.61, 0.62), "order only"),
        (ACCURACY, (0.89, 0.90, 0.91), (0.91, 0.90, 0.89), "not"),
        (ACCURACY, (0.80, 0.81, 0.82), (0.89, 0.90, 0.91), "not"),
        (ACCURACY, (0.80, 0.95, 0.65), (0.70, 0.85, 0.55), "reproduced"),  # seeds in pairs
        (ROUNDS, (9.0, 10.0, 11.0), (20.0, 21.0, 22.0), "reproduced"),
        (ROUNDS, (30.0, 31.0, 32.0), (50.0, 51.0, 52.0), "order only"),
        (ROUNDS, (20.0, 21.0, 22.0), (9.0, 10.0, 11.0), "not"),
        (ACCURACY, (0.89, 0.90), (0.80, 0.81, 0.82), "not run"),
        (ACCURACY, (0.89, 0.90, 0.91), (), "not run"),
        (BENCHMARK, (0.89, 0.90, 0.91), (0.79, 0.80, 0.81), "reproduced"),
        (BENCHMARK, (0.89, 0.90, 0.91), (0.89, 0.90, 0.91), "not"),
        (BENCHMARK, (0.89, 0.90, 0.91), (), "not run"),
        (VARIANTS, (0.89, 0.90, 0.91), (0.80, 0.81, 0.82), "ahead"),
        (VARIANTS, (0.80, 0.81, 0.82), (0.89, 0.90, 0.91), "behind"),
        (VARIANTS, (0.89, 0.90, 0.91), (0.91, 0.90, 0.89), "level"),
        (
            VARIANTS._replace(figure="rounds_to_target"),
            (9.0, 10.0, 11.0),
            (20.0, 21.0, 22.0),
            "ahead",
        ),
    ],
)
def test_a_verdict_follows_from_the_paired_difference_and_the_published_number(
    setting: Setting, new: tuple[float, ...], old: tuple[float, ...], verdict: str
) -> None:
    assert judge(setting, rows(setting, new, old)).verdict == verdict


def test_a_paper_whose_rule_is_behind_by_its_own_numbers_is_reproduced_where_it_is_behind() -> None:
    setting = ACCURACY._replace(published={"new": 0.8, "old": 0.9})
    behind = rows(setting, (0.79, 0.80, 0.81), (0.89, 0.90, 0.91))
    assert judge(setting, behind).verdict == "reproduced"
    ahead = rows(setting, (0.79, 0.80, 0.81), (0.69, 0.70, 0.71))
    assert judge(setting, ahead).verdict == "not"
    third = {"third": Rule("fedprox")}
    setting = setting._replace(
        rules=setting.rules | third, published=setting.published | {"third": 0.7}
    )
    for value, verdict in ((0.7, "reproduced"), (0.8, "not"), (0.85, "not")):
        between = [*behind, Row("third", 0.7, (value - 0.01, value, value + 0.01), None, 0.0)]
        assert judge(setting, between).verdict == verdict


def test_the_difference_is_that_to_the_best_baseline_in_pairs() -> None:
    found = judge(ACCURACY, rows(ACCURACY, (0.8, 0.9, 1.0), (0.7, 0.8, 0.9)))
    assert found.best == "old"
    assert found.difference is not None
    assert found.difference == pytest.approx(Interval(0.1, 0.0), abs=1e-12)


def test_what_cannot_be_run_says_why() -> None:
    setting = ACCURACY._replace(impossible="the data are not at hand")
    found = judge(setting, [])
    assert found.verdict == "not possible here"
    assert "the data are not at hand" in board_page.markdown([found], "command")


def test_the_worst_and_best_tenth_are_of_each_rounds_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    accuracies = rng.random((15, 20))
    lines = [
        {"round": number, "client": client, "eval-accuracy": accuracy}
        for number, row in enumerate(accuracies, start=1)
        for client, accuracy in enumerate(row)
    ]
    lines += [{"round": 15, "client": 20, "samples": 3}]  # it trained and did not evaluate
    (tmp_path / "clients.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RunConfig.parse({"output": str(tmp_path)})
    last = np.sort(accuracies[-10:], axis=1)
    for figure, expected in (
        ("worst_tenth", last[:, :2].mean()),
        ("best_tenth", last[:, -2:].mean()),
        ("variance", last.var(axis=1).mean()),
    ):
        found = measured.value(config, figure, missed=0.0)  # type: ignore[arg-type]
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_figure_of_clients_needs_clients_that_evaluate(tmp_path: Path) -> None:
    (tmp_path / "clients.jsonl").write_text('{"round": 1, "client": 0, "samples": 3}\n')
    with pytest.raises(ValueError, match="no client evaluated"):
        measured.value(RunConfig.parse({"output": str(tmp_path)}), "variance", missed=0.0)


SMALL = {"dataset": "digits", "clients": 4, "rounds": 2, "fraction": 1.0, "epochs": 1}
TUNES = Setting(
    "tunes", "One", "final_accuracy", "new",
    {"new": Rule("fedavg", config={"lr": 0.3}, rates=()), "old": Rule("fedprox")},
    {}, SMALL, rates=(0.01, 0.5), seeds=(1, 2),
)  # fmt: skip
TUNED = TUNES._replace(name="tuned", where="Two", config=SMALL | {"epochs": 2}, tuned_by=TUNES)


def test_settings_share_a_choice_of_learning_rates_and_pay_for_it_once(tmp_path: Path) -> None:
    board.run([TUNED, TUNES], tmp_path, quiet=True)
    assert not (tmp_path / "tuned/tuning").exists()
    assert {path.name for path in (tmp_path / "tunes/tuning").iterdir()} == {
        "old-lr0.01", "old-lr0.5",
    }  # fmt: skip
    first, second = (board.found(setting, tmp_path, [TUNES]) for setting in (TUNES, TUNED))
    rates = [{row.rule: row.lr for row in one.rows} for one in (first, second)]
    assert rates[0] == rates[1]
    assert rates[0]["new"] == 0.3
    spent = sum(json.loads(path.read_text())["seconds"] for path in tmp_path.rglob("summary.json"))
    assert sum(row.seconds for one in (first, second) for row in one.rows) == pytest.approx(spent)


def test_settings_that_share_runs_read_other_figures_of_them(tmp_path: Path) -> None:
    own = SMALL | {"local-test": 0.3, "fraction-evaluate": 1.0}
    accuracy = TUNES._replace(config=own, rates=(), runs_in=TUNES)
    more = {**TUNES.rules, "more": Rule("fedavg", {"weights": "uniform"})}
    variance = accuracy._replace(name="variance", figure="variance", rules=more)
    board.run([accuracy, variance], tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["tunes"]
    found = [board.found(setting, tmp_path) for setting in (accuracy, variance)]
    assert [row.rule for row in found[1].rows if row.seconds > 0.0] == ["more"]
    for row in found[1].rows:
        paths = [tmp_path / f"tunes/{row.rule}-seed{seed}/history.jsonl" for seed in (1, 2)]
        means = [
            np.mean([line["eval-accuracy-variance"] for line in read_history(path)])
            for path in paths
        ]
        assert row.values == pytest.approx(means, rel=1e-9)


def test_settings_with_the_same_rules_stand_side_by_side(tmp_path: Path) -> None:
    first = judge(ACCURACY, rows(ACCURACY, (0.89, 0.90, 0.91), (0.80, 0.81, 0.82)))
    other = ACCURACY._replace(name="two", rules={"new": Rule("fedadmm")})
    groups = board_page.alike([first, judge(other, []), first])
    assert [[each.setting.name for each in group] for group in groups] == [["one", "one"], ["two"]]
    table = board_page.side_by_side([first, first])
    half = 100 * interval([0.89, 0.90, 0.91]).half
    assert f"| new | 90.0 ± {half:.1f} (0.1) | 90.0 ± {half:.1f} (0.1) |" in table
    assert "9.0 ± 0.0 to old: *reproduced*" in table


def test_flowers_server_of_fedavg_gives_the_model_of_our_fedavg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_server, "SERVERS", {"flowers-fedavg": FedAvg})
    settings = SMALL | {"algorithm": "fedavg", "rounds": 3, "partition": "dirichlet", "seed": 4}
    made = {}
    for name, server in (("ours", ""), ("flowers", "flowers-fedavg"), ("again", "flowers-fedavg")):
        config = RunConfig.parse(settings | {"evaluate-every": 2, "output": str(tmp_path / name)})
        board.run_one(config, server, quiet=True)
        assert finished(config)
        made[name] = (measured.summary(config), read_history(tmp_path / name / "history.jsonl"))
    (_, history), (flowers, flowers_history), (again, _) = made.values()
    assert flowers["model_sha256"] == again["model_sha256"]
    assert [row["round"] for row in flowers_history] == [1, 2, 3]
    for expected, row in zip(history, flowers_history, strict=True):
        assert ("test-loss" in row) == ("test-loss" in expected)
        if "test-loss" in row:  # sums of four float32 models are rounded differently
            assert row["test-loss"] == pytest.approx(expected["test-loss"], rel=1e-5)


def test_flowers_server_takes_fedavgs_clients_alone(tmp_path: Path) -> None:
    config = RunConfig.parse(SMALL | {"algorithm": "fedprox", "output": str(tmp_path)})
    with pytest.raises(ValueError, match="fedadam takes the clients of fedavg, got fedprox"):
        board.run_one(config, "fedadam")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("params", "weights=uniform", "params, got"),
        ("stop-at-target", True, "stop-at-target, got True"),
        ("checkpoint-every", 2, "checkpoint-every, got 2"),
    ],
)
def test_what_flowers_server_would_not_follow_is_refused(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    settings = SMALL | {"algorithm": "fedavg", key: value, "output": str(tmp_path)}
    with pytest.raises(ValueError, match=f"fedadam does not follow {said}"):
        board.run_one(RunConfig.parse(settings), "fedadam")


def test_a_client_that_fails_under_flowers_server_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own strategies leave such a reply out and say nothing in their metrics."""

    def broken(*args: Any) -> None:
        raise ValueError("the disk is full")

    monkeypatch.setattr(FederatedClient, "steps_made", broken)
    config = RunConfig.parse(SMALL | {"algorithm": "fedavg", "output": str(tmp_path)})
    with pytest.raises(RuntimeError, match=r"a client failed: .*the disk is full"):
        board.run_one(config, "fedadam")
    assert not finished(config)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_one_that_runs(setting: Setting, tmp_path: Path) -> None:
    assert setting.published.keys() <= setting.rules.keys()
    assert setting.ours in ("", *(setting.published or setting.rules))
    for rule in setting.rules:
        config = board.placed(setting, rule, rule, tmp_path)
        assert config.rounds == setting.horizon
    names = [one.name for one in SETTINGS]
    assert len(set(names)) == len(names)


def test_studies_leave_nothing_to_the_defaults_of_an_algorithm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By default FedAvg has momentum on MNIST: rules that are compared would differ unseen."""

    def of(setting: Setting, rule: str) -> RunConfig:
        rates = setting.rules[rule].rates
        tuned = setting.rates if rates is None else rates
        config = board.placed(setting, rule, rule, tmp_path)
        return replace(config, lr=1.0) if tuned else config

    def runs() -> dict[str, Any]:
        cells = {cell.name: cell.settings(tmp_path) for of in STUDIES.values() for cell in of()}
        rules = {f"{one.name}-{rule}": of(one, rule) for one in SETTINGS for rule in one.rules}
        return {
            name: (config.fraction, parse_params(config.params), config.local())
            for name, config in {**cells, **rules}.items()
        }

    as_they_are = runs()
    monkeypatch.setattr(defaults, "ALGORITHMS", {})
    assert runs() == as_they_are


@pytest.mark.parametrize(
    "study",
    ["fedbc", *(pytest.param(name, marks=pytest.mark.slow) for name in BOARD if name != "fedbc")],
)
def test_the_shrunk_board_runs_is_written_and_resumes(
    study: str, tmp_path: Path, datasets_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if study != "fedbc" and not (datasets_folder / "mnist/data").is_dir():
        pytest.skip("the few images that stand in for MNIST do not go round 100 clients")
    only = BOARD[study][0].name
    command = [study, "--quick", "--only", only, "--quiet", "--output", str(tmp_path)]

    folder = tmp_path / "quick"  # a study of hours may lie beside it

    def records() -> list[dict[str, Any]]:
        written = json.loads((folder / "board.json").read_text())
        return [record for record in written if record["setting"] == only]

    last = [*BOARD[study][0].rules][-1]
    main([*command, "--rules", last])
    assert [record["rule"] for record in records() if record["values"]] == [last]
    assert records()[0]["verdict"] == "not run"
    main(command)
    found = records()
    assert [record["rule"] for record in found] == list(BOARD[study][0].rules)
    assert all(len(record["values"]) == 2 for record in found)
    assert found[0]["verdict"] not in ("not run", "not possible here")
    assert (folder / f"{only}.svg").stat().st_size > 0
    text = (folder / "board.md").read_text()
    assert f"reproduce {study} --quick --only {only}" in text
    capsys.readouterr()
    main(command)
    assert "runs done" not in capsys.readouterr().out
    assert (folder / "board.md").read_text() == text


def test_missing_data_are_told_once_and_no_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the Hub was asked")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setenv("FL_DATA", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["fedbcd", "--quick", "--output", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert said.err.count("data set 'mnist' is neither under FL_DATA") == 1
    assert said.out == ""
