"""Whatever a client calls its numbers, no number of the server or of the other phase changes.

Mutants tried by hand, each caught here: a name of SERVER left out; the names that `evaluate_fn`
reports forgotten in the rounds without a test; evaluation's names as they come; a client's
"...-mean" kept; the files' own columns written first; a custom function's names as they come.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from hypothesis import given
from hypothesis import strategies as st
from laws import START, TABLE, Row, local
from problems import NODES, grid, quadratics, to_record, to_vector

from clients.node.in_process import InProcessGrid
from fl_strategies import (
    STRATEGIES,
    BestModel,
    ClientHistory,
    EarlyStop,
    FedAvg,
    FederatedStrategy,
    History,
)
from fl_strategies.core.metric_names import (
    EVALUATED,
    SERVER,
    SPREAD,
    TESTED,
    in_evaluation,
    in_training,
)
from fl_strategies.server.callbacks import RoundInfo
from simulations import client_app, experiment
from simulations.config import RunConfig
from simulations.figures import read_history
from simulations.lab import fairness
from simulations.tables import curve, run_figures

CLIENTS, ROUNDS = 4, 3
HOSTILE = 1
Names = Mapping[str, set[str]]
"""By type of message, the names of numbers in replies."""


def numbers_of(content: RecordDict) -> MetricRecord:
    record: MetricRecord = next(iter(content.metric_records.values()))
    return record


class Forger:
    """A fault that adds numbers ``value`` under ``names`` to the replies of one node.

    ``reported`` keeps the names in all replies as they were; ``lost`` says which never arrive.
    """

    def __init__(
        self,
        node: int,
        names: Names,
        value: float = 1.7e308,
        lost: Callable[[Message], bool] = lambda _: False,
    ) -> None:
        self.node, self.names, self.value, self.lost = node, names, value, lost
        self.reported: dict[str, set[str]] = {"train": set(), "evaluate": set()}

    def __call__(self, request: Message, reply: Message) -> Message | None:
        kind = request.metadata.message_type
        if kind not in self.reported:
            return reply
        record = numbers_of(reply.content)
        self.reported[kind] |= record.keys()
        if request.metadata.dst_node_id == self.node:
            for name in sorted(self.names.get(kind, set()) - record.keys()):
                record[name] = self.value
        return None if self.lost(request) else reply


class Outcome(NamedTuple):
    model: np.ndarray
    infos: list[RoundInfo]
    names: set[str]
    """All names of rounds' numbers."""
    in_rows: set[str]
    """All names of numbers in clients' rows."""
    reported: Names


