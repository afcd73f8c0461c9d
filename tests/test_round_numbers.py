"""A round has one number, wherever it is named, and a round that changes nothing says so."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Message
from laws import START, Row, local, one_of_each_mechanism, quiet
from problems import grid, quadratics, to_record, to_vector
from resumed import FEDADMM, run, strategy

from clients.node.in_process import Fault
from fl_strategies import FedAvg, History, RoundInfo
from fl_strategies.core.files import read_lines
from fl_strategies.core.schedules import at

DECAY = {1: 0.1, 2: 0.08, 3: 0.06, 5: 0.04}


def trains(request: Message) -> bool:
    return request.metadata.message_type == "train"


def lose_in(rounds: Collection[int]) -> Fault:
    """Lose every training reply of these rounds."""

    def fault(request: Message, reply: Message) -> Message | None:
        if not trains(request):
            return reply
        number = request.content.config_records["config"]["server-round"]
        return None if number in rounds else reply

    return fault


@one_of_each_mechanism
def test_log_callbacks_results_requests_and_schedules_count_alike_over_two_starts(
    row: Row, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    sent, seen, evaluated = dict[int, float](), list[RoundInfo](), list[int]()

    def note(request: Message, reply: Message) -> Message:
        if trains(request):
            config = request.content.config_records["config"]
            sent[int(config["server-round"])] = float(config["lr"])
        return reply

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        evaluated.append(server_round)

    callbacks = [seen.append, History(tmp_path / "history.jsonl")]
    options = {"p": 0.5} if row.name in ("fedpd", "fedpd-vr") else {}
    settings = {**local(), "lr": DECAY, "fine-tune": "train"}  # so that all are told of lr
    one = row.strategy(local=settings, callbacks=callbacks, fraction_evaluate=0.0, **options)
    federation = grid(quadratics(4), fault=note)
    first = one.start(federation, to_record(START), 3, evaluate_fn=evaluate)
    second = one.start(federation, first.arrays, 4, evaluate_fn=evaluate)

    done = len(first.train_metrics_clientapp)
    last = done + len(second.train_metrics_clientapp)
    rounds = [*range(1, last + 1)]
    assert [*first.train_metrics_clientapp, *second.train_metrics_clientapp] == rounds
    assert [info.server_round for info in seen] == rounds
    assert [info.num_rounds for info in seen] == [done] * done + [last] * (last - done)
    assert [row["round"] for row in read_lines(tmp_path / "history.jsonl")] == rounds
    assert evaluated == [*range(done + 1), *range(done, last + 1)]
    printed = [int(n) for n in re.findall(r" round (\d+)/\d+", caplog.text)]
    assert printed == rounds
    assert sent == {number: at(DECAY, number) for number in sent}
    assert sent.keys() <= {*rounds}
    assert len(sent) > 2 or one.overlaps


@pytest.mark.parametrize("lost", [{1}, {2, 3}, {1, 2, 3}], ids=str)
def test_a_result_names_the_rounds_that_changed_nothing(
    lost: Collection[int], caplog: pytest.LogCaptureFixture
) -> None:
    models = [START]

    def note(info: RoundInfo) -> None:
        models.append(to_vector(info.arrays))
        assert info.metrics.get("skipped", 0) == (info.server_round in lost)

    one = quiet(FedAvg, callbacks=[note])
    result = one.start(grid(quadratics(2), fault=lose_in(lost)), to_record(START), 3)
    changed = [(a != b).any() for a, b in pairwise(models)]
    assert result.skipped == [*lost] == [n for n, yes in enumerate(changed, 1) if not yes]
    assert repr(result).startswith("Skipped: ")
    assert (f"{[*lost]} of 3: the model is as it was" in repr(result)) == (len(lost) == 3)
    assert ("every round was skipped (3)" in caplog.text) == (len(lost) == 3)


def test_a_result_without_such_rounds_is_printed_as_flowers(tmp_path: Path) -> None:
    result = quiet(FedAvg).start(grid(quadratics(2)), to_record(START), 2)
    assert result.skipped == []
    assert repr(result).startswith("Global Arrays:")


def test_a_resumed_run_remembers_them(tmp_path: Path) -> None:
    run(strategy(FEDADMM, tmp_path), tmp_path, 3, fault=lose_in({2}))
    assert run(strategy(FEDADMM, tmp_path), tmp_path, 4).skipped == [2]
