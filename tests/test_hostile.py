"""Broken and hostile replies, nodes and state files: none changes the model or ends the run."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import START, TABLE, Row, every_algorithm, local
from problems import CLIENT_OF, NODES, grid, make_client_app, quadratics, to_record, to_vector

from clients import DirectoryStore, Owner, client_id
from clients.node.in_process import InProcessGrid, become_server
from fl_strategies import BestModel, FedAvg, FederatedStrategy, History, Upload, Uploads
from fl_strategies.bcd import fedbcd_async
from fl_strategies.core.clipping import clip, norm
from fl_strategies.server.nodes import Nodes
from fl_strategies.server.replies import one_line

HONEST, HOSTILE = 4, 8
"""Clients 0 ... 3 answer as they should; 4 ... 11 send one malformed reply each."""
CLIENTS = HONEST + HOSTILE
HOW_OFTEN = pytest.mark.parametrize("rounds", [10, pytest.param(250, marks=pytest.mark.slow)])
"""Rounds of a property, with a malformed reply of each hostile client."""
KNOBS: dict[str, dict[str, Any]] = {
    "fedpd": {"missing": "proceed"},
    "fedbcd-async": {"servers": 2, "first": 1},
}
"""Beside those of the table: FedPD would stop for who is missing."""

ROWS = {row.name: row for row in TABLE}


def made(row: Row, **options: Any) -> FederatedStrategy:
    return row.strategy(local=local(), **{**KNOBS.get(row.name, {}), **options})


# ---- a federation that answers by a script ------------------------------------------------------


class Reply(NamedTuple):
    """What arrives: from which node, to the request with which id, and what is in it."""

    node: int
    request: str
    content: RecordDict | Error | None


Script = list[list[Reply]]


class Scripted(InProcessGrid):
    """Gives messages ids as Flower does, and answers the t-th training phase by ``script[t]``.

    Without a script the clients themselves answer, and ``seen`` keeps what they said.
    """

    def __init__(self, script: Script | None = None) -> None:
        super().__init__(make_client_app(quadratics(CLIENTS)), CLIENTS)
        self.script, self.phase = script, 0
        self.seen: dict[int, RecordDict] = {}
        self.pending: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        train = False
        for message in messages:
            about = message.metadata
            train = about.message_type == "train"
            about.__dict__["_message_id"] = request_id(self.phase, about.dst_node_id)
            ids.append(about.message_id)
            if self.script is None or not train:
                reply = self.answer(message)
                assert reply is not None
                if train:
                    # which of the arrays stand for running statistics is up to the strategy here
                    for record in reply.content.config_records.values():
                        record.pop("layout", None)
                    self.seen[about.dst_node_id] = reply.content
                self.pending.append(reply)
        if train and self.script is not None:
            self.pending += [as_message(reply) for reply in self.script[self.phase]]
        self.phase += train
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        pulled, self.pending = self.pending, []
        return pulled


def request_id(phase: int, node: int) -> str:
    return f"{phase}-{node}"


def as_message(reply: Reply) -> Message:
    become_server()
    about = Message(RecordDict(), dst_node_id=reply.node, message_type="train")
    about.metadata.__dict__["_message_id"] = reply.request
    if reply.content is None:
        message = Message(RecordDict(), reply_to=about)
        message.__dict__["_content"] = None
        return message
    return Message(reply.content, reply_to=about)


class World(NamedTuple):
    """A strategy after two rounds of all clients, and what these answer in the third."""

    strategy: FederatedStrategy
    theta: ArrayRecord
    answers: Mapping[int, RecordDict]


def world(strategy: FederatedStrategy) -> World:
    federation = Scripted()
    theta = strategy.start(federation, to_record(START), 2).arrays
    copy.deepcopy(strategy).start(federation, theta, 1)
    for content in federation.seen.values():  # who lies about its arrays does so about their sums
        for record in content.config_records.values():
            record.pop("checksums", None)
    return World(strategy, theta, dict(federation.seen))


class Outcome(NamedTuple):
    theta: np.ndarray
    state: dict[str, Any]
    metrics: list[dict[str, Any]]


def outcome(before: World, script: Script) -> Outcome:
    """Return what a copy of the strategy comes to in as many rounds as ``script`` has."""
    strategy = copy.deepcopy(before.strategy)
    # by arrival, what is there at the first look is all that comes
    result = strategy.start(Scripted(script), before.theta, len(script), timeout=0.0)
    metrics = [
        {name: value for name, value in phase.items() if name not in COUNTED}
        for phase in result.train_metrics_clientapp.values()
    ]
    state = {name: value for name, value in vars(strategy).items() if name not in PASSING}
    state |= {"clients": strategy.run.clients, "devices": strategy.run.devices}
    return Outcome(to_vector(result.arrays), state, metrics)


COUNTED = {
    "clients-rejected",
    "clients-failed",
    "clients-lost",
    "bytes-up",
    "seconds",
    "virtual-seconds",
}
"""Metrics that tell a malformed reply from none."""
PASSING = {
    "clipping_norm",
    "faults",
    "patience",
    "run",
    "underway",
    "_asked",
    "_started",
    "_checks",
    "_phases",
    "_mixing",
}
"""Attributes that hold replies or a time; what they lead to is in the model a round later. And a
bound, to compare runs with and without."""


def same(a: Any, b: Any) -> bool:
    """Whether two values agree to the bit, all the way down."""
    if isinstance(a, np.ndarray | np.generic) or isinstance(b, np.ndarray | np.generic):
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if type(a).__module__.startswith("fl_strategies"):
        return same(vars(a), vars(b))
    return bool(a == b)


def assert_same(found: Outcome, expected: Outcome) -> None:
    for part, a, b in zip(Outcome._fields, found, expected, strict=True):
        if isinstance(a, dict):
            differ = [name for name in a.keys() | b.keys() if not same(a.get(name), b.get(name))]
            assert not differ, (differ, [(a.get(name), b.get(name)) for name in differ])
        assert same(a, b), (part, a, b)


@contextmanager
def silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


# ---- malformed replies --------------------------------------------------------------------------

Tamper = Callable[[RecordDict], RecordDict | Error | None]
"""Makes something malformed out of an honest reply's content."""

