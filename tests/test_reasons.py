"""Laws of the reasons of failed replies: what began it comes first, and is said once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from itertools import permutations

import pytest
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common import log
from laws import START
from problems import to_record

from clients import FederatedClient, client_app
from clients.node.in_process import InProcessGrid
from clients.node.records import log_failure
from fl_strategies import FedAvg
from fl_strategies.core.reasons import TRACEBACK, by_reason, of_exception


def plain() -> None:
    raise OSError("no data")


def of_many_lines() -> None:
    raise ValueError("sizes differ:\n\tMissing keys: a\n\n  and b")


def chained() -> None:
    try:
        {}["shard"]
    except KeyError as error:
        raise OSError("no data") from error


def while_handling() -> None:
    try:
        chained()
    except OSError:
        raise RuntimeError("cannot train")  # noqa: B904


def deep(left: int = 30) -> None:
    if left:
        deep(left - 1)
    raise TypeError("at the bottom")


def told_by(function: Callable[[], None]) -> str:
    try:
        function()
    except Exception as error:
        return of_exception(error)
    raise AssertionError


HERE = r" \(test_reasons\.py:\d+ in {}\)"
CAUSES = {
    plain: "OSError: no data" + HERE.format("plain"),
    of_many_lines: "ValueError: sizes differ: Missing keys: a and b" + HERE.format("of_many_lines"),
    chained: "KeyError: 'shard'" + HERE.format("chained") + "; hence OSError: no data",
    while_handling: "KeyError: 'shard'" + HERE.format("chained")
    + "; hence OSError: no data; hence RuntimeError: cannot train",
    deep: "TypeError: at the bottom" + HERE.format("deep"),
}  # fmt: skip


@pytest.mark.parametrize("function", CAUSES)
def test_what_began_it_comes_first_with_the_users_line(function: Callable[[], None]) -> None:
    assert re.fullmatch(CAUSES[function], told_by(function))


# ---- in the log ----------------------------------------------------------------------------------


def failing_app(say: Callable[[int], str]) -> ClientApp:
    """An app as a stranger writes it, without queries, that fails with what ``say`` of its id."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(Error(2, say(int(context.node_config["partition-id"]))), reply_to=message)

    return app


def log_of_a_round(
    app: ClientApp, clients: int, caplog: pytest.LogCaptureFixture
) -> tuple[list[str], list[int]]:
    """Return the lines from WARNING on, and the nodes."""
    federation = InProcessGrid(app, clients)
    FedAvg(fraction_evaluate=0.0).start(federation, to_record(START), 1)
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return lines, list(federation.contexts)


def test_each_distinct_reason_is_one_line_with_its_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = failing_app(lambda client: told_by(chained if client < 25 else plain))
    lines, nodes = log_of_a_round(app, 50, caplog)
    found = [line for line in lines if "left out" in line]
    assert len(found) == 2
    for mine, reason in ((nodes[:25], "KeyError: 'shard'"), (nodes[25:], "OSError: no data")):
        (line,) = [line for line in found if f"left out: {reason} (" in line]
        assert line.startswith("replies of 25 clients left out: ")
        assert all(str(node) in caplog.text for node in mine)


@pytest.mark.parametrize("reason", ["out of disk", "<class 'OSError'>:<'no data'>"])
def test_another_apps_reason_is_shown_as_it_was_sent(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    pages = reason + "\n  File 'a.py', line 3" * 100 + "\nValueError: the last line"
    lines, _ = log_of_a_round(failing_app(lambda client: pages if client else reason), 2, caplog)
    short, long = [line for line in lines if "left out" in line]
    assert f"left out: {reason}; " in short
    assert f"left out: {reason} File 'a.py', line 3" in long
    assert " ... " in long
    assert "line 3 ValueError: the last line; " in long


@pytest.mark.parametrize("hosts", [0, 2])
def test_clients_beside_the_server_that_fail_for_one_reason_are_one_line(
    hosts: int, caplog: pytest.LogCaptureFixture
) -> None:
    def without_data(context: Context) -> FederatedClient:
        raise OSError("no data")

    def hosted(context: Context) -> range:
        first = 3 * int(context.node_config["partition-id"])
        return range(first, first + 3)

    app = client_app(without_data, hosts=hosted if hosts else None)
    FedAvg(fraction_evaluate=0.0).start(InProcessGrid(app, 6, hosts=hosts), to_record(START), 1)
    said = [record for record in caplog.records if "no data" in record.getMessage()]
    (line,) = [r.getMessage() for r in said if r.levelno >= logging.WARNING]
    assert re.match(r"replies of 6 clients \[0, 1, .*\] left out: .*OSError: no data \(", line)
    assert not any(" failed: " in record.getMessage() for record in said)


def test_a_node_alone_logs_the_error_itself(caplog: pytest.LogCaptureFixture) -> None:
    log_failure("client 3", "OSError: no data")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"client 3 failed: OSError: no data{TRACEBACK}"


def test_what_an_engine_logs_of_unanswered_queries_is_for_debugging_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Flower's simulation logs each exception of an app; those of training stay errors."""

    class Engine(InProcessGrid):
        def answer(self, message: Message) -> Message | None:
            log(logging.ERROR, "traceback of %s", message.metadata.message_type)
            return super().answer(message)

    federation = Engine(failing_app(lambda client: "tired"), 2)
    FedAvg(fraction_evaluate=0.0).start(federation, to_record(START), 1)
    levels = {record.getMessage(): record.levelno for record in caplog.records}
    assert levels["traceback of query"] == logging.DEBUG
    assert levels["traceback of train"] == logging.ERROR


def test_no_share_of_clients_to_evaluate_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    assert strategy.fraction_evaluate == 0.0
    assert caplog.records == []


@pytest.mark.parametrize("order", list(permutations([(2, "b"), (0, "a"), (1, "b"), (None, "b")])))
def test_the_lines_do_not_depend_on_the_order_in_which_replies_come(
    order: list[tuple[int | None, str]],
) -> None:
    assert by_reason(order) == {"a": [0], "b": [None, 1, 2]}