def every_second(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
    """Return the server's own test, in every second round; one of its names is a usual one."""
    if server_round % 2:
        return None
    return MetricRecord(
        {
            "test-accuracy": 0.1 + server_round / 100,
            "test-loss": float(np.abs(to_vector(arrays)).sum()),
            "accuracy": 0.5,
        }
    )


class IfTested:
    def __init__(self, callback: Callable[[RoundInfo], bool | None]) -> None:
        self.callback = callback

    def __call__(self, info: RoundInfo) -> bool | None:
        return self.callback(info) if "test-accuracy" in info.metrics else None


def outcome(
    make: Callable[..., FederatedStrategy],
    names: Names,
    value: float = 1.7e308,
    lost: Callable[[Message], bool] = lambda _: False,
    **options: Any,
) -> Outcome:
    forger = Forger(NODES[HOSTILE], names, value, lost)
    infos: list[RoundInfo] = []
    strategy = make(
        local=local(),
        fraction_evaluate=1.0,
        callbacks=[infos.append, IfTested(EarlyStop(target=4.0))],
        **options,
    )
    federation = grid(quadratics(CLIENTS), fault=forger)
    arrays = strategy.start(federation, to_record(START), ROUNDS, evaluate_fn=every_second).arrays
    assert len(infos) == strategy.run.num_rounds
    found = {name for info in infos for name in info.metrics}
    in_rows = {name for info in infos for row in info.clients.values() for name in row}
    return Outcome(to_vector(arrays), infos, found, in_rows, forger.reported)


def assert_deaf(honest: Outcome, forged: Outcome) -> None:
    """Check that every number of the honest run is there, as it was, and none under its names."""
    np.testing.assert_array_equal(forged.model, honest.model)
    for before, after in zip(honest.infos, forged.infos, strict=True):
        assert after.metrics["seconds"] < 1e6
        assert after.metrics.keys() & honest.names == before.metrics.keys() & honest.names
        for name in before.metrics.keys() - {"seconds"}:
            np.testing.assert_equal(after.metrics[name], before.metrics[name], err_msg=name)
        assert after.clients.keys() == before.clients.keys()
        for client, row in before.clients.items():
            found = after.clients[client]
            assert {name: found[name] for name in found.keys() & honest.in_rows} == row


def forgeries(honest: Outcome) -> Names:
    """Return all names but those that clients report in that phase themselves."""
    names = honest.names | honest.in_rows
    bare = {name.removeprefix("eval-") for name in names}
    wanted = names | bare | SERVER | {"test-other", "own-loss", "num-examples-mean"}
    return {kind: wanted - reported for kind, reported in honest.reported.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_no_name_of_a_clients_reaches_a_number_that_is_not_its_own(row: Row) -> None:
    honest = outcome(row.strategy, {})
    assert_deaf(honest, outcome(row.strategy, forgeries(honest)))


@pytest.mark.parametrize("value", [0.0, -3.0, 4.0, 10**15])
def test_no_value_that_a_client_reports_reaches_a_number_that_is_not_its_own(value: float) -> None:
    honest = outcome(FedAvg, {})
    assert_deaf(honest, outcome(FedAvg, forgeries(honest), value))


@pytest.mark.parametrize("name", ["fedavg", "fedpd", "fedbc"])
def test_in_a_void_round_no_clients_name_reaches_a_number_that_is_not_its_own(name: str) -> None:
    """Where the server has no shares, nor a test."""
    row = next(row for row in TABLE if row.name == name)
    hyperparameters: dict[str, Any] = {"missing": "proceed"} if name == "fedpd" else {}
    sent = 0

    def first_of_all(request: Message) -> bool:
        nonlocal sent
        trains = request.metadata.message_type == "train"
        sent += trains
        return trains and sent <= 1

    options = {**hyperparameters, "lost": first_of_all, "min_replies": CLIENTS}
    honest = outcome(row.strategy, {}, **options)
    assert "weight-share-largest" not in honest.infos[0].metrics
    assert "weight-share-largest" in honest.infos[1].metrics
    sent = 0
    assert_deaf(honest, outcome(row.strategy, forgeries(honest), **options))


def test_no_clients_name_reaches_the_servers_numbers_through_a_users_metrics_function() -> None:
    def handed_on(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        found: MetricRecord = aggregate_metricrecords(contents, weighted_by)
        return found

    options = {"train_metrics_aggr_fn": handed_on, "evaluate_metrics_aggr_fn": handed_on}
    honest = outcome(FedAvg, {}, **options)
    assert honest.infos[0].metrics["train-loss"] > 0
    assert_deaf(honest, outcome(FedAvg, forgeries(honest), 4.0, **options))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_number_that_no_client_reports_is_declared_the_servers(row: Row) -> None:
    honest = outcome(row.strategy, {})
    theirs = {name for reported in honest.reported.values() for name in reported}
    theirs |= {f"{name}{end}" for name in theirs for end in SPREAD}
    own = (honest.names | honest.in_rows) - theirs - {"test-accuracy", "test-loss", "accuracy"}
    assert own <= SERVER.union(STRATEGIES[row.name].reports)
    assert {"clients-used", "eval-clients-used", "seconds", "weight-share"} <= own


def test_numbers_of_the_clients_own_are_found_under_their_names_or_client_names(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = {
        "train": {"reward", "eval-reward", "seconds", "loss-mean", "client-seconds", "accuracy"},
        "evaluate": {"accuracy", "own-reward", "train-loss", "clients-used", "eval-samples"},
    }
    forged = outcome(FedAvg, names, 7.0)
    row, metrics = forged.infos[0].clients[HOSTILE], forged.infos[0].metrics
    trained = {
        "reward",
        "client-eval-reward",
        "client-seconds",
        "client-loss-mean",
        "client-client-seconds",
    }
    evaluated = {
        "eval-accuracy",
        "own-reward",
        "eval-train-loss",
        "eval-client-clients-used",
        "eval-client-samples",
    }
    for name in trained | evaluated:
        assert row[name] == 7.0, name
        assert metrics[name] == metrics[f"{name}-variance"] + 7.0 == 7.0, name
    # the server has an "accuracy" too, which it reported before the first round
    assert (row["accuracy"], metrics["client-accuracy"]) == (7.0, 7.0)
    assert ["accuracy" in info.metrics for info in forged.infos] == [False, True, False]
    told = [line for line in caplog.messages if line.startswith("clients use names")]
    assert told == [
        "clients use names of the server's, and get others:"
        " ['client-seconds', 'eval-reward', 'loss-mean', 'seconds']"
    ]


def test_names_of_the_servers_are_told_on_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    outcome(FedAvg, {"train": {f"test-\n\x1b[2J{number}" for number in range(40)}})
    (told,) = (line for line in caplog.messages if line.startswith("clients use names"))
    assert told.isprintable()
    assert len(told) < 400


def test_a_client_that_reports_a_number_twice_means_the_full_name() -> None:
    honest = outcome(FedAvg, {})
    forged = outcome(FedAvg, {"evaluate": {"loss"}})
    assert forged.infos[0].metrics["eval-loss"] == honest.infos[0].metrics["eval-loss"]
    assert forged.names == honest.names


parts = st.sampled_from(
    ["", *SERVER, *SPREAD, TESTED, *EVALUATED, "client-", "loss", "train-loss", "accuracy", "-"]
)
names = st.lists(parts, min_size=1, max_size=4).map("".join) | st.text(max_size=8)


@given(names, names)
def test_no_name_of_training_becomes_anothers_or_the_same_as_another(one: str, two: str) -> None:
    called = in_training(one)
    assert called not in SERVER
    assert not called.startswith((TESTED, *EVALUATED))
    assert called.startswith("client-") or not called.endswith(SPREAD)
    assert (called == in_training(two)) is (one == two)


@given(names, names)
@pytest.mark.slow
def test_no_name_of_evaluation_becomes_anothers(one: str, two: str) -> None:
    called = in_evaluation(one)
    assert called not in SERVER
    assert called.startswith(EVALUATED)
    assert called != in_training(two)
    assert called.startswith("eval-client-") or not called.endswith(SPREAD)


# ---- files and tables ---------------------------------------------------------------------------


def test_the_files_own_columns_are_theirs(tmp_path: Path) -> None:
    """Also where a strategy of one's own puts such names in."""
    info = RoundInfo(
        3, 9, to_record(START), {"round": 8.0, "x": 1.0}, {5: {"client": 1, "round": 2, "x": 1.0}}
    )
    for kind, row in (
        (History, {"round": 3, "x": 1.0}),
        (ClientHistory, {"round": 3, "client": 5, "x": 1.0}),
    ):
        path = tmp_path / f"{kind.__name__}.jsonl"
        kind(path)(info)
        assert list(json.loads(path.read_text()).items()) == list(row.items())


def simulated(folder: Path, algorithm: str, names: Names) -> tuple[Forger, dict[str, Any]]:
    """Return what a run's files and tables say, but for the time it took."""
    config = RunConfig.parse(
        {
            "algorithm": algorithm,
            "dataset": "synthetic",
            "clients": 4,
            "rounds": 3,
            "epochs": 1,
            "fraction": 1.0,
            "fraction-evaluate": 1.0,
            "evaluate-every": 2,
            "stop-at-target": True,
            "target": 1.0,
            "checkpoint-every": 1,
            "checkpoint-keep": 1,
            "output": str(folder),
            **({"state-dir": f"{folder}-states"} if algorithm == "fedpd" else {}),
        }
    )
    forger = Forger(NODES[HOSTILE], names)
    best = BestModel(folder.parent / f"{folder.name}-best")
    federation = InProcessGrid(client_app.app, 4, run_config=config.to_run_config(), fault=forger)
    summary = experiment.run(config, federation, [best])
    fairness.fairness({"run": folder}, folder)
    found = {
        "summary": vars(summary),
        "curve": curve(config),
        "figures": run_figures(config, vars(summary)),
        "best": (best.best, best.best_round),
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "tables": [
            list(csv.DictReader((folder / name).read_text().splitlines()))
            for name in ("fairness.csv", "clients.csv")
        ],
        "clients": [
            [row["round"], row["client"], row["samples"], row["eval-samples"]]
            for row in read_history(folder / "clients.jsonl")
        ],
    }
    return forger, without_times(found)


def without_times(found: Any) -> Any:
    if isinstance(found, dict):
        return {n: without_times(v) for n, v in found.items() if not n.startswith("seconds")}
    return [without_times(value) for value in found] if isinstance(found, list) else found


@pytest.mark.parametrize("algorithm", ["fedavg", "fedpd"])
def test_tables_and_checkpoints_do_not_hear_a_forgers_names(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairness, "draw", lambda *_: None)
    honest, expected = simulated(tmp_path / "honest", algorithm, {})
    rows = read_history(tmp_path / "honest/history.jsonl")
    rows += read_history(tmp_path / "honest/clients.jsonl")
    wanted = (
        {name for row in rows for name in row} | SERVER | {"algorithm", "seed", "gradient-norm2"}
    )
    names = {kind: wanted - reported for kind, reported in honest.reported.items()}
    _, found = simulated(tmp_path / "forged", algorithm, names)
    assert found.keys() == expected.keys()
    for what in expected:
        assert found[what] == expected[what]
