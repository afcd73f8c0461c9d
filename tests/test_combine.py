"""Laws of the parts that combine uploads, honest ones and attackers' among them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from federations import same_as_flowers
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import strategy as flower
from laws import START, TABLE, local, train
from problems import CLIENT_OF, grid, quadratics, to_record

from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, Round, as_legacy
from fl_strategies.core.vectors import BLOCK, Pieces, weighted_mean
from fl_strategies.parts import (
    Combine,
    FedExP,
    GeometricMedian,
    Krum,
    Median,
    Momentum,
    MultiKrum,
    TrimmedMean,
    parts_for,
)
from fl_strategies.parts.combine import ByCoordinate
from fl_strategies.parts.krum import scores

N, F, D = 11, 3, 7
ROW = {row.name: row for row in TABLE}
PARTS: list[Combine] = [
    Median(),
    TrimmedMean(share=0.3),
    GeometricMedian(),
    Krum(attackers=F),
    MultiKrum(attackers=F),
]
every_part = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)


def uploads(seed: int = 0, n: int = N, d: int = D) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).normal(3.0, 2.0, (n, d)))


def combined(part: Combine, vectors: Any) -> np.ndarray:
    return np.asarray(part.mean((v, 7.0 * i) for i, v in enumerate(vectors)))


def test_no_part_of_the_stage_is_missing_here() -> None:
    assert {*map(type, PARTS)} == {*parts_for("combine").values()}


# ---- the equations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part", [TrimmedMean(share=0.0), MultiKrum(attackers=F, keep=N)], ids=lambda part: part.name
)
def test_without_a_trim_and_of_all_uploads_it_is_the_uniform_mean(part: Combine) -> None:
    expected = weighted_mean((v, 1.0) for v in uploads())
    np.testing.assert_allclose(combined(part, uploads()), expected, rtol=1e-14)


@every_part
def test_the_order_of_uploads_does_not_matter(part: Combine) -> None:
    found = combined(part, uploads()[::-1])
    np.testing.assert_allclose(found, combined(part, uploads()), rtol=1e-9)


@every_part
def test_it_moves_and_grows_with_its_uploads(part: Combine) -> None:
    shift, plain = np.arange(D) - 2.5, combined(part, uploads())
    moved = combined(part, [v + shift for v in uploads()])
    grown = combined(part, [3.0 * v for v in uploads()])
    np.testing.assert_allclose(moved, plain + shift, rtol=1e-6)
    np.testing.assert_allclose(grown, 3.0 * plain, rtol=1e-6)


@every_part
def test_equal_uploads_give_themselves_and_none_is_written_to(part: Combine) -> None:
    same = [uploads()[0].copy() for _ in range(N)]
    np.testing.assert_allclose(combined(part, same), same[0], rtol=1e-14)
    given = uploads()
    combined(part, given)
    np.testing.assert_array_equal(given, uploads())


@every_part
def test_arrays_in_place_and_long_ones_count_as_the_vector_they_are(part: Combine) -> None:
    vectors = uploads(d=BLOCK + 5)
    pieces = [Pieces([v[:9].astype(np.float32), v[9:].astype(np.float32)]) for v in vectors]
    expected = combined(part, [v.astype(np.float32).astype(np.float64) for v in vectors])
    np.testing.assert_allclose(combined(part, pieces), expected, rtol=1e-12)


def test_the_geometric_median_has_no_slope() -> None:
    v = combined(GeometricMedian(), uploads())
    slope = sum((v - w) / np.linalg.norm(v - w) for w in uploads())
    assert np.linalg.norm(slope) < 1e-6
    near = combined(GeometricMedian(), [np.zeros(2), np.zeros(2), np.ones(2)])
    np.testing.assert_allclose(near, 0.0, atol=1e-5)  # within nu of an upload


def test_krums_score_is_a_sum_over_neighbours() -> None:
    points = [np.array([x]) for x in (0.0, 1.0, 3.0, 10.0, 11.0)]
    assert scores(points, attackers=1) == [1 + 9, 1 + 4, 4 + 9, 1 + 49, 1 + 64]
    np.testing.assert_array_equal(combined(Krum(attackers=1), points), [1.0])
    np.testing.assert_array_equal(combined(MultiKrum(attackers=1, keep=2), points), [0.5])


# ---- attackers ----------------------------------------------------------------------------------


def large(honest: np.ndarray) -> np.ndarray:
    return np.full((F, D), 1e30)


def flipped(honest: np.ndarray) -> np.ndarray:
    return -5.0 * honest[:F]


def a_little_is_enough(honest: np.ndarray) -> np.ndarray:
    return np.tile(honest.mean(0) - 1.5 * honest.std(0), (F, 1))


def inner_product(honest: np.ndarray) -> np.ndarray:
    return np.tile(-0.5 * honest.mean(0), (F, 1))


ATTACKS = pytest.mark.parametrize("attack", [large, flipped, a_little_is_enough, inner_product])


@ATTACKS
@every_part
def test_attackers_move_it_only_so_far(part: Combine, attack: Any) -> None:
    honest = np.array(uploads(n=N - F))
    found = combined(part, [*attack(honest), *honest])
    if isinstance(part, Median | TrimmedMean):
        assert (honest.min(0) <= found).all()
        assert (found <= honest.max(0)).all()
    elif isinstance(part, GeometricMedian):
        centre, share = honest.mean(0), F / N
        radius = max(np.linalg.norm(honest - centre, axis=1))
        assert np.linalg.norm(found - centre) <= 2 * (1 - share) / (1 - 2 * share) * radius
    elif isinstance(part, Krum):
        assert found.tolist() in [*honest.tolist(), *attack(honest).tolist()]
        assert np.abs(found).max() < 1e3
    else:
        assert np.abs(found).max() < 1e3


# ---- in a round ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "part"),
    [
        (flower.FedMedian(fraction_evaluate=0.0), Median()),
        (flower.FedTrimmedAvg(fraction_evaluate=0.0, beta=0.3), TrimmedMean(share=0.3)),
        (flower.Krum(fraction_evaluate=0.0, num_malicious_nodes=2), Krum(attackers=2)),
        (
            flower.MultiKrum(fraction_evaluate=0.0, num_malicious_nodes=2, num_nodes_to_select=3),
            MultiKrum(attackers=2, keep=3),
        ),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_fedavg_with_a_part_is_flowers_strategy_of_its_own(theirs: Any, part: Combine) -> None:
    ours = FedAvg(fraction_evaluate=0.0, combine=part)
    # of equal samples, by which Flower's classes weight what they choose
    same_as_flowers(theirs, ours, 7, 2, steps=1, rate=0.3, samples=5)


@pytest.mark.parametrize("name", ["fedavg", "moon", "pfedme"])
def test_without_a_trim_a_rule_is_itself_with_uniform_weights(name: str) -> None:
    strategy: Any = functools.partial(ROW[name].strategy, local=local())
    found = train(strategy(combine=TrimmedMean(share=0.0)), grid(quadratics(3)), 2)
    expected = train(strategy(weights="uniform"), grid(quadratics(3)), 2)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_median_and_momentum_go_together() -> None:
    both = train(
        FedAvg(local=local(), combine=Median(), server_step=Momentum(lr=1.0, beta=0.0)),
        grid(quadratics(5)),
        3,
    )
    alone = train(FedAvg(local=local(), combine=Median()), grid(quadratics(5)), 3)
    np.testing.assert_array_equal(both, alone)
    with pytest.raises(ValueError, match=r"does not go with combine=Median\(\): its formula"):
        FedAvg(combine=Median(), server_step=FedExP())


@every_part
def test_buffers_are_combined_number_by_number(part: Combine) -> None:
    vectors = uploads()
    counts = np.arange(N) ** 2
    buffers = [
        {"running_mean": v[:3].astype(np.float32), "num_batches_tracked": np.array(c)}
        for v, c in zip(vectors, counts, strict=True)
    ]
    found = part.buffers(buffers)
    assert found["running_mean"].dtype == np.float32
    assert found["num_batches_tracked"].dtype == counts.dtype
    assert found["num_batches_tracked"].shape == ()
    by_number = part if isinstance(part, ByCoordinate) else Median()
    expected = combined(by_number, vectors)[:3]  # the same numbers
    np.testing.assert_allclose(found["running_mean"], expected, rtol=1e-5)


def test_buffers_of_a_run_are_medians_whichever_upload_is_chosen() -> None:
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        me = CLIENT_OF[context.node_id]
        arrays = {n: Array(a.numpy() + 1.0 * me**2) for n, a in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 2})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    initial = {"w": np.ones(2), "running_mean": np.ones(2), "running_var": np.ones(2)}
    start = ArrayRecord({name: Array(array) for name, array in initial.items()})
    strategy = FedAvg(fraction_evaluate=0.0, combine=Krum(attackers=1))
    found = strategy.start(InProcessGrid(app, 5), start, 1).arrays
    assert found["w"].numpy()[0] == 2.0
    assert found["running_mean"].numpy().tolist() == [5.0, 5.0]


def test_a_round_with_too_few_uploads_for_krum_is_skipped() -> None:
    def lost_in_round_2(request: Message, reply: Message) -> Message | None:
        config = request.content.config_records.get("config", {})
        lost = config.get("server-round") == 2 and request.metadata.dst_node_id in few
        return None if lost else reply

    few = [node for node, client in CLIENT_OF.items() if client < 2]
    strategy = FedAvg(local=local(), combine=Krum(attackers=2))
    assert strategy.replies_needed(Round()) == 7
    train(strategy, grid(quadratics(8), fault=lost_in_round_2), 3)
    assert strategy.result.skipped == [2]
    with pytest.raises(ValueError, match=r"Krum\(attackers=2\) needs 7 uploads, and the number"):
        train(FedAvg(local=local(), combine=Krum(attackers=2)), grid(quadratics(6)), 1)


def test_wrappers_and_masks_are_refused() -> None:
    wrapper = flower.DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0, combine=Median()), 0.0, 1.0, 3
    )
    with pytest.raises(ValueError, match=r"^FedAvg with combine=Median\(\) cannot be run by"):
        wrapper.start(grid(quadratics(3)), to_record(START), 1)
    with pytest.raises(ValueError, match=r"^FedAvg with combine=Median\(\) does not work with"):
        as_legacy(FedAvg(combine=Median()), secure=SecAggPlusWorkflow(1.0, 0.5))


def test_every_hyperparameter_of_a_part_matters() -> None:
    vectors = [*uploads(n=8), *uploads(1, n=3)]
    for one, other in (
        (TrimmedMean(), TrimmedMean(share=0.4)),
        (GeometricMedian(), GeometricMedian(nu=9.0)),
        (GeometricMedian(), GeometricMedian(iterations=1)),
        (MultiKrum(), MultiKrum(attackers=3)),
        (MultiKrum(), MultiKrum(keep=2)),
    ):
        assert np.abs(combined(one, vectors) - combined(other, vectors)).max() > 1e-9, other
    far = [np.array([x]) for x in (0.0, 0.2, 0.5, 3.0, 3.1, 3.2, 3.3)]
    assert combined(Krum(attackers=0), far) != combined(Krum(attackers=2), far)


def test_the_median_of_an_even_number_is_between_the_two_middle_ones() -> None:
    vectors = [np.array([v]) for v in (7.0, -3.0, 100.0, 2.0)]
    assert Median().mean((vector, 1.0) for vector in vectors) == [4.5]
