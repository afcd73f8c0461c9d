"""Laws of variance-reduced gradients as a local setting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import SAMPLE
from laws import REVIEWED, START, TABLE, Row, local, train
from problems import Quadratic, grid, quadratics
from torch import nn
from torch.nn.functional import cross_entropy

from clients import Border, LocalTraining, Problem, solve
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.local import WITHOUT_SAM

RATE, BATCH, EPOCHS = 0.05, 2, 2
KINDS = pytest.mark.parametrize("kind", ["svrg", "sarah"])


def stepped(q: Quadratic, kind: str, sub: Subproblem) -> np.ndarray:
    """Return the model by (1) or (2), from gradients of parts of the least-squares problem."""
    rng, w = stream(0, "test"), START
    for _ in range(EPOCHS):
        order = rng.permutation(len(q.y))
        before, along = w, q.gradient(w)
        for rows in np.split(order, range(BATCH, len(order), BATCH)):
            part = Quadratic(q.X[rows], q.y[rows])
            g = part.gradient(w) - part.gradient(before) + along
            if kind == "sarah":
                before, along = w, g
            w = w - RATE * (g + sub.slope + sub.pull * (w - sub.centre))
    return w


@KINDS
@pytest.mark.parametrize("sub", [Subproblem(), Subproblem(0.7, 0.5, -1.0)], ids=["f", "bent"])
def test_each_step_is_the_closed_form(sub: Subproblem, kind: str) -> None:
    q = quadratics(1)[0]
    training = LocalTraining(
        solver="sgd", lr=RATE, epochs=EPOCHS, batch_size=BATCH, variance_reduction=kind
    )
    start = torch.tensor(START)
    slope, centre = (torch.full_like(start, float(value)) for value in (sub.slope, sub.centre))
    vectors = Subproblem(slope, sub.pull, centre)
    solved = solve(q.problem(), start, vectors, training, stream(0, "test"))
    np.testing.assert_allclose(solved.w.numpy(), stepped(q, kind, sub), rtol=1e-12)


@KINDS
def test_masks_are_the_same_and_statistics_follow_the_model(kind: str) -> None:
    """An epoch of one mini-batch of all samples: the correction is 0 with equal masks alone."""
    x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(2)), torch.arange(12) % 2
    states = []
    for name in ("off", kind):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        problem = Problem(Border(net), cross_entropy, x, y)
        training = LocalTraining(lr=RATE, steps=1, batch_size=12, variance_reduction=name)
        torch.manual_seed(1)
        start = problem.model.vector.clone()
        w = solve(problem, start, Subproblem(), training, stream(0, "test")).w
        states.append((w, torch.get_rng_state(), net[1].running_mean.clone()))
    for plain, reduced in zip(*states, strict=True):
        torch.testing.assert_close(reduced, plain, rtol=1e-5, atol=1e-6)


ROWS = [row for row in TABLE if row.name in SAMPLE | {"fedpd-vr", "moon", "per-fedavg"}]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_rule_runs_with_it_or_says_why_not(row: Row) -> None:
    plain = {**local(epochs=1), "solver": "sgd", "batch-size": 1}
    settings = {**plain, "variance-reduction": "sarah"}
    try:
        strategies = [row.strategy(local=local) for local in (plain, settings)]
    except ValueError as error:
        known = ("fedsgd", "per-fedavg", "per-fedbc", "pfedme")
        assert row.name in known or row.name not in REVIEWED
        assert "variance-reduction" in str(error)  # noqa: PT017
        return
    if not strategies[0].uses_local:
        with pytest.raises(ValueError, match=r"has no use for .*variance-reduction"):
            type(strategies[0])(local=settings)
        return
    without, found = (train(strategy, grid(quadratics(3)), 2) for strategy in strategies)
    assert np.isfinite(found).all()
    assert not np.array_equal(found, without)


def test_it_needs_mini_batches_and_a_solver_that_asks_for_one_gradient_a_step() -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            LocalTraining(variance_reduction="svrg", **options)

    for solver in WITHOUT_SAM:
        refused(
            f"variance_reduction must be off with the solver '{solver}', got svrg", solver=solver
        )
    refused("must be off with the solver 'gd', got svrg", solver="gd")
    refused("must be off with batch_size = 0, got svrg", batch_size=0)
    refused("must be off with sam = 0.1, got svrg", sam=0.1)
    with pytest.raises(ValueError, match="variance_reduction must be one of"):
        LocalTraining(variance_reduction="svrgg")
