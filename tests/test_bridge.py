"""Laws of the bridge: one ClientApp for the Message API, legacy servers, and strangers' parts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import History, Server, ServerConfig, SimpleClientManager
from flwr.server.compat import start_grid
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.strategy import FedProx as LegacyFedProx
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import FedProx as FlowerFedProx
from problems import NODES, grid, make_client_app, quadratics, to_record, to_vector

from clients import (
    CLIENTS,
    AnyAlgorithmClient,
    ContextStore,
    DirectoryStore,
    FedADMMClient,
    FedAvgClient,
    LocalTraining,
    client_app,
    client_id,
)
from clients.node.in_process import InProcessGrid
from fl_strategies import FedADMM, FedAvg, FedProx

PROBLEMS = quadratics(3)
START = np.array([2.0, -1.0, 0.5, 3.0, -4.0])
LR, EPOCHS = 0.2, 3
LOCAL = LocalTraining(solver="gd", lr=LR, epochs=EPOCHS)


def trained(i: int, theta: np.ndarray, mu: float = 0.0) -> np.ndarray:
    """EPOCHS gradient steps of f_i + mu/2 ||w - theta||^2, by matrices."""
    w = theta
    for _ in range(EPOCHS):
        w = w - LR * (PROBLEMS[i].gradient(w) + mu * (w - theta))
    return w


def fedavg(rounds: int, mu: float = 0.0) -> np.ndarray:
    """FedAvg or FedProx weighted by examples, by matrices."""
    theta, sizes = START, np.array([q.n for q in PROBLEMS])
    for _ in range(rounds):
        theta = sizes / sizes.sum() @ np.array([trained(i, theta, mu) for i in range(3)])
    return theta


def ask(app: Any, kind: str, content: RecordDict | None = None, client: int = 0) -> Message:
    """Send one message to a client of ``app``; return its reply."""
    engine = InProcessGrid(app, 3)
    message = Message(content or RecordDict(), dst_node_id=NODES[client], message_type=kind)
    (reply,) = engine.send_and_receive([message])
    return reply


def request(**config: Any) -> RecordDict:
    config = {name.replace("_", "-"): value for name, value in config.items()}
    return RecordDict({"arrays": to_record(START), "config": ConfigRecord(config)})


class Plain(NumPyClient):
    """What a Flower user might have written: no module of ours but the problem's numbers."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, context: Context) -> None:
        self.i = int(context.node_config["partition-id"])

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        self.seen.append(config)
        w = trained(self.i, to_vector(parameters), float(config.get("proximal-mu", 0.0)))
        return [w[:4].reshape(2, 2), w[4:]], PROBLEMS[self.i].n, {"train-loss": 0.5}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> tuple[float, int, dict]:
        loss = PROBLEMS[self.i].value(to_vector(parameters))
        return loss, PROBLEMS[self.i].n, {"eval-share": 0.25}


def test_a_train_request_is_answered_with_model_and_metrics() -> None:
    app = make_client_app(PROBLEMS, training=LOCAL)
    reply = ask(app, "train", request(algorithm="fedavg"), client=1)
    assert not reply.has_error()
    assert list(reply.content.array_records["arrays"]) == ["head", "tail"]
    got = to_vector(reply.content.array_records["arrays"])
    np.testing.assert_allclose(got, trained(1, START), rtol=1e-12)
    metrics = reply.content.metric_records["metrics"]
    assert metrics["num-examples"] == PROBLEMS[1].n
    assert metrics["steps"] == metrics["epochs"] == EPOCHS
    before_last = START
    for _ in range(EPOCHS - 1):
        before_last = before_last - LR * PROBLEMS[1].gradient(before_last)
    assert metrics["train-loss"] == pytest.approx(PROBLEMS[1].value(before_last), rel=1e-12)


def test_an_evaluate_request_is_answered_with_the_loss() -> None:
    app = make_client_app(PROBLEMS)
    reply = ask(app, "evaluate", request(), client=2)
    metrics = reply.content.metric_records["metrics"]
    assert metrics["eval-loss"] == pytest.approx(PROBLEMS[2].value(START), rel=1e-12)
    assert metrics["num-examples"] == PROBLEMS[2].n
    assert not reply.content.array_records


