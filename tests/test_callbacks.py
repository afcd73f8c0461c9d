"""Callbacks: history, the best model, when to stop."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from laws import START, local, quiet
from problems import grid, quadratics, to_record, to_vector
from safetensors.numpy import load_file

from fl_strategies import BestModel, Checkpoints, EarlyStop, FedAvg, History, RoundInfo


def rounds(values: list[float], *, smaller: bool = False) -> list[RoundInfo]:
    """A run whose model in round t is t everywhere."""
    metric = "test-loss" if smaller else "test-accuracy"
    return [
        RoundInfo(t, len(values), to_record(np.full(5, float(t))), {metric: value, "seconds": 0.5})
        for t, value in enumerate(values, start=1)
    ]


def test_history_is_on_disk_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("of an earlier run\n")
    history = History(path)
    values = [0.25, 0.5, 0.125]
    for t, info in enumerate(rounds(values), start=1):
        assert history(info) is None
        lines = path.read_text().splitlines()
        assert [json.loads(line) for line in lines] == [
            {"round": i, "test-accuracy": value, "seconds": 0.5}
            for i, value in enumerate(values[:t], start=1)
        ]


@pytest.mark.parametrize(
    ("values", "smaller", "best_round"),
    [
        ([0.2, 0.7, 0.7, 0.3], False, 2),  # the first of equals
        ([0.2, 0.7, 0.1, 0.3], True, 3),
        ([-3.0, -2.0], False, 2),
        ([math.nan, 0.1, math.nan, 0.4, 0.2], False, 4),
        ([math.nan, 0.1, math.nan], True, 2),
    ],
)
def test_the_best_rounds_model_is_on_disk(
    tmp_path: Path, values: list[float], smaller: bool, best_round: int
) -> None:
    best = BestModel(tmp_path / "best.safetensors", smaller=smaller)
    for info in rounds(values, smaller=smaller):
        assert best(info) is None
    assert (best.best_round, best.best) == (best_round, values[best_round - 1])
    kept = load_file(tmp_path / "best.safetensors")
    np.testing.assert_array_equal(to_vector([kept["head"], kept["tail"]]), np.full(5, best_round))
    assert [path.name for path in tmp_path.iterdir()] == ["best.safetensors"]


@pytest.mark.parametrize(
    ("values", "settings", "stops"),
    [
        ([0.1, 0.5, 0.9, 0.2], {"target": 0.9}, 3),
        ([0.1, 0.5, 0.8, 0.2], {"target": 0.9}, None),
        ([3.0, 2.0, 1.0], {"target": 2.0, "smaller": True}, 2),
        ([0.1, 0.3, 0.2, 0.3, 0.4], {"patience": 2}, 4),  # an equal is no improvement
        ([0.1, 0.3, 0.2, 0.4, 0.3, 0.1], {"patience": 2}, 6),
        ([3.0, 2.0, 2.5], {"patience": 1, "smaller": True}, 3),
        ([math.nan, math.nan, 0.3, 0.2, math.nan], {"patience": 2}, 5),
        ([0.1, 0.3, 0.2, 0.1], {"patience": 3, "target": 0.3}, 2),
    ],
)
def test_training_stops_at_the_target_or_out_of_patience(
    values: list[float], settings: dict[str, Any], stops: int | None
) -> None:
    stop = EarlyStop(**settings)
    said = [stop(info) for info in rounds(values, smaller=settings.get("smaller", False))]
    expected = None if True not in said else said.index(True) + 1
    assert expected == stops


def test_a_stop_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a target, a patience, or both"):
        EarlyStop()
    with pytest.raises(ValueError, match="patience must be an integer >= 1, got 0"):
        EarlyStop(patience=0)


# ---- which metric -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "clients", "watched"),
    [
        (["test-accuracy"], ["accuracy"], "test-accuracy"),
        ([], ["accuracy"], "eval-accuracy"),
        (["centralized_accuracy"], ["accuracy"], "eval-accuracy"),
        (["accuracy"], ["eval_acc"], "finds neither test-accuracy nor eval-accuracy: give metric"),
        (["val_accuracy", "loss"], [], "finds neither test-accuracy nor eval-accuracy: give"),
    ],
    ids=str,
)
@pytest.mark.parametrize("callback", [BestModel, EarlyStop])
def test_a_callback_finds_the_runs_accuracy_or_says_in_round_one_what_there_is(
    callback: Any, server: list[str], clients: list[str], watched: str, tmp_path: Path
) -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(dict.fromkeys(server, 0.5))

    def rename(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "evaluate":
            count = reply.content.metric_records["metrics"]["num-examples"]
            found = {**dict.fromkeys(clients, 0.5), "num-examples": count}
            reply.content.metric_records["metrics"] = MetricRecord(found)
        return reply

    one = callback(tmp_path / "best") if callback is BestModel else callback(patience=9)
    strategy = FedAvg(local=local(), callbacks=[one], fraction_evaluate=float(bool(clients)))
    federation = grid(quadratics(2), fault=rename)
    start = functools.partial(strategy.start, federation, to_record(START), 3)
    if " " not in watched:
        start(evaluate_fn=evaluate)
        assert one.watched.metric == watched
        return
    with pytest.raises(ValueError, match=re.escape(watched)) as error:
        start(evaluate_fn=evaluate)
    assert [*strategy.result.train_metrics_clientapp] == [1]
    assert all(name in str(error.value) for name in (callback.__name__, "train-loss", *server))
    assert "clients-used" not in str(error.value)


@pytest.mark.parametrize("metric", [None, "test-accuracy"])
def test_rounds_that_the_server_does_not_test_are_passed_over(
    metric: str | None, tmp_path: Path
) -> None:
    accuracies = {0: 0.1, 4: 0.5, 8: 0.4, 12: 0.3}

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        found = accuracies.get(server_round)
        return None if found is None else MetricRecord({"test-accuracy": found})

    best, stop = BestModel(tmp_path / "best", metric), EarlyStop(metric, patience=2)
    strategy = quiet(FedAvg, callbacks=[best, stop])
    result = strategy.start(grid(quadratics(2)), to_record(START), 20, evaluate_fn=evaluate)
    assert [*result.train_metrics_clientapp] == [*range(1, 13)]
    assert (best.best_round, best.best) == (4, 0.5)


WAITING = {
    "BestModel": (lambda path, metric: BestModel(path / "best", metric), "nothing was saved"),
    "EarlyStop": (lambda path, metric: EarlyStop(metric, patience=1), "it could not end the run"),
    "Checkpoints": (lambda path, metric: Checkpoints(path / "kept", best=metric), "the best"),
}


@pytest.mark.parametrize("first", [3, 9])
@pytest.mark.parametrize("made", WAITING)
def test_a_metric_is_waited_for_and_the_end_says_if_it_never_came(
    made: str, first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The area under a curve is not a number while clients have seen one class alone."""
    caplog.set_level("INFO")
    make, otherwise = WAITING[made]
    one = make(tmp_path, "auc")  # type: ignore[no-untyped-call]
    parts: Any = {"checkpoints": one} if made == "Checkpoints" else {"callbacks": [one]}

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round < first:
            return MetricRecord({"aucs": 0.5, **({"auc": math.nan} if server_round == 2 else {})})
        return MetricRecord({"auc": 0.9 if server_round == first else 0.8})

    result = quiet(FedAvg, **parts).start(
        grid(quadratics(2)), to_record(START), 6, evaluate_fn=evaluate
    )
    never = f"{made}: no round reported 'auc' (did you mean 'aucs'?), and"
    assert sum(f"{made} waits for 'auc'" in message for message in caplog.messages) == 1
    assert any(never in m and otherwise in m for m in caplog.messages) == (first == 9)
    if first == 9:
        assert not (tmp_path / "best").exists()
    elif made == "EarlyStop":
        assert (result.ended_by, max(result.train_metrics_clientapp)) == ("EarlyStop", 4)
    else:
        assert caplog.messages[-1].startswith("  ")
        assert "round 3" in caplog.messages[-1]


