"""A part around clients trained as one stack is the part around the same trained one by one.

Tolerances are those of test_stacked.py. Codes choose: a number within rounding of the next level,
or of the k-th largest, may go the other way; the numbers of these problems are further off. The
noise of privacy depends on the last bit of the sum, and is 0 here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from flwr.serverapp.strategy import Result
from laws import local
from stacked_runs import (
    EXACT,
    ROWS,
    assert_alike,
    classified,
    clients_of,
    relative,
    run,
    smooth,
    stacked,
)
from stacked_runs import nothing_was_said as nothing_was_said

from clients import Hosted, client_app
from clients.node.in_process import InProcessGrid
from fl_strategies.parts import STAGES, BySize, Clock, parts_for

GIVEN: dict[str, dict[str, Any]] = {
    "clock": {"dropout": 0.5},
    "markov": {"on": 6.0, "off": 2.0},
    "buffered": {"size": 2, "concurrency": 3},
    "gaussian": {"clip": 0.05, "noise": 0.0},
    "probabilities": {"p": {0: 3.0, 2: 0.0}},
    "qsgd": {"levels": 3},
    "topk": {"share": 0.3},
}
"""Hyperparameters by which these parts change a round of five clients."""
TRIED = [
    ("compression", "topk", "scaffold"),
    ("compression", "bfloat16", "scaffold"),
    ("compression", "qsgd", "fednova"),
    ("download", "bfloat16", "fedadmm"),
    ("regularizer", "l1", "feddyn"),
    ("selection", "probabilities", "fedavg"),
    ("privacy", "gaussian", "fedavg"),
    ("combine", "median", "fedavg"),
    ("server_step", "adam", "fedavg"),
    ("clock", "clock", "fedavg"),
    ("availability", "markov", "fedavg"),
    ("pace", "buffered", "fedavg"),
]
"""All that clients compute, and a part of each stage that they know nothing of."""


TRAINING = local(solver="sgd", epochs=2, **{"batch-size": 5})


@cache
def without_parts(algorithm: str, **options: Any) -> Result:
    """Return what a stack comes to, computed once."""
    problems = classified(smooth())
    on = stacked(clients_of(problems), len(problems))
    return run(ROWS[algorithm], on, problems, local=TRAINING, **options)


def test_every_stage_is_tried() -> None:
    assert {stage for stage, *_ in TRIED} == STAGES.keys()


@pytest.mark.parametrize(("stage", "name", "algorithm"), TRIED)
def test_a_part_on_a_stack_is_the_part(stage: str, name: str, algorithm: str) -> None:
    options: dict[str, Any] = {stage: parts_for(stage)[name](**GIVEN.get(name, {}))}
    if stage in ("selection", "pace"):
        options["fraction_train"] = 0.6
    if stage == "privacy":
        options["weights"] = "uniform"
    if stage == "pace":
        options["clock"] = Clock(step=1.0, spread=1.0)
    found = assert_alike(ROWS[algorithm], classified(smooth()), local=TRAINING, **options)
    plain = {n: v for n, v in options.items() if n == "weights"}
    without = without_parts(algorithm, **plain)
    assert relative(*(result.arrays.to_numpy_ndarrays() for result in (found, without))) > 1e-6


def test_clients_drawn_by_size_on_a_stack_are_those_clients() -> None:
    sizes = (7, 12, 3, 16, 1)
    problems = classified(smooth(torch.float64), sizes)

    def hosted(stack: Any) -> InProcessGrid:
        app = client_app(clients_of(problems), hosts=Hosted([*range(5)], sizes), stack=stack)
        return InProcessGrid(app, 5, hosts=1)

    alone, at_once = (
        run(ROWS["fedavg"], hosted(stack), problems, local=local(), selection=BySize())
        for stack in ("off", 1000)
    )
    assert relative(*(r.arrays.to_numpy_ndarrays() for r in (at_once, alone))) < EXACT