def test_a_query_tells_the_stable_id() -> None:
    app = make_client_app(PROBLEMS)
    for client in range(3):
        about = ask(app, "query", client=client).content.config_records["client"]
        assert dict(about) == {"client-id": client, "num-partitions": 3}


def test_without_a_partition_the_node_is_the_client() -> None:
    context = Context(
        run_id=1, node_id=2**63 + 9, node_config={}, state=RecordDict(), run_config={}
    )
    assert client_id(context) == 2**63 + 9


@pytest.mark.parametrize("kind", [AnyAlgorithmClient, FedADMMClient])
@pytest.mark.parametrize("hosts", [0, 3])
def test_a_client_has_the_contexts_id_and_store(kind: Any, hosts: int) -> None:
    """Draws and states are those of clients that are given both: also one object for all."""
    problem = PROBLEMS[0].problem()
    training = LocalTraining(epochs=5, random_epochs=True, batch_size=2)
    one = kind(problem, training=training)

    def explicit(context: Context) -> NumPyClient:
        me, store = client_id(context), ContextStore(context)
        client: NumPyClient = kind(problem, client_id=me, store=store, training=training)
        return client

    reached = []
    for made in (lambda context: one, explicit):
        engine = InProcessGrid(client_app(made, hosts=hosts or None), 3, hosts=hosts and 2)
        strategy = FedADMM(fraction_evaluate=0.0, fraction_train=0.7, shared_population=hosts)
        reached.append(to_vector(strategy.start(engine, to_record(START), num_rounds=4).arrays))
    np.testing.assert_array_equal(*reached)


@pytest.mark.parametrize("kind", [AnyAlgorithmClient, FedADMMClient])
def test_what_a_client_is_given_goes_before_the_context(kind: Any, tmp_path: Path) -> None:
    def made(context: Context) -> NumPyClient:
        me = client_id(context)
        client: NumPyClient = kind(PROBLEMS[me].problem(), store=DirectoryStore(tmp_path, 5 * me))
        return client

    app = client_app(made)
    config = {"algorithm": "fedadmm", "rho": 1.0, "run_id": "a", "server_round": 1}
    config |= {"local_start": "client", "tracking": "client"}
    assert not ask(app, "train", request(**config)).has_error()
    assert [path.name for path in tmp_path.glob("*/*")] == ["1.safetensors"]
    reply = ask(app, "train", request(**config), client=1)
    assert "store is of client 5, client_id is 1" in reply.error.reason


@pytest.mark.parametrize("kind", [AnyAlgorithmClient, FedAvgClient])
def test_a_client_that_no_context_tells_its_id_needs_one(kind: Any) -> None:
    problem = PROBLEMS[0].problem()
    client = kind(problem, test=problem)
    for call in (client.fit, client.evaluate, lambda _, config: client.get_properties(config)):
        with pytest.raises(ValueError, match="client_id must be given, as in client_id=0"):
            call(client.get_parameters({}), {})


def test_words_travel_in_a_config_record_and_numbers_in_metrics() -> None:
    metrics = {
        "word": "yes",
        "flag": True,
        "raw": b"\x00\x01",
        "count": np.int64(3),
        "share": np.float32(0.5),
        "truth": np.bool_(False),
        "many": [1.0, 2.0],
    }

    class Talker(Plain):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
            return parameters, 2, metrics

    reply = ask(client_app(Talker), "train", request())
    words = dict(reply.content.config_records["config"])
    assert words == {"word": "yes", "flag": True, "raw": b"\x00\x01", "truth": False}
    numbers = dict(reply.content.metric_records["metrics"])
    assert numbers == {"num-examples": 2, "count": 3, "share": 0.5, "many": [1.0, 2.0]}


