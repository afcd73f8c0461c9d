"""Whatever one client sends, whatever it calls itself or its numbers: others do not feel it.

``faults.py`` has the table of faults; here are the laws that hold of all of them, by path.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import re
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from faults import (
    CLIENTS,
    HUGE,
    LIAR,
    PATHS,
    Change,
    Proxy,
    array,
    failing,
    faults_on,
    malformed,
    managed,
    number,
    run,
    served,
    tensors,
)
from federations import Trouble, Troubled
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp.mod import fixedclipping_mod
from flwr.common import Code, Status, parameters_to_ndarrays
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from hosted import SHAPES, admm, federation
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from laws import START, Row, every_algorithm, local, quiet, train
from problems import (
    CLIENT_OF,
    DIM,
    NODES,
    grid,
    make_client_app,
    quadratics,
    to_record,
    to_vector,
)
from scripted import (
    HONEST,
    KNOBS,
    LAST,
    ROWS,
    Reply,
    answered,
    as_message,
    assert_same,
    made,
    outcome,
    request_id,
    same,
    the_round,
    world,
)
from tampering import claims, fresh, measured, npy, put, silence

from clients import DirectoryStore, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import (
    STRATEGIES,
    BestModel,
    ClientHistory,
    EarlyStop,
    FedADMM,
    FedAvg,
    FedBCDAsync,
    FederatedStrategy,
    History,
    RoundInfo,
    as_legacy,
)
from fl_strategies.bcd import async_cloud
from fl_strategies.compat.translation import Network, node_of
from fl_strategies.core.metric_names import (
    EVALUATED,
    SERVER,
    SPREAD,
    TESTED,
    in_evaluation,
    in_training,
)
from fl_strategies.messages.hosting import asked_in, pack_request, unpack_reply
from fl_strategies.messages.one_process import become_server
from fl_strategies.messages.wire import MAX_SAMPLES
from fl_strategies.server import phases
from fl_strategies.server.nodes import ANY_HOST, Nodes
from fl_strategies.server.replies import one_line
from simulations import client_app, experiment
from simulations.config import RunConfig
from simulations.figures import read_history
from simulations.tables import curve, run_figures

UNHURRIED: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
"""A test says nothing about seconds."""

# ---- replies ------------------------------------------------------------------------------------

CASES = [
    *((path, "train") for path in PATHS),
    *((path, "evaluate") for path in ("message", "host", "legacy")),
]


@pytest.mark.parametrize(("path", "kind"), CASES)
def test_a_faulty_reply_is_left_out_for_its_reason_and_as_if_its_client_had_failed(
    path: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The model, the strategy's state and all metrics are the same to the bit."""
    faults = faults_on(path, kind)
    changes = [change for change, _ in faults.values()]
    few: dict[str, Any] = {"fraction_train": 0.34} if kind == "evaluate" else {}  # all evaluate
    with silence():
        expected = run(ROWS["fedavg"], path, [failing] * len(changes), kind=kind, **few)
    found = run(ROWS["fedavg"], path, changes, kind=kind, **few)
    assert_same(found.outcome, expected.outcome)
    everybody = found.counts[0][0]
    assert found.counts[0] == found.counts[-1] == (everybody, 0)
    for (name, (_, reason)), told, counts in zip(
        faults.items(), found.faults[1:-1], found.counts[1:-1], strict=True
    ):
        assert counts == (everybody - 1, 1), name
        assert told.keys() == {LIAR}, name
        assert re.search(reason, told[LIAR]), (name, told)
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert [line.count(f"reply of client {LIAR} left out: ") for line in lines] == [1] * len(faults)
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(("path", "kind"), CASES)
def test_a_metric_in_nan_counts_as_not_reported(path: str, kind: str) -> None:
    """It may be an AUC of one class; a loss in NaN says that training diverged."""
    changes = [number("auc", math.nan), lambda sent: None]
    with_nan, without = (run(ROWS["fedavg"], path, [c], kind=kind) for c in changes)
    assert_same(with_nan.outcome, without.outcome)
    assert with_nan.counts == without.counts == [(with_nan.counts[0][0], 0)] * 3


@pytest.mark.sampled("scaffold")
@every_algorithm
def test_no_malformed_reply_changes_the_model_or_the_state_of_any_algorithm(row: Row) -> None:
    rounds, overlaps = 12, STRATEGIES[row.name]().overlaps
    options = {"servers": CLIENTS} if overlaps else {}
    with silence():
        expected = run(row, "message", [failing] * rounds, **options)

    @settings(**UNHURRIED, max_examples=4, derandomize=True, database=None)
    @given(st.lists(malformed(), min_size=rounds, max_size=rounds))
    def property_of(changes: list[Change]) -> None:
        with silence():
            found = run(row, "message", changes, **options)
        assert_same(found.outcome, expected.outcome)
        told = [client for faults in found.faults for client in faults]
        assert {*told} == {LIAR}
        assert len(told) == rounds or overlaps  # which does not ask all clients in each round

    property_of()


def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no time pass between replies."""
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    for module in (async_cloud, phases):
        monkeypatch.setattr(module, "time", clock)


@pytest.mark.parametrize("order", ["fedavg", "arrival"])
def test_replies_in_anothers_name_count_for_nobody(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another's node, of a stranger, of a round before, or a second one; early and late."""
    still(monkeypatch)
    arrival = order == "arrival"
    with silence():
        before = world(made(ROWS["fedbcd-async"], order=order) if arrival else made(ROWS[order]))
    nodes, liar = NODES[: LAST + 1], NODES[LAST]
    honest = [Reply(n, request_id(0, n), fresh(before.answers[n])) for n in nodes[:HONEST]]
    gone = answered(dict.fromkeys(nodes[HONEST:], Error(1, "gone"))) * arrival
    after = answered({node: before.answers[node] for node in nodes[:HONEST]}, 1)
    with silence():
        expected = outcome(before, [honest + gone, after])
        nothing = outcome(before, [gone])
    assert same(nothing.theta, to_vector(before.theta))
    assert not same(expected.theta, nothing.theta)
    contents: list[Callable[[], Any]] = [
        lambda: fresh(before.answers[liar]),
        lambda: put("tail", np.array([math.nan]))(fresh(before.answers[liar])),
        lambda: None,
        lambda: Error(3, "out of luck"),
    ]
    pretences = {
        "another": (nodes[0], request_id(0, liar)),
        "stranger": (7, request_id(0, liar)),
        "replay": (nodes[0], request_id(-1, nodes[0])),
        "twice": (nodes[0], request_id(0, nodes[0])),
    }
    for (what, (node, request)), content in itertools.product(pretences.items(), contents):
        false = Reply(node, request, content())
        with silence():
            assert_same(outcome(before, [[*honest, false, *gone], after]), expected)
            if what != "twice":
                assert_same(outcome(before, [[false, *honest, *gone], after]), expected)
                assert_same(outcome(before, [[false, *gone]]), nothing)


