"""A request's work has a ceiling."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from laws import TABLE, Row, every_algorithm
from local_work import PD, START, TWO, fit, refused
from problems import make_client_app, quadratics, to_record

from clients import CLIENTS, ContextStore
from clients.base import MAX_STEPS
from clients.node.in_process import InProcessGrid
from simulations.config import RunConfig


def asked_of(row: Row, **options: Any) -> tuple[dict[str, Any], list[Message]]:
    """The metrics of a first round with these strategy and client options, and its messages."""
    clients = {name: options.pop(name) for name in ("max_steps",) if name in options}
    seen: list[Message] = []

    def note(_: Message, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            seen.append(reply)
        return reply

    def limited(*args: Any, **given: Any) -> Any:
        return CLIENTS[row.name](*args, **given, **clients)

    (q, *_) = quadratics(1)
    app = make_client_app([q], client=limited, store=ContextStore)
    strategy = row.strategy(**options)
    strategy.start(InProcessGrid(app, 1, fault=note), to_record(START), 1)
    return dict(strategy.result.train_metrics_clientapp.get(1, {})), seen


SETTINGS = {"solver": "sgd", "lr": 0.01, "epochs": 3, "batch-size": 2}


@every_algorithm
def test_a_client_takes_requests_up_to_its_ceiling_and_refuses_the_next(row: Row) -> None:
    """Whatever multiplies the steps is in the estimate: it bounds what is then reported."""
    _, (reply,) = asked_of(row, local=SETTINGS, max_steps=1)
    if row.name == "fedsgd":
        assert not reply.has_error()
        return
    reason = reply.error.reason
    found = re.search(
        r"asks for up to ([\d,]+) local steps, and the client takes at most 1 ", reason
    )
    assert found, reason
    most = int(found[1].replace(",", ""))
    metrics, (reply,) = asked_of(row, local=SETTINGS, max_steps=most)
    assert not reply.has_error()
    assert metrics["steps"] <= most
    _, (reply,) = asked_of(row, local=SETTINGS, max_steps=most - 1)
    assert f"takes at most {most - 1:,} (its max_steps)" in reply.error.reason


ABSURD: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {"steps": 10**12}),
    ("fedavg", {"epochs": 10**12}),
    ("fedavg", {"epochs": 10**12, "random-epochs": True}),
    ("fedavg", {"solver": "lbfgs", "solver-params": "max_iter=1000000000000"}),
    ("fedavg", {"solver": "lbfgs", "solver-params": "max_iter=1e999"}),
    ("per-fedavg", {"steps": 10**12}),
    ("per-fedbc", {"inner-steps": 10**12}),
    ("pfedme", {"inner-steps": 10**12}),
    ("pfedme", {"inner-steps": 2 * 10**3, "epochs": 2 * 10**3}),
    ("fedbcd-i", {"offline-rounds": 10**12}),
    ("fedpd", {"algorithm-rounds": 10**12}),
    ("fedpd", {"algorithm-rounds": 2 * 10**3, "epochs": 2 * 10**3}),
    ("fedpd-vr", {"inner-steps": 10**12}),
    ("fedpd-vr", {"inner-batch": 10**12}),
]


@pytest.mark.parametrize(("algorithm", "changes"), ABSURD, ids=str)
def test_an_absurd_request_is_refused_before_any_work(
    algorithm: str, changes: dict[str, Any]
) -> None:
    row = next(row for row in TABLE if row.name == algorithm)
    strategy = row.strategy(local={"solver": "gd"} if algorithm == "pfedme" else {})
    asked = strategy.request(1, 0) | changes
    words = refused(lambda: fit(algorithm, asked))
    assert f"the client takes at most {MAX_STEPS:,} (its max_steps)" in words
    assert "the request asks for up to" in words


WORK = ["algorithm-rounds", "inner-steps"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product([*WORK, "full-every"], [0, -3, 1.5, True, "4"]),
        *itertools.product(WORK, [10**40]),
    ],
)
def test_a_count_in_a_request_is_a_whole_number_above_zero(name: str, value: Any) -> None:
    words = refused(lambda: fit("fedpd-vr", PD | TWO | {name: value}))
    assert words.startswith(f"{name} must be an integer >= 1")


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_a_ceiling_is_a_whole_number_above_zero(value: Any) -> None:
    assert "max_steps must be an integer >= 1" in refused(
        lambda: fit("fedavg", {}, max_steps=value)
    )


def test_a_runs_ceiling_reaches_its_clients(tmp_path: Path) -> None:
    from simulations.client_app import client_fn
    from simulations.problems import fresh_model

    run = {"algorithm": "fedavg", "clients": 4, "max-steps": 77, "output": str(tmp_path)}
    config = RunConfig.parse(run).to_run_config()
    context = next(iter(InProcessGrid(make_client_app([]), 1, run_config=config).contexts.values()))
    client = client_fn(context)
    model = [array.numpy() for array in fresh_model(RunConfig.parse(run)).state_dict().values()]
    assert "the client takes at most 77 (its max_steps)" in refused(
        lambda: client.fit(model, {"algorithm": "fedavg", "steps": 78})
    )
