"""What one client reports decides nothing but what is said of this client.

One of 5 clients reports any finite number under any name, any number of steps, or any id. No run
ends, no clock counts more than the requests allow, and the results' files say of the server what
they say without it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MetricRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import START, TABLE, Row, every_algorithm, local
from problems import CLIENT_OF, grid, quadratics, to_record

from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, EarlyStop, FedAvg, FederatedStrategy
from fl_strategies.core.metric_names import SERVER
from fl_strategies.parts import Buffered, Clock, Deadline, Trace
from fl_strategies.server import timing
from fl_strategies.server.callbacks import LARGEST
from simulations.config import RunConfig
from simulations.experiment import run
from simulations.figures import PANELS, draw_curves
from simulations.tables import CLIENTS as OF_CLIENTS
from simulations.tables import algorithm_row, curve, markdown

CLIENTS, LIAR, ROUNDS = 5, 3, 3
PROCEED = {"fedpd": {"missing": "proceed"}, "fedpd-vr": {"missing": "proceed"}}

EXTREMES = [0.0, -5.0, 5e-324, 1e9, 2.0**63, LARGEST, -LARGEST, 1.7e308, -1.7e308]
NUMBERS = st.one_of(
    st.sampled_from(EXTREMES), st.floats(allow_nan=False, allow_infinity=False), st.integers(-9, 9)
)
READ = sorted(
    {*SERVER, *OF_CLIENTS.values(), "test-loss", "test-accuracy", "accuracy", "loss", "steps"}
    | {"eval-accuracy", "own-accuracy", "train-loss", "epochs", "work", "fresh", "device", "id"}
)
"""What tables, files and parts read, the server's and the clients'."""
NAMES = st.one_of(st.sampled_from(READ), st.text(min_size=1, max_size=12))
LISTS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=3)

Lies = Mapping[str, Any]


def lying(lies: Lies) -> Callable[[Message, Message], Message]:
    """Have the liar report ``lies``, but for its number of samples."""

    def fault(request: Message, reply: Message) -> Message:
        about = request.metadata
        if CLIENT_OF[about.dst_node_id] == LIAR and about.message_type in ("train", "evaluate"):
            numbers = next(iter(reply.content.metric_records.values()))
            for name, value in lies.items():
                numbers[name] = value
        return reply

    return fault


def of_the_server(row: Mapping[str, Any]) -> dict[str, Any]:
    """A round's numbers that do not depend on how long it took or on the liar's reply itself."""
    own = {*SERVER} - {"seconds", "bytes-saved", "virtual-seconds"}
    counted = ("clients-", "eval-clients-", "bytes-", "eval-bytes-", "samples", "eval-samples")
    return {
        name: value
        for name, value in row.items()
        if (name in own and not name.startswith((*counted, "data-share", "weight-share")))
        or name.startswith("test-")
    }


def rounds_of(row: Row, lies: Lies) -> list[Mapping[str, float]]:
    rounds: list[Mapping[str, float]] = []
    note = [EarlyStop("test-accuracy", target=2.0), lambda info: rounds.append(info.metrics)]
    strategy = row.strategy(local=local(), callbacks=note, **PROCEED.get(row.name, {}))
    tested = MetricRecord({"test-loss": 0.5, "test-accuracy": 0.5})
    on = grid(quadratics(CLIENTS), fault=lying(lies))
    assert str(strategy.start(on, to_record(START), ROUNDS, evaluate_fn=lambda *_: tested))
    assert len(rounds) == ROUNDS
    return rounds


@functools.cache
def honest_rounds(name: str) -> list[Mapping[str, float]]:
    return rounds_of(next(row for row in TABLE if row.name == name), {})


def test_the_server_has_its_names_whether_the_algorithm_reports_them_or_not() -> None:
    for strategy in STRATEGIES.values():
        assert {*strategy.reports} <= SERVER


@every_algorithm
@pytest.mark.sampled("fedadmm", "fedbcd-async")
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(lies=st.dictionaries(NAMES, st.one_of(NUMBERS, LISTS), max_size=4))
def test_no_metric_changes_what_is_said_of_the_server(row: Row, lies: Lies) -> None:
    lied, honest = rounds_of(row, lies), honest_rounds(row.name)
    assert [*map(of_the_server, lied)] == [*map(of_the_server, honest)]
    for one, other in zip(lied, honest, strict=True):
        assert other["clients-used"] - one["clients-used"] in (0, 1)


# ---- steps --------------------------------------------------------------------------------------


def timed(row: Row, folder: Path, pace: Any, lies: Lies, rounds: int = ROUNDS) -> FederatedStrategy:
    trace = folder / "trace"
    trace.write_text("0-1e6\n")
    made = row.strategy(local=local(), **PROCEED.get(row.name, {}))
    options: dict[str, Any] = {"availability": Trace(file=str(trace))}
    if made.counts_time:
        options = {}
    else:
        options |= {"clock": Clock(step=1.0), **({"pace": pace} if pace else {})}
    strategy = row.strategy(local=local(), **PROCEED.get(row.name, {}), **options)
    strategy.start(grid(quadratics(CLIENTS), fault=lying(lies)), to_record(START), rounds)
    return strategy


GRADIENTS = {"per-fedbc": 2, "fedrep": 4, "apfl": 2}
"""A step of an honest client counts once; these take several gradients, and each may count. The
head of FedRep, which there is none of here, has ten epochs, and the body four."""


def seconds_of(strategy: FederatedStrategy) -> list[float]:
    rows = strategy.result.train_metrics_clientapp.values()
    return [float(row["virtual-seconds"]) for row in rows]  # type: ignore[arg-type]


@every_algorithm
@pytest.mark.sampled
def test_no_clock_counts_more_steps_than_a_request_allows(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest clients report all of them here; with a trace everybody is asked in round 2, too."""
    told: list[str] = []
    monkeypatch.setattr(timing, "log_once", told.append)
    honest = timed(row, tmp_path, None, {}, rounds=2)
    assert told == []
    for value in (1e298, 1e9, 0.0, -3.0, [1e9]):
        lied = timed(row, tmp_path, None, {"steps": value, "work": value}, rounds=2)
        assert seconds_of(lied)[-1] <= GRADIENTS.get(row.name, 1) * seconds_of(honest)[-1]
        asked = [row["clients-asked"] for row in lied.result.train_metrics_clientapp.values()]
        assert len(asked) == 2
        assert min(asked) == CLIENTS