@pytest.mark.parametrize("path", PATHS)
def test_a_round_of_faulty_replies_alone_is_void(path: str) -> None:
    changes = [array("tail", np.array([math.nan])), failing]
    found = run(ROWS["fedadmm"], path, changes, liars={*range(6)})
    assert [used == 0 for used, _ in found.counts] == [False, True, True, False]
    assert_same(found.outcome, run(ROWS["fedadmm"], path, [failing] * 2, liars={*range(6)}).outcome)


@pytest.mark.parametrize("path", ["message", "legacy"])
def test_what_an_array_says_of_its_size_is_not_allocated(path: str) -> None:
    claim = array("tail", claims("'<f8'", f"({HUGE},)", bytes(32)))
    run(ROWS["fedavg"], path, [])  # what is imported and cached once
    tracemalloc.start()
    try:
        run(ROWS["fedavg"], path, [claim, array("tail", claims("'<f8'", f"({2**28},)"))])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**26


def test_extreme_numbers_make_infinite_metrics_or_cost_a_reply_and_no_more() -> None:
    before = world(made(ROWS["fedavg"]))
    for extreme in (1.7e308, -1.7e308):
        found = the_round(before, {LAST: measured("train-loss", extreme)})
        assert same(found.theta, the_round(before, {}).theta)
        assert found.metrics[0]["train-loss-variance"] == math.inf
    before = world(made(ROWS["q-fedavg"], q=30.0))  # a loss whose power is no number
    found = the_round(before, {LAST: measured("global-loss", 1e12)})
    assert_same(found, the_round(before, {}, leave=[LAST]))


def test_running_statistics_and_states_that_overflow_make_the_round_void() -> None:
    """Of two clients, whose difference or sum is more than the largest number."""
    statistics = FedAvg(buffers=["tail"], fraction_evaluate=0.0, local=local())
    for strategy, name, signs in (
        (statistics, "tail", (-1.0, 1.0)),
        (made(ROWS["scaffold"]), "control/tail", (1.0, 1.0)),
    ):
        before = world(strategy)
        huge = {client: put(name, sign * np.array([1.7e308])) for client, sign in enumerate(signs)}
        found = the_round(before, huge)
        assert same(found.theta, to_vector(before.theta))
        assert found.metrics[0]["skipped"] == 1


# ---- texts --------------------------------------------------------------------------------------


def test_foreign_texts_forge_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    before = world(made(ROWS["fedavg"]))
    name = measured("x\nround=9 algorithm=forged\x1b[2J\u202e", 1.0)
    forged = "no\nWARNING: all is well\r\n" + "x" * 10_000
    contents = {NODES[0]: Error(2, forged), NODES[1]: name(fresh(before.answers[NODES[1]]))}
    outcome(before, [answered(contents)])
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() for line in lines)
    (line,) = [line for line in lines if "left out" in line]
    assert line.startswith("reply of client 0 left out: no WARNING: all is well xxx")
    assert len(line) < 600


@settings(**UNHURRIED, max_examples=100, derandomize=True, database=None)
@given(st.text(max_size=700) | st.text(st.characters(categories=["Cc", "Cf", "Zl", "Cs"])))
@example("begin " + "x" * 600 + " end")
@example("\x00" * 400 + "the cause")
def test_whatever_others_write_is_one_printable_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= 500
    plain = " ".join(text.split())
    ends = plain if len(plain) <= 500 else f"{plain[:245]} ... {plain[-250:]}"
    assert line == ends or not plain.isprintable()
    assert line[-9:] == plain[-9:] or not plain[-9:].isprintable()