not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
indices = st.integers(0, 2**16)


def fresh(content: RecordDict) -> RecordDict:
    return RecordDict({name: record.copy() for name, record in content.items()})


def arrays_of(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


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
            "header": npy(header, noise),
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
        | st.integers(2**53 + 1, 2**63)
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


def measured(name: str, value: Any) -> Tamper:
    def tamper(content: RecordDict) -> RecordDict:
        metrics = dict(content["metrics"])
        metrics.pop(name, None)
        content["metrics"] = MetricRecord(metrics if value is None else {**metrics, name: value})
        return content

    return tamper


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
    well = [Reply(node, request_id(0, node), before.answers[node]) for node in nodes[:HONEST]]
    gone = [Reply(node, request_id(0, node), Error(1, "gone")) for node in nodes[HONEST:]]
    return early + well * honest + late + gone * failing


def round_after(before: World) -> list[Reply]:
    """Return what the honest clients answer in the round that follows."""
    nodes = NODES[:HONEST]
    return [Reply(node, request_id(1, node), before.answers[node]) for node in nodes]


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


@HOW_OFTEN
@every_algorithm
def test_no_malformed_reply_changes_model_or_state_or_ends_the_run(row: Row, rounds: int) -> None:
    assert attacked(made(row), rounds) >= rounds * HOSTILE


@HOW_OFTEN
def test_no_malformed_reply_changes_a_run_whose_replies_are_taken_as_they_arrive(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(fedbcd_async, "time", still)
    late = made(ROWS["fedbcd-async"], order="arrival")
    assert attacked(late, rounds, failing=True) >= rounds * HOSTILE


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


# ---- what is well-formed, and odd ---------------------------------------------------------------


def the_round(before: World, changes: Mapping[int, Tamper], leave: Iterable[int] = ()) -> Outcome:
    """Return the third round's outcome with ``changes`` to clients' replies, but for ``leave``."""
    script = []
    for client in range(CLIENTS):
        node = NODES[client]
        content = fresh(before.answers[node])
        if client not in leave:
            changed = changes[client](content) if client in changes else content
            script.append(Reply(node, request_id(0, node), changed))
    with silence():
        return outcome(before, [script])


LAST = CLIENTS - 1


@every_algorithm
def test_what_a_client_reports_under_the_servers_names_is_not_heard(row: Row) -> None:
    """Examples of 0 in all would divide by zero."""
    with silence():
        before = world(made(row))
    names = ["examples", "data-share", "weight-share", "clients-used", "seconds"]

    def tamper(content: RecordDict) -> RecordDict:
        metrics = dict(content["metrics"])
        content["metrics"] = MetricRecord({**metrics, **dict.fromkeys(names, -2000.0)})
        return content

    found, plain = the_round(before, {LAST: tamper}), the_round(before, {})
    assert same(found.theta, plain.theta)
    assert {name: found.metrics[0][name] for name in plain.metrics[0]} == plain.metrics[0]
    assert same(found.state["clients"][LAST]["examples"], plain.state["clients"][LAST]["examples"])


@pytest.mark.parametrize("extreme", [1.7e308, -1.7e308])
def test_numbers_near_the_largest_make_infinite_metrics_and_no_more(extreme: float) -> None:
    with silence():
        before = world(made(ROWS["fedavg"]))
    found = the_round(before, {LAST: measured("train-loss", extreme)})
    assert same(found.theta, the_round(before, {}).theta)
    assert found.metrics[0]["train-loss-variance"] == math.inf


def test_a_loss_whose_power_is_no_number_is_left_out() -> None:
    with silence():
        before = world(made(ROWS["q-fedavg"], q=30.0))
    found = the_round(before, {LAST: measured("global-loss", 1e12)})
    assert_same(found, the_round(before, {}, leave=[LAST]))


def test_running_statistics_that_overflow_make_the_round_void() -> None:
    """The first client's and the second's differ by more than the largest number."""
    with silence():
        before = world(FedAvg(buffers=["tail"], fraction_evaluate=0.0, local=local()))

    def tail(value: float) -> Tamper:
        def tamper(content: RecordDict) -> RecordDict:
            arrays_of(content)["tail"] = Array(np.array([value]))
            return content

        return tamper

    found = the_round(before, {0: tail(-1.7e308), 1: tail(1.7e308)})
    assert same(found.theta, to_vector(before.theta))


def test_a_foreign_text_is_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    before = world(made(ROWS["fedavg"]))
    caplog.clear()
    forged = "no\nWARNING: all is well\r\n" + "x" * 10_000
    outcome(before, [[Reply(NODES[0], request_id(0, NODES[0]), Error(2, forged))]])
    (line,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert line.startswith("reply of client 0 left out: error 2: no WARNING: all is well xxx")
    assert len(line.splitlines()) == 1
    assert len(line) < 600


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=700) | st.text(st.characters(categories=["Cc", "Cf", "Zl", "Cs"])))
def test_whatever_others_write_is_one_printable_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= 500
    plain = " ".join(text.split())
    assert line == plain or not plain.isprintable() or len(plain) > 500


def test_a_metrics_name_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    before = world(made(ROWS["fedavg"]))
    caplog.clear()
    content = measured("x\nround=9 algorithm=forged\x1b[2J\u202e", 1.0)(
        fresh(before.answers[NODES[0]])
    )
    outcome(before, [[Reply(NODES[0], request_id(0, NODES[0]), content)]])
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_what_no_check_foresaw_is_left_out_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    before = world(made(ROWS["fedavg"]))
    caplog.clear()
    content = measured("train-loss", 10**400)(fresh(before.answers[NODES[0]]))
    outcome(before, [[Reply(NODES[0], request_id(0, NODES[0]), content)]])
    (record,) = [r for r in caplog.records if "left out" in r.getMessage()]
    assert "left out: OverflowError: int too large to convert to float" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is OverflowError


def test_an_error_of_the_servers_own_rule_is_not_hidden() -> None:
    with silence():
        before = world(made(ROWS["fedavg"]))

    def broken(*_: Any) -> float:
        raise ZeroDivisionError("a mistake")

    before.strategy.weight = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        the_round(before, {})


# ---- the bound on an upload's norm --------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.floats(-1.0, 1.0, allow_subnormal=False), min_size=1, max_size=6),
    st.integers(-900, 1023),
    st.floats(0.01, 4.0),
)
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
    assert norm(u) == pytest.approx(math.ldexp(length, exponent), rel=1e-14) or exponent == 1023
    found = clip(u, math.ldexp(bound, min(exponent, 1000)))
    if math.ldexp(bound, min(exponent, 1000) - exponent) > length * (1 + 1e-14):
        assert found is u
    else:
        expected = unit / length * math.ldexp(bound, min(exponent, 1000))
        np.testing.assert_allclose(found, expected, rtol=1e-13)


