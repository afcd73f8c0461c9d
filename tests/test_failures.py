"""Clients that fail, for every algorithm: late answers, joining, half of them gone for rounds."""

from __future__ import annotations

from collections.abc import Iterable
from logging import WARNING
from pathlib import Path

import numpy as np
import pytest
from federations import CLIENTS, Trouble, Troubled
from flwr.app import Error, Message, MessageType
from laws import START, Row, every_algorithm, local, train
from problems import CLIENT_OF, NODES, make_client_app, quadratics, to_record

from clients.node.in_process import InProcessGrid
from fl_strategies import FedADMM, FedBCDAsync, FederatedStrategy, RoundInfo
from fl_strategies.core.reasons import brief
from fl_strategies.server import phases
from simulations.client_app import app
from simulations.config import RunConfig
from simulations.experiment import run

COUNT_WHO_IS_ASKED = {"fedbc", "per-fedbc", "fedbcd-i", "fedbcd-i-async"}
"""Their rules know clients asked in vain from absent ones: FedBC's dual clock, offline rounds."""


def half_for_five_rounds(server_round: int, client: int) -> bool:
    return 4 <= server_round <= 8 and client % 2 == 1


def until_round_10(server_round: int, client: int) -> bool:
    return client == CLIENTS - 1 and server_round < 10


