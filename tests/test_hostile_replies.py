"""Malformed and hostile replies: none changes the model or the state, or ends the run."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import START, Row, every_algorithm_and
from problems import NODES, grid, quadratics, to_record, to_vector
from scripted import (
    CLIENTS,
    HONEST,
    HOSTILE,
    ROWS,
    Reply,
    World,
    answered,
    as_message,
    assert_same,
    made,
    outcome,
    request_id,
    same,
    world,
)
from tampering import Tamper, arrays_of, fresh, headed, measured, silence

from fl_strategies import FederatedStrategy
from fl_strategies.bcd import async_cloud
from fl_strategies.messages.wire import MAX_SAMPLES
from fl_strategies.server import phases

not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
indices = st.integers(0, 2**16)


@st.composite
def bad_values(draw: st.DrawFn) -> Tamper:
    """One number that is none."""
    which, where, value = draw(indices), draw(indices), draw(not_finite)

    def tamper(content: RecordDict) -> RecordDict:
        arrays = arrays_of(content)
        name = list(arrays)[which % len(arrays)]
        array = arrays[name].numpy().copy()
        array.flat[where % array.size] = value
        arrays[name] = Array(array)
        return content

    return tamper


@st.composite
def bad_shapes(draw: st.DrawFn) -> Tamper:
    """Axes more, less or other than they should be; nothing; much more."""
    which, shape = draw(indices), tuple(draw(st.lists(st.integers(0, 40), max_size=3)))

    def tamper(content: RecordDict) -> RecordDict:
        arrays = arrays_of(content)
        name = list(arrays)[which % len(arrays)]
        other = shape if shape != arrays[name].numpy().shape else (*shape, 1)
        arrays[name] = Array(np.ones(other))
        return content

    return tamper


TYPES = [">f8", "f4", ">f4", "f2", "c16", "i8", "u1", "?", "S8", "U2", "M8[s]"]


@st.composite
def bad_types(draw: st.DrawFn) -> Tamper:
    which, kind = draw(indices), np.dtype(draw(st.sampled_from(TYPES)))

    def tamper(content: RecordDict) -> RecordDict:
        arrays = arrays_of(content)
        name = list(arrays)[which % len(arrays)]
        arrays[name] = Array(np.zeros(arrays[name].numpy().shape, kind))
        return content

    return tamper


headers = st.builds(
    "{{'descr': {}, 'fortran_order': {}, 'shape': {}}}".format,
    st.sampled_from(["'<f8'", "'|O'", "'|V0'", "('<f8', (2,))", "''", "None", "[]", "-" * 999]),
    st.sampled_from([True, False, 3, "'C'"]),
    st.lists(st.integers(-(10**20), 10**20), max_size=40).map(tuple) | st.integers(),
)


@st.composite
def bad_bytes(draw: st.DrawFn) -> Tamper:
    """No array at all, an array cut short or gone on, and headers that claim all sorts."""
    which, noise, header = draw(indices), draw(st.binary(max_size=60)), draw(headers)
    kind = draw(st.sampled_from(["noise", "cut", "long", "header", "pickle"]))

    def tamper(content: RecordDict) -> RecordDict:
        arrays = arrays_of(content)
        name = list(arrays)[which % len(arrays)]
        whole = arrays[name].data
        data = {
            "noise": noise,
            "cut": whole[: len(whole) - 1 - len(noise)],
            "long": whole + b"\0" + noise,
            "header": headed(header, noise),
            "pickle": pickle.dumps(noise),
        }[kind]
        arrays[name] = Array("float64", (1,), "numpy.ndarray", data)
        return content

    return tamper


@st.composite
def bad_names(draw: st.DrawFn) -> Tamper:
    """Arrays left out, added, renamed, or under each other's names."""
    which, name = draw(indices), draw(st.text(max_size=3))
    kind = draw(st.sampled_from(["missing", "extra", "renamed", "swapped", "none"]))

    def tamper(content: RecordDict) -> RecordDict:
        arrays = dict(arrays_of(content))
        names = list(arrays)
        if kind in ("missing", "renamed"):
            taken = arrays.pop(names[which % len(names)])
            if kind == "renamed":
                arrays[name] = taken
        elif kind == "extra":
            arrays[name] = arrays[names[0]]
        elif kind == "swapped":
            arrays[names[0]], arrays[names[1]] = arrays[names[1]], arrays[names[0]]
        content["arrays"] = ArrayRecord({} if kind == "none" else arrays)
        return content

    return tamper


