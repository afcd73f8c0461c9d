"""Nodes that host several clients: whatever is true of one client per node is true of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from laws import START, Row, every_algorithm, local, train
from problems import Quadratic, make_client_app, quadratics, to_record, to_vector

from clients import AnyAlgorithmClient, ContextStore, DirectoryStore, client_id
from clients.node.in_process import Fault, InProcessGrid
from clients.node.state import Owner, peek
from fl_strategies import Checkpoints, FedADMM, FedAvg, RoundInfo
from fl_strategies.server import hosting

CLIENTS = 6
SHAPES: dict[str, tuple[list[Any], bool]] = {
    "nodes of one": ([None] * CLIENTS, False),
    "2 hosts": ([[0, 1, 2], [3, 4, 5]], False),
    "2 hosts, crossed and reversed": ([[4, 2, 0], [5, 3, 1]], False),
    "1 host": ([[*range(CLIENTS)]], False),
    "a host and nodes of one": ([None, [1, 2, 4, 5], None], False),
    "3 hosts that share": ([CLIENTS] * 3, True),
    "1 host that shares": ([CLIENTS], True),
    "2 hosts, states in memory": ([[0, 1, 2], [3, 4, 5]], True),
}
"""What each node hosts; whether the engine keeps each client's context."""


def federation(
    shape: str = "2 hosts",
    *,
    fault: Fault | None = None,
    problems: Sequence[Quadratic] | None = None,
    **options: Any,
) -> InProcessGrid:
    """Return six clients spread over nodes as ``shape`` says."""
    hosts, in_memory = SHAPES[shape]
    hosted = {client for one in hosts if isinstance(one, list) for client in one}
    alone = iter([client for client in range(CLIENTS) if client not in hosted])
    places = [next(alone) if one is None else number for number, one in enumerate(hosts)]
    app = make_client_app(
        problems or quadratics(CLIENTS),
        hosts=lambda c: hosts[int(c.node_config["node"])],
        **options,
    )
    nodes = (
        {"num_clients": CLIENTS, "hosts": len(hosts)} if in_memory else {"num_clients": len(hosts)}
    )
    grid = InProcessGrid(app, **nodes, fault=fault)
    of = len(hosts) if "share" in shape else CLIENTS
    for number, context in enumerate(grid.contexts.values()):
        here = {"node": number, "partition-id": places[number], "num-partitions": of}
        context.node_config |= here
    return grid


def shared(shape: str) -> dict[str, int]:
    """Return the option that a strategy needs for ``shape``."""
    return {"shared_population": CLIENTS} if "share" in shape else {}


def admm(shape: str = "2 hosts", **knobs: Any) -> FedADMM:
    usual: dict[str, Any] = {"rho": 1.5, "eta": "fraction", "fraction_train": 0.5}
    usual |= {"fraction_evaluate": 0.0, "local": local(lr=0.4), "node_wait": 0.01}
    return FedADMM(**{**usual, **shared(shape), **knobs})


def state_of(grid: InProcessGrid, client: int, acked: int) -> dict[str, np.ndarray]:
    """Return the fields that a hosted client keeps in its host's ``context.state``."""
    for context in grid.contexts.values():
        prefix = f"client-{client}/"
        own = RecordDict(
            {k.removeprefix(prefix): v for k, v in context.state.items() if k.startswith(prefix)}
        )
        if own:
            store = ContextStore(Context(1, 1, {}, own, {}))
            about = own.config_records[store.prefix]
            owner = Owner(*(str(about[name]) for name in ("algorithm", "model", "run")))
            fields = peek(store, owner, acked)[1]
            assert fields is not None
            return dict(fields)
    raise LookupError(f"no state of client {client}")


# ---- however clients are spread -----------------------------------------------------------------


def model_and_numbers(row: Row, shape: str) -> tuple[np.ndarray, list[Any]]:
    """Return the model after four rounds, and each round's numbers and clients' rows."""
    numbers: list[Any] = []

    def note(info: RoundInfo) -> None:
        passing = ("bytes", "eval-bytes", "seconds", "busy")
        kept = {n: v for n, v in info.metrics.items() if not n.startswith(passing)}
        numbers.append((kept, {c: dict(row) for c, row in info.clients.items()}))

    options: dict[str, Any] = {"fraction_evaluate": 0.5, "fraction_train": 0.5, **shared(shape)}
    strategy = row.strategy(local=local(), callbacks=[note], **options)
    return train(strategy, federation(shape), 4), numbers


@every_algorithm
def test_models_and_numbers_are_the_same_to_the_bit_however_clients_are_spread(row: Row) -> None:
    model, numbers = model_and_numbers(row, "nodes of one")
    for shape in SHAPES:
        other, others = model_and_numbers(row, shape)
        np.testing.assert_array_equal(other, model, err_msg=shape)
        assert others == numbers, shape