def bounded(before: World, bound: float) -> World:
    strategy = copy.deepcopy(before.strategy)
    strategy.clipping_norm = bound
    return before._replace(strategy=strategy)


def spied(strategy: FederatedStrategy, seen: list[Upload]) -> FederatedStrategy:
    """Return the strategy, which notes down what its rule is given."""
    rule = strategy.aggregate

    def aggregate(state: Any, theta: Any, uploads: Uploads) -> Any:
        seen.extend(uploads)
        return rule(state, theta, uploads)

    strategy.aggregate = aggregate  # type: ignore[method-assign]
    return strategy


def huge(content: RecordDict, **scalars: float) -> RecordDict:
    """The largest arrays and number of examples that the checks let pass, and ``scalars``."""
    for name, array in arrays_of(content).items():
        arrays_of(content)[name] = Array(np.full(array.numpy().shape, 1.7e308))
    metrics = {**content["metrics"], "num-examples": 2**53}
    content["metrics"] = MetricRecord({**metrics, **scalars})
    return content


@every_algorithm
def test_a_bound_that_nobody_reaches_changes_nothing(row: Row) -> None:
    with silence():
        before = world(made(row))
    assert_same(the_round(bounded(before, 1e6), {}), the_round(before, {}))


@every_algorithm
def test_a_huge_upload_neither_voids_the_round_nor_moves_the_model_beyond_the_bound(
    row: Row,
) -> None:
    bound, seen = 50.0, list[Upload]()
    with silence():
        before = world(made(row, clipping_norm=bound))
    theta = to_vector(before.theta)
    bounds = before.strategy.scalar_bounds
    for ends in itertools.product(*bounds.values()):
        scalars = dict(zip(bounds, ends, strict=True))
        found = the_round(before, {LAST: partial(huge, **scalars)})
        assert found.state["ledger"].acked != before.strategy.ledger.acked  # the round counts
        assert np.linalg.norm(found.theta - theta) <= bound * (1 + 1e-12)
    found = the_round(before, {LAST: huge})
    if before.strategy.books_changes:
        assert_same(found, the_round(before, {}, leave=[LAST]))
        return
    strategy = copy.deepcopy(before.strategy)
    contents = {**before.answers, NODES[LAST]: huge(fresh(before.answers[NODES[LAST]]))}
    script = [[Reply(n, request_id(0, n), content) for n, content in contents.items()]]
    with silence():
        spied(strategy, seen).start(Scripted(script), before.theta, 1)
    assert [upload.client for upload in seen] == list(range(CLIENTS))
    change = seen[LAST].vector - theta
    assert np.linalg.norm(change) == pytest.approx(bound, rel=1e-12)
    np.testing.assert_allclose(change / bound, np.full(5, 5**-0.5), rtol=1e-12)
    for upload in seen[:LAST]:
        sent = to_vector(arrays_of(contents[NODES[upload.client]]))
        assert same(np.asarray(upload.vector), sent)


