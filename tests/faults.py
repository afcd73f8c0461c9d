"""What one client may send in place of an honest reply, and runs in which it does, by path.

A path is how a client's reply comes to the server: in a message of its own, as a code
(``compression``), through a host, folded into its host's mean, or as a legacy server's result.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import Code, Parameters, Status, parameters_to_ndarrays
from flwr.server import Server, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from hosted import federation
from hypothesis import strategies as st
from laws import START, Row, local
from problems import CLIENT_OF, grid, quadratics, to_record, to_vector
from scripted import COUNTED, KNOBS, PASSING, Outcome
from tampering import Bomb, claims, npy

from clients import AnyAlgorithmClient
from clients.node.in_process import InProcessGrid
from fl_strategies import FederatedStrategy, RoundInfo, as_legacy
from fl_strategies.core.metric_names import BUSY
from fl_strategies.messages.wire import MAX_SAMPLES
from fl_strategies.parts import TopK

CLIENTS, LIAR = 3, 1
"""Of so many clients (six on hosts) this one sends faulty replies."""
HUGE = 100 * 10**9
"""Numbers of 8 bytes each that an array says it has: 745 GiB."""


@dataclass
class Sent:
    """What a client sends: arrays by name (or the bytes that stand for one), numbers, texts."""

    arrays: dict[str, Any]
    numbers: dict[str, Any]
    words: dict[str, Any]
    whole: Callable[[Any], Any] = lambda whole: whole
    """A change of the whole reply: its ``RecordDict``, or a legacy server's result."""


Change = Callable[[Sent], None]


def array(name: str, value: Any) -> Change:
    return lambda sent: sent.arrays.update({name: value})


def number(name: str, value: Any) -> Change:
    return lambda sent: sent.numbers.update({name: value})


def word(name: str, value: Any) -> Change:
    return lambda sent: sent.words.update({name: value})


def without(name: str) -> Change:
    def change(sent: Sent) -> None:
        for part in (sent.arrays, sent.numbers):
            part.pop(name, None)

    return change


def whole(made: Callable[[Any], Any]) -> Change:
    return lambda sent: setattr(sent, "whole", made)


def failing(sent: Sent) -> None:
    raise RuntimeError("its disk\nis full")


def swapped(sent: Sent) -> None:
    sent.arrays |= {"head": sent.arrays["tail"], "tail": sent.arrays["head"]}


# ---- the table of faults ------------------------------------------------------------------------

PATHS = ["message", "codec", "host", "fold", "legacy"]
EMPTY, NO_CODE = "besides the code 'head' are not empty", "array 'head' is not a code"


class Fault(NamedTuple):
    """A change, and what the log says of it by path, as regular expressions.

    "" is for what a path cannot carry, None for the words that it has in messages. A host writes
    its message itself: a client's bytes and missing numbers are not in it.
    """

    change: Change
    message: str
    codec: str | None = None
    host: str | None = None
    legacy: str | None = None

    def reason(self, path: str) -> str:
        found = getattr(self, "host" if path == "fold" else path)
        return self.message if found is None else str(found)


