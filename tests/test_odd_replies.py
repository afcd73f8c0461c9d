"""Replies that are well-formed and odd: extreme numbers, foreign texts, names of the server."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Row, every_algorithm, local
from problems import NODES, to_vector
from scripted import LAST, ROWS, answered, assert_same, made, outcome, same, the_round, world
from tampering import fresh, measured, put

from fl_strategies import FedAvg
from fl_strategies.server.replies import one_line


@every_algorithm
@pytest.mark.sampled
def test_what_a_client_reports_under_the_servers_names_is_not_heard(row: Row) -> None:
    """Examples of 0 in all would divide by zero."""
    before = world(made(row))
    names = ["samples", "data-share", "weight-share", "clients-used", "seconds"]

    def tamper(content: RecordDict) -> RecordDict:
        metrics = dict(content["metrics"])
        content["metrics"] = MetricRecord({**metrics, **dict.fromkeys(names, -2000.0)})
        return content

    found, plain = the_round(before, {LAST: tamper}), the_round(before, {})
    assert same(found.theta, plain.theta)
    assert {name: found.metrics[0][name] for name in plain.metrics[0]} == plain.metrics[0]
    assert same(found.state["clients"][LAST]["samples"], plain.state["clients"][LAST]["samples"])


@pytest.mark.parametrize("extreme", [1.7e308, -1.7e308])
def test_numbers_near_the_largest_make_infinite_metrics_and_no_more(extreme: float) -> None:
    before = world(made(ROWS["fedavg"]))
    found = the_round(before, {LAST: measured("train-loss", extreme)})
    assert same(found.theta, the_round(before, {}).theta)
    assert found.metrics[0]["train-loss-variance"] == math.inf


def test_a_loss_whose_power_is_no_number_is_left_out() -> None:
    before = world(made(ROWS["q-fedavg"], q=30.0))
    found = the_round(before, {LAST: measured("global-loss", 1e12)})
    assert_same(found, the_round(before, {}, leave=[LAST]))


def test_running_statistics_that_overflow_make_the_round_void() -> None:
    """The first client's and the second's differ by more than the largest number."""
    before = world(FedAvg(buffers=["tail"], fraction_evaluate=0.0, local=local()))
    found = the_round(
        before, {0: put("tail", np.array([-1.7e308])), 1: put("tail", np.array([1.7e308]))}
    )
    assert same(found.theta, to_vector(before.theta))


def test_a_state_of_the_server_that_overflows_makes_the_round_void() -> None:
    """Two clients' control variates add up to more than the largest number."""
    before = world(made(ROWS["scaffold"]))
    huge = {client: put("control/tail", np.array([1.7e308])) for client in (0, 1)}
    found = the_round(before, huge)
    assert same(found.theta, to_vector(before.theta))
    assert found.metrics[0]["skipped"] == 1


def test_a_foreign_text_is_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    before = world(made(ROWS["fedavg"]))
    forged = "no\nWARNING: all is well\r\n" + "x" * 10_000
    outcome(before, [answered({NODES[0]: Error(2, forged)})])
    (line,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert line.startswith("reply of client 0 left out: no WARNING: all is well xxx")
    assert len(line.splitlines()) == 1
    assert len(line) < 600


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=700) | st.text(st.characters(categories=["Cc", "Cf", "Zl", "Cs"])))
def test_whatever_others_write_is_one_printable_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= 500
    plain = " ".join(text.split())
    assert line == plain or not plain.isprintable() or len(plain) > 500


def test_a_metrics_name_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    before = world(made(ROWS["fedavg"]))
    content = measured("x\nround=9 algorithm=forged\x1b[2J\u202e", 1.0)(
        fresh(before.answers[NODES[0]])
    )
    outcome(before, [answered({NODES[0]: content})])
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_what_no_check_foresaw_is_left_out_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    before = world(made(ROWS["fedavg"]))
    content = measured("train-loss", 10**400)(fresh(before.answers[NODES[0]]))
    outcome(before, [answered({NODES[0]: content})])
    (record,) = [r for r in caplog.records if "left out" in r.getMessage()]
    assert "left out: OverflowError: int too large to convert to float" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is OverflowError


def test_an_error_of_the_servers_own_rule_is_not_hidden() -> None:
    before = world(made(ROWS["fedavg"]))

    def broken(*_: Any) -> float:
        raise ZeroDivisionError("a mistake")

    before.strategy.weights_of = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        the_round(before, {})