def test_one_huge_upload_without_a_bound_is_what_the_bound_is_for() -> None:
    with silence():
        before = world(made(ROWS["fedavg"]))
    assert same(the_round(before, {LAST: huge}).theta, to_vector(before.theta))  # void


@pytest.mark.parametrize("name", ["fedadmm", "scaffold", "fedbcd", "fedbcd-async"])
def test_a_change_that_clients_book_is_taken_whole_or_not_at_all(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A bound between the norms of all changes: who is above it is as if its reply were lost."""
    with silence():
        free = world(made(ROWS[name]))
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
    script = [[Reply(n, request_id(0, n), content) for n, content in free.answers.items()]]
    outcome(before, script)
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
    with silence():
        options = {"fraction_evaluate": 0.0, "local": local(), "clipping_norm": 2.0}
        before = world(FedAvg(buffers=["tail"], **options))

    def tail(value: float) -> Tamper:
        def tamper(content: RecordDict) -> RecordDict:
            arrays_of(content)["tail"] = Array(np.array([value]))
            return content

        return tamper

    (start,) = before.theta["tail"].numpy()
    found = the_round(before, {0: tail(1.7e308), 1: tail(start - 1.5)}, leave=range(2, CLIENTS))
    sizes = [q.n for q in quadratics(2)]
    expected = start + np.average([2.0, -1.5], weights=sizes)
    assert found.theta[-1] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, "1", {0: 1.0}])
def test_a_bound_is_a_positive_number(bound: Any) -> None:
    with pytest.raises(ValueError, match="clipping_norm must be > 0, got"):
        FedAvg(clipping_norm=bound)


# ---- nodes --------------------------------------------------------------------------------------


class Claims(InProcessGrid):
    """Nodes that answer the query for their client's id as ``claims`` says."""

    def __init__(self, claims: Mapping[int, list[Message]]) -> None:
        super().__init__(make_client_app(quadratics(1)), len(claims))
        self.claims = list(claims.values())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"query-{node}"
        return []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for replies in self.claims for reply in replies]


