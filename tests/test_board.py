"""The board's settings run, share what they say they share, and resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from board_settings import by_name, by_study

from fl_strategies.core.files import FolderLock
from fl_strategies.core.settings_text import parse_params
from simulations import defaults
from simulations.config import RunConfig
from simulations.figures import read_history
from simulations.lab import board, board_page, measured, studies
from simulations.lab.reproduce import main
from simulations.lab.studies import STUDIES, Rule, Setting, load
from simulations.lab.tuning import with_values


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
    {"new": Rule({"algorithm": "fedavg", "lr": 0.3}, tune={}),
     "old": Rule({"algorithm": "fedprox"})},
    {}, SMALL, tune={"lr": (0.01, 0.5)}, seeds=(1, 2),
)  # fmt: skip
TUNED = TUNES._replace(name="tuned", where="Two", config=SMALL | {"epochs": 2}, tuned_by=TUNES)


@pytest.mark.slow
def test_settings_share_a_choice_of_learning_rates_and_pay_for_it_once(tmp_path: Path) -> None:
    board.run([TUNED, TUNES], tmp_path, quiet=True)
    assert not (tmp_path / "tuned/tuning").exists()
    assert {path.name for path in (tmp_path / "tunes/tuning").iterdir()} == {
        "old-lr0.01", "old-lr0.5",
    }  # fmt: skip
    first, second = (board.judged(setting, tmp_path, [TUNES]) for setting in (TUNES, TUNED))
    rates = [{row.rule: row.chosen for row in one.rows} for one in (first, second)]
    assert rates[0] == rates[1]
    assert rates[0]["new"] == "0.3"
    spent = sum(json.loads(path.read_text())["seconds"] for path in tmp_path.rglob("summary.json"))
    assert sum(row.seconds for one in (first, second) for row in one.rows) == pytest.approx(spent)


@pytest.mark.slow
def test_a_rate_with_which_all_clients_diverge_is_not_chosen_and_stops_nothing(
    tmp_path: Path,
) -> None:
    rules = {
        "new": Rule({"algorithm": "fedavg"}),
        "old": Rule({"algorithm": "fedprox"}, tune={"lr": (1e38,)}),
    }
    setting = TUNES._replace(rules=rules, config=SMALL | {"rounds": 4}, tune={"lr": (0.1, 1e38)})
    board.run([setting], tmp_path, quiet=True)
    found = board.judged(setting, tmp_path)
    assert [(row.chosen, len(row.values)) for row in found.rows] == [("0.1", 2), ("1e+38", 2)]
    cause = "no reply of 3 rounds in a row was usable: 4 clients [0, 1, 2, 3]: ValueError: "
    cause += "the trained model is not finite: training diverged, with lr = 1e+38"
    assert found.rows[1].ended[0].startswith(f"seed 1: {cause}")
    assert f"old ended early with seed 1: {cause}" in board_page.markdown([found], "command")


@pytest.mark.slow
def test_a_run_that_fails_is_told_at_the_end_and_stops_no_other_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = board.run_one

    def run_one(config: RunConfig, **others: Any) -> None:
        if "tunes" in config.output and config.algorithm == "fedprox":
            raise OSError("the disk is full")
        plain(config, **others)

    monkeypatch.setattr(board, "run_one", run_one)
    other = TUNES._replace(name="other")
    with pytest.raises(RuntimeError, match=r"^tunes: 2 of 2 runs failed: .*the disk is full"):
        board.run([TUNES, other], tmp_path, quiet=True)
    values = [
        [len(row.values) for row in board.judged(each, tmp_path).rows] for each in (TUNES, other)
    ]
    assert values == [[2, 0], [2, 2]]


@pytest.mark.slow
def test_settings_that_share_runs_read_other_figures_of_them(tmp_path: Path) -> None:
    own = SMALL | {"local-test": 0.3, "fraction-evaluate": 1.0}
    accuracy = TUNES._replace(config=own, tune={}, runs_in=TUNES)
    more = {**TUNES.rules, "more": Rule({"algorithm": "fedavg", "params": "weights=uniform"})}
    variance = accuracy._replace(name="variance", figure="variance", rules=more)
    board.run([accuracy, variance], tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["tunes"]
    found = [board.judged(setting, tmp_path) for setting in (accuracy, variance)]
    assert [row.rule for row in found[1].rows if row.seconds > 0.0] == ["more"]
    for row in found[1].rows:
        paths = [tmp_path / f"tunes/{row.rule}-seed{seed}/history.jsonl" for seed in (1, 2)]
        means = [
            np.mean([line["eval-accuracy-variance"] for line in read_history(path)])
            for path in paths
        ]
        assert row.values == pytest.approx(means, rel=1e-9)


def test_every_study_has_settings_of_as_many_rounds_and_names_of_their_own() -> None:
    """That each of their rules has a run-config is checked when they are read."""
    settings = by_name().values()
    assert all(by_study().values())
    assert not any("rounds" in rule.config for one in settings for rule in one.rules.values())
    assert len(settings) == sum(map(len, by_study().values()))


STUDY = """
figure = "final_accuracy"
ours = "new"
tune = { lr = [0.1, 1.0] }

