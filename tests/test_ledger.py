"""The ledger: what a request tells, what a used reply changes, what a checkpoint holds.

Runs that lose replies are in test_faults, test_checkpoints and each algorithm's invariant; here
is the one page that all of these stand on. Mistakes these laws are written against: an upload
recorded by the present round and not by its request's, a nonce recorded for a rejected reply, a
newcomer told by its nonce, a record that the run goes on writing to.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import NODES

from fl_strategies.core.ledger import Ledger
from fl_strategies.core.reasons import brief
from fl_strategies.core.records import BadReply, Reply, Upload

CLIENTS = [3, NODES[0], NODES[1]]
"""Ids small and on both sides of 2^63."""


def reply(client: int, nonce: str = "") -> Reply:
    return Reply(client, 1, 5, {}, {"state-nonce": nonce} if nonce else {})


def upload(client: int, server_round: int = 1) -> Upload:
    return Upload(client, np.zeros(2), 5, round=server_round)


def used(ledger: Ledger, client: int, server_round: int, nonce: str = "") -> Upload:
    taken = ledger.check(reply(client, nonce), upload(client, server_round))
    ledger.record_used([taken])
    return taken


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(1, 50), st.booleans())))
def test_a_client_is_told_the_round_of_its_last_reply_that_was_used(
    replies: list[tuple[int, int, bool]],
) -> None:
    ledger, last = Ledger(), dict[int, int]()
    for client, server_round, used in replies:
        taken = ledger.check(reply(client), upload(client, server_round))
        assert taken.newcomer is (client not in last)
        if used:
            ledger.record_used([taken])
            last[client] = server_round
        for each in CLIENTS:
            assert ledger.request_fields(each) == {"acked-round": last.get(each, -1)}


def test_what_is_not_acknowledged_is_not_told_and_kept_rounds_are() -> None:
    kept = {3: [2, 5]}
    ledger = Ledger(acknowledge=False, kept_rounds=lambda client: kept.get(client, []))
    used(ledger, 3, 5)
    assert ledger.request_fields(3) == {"kept-rounds": "2 5"}
    assert ledger.request_fields(4) == {"kept-rounds": ""}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_lost_state_is_known_by_its_nonce_until_a_reply_of_it_is_used(
    client: int, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger("warn")
    used(ledger, client, 1, "one")
    used(ledger, client, 2, "one")
    assert not caplog.records
    ledger.check(reply(client, "two"), upload(client, 3))  # and not used
    ledger.check(reply(client, "two"), upload(client, 4))
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert f"client {brief(client)} lost its state" in caplog.text
    assert not used(ledger, client, 5, "two").newcomer
    used(ledger, client, 6, "two")
    used(ledger, client, 7)  # a client without a state
    assert len(caplog.records) == 3


def test_a_lost_state_is_refused_where_that_is_the_policy() -> None:
    ledger = Ledger("refuse")
    used(ledger, 3, 1, "one")
    with pytest.raises(BadReply, match="its acknowledged state is lost"):
        ledger.check(reply(3, "two"), upload(3, 2))
    used(ledger, 4, 1, "two")  # another's nonce is no matter
    with pytest.raises(BadReply):
        ledger.check(reply(3, "two"), upload(3, 2))
    assert used(ledger, 3, 2, "one").nonce == "one"


def test_a_record_is_as_it_was_and_brings_a_ledger_back() -> None:
    ledger = Ledger()
    used(ledger, 3, 1, "one")
    record = ledger.record
    used(ledger, 3, 2, "two")
    used(ledger, 5, 2)
    assert record == {"acked": {3: 1}, "nonces": {3: "one"}}
    ledger.restore(record)
    assert ledger.request_fields(3) == {"acked-round": 1}
    assert ledger.request_fields(5) == {"acked-round": -1}
    used(ledger, 3, 3, "three")
    assert record["acked"] == {3: 1}