def claim(node: int, request: int | None = None, **about: Any) -> Message:
    content = RecordDict(
        {"client": ConfigRecord({k.replace("_", "-"): v for k, v in about.items()})}
    )
    return as_message(Reply(node, f"query-{node if request is None else request}", content))


@pytest.mark.parametrize(
    "client_id", [-1, True, "0", 0.0, [0], b"0", 2, 2**70], ids=lambda value: repr(value)
)
def test_a_client_id_that_cannot_be_is_replaced_by_the_nodes_own(client_id: Any) -> None:
    """Of two partitions, 2 is none."""
    first, second = NODES[0], NODES[1]
    federation = Claims(
        {
            0: [claim(first, client_id=0, num_partitions=2)],
            1: [claim(second, client_id=client_id, num_partitions=2)],
        }
    )
    assert Nodes(1.0).connected(federation) == {0: first, second: second}


def test_an_answer_to_a_query_counts_once_and_from_who_was_asked() -> None:
    first, second = NODES[0], NODES[1]
    nothing = as_message(Reply(second, f"query-{second}", None))
    federation = Claims(
        {
            0: [claim(first, second, client_id=7), claim(first, client_id=3)],
            1: [claim(first, client_id=8), claim(5, 5, client_id=9), nothing],
        }
    )
    nodes = Nodes(1.0)
    assert nodes.connected(federation) == {3: first}
    assert nodes.connected(federation) == {3: first, second: second}  # it has failed twice


@pytest.mark.parametrize("partitions", [-4, True, "9", 2.5, [3]])
def test_a_number_of_partitions_that_is_none_is_not_waited_for(partitions: Any) -> None:
    federation = Claims({0: [claim(NODES[0], client_id=0, num_partitions=partitions)]})
    nodes = Nodes(100.0)
    assert nodes.wait(federation, 1) == {0: NODES[0]}


# ---- state files --------------------------------------------------------------------------------


