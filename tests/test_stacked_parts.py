"""A part around clients trained as one stack is the part around the same trained one by one.

Tolerances are those of test_stacked.py. Codes choose: a number within rounding of the next level,
or of the k-th largest, may go the other way; the numbers of these problems are further off. The
noise of privacy depends on the last bit of the sum, and is 0 here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
    "daily": {"p": 0.7, "swing": 0.1},
    "markov": {"on": 6.0, "off": 2.0},
    "buffered": {"size": 2, "concurrency": 3},
    "deadline": {"over_select": 1.5},
    "gaussian": {"clip": 0.05, "noise": 0.0},
    "probabilities": {"p": {0: 3.0, 2: 0.0}},
    "qsgd": {"levels": 3},
    "topk": {"share": 0.3},
}
"""Hyperparameters by which these parts change a round of five clients."""
AROUND: dict[str, list[str]] = {
    "compression": ["fedavg", "scaffold", "fedadmm"],
    "download": ["fedavg", "scaffold", "fedadmm", "fedbc"],
    "regularizer": ["feddyn"],
}
"""The algorithms around which a stage's parts are tried; FedAvg and pFedMe by default."""
EVERY = [
    (stage, part, name)
    for stage in STAGES
    for part in parts_for(stage)
    for name in AROUND.get(stage, ["fedavg", "pfedme"])
    if part != "by-size"
]


@pytest.mark.parametrize(("stage", "name", "algorithm"), EVERY)
@pytest.mark.sampled
def test_every_part_on_a_stack_is_the_part(stage: str, name: str, algorithm: str) -> None:
    options: dict[str, Any] = {stage: parts_for(stage)[name](**GIVEN.get(name, {}))}
    if stage in ("selection", "pace"):
        options["fraction_train"] = 0.6
    if stage == "privacy" and algorithm == "fedavg":
        options["weights"] = "uniform"
    if stage == "pace":
        options["clock"] = Clock(step=1.0, spread=1.0)
    training = local(solver="sgd", **{"batch-size": 5})
    problems = classified(smooth())
    assert_alike(ROWS[algorithm], problems, local=training, **options)
    plain = {n: v for n, v in options.items() if n == "weights"}
    found, without = (
        run(ROWS[algorithm], stacked(clients_of(problems), 5), problems, local=training, **given)
        for given in (options, plain)
    )
    if name not in ("uniform", "exponential", "trace"):  # which may change nothing
        arrays = (result.arrays.to_numpy_ndarrays() for result in (found, without))
        assert relative(*arrays) > 1e-6


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
