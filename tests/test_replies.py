"""Which replies count: of foreign clients, of another layout, of any size; and when to give up.

The mistakes that these laws are written against: ties counted per name, or not compared; the
layout's roles ignored; a foreign reply taken or refused for every algorithm; each limit of a size
dropped; rounds without answers counted, one client enough, a usable reply not resetting the count,
causes told per client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
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
from flwr.clientapp import ClientApp
from laws import START, TABLE, Row, every_algorithm, local
from problems import (
    CLIENT_OF,
    DIM,
    Linear,
    grid,
    half_mean_square,
    make_client_app,
    quadratics,
    to_record,
    to_vector,
)
from torch import Tensor, nn

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    FedAvgClient,
    FlatModel,
    Problem,
    client_app,
    client_id,
)
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FedAvg, NothingUsable
from fl_strategies.core.layout import Layout
from fl_strategies.server.wire import MAX_METRICS, MAX_NAME, MAX_NUMBERS, MAX_TEXT

Tamper = Callable[[RecordDict], None]


def vanilla(**words: str) -> ClientApp:
    """Return an app as in Flower's quickstart: it moves the model a little and says no more.

    ``words`` are what it reports beside its metrics.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        trained = ArrayRecord({name: Array(0.9 * a.numpy()) for name, a in arrays.items()})
        numbers = MetricRecord({"num-examples": 7, "train-loss": 1.0})
        content = RecordDict({"arrays": trained, "metrics": numbers})
        if words:
            content["words"] = ConfigRecord(dict(words))
        return Message(content, reply_to=message)

    return app


def lines(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if about in r.getMessage()]


# ---- clients of another make --------------------------------------------------------------------


