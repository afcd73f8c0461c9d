"""What a request tells any client to heed: a reply repeats it, or the log names its client once."""

from __future__ import annotations

import re
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hosted import federation
from laws import START, local
from problems import grid, quadratics, to_record

from clients.node.in_process import InProcessGrid
from fl_strategies import SCAFFOLD, FedAvg, NothingUsable
from fl_strategies.messages.heeding import IN_EVALUATION, IN_TRAINING
from fl_strategies.parts import BFloat16, Clock, Deadline, TopK

TOLD: dict[str, dict[str, Any]] = {
    "compression": {"compression": TopK(share=0.5)},
    "download": {"download": BFloat16()},
    "step-limit": {"clock": Clock(step=1.0), "pace": Deadline(seconds=3.0, cut=True)},
    "checksums": {"buffers": ["tail"]},
    "fine-tune": {"local": local() | {"fine-tune": "train"}, "fraction_evaluate": 1.0},
}
"""By key, a strategy whose requests have it."""


def plain(words: dict[str, str] | None = None) -> ClientApp:
    """Return clients without a library of ours, which send back what they got."""
    app = ClientApp()

    def reply(message: Message, **content: Any) -> Message:
        numbers = MetricRecord({"num-examples": 1, "eval-loss": 0.5})
        return Message(
            RecordDict({"metrics": numbers, "config": ConfigRecord(words or {}), **content}),
            reply_to=message,
        )

    @app.train()
    def train(message: Message, context: Any) -> Message:
        arrays = {n: Array(a.numpy() + 1.0) for n, a in message.content["arrays"].items()}
        return reply(message, arrays=ArrayRecord(arrays))

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        return reply(message)

    return app


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "repeats" in r.getMessage()]


def test_no_key_is_missing_here() -> None:
    assert TOLD.keys() == {*IN_TRAINING, *IN_EVALUATION}


@pytest.mark.parametrize("key", TOLD)
def test_clients_that_ignore_a_key_are_named_once(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = FedAvg(**{"local": {}, "fraction_evaluate": 0.0, **TOLD[key]})
    strategy.start(InProcessGrid(plain(), 3), to_record(START), 2)
    (line,) = lines(caplog)
    assert line.startswith(f"no reply of 3 clients repeats {key!r}")


@pytest.mark.parametrize("key", ["compression", "step-limit", "fine-tune"])
def test_a_client_of_the_users_own_may_say_that_it_heeds_a_key(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"step-limit": "3", "fine-tune": "train"}
    options = {"local": {}, "fraction_evaluate": 0.0, **TOLD[key]}
    FedAvg(**options).start(InProcessGrid(plain(said), 3), to_record(START), 1)
    assert bool(lines(caplog)) == (key == "compression")


@pytest.mark.parametrize("shape", ["nodes of one", "2 hosts"])
@pytest.mark.parametrize("key", TOLD)
def test_clients_of_this_package_heed_all(
    key: str, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"local": local(), "fraction_evaluate": 0.0, **TOLD[key]}
    if key == "checksums":  # of all arrays, where changes are uploaded
        options.pop("buffers")
    strategy = (SCAFFOLD if key == "checksums" else FedAvg)(**options)
    strategy.start(federation(shape), to_record(START), 2)
    assert strategy.result.skipped == []
    assert lines(caplog) == []


def test_a_run_without_a_client_that_reads_its_download_says_so_at_its_end() -> None:
    strategy = FedAvg(download=BFloat16(), fraction_evaluate=0.0)
    with pytest.raises(NothingUsable, match=r"no client says that it reads bfloat16 \(download\)"):
        strategy.start(InProcessGrid(plain(), 2), to_record(START), 3)


def test_a_code_of_a_model_is_no_code_of_a_change() -> None:
    """A client that codes w - theta where changes are uploaded is refused."""

    def of_a_model(request: Message, reply: Message) -> Message:
        if words := reply.content.config_records.get("config"):
            asked = str(words["compression"])
            assert asked.startswith("changes: topk")
            words["compression"] = asked.removeprefix("changes: ")
        return reply

    strategy = SCAFFOLD(compression=TopK(share=0.5), local=local(), fraction_evaluate=0.0)
    told = re.escape("its codec is 'topk share=0.5', the one asked for 'changes: topk share=0.5'")
    with pytest.raises(NothingUsable, match=told):
        strategy.start(grid(quadratics(3), fault=of_a_model), to_record(START), 3)
