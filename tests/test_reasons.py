"""Laws of the reasons of failed replies: what began it comes first, and is said once."""

from __future__ import annotations

import logging
import re
import traceback
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
from fl_strategies import FedAvg
from fl_strategies.core.reasons import by_reason, of_exception, root_cause

LONG = "x" * 400


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


def raised_by(function: Callable[[], None]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


def on_ray(error: Exception) -> str:
    """Flower's reason for an exception in a ClientApp on Ray, with Ray's head and colours."""
    head = f"\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7, actor_id={LONG}, repr=<{LONG}>)"
    chain = "".join(traceback.format_exception(error))
    text = chain.replace("Traceback (most recent call last):", head)
    return (
        f"<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'{text}\n"
        f"The above exception was the direct cause of the following exception:\n\n{head}\n"
        '  File "/flwr/simulation/ray_transport/ray_actor.py", line 65, in run\n'
        "    raise ClientAppException(str(ex)) from ex\n"
        "flwr.clientapp.client_app.ClientAppException: \n"
        f"Exception ClientAppException occurred. Message: {error}'>"
    )


@pytest.mark.parametrize("function", [plain, of_many_lines, chained, while_handling, deep])
def test_the_side_that_gets_pages_of_text_reads_what_the_side_that_raises_would_say(
    function: Callable[[], None],
) -> None:
    error = raised_by(function)
    assert root_cause(on_ray(error)) == of_exception(error)
    assert root_cause(of_exception(error)) == of_exception(error)


def test_where_an_engine_tells_the_last_exception_alone_its_type_and_message_are_the_reason() -> (
    None
):
    assert root_cause("<class 'builtins.OSError'>:<'no data'>") == "OSError: no data"
    assert root_cause("<class 'OSError'>:<'no data'>") == "OSError: no data"


@pytest.mark.parametrize("reason", [None, "", "out of disk", "<class 'X'>:<", "'>", 'File "a"'])
def test_any_other_text_stays_as_it_is(reason: str | None) -> None:
    assert (reason or "no reason given") in root_cause(reason) or root_cause(reason) == "X: "


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
    app = failing_app(lambda client: on_ray(raised_by(chained if client < 25 else plain)))
    lines, nodes = log_of_a_round(app, 50, caplog)
    found = [line for line in lines if "left out" in line]
    assert len(found) == 2
    for mine, reason in ((nodes[:25], "KeyError: 'shard'"), (nodes[25:], "OSError: no data")):
        (line,) = [line for line in found if f"left out: {reason} (" in line]
        assert line.startswith("replies of 25 clients left out: ")
        assert all(str(node) in caplog.text for node in mine)


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
    failed = [r.levelno for r in said if " failed: " in r.getMessage()]
    assert failed == [logging.DEBUG] * (hosts or 6)  # where a node is alone: an error


def test_what_engines_beside_the_server_log_of_a_clients_exception_is_for_debugging_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Flower's simulation logs it under these names, from threads of the server's process."""

    def worker() -> None:
        log(logging.ERROR, "pages of traceback")

    def process_message() -> None:
        log(logging.ERROR, "pages of traceback")

    def another() -> None:
        log(logging.ERROR, "something else")

    def engine(client: int) -> str:
        for function, module in ((worker, "vce_api"), (process_message, "raybackend")):
            function.__code__ = function.__code__.replace(co_filename=f"/flwr/{module}.py")
            function()
        another()
        return "tired"

    lines, _ = log_of_a_round(failing_app(engine), 2, caplog)
    assert lines.count("something else") == 2
    assert "pages of traceback" not in lines
    assert caplog.text.count("pages of traceback") == 4
    worker()
    assert caplog.records[-1].levelno == logging.ERROR  # of other runs nothing is kept back


def test_no_share_of_clients_to_evaluate_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    assert strategy.fraction_evaluate == 0.0
    assert caplog.records == []


@pytest.mark.parametrize("order", list(permutations([(2, "b"), (0, "a"), (1, "b"), (None, "b")])))
def test_the_lines_do_not_depend_on_the_order_in_which_replies_come(
    order: list[tuple[int | None, str]],
) -> None:
    assert by_reason(order) == {"a": [0], "b": [None, 1, 2]}
