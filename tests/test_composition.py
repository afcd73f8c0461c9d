"""Flower's wrappers and mods around our strategies and clients: right, or refused with a reason.

What wrappers and mods come to is worked out here from the clients' gradient steps; a run under
masks is the run without.

Mutants tried by hand, each caught here: each `averages` another; buffers, callbacks or beta let
through a wrapper; a wrapper's second run that counts rounds anew, or one after an own run that is
not checked; checksums not asked for, not sent, not compared, buffers left out of them, one altered
reply that ends the run, a stale one that does; no check of the bound, from the request or from the
reply, or none of rounding in it; mods around evaluation; a reply left out under a wrapper or a
mask; weights not named; a legacy server's noise dropped in training or in evaluation; under masks
weights by the wrong rule, no range, no most weight, no most clients, float64 given back, masks
unexpected or missing; messages that clients share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federations import Strangers, serve
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
from flwr.client.mod import fixedclipping_mod as legacy_fixedclipping_mod
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.server import LegacyContext, ServerConfig
from flwr.server import strategy as legacy_wrappers
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod
from laws import START, TABLE, Row, local, train
from problems import CLIENT_OF, DIM, NODES, grid, kept, quadratics, to_record, to_vector
from torch import nn

from clients import AnyAlgorithmClient, ContextStore, FlatModel, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import (
    FedADMM,
    FedAvg,
    FederatedStrategy,
    FedProx,
    NothingUsable,
    PFedMe,
    as_legacy,
)

PROBLEMS = quadratics(3)
SIZES = np.array([q.n for q in PROBLEMS])
EQUAL, BY_SIZE = np.full(3, 1 / 3), SIZES / SIZES.sum()
QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "local": local()}
ADMM: dict[str, Any] = {"rho": 0.5, "min_available_nodes": 4, **QUIET}

OF_MODELS = {"fedsgd", "fedavg", "fedprox", "fedpd", "ditto", "moon", "per-fedavg", "pfedme"}
OF_CHANGES = {"scaffold", "fedadmm", "feddyn"}


def rows(names: set[str], *, but: bool = False) -> Any:
    found = [row for row in TABLE if (row.name in names) is not but]
    return pytest.mark.parametrize("row", found, ids=lambda row: row.name)


def update(i: int, theta: np.ndarray, mu: float = 0.0) -> np.ndarray:
    """What client i's model has moved by after its steps."""
    w = theta
    for _ in range(4):
        w = w - 0.1 * (PROBLEMS[i].gradient(w) + mu * (w - theta))
    return w - theta


def clip(v: np.ndarray, bound: float) -> np.ndarray:
    return v * min(1.0, bound / np.linalg.norm(v))


def same_noise(seed: int) -> np.random.RandomState:
    """Seed the global generator, which Flower draws noise from, and return its twin."""
    np.random.seed(seed)  # noqa: NPY002
    return np.random.RandomState(seed)


def noise(rng: np.random.RandomState, deviation: float) -> np.ndarray:
    """One draw as Flower makes it, array by array."""
    return deviation * np.concatenate([rng.normal(size=4), rng.normal(size=1)])


# ---- central differential privacy, fixed clipping ------------------------------------------------


def server_side(strategy: Any, noise_multiplier: float, bound: float) -> tuple[Any, list[Any]]:
    wrapper = DifferentialPrivacyServerSideFixedClipping(strategy, noise_multiplier, bound, 3)
    return wrapper, []


def client_side(strategy: Any, noise_multiplier: float, bound: float) -> tuple[Any, list[Any]]:
    wrapper = DifferentialPrivacyClientSideFixedClipping(strategy, noise_multiplier, bound, 3)
    return wrapper, [fixedclipping_mod]


Side = Callable[[Any, float, float], tuple[Any, list[Any]]]
both_sides = pytest.mark.parametrize("side", [server_side, client_side])