@pytest.mark.parametrize("most", [1, 2])
def test_messages_are_about_a_bounded_number_of_clients(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def count(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            sizes.append(len(hosting.unpack_request(request.content)[1]))
        return reply

    size = sum(len(array.data) for array in to_record(START).values())
    expected = train(admm(), federation("nodes of one"), 4)
    monkeypatch.setattr(hosting, "MOST_BYTES", most * size)
    np.testing.assert_array_equal(train(admm(), federation(fault=count), 4), expected)
    assert max(sizes) == most
    assert sum(sizes) == 4 * 3


def test_a_model_beyond_the_bound_goes_alone() -> None:
    assert hosting.per_message(10**12) == 1
    assert hosting.per_message(0) == hosting.MOST_CLIENTS


def test_a_host_gets_the_model_once_and_of_each_client_what_it_is_told_alone() -> None:
    seen: list[Message] = []
    train(admm(fraction_train=1.0), federation("1 host", fault=lambda q, a: seen.append(q) or a), 2)
    first, second = (m.content for m in seen if m.metadata.message_type == "train")
    assert [*first.array_records] == ["arrays"]
    assert first["hosted"] == {"own-0": [*range(CLIENTS)]}
    assert first["config"]["acked-round"] == -1
    assert second["config"]["acked-round"] == 1
    assert not first["own-0"]


# ---- what fails ---------------------------------------------------------------------------------


class Failing(AnyAlgorithmClient):
    """Client 1 raises in training, and client 4 returns an array of another shape, from round 2."""

    def __init__(self, problem: Any, *, client_id: int, **options: Any) -> None:
        super().__init__(problem, client_id=client_id, **options)
        self.number = client_id

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, samples, metrics = super().fit(parameters, config)
        if config["server-round"] > 1 and self.number == 1:
            raise RuntimeError("its disk is full")
        if config["server-round"] > 1 and self.number == 4:
            arrays = [arrays[0], arrays[1][:0]]
        return arrays, samples, metrics


@pytest.mark.parametrize("shape", SHAPES)
def test_a_failing_client_takes_no_other_with_it(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    counts: list[Any] = []
    watch = [lambda info: counts.append((info.metrics["clients-used"], {*info.clients}))]
    one = admm(shape, fraction_train=1.0, callbacks=watch)
    found = train(one, federation(shape, client=Failing), 5)
    expected = train(admm(fraction_train=1.0), federation("nodes of one", client=Failing), 5)
    np.testing.assert_array_equal(found, expected)
    assert counts[1:] == [(4, {0, 2, 3, 5})] * 4
    assert one.faults.keys() == {1, 4}
    assert "its disk is full" in one.faults[1]
    assert one.ledger.acked == {0: 5, 1: 1, 2: 5, 3: 5, 4: 1, 5: 5}


@pytest.mark.parametrize("shape", ["2 hosts", "1 host", "a host and nodes of one"])
def test_theta_is_the_mean_of_all_clients_u_whatever_hosts_lose(shape: str) -> None:
    """Lost host replies: their clients take back what they did, and nobody else does."""
    rng = np.random.default_rng(3)
    lost = lambda q, a: None if q.metadata.message_type == "train" and rng.random() < 0.4 else a  # noqa: E731
    grid = federation(shape, fault=lost)
    used: list[float] = []

    def check(info: RoundInfo) -> None:
        used.append(info.metrics["clients-used"])
        if used[-1] and shape != "a host and nodes of one":
            u = [START] * CLIENTS
            for client, acked in one.ledger.acked.items():
                f = state_of(grid, client, acked)
                u[client] = f["w"] + f["y"] / f["rho"]
            np.testing.assert_allclose(to_vector(info.arrays), np.mean(u, axis=0), atol=1e-12)

    one = admm(callbacks=[check])
    train(one, grid, 14)
    assert 0 in used
    assert len({*used}) > 1


def test_a_killed_host_comes_back_under_another_id_with_its_state() -> None:
    grid = federation()
    first, second = grid.contexts

    def restart(info: RoundInfo) -> None:
        if info.server_round == 3:  # its clients are the new node's, state and all
            context = grid.contexts.pop(first)
            context.node_id = 4711
            grid.contexts[4711] = context

    expected = train(admm(), federation(), 8)
    one = admm(callbacks=[restart])
    np.testing.assert_array_equal(train(one, grid, 8), expected)
    assert one.nodes.known == {*range(CLIENTS)}
    assert second in grid.contexts


def test_a_client_moves_to_another_host_with_its_state_directory(tmp_path: Path) -> None:
    app = lambda: {"store": lambda c: DirectoryStore(tmp_path, client_id(c))}  # noqa: E731
    expected = train(admm(), federation(), 8)
    grid = federation("2 hosts", **app())
    other = federation("2 hosts, crossed and reversed", **app())

    def move(info: RoundInfo) -> None:
        if info.server_round == 4:
            grid.client_app = other.client_app

            grid.contexts.clear()
            for number, context in enumerate(other.contexts.values()):
                context.node_id = 9000 + number
                grid.contexts[9000 + number] = context

    np.testing.assert_array_equal(train(admm(callbacks=[move]), grid, 8), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_goes_on_from_a_checkpoint_to_the_same_model(shape: str, tmp_path: Path) -> None:
    expected = train(admm(shape), federation(shape), 8)
    grid, folder = federation(shape), tmp_path / "checkpoints"
    train(admm(shape, checkpoints=Checkpoints(folder)), grid, 5)
    again = admm(shape, checkpoints=Checkpoints(folder))
    result = again.start(grid, to_record(START), 8, resume=True)
    np.testing.assert_array_equal(to_vector(result.arrays), expected)


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


@pytest.mark.parametrize("ids", [[0, 0], [-1], [7], [True], ["0"], []])
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
        mine = "hosted" in request.content and 0 in request.content["hosted"]["own-0"]
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
        r"it speaks of \['more'\], which it does not have",
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
