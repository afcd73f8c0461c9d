"""Laws of sharpness-aware minimisation as a local setting."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from laws import REVIEWED, START, Row, every_algorithm, local, train
from problems import Quadratic, grid, quadratics
from torch import nn
from torch.nn.functional import cross_entropy

from clients import FlatModel, LocalTraining, Problem, solve
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.local import WITHOUT_SAM

RATE, RADIUS = 0.1, 0.3


def stepped(q: Quadratic, w: np.ndarray, sub: Subproblem, steps: int) -> np.ndarray:
    """Return w after gradient steps by (1) of ``clients.learning.sam``, in closed form."""
    for _ in range(steps):
        g = q.gradient(w)
        ahead = q.gradient(w + RADIUS * g / np.linalg.norm(g))
        w = w - RATE * (ahead + sub.slope + sub.pull * (w - sub.centre))
    return w


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("sub", [Subproblem(), Subproblem(0.7, 0.5, -1.0)], ids=["f", "bent"])
def test_each_step_is_the_closed_form(sub: Subproblem, batch: int) -> None:
    q = quadratics(1)[0]
    q = q if batch == 0 else Quadratic(q.X[:1], q.y[:1])
    training = LocalTraining(solver="sgd", lr=RATE, steps=3, batch_size=batch, sam=RADIUS)
    start = torch.tensor(START)
    centre = torch.full_like(start, float(sub.centre))
    slope = torch.full_like(start, float(sub.slope))
    vectors = Subproblem(slope, sub.pull, centre)
    solved = solve(q.problem(), start, vectors, training, stream(0, "test"))
    np.testing.assert_allclose(solved.w.numpy(), stepped(q, START, sub, 3), rtol=1e-12)


@pytest.mark.parametrize("solver", ["sgd", "adam", "RMSprop"])
def test_radius_0_changes_no_bit_and_another_one_does(solver: str) -> None:
    def reached(**options: Any) -> np.ndarray:
        training = LocalTraining(solver=solver, lr=RATE, steps=3, **options)
        start, rng = torch.tensor(START), stream(0, "test")
        found = solve(quadratics(1)[0].problem(), start, Subproblem(), training, rng).w
        return found.numpy()

    np.testing.assert_array_equal(reached(sam=0.0), reached())
    assert not np.array_equal(reached(sam=0.1), reached())


def test_both_passes_have_the_same_masks_and_statistics_follow_the_first() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    x, y = torch.randn(12, 3), torch.tensor([0, 1] * 6)
    plain, climbed = (
        Problem(FlatModel(copy.deepcopy(module)), cross_entropy, x, y) for _ in range(2)
    )
    states = []
    for problem, radius in ((plain, 0.0), (climbed, 1e-6)):
        torch.manual_seed(1)
        training = LocalTraining(solver="sgd", lr=RATE, steps=1, batch_size=0, sam=radius)
        start = problem.model.vector.clone()  # the same for both: copies of one module
        w = solve(problem, start, Subproblem(), training, stream(0, "test")).w
        states.append((w, torch.get_rng_state(), problem.model.module[1].running_mean.clone()))
    (w, draws, mean), (w_sam, draws_sam, mean_sam) = states
    torch.testing.assert_close(w_sam, w, rtol=1e-3, atol=1e-5)  # other masks are far off
    assert torch.equal(draws, draws_sam)
    assert torch.equal(mean, mean_sam)


@every_algorithm
def test_any_rule_runs_with_it_or_says_why_not(row: Row) -> None:
    settings = {**local(), "sam": RADIUS}
    try:
        strategy = row.strategy(local=settings)
    except ValueError as error:
        assert row.name in ("per-fedavg", "per-fedbc") or row.name not in REVIEWED
        assert "sam" in str(error)  # noqa: PT017
        return
    if not strategy.uses_local:
        with pytest.raises(ValueError, match=r"has no use for .*sam"):
            type(strategy)(local=settings)
        return
    plain, found = (
        train(row.strategy(local=s), grid(quadratics(3)), 2) for s in (local(), settings)
    )
    assert np.isfinite(found).all()
    assert not np.array_equal(found, plain)


def test_solvers_that_need_the_gradient_at_w_refuse_it() -> None:
    for solver in WITHOUT_SAM:
        with pytest.raises(ValueError, match=f"sam must be 0 with the solver '{solver}', got 0.1"):
            LocalTraining(solver=solver, sam=0.1)
    with pytest.raises(ValueError, match="sam must be >= 0"):
        LocalTraining(sam=-0.1)