def test_what_a_client_does_to_its_request_stays_with_it() -> None:
    class Vandal(Plain):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
            config["lr"] = 9.0
            for array in parameters:
                array[:] = 0.0
            return parameters, 1, {}

    content = request(lr=0.1)
    ask(client_app(Vandal), "train", content)
    assert dict(content.config_records["config"]) == {"lr": 0.1}
    np.testing.assert_array_equal(to_vector(content.array_records["arrays"]), START)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RecordDict({"a": to_record(START), "b": to_record(START)}), "one ArrayRecord .* got 2"),
        (RecordDict(), "one ArrayRecord .* got 0"),
        (
            RecordDict({"a": ArrayRecord(), "b": ConfigRecord(), "c": ConfigRecord()}),
            "at most one ConfigRecord, got 1 and 2",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_request_of_another_form_is_refused(kind: str, content: RecordDict, message: str) -> None:
    reply = ask(make_client_app(PROBLEMS), kind, content)
    assert re.search(message, reply.error.reason)


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    app = make_client_app(PROBLEMS)
    for kind in ("train", "evaluate"):
        reply = ask(app, kind, request(algorithm="fedmagic"))
        assert reply.has_error()
        assert "unknown algorithm 'fedmagic'" in reply.error.reason
        assert str(sorted(CLIENTS)) in reply.error.reason


def test_a_wrong_number_of_returned_arrays_is_refused() -> None:
    class Short(Plain):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
            return parameters[:1], 1, {}

    reply = ask(client_app(Short), "train", request())
    assert "fit returned 1 arrays, 2 were received" in reply.error.reason


def test_a_clients_own_mistake_is_an_error_reply() -> None:
    reply = ask(make_client_app(PROBLEMS), "train", request(algorithm="fedprox"))
    assert "the request lacks 'proximal-mu'" in reply.error.reason


class Fails(Plain):
    """A client whose mistake passes through three exceptions, of which the last says least."""

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        try:
            try:
                {}["shard"]
            except KeyError as error:
                raise OSError("no data\n  of this client") from error
        except OSError:
            raise RuntimeError("cannot train")  # noqa: B904
        raise AssertionError


def test_the_reason_of_a_failed_reply_is_one_line_that_begins_with_the_innermost_exception() -> (
    None
):
    reason = ask(client_app(Fails), "train", request()).error.reason
    line = Fails.fit.__code__.co_firstlineno + 3
    assert reason == (
        f"KeyError: 'shard' (test_bridge.py:{line} in fit); hence OSError: no data of this client;"
        " hence RuntimeError: cannot train"
    )


def test_an_exception_that_was_hidden_on_purpose_is_not_in_the_reason() -> None:
    class Hides(Plain):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
            try:
                {}["shard"]
            except KeyError:
                raise OSError("no data") from None
            raise AssertionError

    assert ask(client_app(Hides), "train", request()).error.reason.startswith("OSError: no data (")


# ---- strangers' clients, strangers' servers -----------------------------------------------------


def test_a_strangers_client_works_under_our_strategies() -> None:
    options = {"local": {"lr": LR}, "seed": 4}
    for strategy, mu in ((FedAvg(**options), 0.0), (FedProx(mu=0.7, **options), 0.7)):
        Plain.seen.clear()
        result = strategy.start(InProcessGrid(client_app(Plain), 3), to_record(START), num_rounds=2)
        np.testing.assert_allclose(to_vector(result.arrays), fedavg(2, mu), rtol=1e-12)
        assert len(Plain.seen) == 6
        assert {config.get("proximal-mu", 0.0) for config in Plain.seen} == {mu}
        assert result.train_metrics_clientapp[2]["clients-used"] == 3
        sizes = np.array([q.n for q in PROBLEMS])
        losses = np.array([q.value(fedavg(2, mu)) for q in PROBLEMS])
        loss = result.evaluate_metrics_clientapp[2]["eval-loss"]
        assert loss == pytest.approx(sizes @ losses / sizes.sum(), rel=1e-10)


def test_our_clients_work_under_flowers_own_fedavg() -> None:
    strategy = FlowerFedAvg(min_train_nodes=3, min_evaluate_nodes=3, min_available_nodes=3)
    result = strategy.start(grid(PROBLEMS, training=LOCAL), to_record(START), num_rounds=2)
    np.testing.assert_allclose(to_vector(result.arrays), fedavg(2), rtol=1e-12)
    assert "eval-loss" in result.evaluate_metrics_clientapp[2]


def test_flowers_own_fedprox_reaches_our_fedprox_client() -> None:
    strategy = FlowerFedProx(
        proximal_mu=0.7, min_train_nodes=3, min_evaluate_nodes=3, min_available_nodes=3
    )
    result = strategy.start(grid(PROBLEMS, training=LOCAL), to_record(START), num_rounds=2)
    np.testing.assert_allclose(to_vector(result.arrays), fedavg(2, mu=0.7), rtol=1e-12)
    assert not np.allclose(to_vector(result.arrays), fedavg(2), rtol=1e-3)


class GivesParameters(FedAvgClient):
    """Our client, which can also be asked for the first model, as legacy servers do."""

    def get_parameters(self, config: dict[str, Any]) -> list[Any]:
        return [START[:4].reshape(2, 2), START[4:]]

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"asked": str(config["about"]), "size": self.client_id}


