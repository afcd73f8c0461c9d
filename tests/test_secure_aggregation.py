"""Flower's secure aggregation: the model under masks is the same but for rounding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federations import lose, serve
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from laws import START, Row, local, train
from problems import NODES, grid, kept, quadratics, to_record, to_vector
from wrapped import ADMM, OF_CHANGES, OF_MODELS, QUIET, rows

from clients.node.in_process import InProcessGrid
from fl_strategies import FedADMM, FedAvg, FederatedStrategy, as_legacy

RANGE = 16.0
STEP = 2 * RANGE / 2**22
"""What quantisation rounds an upload of full weight to."""


def workflow(max_weight: float = 16.0, clipping_range: float = RANGE) -> SecAggPlusWorkflow:
    return SecAggPlusWorkflow(
        1.0, 0.5, max_weight=max_weight, clipping_range=clipping_range, timeout=60.0
    )


def masked_run(
    strategy: FederatedStrategy,
    rounds: int,
    *,
    on: InProcessGrid | None = None,
    start: ArrayRecord | None = None,
    secure: SecAggPlusWorkflow | None = None,
    known: bool = True,
) -> np.ndarray:
    """Return the model [5] after rounds of SecAgg+, of which the strategy need not be told."""
    on = on or grid(quadratics(4), mods=[secaggplus_mod])
    on.set_run(SimpleNamespace(run_id=1))
    secure = secure or workflow()
    adapter = as_legacy(strategy, start or to_record(START), secure=secure if known else None)
    context = LegacyContext(
        Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}),
        ServerConfig(num_rounds=rounds),
        adapter,
    )
    DefaultWorkflow(fit_workflow=secure)(on, context)
    return to_vector(context.state.array_records["parameters"].to_numpy_ndarrays())


def ready(row: Row, **options: Any) -> FederatedStrategy:
    return row.strategy(**{"min_available_nodes": 4, "local": local(), **options})


@pytest.mark.sampled("fedadmm")
@rows(OF_MODELS | OF_CHANGES)
def test_under_masks_the_model_is_the_same_but_for_rounding(row: Row) -> None:
    """Rounding errors, of STEP and a little more by weight, add up over four rounds."""
    strategy = ready(row)
    found = masked_run(strategy, 4)
    plain = train(ready(row), grid(quadratics(4)), 4)
    np.testing.assert_allclose(found, plain, rtol=0, atol=10 * STEP)
    assert np.abs(found - plain).max() > 1e-12  # there was a workflow at work


@pytest.mark.parametrize("row", [Row("fedavg"), Row("scaffold")], ids=str)
def test_under_masks_clients_that_are_not_asked_or_lost_are_left_out_of_the_sum(row: Row) -> None:
    options: dict[str, Any] = {"fraction_train": 0.75, "seed": 3}
    lost, strategy = [(2, 0), (3, 2)], ready(row, **options)
    on = grid(quadratics(4), mods=[secaggplus_mod], fault=lose(*lost, masked=True))
    found = masked_run(strategy, 4, on=on)
    plain = train(ready(row, **options), grid(quadratics(4), fault=lose(*lost)), 4)
    np.testing.assert_allclose(found, plain, rtol=0, atol=10 * STEP)
    rounds = strategy.result.train_metrics_clientapp.values()
    assert [round["clients-lost"] for round in rounds] == [0, 1, 1, 0]


def test_masks_hide_uploads_and_single_precision_comes_back() -> None:
    arrays: list[int] = []

    def watch(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train" and not reply.has_error():
            arrays.extend(len(record) for record in reply.content.array_records.values())
        return reply

    on = grid(quadratics(4), mods=[secaggplus_mod], dtype=torch.float32, fault=watch)
    start = ArrayRecord({n: Array(a.numpy().astype("f4")) for n, a in to_record(START).items()})
    found = masked_run(FedADMM(**ADMM), 3, on=on, start=start)
    plain = FedADMM(**ADMM).start(grid(quadratics(4), dtype=torch.float32), start, 3)
    np.testing.assert_allclose(found, to_vector(plain.arrays), rtol=0, atol=10 * STEP)
    assert arrays == [0] * 3 * 4  # no upload has an array left outside the masks


def test_a_client_that_drops_out_under_masks_undoes_its_work() -> None:
    """theta stays the mean of all clients' w + y/rho, to the rounding of what was uploaded."""
    lost = [(2, 0), (3, 2), (4, 2)]
    options = ADMM | {"eta": "fraction"}
    on = grid(quadratics(4), mods=[secaggplus_mod], fault=lose(*lost, masked=True))
    strategy = FedADMM(**options)
    found = masked_run(strategy, 6, on=on)
    plain = train(FedADMM(**options), grid(quadratics(4), fault=lose(*lost)), 6)
    np.testing.assert_allclose(found, plain, rtol=0, atol=10 * STEP)
    tracked = np.mean([s["w"] + s["y"] / 0.5 for s in kept(on, strategy.ledger.acked)], axis=0)
    np.testing.assert_allclose(found, tracked, rtol=0, atol=10 * STEP)
    counted = [m["clients-lost"] for m in strategy.result.train_metrics_clientapp.values()]
    assert counted == [0, 1, 1, 1, 0, 0]


