"""Flower's wrappers and mods around our strategies and clients: what goes, and what is refused."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from federations import Strangers, lose
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod, fixedclipping_mod, message_size_mod
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod
from laws import START, Row, local, train
from problems import DIM, grid, quadratics, to_record, to_vector
from torch import nn
from wrapped import (
    ADMM,
    LEGACY_SIDES,
    OF_CHANGES,
    OF_MODELS,
    PROBLEMS,
    QUIET,
    Side,
    both_sides,
    client_side,
    legacy_run,
    legacy_sides,
    rows,
    server_side,
)

from clients import AnyAlgorithmClient, Border, ContextStore, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import (
    FedADMM,
    FedAvg,
    FederatedStrategy,
    NothingUsable,
    PFedMe,
    as_legacy,
)
from fl_strategies.fedavg import Averaging
from fl_strategies.parts import Buffered, Clock
from fl_strategies.server.algorithm import GETS_UPLOADS

# ---- what is refused -----------------------------------------------------------------------------


def silence(request: Message, reply: Message) -> Message:
    raise AssertionError(f"a {request.metadata.message_type} message was sent")


@functools.cache
def two_rounds(name: str) -> np.ndarray:
    """Return the model after two rounds of an algorithm by its own start."""
    return train(Row(name).strategy(local=local()), grid(PROBLEMS), 2)


@both_sides
@pytest.mark.parametrize("row", [Row("fedadmm"), Row("scaffold")], ids=str)
def test_wrappers_are_refused_where_replies_are_no_models_to_be_averaged(
    side: Side, row: Row
) -> None:
    strategy = row.strategy(local=local())
    wrapper, mods = side(strategy, 0.0, 1e6)
    for _ in range(2):
        refusal = f"^{type(strategy).__name__} cannot be run by a wrapper"
        with pytest.raises(ValueError, match=refusal):
            wrapper.start(grid(PROBLEMS, mods=mods, fault=silence), to_record(START), 1)
        # its own start still works, and does not open the way for the wrapper
        strategy = wrapper.strategy = row.strategy(local=local())
        np.testing.assert_array_equal(train(strategy, grid(PROBLEMS), 2), two_rounds(row.name))


def test_a_pfedme_that_goes_beyond_the_mean_is_refused() -> None:
    wrapper, _ = server_side(PFedMe(beta=2.0, **QUIET), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^PFedMe cannot be run by a wrapper"):
        wrapper.start(grid(PROBLEMS, fault=silence), to_record(START), 1)


@rows(OF_MODELS, but=True)
def test_mods_are_refused_where_uploads_must_arrive_as_sent(row: Row) -> None:
    strategy = row.strategy(local=local(), max_unusable_rounds=1)
    with pytest.raises(
        NothingUsable, match=r"arrays \['head', 'tail'.* are not as the client sent"
    ):
        strategy.start(grid(PROBLEMS, mods=[LocalDpMod(0.1, 0.0, 1.0, 0.1)]), to_record(START), 2)
    assert not strategy.ledger.acked  # no client's state counts


def test_one_client_with_such_a_mod_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def one_only(message: Message, context: Context, call_next: Any) -> Message:
        mod = LocalDpMod(0.1, 0.0, 1.0, 0.1)
        mine = client_id(context) == 1 and message.metadata.message_type == "train"
        return mod(message, context, call_next) if mine else call_next(message, context)

    everyone_in_3 = lose(*((3, i) for i in range(3)))
    on = grid(PROBLEMS, mods=[one_only], fault=everyone_in_3)
    found = train(FedADMM(rho=0.5, **QUIET), on, 5)
    assert "reply of client 1 left out: arrays ['head', 'tail']" in caplog.text
    lost = [(3, 0), *((t, 1) for t in range(1, 6)), (3, 2)]
    same = grid(PROBLEMS, fault=lose(*lost))
    expected = train(FedADMM(rho=0.5, **QUIET), same, 5)
    np.testing.assert_array_equal(found, expected)


def normalised(mods: list[Any] | None = None) -> tuple[Border, InProcessGrid]:
    """Two clients with a BatchNorm, whose running statistics travel as buffers."""
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model = Border(module)

    def client_fn(context: Context) -> AnyAlgorithmClient:
        x = torch.arange(16.0).reshape(8, 2).sin() + client_id(context)
        problem = Problem(model, nn.functional.mse_loss, x, x.sum(1, keepdim=True))
        return AnyAlgorithmClient(
            problem, client_id=client_id(context), store=ContextStore(context)
        )

    return model, InProcessGrid(client_app(client_fn, mods), 2)


def test_buffers_are_refused_under_clipping_and_noise() -> None:
    def initial() -> ArrayRecord:
        return ArrayRecord(model.module.state_dict())

    model, federation = normalised()
    wrapper, _ = server_side(FedAvg(**QUIET), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^buffers \['0\.running_mean', .* GroupNorm"):
        wrapper.start(federation, initial(), 1)
    model, federation = normalised([LocalDpMod(0.1, 0.1, 1.0, 0.1)])
    with pytest.raises(NothingUsable, match=r"arrays \['0\.running_mean'.* without buffers"):
        FedAvg(max_unusable_rounds=1, **QUIET).start(federation, initial(), 1)
    model, federation = normalised([arrays_size_mod])
    metrics = FedAvg(**QUIET).start(federation, initial(), 1).train_metrics_clientapp
    assert metrics[1]["clients-used"] == 2


def test_a_clipping_wrapper_without_the_mod_is_refused_and_the_mod_without_the_wrapper_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrapper, _ = client_side(FedAvg(max_unusable_rounds=1, **QUIET), 0.0, 0.7)
    with pytest.raises(
        NothingUsable, match=r"update has norm [34]\.\d+, above the clipping norm 0\.7"
    ):
        wrapper.start(grid(PROBLEMS), to_record(START), 1)
    legacy, strategy = (
        LEGACY_SIDES[1][0],
        FedAvg(min_available_nodes=3, max_unusable_rounds=1, **QUIET),
    )
    with pytest.raises(
        NothingUsable, match=r"update has norm [34]\.\d+, above the clipping norm 0\.7"
    ):
        legacy_run(strategy, lambda adapter: legacy(adapter, 0.0, 0.7, 3), 1)
    wrapper, _ = client_side(FedAvg(max_unusable_rounds=1, **QUIET), 0.0, 0.7)
    with pytest.raises(NothingUsable, match=r"update has norm \d.*, above the clipping norm 0\.7"):
        wrapper.start(grid(PROBLEMS, client=Strangers), to_record(START), 1)
    found = train(FedAvg(**QUIET), grid(PROBLEMS, mods=[fixedclipping_mod]), 1)
    assert "fixedclipping_mod requires the key 'clipping_norm'" in caplog.text
    np.testing.assert_array_equal(found, START)


def test_single_precision_is_no_reason_to_refuse_a_clipped_update() -> None:
    far = to_record(START + 2e4)  # where numbers are 0.002 apart
    start = ArrayRecord({n: Array(a.numpy().astype(np.float32)) for n, a in far.items()})
    for bound in (0.003, 0.005, 0.01, 0.02):
        wrapper, mods = client_side(FedAvg(**QUIET), 0.0, bound)
        result = wrapper.start(grid(PROBLEMS, mods=mods, dtype=torch.float32), start, 1)
        assert result.train_metrics_clientapp[1]["clients-used"] == 3


def test_a_loop_that_leaves_replies_alone_opens_the_run_and_may_run_anything() -> None:
    strategy, on, arrays = FedADMM(**ADMM), grid(quadratics(4)), to_record(START)
    strategy.open(arrays, 3)
    for number in range(1, 4):
        messages = strategy.configure_train(number, arrays, ConfigRecord(), on)
        found, _ = strategy.aggregate_train(number, on.send_and_receive(messages))
        assert found is not None
        arrays = found
    expected = train(FedADMM(**ADMM), grid(quadratics(4)), 3)
    np.testing.assert_array_equal(to_vector(arrays), expected)


def test_callbacks_are_refused_as_wrappers_call_none() -> None:
    wrapper, _ = server_side(FedAvg(callbacks=[lambda info: None], **QUIET), 0.0, 1.0)
    with pytest.raises(ValueError, match="calls no callbacks and makes no checkpoints"):
        wrapper.start(grid(PROBLEMS, fault=silence), to_record(START), 1)
    seen = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(server_round)
        return MetricRecord({"test-loss": 1.0})

    wrapper, _ = server_side(FedAvg(**QUIET), 0.0, 1.0)
    wrapper.start(grid(PROBLEMS), to_record(START), 2, evaluate_fn=evaluate)
    assert seen == [0, 1, 2]


# ---- legacy wrappers -----------------------------------------------------------------------------


@legacy_sides
@rows(OF_CHANGES)
def test_legacy_wrappers_are_refused_by_what_arrives(
    wrapper: Any, mods: list[Any], row: Row
) -> None:
    strategy = row.strategy(min_available_nodes=3, local=local(), max_unusable_rounds=1)
    reason = "are not as the client sent them.* needs them"
    if row.name == "scaffold" and not mods:  # Flower's wrapper itself finds too many arrays
        reason = "zip"
    with pytest.raises((NothingUsable, ValueError), match=reason):
        legacy_run(strategy, lambda adapter: wrapper(adapter, 0.0, 0.7, 3), 1, mods=mods)
    assert not strategy.ledger.acked


# ---- what changes nothing ------------------------------------------------------------------------


@rows({"fedavg", "fedprox", "fedadmm", "scaffold"})
def test_mods_that_only_look_leave_the_run_as_it_is(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"local": local(), "fraction_evaluate": 1.0}
    mods = [arrays_size_mod, message_size_mod]
    caplog.set_level(logging.INFO)
    found = train(row.strategy(**options), grid(PROBLEMS, mods=mods), 3)
    elements = 2 * DIM if row.name == "scaffold" else DIM  # SCAFFOLD's control travels beside
    assert caplog.text.count(f"'elements': {elements}, 'bytes'") >= 2 * 3 * 3  # both ways
    np.testing.assert_array_equal(found, train(row.strategy(**options), grid(PROBLEMS), 3))


def test_accounting_of_privacy_is_refused_by_flower() -> None:
    """It knows Flower's own FedAvg alone, and ours checks replies before it averages."""
    config = PrivacyConfig(
        1e-5, 3, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    )
    accountant: Any = type("Accountant", (), {"config": config})()
    with pytest.raises(ValueError, match=r"requires a strategy using FedAvg\.aggregate_train"):
        DifferentialPrivacyServerSideFixedClipping(
            FedAvg(**QUIET), 1.0, 1.0, 3, accountant=accountant
        )