@pytest.mark.parametrize(
    "pace", [Deadline(seconds=1e3), Deadline(over_select=2.0), Buffered(size=2)]
)
def test_no_pace_counts_more_steps_than_a_request_allows(pace: Any, tmp_path: Path) -> None:
    row = Row("fedavg")
    honest, lied = (timed(row, tmp_path, pace, lies) for lies in ({}, {"steps": 1e298}))
    assert seconds_of(lied) == seconds_of(honest)


# ---- ids ----------------------------------------------------------------------------------------

SAID = ["client-id", "num-partitions", "any-of", "client-ids"]
IDS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=9), st.booleans(),
    st.lists(st.integers(-2, 9), max_size=3),
)  # fmt: skip


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(said=st.dictionaries(st.sampled_from(SAID), IDS))
def test_no_id_ends_a_run_or_takes_another_clients_place(said: dict[str, Any]) -> None:
    def fault(request: Message, reply: Message) -> Message:
        if CLIENT_OF[request.metadata.dst_node_id] == LIAR and "client" in reply.content:
            about = reply.content.config_records["client"]
            about.clear()
            for name, value in said.items():
                about[name] = value
        return reply

    used: list[set[int]] = []
    strategy = FedAvg(
        local=local(),
        fraction_evaluate=0.0,
        node_wait=0.01,
        clock=Clock(step=1.0, spread=0.5),
        callbacks=[lambda info: used.append({*info.clients})],
    )
    strategy.start(grid(quadratics(CLIENTS), fault=fault), to_record(START), 2, timeout=1.0)
    assert all({*range(CLIENTS)} - {LIAR} <= clients for clients in used)
    assert len(used) == 2


# ---- the results of an App's run ----------------------------------------------------------------

WORDS = ("algorithm", "rounds", "target", "rounds_to_target", "finished", "missing", "given_up")
FILES = {"summary.json", "model.safetensors", "history.jsonl", "clients.jsonl", "curve.png"}


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.parametrize("value", [-5.0, 1e9, LARGEST, 1.7e308])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedpd"])
def test_no_metric_destroys_the_files_of_a_run_or_its_tables(
    algorithm: str, value: float, tmp_path: Path
) -> None:
    configs, summaries = [], []
    for name, lies in (("honest", {}), ("lied", dict.fromkeys(READ, value))):
        folder = tmp_path / name
        config = RunConfig.parse(
            {"algorithm": algorithm, "clients": CLIENTS, "rounds": ROUNDS, "target": 0.01}
            | {"dataset": "digits", "output": str(folder), "fraction": 1.0, "lost-rounds": 0}
            | ({"params": "missing=proceed"} if algorithm == "fedpd" else {})
        )
        on = InProcessGrid(
            "simulations.client_app:app",
            CLIENTS,
            run_config=config.to_run_config(),
            fault=lying(lies),
        )
        run(config, on, quiet=True)
        configs.append(config)
        summaries.append(json.loads((folder / "summary.json").read_text()))
        assert {path.name for path in folder.iterdir()} >= FILES
    for name in WORDS:
        assert summaries[0][name] == summaries[1][name], name
    row = algorithm_row(configs, summaries)
    assert (row["reached"], row["communication_rounds_to_target"]) == (2, 1)
    assert algorithm in markdown([row])
    rows = [line | {"seed": seed} for seed, config in enumerate(configs) for line in curve(config)]
    assert [line["round"] for line in rows] == [1, 2, 3] * 2
    draw_curves(rows, tmp_path / "curves.png", PANELS)
