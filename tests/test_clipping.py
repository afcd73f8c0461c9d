"""The bound on an upload's norm."""

from __future__ import annotations

import copy
import itertools
import math
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Row, local, one_of_each_mechanism
from problems import CLIENT_OF, NODES, grid, quadratics, to_record, to_vector
from scripted import (
    CLIENTS,
    LAST,
    ROWS,
    Scripted,
    World,
    answered,
    assert_same,
    made,
    outcome,
    same,
    the_round,
    world,
)
from tampering import arrays_of, fresh, put, silence

from fl_strategies import FedAvg, FederatedStrategy, Upload
from fl_strategies.core.clipping import clip, norm
from fl_strategies.messages.wire import MAX_SAMPLES


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.floats(-1.0, 1.0, allow_subnormal=False), min_size=1, max_size=6),
    st.integers(-900, 1023),
    st.floats(0.01, 4.0),
)
@pytest.mark.slow
def test_clipping_keeps_the_direction_and_ends_at_the_bound(
    numbers: list[float], exponent: int, bound: float
) -> None:
    """Also where the square of what is clipped overflows or vanishes."""
    unit = np.array(numbers)
    u = np.ldexp(unit, exponent)
    unit = np.ldexp(u, -exponent)  # what did not become subnormal
    length = math.hypot(*unit)
    if length < 1e-3:
        return
    if exponent < 1023:  # where the norm is a number
        assert norm(u) == pytest.approx(math.ldexp(length, exponent), rel=1e-14)
    found = clip(u, math.ldexp(bound, min(exponent, 1000)))
    if math.ldexp(bound, min(exponent, 1000) - exponent) > length * (1 + 1e-14):
        assert found is u
    else:
        expected = unit / length * math.ldexp(bound, min(exponent, 1000))
        np.testing.assert_allclose(found, expected, rtol=1e-13)


@cache
def unbounded(name: str) -> World:
    """Return an algorithm's world, with the defaults; no test changes it."""
    return world(made(ROWS[name]))


def bounded(before: World, bound: float) -> World:
    strategy = copy.deepcopy(before.strategy)
    strategy.clipping_norm = bound
    return before._replace(strategy=strategy)


def spied(strategy: FederatedStrategy, seen: list[Upload]) -> FederatedStrategy:
    """Return the strategy, which notes down what its rule is given."""
    rule = strategy.aggregate

    def aggregate(state: Any, round: Any, uploads: Any) -> Any:
        seen.extend(uploads)
        return rule(state, round, uploads)

    strategy.aggregate = aggregate  # type: ignore[method-assign]
    return strategy


def huge(content: RecordDict, **scalars: float) -> RecordDict:
    """The largest arrays and number of examples that the checks let pass, and ``scalars``."""
    for name, array in arrays_of(content).items():
        arrays_of(content)[name] = Array(np.full(array.numpy().shape, 1.7e308))
    metrics = {**content["metrics"], "num-examples": MAX_SAMPLES}
    content["metrics"] = MetricRecord({**metrics, **scalars})
    return content


@one_of_each_mechanism
def test_a_bound_that_nobody_reaches_changes_nothing(row: Row) -> None:
    before = unbounded(row.name)
    assert_same(the_round(bounded(before, 1e6), {}), the_round(before, {}))