[config]
rounds = 5
clients = 10

[rules]
new = { algorithm = "fedadmm", params = "rho=0.1" }
old = { algorithm = "fedavg", reference = true, tune = {} }

[[settings]]
name = "one"
where = "One"
tuned-by = "short"
published = { new = 0.9 }

[[settings]]
name = "two"
like = "one"
runs-in = "one"
config = { clients = 20 }
rules.old = { lr = 0.3 }
only = ["old", "new"]

[[choices]]
name = "short"
like = "one"
config = { rounds = 2 }
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(studies, "FOLDER", tmp_path)
    (tmp_path / "mine.toml").write_text(STUDY)
    return tmp_path / "mine.toml"


def test_a_setting_has_what_its_file_and_the_setting_that_it_is_like_have(study: Path) -> None:
    one, two = load("mine")
    assert (two.where, two.published, two.tune) == ("One", {"new": 0.9}, {"lr": (0.1, 1.0)})
    assert [*one.rules, *two.rules] == ["new", "old", "old", "new"]
    assert one.rules["old"] == Rule({"algorithm": "fedavg"}, reference=True, tune={})
    assert two.rules["old"].config == {"algorithm": "fedavg", "lr": 0.3}
    assert (one.config, two.config["clients"]) == ({"rounds": 5, "clients": 10}, 20)
    assert (two.runs_in, two.tuned_by) == (one, None)
    assert one.tuned_by == one._replace(
        name="short", config=one.config | {"rounds": 2}, tuned_by=None
    )


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("figure =", "figur =", "unknown keys 'figur' (did you mean 'figure'?)"),
        ('"final_accuracy"', '"accuracy"', "figure must be one of ["),
        ("lr = [0.1, 1.0]", "lr = 0.1", "rules.new: tune.lr must be a list, got 0.1"),
        ("lr = [0.1, 1.0]", "rh = [0.1]", "rules.new: tune: unknown 'rh' (did you mean 'rho'?)"),
        ("rounds = 5", "round = 5", "unknown run-config keys 'round' (did you mean 'rounds'?)"),
        ("rounds = 5", "", "one: config: missing keys ['rounds']"),
        ("rho=0.1", "rho=-1", "rules.new: rho must be > 0, got -1"),
        ("clients = 20", 'clients = "20"', "two: rules.old: clients must be of type int, got '20'"),
        ("reference = true", "reference = 1", "rules.old: reference must be bool, got 1"),
        ('name = "one"', "", "setting 1: missing keys ['name']"),
        ('where = "One"', "", "one: missing keys ['where']"),
        ('where = "One"', "where = 1", "one: where must be of type str, got 1"),
        ("{ new = 0.9", "{ nev = 0.9", "published: unknown 'nev'"),
        ('ours = "new"', 'ours = "mine"', "ours: unknown 'mine'"),
        ('only = ["old"', 'only = ["odd"', "two: only: unknown 'odd'"),
        ('tuned-by = "short"', 'tuned-by = "sort"', "one: tuned-by: unknown 'sort'"),
        ('runs-in = "one"', 'runs-in = "two"', "two: runs-in: unknown 'two'"),
        ('like = "one"\nruns', 'like = "on"\nruns', "two: like: unknown 'on'"),
        ('name = "two"', 'name = "one"', "one: a second setting of this name"),
        ("rules.old = { lr = 0.3 }", "rules.old = 3", "two: rules.old must be a table, got 3"),
        ("[rules]", "[rules", "Expected ']'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_study_is_told_with_its_file_and_key(
    right: str, wrong: str, said: str, study: Path
) -> None:
    assert right in STUDY
    study.write_text(STUDY.replace(right, wrong, 1))
    with pytest.raises(ValueError, match=re.escape(f"{study}: ")) as error:
        load("mine")
    assert said in str(error.value)


