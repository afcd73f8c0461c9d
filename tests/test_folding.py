"""A host's weighted mean in place of its clients' uploads: the same run, but for rounding."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hosted import federation as hosted_by
from hosted import shared
from laws import REVIEWED, START, TABLE, Row, local, rounds_of, train
from problems import make_client_app, quadratics, to_record

from clients import AnyAlgorithmClient, InProcessGrid
from clients.node.in_process import Fault
from fl_strategies import FedADMM, FedAvg, FederatedStrategy, QFedAvg, RoundInfo, q_fedavg
from fl_strategies.core.layout import Layout
from fl_strategies.core.records import Round, Upload
from fl_strategies.parts import Clock
from fl_strategies.server.asked import Asked
from fl_strategies.server.reading import check_fold

CLIENTS = 7
FOLDABLE = [row for row in TABLE if row.strategy(local=local()).folds]
HOSTS = ([0, 1, 2, 3], [4, 5], None)
"""Two hosts, and a node that is client 6."""
foldable = pytest.mark.parametrize("row", FOLDABLE, ids=lambda row: row.name)


def federation(*, fault: Fault | None = None, **options: Any) -> InProcessGrid:
    """Return two hosts and one node of one client."""
    app = make_client_app(
        quadratics(CLIENTS), hosts=lambda c: HOSTS[int(c.node_config["node"])], **options
    )
    grid = InProcessGrid(app, len(HOSTS), fault=fault)
    for number, context in enumerate(grid.contexts.values()):
        context.node_config |= {"node": number, "num-partitions": CLIENTS, "partition-id": 6}
    return grid


def told(strategy: FederatedStrategy, on: InProcessGrid, rounds: int) -> tuple[Any, list[Any]]:
    """Return the model after ``rounds``, and of each round the numbers and clients' rows."""
    found: list[Any] = []

    def note(info: RoundInfo) -> None:
        passing = ("bytes", "seconds", "busy")
        kept = {n: v for n, v in info.metrics.items() if not n.startswith(passing)}
        found.append((kept, {c: dict(row) for c, row in info.clients.items()}))

    strategy.callbacks = (note,)
    return train(strategy, on, rounds), found


def test_the_rules_that_need_sums_alone_are_those() -> None:
    assert REVIEWED - {row.name for row in FOLDABLE} == {
        "fedamp",
        "fedbcd",
        "fedbcd-i",
        "fedbcd-async",
        "fedbcd-i-async",
    }


@pytest.mark.sampled
@foldable
def test_a_folded_run_is_the_other_to_rounding_and_its_numbers_are_its_clients(row: Row) -> None:
    options: dict[str, Any] = {"local": local(), "fraction_train": 0.7}
    model, rows = told(row.strategy(**options, fold="off"), federation(), 5)
    one = row.strategy(**options, fold="on")
    folded, others = told(one, federation(), 5)
    np.testing.assert_allclose(folded, model, rtol=1e-12, atol=1e-12)
    assert not np.array_equal(folded, START)
    for (numbers, clients), (usual, each) in zip(others, rows, strict=True):
        assert clients.keys() == each.keys()
        assert numbers["clients-used"] == usual["clients-used"]
        for client, found in clients.items():
            assert found == pytest.approx(each[client], rel=1e-9)


@foldable
def test_the_first_round_tells_every_clients_numbers_exactly(row: Row) -> None:
    """Later ones start from models that differ by rounding."""
    (_, rows), (_, folded) = (
        told(row.strategy(local=local(epochs=2), fold=fold), federation(), 1)
        for fold in ("off", "on")
    )
    assert folded == rows


def test_a_folded_upload_takes_a_models_time_on_a_link() -> None:
    seconds = []
    for fold in ("off", "on"):
        options: dict[str, Any] = {"clock": Clock(upload=1e-3), "node_wait": 0.01, "quiet": True}
        strategy = FedAvg(local=local(), fold=fold, **options)
        train(strategy, hosted_by("2 hosts"), 2)
        seconds.append(rounds_of(strategy, "virtual-seconds"))
    assert seconds == [pytest.approx([5 * 8 / 125, 2 * 5 * 8 / 125])] * 2


def test_in_a_simulation_a_folded_clients_upload_has_a_models_bytes() -> None:
    """There hosts stand for as many nodes as clients; else what arrives is counted."""
    up = {}
    for shape in ("3 hosts that share", "2 hosts"):
        strategy = FedAvg(local=local(), fold="on", quiet=True, node_wait=0.01, **shared(shape))
        train(strategy, hosted_by(shape), 1)
        up[shape] = rounds_of(strategy, "bytes-up")
    assert up["3 hosts that share"] == [6 * 5 * 8]
    assert up["2 hosts"][0] >= 2 * 5 * 8


