"""Laws of downloads in bfloat16: clients get the model rounded, the server keeps the exact one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hosted import federation
from laws import START, TABLE, Row, local, one_of_each_mechanism, train
from problems import NODES, grid, kept, quadratics, to_record, to_vector

from clients.node.in_process import InProcessGrid
from fl_strategies import FedADMM, FedAvg, FederatedStrategy, as_legacy, fedadmm
from fl_strategies.core.layout import Layout
from fl_strategies.parts import BFloat16, Gaussian, TopK
from fl_strategies.server.model import Model
from simulations.config import RunConfig
from simulations.rules import configs_for

ROW = {row.name: row for row in TABLE}
HEADER = 128
UNEVEN = START * 1.01
"""A model of numbers that are no bfloat16."""


def made(row: Row, *, short: bool = True, **options: Any) -> FederatedStrategy:
    download = BFloat16() if short else None
    return row.strategy(**{"local": local(), "download": download, **options})


def rounded(w: np.ndarray) -> np.ndarray:
    """By PyTorch, which rounds a float64 in two steps, as we do."""
    return torch.from_numpy(w).float().bfloat16().double().numpy()


@one_of_each_mechanism
def test_a_model_of_bfloat16_numbers_travels_as_it_is(row: Row) -> None:
    """One round equals the round without, and its trained arrays have two bytes a number."""
    if made(row, short=False).needs_exact_model:
        with pytest.raises(
            ValueError, match=r"download=BFloat16\(\) does not go with .* roundings"
        ):
            made(row)
        return
    np.testing.assert_array_equal(rounded(START), START)
    plain, short = made(row, short=False), made(row)
    expected = train(plain, grid(quadratics(3)), 1)
    found = train(short, grid(quadratics(3)), 1)
    np.testing.assert_allclose(found, expected, rtol=1e-15, atol=1e-15)
    down = [s.result.train_metrics_clientapp[1]["bytes-down"] for s in (plain, short)]
    assert down[0] - down[1] == 3 * (START.nbytes - 2 * START.size)
    assert plain.run.faults == short.run.faults == {}


@one_of_each_mechanism
def test_any_algorithm_stays_near_its_run_without(row: Row) -> None:
    if made(row, short=False).needs_exact_model:
        return
    plain, short = (train(made(row, short=s), grid(quadratics(2)), 10) for s in (False, True))
    assert not np.array_equal(short, plain)
    np.testing.assert_allclose(short, plain, atol=2.0**-6 * np.abs(plain).max())


@pytest.mark.parametrize(
    "name", [row.name for row in TABLE if made(row, short=False).moves_received]
)
@pytest.mark.sampled
def test_steps_below_the_rounding_add_up(name: str) -> None:
    """Each step is a hundredth of what bfloat16 can tell apart; a rounded server would stand."""
    options: dict[str, Any] = {"eta": 1e-5} if name == "pfedme" else {"local": local(lr=1e-5)}
    plain, short = (
        made(ROW[name], short=s, **options).start(grid(quadratics(3)), to_record(UNEVEN), 8)
        for s in (False, True)
    )
    moved = to_vector(plain.arrays) - UNEVEN
    assert 0.0 < np.abs(moved).max() < 2.0**-9
    atol = 0.1 * np.abs(moved).max()
    np.testing.assert_allclose(to_vector(short.arrays) - UNEVEN, moved, atol=atol)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_newcomers_of_fedadmm_count_from_the_model_that_they_received(share: float) -> None:
    """theta = (1/m) sum_i (w_i + y_i/rho) over those that took part and theta^0 for the others."""
    federated = grid(quadratics(6))
    strategy = FedADMM(
        rho=0.5, eta="fraction", fraction_train=share, local=local(), download=BFloat16(),
        fraction_evaluate=0.0, seed=1,
    )  # fmt: skip
    theta = to_vector(strategy.start(federated, to_record(UNEVEN), 3).arrays)
    acked = strategy.ledger.acked
    there = {node: c for node, c in federated.contexts.items() if NODES.index(node) in acked}
    assert (len(there) < 6) == (share < 1.0)
    federated.contexts = there
    states = [fedadmm.State(f["w"], f["y"], float(f["rho"])) for f in kept(federated, acked)]
    u = [state.w + state.y / state.rho for state in states] + [UNEVEN] * (6 - len(there))
    np.testing.assert_allclose(theta, np.mean(u, axis=0), atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fednova", "q-fedavg", "scaffold"])
def test_hosts_fold_what_moved_from_the_received_model(name: str) -> None:
    plain = train(made(ROW[name], node_wait=0.01), federation("2 hosts"), 3)
    options: dict[str, Any] = {"fold": "on", "node_wait": 0.01, "clipping_norm": 1e3}
    folded = train(made(ROW[name], **options), federation("2 hosts"), 3)
    np.testing.assert_allclose(folded, plain, atol=1e-12)


def test_clients_evaluate_what_they_receive_and_the_server_the_exact_model() -> None:
    seen: list[np.ndarray] = []

    def exact(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(to_vector(arrays))
        return MetricRecord({})

    problems = quadratics(3)
    strategy = FedAvg(local=local(), download=BFloat16())
    result = strategy.start(grid(problems), to_record(UNEVEN), 2, evaluate_fn=exact)
    np.testing.assert_array_equal(seen[0], UNEVEN)
    np.testing.assert_array_equal(seen[-1], to_vector(result.arrays))
    assert not np.array_equal(rounded(seen[-1]), seen[-1])
    samples = sum(q.n for q in problems)
    loss = sum(q.n * q.value(rounded(seen[-1])) for q in problems) / samples
    assert result.evaluate_metrics_clientapp[2]["eval-loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("part", [{"compression": TopK(share=0.4)},
                                  {"weights": "uniform", "privacy": Gaussian(clip=1e9, noise=0.0)}],
                         ids=["compression", "privacy"])  # fmt: skip
def test_other_parts_measure_from_the_received_model(part: dict[str, Any]) -> None:
    """With nothing sent, or nothing clipped, the server's model moves as its clients' do."""
    options: dict[str, Any] = {"local": local(), "fraction_evaluate": 0.0, "download": BFloat16()}
    if "privacy" in part:
        plain = FedAvg(**options, weights="uniform")
        expected = to_vector(plain.start(grid(quadratics(3)), to_record(UNEVEN), 3).arrays)
        found = FedAvg(**options, **part).start(grid(quadratics(3)), to_record(UNEVEN), 3).arrays
        np.testing.assert_allclose(to_vector(found), expected, atol=1e-12)
        return
    options["local"] = local(lr=1e-12)
    found = FedAvg(**options, **part).start(grid(quadratics(3)), to_record(UNEVEN), 3).arrays
    np.testing.assert_allclose(to_vector(found), UNEVEN, atol=1e-9)


def test_a_model_travels_as_two_bytes_a_number_and_buffers_as_they_are() -> None:
    w, t, mean = np.float32([[1.01, -3e-9]]), np.float32([7.77]), np.float32([0.123])
    record = ArrayRecord({"w": Array(w), "mean": Array(mean), "tied": Array(w), "t": Array(t)})
    layout = Layout.of({n: a.numpy() for n, a in record.items()}, ["mean"], [["w", "tied"]])
    model = Model.of(record, layout)
    short = model.rounded()
    sizes = {name: len(array.data) - HEADER for name, array in short.travelling.items()}
    assert sizes == {"w": 4, "mean": 4, "tied": 4, "t": 2}
    for name, array in {"w": w, "tied": w, "t": t}.items():
        expected = torch.from_numpy(array).bfloat16().float().numpy()
        np.testing.assert_array_equal(short.arrays[name], expected)
        assert short.arrays[name].dtype == np.float32
    np.testing.assert_array_equal(short.arrays["mean"], mean)
    np.testing.assert_array_equal(short.theta, layout.pack(short.arrays))


# ---- what it does not go with -------------------------------------------------------------------


def test_a_foreign_client_fails_and_never_trains_on_bits() -> None:
    app = ClientApp()

    @app.train()
    def trained(message: Message, context: Any) -> Message:
        arrays = message.content["arrays"].to_torch_state_dict()
        numbers = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": numbers})
        return Message(content, reply_to=message)

    strategy = FedAvg(download=BFloat16(), fraction_evaluate=0.0, node_wait=0.01)
    result = strategy.start(InProcessGrid(app, 2), to_record(START), 1)
    assert result.skipped == [1]
    assert all("numpy.void" in fault for fault in strategy.run.faults.values())


def test_legacy_servers_wrappers_and_mixed_types_are_refused() -> None:
    strategy = FedAvg(download=BFloat16(), local=local(), node_wait=0.01)
    with pytest.raises(ValueError, match=r"download=BFloat16\(\) needs Strategy.start"):
        as_legacy(strategy, to_record(START))
    with pytest.raises(ValueError, match=r"download=BFloat16\(\) cannot be run by a wrapper"):
        strategy.configure_train(1, to_record(START), ConfigRecord(), grid(quadratics(2)))
    mixed = ArrayRecord({"a": Array(np.zeros(2)), "b": Array(np.zeros(2, np.float32))})
    strategy = FedAvg(download=BFloat16(), buffers=(), ties=(), frozen={})
    with pytest.raises(ValueError, match=r"trained arrays of the types \['float32', 'float64'\]"):
        strategy.start(grid(quadratics(2)), mixed, 1)
    with pytest.raises(ValueError, match="download must be number format"):
        FedAvg(download=TopK())  # type: ignore[arg-type]


def test_run_configs_and_comparisons_have_it(tmp_path: Path) -> None:
    config = RunConfig.parse({"algorithm": "fedavg", "download": "bfloat16"})
    assert config.strategy().download == BFloat16()
    assert config.strategy().compression is None
    assert config.rule == "fedavg+download=bfloat16"
    (found,) = configs_for(["fedprox+download=bfloat16+topk"], ["topk.share=0.1"], {}, tmp_path)
    assert found.parts == {"download": BFloat16(), "compression": TopK(share=0.1)}
    assert found.rule == "fedprox+download=bfloat16+topk"
    with pytest.raises(ValueError, match="download: no part 'topk'; known: \\['bfloat16'\\]"):
        RunConfig.parse({"algorithm": "fedavg", "download": "topk"})
    with pytest.raises(ValueError, match="no stage 'upload'"):
        configs_for(["fedavg+upload=topk"], [], {}, tmp_path)