def test_what_no_check_foresaw_has_its_trace_and_the_servers_own_error_is_not_hidden(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = world(made(ROWS["fedavg"]))
    content = measured("train-loss", 10**400)(fresh(before.answers[NODES[0]]))
    outcome(before, [answered({NODES[0]: content})])
    (record,) = [r for r in caplog.records if "left out" in r.getMessage()]
    assert record.exc_info is not None
    assert record.exc_info[0] is OverflowError

    def broken(*_: Any) -> float:
        raise ZeroDivisionError("a mistake")

    before.strategy.weights_of = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        the_round(before, {})


# ---- a legacy server's clients ------------------------------------------------------------------


def legacy_clients(cids: Mapping[int, str] = {}, **changes: Any) -> list[Proxy]:
    """Return clients of which the liar's results pass through ``changes``."""
    on = grid(quadratics(CLIENTS))
    own = {NODES[LIAR]: changes}
    return [Proxy(n, on, cid=cids.get(n, ""), **own.get(n, {})) for n in on.get_node_ids()]


def averaging(**options: Any) -> FedAvg:
    return quiet(FedAvg, min_available_nodes=CLIENTS, node_wait=5.0, **options)


def test_an_initial_model_that_is_none_is_asked_of_the_next_client_or_the_run_says_why() -> None:
    bad: dict[str, Callable[[Any], Any]] = {
        "not a NumPy": tensors(lambda t: [b"noise", *t[1:]]),
        "bytes do not hold": tensors(lambda t: [claims("'<f8'", f"({HUGE},)"), *t[1:]]),
        "is not finite": tensors(lambda t: [npy(np.full((2, 2), math.nan)), *t[1:]]),
        "no trainable array": tensors(lambda t: []),
        "NoneType": tensors(lambda t: [None, *t[1:]]),
        "has no attribute 'tensors'": lambda result: replace(result, parameters=None),
        "out of disk": lambda r: replace(r, status=Status(Code.FIT_NOT_IMPLEMENTED, "out of disk")),
    }
    on = grid(quadratics(2))
    first, second = on.get_node_ids()
    for reason, change in bad.items():
        liar = Proxy(first, on, get_parameters=change)
        with pytest.raises(ValueError, match=f"no client gave an initial model: .*{reason}"):
            as_legacy(averaging()).initialize_parameters(managed([liar]))
        clients = managed([liar, Proxy(second, on)])
        parameters = as_legacy(averaging()).initialize_parameters(clients)
        assert parameters is not None
        np.testing.assert_array_equal(to_vector(parameters_to_ndarrays(parameters)), np.zeros(DIM))


def test_a_clients_metrics_do_not_take_the_place_of_its_examples_or_loss() -> None:
    def lying(result: Any) -> Any:
        own = {"num-examples": 10**9, "eval-loss": -1e9}
        return replace(result, metrics={**result.metrics, **own})

    usual, lied = (averaging(fraction_evaluate=1.0) for _ in range(2))
    expected = served(usual, legacy_clients(), 2)
    model = served(lied, legacy_clients(fit=lying, evaluate=lying), 2)
    np.testing.assert_array_equal(model, expected)
    found, right = (s.result.evaluate_metrics_clientapp[2]["eval-loss"] for s in (lied, usual))
    assert found == right


def test_a_client_that_leaves_between_its_choice_and_its_request_is_a_lost_one() -> None:
    proxies, strategy = legacy_clients(), averaging()
    manager, adapter = managed(proxies), as_legacy(strategy, to_record(START))
    parameters = adapter.initialize_parameters(manager)
    assert parameters is not None
    usual = strategy.configure_train

    def leaving(*arguments: Any) -> Any:
        messages = usual(*arguments)
        manager.unregister(proxies[1])
        return messages

    strategy.configure_train = leaving  # type: ignore[method-assign, assignment]
    asked = adapter.configure_fit(1, parameters, manager)
    results = [(proxy, proxy.fit(ins, None, None)) for proxy, ins in asked]
    _, metrics = adapter.aggregate_fit(1, results, [])
    assert (metrics["clients-used"], metrics["clients-lost"]) == (CLIENTS - 1, 1)


# ---- who a node says it is ----------------------------------------------------------------------

MISSING = object()
ODD: list[Any] = [
    *(5, 0, -1, 2**63, 2**64, 10**400, True, 0.5, 3.0, math.nan, None, "", "3", b"\1\2\3", {}),
    *(object(), MISSING, [], [1], [1, 2], [1, 2, 3, 4], [1, 2, 2], [1, 2, -3], [1, 2, True]),
    *([1, 2, 0.5], [[1], 2, 3], [1, 2, math.nan], ["a", "b", "c"], [None] * 3, (1, 2, 3)),
    [2**64, 2**63, 10**400],
    [2**40, 1, 2],  # ids, and no numbers of samples
]
INTRODUCTIONS: dict[str, dict[str, Any]] = {
    "one client": {"client-id": 3, "num-partitions": 4},
    "a host": {"client-ids": [3, 4, 5], "samples": [9, 8, 7], "num-partitions": 1},
    "a host that shares": {"any-of": 3, "samples": [9, 8, 7], "num-partitions": 2},
}
FIELDS = sorted({field for about in INTRODUCTIONS.values() for field in about})
ONE, OTHER = NODES[:2]


def answer(node: int, about: Mapping[str, Any] | None, request: int | None = None) -> Message:
    record = ConfigRecord()
    vars(record)["_data"].update(about or {})  # also what Flower's records refuse
    content = None if about is None else RecordDict({"client": record})
    return as_message(Reply(node, f"query-{node if request is None else request}", content))


class Told:
    """A Grid whose nodes answer a query by ``about``; further answers come early and late."""

    def __init__(
        self,
        about: Mapping[int, Mapping[str, Any] | None],
        early: Iterable[Message] = (),
        late: Iterable[Message] = (),
    ) -> None:
        become_server()
        self.about, self.early, self.late = about, early, late

    def get_node_ids(self) -> list[int]:
        return list(self.about)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float) -> list[Message]:
        asked = []
        for message in messages:
            asked.append(message.metadata.dst_node_id)
            message.metadata.__dict__["_message_id"] = f"query-{asked[-1]}"
        return [*self.early, *(answer(node, self.about[node]) for node in asked), *self.late]


def known_of(about: Mapping[str, Any], population: int = 0) -> dict[int, int]:
    """Return the clients of a node beside one that is client 0 of two."""
    told: Any = Told({ONE: {"client-id": 0, "num-partitions": 2}, OTHER: about})
    found = Nodes(0.01, population).connected(told)
    return {client: node for client, node in found.items() if node != ONE}


@pytest.mark.parametrize("kind", INTRODUCTIONS)
def test_no_odd_value_in_a_nodes_introduction_harms_the_clients_of_another(kind: str) -> None:
    """Neither at the start nor when the node comes back."""
    shares, usual = kind == "a host that shares", INTRODUCTIONS[kind]
    honest: dict[str, Any] = {"any-of": 3} if shares else {"client-ids": [0, 1, 2]}
    liar = 6 if shares else 8  # asked before the other where no node owns a client
    for field, value in itertools.product(FIELDS, ODD):
        odd = {
            name: entry for name, entry in {**usual, field: value}.items() if entry is not MISSING
        }
        for first in (odd, usual):
            nodes = Nodes(0.01, 3 * shares)
            for there in ({liar: first}, {}, {liar: odd}):
                told: Any = Told({7: honest, **there})
                with silence():
                    found = nodes.connected(told)
                assert [found[client] for client in range(3)] == [ANY_HOST if shares else 7] * 3
                assert nodes.hosts[7] is shares
                numbers = [*nodes.known, *nodes.samples.values()]
                assert all(type(one) is int and 0 <= one < 2**64 for one in numbers), value
                assert max(nodes.samples.values(), default=0) <= MAX_SAMPLES