def test_weights_that_are_all_zero_are_folded_to_the_plain_mean() -> None:
    (row,) = (row for row in TABLE if row.name == "fedbc")
    hyperparameters: dict[str, Any] = {"local": local(), "alpha": 0.0, "alpha_gamma": None}
    model = train(row.strategy(**hyperparameters, fold="off"), federation(), 2)
    folded = train(row.strategy(**hyperparameters, fold="on"), federation(), 2)
    np.testing.assert_allclose(folded, model, rtol=1e-12)


def test_one_mean_travels_in_place_of_a_hosts_uploads() -> None:
    shapes: list[Any] = []

    def look(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train" and "hosted" in reply.content:
            array = reply.content["arrays"]["tail"]
            shapes.append((array.dtype, array.numpy().shape, reply.content["hosted"]["folded"]))
        return reply

    train(FedAvg(local=local(), fold="on"), federation(fault=look), 1)
    assert shapes == [("float64", (1,), [0, 1, 2, 3]), ("float64", (1,), [4, 5])]


# ---- q-FedAvg, which needs distances beside the sum ----------------------------------------------


class Own(AnyAlgorithmClient):
    """Clients of different rates, some of which report a distance that nobody asked them for."""

    def __init__(self, problem: Any, *, client_id: int, **options: Any) -> None:
        super().__init__(problem, client_id=client_id, **options)
        self.number = client_id

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, samples, metrics = super().fit(
            parameters, config | {"lr": 0.02 + 0.01 * self.number}
        )
        return (
            arrays,
            samples,
            metrics | {"folded-distance2": 1e-30} if self.number % 2 else metrics,
        )


@pytest.mark.parametrize("bound", [None, 1e-2])
def test_q_fedavg_folds_whatever_its_clients_rates_and_losses_and_by_a_schedule(
    bound: float | None,
) -> None:
    options: dict[str, Any] = {"q": {1: 0.5, 2: 2.0, 3: 0.0}, "clipping_norm": bound}
    (model, rows), (folded, others) = (
        told(QFedAvg(local=local(), fold=fold, **options), federation(client=Own), 4)
        for fold in ("off", "on")
    )
    np.testing.assert_allclose(folded, model, rtol=1e-12)
    assert not np.allclose(model, START)
    for (_, clients), (_, each) in zip(others, rows, strict=True):
        for client, found in clients.items():
            assert found["weight-share"] == pytest.approx(each[client]["weight-share"], rel=1e-9)


def test_a_client_weighs_in_q_fedavg_by_its_loss_and_its_rate() -> None:
    """As moving its upload moves the model, all else as it was."""
    rng = np.random.default_rng(2)
    theta, w = rng.normal(size=3), rng.normal(size=(4, 3))
    loss, rate = rng.uniform(0.1, 2.0, (2, 4))
    shares = loss**2.5 / rate / (loss**2.5 / rate).sum()

    def moved(w: np.ndarray) -> np.ndarray:
        return q_fedavg.server_rule(
            theta,
            (q_fedavg.Local(*each, distance2=1.0) for each in zip(w, loss, rate, strict=True)),
            q=2.5,
        )

    slopes = [np.linalg.norm(moved(w + 1e-3 * np.eye(4)[i][:, None]) - moved(w)) for i in range(4)]
    np.testing.assert_allclose(np.array(slopes) / sum(slopes), shares, rtol=1e-6)
    one = QFedAvg(q=2.5)
    told_of = [
        Upload(i, w[i], 1.0, {"global-loss": loss[i], "lr": rate[i]}, round=1) for i in range(4)
    ]
    weights = np.array(one.weights_of(Round(), told_of))
    np.testing.assert_allclose(weights / weights.sum(), shares, rtol=1e-8)


DISTANCES = {
    "too small for the mean": ([1e-12] * 4, "from the model, and the clients' root mean square"),
    "negative": ([-1.0, 1.0, 1.0, 1.0], r"metric 'folded-distance2' must be in \[0, 1e\+06\]"),
    "beyond the bound": ([2e6, 1.0, 1.0, 1.0], r"must be in \[0, 1e\+06\], got 2000000"),
    "not finite": ([np.nan, 1.0, 1.0, 1.0], "metric 'folded-distance2' is not finite"),
    "missing": (None, "metric 'folded-distance2' is missing"),
}


@pytest.mark.parametrize("forgery", DISTANCES)
def test_distances_that_cannot_be_are_refused(
    forgery: str, caplog: pytest.LogCaptureFixture
) -> None:
    values, reason = DISTANCES[forgery]

    def change(records: dict[str, Any]) -> None:
        if values is None:
            del records["metrics-0"]["folded-distance2"]
        else:
            records["metrics-0"]["folded-distance2"] = values

    options: dict[str, Any] = {"fraction_evaluate": 0.0, "fold": "on", "clipping_norm": 1e3}
    one = QFedAvg(local=local(epochs=1), **options)
    train(one, federation(fault=forged(change)), 2)
    assert one.ledger.acked == {c: 1 if c < 4 else 2 for c in range(CLIENTS)}
    assert re.search(reason, caplog.text)


@pytest.mark.parametrize("far", [1e-9, 1.0, 1e9])
def test_distances_that_are_true_pass_wherever_the_mean_lies(far: float) -> None:
    """Rounding of the mean must not look like a lie: all clients come to about the same point."""
    rng = np.random.default_rng(1)
    theta = rng.normal(size=50) * 1e3
    target = theta + far * rng.normal(size=50)
    one = QFedAvg()
    for _ in range(50):
        w, p = target + 1e-9 * far * rng.normal(size=(5, 50)), rng.uniform(0.1, 1.0, 5)
        told_of = [
            Upload(
                i,
                p @ w / p.sum(),
                1.0,
                {"global-loss": p[i], "lr": 1.0},
                distance2=float(np.sum((w[i] - theta) ** 2)),
            )
            for i in range(5)
        ]
        layout = Layout.of({"w": theta})
        round = Round(theta=theta, layout=layout)
        check_fold(Asked(round, one.policy(None, round, {})), told_of)


# ---- what a host checks -------------------------------------------------------------------------


class Strange(AnyAlgorithmClient):
    """From round 2 on, some clients send what no server takes."""

    def __init__(self, problem: Any, *, client_id: int, **options: Any) -> None:
        super().__init__(problem, client_id=client_id, **options)
        self.number = client_id

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, samples, metrics = super().fit(parameters, config)
        if config["server-round"] == 1:
            return arrays, samples, metrics
        if self.number == 0:
            raise RuntimeError("its disk is full")
        if self.number == 1:
            arrays = [arrays[0] * np.nan, arrays[1]]
        if self.number == 3:
            metrics["algorithm"] = "fedprox"
        if self.number == 4:
            arrays = [arrays[0] + 1e6, arrays[1]]
        return arrays, samples, metrics


@pytest.mark.parametrize("kind", [FedAvg, FedADMM])
def test_rejected_clients_are_those_that_the_server_would_reject(kind: Any) -> None:
    """And for the same reasons, where the reason is not the bound, which scales models."""
    found = []
    for fold in ("off", "on"):
        options: dict[str, Any] = {"clipping_norm": 1e3, "fold": fold}
        one = kind(local=local(), fraction_evaluate=0.0, **options)
        model, rows = told(one, federation(client=Strange), 3)
        counts = [{n: v for n, v in row.items() if n.startswith("clients-")} for row, _ in rows]
        found.append((model, one.run.faults, counts, one.ledger.acked))
    (model, faults, *rest), (folded, others, *also) = found
    np.testing.assert_allclose(folded, model, rtol=1e-9)
    assert rest == also
    assert faults.keys() == others.keys() >= {0, 1, 3}
    for client in (1, 3):
        assert faults[client] == others[client]
    assert "its disk is full" in others[0]


def test_a_client_that_lost_its_state_is_refused_by_its_host() -> None:
    for fold in ("off", "on"):
        grid = federation()

        def forget(info: RoundInfo, grid: InProcessGrid = grid) -> None:
            state = next(iter(grid.contexts.values())).state
            for key in [key for key in state if key.startswith("client-2/")]:
                if info.server_round == 2:
                    del state[key]

        one = FedADMM(
            local=local(),
            fraction_evaluate=0.0,
            lost_state="refuse",
            callbacks=[forget],
            fold=fold,  # type: ignore[arg-type]
        )
        train(one, grid, 3)
        assert one.run.faults == {2: "its acknowledged state is lost"}
        assert one.ledger.acked == {c: 2 if c == 2 else 3 for c in range(CLIENTS)}


# ---- what the server checks ---------------------------------------------------------------------


def forged(change: Callable[[dict[str, Any]], None]) -> Fault:
    """Return a fault by which the first host's replies are changed from round 2 on."""

    def fault(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("config", {})
        hosted = reply.content.config_records.get("hosted", {})
        if config.get("server-round", 0) < 2 or 0 not in hosted.get("folded", []):
            return reply
        records = {k: dict(v) for k, v in reply.content.items()}
        change(records)
        kinds: dict[str, Any] = {
            "arrays": ArrayRecord,
            "metrics-0": type(reply.content["metrics-0"]),
        }
        reply.content = RecordDict({k: kinds.get(k, ConfigRecord)(v) for k, v in records.items()})
        return reply

    return fault


def array_as(value: np.ndarray) -> Callable[[dict[str, Any]], None]:
    return lambda records: records["arrays"].update({"tail": Array(value)})


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "not finite": (array_as(np.array([np.nan])), "array 'tail' is not finite"),
    "another shape": (array_as(np.zeros(2)), r"array 'tail' has shape \(2,\)"),
    "float32": (array_as(np.zeros(1, np.float32)), "array 'tail' has type <f4"),
    "beyond the bound": (array_as(np.array([1e9])), "the norm of its update is 1e\\+09, at most"),
    "a client of the other host": (
        lambda r: r["hosted"].update({"folded": [0, 1, 2, 4]}),
        "it has uploads outside its mean",
    ),
    "a client too many": (
        lambda r: r["hosted"].update({"folded": [0, 1, 2, 3, 4]}),
        "its host sent one mean of it and client 4, which cannot be taken out",
    ),
    "a client twice": (
        lambda r: r["hosted"].update({"folded": [0, 1, 2, 3, 3]}),
        "clients are in the mean twice",
    ),
    "one client's number": (
        lambda r: r["metrics-0"].update({"train-loss": [1.0, np.inf, 1.0, 1.0]}),
        "its host sent one mean of it and client 1, which cannot be taken out",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_mean_harms_the_clients_of_its_host_alone(
    forgery: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, reason = FORGERIES[forgery]
    grid = federation(fault=forged(change))
    options: dict[str, Any] = {"fraction_evaluate": 0.0, "fold": "on", "clipping_norm": 1e3}
    one = FedADMM(local=local(epochs=1), **options)
    train(one, grid, 2)
    assert one.ledger.acked == {c: 1 if c < 4 else 2 for c in range(CLIENTS)}
    assert re.search(reason, caplog.text)


def test_a_host_that_folds_unasked_is_left_out() -> None:
    """Its reply has arrays for nobody."""
    asked: list[Any] = []

    def fault(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train" and "hosted" in reply.content:
            hosted = dict(reply.content["hosted"])
            hosted["folded"] = hosted.pop("arrays")
            reply.content["hosted"] = ConfigRecord(hosted)
            asked.append(hosted["folded"])
        return reply

    one = FedAvg(local=local(), fraction_evaluate=0.0, fold="off")
    train(one, federation(fault=fault), 1)
    assert one.run.faults.keys() == {0, 1, 2, 3, 4, 5}
    assert asked


# ---- when it folds ------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory", "folds"), [(1, False), (0, True)])
def test_auto_folds_where_uploads_take_more_than_the_setting_and_says_so(
    memory: int, folds: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        seen: list[Message] = []
        note: Fault = lambda request, reply: seen.append(reply) or reply  # noqa: E731
        one = FedAvg(local=local(), fraction_evaluate=0.0, fold_memory=memory)
        train(one, federation(fault=note), 2)
    found = ["folded" in r.content["hosted"] for r in seen if "hosted" in r.content]
    assert found == 4 * [folds]
    text = "uploads of 6 clients take 0 MB, more than fold_memory=0: hosts send weighted means"
    assert caplog.text.count(text) == int(folds)


def test_a_rule_that_needs_each_upload_cannot_be_made_to_fold() -> None:
    (row,) = (row for row in TABLE if row.name == "fedbcd")
    with pytest.raises(ValueError, match=r'fold must be "auto" or "off" for FedBCD'):
        row.strategy(local=local(), fold="on")
    train(row.strategy(local=local(), fold_memory=0), federation(), 2)


def test_the_model_given_is_untouched() -> None:
    record = to_record(START)
    FedAvg(local=local(), fold="on").start(federation(), record, 2)
    np.testing.assert_array_equal(record["tail"].numpy(), to_record(START)["tail"].numpy())