def run_legacy(strategy: LegacyFedAvg, **options: Any) -> tuple[np.ndarray, History]:
    """Run two rounds on Flower's legacy Server; return its model and its history."""
    server = Server(client_manager=SimpleClientManager(), strategy=strategy)
    server.set_max_workers(1)  # the clients of this process share one module
    engine = grid(PROBLEMS, training=LOCAL, **options)
    engine.set_run(SimpleNamespace(run_id=1))
    history = start_grid(grid=engine, server=server, config=ServerConfig(num_rounds=2))
    return to_vector(parameters_to_ndarrays(server.parameters)), history


ALL_THREE = {"min_fit_clients": 3, "min_evaluate_clients": 3, "min_available_clients": 3}
PARAMETERS = ndarrays_to_parameters([START[:4].reshape(2, 2), START[4:]])


def test_the_same_app_answers_a_legacy_server() -> None:
    theta, history = run_legacy(LegacyFedAvg(**ALL_THREE, initial_parameters=PARAMETERS))
    np.testing.assert_allclose(theta, fedavg(2), rtol=1e-12)
    sizes = np.array([q.n for q in PROBLEMS])
    assert [server_round for server_round, _ in history.losses_distributed] == [1, 2]
    for server_round, loss in history.losses_distributed:
        losses = np.array([q.value(fedavg(server_round)) for q in PROBLEMS])
        assert loss == pytest.approx(sizes @ losses / sizes.sum(), rel=1e-10)


def test_a_legacy_server_may_ask_a_client_for_the_first_model() -> None:
    theta, _ = run_legacy(LegacyFedAvg(**ALL_THREE), client=GivesParameters)
    np.testing.assert_allclose(theta, fedavg(2), rtol=1e-12)


def test_the_legacy_fedprox_reaches_our_fedprox_client() -> None:
    strategy = LegacyFedProx(**ALL_THREE, initial_parameters=PARAMETERS, proximal_mu=0.7)
    np.testing.assert_allclose(run_legacy(strategy)[0], fedavg(2, mu=0.7), rtol=1e-12)


def test_a_legacy_server_may_ask_for_properties() -> None:
    app = make_client_app(PROBLEMS, client=GivesParameters)
    content = RecordDict({"getpropertiesins.config": ConfigRecord({"about": "you"})})
    reply = ask(app, "get_properties", content, client=2)
    assert dict(reply.content.config_records["getpropertiesres.properties"]) == {
        "asked": "you",
        "size": 2,
    }


def test_a_record_whose_name_resembles_legacy_is_not() -> None:
    content = RecordDict({"plugins.arrays": to_record(START), "config": ConfigRecord()})
    reply = ask(make_client_app(PROBLEMS, training=LOCAL), "train", content)
    got = to_vector(reply.content.array_records["arrays"])
    np.testing.assert_allclose(got, trained(0, START), rtol=1e-12)
