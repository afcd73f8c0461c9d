"""What a host says of clients: which are its own, and replies that are forged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from hosted import CLIENTS, SHAPES, admm, federation
from laws import START, local, train
from problems import make_client_app, quadratics, to_record

from clients.node.in_process import Fault, InProcessGrid
from fl_strategies import FedAvg
from fl_strategies.messages import hosting

# ---- who speaks for whom ------------------------------------------------------------------------


def test_a_client_is_with_the_host_that_introduced_it_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = federation()
    hosted = SHAPES["2 hosts"][0]
    thief = 2**64 - 5  # the last that is asked
    copy = next(iter(grid.contexts.values()))
    grid.contexts[thief] = Context(1, thief, dict(copy.node_config), RecordDict(), {})
    one = admm()
    first, second = (n for n in grid.contexts if n != thief)
    found = one.nodes.connected(grid)
    assert found == {**dict.fromkeys(hosted[0], first), **dict.fromkeys(hosted[1], second)}
    assert "hosts 3 clients [0, 1, 2], which is node" in caplog.text
    assert one.nodes.connected(grid) == found
    del grid.contexts[first]
    assert one.nodes.connected(grid) == found | dict.fromkeys(hosted[0], thief)
    returned, late = grid.contexts.pop(thief), thief + 1
    grid.contexts |= {first: copy, late: Context(1, late, returned.node_config, RecordDict(), {})}
    assert one.nodes.connected(grid) == found
    del grid.contexts[late]  # while it waits for them
    assert one.nodes.connected(grid) == found
    del grid.contexts[first]
    assert one.nodes.connected(grid) == dict.fromkeys(hosted[1], second)


@pytest.mark.parametrize("population", [0, CLIENTS + 1])
def test_a_node_that_claims_a_population_which_the_server_does_not_share_is_refused(
    population: int, caplog: pytest.LogCaptureFixture
) -> None:
    grid = federation("1 host that shares")
    one = FedAvg(shared_population=population)
    assert one.nodes.connected(grid) == {}
    assert one.nodes.connected(grid) == {}
    text = f"offers to run any of 6 clients; the run's shared population has {population or 'no'}"
    assert caplog.text.count(text) == 1


def test_nobody_owns_a_client_of_a_shared_population(caplog: pytest.LogCaptureFixture) -> None:
    grid = federation("2 hosts")
    one = FedAvg(shared_population=CLIENTS)
    assert one.nodes.connected(grid) == {}
    assert "hosts 3 clients [0, 1, 2], of the population that hosts share" in caplog.text


@pytest.mark.parametrize("ids", [[0, 0], [-1], [True], ["0"], []])
def test_a_host_with_ids_that_are_none_is_refused(
    ids: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    grid = federation("1 host")

    def lie(request: Message, reply: Message) -> Message:
        about: dict[str, Any] = {"client-ids": ids, "num-partitions": 6}
        reply.content = RecordDict({"client": ConfigRecord(about)})
        return reply

    grid.fault = lie
    assert FedAvg().nodes.connected(grid) == {}
    assert "it is not asked" in caplog.text


def test_hosts_may_list_ids_beyond_the_number_of_nodes() -> None:
    listed = [[0, 1, 7], [2, 2**63 + 5]]
    app = make_client_app([], hosts=lambda context: listed[context.node_config["partition-id"]])
    grid = InProcessGrid(app, 5, hosts=2)
    assert FedAvg().nodes.connected(grid).keys() == {*listed[0], *listed[1]}


def test_a_large_population_is_met_by_one_query_of_each_host() -> None:
    queries: list[Message] = []
    app = make_client_app([], hosts=100_000)
    grid = InProcessGrid(app, 100_000, hosts=2, fault=lambda q, a: queries.append(q) or a)
    one = FedAvg(shared_population=100_000)
    assert one.nodes.connected(grid).keys() == {*range(100_000)}
    one.nodes.connected(grid)
    assert len(queries) == 2
    assert not grid.clients


def test_states_of_a_shared_population_are_never_in_a_hosts_context() -> None:
    grid = InProcessGrid(make_client_app(quadratics(CLIENTS), hosts=CLIENTS), 2)
    with pytest.raises(RuntimeError, match="hosts of a shared population do not have in common"):
        train(admm(shared_population=CLIENTS), grid, 5)
    assert not any(context.state for context in grid.contexts.values())


# ---- forged replies -----------------------------------------------------------------------------


def forged(change: Callable[[dict[str, Any]], None]) -> Fault:
    """Return a fault by which the first host's training replies are changed from round 2 on."""

    def fault(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("config", {})
        mine = "hosted" in request.content and 0 in request.content["hosted"]["per-client-0"]
        if request.metadata.message_type != "train" or config["server-round"] < 2 or not mine:
            return reply
        records: dict[str, Any] = {k: dict(v) for k, v in reply.content.items()}
        change(records)
        kinds: dict[str, Any] = {"arrays": ArrayRecord, "metrics-0": MetricRecord}
        reply.content = RecordDict({k: kinds.get(k, ConfigRecord)(v) for k, v in records.items()})
        return reply

    return fault


def cut(records: dict[str, Any]) -> None:
    records["arrays"]["tail"] = Array(records["arrays"]["tail"].numpy()[:2])


def flat(records: dict[str, Any]) -> None:
    records["arrays"]["tail"] = Array(np.array(1.0))


def other_ids(*ids: int) -> Callable[[dict[str, Any]], None]:
    def change(records: dict[str, Any]) -> None:
        for name in ("arrays", "metrics-0", "config-0"):
            records["hosted"][name] = [*ids]

    return change


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], None], str, set[int]]] = {
    "a client of the other host": (other_ids(3, 1, 2), "answers for client 3, of which it", {0}),
    "a client that nobody knows": (other_ids(77, 1, 2), "answers for client 77, of which", {0}),
    "a client twice": (other_ids(0, 1, 1), r"clients \[1\] are there twice", {0, 1, 2}),
    "ids that are none": (other_ids(0, 1, -2), "must list ids of clients, got", {0, 1, 2}),
    "too few numbers": (
        lambda r: r["metrics-0"].update({"train-loss": [1.0]}),
        "'train-loss' has 1 entries for 3 clients",
        {0, 1, 2},
    ),
    "a number for a list": (
        lambda r: r["metrics-0"].update({"train-loss": 1.0}),
        "'train-loss' has no list for 3 clients",
        {0, 1, 2},
    ),
    "too few slices": (cut, r"array 'tail' has shape \(2, 1\) for 3 clients", {0, 1, 2}),
    "no slices": (flat, r"array 'tail' has shape \(\) for 3 clients", {0, 1, 2}),
    "a table that is not there": (
        lambda r: r["hosted"].update({"config-9": [1]}),
        "'config-9'",
        {0, 1, 2},
    ),
    "a record that is not there": (
        lambda r: r["hosted"].update({"more": [1]}),
        r"it names \['more'\], which it does not have",
        {0, 1, 2},
    ),
    "reasons without clients": (
        lambda r: r["hosted"].update({"reasons": ["none"]}),
        "0 clients failed, and the reasons are",
        {0, 1, 2},
    ),
    "failed and not": (
        lambda r: r["hosted"].update({"failed": [1], "reasons": ["none"]}),
        r"clients \[1\] are there twice",
        {0, 1, 2},
    ),
    "no word of whose": (lambda r: r.pop("hosted"), "'hosted'", {0, 1, 2}),
    "one number that is not finite": (
        lambda r: r["metrics-0"].update({"train-loss": [1.0, np.nan, 2.0]}),
        "metric 'train-loss' is not finite: nan",
        {1},
    ),
    "no texts": (
        lambda r: (r["hosted"].pop("config-0"), r.pop("config-0")),
        "it does not say which algorithm",
        {0, 1, 2},
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_reply_of_a_host_is_left_out_for_one_reason_and_harms_its_own_alone(
    forgery: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, reason, out = FORGERIES[forgery]
    grid = federation(fault=forged(change))
    used: list[set[int]] = []
    one = admm(fraction_train=1.0, callbacks=[lambda info: used.append({*info.clients})])
    train(one, grid, 2)
    assert used == [{*range(CLIENTS)}, {*range(CLIENTS)} - out]
    assert one.ledger.acked == {c: 1 if c in out else 2 for c in range(CLIENTS)}
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(lines) == 1
    assert re.search(reason, lines[0])


def test_a_host_cannot_be_made_to_run_a_client_that_is_not_its_own() -> None:
    content = hosting.pack_request(("arrays", "config"), to_record(START), {4: {"server-round": 1}})
    grid = federation()
    message = Message(content, next(iter(grid.contexts)), "train")
    reply = grid.answer(message)
    assert reply is not None
    (fault,) = hosting.unpack_reply(reply.content).values()
    assert "this node does not host client 4, but [0, 1, 2]" in str(fault)


# ---- what needs a message for each client -------------------------------------------------------


def test_flowers_own_strategies_and_wrappers_say_that_hosts_do_not_go_with_them() -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(FedAvg(local=local()), 1.0, 5.0, 2)
    with pytest.raises(ValueError, match=r"a wrapper .* one client per message"):
        wrapped.start(federation(), to_record(START), 1)
    faults: list[Message] = []
    grid = federation(fault=lambda q, a: faults.append(a) or a)
    FlowersFedAvg(min_train_nodes=1, min_available_nodes=1).start(grid, to_record(START), 1)
    assert all("hosts several clients, and the request is about one" in m.error.reason
               for m in faults)  # fmt: skip


def test_mods_that_change_one_clients_upload_are_refused_on_a_host() -> None:
    with pytest.raises(RuntimeError, match=r"\['fixedclipping_mod'\] change one client's upload"):
        train(FedAvg(local=local()), federation(mods=[fixedclipping_mod]), 5)
