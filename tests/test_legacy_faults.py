"""`as_legacy`: clients whose results, properties or models are malformed cost one reply each."""

from __future__ import annotations

import itertools
import math
import pickle
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from federations import CLIENTS, Proxy
from flwr.app import ArrayRecord
from flwr.common import Code, Parameters, Status, parameters_to_ndarrays
from flwr.server import Server, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import START, TABLE, local
from problems import DIM, NODES, grid, quadratics, to_record, to_vector
from tampering import Bomb, claims, npy, npz

from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, FederatedStrategy, as_legacy
from fl_strategies.compat.translation import node_of, to_parameters

FAULTY = NODES[1]
ROUNDS = 3
HUGE = 100 * 10**9
"""Numbers of 8 bytes each that an array says it has: 745 GiB."""


TENSORS: dict[str, Any] = {
    "noise": bytes(range(256)),
    "empty": b"",
    "cut": npy(np.zeros((2, 2)))[:-1],
    "longer": npy(np.zeros((2, 2))) + b"0",
    "header only": npy(np.zeros((2, 2)))[:60],
    "pickle": pickle.dumps(Bomb()),
    "object": npy(np.array([Bomb()], object), allow_pickle=True),
    "zip": npz(a=np.zeros(4)),
    "negative shape": claims("'<f8'", "(-2, -2)", bytes(32)),
    "huge": claims("'<f8'", f"({HUGE},)", bytes(32)),
    "more than 64 bits of numbers": claims("'<f8'", f"({2**40}, {2**40})", bytes(32)),
    "another shape": npy(np.zeros((4, 1))),
    "another type": npy(np.zeros((2, 2), np.float32)),
    "texts": npy(np.full((2, 2), "x")),
    "not finite": npy(np.full((2, 2), np.nan)),
    "no bytes": None,
}
"""What may stand where the model's first array is awaited, none of which is one."""


