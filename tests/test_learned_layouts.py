"""Laws of runs whose strategy is told nothing of the model's arrays: clients describe them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import serve
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.server.strategy import DifferentialPrivacyClientSideFixedClipping as LegacyClientSide
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from problems import CLIENT_OF
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    DirectoryStore,
    Problem,
    client_app,
    client_id,
)
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, Checkpoints, FedAvg, NothingUsable, as_legacy
from fl_strategies.messages.description import MAX_DESCRIPTION, Description
from fl_strategies.server import settling

CLIENTS = 4
SETTINGS = {"lr": 0.1, "batch-size": 4}
QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "local": SETTINGS, "node_wait": 0.01}
AT_HOME = ["body.weight", "body.bias", "head.weight", "head.bias"]
LEGACY = {"min_available_nodes": CLIENTS}


class Net(nn.Module):
    """A frozen body, two names of one weight, a head; batch normalisation and a mask if wanted."""

    def __init__(self, buffers: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.body.requires_grad_(False)
        self.norm = nn.BatchNorm1d(5) if buffers else nn.Tanh()
        if buffers:
            self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.body(x))
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(h)))))
        return out


def net(*, buffers: bool = True) -> Net:
    torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the GPUs as well
    return Net(buffers).double()


def model(*, buffers: bool = True) -> Border:
    """Return the clients' model: each has its own head."""
    return Border(net(buffers=buffers), share="!head")


def initial(*, buffers: bool = True) -> ArrayRecord:
    return ArrayRecord(net(buffers=buffers).state_dict())


Queried = Callable[[Message, Message], Message | None]