def test_what_the_masks_would_cut_off_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    for secure, reason in (
        (workflow(clipping_range=0.5), r"clipping_range of SecAggPlusWorkflow, 0.5, in size, got"),
        (workflow(max_weight=12.0), "max_weight of SecAggPlusWorkflow, 12, got 13"),
    ):
        strategy = FedAvg(min_available_nodes=4, **QUIET)
        caplog.clear()
        found = masked_run(strategy, 1, secure=secure)
        assert reason in caplog.text
        assert 3 not in strategy.ledger.acked
        if secure.clipping_range == 0.5:  # of all clients
            np.testing.assert_array_equal(found, START)
    masked_run(FedADMM(**ADMM), 1, secure=workflow(max_weight=12.0))  # all weigh 12
    assert "12, got 13" not in caplog.text[caplog.text.rindex("[ROUND 1]") :]


def test_a_masked_sum_with_an_unusable_reply_is_void(caplog: pytest.LogCaptureFixture) -> None:
    def fault(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("fitins.config", {})
        if config.get("server-round") == 2 and request.metadata.dst_node_id == NODES[3]:
            for record in reply.content.metric_records.values():
                if "num_examples" in record:
                    record["num_examples"] = 0
        return reply

    on = grid(quadratics(4), mods=[secaggplus_mod], fault=fault)
    found = masked_run(FedADMM(**ADMM), 4, on=on)
    assert "round 2 is skipped: 1 unusable replies cannot be taken out" in caplog.text
    everyone = lose(*((2, i) for i in range(4)))
    plain = train(FedADMM(**ADMM), grid(quadratics(4), fault=everyone), 4)
    np.testing.assert_allclose(found, plain, rtol=0, atol=10 * STEP)


@rows(OF_MODELS | OF_CHANGES, but=True)
def test_rules_that_need_more_than_a_mean_are_refused_under_masks(row: Row) -> None:
    with pytest.raises(ValueError, match=r"has no legacy form|not work with secure aggregation"):
        as_legacy(ready(row), to_record(START), secure=workflow())


def test_buffers_and_weights_that_cannot_be_are_refused_under_masks() -> None:
    with pytest.raises(ValueError, match=r"^buffers \['tail'\] do not work with secure aggreg"):
        masked_run(FedAvg(buffers=["tail"], min_available_nodes=4, **QUIET), 1)
    with pytest.raises(ValueError, match=r"^max_weight must be >= 1, got 0\.5"):
        as_legacy(FedAvg(**QUIET), to_record(START), secure=workflow(max_weight=0.5))
    narrow = SecAggPlusWorkflow(1.0, 0.5, quantization_range=2**20, modulus_range=2**22)
    with pytest.raises(ValueError, match=r"can sum at most 3 uploads .*, got 4 clients"):
        masked_run(FedAvg(min_available_nodes=4, **QUIET), 1, secure=narrow)


def test_masks_where_none_are_expected_and_none_where_some_are_end_the_run() -> None:
    strategy = FedAvg(weights="uniform", min_available_nodes=4, **QUIET)
    with pytest.raises(ValueError, match=r"^the round ran under secure aggregation, which"):
        masked_run(strategy, 1, known=False)
    told = r"^replies came without secure aggregation: run the rounds by"
    with pytest.raises(ValueError, match=told):
        serve(as_legacy(strategy, to_record(START), secure=workflow()), grid(quadratics(4)), 1)