def with_tensors(change: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    def changed(result: Any) -> Any:
        tensors = change(list(result.parameters.tensors))
        return replace(result, parameters=Parameters(tensors, "numpy.ndarray"))

    return changed


def with_tensor(data: Any) -> Callable[[Any], Any]:
    return with_tensors(lambda tensors: [data, *tensors[1:]])


def saying(**fields: Any) -> Callable[[Any], Any]:
    return lambda result: replace(result, **fields)


def adding(metric: Any) -> Callable[[Any], Any]:
    return lambda result: replace(result, metrics={**result.metrics, "x": metric})


FITS: dict[str, Callable[[Any], Any]] = {
    **{name: with_tensor(data) for name, data in TENSORS.items()},
    "no arrays": with_tensors(lambda tensors: []),
    "one array too few": with_tensors(lambda tensors: tensors[:-1]),
    "one array too many": with_tensors(lambda tensors: [*tensors, tensors[0]]),
    "many arrays": with_tensors(lambda tensors: tensors * 5000),
    "the arrays swapped": with_tensors(lambda tensors: tensors[::-1]),
    "no list of arrays": with_tensors(lambda tensors: None),
    "no parameters": saying(parameters=None),
}
BOTH: dict[str, Callable[[Any], Any]] = {
    "no examples": saying(num_examples=0),
    "fewer than no examples": saying(num_examples=-3),
    "more examples than there can be": saying(num_examples=2**80),
    "examples in words": saying(num_examples="many"),
    "examples that are no number": saying(num_examples=math.nan),
    "a list of examples": saying(num_examples=[7]),
    "no metrics": saying(metrics=None),
    "a list for metrics": saying(metrics=[("x", 1.0)]),
    "a metric that is not finite": adding(math.inf),
    "a metric of mixed values": adding([1, "x"]),
    "an object as a metric": adding(object()),
    "a number for a metric's name": lambda r: replace(r, metrics={7: 1.0}),
    "a failed status": saying(status=Status(Code.FIT_NOT_IMPLEMENTED, "out of disk\nand luck")),
}
EVALUATIONS: dict[str, Callable[[Any], Any]] = {
    "a loss that is not finite": saying(loss=math.nan),
    "a loss in words": saying(loss="low"),
    "no loss": saying(loss=None),
}


class Unreliable(ClientProxy):
    """A client of ``on``, whose results pass through ``changes`` by the name of the call."""

    def __init__(self, cid: str, on: InProcessGrid, node: int, **changes: Any) -> None:
        super().__init__(cid)
        self.usual, self.changes = GridClientProxy(node, on, 1), changes

    def _call(self, name: str, *arguments: Any) -> Any:
        change = self.changes.get(name, lambda result: result)
        return change(getattr(self.usual, name)(*arguments))

    def get_properties(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        return self._call("get_properties", ins, timeout, group_id)

    def get_parameters(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        return self._call("get_parameters", ins, timeout, group_id)

    def fit(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        return self._call("fit", ins, timeout, group_id)

    def evaluate(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        return self._call("evaluate", ins, timeout, group_id)

    def reconnect(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        return self.usual.reconnect(ins, timeout, group_id)


def in_turn(changes: Iterable[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return what makes each of ``changes`` to one result, after a first one that stays."""
    left = iter([lambda result: result, *changes])
    return lambda result: next(left, lambda result: result)(result)


def run_unreliable(
    strategy: FederatedStrategy,
    initial: ArrayRecord | None = None,
    cids: Mapping[int, str] = MappingProxyType({}),
    rounds: int = ROUNDS,
    **changes: Any,
) -> np.ndarray:
    """Return the model after ``rounds``, in which client FAULTY is Unreliable."""
    on = grid(quadratics(CLIENTS))
    manager = SimpleClientManager()
    for node in on.get_node_ids():
        own = changes if node == FAULTY else {}
        manager.register(Unreliable(cids.get(node, str(node)), on, node, **own))
    server = Server(client_manager=manager, strategy=as_legacy(strategy, initial))
    server.set_max_workers(1)
    server.fit(rounds, None)
    assert sorted(strategy.result.train_metrics_clientapp) == list(range(1, rounds + 1))
    return to_vector(parameters_to_ndarrays(server.parameters))


def quick(name: str, **options: Any) -> FederatedStrategy:
    row = next(row for row in TABLE if row.name == name)
    hyperparameters: dict[str, Any] = {"missing": "proceed"} if name == "fedpd" else {}
    return row.strategy(
        **hyperparameters, min_available_nodes=CLIENTS, local=local(), node_wait=5.0, **options
    )


def failed(result: Any) -> Any:
    return replace(result, status=Status(Code.FIT_NOT_IMPLEMENTED, "it failed"))


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "left out" in line]


@pytest.mark.parametrize("name", ["fedavg", "fedadmm", "scaffold"])
@pytest.mark.sampled("fedadmm")
def test_a_malformed_fit_is_one_reply_left_out_by_name(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {**FITS, **BOTH}
    each: dict[str, Any] = {"rounds": len(changes) + 2, "initial": to_record(START)}
    expected = run_unreliable(
        quick(name, fraction_evaluate=0.0), fit=in_turn([failed] * len(changes)), **each
    )
    caplog.clear()
    strategy = quick(name, fraction_evaluate=0.0)
    model = run_unreliable(strategy, fit=in_turn(changes.values()), **each)
    found = [m["clients-rejected"] for m in strategy.result.train_metrics_clientapp.values()]
    assert dict(zip(changes, found[1:], strict=False)) == dict.fromkeys(changes, 1)
    assert found[0] == found[-1] == 0
    assert [line.count("reply of client 1 left out: ") for line in lines(caplog.text)] == (
        [1] * len(changes)
    )
    np.testing.assert_array_equal(model, expected)


@pytest.mark.slow
def test_a_malformed_evaluation_is_one_reply_left_out_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = {**EVALUATIONS, **BOTH}
    each: dict[str, Any] = {"rounds": len(changes) + 2, "initial": to_record(START)}
    usual, strategy = (quick("fedavg", fraction_evaluate=1.0) for _ in range(2))
    run_unreliable(usual, evaluate=in_turn([failed] * len(changes)), **each)
    caplog.clear()
    run_unreliable(strategy, evaluate=in_turn(changes.values()), **each)
    rounds = strategy.result.evaluate_metrics_clientapp
    assert [m["eval-clients-rejected"] for m in rounds.values()] == [0, *[1] * len(changes), 0]
    assert [line.count("reply of client 1 left out: ") for line in lines(caplog.text)] == (
        [1] * len(changes)
    )
    for number, metrics in usual.result.evaluate_metrics_clientapp.items():
        # there the same client answers by an error, which is counted
        found = {**rounds[number], "eval-clients-failed": metrics["eval-clients-failed"]}
        assert found == dict(metrics), list(changes)[number - 2]


@pytest.fixture(scope="module")
def served() -> tuple[Any, SimpleClientManager, Iterator[int]]:
    """Return FedAvg for a legacy server, two clients that are known, and numbers of rounds."""
    strategy = FedAvg(min_available_nodes=2, fraction_evaluate=0.0, local=local())
    adapter, manager = as_legacy(strategy, to_record(START)), SimpleClientManager()
    for i in range(2):
        manager.register(Proxy(NODES[i], fails=False))
    adapter.initialize_parameters(manager)
    return adapter, manager, itertools.count(1)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    header=st.sampled_from([data for data in TENSORS.values() if data]),
)
def test_no_bytes_at_all_end_a_round(
    data: st.DataObject,
    header: bytes,
    served: tuple[Any, SimpleClientManager, Iterator[int]],
) -> None:
    cut = data.draw(st.integers(0, len(header)))
    tensor = header[:cut] + data.draw(st.binary(max_size=40))
    where = data.draw(st.integers(0, 1))
    adapter, manager, rounds = served
    number = next(rounds)
    asked = adapter.configure_fit(number, to_parameters(to_record(START)), manager)
    results = [(proxy, proxy.fit(ins, None, None)) for proxy, ins in asked]
    tensors = list(results[1][1].parameters.tensors)
    tensors[where] = tensor
    results[1][1].parameters = Parameters(tensors, "numpy.ndarray")
    given, metrics = adapter.aggregate_fit(number, results, [])
    assert given is not None
    assert (metrics["clients-used"], metrics["clients-rejected"]) in ((2, 0), (1, 1))
    assert all(np.isfinite(array).all() for array in parameters_to_ndarrays(given))


@pytest.mark.parametrize("numbers", [2**28, HUGE], ids=["2 GiB", "745 GiB"])
@pytest.mark.parametrize("call", ["fit", "get_parameters"])
def test_what_an_array_says_of_its_size_is_not_allocated(numbers: int, call: str) -> None:
    claim = with_tensor(claims("'<f8'", f"({numbers},)", bytes(32)))
    strategy = quick("fedavg", fraction_evaluate=0.0)
    changes: dict[str, Any] = {call: claim}
    tracemalloc.start()
    try:
        run_unreliable(strategy, to_record(START) if call == "fit" else None, **changes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**28


def failing(result: Any) -> Any:
    raise ConnectionError("nobody there\n\x1b[31m")


NO_IDS: list[Any] = [[1], [1, "x"], {}, None, -1, 1.0, True, "1", b"1", 2**80, CLIENTS]
PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "an error": failing,
    "no answer": lambda result: None,
    "a failed status": saying(status=Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, "no")),
    "no status": saying(status=None),
    "no properties": saying(properties=None),
    "a list of properties": saying(properties=[("client-id", 1)]),
    **{
        f"id {value!r}": saying(properties={"client-id": value, "num-partitions": CLIENTS})
        for value in NO_IDS
    },
    "an object as id": saying(properties={"client-id": object()}),
    "an object beside the id": saying(properties={"client-id": 1, "x": object()}),
    "a number for a name": saying(properties={7: 1}),
    "partitions in words": saying(properties={"num-partitions": "9"}),
    "fewer than no partitions": saying(properties={"num-partitions": -9}),
}


@pytest.mark.parametrize("what", PROPERTIES)
@pytest.mark.sampled("no answer")
def test_a_client_whose_properties_cannot_be_read_is_known_by_its_nodes_id(what: str) -> None:
    usual = run_unreliable(quick("fedadmm"), to_record(START))
    strategy = quick("fedadmm")
    model = run_unreliable(strategy, to_record(START), get_properties=PROPERTIES[what])
    assert strategy.nodes.known == {0, 2, 3, FAULTY}
    used = [m["clients-used"] for m in strategy.result.train_metrics_clientapp.values()]
    assert used == [CLIENTS] * ROUNDS
    np.testing.assert_allclose(model, usual, rtol=1e-12)  # the sums are in another order


def test_nodes_whose_ids_are_no_numbers_take_part_as_others_do() -> None:
    usual = run_unreliable(quick("fedadmm"), to_record(START))
    cids = dict(zip(NODES, ("0a" * 16, "node one", "²", "9" * 30), strict=False))
    np.testing.assert_array_equal(run_unreliable(quick("fedadmm"), to_record(START), cids), usual)
    strategy = quick("fedadmm")
    run_unreliable(strategy, to_record(START), cids, get_properties=failing)
    assert strategy.nodes.known == {0, 2, 3, node_of("node one")}
    assert node_of(str(2**64 - 1)) == 2**64 - 1
    assert len({node_of(cid) for cid in cids.values()}) == CLIENTS


NO_MODELS = {
    name: change
    for name, change in {**FITS, **BOTH}.items()
    if name in [*TENSORS, "no arrays", "no parameters", "a failed status"]
    and name not in ("another shape", "another type")  # which are models of their own
}


@pytest.mark.parametrize("what", NO_MODELS)
def test_an_initial_model_that_is_none_is_asked_of_the_next_client(what: str) -> None:
    on = grid(quadratics(2))
    manager = SimpleClientManager()
    for node, change in zip(on.get_node_ids(), (NO_MODELS[what], lambda r: r), strict=True):
        manager.register(Unreliable(str(node), on, node, get_parameters=change))
    parameters = as_legacy(quick("fedavg")).initialize_parameters(manager)
    assert parameters is not None
    np.testing.assert_array_equal(to_vector(parameters_to_ndarrays(parameters)), np.zeros(DIM))


def test_a_run_that_no_client_gives_a_model_says_why() -> None:
    manager = SimpleClientManager()
    on = grid(quadratics(1))
    manager.register(Unreliable("7", on, NODES[0], get_parameters=with_tensor(b"noise")))
    with pytest.raises(ValueError, match="no client gave an initial model: node 7: not a NumPy"):
        as_legacy(quick("fedavg")).initialize_parameters(manager)


def test_a_clients_metrics_do_not_take_the_place_of_its_examples_or_loss() -> None:
    def lying(result: Any) -> Any:
        own = {"num-examples": 10**9, "eval-loss": -1e9}
        return replace(result, metrics={**result.metrics, **own})

    usual, lied = (quick("fedavg", fraction_evaluate=1.0) for _ in range(2))
    expected = run_unreliable(usual, to_record(START))
    model = run_unreliable(lied, to_record(START), fit=lying, evaluate=lying)
    np.testing.assert_array_equal(model, expected)
    for t in range(1, ROUNDS + 1):
        found, right = (s.result.evaluate_metrics_clientapp[t] for s in (lied, usual))
        assert found["eval-loss"] == right["eval-loss"]


def test_a_client_that_leaves_between_its_choice_and_its_request_is_a_lost_one() -> None:
    on = grid(quadratics(CLIENTS))
    manager = SimpleClientManager()
    proxies = [Unreliable(str(node), on, node) for node in on.get_node_ids()]
    for proxy in proxies:
        manager.register(proxy)
    strategy = quick("fedavg", callbacks=[])
    adapter = as_legacy(strategy, to_record(START))
    parameters = adapter.initialize_parameters(manager)
    assert parameters is not None
    usual = strategy.configure_train

    def leaving(*arguments: Any) -> Any:
        messages = usual(*arguments)
        manager.unregister(proxies[1])
        return messages

    strategy.configure_train = leaving  # type: ignore[method-assign, assignment]
    instructions = adapter.configure_fit(1, parameters, manager)
    _, metrics = adapter.aggregate_fit(
        1, [(proxy, proxy.fit(ins, None, None)) for proxy, ins in instructions], []
    )
    assert (metrics["clients-used"], metrics["clients-lost"]) == (CLIENTS - 1, 1)
