"""The Flower App: its run-config, its results folder, its command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from clients import StateError, client_app
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, RoundInfo, step_decay
from fl_strategies.core.params import format_params, parse_params
from simulations.config import RunConfig, configs_for, hyperparameters_of
from simulations.experiment import metrics_of, run, run_in_process
from simulations.figures import read_history
from simulations.lab.compare import main
from simulations.results import Summary
from simulations.worker import app

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {"clients": 20, "rounds": 3, "fraction": 0.25}


def small(tmp_path: Path, **others: Any) -> RunConfig:
    return RunConfig.parse(SMALL | {"output": str(tmp_path / "run")} | others)


def test_the_apps_run_config_has_every_key_with_its_default() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config == RunConfig().to_run_config()


@pytest.mark.parametrize("algorithm", STRATEGIES)
def test_the_same_seed_gives_the_same_model_twice_and_another_seed_another(
    algorithm: str, tmp_path: Path
) -> None:
    given = {"clients": 10, "rounds": 2, "fraction": -1.0}  # the default of each
    config = small(tmp_path, algorithm=algorithm, **given)
    first, again = run_in_process(config), run_in_process(config)
    other = run_in_process(replace(config, seed=2))
    assert first.model_sha256 == again.model_sha256 != other.model_sha256


@pytest.mark.curves
def test_a_run_writes_its_results_and_prints_their_absolute_path_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path, target=0.3)
    summary = run_in_process(config)
    folder = tmp_path / "run"
    assert capsys.readouterr().out.splitlines()[-1] == f"results: {folder}"
    assert RunConfig(**json.loads((folder / "config.json").read_text())) == config
    assert Summary(**json.loads((folder / "summary.json").read_text())) == summary
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    accuracies = [row["test-accuracy"] for row in rows]
    assert summary.final_accuracy == accuracies[-1]
    assert summary.best_accuracy == max(accuracies)
    reached = [r for r, accuracy in enumerate(accuracies, 1) if accuracy >= 0.3]
    assert summary.rounds_to_target == (reached[0] if reached else None)
    assert summary.bytes_up == sum(row["bytes-up"] for row in rows)
    assert sum(array.size for array in load_file(folder / "model.safetensors").values()) == 650
    assert (folder / "curve.png").stat().st_size > 0


def test_metrics_of_is_a_run_that_prints_nothing_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(small(tmp_path, **{"batch-size": 7}))
    expected = read_history(tmp_path / "run/history.jsonl")
    capsys.readouterr()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    rows = metrics_of(**SMALL, batch_size=7)
    assert [row["test-loss"] for row in rows] == [row["test-loss"] for row in expected]
    assert capsys.readouterr().out == ""
    assert list(temporary.iterdir()) == []


def test_an_interrupted_run_leaves_what_was_computed_so_far(tmp_path: Path) -> None:
    def interrupt(info: RoundInfo) -> None:
        if info.server_round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(small(tmp_path), [interrupt])
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["rounds"], summary["finished"]) == (2, False)
    assert len((folder / "history.jsonl").read_text().splitlines()) == 2
    assert load_file(folder / "model.safetensors")


def test_a_run_may_stop_at_its_target(tmp_path: Path) -> None:
    summary = run_in_process(small(tmp_path, target=0.01, **{"stop-at-target": True}))
    assert (summary.rounds, summary.rounds_to_target) == (1, 1)


def test_models_may_be_tested_in_every_nth_round_and_in_the_last(tmp_path: Path) -> None:
    """As if the other rounds' tests were struck out: training is the same."""
    summaries, histories = [], []
    for every in (1, 2):
        config = small(tmp_path, rounds=5, target=0.01, **{"evaluate-every": every})
        summaries.append(run_in_process(config))
        lines = (tmp_path / "run/history.jsonl").read_text().splitlines()
        histories.append([json.loads(line) for line in lines])
    each, some = histories
    assert ["test-loss" in row for row in some] == [False, True, False, True, True]
    for t in (1, 3, 4):
        for name in ("test-loss", "test-accuracy"):
            assert some[t][name] == each[t][name]
    assert [row["train-loss"] for row in some] == [row["train-loss"] for row in each]
    first, second = summaries
    assert second.model_sha256 == first.model_sha256
    assert (second.rounds, first.rounds_to_target, second.rounds_to_target) == (5, 1, 2)
    assert second.final_accuracy == first.final_accuracy
    assert second.best_accuracy == max(each[t]["test-accuracy"] for t in (1, 3, 4))


def test_a_target_is_looked_for_where_models_are_tested(tmp_path: Path) -> None:
    keys = {"stop-at-target": True, "evaluate-every": 2}
    assert run_in_process(small(tmp_path, rounds=5, target=0.01, **keys)).rounds == 2