@every_algorithm
def test_a_client_that_names_no_algorithm_is_taken_where_that_is_right_and_refused_elsewhere(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = row.strategy(local=local(), node_wait=1.0)
    run = lambda: strategy.start(InProcessGrid(vanilla(), 2), to_record(START), 4)  # noqa: E731
    if row.name in ("fedavg", "fedprox"):
        np.testing.assert_allclose(to_vector(run().arrays), 0.9**4 * START, rtol=1e-12)
        (warning,) = lines(caplog, "does not say which algorithm")
        assert "['epochs', 'lr', 'solver']" in warning
        assert ("proximal-mu" in warning) == (row.name == "fedprox")
    else:
        with pytest.raises(NothingUsable) as error:
            run()
        for part in (f"needs clients that run {row.name!r}", "AnyAlgorithmClient", "2 clients"):
            assert part in str(error.value)


def test_fedavg_without_local_settings_takes_any_client_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    FedAvg(fraction_evaluate=0.0).start(InProcessGrid(vanilla(), 2), to_record(START), 1)
    assert not lines(caplog, "does not say")


@every_algorithm
def test_a_user_can_say_that_a_client_of_another_make_implements_the_algorithm(row: Row) -> None:
    """On either side; numbers that the algorithm needs and the client does not report are named."""
    for app, options in (
        (vanilla(), {"assume_algorithm": True}),
        (vanilla(algorithm=row.name), {}),
    ):
        strategy = row.strategy(local=local(), node_wait=1.0, **options)
        needs = [f"metric {name!r} must be" for name in strategy.scalar_bounds]
        run = lambda s, a: s.start(InProcessGrid(a, 2), to_record(START), 3)  # noqa: E731
        if needs:
            with pytest.raises(NothingUsable) as error:
                run(strategy, app)
            assert any(need in str(error.value) for need in needs)
        else:
            assert len(run(strategy, app).train_metrics_clientapp) > 0


@every_algorithm
def test_a_reply_of_another_algorithm_is_refused_with_both_names(row: Row) -> None:
    other = "fedavg" if row.name != "fedavg" else "fedprox"
    strategy = row.strategy(local=local(), node_wait=1.0, assume_algorithm=True)
    with pytest.raises(NothingUsable, match=f"ran '{other}' and .* needs '{row.name}'"):
        strategy.start(InProcessGrid(vanilla(algorithm=other), 2), to_record(START), 4)


def test_a_client_of_one_algorithm_refuses_requests_of_another_before_it_trains() -> None:
    federation = grid(quadratics(2), client=FedAvgClient)
    strategy = STRATEGIES["fedadmm"](fraction_evaluate=0.0, local=local())
    with pytest.raises(NothingUsable, match="asks for 'fedadmm', and FedAvgClient runs 'fedavg'"):
        strategy.start(federation, to_record(START), 4)


# ---- layouts ------------------------------------------------------------------------------------


class Frozen(Linear):
    """``Linear`` whose tail is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.tail.requires_grad_(False)


class Tied(Linear):
    """``Linear`` whose head has a second name and place: x . (head, tail) + x . (head, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.head

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([(self.head + self.again).reshape(-1), self.tail])
        summed: Tensor = self.out(x * weights)
        return summed


class Doubled(Linear):
    """What ``Tied`` computes, with one name for each parameter."""

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.out(x * torch.cat([2 * self.head.reshape(-1), self.tail]))
        return summed


def federation_of(module: type[nn.Module], clients: int = 3) -> tuple[InProcessGrid, FlatModel]:
    problems = quadratics(clients)

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        q, model = problems[me], FlatModel(module(), head="out")
        problem = Problem(model, half_mean_square, torch.tensor(q.X), torch.tensor(q.y))
        return AnyAlgorithmClient(problem, client_id=me, store=ContextStore(context))

    return InProcessGrid(client_app(client_fn), clients), FlatModel(module(), head="out")


def record_of(model: FlatModel) -> ArrayRecord:
    with torch.no_grad():
        model.vector.copy_(torch.tensor(START)[: len(model.vector)])
    return ArrayRecord({n: Array(t.numpy()) for n, t in model.module.state_dict().items()})


@every_algorithm
def test_a_tied_weight_is_one_parameter_under_however_many_names_it_travels(row: Row) -> None:
    found = []
    for module in (Tied, Doubled):
        federation, model = federation_of(module)
        settings = local(lr=0.02)
        strategy = row.strategy(local=settings, clipping_norm=None, **model.layout_options)
        found.append(strategy.start(federation, record_of(model), 3).arrays)
    tied, doubled = found
    np.testing.assert_array_equal(tied["again"].numpy(), tied["head"].numpy())
    assert list(tied) == ["head", "tail", "again"]
    for name in doubled:
        np.testing.assert_allclose(tied[name].numpy(), doubled[name].numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fedadmm", "scaffold"])
def test_a_bound_on_the_norm_counts_a_tied_weight_once(name: str) -> None:
    found = []
    for module in (Tied, Doubled):
        federation, model = federation_of(module)
        strategy = STRATEGIES[name](
            clipping_norm=0.8, fraction_evaluate=0.0, local=local(lr=0.02), **model.layout_options
        )
        result = strategy.start(federation, record_of(model), 2)
        found.append((result.arrays["head"].numpy(), dict(result.train_metrics_clientapp[1])))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-12)
    assert found[0][1]["clients-used"] == found[1][1]["clients-used"]


@every_algorithm
@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Frozen, "keeps ['tail'] at home"),
        (Tied, "has the tied parameters [('head', 'again')]"),
    ],
)
def test_a_model_whose_layout_the_strategy_was_not_told_is_refused_by_name(
    row: Row, module: type[nn.Module], said: str
) -> None:
    federation, model = federation_of(module)
    strategy = row.strategy(local=local())
    with pytest.raises(NothingUsable) as error:
        strategy.start(federation, record_of(model), 4)
    for part in (said, "layout_options", "3 clients"):
        assert part in str(error.value)