def samples(client: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(client)
    return torch.tensor(rng.normal(client, 1.0, (10, 4))), torch.tensor(rng.integers(0, 3, 10))


def app_of(make: Callable[[int], Border], store: Any = ContextStore, **options: Any) -> ClientApp:
    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        problem = Problem(make(me), cross_entropy, *samples(me))
        return AnyAlgorithmClient(problem, client_id=me, store=store(context))

    return client_app(client_fn, **options)


def nodes_of_one(buffers: bool) -> InProcessGrid:
    return InProcessGrid(app_of(lambda _: model(buffers=buffers)), CLIENTS)


def hosts(clients: Any, count: int, **options: Any) -> Callable[[bool], InProcessGrid]:
    def made(buffers: bool) -> InProcessGrid:
        app = app_of(lambda _: model(buffers=buffers), hosts=clients, **options)
        return InProcessGrid(app, CLIENTS, hosts=count)

    return made


def half(context: Context) -> list[int]:
    return [[0, 1], [2, 3]][client_id(context)]


ENGINES: dict[str, tuple[Callable[[bool], InProcessGrid], dict[str, int]]] = {
    "nodes of one": (nodes_of_one, {}),
    "2 hosts": (hosts(half, 2), {}),
    "1 host": (hosts(lambda context: [*range(CLIENTS)], 1), {}),
    "hosts that share": (hosts(CLIENTS, 2), {"shared_population": CLIENTS}),
    "stacked": (hosts(CLIENTS, 1, stack=CLIENTS), {"shared_population": CLIENTS}),
}


def same(learned: ArrayRecord, declared: ArrayRecord, begun: ArrayRecord) -> None:
    """All arrays are there: those of the declared run to the bit, the others as they were."""
    assert list(learned) == list(begun)
    assert sorted(begun.keys() - declared.keys()) == sorted(AT_HOME)
    for name, array in learned.items():
        expected = declared[name] if name in declared else begun[name]
        np.testing.assert_array_equal(array.numpy(), expected.numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("engine", "algorithm"),
    [*((engine, "fedadmm") for engine in ENGINES), ("hosts that share", "scaffold")],
)
def test_nothing_declared_is_as_good_as_everything(engine: str, algorithm: str) -> None:
    grid, options = ENGINES[engine]
    buffers = engine != "stacked"
    told = model(buffers=buffers)
    options = {**options, **QUIET}
    declared = STRATEGIES[algorithm](**options, **told.layout_options)
    expected = declared.start(grid(buffers), ArrayRecord(told.state_dict()), 3).arrays
    begun = initial(buffers=buffers)
    found = STRATEGIES[algorithm](**options).start(grid(buffers), begun, 3)
    assert {m["clients-used"] for m in found.train_metrics_clientapp.values()} == {CLIENTS}
    same(found.arrays, expected, begun)
    assert any((expected[n].numpy() != begun[n].numpy()).any() for n in expected)


@pytest.mark.parametrize(("algorithm", "names"), [("fedadmm", True), ("scaffold", False)])
def test_a_legacy_server_learns_the_same(algorithm: str, names: bool) -> None:
    """Without an initial model it begins with a client's, whose arrays have places alone."""
    strategy = STRATEGIES[algorithm](**QUIET, **LEGACY)
    found, _ = serve(as_legacy(strategy, initial() if names else None), nodes_of_one(True), 2)
    usual = STRATEGIES[algorithm](**QUIET).start(nodes_of_one(True), initial(), 2).arrays
    sent = [a.numpy() for n, a in usual.items() if names or n not in AT_HOME]
    np.testing.assert_array_equal(found, np.concatenate([np.ravel(array) for array in sent]))
    metrics = strategy.result.train_metrics_clientapp
    assert {m["clients-used"] for m in metrics.values()} == {CLIENTS}


def test_whoever_sees_the_model_sees_all_of_it(tmp_path: Path) -> None:
    begun, seen = initial(), list[ArrayRecord]()

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        net().load_state_dict(arrays.to_torch_state_dict())
        seen.append(arrays)
        return MetricRecord({"test-loss": float(number)})

    checkpoints = Checkpoints(tmp_path)
    strategy = FedAvg(
        **QUIET, checkpoints=checkpoints, callbacks=[lambda info: seen.append(info.arrays)]
    )
    result = strategy.start(nodes_of_one(True), begun, 2, evaluate_fn=evaluate)
    last = checkpoints.last()
    assert last is not None
    for arrays in (*seen, result.arrays, last.model):
        assert list(arrays) == list(begun)
    for name in AT_HOME:
        np.testing.assert_array_equal(last.model[name], begun[name].numpy())
    assert len(seen) == 5


# ---- who is asked -------------------------------------------------------------------------------


class Counting:
    """Counts the clients that are made, and the messages by kind."""

    def __init__(self, store: Any = ContextStore) -> None:
        self.made, self.kinds, self.store = 0, list[str](), store

    def grid(self, clients: int) -> InProcessGrid:
        def make(_: int) -> Border:
            self.made += 1
            return model()

        return InProcessGrid(app_of(make, self.store), clients, fault=self.note)

    def note(self, request: Message, reply: Message) -> Message:
        self.kinds.append(request.metadata.message_type)
        return reply


def test_a_resumed_run_asks_nobody_and_ends_as_if_never_killed(tmp_path: Path) -> None:
    """Nor does a second call of start."""

    def run(folder: str, *lives: int) -> tuple[ArrayRecord, list[str]]:
        seen = Counting(lambda c: DirectoryStore(tmp_path / folder / "states", client_id(c)))
        for rounds in lives:
            seen.kinds.clear()
            strategy = FedAvg(**QUIET, checkpoints=Checkpoints(tmp_path / folder / "checkpoints"))
            found = strategy.start(seen.grid(3), initial(), rounds, resume=True)
        return found.arrays, seen.kinds

    whole, asked = run("whole", 4)
    assert asked.count("query.describe") == 3
    resumed, asked = run("killed", 2, 4)
    assert "query.describe" not in asked
    for name, array in whole.items():
        np.testing.assert_array_equal(resumed[name].numpy(), array.numpy())
    twice, seen = FedAvg(**QUIET), Counting()
    grid = seen.grid(3)
    half_way = twice.start(grid, initial(), 2)
    found = twice.start(grid, half_way.arrays, 2)
    assert seen.kinds.count("query.describe") == 3
    for name, array in whole.items():
        np.testing.assert_array_equal(found.arrays[name].numpy(), array.numpy())


def test_the_first_query_makes_no_client_and_the_second_few() -> None:
    seen = Counting()
    grid = seen.grid(12)
    nodes = FedAvg(**QUIET).nodes
    assert len(nodes.connected(grid)) == 12
    assert seen.made == 0
    settling.descriptions(nodes, grid, 12)
    assert seen.made == settling.MOST_ASKED == 5
    assert seen.kinds.count("query.describe") == 5


class Crowd:
    """A Grid of so many nodes, by whose ids clients are known; none describes a model."""

    def __init__(self, nodes: int) -> None:
        self.nodes, self.asked = nodes, list[int]()

    def get_node_ids(self) -> list[int]:
        return [*range(self.nodes, 0, -1)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float) -> list[Message]:
        messages = list(messages)
        describe = [m for m in messages if m.metadata.message_type == "query.describe"]
        self.asked += [m.metadata.dst_node_id for m in describe]
        return [Message(RecordDict(), reply_to=message) for message in messages]


def test_of_ten_thousand_nodes_five_are_asked() -> None:
    crowd, strategy = Crowd(10_000), FedAvg(**QUIET)
    strategy.open(initial(), 1)
    strategy.settle(crowd)  # type: ignore[arg-type]
    assert crowd.asked == [1, 2, 3, 4, 5]
    assert strategy.opened_model.layout.untrained == [n for n in initial() if n in model().buffers]


@pytest.mark.parametrize(("clients", "count", "expected"), [(half, 2, 2), (CLIENTS, 1, 1)])
def test_of_a_host_one_client_is_asked(clients: Any, count: int, expected: int) -> None:
    shared = 0 if count == 2 else CLIENTS
    nodes = FedAvg(**QUIET, shared_population=shared).nodes
    found = settling.descriptions(nodes, hosts(clients, count)(True), CLIENTS)
    assert len(found) == expected
    assert [*found.values()] == [model().description] * expected


# ---- who is believed ----------------------------------------------------------------------------


def says(answer: Any, *liars: int) -> Queried:
    """Have clients describe their models by ``answer``: a record, a text, an error, or a change."""

    def fault(request: Message, reply: Message) -> Message | None:
        mine = CLIENT_OF[request.metadata.dst_node_id] in liars
        if not mine or request.metadata.message_type != "query.describe":
            return reply
        if answer is None or isinstance(answer, Error):
            return answer and Message(answer, reply_to=request)
        value = answer
        if callable(answer):
            text = reply.content["client"]["description"]
            value = json.dumps(answer(json.loads(text)))
        record = ConfigRecord()
        vars(record)["_data"].update({"description": value})
        return Message(RecordDict({"client": record}), reply_to=request)

    return fault


def changed(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda description: {**description, **fields}


LIES: dict[str, Any] = {
    "nothing": None,
    "an error": Error(2, "ValueError: no"),
    "no query": Error(2, "ValueError: No query function registered with name 'describe'"),
    "a number": 7,
    "bytes": b"{}",
    "a list": ["a", "b"],
    "truth": True,
    "no json": "{",
    "json of another kind": "[1, 2]",
    "a deep list": "[" * 100_000,
    "a number of many digits": "9" * 100_000,
    "too long": " " * (MAX_DESCRIPTION + 1),
    "no fields": lambda d: {},
    "names that are numbers": changed(arrays=[1, 2]),
    "names that are lists": changed(arrays=[["body.weight"]]),
    "a long name": changed(arrays=["a" * 1000]),
    "a text of names": changed(buffers="mask"),
    "unknown buffers": changed(buffers=["nobody"]),
    "unknown frozen arrays": changed(frozen={"nobody": "12345678"}),
    "digests that are numbers": lambda d: {**d, "frozen": dict.fromkeys(d["frozen"], 7)},
    "other digests": lambda d: {**d, "frozen": dict.fromkeys(d["frozen"], "0" * 8)},
    "frozen lists": changed(frozen=[["body.weight"]]),
    "a name twice": lambda d: {**d, "arrays": d["arrays"] * 2},
    "two roles": lambda d: {**d, "local": [*d["local"], *d["frozen"]]},
    "unknown ties": changed(ties=[["nobody", "first.weight"]]),
    "no tie": changed(ties=[]),
    "a tie of one": changed(ties=[["first.weight"]]),
    "a tie of what differs": changed(ties=[["first.weight", "first.bias"]]),
    "ties of numbers": changed(ties=[[1, 2]]),
    "ties that are no lists": changed(ties=7),
    "nothing shared": lambda d: {**d, "local": d["arrays"], "frozen": {}, "buffers": []},
    "all shared": changed(frozen={}, local=[]),
    "all trained": changed(buffers=[]),
    "nothing trained": lambda d: {**d, "buffers": [n for n in d["arrays"] if n not in d["local"]]},
    "another model": lambda d: {**d, "arrays": [f"x.{n}" for n in d["arrays"]]},
    "a larger model": lambda d: {**d, "arrays": [*d["arrays"], "more"]},
    "a huge model": lambda d: {**d, "arrays": [*map(str, range(300_000))]},
    "numbers for names": lambda d: {**d, "arrays": [str(i) for i in range(len(d["arrays"]))]},
}
TRUTH = model().layout


@pytest.mark.parametrize(
    ("lie", "liar"), [*((lie, 0) for lie in LIES), ("another model", 3), ("nothing", 3)]
)
def test_a_liar_among_those_asked_changes_nothing(
    lie: str, liar: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Even the first; at most one line names it."""
    grid = InProcessGrid(app_of(lambda _: model()), CLIENTS, fault=says(LIES[lie], liar))
    strategy = FedAvg(**QUIET)
    strategy.open(initial(), 1)
    with caplog.at_level(logging.WARNING):
        strategy.settle(grid)
    assert strategy.opened_model.layout == TRUTH
    lines = [record.message for record in caplog.records]
    assert len(lines) == (lie not in ("nothing", "an error", "other digests")), lines
    assert all(f"client {liar}" in line or f"clients [{liar}]" in line for line in lines)
    assert all(len(line) < 500 for line in lines)


def test_a_description_that_comes_twice_is_read_once() -> None:
    class Twice(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            return [*super().send_and_receive(messages, timeout=timeout)] * 2

    strategy = FedAvg(**QUIET)
    strategy.open(initial(), 1)
    strategy.settle(Twice(app_of(lambda _: model()), CLIENTS))
    assert strategy.opened_model.layout == TRUTH


def test_without_a_description_that_can_be_read_conventions_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    everyone = range(CLIENTS)
    grid = InProcessGrid(app_of(lambda _: model()), CLIENTS, fault=says("{", *everyone))
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(NothingUsable, match=r"shares arrays \['mask', 'norm.weight'"),
    ):
        FedAvg(**QUIET).start(grid, initial(), 4)
    buffers = ["mask", "norm.running_mean", "norm.running_var"]
    assert f"by PyTorch's names: {buffers} and 1 more" in caplog.text


def test_clients_that_differ_are_named_and_their_replies_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = app_of(lambda me: Border(net(), share="!norm" if me == 2 else "!head"))
    result = FedAvg(**QUIET).start(InProcessGrid(app, CLIENTS), initial(), 1)
    assert result.train_metrics_clientapp[1]["clients-used"] == 3
    assert "another model than 3 clients [0, 1, 3]: client 2\n" in caplog.text
    assert "client 2 left out: ValueError: the client's model shares arrays" in caplog.text


def test_frozen_arrays_are_the_initial_models() -> None:
    """Whatever all clients have: those of an evaluation would be others."""

    def other(_: int) -> Border:
        module = net()
        with torch.no_grad():
            module.body.weight[1, 2] += 1e-9
        return Border(module, share="!head")

    with pytest.raises(NothingUsable, match=r"client's frozen arrays \['body.weight'\] are not"):
        FedAvg(**QUIET).start(InProcessGrid(app_of(other), 3), initial(), 4)


# ---- clients that know no descriptions ----------------------------------------------------------


class Whole(NumPyClient):
    """A user's own client, which loads and sends all of ``state_dict``."""

    def __init__(self, me: int) -> None:
        self.me = me

    def fit(self, parameters: Any, config: Any) -> Any:
        module = net()
        names = list(module.state_dict())
        assert len(parameters) == len(names)
        still = {n for n in names if n == "mask" or n.startswith(("norm.running", "norm.num"))}
        pairs = zip(names, parameters, strict=True)
        return [a if n in still else a + self.me for n, a in pairs], 5, {}


def mixed(whole: set[int]) -> InProcessGrid:
    def client_fn(context: Context) -> NumPyClient:
        me = client_id(context)
        if me in whole:
            return Whole(me)
        problem = Problem(model(), cross_entropy, *samples(me))
        return AnyAlgorithmClient(problem, client_id=me, store=ContextStore(context))

    return InProcessGrid(client_app(client_fn), CLIENTS)


def test_clients_that_load_all_arrays_get_all_and_train_the_frozen_ones() -> None:
    begun = initial()
    found = FedAvg(**QUIET).start(mixed({*range(CLIENTS)}), begun, 1)
    assert found.train_metrics_clientapp[1]["clients-used"] == CLIENTS
    for name in ("body.weight", "head.bias", "first.weight"):
        moved = found.arrays[name].numpy() - begun[name].numpy()
        np.testing.assert_allclose(moved, np.full_like(moved, 1.5), rtol=1e-12)


def test_a_mixed_population_with_frozen_arrays_is_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With as many of both kinds the run, else the replies of the fewer."""
    with pytest.raises(
        ValueError, match=r"clients of one kind; there are 2 clients \[1, 3\].*body"
    ):
        FedAvg(**QUIET).start(mixed({1, 3}), initial(), 1)
    for whole, used in (({1}, 3), ({0, 1, 3}, 3)):
        caplog.clear()
        found = FedAvg(**QUIET).start(mixed(whole), initial(), 1)
        assert found.train_metrics_clientapp[1]["clients-used"] == used
        assert "replies of the smaller group will be refused: there are" in caplog.text


# ---- wrappers and masks -------------------------------------------------------------------------


class Tied(nn.Module):
    """Two names of one weight, and nothing else that is not trained and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def tied(_: int = 0) -> Border:
    torch.default_generator.manual_seed(0)
    return Border(Tied().double())


def test_under_a_wrapper_ties_are_learned_too() -> None:
    strategy = FedAvg(**QUIET, weights="uniform")
    wrapper = DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1e6, 3)
    begun = ArrayRecord(tied().module.state_dict())
    found = wrapper.start(InProcessGrid(app_of(tied), 3), begun, 2)
    assert found.train_metrics_clientapp[2]["clients-used"] == 3
    assert strategy.opened_model.layout.ties == (("first.weight", "second.weight"),)
    usual = FedAvg(**QUIET, weights="uniform").start(InProcessGrid(app_of(tied), 3), begun, 2)
    for name, array in usual.arrays.items():
        np.testing.assert_allclose(found.arrays[name].numpy(), array.numpy(), rtol=1e-12)


REFUSED = {
    "buffers": ({}, r"^buffers \['norm.running_mean'|^buffers \['mask'"),
    "frozen": ({"buffers": False}, r"^arrays \['body.weight', 'body.bias', 'head.weight'\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_trained_and_shared_is_refused_under_wrappers_and_masks(case: str) -> None:
    options, reason = REFUSED[case]
    grid = InProcessGrid(app_of(lambda _: model(**options)), CLIENTS)
    wrapper = DifferentialPrivacyServerSideFixedClipping(FedAvg(**QUIET), 0.0, 1.0, 3)
    with pytest.raises(ValueError, match=reason):
        wrapper.start(grid, initial(**options), 1)
    masked = as_legacy(
        FedAvg(**QUIET, **LEGACY), initial(**options), secure=SecAggPlusWorkflow(1.0, 0.5)
    )
    with pytest.raises(ValueError, match=reason):
        serve(masked, grid, 1)


def test_a_legacy_wrapper_adds_no_noise_to_what_stays_on_the_server() -> None:
    app = app_of(lambda _: model(buffers=False), mods=[fixedclipping_mod])
    for noise in (0.0, 0.1):
        strategy = FedAvg(**QUIET, **LEGACY, weights="uniform")
        adapter = as_legacy(strategy, initial(buffers=False))
        wrapper = LegacyClientSide(adapter, noise, 1.0, CLIENTS)
        if not noise:
            serve(wrapper, InProcessGrid(app, CLIENTS), 2)
            assert strategy.result.train_metrics_clientapp[2]["clients-used"] == CLIENTS
            continue
        with pytest.raises(ValueError, match=r"arrays \['body.bias', .* a wrapper has changed"):
            serve(wrapper, InProcessGrid(app, CLIENTS), 2)


# ---- descriptions -------------------------------------------------------------------------------


def test_a_description_is_read_as_it_was_written() -> None:
    description = model().description
    assert Description.of(description.to_text()) == description
    assert description.arrays == tuple(net().state_dict())
    assert description.shared == model().names
    assert {*description.frozen, *description.local} == {*AT_HOME}