@both_sides
@rows(OF_MODELS)
def test_a_bound_that_nothing_reaches_leaves_the_run_as_it_is(side: Side, row: Row) -> None:
    options: dict[str, Any] = {"local": local(), "fraction_evaluate": 1.0}
    wrapper, mods = side(row.strategy(**options), 0.0, 1e6)
    result = wrapper.start(grid(PROBLEMS, mods=mods), to_record(START), 3)
    plain = train(row.strategy(**options), grid(PROBLEMS), 3)
    np.testing.assert_allclose(to_vector(result.arrays), plain, rtol=1e-12)
    evaluations = result.evaluate_metrics_clientapp.values()  # which mods leave alone
    assert [metrics["eval-clients-used"] for metrics in evaluations] == [3, 3, 3]


@both_sides
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_clipping_and_noise_are_those_of_the_papers(side: Side, mu: float) -> None:
    bound, multiplier = 0.7, 1.5
    strategy = FedProx(mu=mu, weights="uniform", **QUIET)
    wrapper, mods = side(strategy, multiplier, bound)
    rng = same_noise(7)
    result = wrapper.start(grid(PROBLEMS, mods=mods), to_record(START), 3)
    theta = START
    for _ in range(3):
        updates = [update(i, theta, mu) for i in range(3)]
        assert min(np.linalg.norm(u) for u in updates) > bound  # all are clipped
        mean = sum(clip(u, bound) for u in updates) / 3
        theta = theta + mean + noise(rng, multiplier * bound / 3)
    np.testing.assert_allclose(to_vector(result.arrays), theta, rtol=1e-9)


@both_sides
def test_one_client_moves_the_model_by_the_bound(side: Side) -> None:
    wrapper, mods = side(FedAvg(**QUIET), 0.0, 0.25)
    result = wrapper.start(grid(PROBLEMS[:1], mods=mods), to_record(START), 1)
    moved = to_vector(result.arrays) - START
    assert np.linalg.norm(moved) == pytest.approx(0.25, rel=1e-12)


def test_weights_that_differ_are_named_as_the_noise_counts_on_equal_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def words(strategy: FederatedStrategy, wrapped: bool = True) -> str:
        caplog.clear()
        runs = server_side(strategy, 0.0, 1.0)[0] if wrapped else strategy
        runs.start(grid(PROBLEMS), to_record(START), 1)
        return caplog.text

    low, high = BY_SIZE.min(), BY_SIZE.max()
    assert f"weights from {low:.3g} to {high:.3g}, where a wrapper's" in words(FedAvg(**QUIET))
    assert "weights from" not in words(FedAvg(weights="uniform", **QUIET))
    assert "weights from" not in words(FedAvg(**QUIET), wrapped=False)