def test_who_cannot_be_whom_it_says_is_known_by_its_node_or_not_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for value in (-1, True, "0", 0.0, [0], b"0", 2, 2**70):  # of two partitions, 2 is none
        assert known_of({"client-id": value, "num-partitions": 2}) == {OTHER: OTHER}, value
    for ids in ([5, 5], [-1], [True], ["0"], []):
        caplog.clear()
        assert known_of({"client-ids": ids, "num-partitions": 6}) == {}, ids
        assert "it is not asked" in caplog.text
    assert known_of({"client-ids": [7, 2**63 + 5]}) == {7: OTHER, 2**63 + 5: OTHER}
    assert known_of({"client-ids": [0, 1, 2]}, population=5) == {}
    assert "hosts 3 clients [0, 1, 2], of the population that hosts share" in caplog.text
    for population in (0, CLIENTS + 1):
        caplog.clear()
        nodes, told = Nodes(0.01, population), Told({OTHER: {"any-of": CLIENTS}})
        for _ in range(2):
            assert nodes.connected(told) == {}  # type: ignore[arg-type]
        text = f"any of 3 clients; the run's shared population has {population or 'no'} clients"
        assert caplog.text.count(text) == 1


def test_an_answer_to_a_query_counts_once_and_from_who_was_asked() -> None:
    early = [answer(ONE, {"client-id": 7}, OTHER), answer(5, {"client-id": 9})]
    late = [answer(ONE, {"client-id": 8})]
    nodes, told = Nodes(1.0), Told({ONE: {"client-id": 3}, OTHER: None}, early, late)
    assert nodes.connected(told) == {3: ONE}  # type: ignore[arg-type]
    assert nodes.connected(told) == {3: ONE, OTHER: OTHER}  # type: ignore[arg-type]
    for partitions in (-4, True, "9", 2.5, [3]):  # which nobody waits for
        alone: Any = Told({ONE: {"client-id": 0, "num-partitions": partitions}})
        assert Nodes(100.0).wait(alone, 1) == {0: ONE}


NO_IDS: list[Any] = [[1], [1, "x"], {}, None, -1, 1.0, True, "1", b"1", 2**80, CLIENTS]
PROPERTIES: list[Callable[[Any], Any]] = [
    lambda result: 1 / 0,
    lambda result: None,
    *(
        lambda result, fields=fields: replace(result, **fields)
        for fields in (
            {"status": Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, "no")},
            {"status": None},
            {"properties": None},
            {"properties": [("client-id", 1)]},
            {"properties": {"client-id": object()}},
            {"properties": {"client-id": 1, "x": object()}},
            {"properties": {7: 1}},
            {"properties": {"num-partitions": "9"}},
            *({"properties": {"client-id": i, "num-partitions": CLIENTS}} for i in NO_IDS),
        )
    ),
]


def test_a_legacy_client_whose_properties_cannot_be_read_is_known_by_its_nodes_id() -> None:
    for change in PROPERTIES:
        nodes = Nodes(5.0)
        network: Any = Network(managed(legacy_clients(get_properties=change)))
        nodes.connected(network)
        assert nodes.connected(network) == {0: NODES[0], NODES[LIAR]: NODES[LIAR], 2: NODES[2]}


def test_legacy_nodes_whose_ids_are_no_numbers_take_part_as_others_do() -> None:
    cids = dict(zip(NODES, ("0a" * 16, "node one", "²"), strict=False))
    usual, strategy = (quiet(FedADMM, min_available_nodes=CLIENTS, node_wait=5.0) for _ in range(2))
    model = served(strategy, legacy_clients(cids), 2)
    np.testing.assert_array_equal(model, served(usual, legacy_clients(), 2))
    assert node_of(str(2**64 - 1)) == 2**64 - 1
    assert len({node_of(cid) for cid in [*cids.values(), "9" * 30]}) == CLIENTS + 1


# ---- hosts --------------------------------------------------------------------------------------


def test_a_client_is_with_the_host_that_introduced_it_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosts, hosted = federation(), SHAPES["2 hosts"][0]
    thief = 2**64 - 5  # the last that is asked
    copy = next(iter(hosts.contexts.values()))
    hosts.contexts[thief] = Context(1, thief, dict(copy.node_config), RecordDict(), {})
    one = admm()
    first, second = (n for n in hosts.contexts if n != thief)
    found = one.nodes.connected(hosts)
    assert found == {**dict.fromkeys(hosted[0], first), **dict.fromkeys(hosted[1], second)}
    assert "hosts 3 clients [0, 1, 2], which is node" in caplog.text
    assert one.nodes.connected(hosts) == found
    del hosts.contexts[first]
    assert one.nodes.connected(hosts) == found | dict.fromkeys(hosted[0], thief)
    returned, late = hosts.contexts.pop(thief), thief + 1
    hosts.contexts |= {first: copy, late: Context(1, late, returned.node_config, RecordDict(), {})}
    assert one.nodes.connected(hosts) == found
    del hosts.contexts[late]  # while it waits for them
    assert one.nodes.connected(hosts) == found
    del hosts.contexts[first]
    assert one.nodes.connected(hosts) == dict.fromkeys(hosted[1], second)


def test_a_large_population_is_met_by_one_query_of_each_host() -> None:
    queries: list[Message] = []
    app = make_client_app([], hosts=100_000)

    def note(request: Message, reply: Message) -> Message:
        queries.append(request)
        return reply

    hosts = InProcessGrid(app, 100_000, hosts=2, fault=note)
    one = FedAvg(shared_population=100_000)
    assert one.nodes.connected(hosts).keys() == {*range(100_000)}
    one.nodes.connected(hosts)
    assert len(queries) == 2
    assert not hosts.clients


def test_states_of_a_shared_population_are_never_in_a_hosts_context() -> None:
    hosts = InProcessGrid(make_client_app(quadratics(6), hosts=6), 2)
    with pytest.raises(RuntimeError, match="hosts of a shared population do not have in common"):
        train(admm(shared_population=6), hosts, 5)
    assert not any(context.state for context in hosts.contexts.values())


Records = dict[str, Any]


def other_ids(*ids: int) -> Callable[[Records], None]:
    def change(records: Records) -> None:
        for name in ("arrays", "metrics-0", "config-0"):
            records["hosted"][name] = [*ids]

    return change


def updated(record: str, **entries: Any) -> Callable[[Records], None]:
    named = {name.replace("_", "-"): value for name, value in entries.items()}
    return lambda records: records[record].update(named)


def no_texts(records: Records) -> None:
    del records["hosted"]["config-0"], records["config-0"]


def in_two_tables(records: Records) -> None:
    records["hosted"]["config-1"], records["config-1"] = [1], {"more": "text"}