def test_an_array_that_the_strategy_wrongly_takes_for_a_buffer_is_named() -> None:
    federation, model = federation_of(Linear)
    with pytest.raises(NothingUsable, match=r"it trains \['tail'\].*leave these out of `buffers`"):
        FedAvg(buffers=["tail"], fraction_evaluate=0.0, local=local()).start(
            federation, record_of(model), 4
        )


def test_copies_of_a_tied_weight_that_differ_are_refused_on_both_sides() -> None:
    federation, model = federation_of(Tied)

    def torn(request: Message, reply: Message) -> Message:
        if CLIENT_OF[request.metadata.dst_node_id] == 1 and reply.content.array_records:
            reply.content["arrays"]["again"] = Array(np.ones((2, 2)))
        return reply

    federation.fault = torn
    options = {"fraction_evaluate": 0.0, "local": local(), **model.layout_options}
    metrics = FedAvg(**options).start(federation, record_of(model), 1).train_metrics_clientapp[1]
    assert (metrics["clients-used"], metrics["clients-rejected"]) == (2, 1)
    initial = record_of(model)
    initial["again"] = Array(np.ones((2, 2)))
    with pytest.raises(ValueError, match="arrays 'head' and 'again' of the initial model differ"):
        FedAvg(**options).start(federation, initial, 1)
    with pytest.raises(ValueError, match="'head' and 'again' are one tied parameter"):
        model.load([array.numpy() for array in initial.values()])


@pytest.mark.parametrize(
    ("ties", "said"),
    [
        ([["head", "body"]], r"ties: \['body'\] are not among the model's arrays"),
        ([["head", "state"]], r"ties: \['state'\] are among `buffers`"),
        ([["head"]], "each group needs two names or more"),
        ([["head", "again"], ["again", "head"]], "each name once"),
        ([["head", "tail"]], "arrays 'head' and 'tail' of the initial model differ"),
    ],
)
def test_what_is_no_tie_is_refused(ties: list[list[str]], said: str) -> None:
    arrays = {name: np.ones(2) for name in ("head", "again", "state")} | {"tail": np.zeros(2)}
    with pytest.raises(ValueError, match=said):
        Layout.of(arrays, ["state"], ties)


# ---- sizes --------------------------------------------------------------------------------------


def numbers(content: RecordDict, more: dict[str, Any]) -> None:
    content["metrics"] = MetricRecord({**content["metrics"], **more})


def words(content: RecordDict, more: dict[str, Any]) -> None:
    content["config"] = ConfigRecord({**content.config_records.get("config", {}), **more})