NO_ARRAY = {
    "noise": bytes(range(256)),
    "cut": npy(np.zeros(1))[:-1],
    "longer": npy(np.zeros(1)) + b"0",
    "pickle": pickle.dumps(Bomb()),
    "huge": claims("'<f8'", f"({HUGE},)", bytes(32)),
}
"""Bytes in the place of an array; `test_wire` has many more."""
AN_INFINITY = np.array([[1.0, 2.0], [math.inf, 4.0]])
IN_TRAINING = {
    **{
        f"{name} for an array": Fault(array("tail", data), "array .*: not a NumPy array", host="")
        for name, data in NO_ARRAY.items()
    },
    "no number": Fault(array("tail", np.array([math.nan])), "'tail'.*: element 0 is nan", EMPTY),
    "infinity": Fault(array("head", AN_INFINITY), "'head' is not .*: element 2 is inf", NO_CODE),
    "shape": Fault(array("tail", np.zeros(2)), r"has shape \(2,\)", EMPTY, "returned 'tail' as"),
    "axes": Fault(array("head", np.zeros((4, 1))), "has shape", NO_CODE, "returned 'head' as"),
    "type": Fault(array("tail", np.zeros(1, "f4")), "has type <f4", EMPTY, "returned 'tail' as"),
    "order": Fault(array("tail", np.zeros(1, ">f8")), "has type >f8", EMPTY, "returned 'tail' as"),
    "texts": Fault(array("tail", np.full(1, "x")), "has type <U1", EMPTY, "returned 'tail' as"),
    "swapped": Fault(swapped, "has shape", EMPTY, "returned 'head' as"),
    "too few": Fault(
        without("tail"), r"missing \['tail'\], unexpected \[\]", EMPTY, "1 arrays, 2", "1 arrays"
    ),
    "too many": Fault(
        array("body", np.zeros(1)), r"unexpected \['body'\]", None, "3 arrays, 2", "3 arrays"
    ),
    "no arrays": Fault(
        lambda sent: sent.arrays.clear(), "missing", NO_CODE, "0 arrays, 2", "0 arrays"
    ),
    "another algorithm": Fault(word("algorithm", "fedprox"), "its client ran 'fedprox'"),
    "another layout": Fault(word("layout", "[" * 900), "its layout cannot be read"),
}
"""Faults of arrays, and of what trained them."""
EXAMPLES = "num-examples"
ALWAYS = {
    **{
        f"{count} examples": Fault(number(EXAMPLES, count), rf"'{EXAMPLES}' must be in \[1,")
        for count in (0, -3, 10**9 + 1, 2**62)
    },
    "examples in NaN": Fault(number(EXAMPLES, math.nan), f"'{EXAMPLES}' is not finite"),
    "a list of examples": Fault(number(EXAMPLES, [7]), f"'{EXAMPLES}' must be one number"),
    "no examples": Fault(
        without(EXAMPLES), f"'{EXAMPLES}' is missing", host="", legacy="TypeError"
    ),
    "an infinite metric": Fault(number("x", math.inf), "metric 'x' is not finite: inf"),
    "a list with NaN": Fault(number("x", [1.0, math.nan]), "metric 'x' is not finite"),
    "a huge metric": Fault(number("train-loss", 10**400), "OverflowError: int too large"),
    "a failure": Fault(failing, "its disk is full"),
}
"""Faults of numbers."""
IN_EVALUATION = {
    "a loss in NaN": Fault(number("eval-loss", math.nan), "'eval-loss' is not finite"),
    "a loss in words": Fault(number("eval-loss", "low"), "", legacy="TypeError"),
}


def record(name: str, make: Callable[[RecordDict], Any]) -> Change:
    """Have the message's record ``name`` be what ``make`` returns, or not be there for None."""

    def changed(content: RecordDict) -> RecordDict:
        found = make(content)
        records = {key: value for key, value in content.items() if key != name}
        return RecordDict(records if found is None else {**records, name: found})

    return whole(changed)