ALL = {0, 1, 2}
FORGERIES: dict[str, tuple[Callable[[Records], Any], str, set[int]]] = {
    "a client of the other host": (other_ids(3, 1, 2), "answers for client 3, of which it", {0}),
    "a client that nobody knows": (other_ids(77, 1, 2), "answers for client 77, of which", {0}),
    "a client twice": (other_ids(0, 1, 1), r"clients \[1\] are there twice", ALL),
    "a client in two tables": (in_two_tables, r"clients \[1\] are there twice", ALL),
    "ids that are none": (other_ids(0, 1, -2), "must list ids of clients, got", ALL),
    "too few numbers": (
        updated("metrics-0", train_loss=[1.0]),
        "'train-loss' has 1 entries for 3 clients",
        ALL,
    ),
    "a number for a list": (
        updated("metrics-0", train_loss=1.0),
        "'train-loss' has no list for 3 clients",
        ALL,
    ),
    "too few slices": (
        updated("arrays", tail=Array(np.zeros((2, 1)))),
        r"array 'tail' has shape \(2, 1\) for 3 clients",
        ALL,
    ),
    "no slices": (
        updated("arrays", tail=Array(np.array(1.0))),
        r"array 'tail' has shape \(\) for 3 clients",
        ALL,
    ),
    "no such table": (updated("hosted", config_9=[1]), "'config-9'", ALL),
    "no such record": (
        updated("hosted", more=[1]),
        r"it names \['more'\], which it does not have",
        ALL,
    ),
    "reasons without clients": (
        updated("hosted", reasons=["none"]),
        "0 clients failed, and the reasons are",
        ALL,
    ),
    "failed and not": (
        updated("hosted", failed=[1], reasons=["none"]),
        r"clients \[1\] are there twice",
        ALL,
    ),
    "no word of whose": (lambda records: records.pop("hosted"), "'hosted'", ALL),
    "one number that is not finite": (
        updated("metrics-0", train_loss=[1.0, math.nan, 2.0]),
        "metric 'train-loss' is not finite: nan",
        {1},
    ),
    "no texts": (no_texts, "it does not say which algorithm", ALL),
}
"""The clients of the first host that are left out for each."""


def test_a_forged_reply_of_a_host_is_left_out_for_one_reason_and_harms_its_own_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = iter([None, *(change for change, _, _ in FORGERIES.values()), None])
    used: list[set[int]] = []

    def fault(request: Message, reply: Message) -> Message:
        first = request.metadata.message_type == "train" and 0 in asked_in(request.content)
        if not first or (change := next(turns)) is None:
            return reply
        records: Records = {k: dict(v) for k, v in reply.content.items()}
        change(records)
        kinds: dict[str, Any] = {"arrays": ArrayRecord, "metrics-0": MetricRecord}
        reply.content = RecordDict({k: kinds.get(k, ConfigRecord)(v) for k, v in records.items()})
        return reply

    options: dict[str, Any] = {"fraction_train": 1.0, "local": local(lr=0.4, epochs=1)}
    one = admm(**options, callbacks=[lambda info: used.append({*info.clients})])
    train(one, federation(fault=fault), len(FORGERIES) + 2)
    everybody = {*range(6)}
    expected = {name: everybody - out for name, (_, _, out) in FORGERIES.items()}
    assert used[0] == used[-1] == everybody
    assert dict(zip(FORGERIES, used[1:-1], strict=True)) == expected
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    for line, (_, reason, _) in zip(lines, FORGERIES.values(), strict=True):
        assert re.search(reason, line)


def test_a_host_cannot_be_made_to_run_a_client_that_is_not_its_own() -> None:
    content = pack_request(("arrays", "config"), to_record(START), {4: {"server-round": 1}})
    hosts = federation()
    reply = hosts.answer(Message(content, next(iter(hosts.contexts)), "train"))
    assert reply is not None
    (fault,) = unpack_reply(reply.content).values()
    assert "this node does not host client 4, but [0, 1, 2]" in str(fault)


def test_what_needs_a_message_for_each_client_says_that_hosts_do_not_go_with_it() -> None:
    """A wrapper, Flower's own strategies, and mods that change one client's upload."""
    wrapped = DifferentialPrivacyServerSideFixedClipping(FedAvg(local=local()), 1.0, 5.0, 2)
    with pytest.raises(ValueError, match=r"a wrapper .* one client per message"):
        wrapped.start(federation(), to_record(START), 1)
    reasons: list[str] = []

    def note(request: Message, reply: Message) -> Message:
        reasons.append(str(reply.error.reason))
        return reply

    flowers = FlowersFedAvg(min_train_nodes=1, min_available_nodes=1)
    flowers.start(federation(fault=note), to_record(START), 1)
    assert all("hosts several clients, and the request is about one" in why for why in reasons)
    assert reasons
    with pytest.raises(RuntimeError, match=r"\['fixedclipping_mod'\] change one client's upload"):
        train(FedAvg(local=local()), federation(mods=[fixedclipping_mod]), 5)


# ---- whatever a client calls its numbers --------------------------------------------------------

Names = Mapping[str, set[str]]
"""By type of message, the names of numbers in replies."""


def never(request: Message) -> bool:
    return False


class Forger:
    """A fault that adds numbers ``value`` under ``names`` to the liar's replies.

    ``reported`` keeps the names in all replies as they were; ``lost`` says which never arrive.
    """

    def __init__(
        self, names: Names, value: float = 1.7e308, lost: Callable[[Message], bool] = never
    ) -> None:
        self.names, self.value, self.lost = names, value, lost
        self.reported: dict[str, set[str]] = {"train": set(), "evaluate": set()}

    def __call__(self, request: Message, reply: Message) -> Message | None:
        kind = request.metadata.message_type
        if kind not in self.reported:
            return reply
        numbers = next(iter(reply.content.metric_records.values()))
        self.reported[kind] |= numbers.keys()
        if request.metadata.dst_node_id == NODES[LIAR]:
            for name in sorted(self.names.get(kind, set()) - numbers.keys()):
                numbers[name] = self.value
        return None if self.lost(request) else reply


class Heard(NamedTuple):
    """A run of three rounds: its model, rounds, and the names of rounds', rows' and clients'."""

    model: np.ndarray
    infos: list[RoundInfo]
    names: set[str]
    in_rows: set[str]
    reported: Names