def test_studies_leave_nothing_to_the_defaults_of_an_algorithm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By default FedAvg has momentum on MNIST: rules that are compared would differ unseen."""

    def has_defaults(setting: Setting, rule: str) -> bool:
        config = {**setting.config, **setting.rules[rule].config}
        dataset = config.get("dataset", RunConfig.dataset)
        return any((config["algorithm"], on) in defaults.ALGORITHMS for on in ("", dataset))

    settings = by_name().values()
    rules = [(one, rule) for one in settings for rule in one.rules if has_defaults(one, rule)]
    assert rules

    def of(setting: Setting, rule: str, folder: Path) -> RunConfig:
        space = setting.rules[rule].tune
        space = setting.tune if space is None else space
        config = board.placed(setting, folder, rule, rule)
        return with_values(config, {name: values[0] for name, values in space.items()})

    def runs(folder: Path) -> dict[str, Any]:
        configs = {f"{one.name}-{rule}": of(one, rule, folder) for one, rule in rules}
        return {
            name: (config.fraction, parse_params(config.params), config.local())
            for name, config in configs.items()
        }

    as_they_are = runs(tmp_path / "with")
    monkeypatch.setattr(defaults, "ALGORITHMS", {})
    assert runs(tmp_path / "without") == as_they_are  # another folder's configs are read anew


OF_MANY = {
    *("delta-sgd", "delta-sgd-carried", "delta-sgd-inside", "delta-sgd-robust", "fedadmm-deciding"),
    *("fedadmm-needs", "fedbcd", "local-solvers", "parameter-free"),
}
"""Studies whose clients need as many samples as MNIST has; the others run on few."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "datasets_folder"),
    [(study, "all" if study in OF_MANY else "few") for study in STUDIES],
    indirect=["datasets_folder"],
    ids=STUDIES,
)
def test_the_shrunk_board_runs_and_is_written(
    study: str, tmp_path: Path, datasets_folder: Path
) -> None:
    """The first rule of each study, as the last is often centralised training."""
    setting = load(study)[0]
    first = next(iter(setting.rules))
    folder = tmp_path / "quick"  # a study of hours may lie beside it
    options = ["--quick", "--only", setting.name, "--quiet", "--output", str(tmp_path)]
    main([study, *options, "--rules", first])
    found = written(folder, setting.name)
    assert [record["rule"] for record in found if record["values"]] == [first]
    assert found[0]["verdict"] == "not run"
    text = (folder / "board.md").read_text()
    assert f"reproduce {study} --quick --output {tmp_path} --only {setting.name}" in text
    assert "a trial of two rounds, no result" in text


@pytest.mark.slow
@pytest.mark.parametrize("study", ["fedadmm", "fedbc", "fedpd-fig2"])
def test_the_shrunk_board_resumes(
    study: str, tmp_path: Path, datasets_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = load(study)[0]
    command = [study, "--quick", "--only", setting.name, "--quiet", "--output", str(tmp_path)]
    folder = tmp_path / "quick"
    main([*command, "--rules", [*setting.rules][-1]])
    main(command)
    found = written(folder, setting.name)
    assert [record["rule"] for record in found] == list(setting.rules)
    assert all(len(record["values"]) == 2 for record in found)
    assert found[0]["verdict"] not in ("not run", "not possible here")
    assert (folder / f"{setting.name}.svg").stat().st_size > 0
    text = (folder / "board.md").read_text()
    capsys.readouterr()
    main(command)
    assert "runs done" not in capsys.readouterr().out
    assert (folder / "board.md").read_text() == text


def written(folder: Path, setting: str) -> list[dict[str, Any]]:
    """Return what the board of a folder holds of a setting."""
    records = json.loads((folder / "board.json").read_text())
    return [record for record in records if record["setting"] == setting]


def test_two_studies_do_not_write_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FolderLock(tmp_path).held("study"), pytest.raises(SystemExit):
        main(["fedpd-fig2", "--output", str(tmp_path)])
    assert f"{tmp_path} is in use by run study" in capsys.readouterr().err


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