def test_callbacks_of_one_run_begin_anew_in_another(tmp_path: Path) -> None:
    history, stop = History(tmp_path / "history"), EarlyStop(patience=2)
    best = BestModel(tmp_path / "best")
    for values in ([0.9, 0.8, 0.7], [0.3, 0.1]):
        ended = [[history(info), best(info), stop(info)][2] for info in rounds(values)]
    assert ended == [False, False]
    assert (best.best, best.best_round) == (0.3, 1)
    assert load_file(best.path)["head"].max() == 1.0
    assert len(history.path.read_text().splitlines()) == 2


@pytest.mark.parametrize("there", [True, False])
def test_the_best_of_earlier_rounds_counts_where_its_model_is(there: bool, tmp_path: Path) -> None:
    earlier, later = rounds([0.9, 0.2, 0.5])[:1], rounds([0.9, 0.2, 0.5])[1:]
    if there:
        BestModel(tmp_path / "best")(earlier[0])
    best = BestModel(tmp_path / "best")
    best.recall({1: earlier[0].metrics})
    for info in later:
        best(info)
    assert best.best_round == (1 if there else 3)
    assert load_file(best.path)["head"].max() == best.best_round


@pytest.mark.parametrize("made", [BestModel, Checkpoints])
def test_the_largest_loss_is_not_the_best(made: Any, tmp_path: Path) -> None:
    name = "metric" if made is BestModel else "best"
    with pytest.raises(ValueError, match="the smaller 'eval-loss' is the better one: give smaller"):
        made(tmp_path / "best", **{name: "eval-loss"})
    made(tmp_path / "best", smaller=True, **{name: "eval-loss"})