@one_of_each_mechanism
def test_a_huge_upload_neither_voids_the_round_nor_moves_the_model_beyond_the_bound(
    row: Row,
) -> None:
    bound, seen = 50.0, list[Upload]()
    clouds = made(row).overlaps
    free = world(made(row, first=2)) if clouds else unbounded(row.name)  # both cloud servers mix
    before = bounded(free, bound)
    theta = to_vector(before.theta)
    bounds = before.strategy.scalar_bounds
    for ends in itertools.product(*bounds.values()):
        scalars = dict(zip(bounds, ends, strict=True))
        found = the_round(before, {LAST: partial(huge, **scalars)})
        assert found.state["ledger"].acked != before.strategy.ledger.acked  # the round counts
        assert np.linalg.norm(found.theta - theta) <= bound * (1 + 1e-12)
    if before.strategy.accumulates_changes:
        assert_same(the_round(before, {LAST: huge}), the_round(before, {}, leave=[LAST]))
        return
    strategy = copy.deepcopy(before.strategy)
    contents = {node: fresh(content) for node, content in before.answers.items()}
    huge(contents[NODES[LAST]])
    with silence():
        spied(strategy, seen).start(Scripted([answered(contents)]), before.theta, 1)
    assert [upload.client for upload in seen] == list(range(CLIENTS))
    received = before.strategy.state.z[LAST % 2] if clouds else theta
    change = seen[LAST].vector - received
    assert np.linalg.norm(change) == pytest.approx(bound, rel=1e-12)
    np.testing.assert_allclose(change / bound, np.full(5, 5**-0.5), rtol=1e-12)
    for upload in seen[:LAST]:
        sent = to_vector(arrays_of(contents[NODES[upload.client]]))
        assert same(np.asarray(upload.vector), sent)


def test_one_huge_upload_without_a_bound_is_what_the_bound_is_for() -> None:
    before = unbounded("fedavg")
    assert same(the_round(before, {LAST: huge}).theta, to_vector(before.theta))  # skipped


@pytest.mark.parametrize("name", ["fedadmm", "scaffold", "fedbcd", "fedbcd-async"])
def test_a_change_that_clients_book_is_taken_whole_or_not_at_all(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A bound between the norms of all changes: who is above it is as if its reply were lost."""
    free = unbounded(name)
    sizes = {}
    for node, content in free.answers.items():
        arrays = arrays_of(content)
        parts = [[n for n in arrays if n.startswith(part) == sign] for part, sign in PARTS]
        sizes[node] = max(
            np.linalg.norm(np.concatenate([arrays[n].numpy().ravel() for n in names]))
            for names in parts
            if names
        )
    bound = float(np.median(list(sizes.values())))
    before = bounded(free, bound)
    above = [CLIENT_OF[node] for node, size in sizes.items() if size > bound]
    found, without = the_round(before, {}), the_round(free, {}, leave=above)
    assert 0 < len(above) < CLIENTS
    assert_same(found, without)
    outcome(before, [answered({node: fresh(content) for node, content in free.answers.items()})])
    assert "(clipping_norm) is taken" in caplog.text


PARTS = [("control/", True), ("control/", False)]


def test_a_newcomer_of_fedbcd_is_measured_from_the_model_it_was_sent() -> None:
    """Its first upload is its whole model, far from 0."""
    far = 2.0 + np.arange(5.0)
    strategy = ROWS["fedbcd"].strategy(local=local(lr=1e-3), clipping_norm=1.0)
    with silence():
        result = strategy.start(grid(quadratics(3)), to_record(far), 1)
    assert result.train_metrics_clientapp[1]["clients-used"] == 3


def test_running_statistics_are_within_the_bound_on_uploads() -> None:
    options = {"fraction_evaluate": 0.0, "local": local(), "clipping_norm": 2.0}
    before = world(FedAvg(buffers=["tail"], **options))
    (start,) = before.theta["tail"].numpy()
    found = the_round(
        before,
        {0: put("tail", np.array([1.7e308])), 1: put("tail", np.array([start - 1.5]))},
        leave=range(2, CLIENTS),
    )
    sizes = [q.n for q in quadratics(2)]
    expected = start + np.average([2.0, -1.5], weights=sizes)
    assert found.theta[-1] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, "1", {0: 1.0}])
def test_a_bound_is_a_positive_number(bound: Any) -> None:
    with pytest.raises(ValueError, match=r"clipping_norm must be (a finite number )?> 0, got"):
        FedAvg(clipping_norm=bound)