def every_second(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
    """Return the server's own test, in every second round; one of its names is a usual one."""
    loss = float(np.abs(to_vector(arrays)).sum())
    tested: dict[str, Any] = {
        "test-accuracy": 0.1 + server_round / 100,
        "test-loss": loss,
        "accuracy": 0.5,
    }
    return None if server_round % 2 else MetricRecord(tested)


def heard(
    row: Row,
    names: Names,
    value: float = 1.7e308,
    lost: Callable[[Message], bool] = never,
    **options: Any,
) -> Heard:
    forger, infos, stop = Forger(names, value, lost), list[RoundInfo](), EarlyStop(target=4.0)
    callbacks = [infos.append, lambda i: stop(i) if "test-accuracy" in i.metrics else None]
    usual: dict[str, Any] = {"fraction_evaluate": 1.0, "local": local(), "callbacks": callbacks}
    strategy = row.strategy(**usual, **options)
    on = grid(quadratics(CLIENTS), fault=forger)
    arrays = strategy.start(on, to_record(START), 3, evaluate_fn=every_second).arrays
    assert len(infos) == 3
    found = {name for info in infos for name in info.metrics}
    in_rows = {name for info in infos for row in info.clients.values() for name in row}
    return Heard(to_vector(arrays), infos, found, in_rows, forger.reported)


def assert_deaf(row: Row, honest: Heard, *arguments: Any, **options: Any) -> None:
    """Check that a liar's numbers under all names but its own change none of the honest run's."""
    names = honest.names | honest.in_rows
    bare = {name.removeprefix("eval-") for name in names}
    wanted = names | bare | SERVER | {"test-other", "own-loss", "num-examples-mean"}
    forged = heard(
        row, {k: wanted - own for k, own in honest.reported.items()}, *arguments, **options
    )
    np.testing.assert_array_equal(forged.model, honest.model)
    for before, after in zip(honest.infos, forged.infos, strict=True):
        assert after.metrics["seconds"] < 1e6
        assert after.metrics.keys() & honest.names == before.metrics.keys() & honest.names
        for name in before.metrics.keys() - {"seconds"}:
            np.testing.assert_equal(after.metrics[name], before.metrics[name], err_msg=name)
        assert after.clients.keys() == before.clients.keys()
        for client, numbers in before.clients.items():
            found = after.clients[client]
            assert {name: found[name] for name in found.keys() & honest.in_rows} == numbers


@pytest.mark.sampled("fedavg", "fedpd")
@every_algorithm
def test_no_name_of_a_clients_reaches_a_number_that_is_not_its_own(row: Row) -> None:
    """And every number that no client reports is declared the server's."""
    honest = heard(row, {})
    assert_deaf(row, honest)
    theirs = {name for reported in honest.reported.values() for name in reported}
    theirs |= {f"{name}{end}" for name in theirs for end in SPREAD}
    own = (honest.names | honest.in_rows) - theirs - {"test-accuracy", "test-loss", "accuracy"}
    assert own <= SERVER.union(STRATEGIES[row.name].reports)
    assert {"clients-used", "eval-clients-used", "seconds", "weight-share"} <= own


def test_no_value_does_either_nor_through_a_users_metrics_function() -> None:
    def handed_on(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        found: MetricRecord = aggregate_metricrecords(contents, weighted_by)
        return found

    every: list[dict[str, Any]] = [{}]
    every += [{"train_metrics_aggr_fn": handed_on, "evaluate_metrics_aggr_fn": handed_on}]
    for options in every:
        honest = heard(ROWS["fedavg"], {}, **options)
        assert honest.infos[0].metrics["train-loss"] > 0
        for value in (0.0, -3.0, 4.0, 10**15):
            assert_deaf(ROWS["fedavg"], honest, value, **options)


@pytest.mark.parametrize("name", ["fedavg", "fedpd", "fedbc"])
@pytest.mark.sampled("fedpd")
def test_in_a_void_round_no_clients_name_reaches_a_number_that_is_not_its_own(name: str) -> None:
    """Where the server has no shares, nor a test."""
    sent: list[Message] = []

    def first_of_all(request: Message) -> bool:
        sent.extend([request] * (request.metadata.message_type == "train"))
        return len(sent) == 1 and sent[0] is request

    options: dict[str, Any] = {"lost": first_of_all, "min_replies": CLIENTS, **KNOBS.get(name, {})}
    honest = heard(ROWS[name], {}, **options)
    assert ["weight-share-largest" in i.metrics for i in honest.infos] == [False, True, True]
    sent.clear()
    assert_deaf(ROWS[name], honest, **options)


def test_numbers_of_the_clients_own_are_found_under_their_names_or_client_names(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = {
        "train": {"reward", "eval-reward", "seconds", "loss-mean", "client-seconds", "accuracy"},
        "evaluate": {
            "accuracy",
            "own-reward",
            "train-loss",
            "clients-used",
            "eval-samples",
            "loss",
        },
    }
    honest, forged = heard(ROWS["fedavg"], {}), heard(ROWS["fedavg"], names, 7.0)
    row, metrics = forged.infos[0].clients[LIAR], forged.infos[0].metrics
    own = ["reward", "own-reward", "eval-accuracy", "eval-train-loss"]
    own += [f"client-{name}" for name in ("eval-reward", "seconds", "loss-mean", "client-seconds")]
    own += [f"eval-client-{name}" for name in ("clients-used", "samples")]
    for name in own:
        assert row[name] == 7.0, name
        assert metrics[name] == metrics[f"{name}-variance"] + 7.0 == 7.0, name
    # the server has an "accuracy" too, which it reported before the first round
    assert (row["accuracy"], metrics["client-accuracy"]) == (7.0, 7.0)
    assert ["accuracy" in info.metrics for info in forged.infos] == [False, True, False]
    # of "loss" and "eval-loss", a client that reports both means the full name
    assert metrics["eval-loss"] == honest.infos[0].metrics["eval-loss"]
    told = [line for line in caplog.messages if line.startswith("clients use names")]
    assert told == [
        "clients use names of the server's, and get others:"
        " ['client-seconds', 'eval-reward', 'loss-mean', 'seconds']"
    ]
    caplog.clear()
    heard(ROWS["fedavg"], {"train": {f"test-\n\x1b[2J{number}" for number in range(40)}})
    (long,) = (line for line in caplog.messages if line.startswith("clients use names"))
    assert long.isprintable()
    assert len(long) < 400


parts = st.sampled_from(
    ["", *SERVER, *SPREAD, TESTED, *EVALUATED, "client-", "loss", "train-loss", "accuracy", "-"]
)
any_name = st.lists(parts, min_size=1, max_size=4).map("".join) | st.text(max_size=8)


@settings(**UNHURRIED)
@given(any_name, any_name)
def test_no_name_becomes_anothers_or_the_same_as_another(one: str, two: str) -> None:
    trained, evaluated = in_training(one), in_evaluation(one)
    assert trained not in SERVER
    assert not trained.startswith((TESTED, *EVALUATED))
    assert trained.startswith("client-") or not trained.endswith(SPREAD)
    assert (trained == in_training(two)) is (one == two)
    assert evaluated not in SERVER
    assert evaluated.startswith(EVALUATED)
    assert evaluated != in_training(two)
    assert evaluated.startswith("eval-client-") or not evaluated.endswith(SPREAD)


def test_the_files_own_columns_are_theirs(tmp_path: Path) -> None:
    """Also where a strategy of one's own puts such names in."""
    rows = {5: {"client": 1, "round": 2, "x": 1.0}}
    info = RoundInfo(3, 9, to_record(START), {"round": 8.0, "x": 1.0}, rows)
    for kind, row in (
        (History, {"round": 3, "x": 1.0}),
        (ClientHistory, {"round": 3, "client": 5, "x": 1.0}),
    ):
        path = tmp_path / f"{kind.__name__}.jsonl"
        kind(path)(info)
        assert list(json.loads(path.read_text()).items()) == list(row.items())


def simulated(folder: Path, names: Names) -> tuple[Forger, dict[str, Any]]:
    """Return what the files and tables of a run of FedPD say, but for the time it took."""
    config = RunConfig.parse(
        {
            "algorithm": "fedpd", "dataset": "synthetic", "clients": CLIENTS, "rounds": 3,
            "epochs": 1, "fraction": 1.0, "fraction-evaluate": 1.0, "evaluate-every": 2,
            "stop-at-target": True, "target": 1.0, "checkpoint-every": 1, "checkpoint-keep": 1,
            "output": str(folder), "state-dir": f"{folder}-states",
        }
    )  # fmt: skip
    forger, best = Forger(names), BestModel(folder.parent / f"{folder.name}-best")
    clients = InProcessGrid(
        client_app.app, CLIENTS, run_config=config.to_run_config(), fault=forger
    )
    summary = vars(experiment.run(config, clients, [best]))
    of_clients = ("round", "client", "samples", "eval-samples")
    found = {
        "summary": summary,
        "curve": curve(config),
        "figures": run_figures(config, summary),
        "best": (best.best, best.best_round),
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "clients": [[row[n] for n in of_clients] for row in read_history(folder / "clients.jsonl")],
    }
    return forger, without_times(found)


def without_times(found: Any) -> Any:
    if isinstance(found, dict):
        return {n: without_times(v) for n, v in found.items() if not n.startswith("seconds")}
    return [without_times(value) for value in found] if isinstance(found, list) else found


def test_tables_and_checkpoints_do_not_hear_a_forgers_names(tmp_path: Path) -> None:
    honest, expected = simulated(tmp_path / "honest", {})
    files = [tmp_path / f"honest/{name}.jsonl" for name in ("history", "clients")]
    wanted = {name for file in files for row in read_history(file) for name in row} | SERVER
    wanted |= {"algorithm", "seed", "gradient-norm2"}
    names = {kind: wanted - reported for kind, reported in honest.reported.items()}
    _, found = simulated(tmp_path / "forged", names)
    assert found == expected


# ---- clients that are lost, late or away --------------------------------------------------------

COUNT_WHO_IS_ASKED = {"fedbc", "per-fedbc", "fedbcd-i", "fedbcd-i-async"}
"""Their rules know clients asked in vain from absent ones: FedBC's dual clock, offline rounds."""
TROUBLED = 4


def half_for_five_rounds(server_round: int, client: int) -> bool:
    return 4 <= server_round <= 8 and client % 2 == 1


def until_round_10(server_round: int, client: int) -> bool:
    return client == TROUBLED - 1 and server_round < 10


@pytest.mark.sampled("fedpd", "scaffold")
@every_algorithm
def test_late_answers_are_lost_ones_to_the_bit_and_those_present_go_on_without_the_absent(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    late, lost, gone = (
        Troubled(**{what: half_for_five_rounds}) for what in ("late", "lost", "away")
    )
    expected = lost.run(row)
    caplog.clear()
    np.testing.assert_array_equal(late.run(row), expected)
    assert caplog.text.count("no reply from 2 clients [1, 3]") == 5
    assert late.acked == lost.acked
    found = gone.run(row)
    few, everybody = [2.0, 2.0, 0.0, 0.0], [4.0, 4.0, 0.0, 0.0]
    assert gone.counts == 3 * [everybody] + 5 * [few] + 4 * [everybody]
    present = 8 if row.partial else 3  # a skipped round acknowledges nothing
    assert gone.acked[7] == {0: present, 1: 3, 2: present, 3: 3}
    assert set(gone.acked[-1].values()) == {12}
    if row.name not in COUNT_WHO_IS_ASKED:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.sampled("fedadmm")
@every_algorithm
def test_until_a_client_joins_the_model_is_that_of_a_federation_without_it(row: Row) -> None:
    joined = Troubled(away=until_round_10)
    np.testing.assert_array_equal(joined.run(row, 9), Troubled(TROUBLED - 1).run(row, 9))
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

    troubled = Troubled(away=away, late=late)
    rounds = 200 if row.name in {"fedsgd", "q-fedavg"} else 100
    found = troubled.run(row, rounds)
    np.testing.assert_allclose(found, row.limit(quadratics(TROUBLED)), atol=1e-4)
    assert troubled.counts[9] == troubled.counts[-1] == [4.0, 4.0, 0.0, 0.0]


class StandsIn(InProcessGrid):
    """Where a client's node is gone, Flower answers itself, and names the request alone.

    What it answers comes after round ``held``.
    """

    def __init__(self, gone: Trouble, client_app: Any = None, *, held: int = 0, **options: Any):
        app = client_app or make_client_app(quadratics(TROUBLED))
        super().__init__(app, TROUBLED, **options)
        self.gone, self.held, self.late = gone, held, dict[str, Message]()

    def answer(self, message: Message) -> Message | None:
        config: Any = message.content.config_records.get("config", {})
        number = config.get("server-round", 0)
        if number > self.held:
            self._replies |= self.late
        if not self.gone(number, CLIENT_OF[message.metadata.dst_node_id]):
            return super().answer(message)
        reply = Message(Error(5, "Node Unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1
        if number > self.held:
            return reply
        self.late[message.metadata.message_id] = reply
        return None


GONE = {"reply of client 1 left out: none came: Node Unavailable", "no reply from client 1"}
ASYNC: dict[str, Any] = {"fraction_evaluate": 0.0, "local": local(), "box": None}


@pytest.mark.parametrize(
    "strategy",
    [
        FedADMM(fraction_evaluate=0.0, local=local()),
        FedBCDAsync(**ASYNC, servers=2),
        FedBCDAsync(**ASYNC, order="arrival"),
    ],
    ids=["fedadmm", "fedbcd-async-virtual", "fedbcd-async-arrival"],
)
def test_where_flower_answers_for_a_node_that_is_gone_the_log_names_its_client(
    strategy: FederatedStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    train(strategy, StandsIn(lambda server_round, client: server_round > 0 and client == 1), 4)
    assert {r.getMessage() for r in caplog.records if r.levelno == WARNING} == GONE


def test_it_also_does_where_that_answer_comes_a_round_later(
    no_pause: None, caplog: pytest.LogCaptureFixture
) -> None:
    used: list[float] = []
    note = lambda info: used.append(info.metrics["clients-used"])  # noqa: E731
    strategy = FedBCDAsync(**ASYNC, order="arrival", callbacks=[note])
    later = StandsIn(lambda server_round, client: server_round == 1 and client == 1, held=1)
    strategy.start(later, to_record(START), 3, timeout=0.2)
    assert {r.getMessage() for r in caplog.records if r.levelno == WARNING} == GONE
    assert used == [3.0, 3.0, 4.0]


def test_where_all_nodes_are_gone_for_a_round_it_is_void_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other than where every ClientApp raises, which ends a run at once."""
    config = RunConfig.parse(
        {"clients": TROUBLED, "rounds": 3, "timeout": 12.5, "output": str(tmp_path)}
    )
    waited: list[float | None] = []

    class Clocked(StandsIn):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            requests = list(messages)
            waited.extend([timeout] * bool(requests))
            return super().send_and_receive(requests, timeout=timeout)

    keys = config.to_run_config()
    gone = Clocked(lambda r, client: r == 2, client_app.app, run_config=keys)
    assert experiment.run(config, gone).rounds == 3
    assert "round 2 is skipped: 0 usable replies" in caplog.text
    # the clients' ids and a description, then training for as long as the run-config says
    assert waited[:2] == [60.0, 60.0]
    assert {*waited[2:]} == {12.5}


# ---- damaged states -----------------------------------------------------------------------------


def damage(folder: Path, client: int) -> tuple[Path, bytes]:
    """Change one number in the client's last state file; return the file and what it held."""
    path = max((folder / str(client)).iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return path, content


def in_folder(folder: Path) -> Callable[[Any], DirectoryStore]:
    return lambda context: DirectoryStore(folder, client_id(context))


def test_a_damaged_state_is_treated_as_a_lost_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, lost = (
        grid(quadratics(3), store=in_folder(tmp_path / name)) for name in ("kept", "lost")
    )
    one, other = (made(ROWS["fedadmm"], lost_state="warn") for _ in range(2))
    theta = one.start(damaged, to_record(START), 2).arrays
    assert same(to_vector(other.start(lost, to_record(START), 2).arrays), to_vector(theta))
    path, _ = damage(tmp_path / "kept", 1)
    for file in (tmp_path / "lost/1").iterdir():
        file.unlink()
    found = one.start(damaged, theta, 2)
    assert f"client 1 begins anew: {path} is damaged" in caplog.text
    assert "client 1 lost its state and is treated as new" in caplog.text
    assert found.train_metrics_clientapp[3]["clients-used"] == 3
    assert same(to_vector(found.arrays), to_vector(other.start(lost, theta, 2).arrays))
    assert not path.exists()  # replaced by what was acknowledged since


def test_a_client_with_a_damaged_state_is_left_out_until_that_is_restored(tmp_path: Path) -> None:
    """If it is evaluated meanwhile, as a newcomer is."""
    on = grid(quadratics(3), store=in_folder(tmp_path))
    one = made(ROWS["fedadmm"], lost_state="refuse")
    theta = one.start(on, to_record(START), 2).arrays
    path, content = damage(tmp_path, 1)
    one.fraction_evaluate = 1.0
    requests = list(one.configure_evaluate(1, theta, ConfigRecord(), on))
    one.aggregate_evaluate(1, on.send_and_receive(requests))
    numbers = one.run.clients[1]
    assert numbers["own-loss"] == numbers["eval-loss"] != one.run.clients[2]["own-loss"]
    one.fraction_evaluate = 0.0
    found = one.start(on, theta, 2)
    assert [m["clients-used"] for m in found.train_metrics_clientapp.values()] == [2, 2]
    assert one.run.faults == {1: "its acknowledged state is lost"}
    path.write_bytes(content)
    found = one.start(on, found.arrays, 1)
    assert found.train_metrics_clientapp[5]["clients-used"] == 3


@pytest.mark.slow
def test_a_run_with_state_files_works_where_pickle_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle is used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
        monkeypatch.setattr(f"_pickle.{name}", forbidden)
    for name in ("torch.load", "torch.save"):
        monkeypatch.setattr(name, forbidden)
    for row in ROWS.values():
        on = grid(quadratics(2), store=in_folder(tmp_path / row.name))
        best = BestModel(tmp_path / "best.safetensors", "train-loss", smaller=True)
        history = History(tmp_path / "history.jsonl")
        strategy = row.strategy(local=local(), callbacks=[best, history])
        strategy.fraction_evaluate = 1.0
        result = strategy.start(on, to_record(START), 2)
        assert result.train_metrics_clientapp[2]["clients-used"] == 2
    with pytest.raises(AssertionError, match="pickle is used"):
        pickle.loads(b"")