OVERSIZED: dict[str, tuple[Tamper, str]] = {
    "metrics": (
        lambda c: numbers(c, {f"m{i}": 1.0 for i in range(MAX_METRICS)}),
        f"metrics, at most {MAX_METRICS} are taken",
    ),
    "entries": (
        lambda c: numbers(c, {"list": [1.0] * (MAX_NUMBERS + 1)}),
        f"at most {MAX_NUMBERS} are taken",
    ),
    "name": (
        lambda c: numbers(c, {"m" * (MAX_NAME + 1): 1.0}),
        f"has {MAX_NAME + 1} characters, at most {MAX_NAME}",
    ),
    "texts": (
        lambda c: words(c, {f"w{i}": "w" for i in range(MAX_METRICS + 1)}),
        f"texts, at most {MAX_METRICS} are taken",
    ),
    "nonce": (
        lambda c: words(c, {"state-nonce": "n" * (MAX_TEXT + 1)}),
        f"the text 'state-nonce' has {MAX_TEXT + 1} characters, at most {MAX_TEXT}",
    ),
    "bytes": (
        lambda c: words(c, {"blob": [b"b" * MAX_TEXT, b"b"]}),
        f"the text 'blob' has {MAX_TEXT + 1} characters",
    ),
    "layout": (lambda c: words(c, {"layout": "[" * 5000}), "the text 'layout' has 5000"),
}


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize(("tamper", "reason"), OVERSIZED.values(), ids=OVERSIZED)
def test_a_reply_larger_than_a_client_needs_is_left_out(
    tamper: Tamper, reason: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(request: Message, reply: Message) -> Message:
        if CLIENT_OF[request.metadata.dst_node_id] == 1 and request.metadata.message_type == kind:
            tamper(reply.content)
        return reply

    FedAvg(local=local()).start(grid(quadratics(3), fault=fault), to_record(START), 1)
    (line,) = lines(caplog, "left out")
    assert reason in line
    assert len(line) < 700


def test_a_round_keeps_the_metrics_that_most_clients_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fault(request: Message, reply: Message) -> Message:
        client = CLIENT_OF[request.metadata.dst_node_id]
        if reply.content.metric_records:
            numbers(reply.content, {f"m{client}-{i}": 1.0 for i in range(MAX_METRICS // 2)})
        return reply

    strategy = FedAvg(local=local(), fraction_evaluate=0.0)
    metrics = strategy.start(grid(quadratics(3), fault=fault), to_record(START), 1)
    kept = metrics.train_metrics_clientapp[1]
    means = [name for name in kept if f"{name}-mean" in kept]
    assert len(means) == MAX_METRICS
    assert {"train-loss", "steps", "epochs"} <= set(means)
    (line,) = lines(caplog, "metrics of clients are left out")
    assert int(line.split()[0]) == 3 * (MAX_METRICS // 2) + 3 - MAX_METRICS


@pytest.mark.parametrize("roles", ["[" * 900, '{"untrained":[7],"tied":[]}', "{}", "7", "\n"])
def test_a_layout_that_cannot_be_read_is_one_reply_left_out(
    roles: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(request: Message, reply: Message) -> Message:
        if CLIENT_OF[request.metadata.dst_node_id] == 1:
            words(reply.content, {"layout": roles})
        return reply

    federation = grid(quadratics(3), fault=fault)
    FedAvg(local=local(), fraction_evaluate=0.0).start(federation, to_record(START), 1)
    (line,) = lines(caplog, "left out")
    assert "its layout cannot be read" in line


# ---- giving up ----------------------------------------------------------------------------------


def broken(which: Callable[[int, int], bool], silent: Callable[[int, int], bool]) -> Any:
    """Return a fault: ``which`` (client, round) raises, ``silent`` never answers."""

    def fault(request: Message, reply: Message) -> Message | None:
        if request.metadata.message_type != "train":
            return reply
        client = CLIENT_OF[request.metadata.dst_node_id]
        number = int(request.content["config"]["server-round"])  # type: ignore[call-overload]
        if silent(client, number):
            return None
        if which(client, number):
            return Message(Error(2, f"disk {client} of client {client} is full"), reply_to=request)
        return reply

    return fault


def always(client: int, number: int) -> bool:
    return True


def never(client: int, number: int) -> bool:
    return False


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_a_run_in_which_nothing_can_be_used_ends_and_tells_each_cause_once(limit: int) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, local=local(), max_unusable_rounds=limit)
    with pytest.raises(NothingUsable) as error:
        strategy.start(grid(quadratics(3), fault=broken(always, never)), to_record(START), 9)
    assert f"no reply of {limit} rounds in a row was usable: 3 clients" in str(error.value)
    assert str(error.value).count("is full") == 1


def test_different_causes_are_all_told() -> None:
    def fault(request: Message, reply: Message) -> Message:
        client = CLIENT_OF[request.metadata.dst_node_id]
        why = "out of memory" if client == 0 else "no such file"
        return Message(Error(2, why), reply_to=request) if reply.content.array_records else reply

    with pytest.raises(NothingUsable) as error:
        FedAvg(fraction_evaluate=0.0).start(grid(quadratics(3), fault=fault), to_record(START), 9)
    assert "client 0: error 2: out of memory" in str(error.value)
    assert "2 clients [1, 2]: error 2: no such file" in str(error.value)


UNFINISHED: dict[str, tuple[Any, dict[str, Any]]] = {
    "nobody answers": (broken(never, always), {}),
    "one client of three answers": (broken(always, lambda c, t: c != 1), {}),
    "a usable reply every third round": (broken(lambda c, t: t % 3 > 0, never), {}),
    "one usable reply": (broken(lambda c, t: c > 0, never), {}),
}


@pytest.mark.parametrize(("fault", "options"), UNFINISHED.values(), ids=UNFINISHED)
def test_a_run_goes_on_while_something_may_be_usable(fault: Any, options: dict[str, Any]) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, local=local(), **options)
    strategy.start(grid(quadratics(3), fault=fault), to_record(START), 8)
    assert len(strategy.result.train_metrics_clientapp) == 8


def test_the_only_client_there_is_may_end_a_run() -> None:
    with pytest.raises(NothingUsable, match="usable: client 0: "):
        FedAvg(fraction_evaluate=0.0).start(
            grid(quadratics(1), fault=broken(always, never)), to_record(START), 9
        )


def test_rounds_without_an_answer_neither_count_nor_start_anew() -> None:
    fault = broken(always, lambda client, number: number in (2, 4))
    strategy = FedAvg(fraction_evaluate=0.0, local=local())
    with pytest.raises(NothingUsable, match="3 rounds in a row"):
        strategy.start(grid(quadratics(3), fault=fault), to_record(START), 9)
    assert strategy.result.train_metrics_clientapp.keys() == {
        1,
        2,
        3,
        4,
    }  # the fifth was one too many


FORGED: dict[str, Tamper] = {
    "a clipping norm of its own": lambda c: numbers(c, {"clipping-norm": 0.0}),
    "wrong checksums": lambda c: words(c, {"checksums": "0 0"}),
    "no examples": lambda c: numbers(c, {"num-examples": 0}),
}


@pytest.mark.parametrize("row", [row for row in TABLE if row.partial], ids=lambda row: row.name)
@pytest.mark.parametrize("forge", [*FORGED.values(), None], ids=[*FORGED, "an error"])
def test_no_client_that_is_asked_alone_ends_a_run(row: Row, forge: Tamper | None) -> None:
    """In the first rounds, before anything was acknowledged."""

    def fault(request: Message, reply: Message) -> Message:
        if CLIENT_OF[request.metadata.dst_node_id] != 0 or not reply.content.array_records:
            return reply
        if forge is None:
            return Message(Error(2, "made up"), reply_to=request)
        forge(reply.content)
        return reply

    federation = grid(quadratics(2), fault=fault)
    strategy = row.strategy(fraction_train=0.5, local=local(), seed=3)
    strategy.start(federation, to_record(START), 6)
    assert len(strategy.result.train_metrics_clientapp) == 6


def test_what_was_wrong_with_a_first_answer_is_told_and_not_that_there_was_a_second() -> None:
    class Twice(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                if "arrays" in reply.content:
                    reply.content["arrays"] = to_record(np.full(DIM, np.nan))
            return replies + [reply for reply in replies if "arrays" in reply.content]

    one = FedAvg(fraction_evaluate=0.0, max_unusable_rounds=1, local=local())
    with pytest.raises(NothingUsable, match="array 'head' is not finite"):
        one.start(Twice(make_client_app(quadratics(3)), 3), to_record(START), 2)


def test_a_request_out_of_range_is_refused_by_the_client_in_the_strategys_words() -> None:
    one = STRATEGIES["fedadmm"](fraction_evaluate=0.0, local=local(), max_unusable_rounds=1)
    one.rho = -1.0  # past the constructor's check
    with pytest.raises(NothingUsable, match=r"rho must be > 0, got -1\.0"):
        one.start(grid(quadratics(3)), to_record(START), 2)