def test_a_wrapper_started_again_goes_on_counting_rounds() -> None:
    options = {**QUIET, "fraction_train": 0.34}
    seen: list[tuple[int, int]] = []

    def watch(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            config = request.content.config_records["config"]
            seen.append((int(config["server-round"]), request.metadata.dst_node_id))
        return reply

    strategy = FedAvg(seed=1, **options)
    wrapper, on = server_side(strategy, 0.0, 1e6)[0], grid(PROBLEMS, fault=watch)
    for _ in range(2):
        wrapper.start(on, to_record(START), 3)
    again, seen = seen, []
    FedAvg(seed=1, **options).start(grid(PROBLEMS, fault=watch), to_record(START), 6)
    assert [number for number, _ in again] == [1, 2, 3, 4, 5, 6]
    assert again == seen


@pytest.mark.parametrize("unusable", [False, True])
def test_a_failed_client_costs_the_round_and_no_state(unusable: bool) -> None:
    """Noise is made for all replies. A wrapper itself drops a round with an error."""
    moon = next(row for row in TABLE if row.name == "moon")

    def fails_in_round_2(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("config", {})
        train_2 = request.metadata.message_type == "train" and config.get("server-round") == 2
        if not (train_2 and request.metadata.dst_node_id == NODES[0]):
            return reply
        if not unusable:
            return Message(Error(2, "out of memory"), reply_to=request)
        reply.content.metric_records["metrics"]["num-examples"] = 0
        return reply

    def silent_in_round_2(request: Message, reply: Message) -> Message | None:
        config = request.content.config_records.get("config", {})
        lost = request.metadata.message_type == "train" and config.get("server-round") == 2
        return None if lost else reply

    options: dict[str, Any] = {"local": local(solver="sgd", **{"batch-size": 4})}
    wrapper, _ = server_side(moon.strategy(**options), 0.0, 1e6)
    found = wrapper.start(grid(PROBLEMS, fault=fails_in_round_2), to_record(START), 4)
    plain = train(moon.strategy(**options), grid(PROBLEMS, fault=silent_in_round_2), 4)
    np.testing.assert_allclose(to_vector(found.arrays), plain, rtol=1e-12)


# ---- adaptive clipping ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "mods"),
    [
        (DifferentialPrivacyServerSideAdaptiveClipping, []),
        (DifferentialPrivacyClientSideAdaptiveClipping, [adaptiveclipping_mod]),
    ],
    ids=["server", "client"],
)
@pytest.mark.parametrize("multiplier", [0.0, 0.5])
def test_adaptive_clipping_moves_its_bound_by_the_share_of_clipped_updates(
    wrapper: Any, mods: list[Any], multiplier: float
) -> None:
    """As Flower has it: the updates above the bound count, and noise goes by the next bound.

    Andrew et al. count those below it, and scale noise by the bound that clipped.
    """
    bound, rate, quantile, theta = 3.8, 0.3, 0.2, START
    count_deviation = 0.8 if multiplier else 0.0
    on_models = (multiplier**-2 - (2 * count_deviation) ** -2) ** -0.5 if multiplier else 0.0
    around = wrapper(
        FedAvg(weights="uniform", local=local()),
        multiplier,
        3,
        bound,
        quantile,
        rate,
        count_deviation,
    )
    rng, shares = same_noise(5), []
    result = around.start(grid(PROBLEMS, mods=mods), to_record(START), 4)
    for _ in range(4):
        updates = [update(i, theta) for i in range(3)]
        theta = theta + np.mean([clip(u, bound) for u in updates], axis=0)
        shares.append(sum(np.linalg.norm(u) > bound for u in updates) / 3)
        counted = shares[-1] + rng.normal(0.0, count_deviation) / 3
        bound *= np.exp(-rate * (counted - quantile))
        theta = theta + noise(rng, on_models * bound / 3)
    assert result.evaluate_metrics_clientapp[4]["eval-clients-used"] == 3
    assert len(set(shares)) > 1  # the bound moves by different steps
    assert around.clipping_norm == pytest.approx(bound, rel=1e-12)
    np.testing.assert_allclose(to_vector(result.arrays), theta, rtol=1e-9)


# ---- local differential privacy ------------------------------------------------------------------


@pytest.mark.parametrize("sensitivity", [0.0, 0.5])
def test_local_privacy_clips_and_adds_noise_at_each_client(sensitivity: float) -> None:
    epsilon, delta, bound = 2.0, 1e-3, 0.7
    mod = LocalDpMod(bound, sensitivity, epsilon, delta)
    strategy = FedAvg(local=local())
    rng = same_noise(11)
    result = strategy.start(grid(PROBLEMS, mods=[mod]), to_record(START), 2)
    deviation = sensitivity * np.sqrt(2 * np.log(1.25 / delta)) / epsilon
    theta = START
    for _ in range(2):
        replies = [clip(update(i, theta), bound) + noise(rng, deviation) for i in range(3)]
        theta = theta + BY_SIZE @ replies
    np.testing.assert_allclose(to_vector(result.arrays), theta, rtol=1e-9)
    assert result.evaluate_metrics_clientapp[2]["eval-clients-used"] == 3


@rows(OF_MODELS - {"fedavg"})
def test_local_privacy_that_does_nothing_changes_nothing(row: Row) -> None:
    options: dict[str, Any] = {"local": local()}
    mods = [LocalDpMod(1e6, 0.0, 1.0, 0.1)]
    found = train(row.strategy(**options), grid(PROBLEMS, mods=mods), 3)
    np.testing.assert_allclose(found, train(row.strategy(**options), grid(PROBLEMS), 3), rtol=1e-12)


# ---- what is refused -----------------------------------------------------------------------------


def loses(*lost: tuple[int, int], masked: bool) -> Any:
    """A fault that loses the upload of each (round, client)."""

    def fault(request: Message, reply: Message) -> Message | None:
        config = request.content.config_records.get("fitins.config" if masked else "config", {})
        key = (config.get("server-round"), CLIENT_OF[request.metadata.dst_node_id])
        return None if request.metadata.message_type == "train" and key in lost else reply

    return fault


def silence(request: Message, reply: Message) -> Message:
    raise AssertionError(f"a {request.metadata.message_type} message was sent")


@both_sides
@rows(OF_MODELS, but=True)
def test_wrappers_are_refused_where_replies_are_no_models_to_be_averaged(
    side: Side, row: Row
) -> None:
    strategy = row.strategy(local=local())
    wrapper, mods = side(strategy, 0.0, 1e6)
    expected = train(row.strategy(local=local()), grid(PROBLEMS), 2)
    for _ in range(2):
        refusal = f"^{type(strategy).__name__} cannot be run by a wrapper"
        with pytest.raises(ValueError, match=refusal):
            wrapper.start(grid(PROBLEMS, mods=mods, fault=silence), to_record(START), 1)
        # its own start still works, and does not open the way for the wrapper
        strategy = wrapper.strategy = row.strategy(local=local())
        np.testing.assert_array_equal(train(strategy, grid(PROBLEMS), 2), expected)


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

    everyone_in_3 = loses(*((3, i) for i in range(3)), masked=False)
    on = grid(PROBLEMS, mods=[one_only], fault=everyone_in_3)
    found = train(FedADMM(rho=0.5, **QUIET), on, 5)
    assert "reply of client 1 left out: arrays ['head', 'tail']" in caplog.text
    lost = [(3, 0), *((t, 1) for t in range(1, 6)), (3, 2)]
    same = grid(PROBLEMS, fault=loses(*lost, masked=False))
    expected = train(FedADMM(rho=0.5, **QUIET), same, 5)
    np.testing.assert_array_equal(found, expected)


def normalised(mods: list[Any] | None = None) -> tuple[FlatModel, InProcessGrid]:
    """Two clients with a BatchNorm, whose running statistics travel as buffers."""
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model = FlatModel(module)

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
    options = {**QUIET, "buffers": model.buffers}
    wrapper, _ = server_side(FedAvg(**options), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^buffers \['0\.running_mean', .* GroupNorm"):
        wrapper.start(federation, initial(), 1)
    model, federation = normalised([LocalDpMod(0.1, 0.1, 1.0, 0.1)])
    with pytest.raises(NothingUsable, match=r"arrays \['0\.running_mean'.* without buffers"):
        FedAvg(max_unusable_rounds=1, **options).start(federation, initial(), 1)
    model, federation = normalised([arrays_size_mod])
    metrics = FedAvg(**options).start(federation, initial(), 1).train_metrics_clientapp
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


def legacy_run(
    strategy: FederatedStrategy,
    wrap: Callable[[Any], Any],
    rounds: int,
    evaluate_fn: Any = None,
    **options: Any,
) -> np.ndarray:
    adapter = wrap(as_legacy(strategy, to_record(START), evaluate_fn=evaluate_fn))
    return serve(adapter, grid(PROBLEMS, **options), rounds)[0]


LEGACY_SIDES = [
    (legacy_wrappers.DifferentialPrivacyServerSideFixedClipping, []),
    (legacy_wrappers.DifferentialPrivacyClientSideFixedClipping, [legacy_fixedclipping_mod]),
]
legacy_sides = pytest.mark.parametrize(
    ("wrapper", "mods"), LEGACY_SIDES, ids=["server-side", "client-side"]
)


@legacy_sides
@pytest.mark.parametrize("own_evaluation", [False, True])
def test_noise_of_a_legacy_wrapper_stays_in_the_model(
    wrapper: Any, mods: list[Any], own_evaluation: bool
) -> None:
    class Around(wrapper):  # type: ignore[misc]
        def evaluate(self, server_round: int, parameters: Any) -> Any:
            return None if own_evaluation else super().evaluate(server_round, parameters)

    evaluated = [START]

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        evaluated.append(to_vector(arrays))

    rng = same_noise(7)
    strategy = FedAvg(weights="uniform", min_available_nodes=3, local=local())
    found = legacy_run(
        strategy, lambda adapter: Around(adapter, 1.5, 0.7, 3), 3, evaluate, mods=mods
    )
    np.testing.assert_array_equal(evaluated[-1], START if own_evaluation else found)
    theta = START
    for _ in range(3):
        mean = sum(clip(update(i, theta), 0.7) for i in range(3)) / 3
        theta = theta + mean + noise(rng, 1.5 * 0.7 / 3)
    np.testing.assert_allclose(found, theta, rtol=1e-9)
    assert strategy.result.evaluate_metrics_clientapp[3]["eval-clients-used"] == 3


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


# ---- secure aggregation --------------------------------------------------------------------------

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


@rows(OF_MODELS | OF_CHANGES)
def test_under_masks_the_model_is_the_same_but_for_rounding(row: Row) -> None:
    """Rounding errors, of STEP and a little more by weight, add up over four rounds."""
    strategy = ready(row)
    found = masked_run(strategy, 4)
    plain = train(ready(row), grid(quadratics(4)), 4)
    np.testing.assert_allclose(found, plain, rtol=0, atol=10 * STEP)
    assert np.abs(found - plain).max() > 1e-12  # there was a workflow at work


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
    on = grid(quadratics(4), mods=[secaggplus_mod], fault=loses(*lost, masked=True))
    strategy = FedADMM(**options)
    found = masked_run(strategy, 6, on=on)
    plain = train(FedADMM(**options), grid(quadratics(4), fault=loses(*lost, masked=False)), 6)
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
    assert "round 2 is void: 1 unusable replies cannot be taken out of a masked sum" in caplog.text
    everyone = loses(*((2, i) for i in range(4)), masked=False)
    plain = train(FedADMM(**ADMM), grid(quadratics(4), fault=everyone), 4)
    np.testing.assert_allclose(found, plain, rtol=0, atol=10 * STEP)


@rows(OF_MODELS | OF_CHANGES, but=True)
def test_rules_that_need_more_than_a_mean_are_refused_under_masks(row: Row) -> None:
    with pytest.raises(ValueError, match=r"has no legacy form|does not go with secure aggregation"):
        as_legacy(ready(row), to_record(START), secure=workflow())


def test_buffers_and_weights_that_cannot_be_are_refused_under_masks() -> None:
    with pytest.raises(ValueError, match=r"^buffers \['tail'\] do not go with secure aggreg"):
        as_legacy(FedAvg(buffers=["tail"], **QUIET), to_record(START), secure=workflow())
    with pytest.raises(ValueError, match=r"^max_weight must be >= 1, got 0\.5"):
        as_legacy(FedAvg(**QUIET), to_record(START), secure=workflow(max_weight=0.5))
    narrow = SecAggPlusWorkflow(1.0, 0.5, quantization_range=2**20, modulus_range=2**22)
    with pytest.raises(ValueError, match=r"can sum at most 3 uploads .*, got 4 clients"):
        masked_run(FedAvg(min_available_nodes=4, **QUIET), 1, secure=narrow)


def test_masks_where_none_are_expected_and_none_where_some_are_end_the_run() -> None:
    strategy = FedAvg(weights="uniform", min_available_nodes=4, **QUIET)
    with pytest.raises(ValueError, match=r"^the round ran under secure aggregation, of which"):
        masked_run(strategy, 1, known=False)
    with pytest.raises(ValueError, match=r"^replies came without masks: run the rounds by"):
        serve(as_legacy(strategy, to_record(START), secure=workflow()), grid(quadratics(4)), 1)


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