@st.composite
def bad_records(draw: st.DrawFn, which: Sequence[str] = ("arrays", "metrics")) -> Tamper:
    """Whole records missing, twice, empty or of another kind."""
    kind = draw(st.sampled_from(["nothing", "missing", "twice", "empty", "words"]))
    name = draw(st.sampled_from(which))

    def tamper(content: RecordDict) -> RecordDict:
        if kind == "nothing":
            return RecordDict()
        if kind == "twice":
            content["more"] = content[name].copy()
        elif kind == "empty":
            content[name] = ArrayRecord() if name == "arrays" else MetricRecord()
        else:
            del content[name]
            if kind == "words":
                content[name] = ConfigRecord({"num-examples": 3, "head": b"\0" * 32})
        return content

    return tamper


bad_numbers = not_finite | st.lists(st.floats(), max_size=3) | st.just(10**400)


@st.composite
def bad_counts(draw: st.DrawFn) -> Tamper:
    """Examples that are none, negative, countless, or no one number."""
    value = draw(
        st.integers(-(2**63), 0)
        | st.integers(MAX_SAMPLES + 1, 2**63)
        | st.floats(max_value=0.99, allow_nan=False)
        | bad_numbers
        | st.none()
    )
    return measured("num-examples", value)


@st.composite
def bad_metrics(draw: st.DrawFn) -> Tamper:
    """A measured or made-up number that is not finite, alone or in a list."""
    name = draw(st.sampled_from(["train-loss", "steps", "num-examples"]) | st.text(max_size=4))
    value = draw(not_finite | st.just(10**400))
    return measured(name, [1.0, float("nan")] if draw(st.booleans()) else value)


def bad_scalars(bounds: Mapping[str, tuple[float, float]]) -> st.SearchStrategy[Tamper]:
    """The algorithm's own numbers out of their ranges, by a little or absurdly, or not there."""

    @st.composite
    def scalars(draw: st.DrawFn) -> Tamper:
        name = draw(st.sampled_from(sorted(bounds)))
        low, high = bounds[name]
        below = st.floats(max_value=low, exclude_max=True, allow_nan=False, width=64)
        above = st.floats(min_value=high, exclude_min=True, allow_nan=False, width=64)
        return measured(name, draw(below | above | bad_numbers | st.none()))

    return scalars()


def no_content(content: RecordDict) -> None:
    """A message with neither content nor error."""


errors = st.builds(lambda code, reason: lambda _: Error(code, reason), st.integers(), st.text())


class Hostile(NamedTuple):
    """A malformed reply: how its content is tampered with, and what the message pretends."""

    tamper: Tamper
    pretends: str = "itself"
    late: bool = False


PRETENCES = ["another", "stranger", "replay", "twice"]
"""Well-formed replies: of an honest client's node, of one nobody asked, of a round before, or a
second one of an honest client."""


def hostile(bounds: Mapping[str, tuple[float, float]]) -> st.SearchStrategy[Hostile]:
    kinds = [
        bad_values(),
        bad_shapes(),
        bad_types(),
        bad_bytes(),
        bad_names(),
        bad_records(),
        bad_counts(),
        bad_metrics(),
        st.just(no_content),
        errors,
        *([bad_scalars(bounds)] if bounds else []),
    ]
    tampers, late = st.one_of(kinds), st.booleans()
    half_as_they_are = st.builds(
        lambda tamper, well: (lambda content: content) if well else tamper, tampers, st.booleans()
    )
    return st.builds(Hostile, tampers, st.just("itself"), late) | st.builds(
        Hostile, half_as_they_are, st.sampled_from(PRETENCES), late
    )