def test_the_last_exchange_is_tested_where_rounds_are_skipped(tmp_path: Path) -> None:
    keys = {"algorithm": "fedpd", "params": "eta=1 p=0.5", "fraction": 1.0, "evaluate-every": 100}
    run_in_process(small(tmp_path, rounds=12, steps=1, **keys))
    rows = [json.loads(row) for row in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert 1 < len(rows) < 12
    assert ["test-loss" in row for row in rows] == [False] * (len(rows) - 1) + [True]


def test_clients_may_evaluate_on_data_of_their_own(tmp_path: Path) -> None:
    config = small(tmp_path, **{"local-test": 0.2, "fraction-evaluate": 0.5})
    run_in_process(config)
    row = json.loads((tmp_path / "run/history.jsonl").read_text().splitlines()[0])
    assert row["eval-clients-used"] == 10
    assert 0.0 <= row["own-accuracy"] <= 1.0
    assert row["eval-accuracy-min"] <= row["eval-accuracy"] <= row["eval-accuracy-max"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algoritm": "fedavg"}, r"unknown run-config keys \['algoritm'\]; known: \['algorithm', "),
        ({"algorithm": "fedsvrg"}, r"unknown algorithm 'fedsvrg'; known: .*'fedavg'"),
        ({"dataset": "no-such-set"}, "no-such-set"),
        ({"model": "resnet-1000"}, r"unknown model 'resnet-1000', known are logistic, "),
        ({"partition": "sorted"}, r"unknown partition 'sorted', known are iid, "),
        ({"solver": "newton"}, r"unknown solver 'newton'; known: "),
        ({"params": "rho=0"}, r"rho must be > 0, got 0"),
        ({"params": "mu=1"}, r"fedadmm has no hyperparameter \['mu'\]; it has \['rho', 'eta', "),
        ({"params": "rho"}, r"a hyperparameter is given as name=value, got 'rho'"),
        ({"evaluate-every": 0}, r"evaluate_every must be >= 1, got 0"),
        ({"fraction": 1.5}, r"fraction must be > 0 and <= 1, got 1.5"),
        ({"clients": 5000}, r"clients must be from 1 to 1437 \(samples\), got 5000"),
        ({"clients": 1000}, r"shards must be at most 1437 \(samples\), got 2000"),
        ({"rounds": 0}, r"rounds must be >= 1, got 0"),
        ({"timeout": 0.0}, r"timeout must be > 0, got 0.0"),
        ({"rounds": "three"}, r"rounds must be of type int, got 'three'"),
        ({"momentum": True}, r"momentum must be of type float, got True"),
        ({"state-dir": "here"}, r"state-dir must be an absolute path, got 'here'"),
        ({"fraction-evaluate": 0.5}, r"fraction-evaluate > 0 needs local-test > 0"),
        ({"dtype": "int8"}, r"dtype must be one of \['float32', 'float64', 'bf.*, got 'int8'"),
        ({"device": "cuda"}, r"device is 'cuda', which this process .* does not see"),
        ({"output": "/proc/results"}, r"the results folder /proc/results cannot be written"),
        ({"solver": "adagrad", "momentum": 0.9}, r"solver 'adagrad' has no momentum"),
    ],
)
def test_bad_input_is_refused_before_any_round(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rounds: list[RoundInfo] = []
    with pytest.raises(ValueError, match=message):
        run_in_process(RunConfig.parse({"output": str(tmp_path / "run")} | keys), [rounds.append])
    assert rounds == []


def test_a_state_directory_of_another_algorithm_or_model_is_refused(tmp_path: Path) -> None:
    state = {"state-dir": str(tmp_path / "state")}
    run_in_process(small(tmp_path, **state))
    with pytest.raises(StateError, match="not of 'fedadmm'"):
        run_in_process(small(tmp_path, model="mlp", **state))


@pytest.mark.parametrize(
    "datasets_folder", ["few", pytest.param("all", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize(
    "dataset",
    ["synthetic", "mnist", pytest.param("fashion_mnist", marks=pytest.mark.slow), "cifar10"],
)
@pytest.mark.parametrize("algorithm", STRATEGIES)
def test_every_default_is_a_setting_that_runs(
    algorithm: str, dataset: str, datasets_folder: Path, tmp_path: Path
) -> None:
    given = {"clients": 10, "rounds": 1, "steps": 1, "fraction": -1.0}
    config = small(tmp_path, algorithm=algorithm, dataset=dataset, **given)
    if config.fraction < 1.0:
        config = replace(config, fraction=0.2)
    assert run_in_process(config).finished


def test_params_survive_the_way_to_the_apps_and_back() -> None:
    params = {"rho": {0: 0.01, 40: 0.1}, "eta": "fraction", "tracking": "global"}
    assert parse_params(format_params(params)) == params


def test_compare_gives_each_knob_to_the_algorithms_that_have_it(tmp_path: Path) -> None:
    params = ["mu=0.3", "fedadmm.rho=0.2", "weights=uniform"]
    avg, prox, admm = configs_for(["fedavg", "fedprox", "fedadmm"], params, {}, tmp_path)
    assert parse_params(avg.params) == {"weights": "uniform"}
    assert parse_params(prox.params) == {"mu": 0.3, "weights": "uniform"}
    assert parse_params(admm.params)["rho"] == 0.2
    with pytest.raises(ValueError, match="no algorithm here has the hyperparameter 'sigma'"):
        configs_for(["fedavg"], ["sigma=1"], {}, tmp_path)
    assert all("rho" not in hyperparameters_of(name) for name in ("fedavg", "fedprox"))


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
    ],
)
def test_compare_refuses_bad_arguments_with_exit_code_2(
    arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*arguments.split(), "--output", str(tmp_path)])
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_number_of_nodes_must_be_that_of_clients(tmp_path: Path) -> None:
    config = small(tmp_path)
    with pytest.raises(ValueError, match=r"clients=20, but 21 nodes are connected: flwr run "):
        run(config, InProcessGrid(app, 21, run_config=config.to_run_config()))


def test_a_run_in_which_every_client_fails_says_why(tmp_path: Path) -> None:
    config = small(tmp_path)

    def broken(context: Any) -> Any:
        raise OSError("no data here")

    with pytest.raises(RuntimeError, match=r"of 3 rounds in a row was usable: .* OSError: no data"):
        run(config, InProcessGrid(client_app(broken), 20, run_config=config.to_run_config()))


def refused(error: type[Exception], said: str, config: RunConfig) -> None:
    with pytest.raises(error, match=said):
        run_in_process(config)


def test_a_results_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    """A second one is refused before it writes anything, and the first goes on to its end."""
    config = small(tmp_path, algorithm="fedavg")
    said = r"run is in use by run fedavg-[0-9a-f]{16} \(process \d+\): wait until"

    def second(info: RoundInfo) -> None:
        before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        refused(ValueError, said, config)
        refused(ValueError, said, small(tmp_path, algorithm="fedprox"))
        assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before

    run_in_process(config, [second])
    assert len(read_history(tmp_path / "run/history.jsonl")) == 3
    assert run_in_process(config).finished


def test_a_state_directory_is_one_runs(tmp_path: Path) -> None:
    """Also when that is over; another directory, or an emptied one, does for the next."""
    first = small(tmp_path, **{"state-dir": str(tmp_path / "state")})
    summary = run_in_process(first)
    second = replace(first, output=str(tmp_path / "second"))
    run_id = json.loads((tmp_path / "run/run.lock").read_text())["run"]
    said = f"fedadmm holds the state of run '{run_id}': choose another state-dir, or delete"
    refused(StateError, said, second)
    refused(StateError, said, first)
    assert not (tmp_path / "second/history.jsonl").exists()
    shutil.rmtree(tmp_path / "state/fedadmm")
    assert run_in_process(second).model_sha256 == summary.model_sha256


def test_a_comparison_replaces_the_states_of_its_own_cells_and_no_others(tmp_path: Path) -> None:
    command = ["--algorithms", "fedadmm", "--clients", "20", "--rounds", "2", "--fraction", "0.25"]
    states = ["--state-dir", str(tmp_path / "state")]
    main([*command, *states, "--output", str(tmp_path / "one")])
    (tmp_path / "one/fedadmm/summary.json").unlink()  # as if it had been killed
    main([*command, *states, "--output", str(tmp_path / "one")])
    before = sorted((tmp_path / "state").rglob("*"))
    with pytest.raises(SystemExit):
        main([*command, *states, "--output", str(tmp_path / "other")])
    assert sorted((tmp_path / "state").rglob("*")) == before


def test_a_run_whose_rounds_were_all_void_fails_and_is_not_finished(tmp_path: Path) -> None:
    def lost(request: Message, reply: Message) -> Message | None:
        return None if request.metadata.message_type == "train" else reply

    config = small(tmp_path, **{"lost-rounds": 0})
    federation = InProcessGrid(app, 20, run_config=config.to_run_config(), fault=lost)
    with pytest.raises(RuntimeError, match=r"every round was void \(3 of 3\): the model is still"):
        run(config, federation)
    assert not json.loads((tmp_path / "run/summary.json").read_text())["finished"]
    assert len(read_history(tmp_path / "run/history.jsonl")) == 3


@pytest.mark.parametrize("stored", [None, "", "[]", '{"params": 3}'])
def test_a_run_without_legible_settings_is_not_resumed(stored: str | None, tmp_path: Path) -> None:
    config = small(tmp_path, algorithm="fedavg", **{"checkpoint-every": 1, "resume": True})
    run_in_process(config)
    settings = tmp_path / "run/config.json"
    settings.unlink() if stored is None else settings.write_text(stored)
    refused(ValueError, r"config\.json, by which the run is resumed, is damaged", config)


def test_one_state_directory_serves_several_algorithms(tmp_path: Path) -> None:
    state = {"state-dir": str(tmp_path / "state")}
    for algorithm in ("fedadmm", "fedavg"):
        run_in_process(small(tmp_path, algorithm=algorithm, **state))
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["fedadmm"]


def test_compare_refuses_bad_input_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simulations.lab.compare", "--algorithms", "fedavg,fedsvrg"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "unknown algorithms ['fedsvrg']; known: ['ditto'" in done.stderr
    assert "Traceback" not in done.stderr


def test_numbers_of_a_run_config_may_be_integers_where_floats_are_due() -> None:
    assert RunConfig.parse({"lr": 1}).lr == 1.0
    assert isinstance(RunConfig.parse({"lr": 1}).lr, float)
    assert np.isclose(RunConfig.parse({"fraction": 1}).fraction, 1.0)


@pytest.mark.parametrize(("p", "rounds"), [(0.5, 40), (0.99, 1)])
def test_the_rate_decays_over_the_exchanges_in_which_schedules_are_read(
    p: float, rounds: int
) -> None:
    config = RunConfig.parse(
        {"algorithm": "fedpd", "params": f"p={p}", "rounds": rounds, "lr": 0.4, "lr-decay": True}
    )
    strategy = config.strategy()
    exchanges = strategy.exchanges_in(rounds)
    assert exchanges < rounds
    assert strategy.local["lr"] == step_decay(0.4, max(exchanges, 1))


# ---- clients' states beyond memory ---------------------------------------------------------------


@pytest.mark.parametrize("megabytes", [0, 1, 1000])
def test_states_beyond_a_size_go_to_a_file_without_a_name_and_the_model_is_the_same_to_the_bit(
    megabytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """120 states of 10 to 20 kB: above 1 MB, far below 1000."""
    keys = {"clients": 120, "rounds": 3, "fraction": 0.5, "model": "mlp", "steps": 1}
    expected = run_in_process(small(tmp_path, **keys)).model_sha256
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen: list[list[Path]] = []
    caplog.clear()
    config = small(tmp_path, **keys, **{"state-memory": megabytes})
    summary = run_in_process(config, [lambda info: seen.append(list(temporary.iterdir()))])
    assert summary.model_sha256 == expected
    assert seen == [[], [], []]  # so that nothing is left even where the process is killed
    said = [r.getMessage() for r in caplog.records if "temporary file" in r.getMessage()]
    assert len(said) == (megabytes < 1000)
    assert all(f"{megabytes} MB" in line and str(temporary) in line for line in said)


@pytest.mark.parametrize("limit", [0, 150, 10**9])
def test_never_are_more_states_in_memory_than_the_limit_and_none_is_lost(limit: int) -> None:
    """States that grow, shrink and end, of arrays, numbers and words."""
    app, sizes = ClientApp(), [0, 3, 5, 1, 0, 7, 2]
    expected: dict[int, RecordDict] = {}

    @app.train()
    def train(message: Message, context: Any) -> Message:
        node, turn = context.node_id, context.state.metric_records.get("turn", {"n": 0})["n"]
        assert context.state == expected.get(node, RecordDict())
        array = Array(np.arange(sizes[turn], dtype=np.float64) + turn)
        expected[node] = RecordDict(
            {
                "array": ArrayRecord({"w": array}),
                "turn": MetricRecord({"n": turn + 1}),
                "word": ConfigRecord({"said": f"{node} in {turn}"}),
            }
        )
        context.state = RecordDict(dict(expected[node]))
        return Message(RecordDict(), reply_to=message)

    federation = InProcessGrid(app, 5, state_memory=limit)
    for _ in sizes:
        requests = [Message(RecordDict(), node, "train") for node in federation.get_node_ids()]
        assert not any(reply.has_error() for reply in federation.send_and_receive(requests))
        held = [context.state.array_records for context in federation.contexts.values()]
        arrays = [
            array for records in held for record in records.values() for array in record.values()
        ]
        assert sum(len(array.data) for array in arrays) <= limit


def test_where_a_disk_is_full_the_error_names_it_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(data: bytes) -> int:
        raise OSError(28, "No space left on device")

    file = SimpleNamespace(seek=int, write=no_room, flush=int, close=list)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: file)
    federation = InProcessGrid(ClientApp(), 1, state_memory=0)
    (context,) = federation.contexts.values()
    context.state["array"] = ArrayRecord({"w": Array(np.ones(3))})
    request = Message(RecordDict(), context.node_id, "train")
    with pytest.raises(OSError, match=r"states do not fit into .* \(TMPDIR names another .* space"):
        federation.push_messages([request])
