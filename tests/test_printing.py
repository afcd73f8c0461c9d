"""What a person reads of a run: a short line of each round, each error once, no ids of nodes."""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from logging import DEBUG, INFO, WARNING
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from laws import START, Row, local, one_of_each_mechanism
from problems import CLIENT_OF, grid, quadratics, to_record
from torch.nn import Linear
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    FedAvgClient,
    Problem,
    client_app,
    client_id,
)
from clients.node.in_process import InProcessGrid
from fl_strategies import FedADMM, FedAvg, FederatedStrategy, NothingUsable
from fl_strategies.core.reasons import TRACEBACK, of_exception
from fl_strategies.server.run import round_line

LOGGER = logging.getLogger("fl_strategies")
ROUND = re.compile(
    r"round \d+/\d+: ([\w-]*loss -?[\d.e+-]+, )?([\w-]*accuracy [\d.e+-]+, )?"
    r"(\d+) of (\d+) clients( \(.+?\))?(, evaluation .+?)?, [\d.]+ s"
)


def shown(caplog: pytest.LogCaptureFixture, level: int = INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def round_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in shown(caplog) if re.match(r"round \d+/\d+: ", line)]


# ---- a round -------------------------------------------------------------------------------------


def troubled(message: Message, reply: Message) -> Message | None:
    """Client 1 gives no reply, client 2 an error, client 3 a model that is not finite."""
    client = CLIENT_OF[message.metadata.dst_node_id]
    if message.metadata.message_type != "train" or client in (0, 4):
        return reply
    if client == 1:
        return None
    if client == 2:
        return Message(Error(2, "out of memory"), reply_to=message)
    arrays = {name: Array(np.full(a.shape, np.nan)) for name, a in the(reply).items()}
    reply.content["arrays"] = ArrayRecord(arrays)
    return reply


def the(reply: Message) -> ArrayRecord:
    return next(iter(reply.content.array_records.values()))


def of_the_server(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"test-loss": 0.5, "test-accuracy": 0.9})


