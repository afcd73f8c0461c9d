"""The public checks: each law catches a planted fault, and a sound strategy and client pass."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import flwr
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from problems import Linear, quadratics
from torch import nn

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    DittoClient,
    FedADMMClient,
    Problem,
)
from clients import client_id as id_of
from fl_strategies import FedADMM, FedAvg, FedPD
from fl_strategies.testing import (
    CLIENT_LAWS,
    STRATEGY_LAWS,
    Finding,
    check_client,
    check_strategy,
)
from simulations.lab import findings as of_flower

# ---- strategies ----------------------------------------------------------------------------------

Replies = Iterable[Message]


class Sound(FlowerFedAvg):
    """Flower's FedAvg, without what it breaks: sorted replies, its own seed, finite replies."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        messages = super().configure_train(server_round, arrays, config.copy(), grid)
        return sorted(messages, key=lambda message: message.metadata.dst_node_id)

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        return super().configure_evaluate(server_round, arrays, config.copy(), grid)

    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        return super().aggregate_train(server_round, sorted(filter(usable, replies), key=node))


def node(reply: Message) -> int:
    return reply.metadata.src_node_id


def usable(reply: Message) -> bool:
    return reply.has_error() or all(
        np.isfinite(array.numpy()).all() for array in reply.content["arrays"].values()
    )


