"""Callbacks: history, the best model, when to stop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import to_record, to_vector
from safetensors.numpy import load_file

from fl_strategies import BestModel, EarlyStop, History, RoundInfo


def rounds(values: list[float], metric: str = "test-accuracy") -> list[RoundInfo]:
    """A run whose model in round t is t everywhere."""
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
    for info in rounds(values):
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
        ([math.nan, math.nan, 0.3], {"patience": 2}, 2),
        ([0.1, 0.3, 0.2, 0.1], {"patience": 3, "target": 0.3}, 2),
    ],
)
def test_training_stops_at_the_target_or_out_of_patience(
    values: list[float], settings: dict[str, Any], stops: int | None
) -> None:
    stop = EarlyStop(**settings)
    said = [stop(info) for info in rounds(values)]
    expected = None if True not in said else said.index(True) + 1
    assert expected == stops


def test_a_stop_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a target, a patience, or both"):
        EarlyStop()
    with pytest.raises(ValueError, match="patience must be an integer >= 1, got 0"):
        EarlyStop(patience=0)


def test_a_metric_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (info,) = rounds([0.5], metric="eval-loss")
    for callback in (BestModel(tmp_path / "best"), EarlyStop(target=1.0)):
        with pytest.raises(KeyError, match="test-accuracy"):
            callback(info)