def tensors(make: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    """Have a legacy result's tensors be what ``make`` returns."""

    def changed(result: Any) -> Any:
        made = make(list(result.parameters.tensors))
        return replace(result, parameters=Parameters(made, "numpy.ndarray"))

    return changed


def saying(**fields: Any) -> Change:
    return whole(lambda result: replace(result, **fields))


WORDS = ConfigRecord({EXAMPLES: 3})
PATHS_OWN = {
    ("message", "train"): {
        "arrays twice": Fault(
            record("more", lambda c: c["arrays"]), "2 ArrayRecords, expected one"
        ),
        "no record of arrays": Fault(record("arrays", lambda c: None), "0 ArrayRecords"),
    },
    ("message", ""): {
        "metrics twice": Fault(record("more", lambda c: c["metrics"]), "2 MetricRecords"),
        "no record of metrics": Fault(record("metrics", lambda c: None), "0 MetricRecords"),
        "texts for metrics": Fault(record("metrics", lambda c: WORDS), "0 MetricRecords"),
        "nothing": Fault(whole(lambda c: RecordDict()), "0 MetricRecords|does not say which"),
        "no content": Fault(whole(lambda c: None), "it has no content"),
    },
    ("legacy", "train"): {
        "no bytes": Fault(whole(tensors(lambda t: [None, *t[1:]])), "a tensor is a NoneType"),
        "many arrays": Fault(whole(tensors(lambda t: t * 5000)), "it has 10000 arrays"),
        "no list of arrays": Fault(whole(tensors(lambda t: None)), "TypeError"),
        "no parameters": Fault(saying(parameters=None), "AttributeError"),
    },
    ("legacy", ""): {
        "no metrics": Fault(saying(metrics=None), "AttributeError"),
        "a list for metrics": Fault(saying(metrics=[("x", 1.0)]), "AttributeError"),
        "an object as a metric": Fault(saying(metrics={"x": object()}), "TypeError"),
        "mixed values in a metric": Fault(saying(metrics={"x": [1, "x"]}), "TypeError"),
        "a number for a metric's name": Fault(saying(metrics={7: 1.0}), "TypeError"),
        "examples in words": Fault(saying(num_examples="many"), "TypeError"),
        "more than 64 bits": Fault(saying(num_examples=2**80), f"'{EXAMPLES}' must be in"),
    },
}
"""Faults of a message's records and of a legacy result's fields; "" is for each kind of reply."""


def faults_on(path: str, kind: str) -> dict[str, tuple[Change, str]]:
    """Return the faults that ``path`` can carry, each with what the log says of it there."""
    own = PATHS_OWN.get((path, ""), {}) | PATHS_OWN.get((path, kind), {})
    found = ALWAYS | (IN_TRAINING if kind == "train" else IN_EVALUATION)
    reasons = {name: (fault.change, fault.reason(path)) for name, fault in found.items()}
    reasons |= {name: (fault.change, fault.message) for name, fault in own.items()}
    return {name: (change, reason) for name, (change, reason) in reasons.items() if reason}


@st.composite
def malformed(draw: st.DrawFn) -> Change:
    """Return a change after which no reply can be used: of any array, or of a number."""
    which, where, what = draw(st.integers(0, 99)), draw(st.integers(0, 99)), draw(st.sampled_from(
        ["value", "shape", "type", "bytes", "name", "metric", "examples"]))  # fmt: skip
    bad = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    kind = draw(st.sampled_from([">f8", "f4", "f2", "c16", "i8", "u1", "?", "S8", "U2", "M8[s]"]))
    noise, text = draw(st.binary(max_size=60)), draw(st.text(max_size=4))
    count = draw(st.integers(-(2**63), 0) | st.integers(MAX_SAMPLES + 1, 2**63 - 1))

    def change(sent: Sent) -> None:
        name = [*sent.arrays][which % len(sent.arrays)]
        whole = sent.arrays[name]
        values = whole.numpy().copy()
        if what == "value":
            values.flat[where % values.size] = bad
        elif what == "shape":
            values = np.ones(shape if shape != values.shape else (*shape, 1))
        elif what == "type":
            values = np.zeros(values.shape, kind)
        elif what == "bytes":
            values = whole.data[:where] + noise if where % 2 else whole.data + b"0" + noise
        elif what == "name":
            del sent.arrays[name]
            name = f"{name}-{text}"
        elif what == "metric":
            sent.numbers[f"loss{text}"] = [1.0, bad] if where % 2 else bad
        else:
            sent.numbers["num-examples"] = count
        sent.arrays[name] = values

    return change


# ---- the paths ----------------------------------------------------------------------------------


class Turns:
    """Makes each of ``changes`` to a liar's replies in turn, after a first one that stays."""

    def __init__(self, changes: Sequence[Change], liars: set[int], kind: str) -> None:
        self.changes, self.liars, self.kind = changes, liars, kind
        self.made: dict[int, int] = defaultdict(int)

    def spoilt(self, client: int, kind: str, sent: Sent) -> Sent:
        """Return ``sent``, changed if it is the client's turn."""
        if client not in self.liars or kind != self.kind:
            return sent
        self.made[client] += 1
        turn = self.made[client] - 2
        if 0 <= turn < len(self.changes):
            for part in (sent.numbers, sent.words):  # who lies about its arrays does so about these
                part.pop("checksums", None)
            self.changes[turn](sent)
        return sent

    def message(self, request: Message, reply: Message) -> Message:
        """Return the reply that arrives: as a fault of an ``InProcessGrid``."""
        kind, client = request.metadata.message_type, CLIENT_OF[request.metadata.dst_node_id]
        if client not in self.liars or kind != self.kind:
            return reply
        names = ("arrays", "metrics", "config")
        sent = Sent(*(dict(reply.content.get(name, {})) for name in names))
        try:
            self.spoilt(client, kind, sent)
        except RuntimeError as error:
            return Message(Error(1, str(error)), reply_to=request)
        content = RecordDict({"metrics": MetricRecord(sent.numbers)})
        if kind == "train":
            content["arrays"] = ArrayRecord({n: _array(value) for n, value in sent.arrays.items()})
        if sent.words:
            content["config"] = ConfigRecord(sent.words)
        reply.__dict__["_content"] = sent.whole(content)
        return reply

    def result(self, client: int, kind: str, result: Any) -> Any:
        """Return the result that arrives at a legacy server."""
        numbers, arrays = {EXAMPLES: result.num_examples, **result.metrics}, {}
        if kind == "train":
            arrays = dict(zip(("head", "tail"), result.parameters.tensors, strict=True))
        else:
            numbers["eval-loss"] = result.loss
        try:
            sent = self.spoilt(client, kind, Sent(arrays, numbers, {}))
        except RuntimeError as error:
            return replace(result, status=Status(Code.FIT_NOT_IMPLEMENTED, str(error)))
        fields = {"num_examples": sent.numbers.pop(EXAMPLES, None)}
        if kind == "train":
            tensors = [v if isinstance(v, bytes) else npy(v) for v in sent.arrays.values()]
            fields["parameters"] = Parameters(tensors, "numpy.ndarray")
        else:
            fields["loss"] = sent.numbers.pop("eval-loss")
        return sent.whole(replace(result, metrics={**sent.numbers, **sent.words}, **fields))

    @property
    def client(self) -> type[AnyAlgorithmClient]:
        """A class of hosted clients."""
        turns = self

        class Client(AnyAlgorithmClient):
            def fit(self, parameters: Any, config: Any) -> Any:
                trained, samples, metrics = super().fit(parameters, config)
                arrays = dict(zip(self.array_names, trained, strict=True))
                sent = Sent(arrays, {EXAMPLES: samples, **metrics}, {})
                turns.spoilt(self.client_id, "train", sent)
                samples = sent.numbers.pop(EXAMPLES)
                return [*sent.arrays.values()], samples, {**sent.numbers, **sent.words}

            def evaluate(self, parameters: Any, config: Any) -> Any:
                loss, samples, metrics = super().evaluate(parameters, config)
                sent = Sent({}, {EXAMPLES: samples, "eval-loss": loss, **metrics}, {})
                turns.spoilt(self.client_id, "evaluate", sent)
                samples, loss = (sent.numbers.pop(name) for name in (EXAMPLES, "eval-loss"))
                return loss, samples, {**sent.numbers, **sent.words}

        return Client


def _array(value: Any) -> Array:
    if isinstance(value, bytes):
        return Array("float64", (1,), "numpy.ndarray", value)
    return value if isinstance(value, Array) else Array(value)


class Proxy:
    """A client of ``on``, as a legacy server has it, whose results pass through ``changes``."""

    def __init__(self, node: int, on: InProcessGrid, *, cid: str = "", **changes: Any) -> None:
        self.cid, self._changes = cid or str(node), changes
        self._usual = GridClientProxy(node, on, 1)

    def __getattr__(self, name: str) -> Any:
        usual, change = getattr(self._usual, name), self._changes.get(name, lambda result: result)
        return lambda *arguments, **named: change(usual(*arguments, **named))


def managed(proxies: Sequence[Any]) -> SimpleClientManager:
    manager = SimpleClientManager()
    for proxy in proxies:
        manager.register(proxy)
    return manager


def served(strategy: FederatedStrategy, proxies: Sequence[Any], rounds: int) -> np.ndarray:
    """Return the model [5] of a legacy server."""
    server = Server(client_manager=managed(proxies), strategy=as_legacy(strategy, to_record(START)))
    server.set_max_workers(1)
    server.fit(rounds, None)
    return to_vector(parameters_to_ndarrays(server.parameters))


# ---- runs ---------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What a run comes to, and of each round the faults and (used, rejected)."""

    outcome: Outcome
    faults: list[Mapping[int | None, str]]
    counts: list[tuple[float, float]]


def run(
    row: Row,
    path: str,
    changes: Sequence[Change],
    *,
    kind: str = "train",
    liars: set[int] = {LIAR},  # noqa: B006
    **options: Any,
) -> Run:
    """Return a run of a round for each of ``changes`` to the liars' replies, and one around."""
    turns, rounds = Turns(changes, liars, kind), len(changes) + 2
    faults: list[Mapping[int | None, str]] = []
    counts: list[tuple[float, float]] = []
    phase = "eval-" if kind == "evaluate" else ""

    def note(info: RoundInfo) -> None:
        faults.append(dict(strategy.run.faults))
        used, rejected = (info.metrics[f"{phase}clients-{n}"] for n in ("used", "rejected"))
        counts.append((used, rejected))

    settings: dict[str, Any] = {"local": local(epochs=1), "node_wait": 0.01, "callbacks": [note]}
    settings |= {"max_unusable_rounds": 10**6, "fraction_evaluate": float(kind == "evaluate")}
    settings |= KNOBS.get(row.name, {})
    settings |= {"compression": TopK(share=0.4)} if path == "codec" else {}
    settings |= {"fold": "on"} if path == "fold" else {}
    strategy = row.strategy(**{**settings, **options})
    if path == "legacy":
        on = grid(quadratics(CLIENTS))
        strategy.min_available_nodes = CLIENTS
        proxies = [
            Proxy(
                node,
                on,
                fit=partial(turns.result, CLIENT_OF[node], "train"),
                evaluate=partial(turns.result, CLIENT_OF[node], "evaluate"),
            )
            for node in on.get_node_ids()
        ]
        model = served(strategy, proxies, rounds)
    else:
        hosts = path in ("host", "fold")
        on = (
            federation(client=turns.client)
            if hosts
            else grid(quadratics(CLIENTS), fault=turns.message)
        )
        model = to_vector(strategy.start(on, to_record(START), rounds).arrays)
    results = strategy.result
    phases = (results.train_metrics_clientapp, results.evaluate_metrics_clientapp)
    metrics = [
        {
            n: value
            for n, value in one.items()
            if n.removeprefix("eval-") not in COUNTED and BUSY not in n
        }
        for phase in phases
        for one in phase.values()
    ]
    state = {name: value for name, value in vars(strategy).items() if name not in PASSING}
    del state["callbacks"]
    state["ledger"] = (strategy.ledger.acked, strategy.ledger.nonces.keys())  # which are random
    return Run(Outcome(model, state, metrics), faults, counts)
