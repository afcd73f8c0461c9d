"""Which replies count: of foreign clients, and of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from laws import START, Row, every_algorithm, local
from problems import CLIENT_OF, DIM, grid, make_client_app, quadratics, to_record, to_vector
from tampering import Tamper, numbers, tampered, words

from clients import FedAvgClient
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FedAvg, NothingUsable
from fl_strategies.messages.wire import MAX_METRICS, MAX_NAME, MAX_NUMBERS, MAX_TEXT


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


def ran_by(row: Row) -> str:
    """Return the algorithm that the clients run: another one if the row's changes the server."""
    return STRATEGIES[row.name].runs or row.name


# ---- clients of another make --------------------------------------------------------------------


@every_algorithm
def test_a_client_that_names_no_algorithm_is_taken_where_that_is_right_and_refused_elsewhere(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = row.strategy(local=local(), node_wait=1.0, max_unusable_rounds=1)
    run = lambda: strategy.start(InProcessGrid(vanilla(), 2), to_record(START), 4)  # noqa: E731
    if row.name in ("fedavg", "fedprox"):
        np.testing.assert_allclose(to_vector(run().arrays), 0.9**4 * START, rtol=1e-12)
        (warning,) = lines(caplog, "does not say which algorithm")
        assert "['epochs', 'lr', 'solver']" in warning
        assert ("proximal-mu" in warning) == (row.name == "fedprox")
    else:
        with pytest.raises(NothingUsable) as error:
            run()
        for part in (f"needs clients that run {ran_by(row)!r}", "AnyAlgorithmClient", "2 clients"):
            assert part in str(error.value)


def test_fedavg_without_local_settings_takes_any_client_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    FedAvg(fraction_evaluate=0.0).start(InProcessGrid(vanilla(), 2), to_record(START), 1)
    assert not lines(caplog, "does not say")


@pytest.mark.parametrize(
    ("said", "kept"), [("mps", "mps"), ("cuda\nERROR", ""), ("ｃｕｄａ", ""), ("c" * 17, "")]
)
def test_a_device_that_is_noted_is_a_short_word(said: str, kept: str) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(InProcessGrid(vanilla(device=said), 2), to_record(START), 1)
    assert {*strategy.run.devices.values()} == ({kept} if kept else set())


@every_algorithm
def test_a_user_can_say_that_a_client_of_another_make_implements_the_algorithm(row: Row) -> None:
    """On either side; numbers that the algorithm needs and the client does not report are named."""
    for app, options in (
        (vanilla(), {"assume_algorithm": True}),
        (vanilla(algorithm=ran_by(row)), {}),
    ):
        options |= {"local": local(), "node_wait": 1.0, "max_unusable_rounds": 1}
        strategy = row.strategy(**options)
        needs = [f"metric {name!r} is missing" for name in strategy.scalar_bounds]
        run = lambda s, a: s.start(InProcessGrid(a, 2), to_record(START), 3)  # noqa: E731
        if needs:
            with pytest.raises(NothingUsable) as error:
                run(strategy, app)
            assert any(need in str(error.value) for need in needs)
        else:
            assert len(run(strategy, app).train_metrics_clientapp) > 0


@every_algorithm
def test_a_reply_of_another_algorithm_is_refused_with_both_names(row: Row) -> None:
    other = "fedavg" if ran_by(row) != "fedavg" else "fedprox"
    options = {"node_wait": 1.0, "assume_algorithm": True, "max_unusable_rounds": 1}
    strategy = row.strategy(local=local(), **options)
    with pytest.raises(NothingUsable, match=f"ran '{other}' and .* needs '{ran_by(row)}'"):
        strategy.start(InProcessGrid(vanilla(algorithm=other), 2), to_record(START), 4)


def test_a_client_of_one_algorithm_refuses_requests_of_another_before_it_trains() -> None:
    federation = grid(quadratics(2), client=FedAvgClient)
    strategy = STRATEGIES["fedadmm"](fraction_evaluate=0.0, local=local())
    with pytest.raises(NothingUsable, match="asks for 'fedadmm', and FedAvgClient runs 'fedavg'"):
        strategy.start(federation, to_record(START), 4)


# ---- sizes --------------------------------------------------------------------------------------

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
    on = tampered(quadratics(3), 1, tamper, kind)
    FedAvg(local=local()).start(on, to_record(START), 1)
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


# ---- what is told -------------------------------------------------------------------------------


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


# ---- lists --------------------------------------------------------------------------------------


def test_lists_are_averaged_as_flower_averages_them_and_odd_ones_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[RecordDict] = []

    def fault(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            client = CLIENT_OF[request.metadata.dst_node_id]
            record = reply.content.metric_records["metrics"]
            record["recall"] = [0.1 * client, 1.0, -2.0 * client]
            record["uneven"] = [3.0] * (3 if client else 2)
            kept = {name: record[name] for name in ("recall", "num-examples")}
            seen.append(RecordDict({"metrics": MetricRecord(kept)}))
        return reply

    one = FedAvg(local=local(), fraction_evaluate=0.0)
    result = one.start(grid(quadratics(4), fault=fault), to_record(START), 1)
    flowers = aggregate_metricrecords(seen, "num-examples")
    found = result.train_metrics_clientapp[1]
    np.testing.assert_allclose(found["recall"], flowers["recall"], rtol=1e-14)  # type: ignore[arg-type]
    assert found["uneven"] == [3.0, 3.0, 3.0]
    assert "lists of another length than most are left out: ['uneven']" in caplog.text