@pytest.mark.sampled
@every_algorithm
def test_answers_after_the_timeout_count_as_lost_ones_to_the_bit(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    late = Troubled(late=half_for_five_rounds)
    found = late.run(row)
    assert caplog.text.count("no reply from 2 clients [1, 3]") == 5
    lost = Troubled(lost=half_for_five_rounds)
    np.testing.assert_array_equal(found, lost.run(row))
    assert late.acked == lost.acked


@pytest.mark.sampled
@every_algorithm
def test_with_half_gone_for_five_rounds_those_present_go_on_and_all_do_afterwards(
    row: Row,
) -> None:
    gone = Troubled(away=half_for_five_rounds)
    found = gone.run(row)
    few, all_ = [2.0, 2.0, 0.0, 0.0], [4.0, 4.0, 0.0, 0.0]
    assert gone.counts == 3 * [all_] + 5 * [few] + 4 * [all_]
    present = 8 if row.partial else 3  # a void round acknowledges nothing
    assert gone.acked[7] == {0: present, 1: 3, 2: present, 3: 3}
    assert set(gone.acked[-1].values()) == {12}
    if row.name not in COUNT_WHO_IS_ASKED:
        np.testing.assert_array_equal(found, Troubled(lost=half_for_five_rounds).run(row))


@pytest.mark.sampled
@every_algorithm
def test_until_a_client_joins_the_model_is_that_of_a_federation_without_it(row: Row) -> None:
    joined = Troubled(away=until_round_10)
    np.testing.assert_array_equal(joined.run(row, 9), Troubled(CLIENTS - 1).run(row, 9))
    assert joined.counts[-1][:2] == [3.0, 3.0]


@every_algorithm
@pytest.mark.slow
def test_after_a_late_start_an_absence_and_late_answers_it_converges_to_its_known_limit(
    row: Row,
) -> None:
    def away(server_round: int, client: int) -> bool:
        return until_round_10(server_round, client) or half_for_five_rounds(
            server_round - 10, client
        )

    def late(server_round: int, client: int) -> bool:
        return server_round in (21, 22) and client == 0

    federation = Troubled(away=away, late=late)
    rounds = 200 if row.name in {"fedsgd", "q-fedavg"} else 100
    found = federation.run(row, rounds)
    np.testing.assert_allclose(found, row.limit(quadratics(CLIENTS)), atol=1e-4)
    assert federation.counts[9] == federation.counts[-1] == [4.0, 4.0, 0.0, 0.0]


class StandsIn(InProcessGrid):
    """Where a client's node is gone, Flower answers itself, and names the request alone."""

    def __init__(self, gone: Trouble) -> None:
        super().__init__(make_client_app(quadratics(CLIENTS)), CLIENTS)
        self.gone = gone

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        requests = list(messages)
        for message in requests:
            message.metadata.__dict__["_message_id"] = f"request-{next(self._message_ids)}"
        self._replies |= {m.metadata.message_id: r for m in requests if (r := self.answer(m))}
        return [message.metadata.message_id for message in requests]

    def answer(self, message: Message) -> Message | None:
        client = CLIENT_OF[message.metadata.dst_node_id]
        config = message.content.config_records.get("config", {})
        if not self.gone(int(config.get("server-round", 0)), client):
            return super().answer(message)
        reply = Message(Error(5, "Node Unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply


GONE = {"reply of client 1 left out: none came: Node Unavailable", "no reply from client 1"}


@pytest.mark.parametrize(
    "strategy",
    [
        FedADMM(fraction_evaluate=0.0, local=local()),
        FedBCDAsync(fraction_evaluate=0.0, local=local(), box=None, servers=2),
        FedBCDAsync(fraction_evaluate=0.0, local=local(), box=None, order="arrival"),
    ],
    ids=["fedadmm", "fedbcd-async-virtual", "fedbcd-async-arrival"],
)
def test_where_flower_answers_for_a_node_that_is_gone_the_log_names_its_client(
    strategy: FederatedStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    train(strategy, StandsIn(lambda server_round, client: server_round > 0 and client == 1), 4)
    assert {r.getMessage() for r in caplog.records if r.levelno == WARNING} == GONE


def test_the_log_names_the_client_of_a_node_that_is_gone_where_the_answer_comes_a_round_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OneRoundLater(StandsIn):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            held = {
                key: self._replies.pop(key)
                for key in list(self._replies)
                if self._replies[key].has_error() and not seen
            }
            found = super().pull_messages(message_ids)
            self._replies |= held
            return found

    seen: list[RoundInfo] = []
    monkeypatch.setattr(phases, "PAUSE", 0.001)
    strategy = FedBCDAsync(
        fraction_evaluate=0.0, local=local(), box=None, order="arrival", callbacks=[seen.append]
    )
    federation = OneRoundLater(lambda server_round, client: server_round == 1 and client == 1)
    caplog.clear()
    strategy.start(federation, to_record(START), 3, timeout=0.2)
    assert {r.getMessage() for r in caplog.records if r.levelno == WARNING} == GONE
    assert [info.metrics["clients-used"] for info in seen] == [3.0, 3.0, 4.0]


def test_where_all_nodes_are_gone_for_a_round_it_is_void_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other than where every ClientApp raises, which ends a run at once."""
    gone = StandsIn(lambda r, client: r == 2)
    gone.client_app = app
    config = RunConfig.parse({"clients": CLIENTS, "rounds": 3, "output": str(tmp_path)})
    for context in gone.contexts.values():
        context.run_config = config.to_run_config()
    assert run(config, gone).rounds == 3
    assert "round 2 is skipped: 0 usable replies" in caplog.text


def test_a_node_that_was_replaced_serves_again_when_it_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Client 1's SuperNode dies, a spare one takes over once it is gone, and dies in turn."""
    trained: list[int] = []

    def note(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == MessageType.TRAIN:
            trained.append(request.metadata.dst_node_id)
        return reply

    federation = InProcessGrid(make_client_app(quadratics(3)), 3, fault=note)
    strategy = FedADMM(fraction_evaluate=0.0, local=local())
    nodes, first, spare = federation.contexts, NODES[1], 9999

    def asked() -> list[int]:
        trained.clear()
        train(strategy, federation, 1)
        return sorted(trained)

    usual = asked()
    nodes[spare] = nodes[first]  # the dead one still counts as connected
    assert asked() == usual
    del nodes[first]
    assert asked() == sorted([NODES[0], NODES[2], spare])
    nodes[first] = nodes.pop(spare)
    assert asked() == usual
    assert f"client 1 is now node {spare} and no longer node {brief(first)}" in caplog.text
    assert f"client 1 is now node {brief(first)} and no longer node {spare}" in caplog.text
    assert set(strategy.ledger.acked.values()) == {4}


def test_a_round_waits_for_replies_as_long_as_the_run_config_says(tmp_path: Path) -> None:
    waited: list[float | None] = []

    class Clocked(InProcessGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            requests = list(messages)
            waited.extend([timeout] * bool(requests))
            return super().send_and_receive(requests, timeout=timeout)

    config = RunConfig.parse(
        {"clients": 2, "rounds": 1, "timeout": 12.5, "output": str(tmp_path), "fraction": 1.0}
    )
    run(config, Clocked(app, 2, run_config=config.to_run_config()))
    assert waited == [60.0, 60.0, 12.5]  # the clients' ids, a description, training