@one_of_each_mechanism
def test_a_round_is_one_line_of_loss_accuracy_clients_and_seconds(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = row.strategy(local=local())
    strategy.start(grid(quadratics(3)), to_record(START), 2, evaluate_fn=of_the_server)
    lines = round_lines(caplog)
    assert [line.split(":")[0] for line in lines] == ["round 1/2", "round 2/2"]
    for line in lines:
        found = ROUND.fullmatch(line)
        assert found, line
        assert (found[1], found[2]) == ("test-loss 0.5000, ", "test-accuracy 0.9000, ")
        assert found[3] == found[4]
        assert found[5] is None
        assert len(line) <= 160


@one_of_each_mechanism
def test_the_line_of_a_round_counts_what_was_lost_failed_and_rejected(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    row.strategy(local=local()).start(grid(quadratics(5), fault=troubled), to_record(START), 1)
    (line,) = round_lines(caplog)
    found = ROUND.fullmatch(line)
    assert found
    assert (found[3], found[4]) == ("2", "5")
    assert found[5] == " (1 lost, 1 failed, 1 rejected)"


def test_a_rounds_seconds_are_what_a_person_waited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round has what was done before it; tests and evaluation are in each."""
    steps, reads = [0], itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 * steps[0] + 1e-9 * next(reads))

    def tick(request: Message, reply: Message) -> Message:
        steps[0] += request.metadata.message_type in ("query", "query.describe", "evaluate")
        return reply

    def test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        steps[0] += 1
        return MetricRecord({"test-loss": 0.5})

    waited: list[float] = []
    strategy = FedAvg(local=local(), callbacks=[lambda info: waited.append(info.seconds)])
    strategy.start(grid(quadratics(2), fault=tick), to_record(START), 2, evaluate_fn=test)
    # two introductions, two descriptions, two evaluations, the tests before and after round 1
    assert np.round(waited, 3).tolist() == [800.0, 300.0]
    lines = round_lines(caplog)
    assert [line.rpartition(", ")[2] for line in lines] == ["800.0 s", "300.0 s"]
    ending = shown(caplog)[-3:]
    assert ending[0] == "fedavg: 2 rounds in 1100.0 s"
    assert ending[1].startswith("  result, round 2: test-loss 0.5000")
    assert ending[2].startswith("  best, round ")


@pytest.mark.parametrize(
    ("value", "clients"), list(product([1e300, -1e-300, float("nan"), 0.0], [1, 10**6]))
)
def test_a_line_has_at_most_160_characters_whatever_the_numbers(value: float, clients: int) -> None:
    counts = {
        f"{phase}clients-{what}": clients
        for phase in ("", "eval-")
        for what in ("asked", "used", "lost", "failed", "rejected")
    }
    long = {"x" * 200 + "-loss": value, "a\nround 9/9: loss": value}
    metrics = {**long, "evaluation-test-loss": value, "evaluation-accuracy": value, **counts}
    line = round_line(99_999, 99_999, metrics, 99_999.0)
    assert len(line) <= 160
    assert line.isprintable()
    assert line.endswith("99999.0 s")


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@one_of_each_mechanism
def test_loss_and_accuracy_of_a_round_are_of_one_model(
    row: Row, fraction: float, caplog: pytest.LogCaptureFixture
) -> None:
    def client_fn(context: Context) -> AnyAlgorithmClient:
        problem = Problem(Border(Linear(3, 3)), cross_entropy, torch.eye(3), torch.arange(3))
        me, store = client_id(context), ContextStore(context)
        return AnyAlgorithmClient(problem, client_id=me, test=problem, store=store)

    strategy = row.strategy(local=local(), fraction_evaluate=fraction)
    on = InProcessGrid(client_app(client_fn), 2)
    strategy.start(on, ArrayRecord(Linear(3, 3).state_dict()), 1)
    phase, optional = ("eval", "") if fraction else ("train", "?")  # some do not measure it
    pair = rf": {phase}-loss [\d.]+(, {phase}-accuracy [\d.]+){optional}, 2 of 2 clients"
    assert re.search(pair, round_lines(caplog)[0])


def test_the_servers_tests_are_shown_before_clients_evaluation_and_that_before_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.25})

    for options, given, said in (
        ({"fraction_evaluate": 0.0}, None, "train-loss "),
        ({}, None, "eval-loss "),
        ({}, evaluate, "eval-loss "),
        ({}, of_the_server, "test-loss 0.5000, test-accuracy 0.9000"),
    ):
        caplog.clear()
        strategy = FedAvg(local=local(), **options)
        strategy.start(grid(quadratics(2)), to_record(START), 1, evaluate_fn=given)
        (line,) = round_lines(caplog)
        assert line.startswith(f"round 1/1: {said}")
        assert ("accuracy 0.2500" in line) == (given is evaluate)


# ---- quiet, and the logger -----------------------------------------------------------------------


def run(strategy: FederatedStrategy, rounds: int = 1, **options: Any) -> None:
    strategy.start(grid(quadratics(5), **options), to_record(START), rounds)


def test_a_quiet_strategy_logs_warnings_alone(caplog: pytest.LogCaptureFixture) -> None:
    run(FedADMM(quiet=True, local=local()))
    assert shown(caplog) == []
    run(FedADMM(quiet=True, local=local()), fault=troubled)
    assert {record.levelno for record in caplog.records} == {DEBUG, WARNING}
    caplog.clear()
    run(FedADMM(local=local()))
    assert round_lines(caplog)


def test_the_level_of_this_packages_logger_and_flowers_are_independent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flower = logging.getLogger("flwr")
    for muted, heard in ((LOGGER, flower), (flower, LOGGER)):
        before, level = muted.level, heard.level
        muted.setLevel(logging.ERROR)
        try:
            muted.info("not this")
            heard.info("but this")
        finally:
            muted.setLevel(before)
        assert heard.level == level
    assert caplog.messages == ["but this", "but this"]


PROGRAM = """
import logging, sys
from fl_strategies.core.log import log
from flwr.common.logger import console_handler
if {root}:
    logging.basicConfig(level=logging.INFO)
if {moved}:
    console_handler.stream = sys.stdout  # as `flwr run` does
log(logging.INFO, "a line of ours")
log(logging.DEBUG, "only for debugging")
"""


@pytest.mark.parametrize(
    ("root", "moved", "level"),
    [(False, False, ""), (False, True, ""), (True, False, ""), (False, False, "DEBUG")],
    ids=["terminal", "flwr-run", "colab", "debug"],
)
@pytest.mark.sampled("flwr-run")
def test_a_line_is_printed_once_where_flowers_lines_are(
    root: bool, moved: bool, level: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(root=root, moved=moved)],
        env=os.environ | {"FLWR_LOG_LEVEL": level},
        capture_output=True,
        text=True,
        check=True,
    )
    here, other = (done.stdout, done.stderr) if moved else (done.stderr, done.stdout)
    assert here.count("a line of ours") == 1
    assert "a line of ours" not in other
    assert here.count("only for debugging") == (level == "DEBUG")


# ---- a client's error ----------------------------------------------------------------------------


def users_mistake() -> None:
    raise KeyError("label")


def in_torch() -> None:
    torch.zeros(2) @ torch.zeros(3)  # raised below, but written here
    torch.nn.Linear(2, 2)(torch.zeros(3))


def in_this_package() -> None:
    Problem(Border(torch.nn.Linear(2, 2)), None, torch.zeros(3, 2), torch.zeros(2))  # type: ignore[arg-type]


def in_pythons_library() -> None:
    re.compile("(")


def hidden_by_a_library() -> None:
    torch.nn.Sequential(Broken())(torch.zeros(1))


class Broken(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, torch.zeros(3, 3))


MISTAKES = [users_mistake, in_torch, in_this_package, in_pythons_library, hidden_by_a_library]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_clients_error_shows_the_users_last_line_once_and_how_to_see_more(
    mistake: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    def client_fn(context: Context) -> FedAvgClient:
        mistake()
        raise AssertionError

    strategy = FedAvg(fraction_evaluate=0.0, max_unusable_rounds=3)
    with pytest.raises(NothingUsable) as ended:
        strategy.start(InProcessGrid(client_app(client_fn), 3), to_record(START), 3)
    with pytest.raises(Exception, match=r".") as raised:
        mistake()
    (line,) = [line for line in shown(caplog) if "left out" in line]
    kind = type(raised.value).__name__
    users = "forward" if mistake is hidden_by_a_library else mistake.__name__
    place = rf"\(test_printing\.py:\d+ in {users}\)"
    told = rf"replies of 3 clients \[0, 1, 2\] left out: {kind}: .* {place}"
    assert re.fullmatch(told + re.escape(TRACEBACK), line), line
    assert "error 2" not in line + str(ended.value)
    assert {record.levelno for record in caplog.records if record.exc_info} == {DEBUG}


def test_without_a_line_of_the_users_the_place_is_where_it_was_raised() -> None:
    program = compile("raise ValueError('x')", "/lib/site-packages/y.py", "exec")
    with pytest.raises(ValueError, match="x") as raised:
        exec(program, {})
    error = raised.value
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    assert of_exception(error) == "ValueError: x (y.py:1 in <module>)"


# ---- clients of another make ---------------------------------------------------------------------


def foreign(fails: Callable[[], bool] = lambda: False) -> ClientApp:
    """An app as in Flower's quickstart, without a query function."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if fails():
            raise OSError("no data")
        arrays = message.content.array_records["arrays"]
        numbers = MetricRecord({"num-examples": 7, "train_loss": 1.0})
        return Message(RecordDict({"arrays": arrays, "metrics": numbers}), reply_to=message)

    return app


def test_a_client_without_a_query_function_is_normal(caplog: pytest.LogCaptureFixture) -> None:
    FedAvg(fraction_evaluate=0.0).start(InProcessGrid(foreign(), 4), to_record(START), 1)
    assert shown(caplog, WARNING) == []
    (line,) = [line for line in shown(caplog) if "query" in line or "queries" in line]
    assert line == "4 clients answer no queries: their nodes' ids tell them apart"
    assert round_lines(caplog)[0].startswith("round 1/1: train_loss 1.0000, 4 of 4 clients, ")


def always() -> bool:
    return True


@pytest.mark.parametrize("fails", [lambda: False, always, iter([True] + [False] * 50).__next__])
@pytest.mark.parametrize("lost", [False, True])
def test_the_random_ids_of_nodes_are_for_debugging_alone(
    fails: Callable[[], bool], lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(message: Message, reply: Message) -> Message | None:
        trains = message.metadata.message_type == "train"
        return None if lost and trains and message.metadata.dst_node_id % 2 else reply

    federation = InProcessGrid(foreign(fails), 5, fault=fault)
    strategy = FedAvg(fraction_evaluate=0.0, local=local())
    with pytest.raises(NothingUsable) if fails is always else nullcontext() as ended:
        strategy.start(federation, to_record(START), 3)
    assert not re.search(r"\d{10}", str(ended and ended.value))
    lines = [line.partition("; run ")[0] for line in shown(caplog)]  # whose id may have ten digits
    assert not [line for line in lines if re.search(r"\d{10}", line)]
    told = " ".join(caplog.messages)
    assert all(str(node) in told for node in federation.contexts)