def changed(arrays: ArrayRecord | None, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    return arrays and ArrayRecord({n: Array(change(a.numpy())) for n, a in arrays.items()})


class Stuck(Sound):
    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        return None, MetricRecord()


class Infinite(Sound):
    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return changed(arrays, lambda w: w * np.float32(1 if server_round < 3 else np.inf)), metrics


class Doubled(Sound):
    """float64 in the place of float32."""

    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return changed(arrays, lambda w: w.astype(float)), metrics


class Last(Sound):
    """The model of whose reply comes last."""

    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        one = [reply for reply in replies if not reply.has_error() and usable(reply)][-1:]
        return super().aggregate_train(server_round, one)


class Unsorted(Sound):
    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        return FlowerFedAvg.aggregate_train(self, server_round, filter(usable, replies))


class Careless(Sound):
    """Errors end its run."""

    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        found = list(replies)
        for reply in found:
            assert reply.content is not None
        return super().aggregate_train(server_round, found)


class Counting(Sound):
    """It divides by the number of clients that were asked."""

    asked = 5

    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        found = list(replies)
        arrays, metrics = super().aggregate_train(server_round, found)
        return changed(arrays, lambda w: w * np.float32(len(found) / self.asked)), metrics


class Decaying(Sound):
    """Its model shrinks in a round without replies, too."""

    model: ArrayRecord

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.model = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return changed(arrays or self.model, lambda w: w * np.float32(0.5)), metrics


class Aging(Sound):
    """Rounds without replies count: a later one gives another model."""

    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return changed(arrays, lambda w: w / np.float32(server_round)), metrics


class Trusting(Sound):
    """It reads what no client measured."""

    def aggregate_evaluate(self, server_round: int, replies: Replies) -> Any:
        metrics = super().aggregate_evaluate(server_round, replies)
        assert metrics is not None, "nobody evaluated"
        return metrics


class Writing(Sound):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        config["server-round"] = server_round
        return super().configure_train(server_round, arrays, config, grid)


class Zeroing(Sound):
    """It writes into the initial arrays."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        if server_round == 1:
            arrays["bias"] = Array(np.zeros(2, np.float32))
        return super().configure_train(server_round, arrays, config, grid)


class Emptying(Sound):
    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        found = list(replies)
        result = super().aggregate_train(server_round, found)
        for reply in found:
            if not reply.has_error():
                reply.content["metrics"]["num-examples"] = 0
        return result


class Shared(Sound):
    """All strategies of its class share a counter."""

    rounds: list[int] = []  # noqa: RUF012  # the fault

    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        self.rounds.append(server_round)
        arrays, metrics = super().aggregate_train(server_round, replies)
        return changed(arrays, lambda w: w / np.float32(len(self.rounds))), metrics


class Noisy(Sound):
    def aggregate_train(self, server_round: int, replies: Replies) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return changed(arrays, lambda w: w + np.float32(random.random())), metrics


class Forgetful(FedAvg):
    """Its server's step depends on what its checkpoints do not hold."""

    averages = ""
    steps = 0

    def aggregate(self, state: Any, round: Any, uploads: Any) -> Any:
        self.steps += 1
        model, state, info = super().aggregate(state, round, uploads)
        return model / self.steps, state, info


class OwnStart(Sound):
    """What its start does, a wrapper does not."""

    def start(self, grid: Any, initial_arrays: ArrayRecord, *args: Any, **options: Any) -> Any:
        half = changed(initial_arrays, lambda w: w * np.float32(0.5))
        return super().start(grid, half, *args, **options)


def remembering() -> ClientApp:
    """Clients whose upload depends on how often they were asked, whatever was used of it."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        times = context.state.metric_records.setdefault("times", MetricRecord({"asked": 0}))
        times["asked"] = int(times["asked"]) + 1
        arrays = changed(message.content["arrays"], lambda w: w / np.float32(times["asked"] + 1))
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


FAULTS: list[tuple[str, Any, str]] = [
    ("trains", Stuck, "the model after 6 rounds is the initial model"),
    ("finite", Infinite, r"weight holds \[-?inf\] after round 3"),
    ("form", Doubled, r"weight is float64\[2, 3\] after round 1, float32\[2, 3\] at first"),
    ("order_of_replies", Last, r"is \S+ if replies arrive in reverse, \S+ if they do not"),
    ("order_to_the_bit", Unsorted, r"is \S+ if replies arrive in reverse, \S+ if they do not"),
    ("failed_replies", Careless, "the run ended in round 2 with ValueError"),
    ("failed_replies", Counting, r"is \S+ if replies are failed, \S+ if these clients are never"),
    ("diverged_replies", FlowerFedAvg, r"weight holds \[nan\] after round 2"),
    ("rounds_without_replies", Decaying, r"after round 3, without replies, \S+ after round 2"),
    ("rounds_without_replies", Aging, r"after round 5, two of them without replies, \S+ after the"),
    ("evaluation", Trusting, "the run ended in round 1 with AssertionError: nobody evaluated"),
    ("arguments", Writing, "train_config is .*'server-round': 2.* after the run, .*mine.* before"),
    ("arguments", Zeroing, r"bias\[\d\] is 0.0 in the initial arrays after the run, \S+ before it"),
    ("replies", Emptying, "a reply holds .*'metrics/num-examples': 0.* after the round, .*: 7"),
    ("seed", Shared, r"is \S+ in the second run, \S+ in the first"),
    ("global_generators", Noisy, r"is \S+ if the global generators begin with seed 1, \S+ with"),
    ("wrapper", OwnStart, r"is \S+ inside the wrapper, \S+ without it"),
    ("resume", Forgetful, r"is \S+ after a crash, \S+ without it"),
]


def law(name: str, laws: Any = STRATEGY_LAWS) -> list[Any]:
    return [one for one in laws if one.__name__ == name]


@pytest.mark.parametrize(("name", "make", "said"), FAULTS, ids=lambda value: str(value)[:30])
def test_a_law_of_strategies_catches_a_planted_fault(name: str, make: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=f"^{name}: (.|\n)*{said}") as raised:
        check_strategy(make, laws=law(name))
    assert "\nThe law: " in str(raised.value)


@pytest.mark.parametrize("name", ["lost_replies", "late_replies"])
def test_a_law_catches_clients_whose_unused_work_counts(name: str) -> None:
    with pytest.raises(AssertionError, match=f"^{name}: .* if these clients are never reached"):
        check_strategy(Sound, app=remembering(), laws=law(name))


def test_every_law_of_strategies_has_its_fault() -> None:
    assert {name for name, *_ in FAULTS} | {"lost_replies", "late_replies"} == {
        one.__name__ for one in STRATEGY_LAWS
    }


def test_a_sound_strategy_passes() -> None:
    findings = check_strategy(Sound)
    assert [one.outcome for one in findings if one.law != "resume"] == ["passed"] * 16
    assert Finding("resume", "not applicable", "make takes no `checkpoints`") in findings


def test_a_report_raises_nothing_and_names_what_failed() -> None:
    findings = check_strategy(Stuck, on_fail="report", laws=STRATEGY_LAWS[:2])
    assert [(one.law, one.outcome) for one in findings] == [
        ("trains", "failed"),
        ("finite", "passed"),
    ]


def test_a_strategy_that_waits_for_more_clients_is_told_so(monkeypatch: Any) -> None:
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", lambda seconds: None)
    with pytest.raises(AssertionError, match=r"waits for more than the 5 clients .* by clients="):
        check_strategy(lambda: FlowerFedAvg(min_available_nodes=6))
    assert check_strategy(lambda: Sound(min_available_nodes=6), clients=6)


def test_checks_leave_generators_and_loggers_as_they_were() -> None:
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    torch.manual_seed(7)
    expected = random.getstate(), np.random.get_state()[1].sum(), torch.get_rng_state().sum()  # noqa: NPY002
    check_strategy(FlowerFedAvg, laws=law("global_generators"))
    found = random.getstate(), np.random.get_state()[1].sum(), torch.get_rng_state().sum()  # noqa: NPY002
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"make": lambda: None}, r"make\(\) must be a Strategy of flwr.serverapp, got None"),
        ({"make": FlowerFedAvg()}, "make must be a function that returns a strategy, got"),
        ({"on_fail": "warn"}, r"on_fail must be one of \['raise', 'report'\], got 'warn'"),
        ({"rounds": 2}, "rounds must be an integer >= 6, got 2"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_strategy(**{"make": FlowerFedAvg} | arguments)


# ---- clients -------------------------------------------------------------------------------------


class Plain(NumPyClient):
    """A sound client in NumPy, which keeps nothing."""

    def __init__(self, context: Context) -> None:
        self.context, self.me = context, id_of(context)

    def get_parameters(self, config: Any) -> Any:
        return [np.ones(3, np.float32)]

    def fit(self, parameters: Any, config: Any) -> Any:
        return [np.float32(0.5) * (w - self.me - 1) for w in parameters], 7 + self.me, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float((parameters[0] ** 2).sum()), 7, {}


def of_fit(change: Callable[[Any, list[np.ndarray], Any], Any]) -> type[Plain]:
    """A client whose ``fit`` returns ``change(client, received, reply)``."""

    class Changed(Plain):
        def fit(self, parameters: Any, config: Any) -> Any:
            return change(self, parameters, super().fit(parameters, config))

    return Changed


def plus(reply: Any, number: float) -> Any:
    return [w + np.float32(number) for w in reply[0]], *reply[1:]


def seeds(client: Any, received: Any, reply: Any) -> Any:
    np.random.seed(0)  # noqa: NPY002
    return reply


def writes(client: Any, received: Any, reply: Any) -> Any:
    received[0].setflags(write=True)
    received[0] += 1
    return reply


def in_itself(client: Any, received: Any, reply: Any) -> Any:
    client.times = getattr(client, "times", 0) + 1
    return plus(reply, client.times)


def in_its_class(client: Any, received: Any, reply: Any) -> Any:
    type(client).times = getattr(type(client), "times", 0) + 1
    return plus(reply, client.times)


def in_its_context(client: Any, received: Any, reply: Any) -> Any:
    times = client.context.state.metric_records.setdefault("times", MetricRecord({"asked": 0}))
    times["asked"] += 1
    return plus(reply, times["asked"])


class Changing(Plain):
    """Evaluation changes what it trains on."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return plus(super().fit(parameters, config), len(self.context.state.metric_records))

    def evaluate(self, parameters: Any, config: Any) -> Any:
        self.context.state["seen"] = MetricRecord({"seen": 1})
        return super().evaluate(parameters, config)


class NotANumber(Plain):
    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float("nan"), 7, {}


PROBLEMS, MODEL = quadratics(3), Border(Linear())


def of_ours(kind: type[Any]) -> Callable[[Context], Any]:
    def make(context: Context) -> Any:
        me = id_of(context)
        problem = PROBLEMS[me].problem(MODEL)
        return kind(problem, client_id=me, test=problem, store=ContextStore(context))

    return make


class Unbiased(FedADMMClient):
    """It divides by one less than its number of samples."""

    def step(self, *arguments: Any) -> Any:
        step = super().step(*arguments)
        return step._replace(upload=step.upload / (len(self.problem) - 1))


class Silent(DittoClient):
    def evaluate(self, *arguments: Any) -> Any:
        loss, samples, metrics = super().evaluate(*arguments)
        return loss, samples, {n: v for n, v in metrics.items() if n != "own-loss"}


CLIENT_FAULTS: list[tuple[str, Any, str]] = [
    ("trains", of_fit(lambda c, w, r: (w, *r[1:])), "uploads the arrays that it received"),
    ("trains", of_fit(lambda c, w, r: 1 / 0), "no client answers a train request: ZeroDiv"),
    (
        "form",
        of_fit(lambda c, w, r: ([w.astype(float) for w in r[0]], *r[1:])),
        r"0 is float64\[3\] in the upload of client 0, float32\[3\] in its",
    ),
    ("form", of_fit(lambda c, w, r: plus(r, np.nan)), r"0 holds \[nan\] in the upload of client 0"),
    ("form", of_fit(lambda c, w, r: (r[0], 0, {})), "num-examples is 0, which must be above 0"),
    (
        "same_request",
        of_fit(lambda c, w, r: plus(r, np.random.default_rng().random())),
        r"is \S+ in client 0's reply 1 in the second run, \S+ in the first",
    ),
    (
        "global_generators",
        of_fit(lambda c, w, r: plus(r, torch.rand(()).item())),
        r"is \S+ in client 0's reply 1 if the generators begin with seed 1, \S+ with seed 0",
    ),
    ("leaves_generators", of_fit(seeds), r"the next draw of numpy is \S+ after training, \S+ "),
    ("received_arrays", of_fit(writes), r"array 0\[\d\] is \S+ among those received, after fit"),
    ("other_clients", of_fit(in_its_class), r"is \S+ after other clients' work, \S+ before it"),
    ("one_object", of_fit(in_itself), r"is \S+ in .* of one object, \S+ of a new one a request"),
    ("lost_replies", of_fit(in_its_context), r"is \S+ if replies are lost, \S+ if these clients"),
    ("late_replies", of_fit(in_its_context), r"is \S+ if replies are late, \S+ if these clients"),
    ("one_sample", of_ours(Unbiased), "fit ended with|holds .* in the upload, not finite"),
    ("evaluation", Changing, r"is \S+ in .* if clients evaluate, \S+ if they do not"),
    ("evaluation", NotANumber, "client 0's loss is nan"),
    ("personalized_model", of_ours(Silent), "own-loss of client 0 is missing in round 1"),
]


@pytest.mark.parametrize(("name", "make", "said"), CLIENT_FAULTS, ids=lambda value: str(value)[:20])
def test_a_law_of_clients_catches_a_planted_fault(name: str, make: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=f"^{name}: (.|\n)*{said}"):
        check_client(make, laws=law(name, CLIENT_LAWS))


def test_every_law_of_clients_has_its_fault() -> None:
    assert {name for name, *_ in CLIENT_FAULTS} == {one.__name__ for one in CLIENT_LAWS}


def new_module(context: Context) -> AnyAlgorithmClient:
    """Return a client whose module is drawn anew for each message, as the README's is."""
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(id_of(context)))
    y = (x[:, 0] > x[:, 1]).long()
    return AnyAlgorithmClient(Problem(nn.Linear(2, 2), nn.functional.cross_entropy, x, y))