def damage(folder: Path, client: int) -> tuple[Path, bytes]:
    """Change one number in the client's last state file; return the file and what it held."""
    path = max(folder.glob(f"{client}.*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return path, whole


def in_folder(folder: Path) -> Callable[[Any], DirectoryStore]:
    return lambda context: DirectoryStore(folder, client_id(context))


def test_a_damaged_state_is_treated_as_a_lost_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problems = quadratics(3)
    federation = grid(problems, store=in_folder(tmp_path / "kept"))
    lost = grid(problems, store=in_folder(tmp_path / "lost"))
    one, other = (made(ROWS["fedadmm"], lost_state="warn") for _ in range(2))
    theta = one.start(federation, to_record(START), 2).arrays
    assert same(to_vector(other.start(lost, to_record(START), 2).arrays), to_vector(theta))
    path, _ = damage(tmp_path / "kept", 1)
    for file in (tmp_path / "lost").glob("1.*"):
        file.unlink()
    found = one.start(federation, theta, 2)
    assert f"client 1 begins anew: {path} is damaged" in caplog.text
    assert "client 1 lost its state and counts as a newcomer" in caplog.text
    assert found.train_metrics_clientapp[1]["clients-used"] == 3
    expected = other.start(lost, theta, 2)
    assert same(to_vector(found.arrays), to_vector(expected.arrays))
    assert not path.exists()  # replaced by what was acknowledged since


def test_a_client_with_a_damaged_state_is_left_out_until_that_is_restored(tmp_path: Path) -> None:
    federation = grid(quadratics(3), store=in_folder(tmp_path))
    one = made(ROWS["fedadmm"], lost_state="refuse")
    theta = one.start(federation, to_record(START), 2).arrays
    path, whole = damage(tmp_path, 1)
    found = one.start(federation, theta, 2)
    used = [m["clients-used"] for m in found.train_metrics_clientapp.values()]
    assert used == [2, 2]
    assert one.faults == {1: "the state which the server booked for it is lost"}
    path.write_bytes(whole)
    found = one.start(federation, found.arrays, 1)
    assert found.train_metrics_clientapp[1]["clients-used"] == 3


def test_evaluation_with_a_damaged_state_measures_a_newcomer(tmp_path: Path) -> None:
    federation = grid(quadratics(2), store=in_folder(tmp_path))
    one = made(ROWS["fedadmm"], fraction_train=0.5)
    theta = one.start(federation, to_record(START), 1).arrays
    (client,) = one.ledger.acked
    damage(tmp_path, client)
    one.fraction_evaluate = 1.0
    requests = list(one.configure_evaluate(1, theta, ConfigRecord(), federation))
    metrics = one.aggregate_evaluate(1, federation.send_and_receive(requests))
    assert metrics is not None
    assert metrics["eval-clients-used"] == 2
    assert metrics["own-loss"] == metrics["eval-loss"]  # both clients have but the global model


def test_a_stray_file_among_the_states_is_not_a_state(tmp_path: Path) -> None:
    owner, store = Owner("fedadmm", "0123456789abcdef"), DirectoryStore(tmp_path, 3)
    store.save(owner, 5, {"w": np.ones(2)})
    for name in ("3.x.safetensors", "3.-1.safetensors", "3.5.bak.safetensors", "3..safetensors"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "3.5.bak.safetensors").unlink()
    assert store.rounds(owner) == [5]


# ---- pickle -------------------------------------------------------------------------------------


def test_a_run_with_state_files_works_where_pickle_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle is used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
        monkeypatch.setattr(f"_pickle.{name}", forbidden)
    for name in ("torch.load", "torch.save"):
        monkeypatch.setattr(name, forbidden)
    store = in_folder(tmp_path / "states")
    for row in TABLE:
        federation = grid(quadratics(2), store=store)
        best = BestModel(tmp_path / "best.safetensors", "train-loss", smaller=True)
        history = History(tmp_path / "history.jsonl")
        strategy = row.strategy(local=local(), callbacks=[best, history])
        strategy.fraction_evaluate = 1.0
        result = strategy.start(federation, to_record(START), 2)
        assert result.train_metrics_clientapp[2]["clients-used"] == 2
        for path in (tmp_path / "states").glob("*"):
            path.unlink()
    with pytest.raises(AssertionError, match="pickle is used"):
        pickle.loads(b"")