def replies(
    before: World, honest: bool, attacks: Iterable[Hostile], *, failing: bool = False
) -> list[Reply]:
    """Return a round's replies: those of the honest clients amid the malformed ones.

    With ``failing`` the hostile clients send an error in the end.
    """
    early: list[Reply] = []
    late: list[Reply] = []
    nodes = [NODES[client] for client in range(CLIENTS)]
    for attack, node in zip(attacks, nodes[HONEST:], strict=False):
        content = attack.tamper(fresh(before.answers[node]))
        victim = nodes[node % HONEST]
        reply = {
            "itself": Reply(node, request_id(0, node), content),
            "another": Reply(victim, request_id(0, node), content),
            "stranger": Reply(7, request_id(0, node), content),
            "replay": Reply(node, request_id(-1, node), content),
            "twice": Reply(victim, request_id(0, victim), content),
        }[attack.pretends]
        (late if attack.late or attack.pretends == "twice" else early).append(reply)
    well = answered({node: before.answers[node] for node in nodes[:HONEST]})
    gone = answered(dict.fromkeys(nodes[HONEST:], Error(1, "gone")))
    return early + well * honest + late + gone * failing


def round_after(before: World) -> list[Reply]:
    """Return what the honest clients answer in the round that follows."""
    return answered({node: before.answers[node] for node in NODES[:HONEST]}, 1)


def attacked(strategy: FederatedStrategy, rounds: int, *, failing: bool = False) -> int:
    """Run the property of malformed replies; return how many there were."""
    with silence():
        before = world(strategy)
        bounds = before.strategy.scalar_bounds
        honest = replies(before, True, [], failing=failing)
        without = outcome(before, [honest, round_after(before)])
        nothing = outcome(before, [replies(before, False, [], failing=failing)])
    count = 0

    @settings(
        max_examples=rounds,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(hostile(bounds), min_size=HOSTILE, max_size=HOSTILE))
    def property_of(attacks: list[Hostile]) -> None:
        nonlocal count
        count += len(attacks)
        with silence():
            amid = replies(before, True, attacks, failing=failing)
            assert_same(outcome(before, [amid, round_after(before)]), without)
            alone = [attack for attack in attacks if attack.pretends != "twice"]
            only = replies(before, False, alone, failing=failing)
            assert_same(outcome(before, [only]), nothing)

    property_of()
    assert not same(without.theta, to_vector(before.theta))
    assert same(nothing.theta, to_vector(before.theta))
    return count


@every_algorithm_and("rounds", 10, 250)
@pytest.mark.sampled("fedadmm")
def test_no_malformed_reply_changes_model_or_state_or_ends_the_run(row: Row, rounds: int) -> None:
    assert attacked(made(row), rounds) >= rounds * HOSTILE


@pytest.mark.parametrize("rounds", [10, pytest.param(250, marks=pytest.mark.slow)])
def test_no_malformed_reply_changes_a_run_whose_replies_are_taken_as_they_arrive(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    for module in (async_cloud, phases):
        monkeypatch.setattr(module, "time", still)
    late = made(ROWS["fedbcd-async"], order="arrival")
    assert attacked(late, rounds, failing=True) >= rounds * HOSTILE


@pytest.mark.slow
def test_no_malformed_evaluation_changes_the_rounds_metrics() -> None:
    kinds = [bad_counts(), bad_metrics(), bad_records(["metrics"]), errors, st.just(no_content)]
    federation = grid(quadratics(CLIENTS))
    with silence():
        strategy = made(ROWS["fedavg"])
        theta = strategy.start(federation, to_record(START), 1).arrays
        strategy.fraction_evaluate = 1.0
        requests = strategy.configure_evaluate(1, theta, ConfigRecord(), federation)
        found = list(federation.send_and_receive(requests))
    expected = copy.deepcopy(strategy).aggregate_evaluate(1, found[:HONEST])
    assert expected is not None

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.one_of(kinds), min_size=HOSTILE, max_size=HOSTILE))
    def property_of(tampers: list[Tamper]) -> None:
        bad = []
        for tamper, reply in zip(tampers, found[HONEST:], strict=True):
            content = fresh(reply.content)
            bad.append(as_message(Reply(reply.metadata.src_node_id, "", tamper(content))))
        with silence():
            metrics = copy.deepcopy(strategy).aggregate_evaluate(1, bad + found[:HONEST])
        assert metrics is not None
        differing = {name for name in expected if metrics[name] != expected[name]}
        assert differing <= {f"eval-clients-{what}" for what in ("rejected", "failed", "lost")}
        assert metrics.keys() == expected.keys()

    property_of()