@pytest.mark.parametrize(
    ("make", "without"),
    [
        (new_module, {"evaluation", "personalized_model"}),
        (Plain, {"one_sample", "personalized_model"}),
        (of_ours(AnyAlgorithmClient), {"personalized_model"}),
        (of_ours(DittoClient), set()),
    ],
    ids=["new-module", "plain", "any", "ditto"],
)
def test_sound_clients_pass(make: Any, without: set[str]) -> None:
    findings = check_client(make)
    assert {one.law for one in findings if one.outcome == "not applicable"} == without


def test_a_client_without_parameters_needs_an_initial_model() -> None:
    class Bare(Plain):
        def get_parameters(self, config: Any) -> Any:
            return []

    with pytest.raises(ValueError, match="initial must be given, as get_parameters returns no"):
        check_client(Bare)
    initial = ArrayRecord({"w": Array(np.ones(3, np.float32))})
    assert check_client(Bare, initial=initial, laws=law("trains", CLIENT_LAWS))


@pytest.mark.slow
def test_strategies_of_this_package_are_checked_with_its_own_clients() -> None:
    def make(**options: Any) -> FedADMM:
        return FedADMM(rho=0.5, **options)

    findings = {one.law: one.outcome for one in check_strategy(make)}
    assert findings.pop("wrapper") == "not applicable"  # FedADMM refuses it
    assert {*findings.values()} == {"passed"}


@pytest.mark.parametrize(("p", "outcome"), [(0.6, "passed"), (0.999, "not applicable")])
def test_a_run_of_fewer_rounds_of_communication_is_resumed_too(p: float, outcome: str) -> None:
    def make(**options: Any) -> FedPD:
        return FedPD(p=p, **options)

    (finding,) = check_strategy(make, laws=law("resume"))
    assert finding.outcome == outcome


# ---- the page ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_says_what_the_checks_find_of_flowers_strategies() -> None:
    page = of_flower.PAGE.read_text()
    version, count = re.findall(r"^Flower ([\d.]+), [\d-]{10}, (\d+) strategies:", page, re.M)[0]
    assert int(count) == len(of_flower.STRATEGIES)
    named = {one for one in flowers.__all__ if one not in ("Strategy", "Result")}
    left_out = {"FedXgbBagging", "FedXgbCyclic"}
    wrappers = {name for name in named if name.startswith("DifferentialPrivacy")}
    assert named - wrappers - left_out <= {*of_flower.STRATEGIES}
    assert all(name in page for name in left_out)
    if version != flwr.__version__:
        pytest.skip(f"the page is of Flower {version}")
    shown = of_flower.table(of_flower.found())
    assert shown in page