# ---- classes of one's own -----------------------------------------------------------------------


@pytest.mark.parametrize("hook", GETS_UPLOADS)
@pytest.mark.parametrize("base", [Averaging, FedAvg, FedADMM])
def test_a_class_with_another_rule_than_its_base_says_what_it_averages_or_cannot_be_defined(
    base: type[FederatedStrategy], hook: str
) -> None:
    body = {hook: lambda self, *arguments: None}
    mixin, same = type("Mixin", (), body), type("Same", (base,), {})
    again = type("Again", (base,), {**body, "averages": base.averages})
    for bases, own in [((base,), body), ((mixin, base), {}), ((same,), body), ((again,), body)]:
        said = f'^Mine has its own {hook}, and must say by `averages` .*inherits "{base.averages}"'
        with pytest.raises(TypeError, match=said):
            type("Mine", bases, own)
        for averages in ("models", "changes", ""):
            mine = type("Mine", bases, {**own, "averages": averages})
            assert type("Same", (mine,), {}).averages == averages


def test_a_rule_with_momentum_meets_neither_noise_nor_masks() -> None:
    class Momentum(FedAvg):
        averages = ""

        def aggregate(self, state: Any, round: Any, uploads: Any) -> Any:
            return super().aggregate(state, round, uploads)

    wrapper, _ = server_side(Momentum(**QUIET), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^Momentum cannot be run by a wrapper"):
        wrapper.start(grid(PROBLEMS), to_record(START), 1)
    with pytest.raises(ValueError, match=r"^Momentum does not work with secure aggregation"):
        as_legacy(Momentum(**QUIET), to_record(START), secure=SecAggPlusWorkflow(3, 2))


class Hooked(FedAvg):
    """Flower's usual way to change a strategy: other hooks of a round."""

    averages = "models"

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        config = ConfigRecord({"speed": 1.0 / server_round})
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert metrics is not None
        metrics["mine"] = server_round
        return (arrays if server_round < 3 else to_record(START)), metrics

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        return MetricRecord({"mine": -server_round})


def test_start_calls_the_hooks_of_flowers_own_loop() -> None:
    seen: list[Any] = []

    def listen(request: Message, reply: Message) -> Message:
        seen.append(request.content.config_records.get("config", {}).get("speed"))
        return reply

    on = grid(quadratics(2), fault=listen)
    result = Hooked(local=local(), fraction_evaluate=0.0).start(on, to_record(START), 3)
    assert [speed for speed in seen if speed] == [1.0, 1.0, 0.5, 0.5, 1 / 3, 1 / 3]
    assert [row["mine"] for row in result.train_metrics_clientapp.values()] == [1, 2, 3]
    assert [row["mine"] for row in result.evaluate_metrics_clientapp.values()] == [-1, -2, -3]
    np.testing.assert_array_equal(to_vector(result.arrays), START)


def test_hooks_that_a_round_does_not_call_are_refused() -> None:
    strategy = Hooked(local=local(), pace=Buffered(size=1), clock=Clock())
    with pytest.raises(ValueError, match="does not call the configure_train of Hooked"):
        strategy.start(grid(quadratics(2)), to_record(START), 1)
