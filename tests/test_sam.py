"""Laws of sharpness-aware minimisation as a local setting."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SAMPLE
from federations import lose
from laws import REVIEWED, START, TABLE, Row, local, quiet, train
from limits import STEPS
from problems import Quadratic, grid, quadratics
from torch import nn
from torch.nn.functional import cross_entropy

from clients import Border, LocalTraining, Problem, solve
from clients.learning.sam import climb_of, climbed
from fl_strategies import FedAvg
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
    plain, climbed = (Problem(Border(copy.deepcopy(module)), cross_entropy, x, y) for _ in range(2))
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


ROWS = [row for row in TABLE if row.name in SAMPLE | {"fedpd-vr", "moon", "per-fedavg"}]


@pytest.mark.parametrize("direction", ["local", "global"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_rule_runs_with_it_or_says_why_not(row: Row, direction: str) -> None:
    settings = {**local(), "sam": RADIUS, "sam-direction": direction}
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


def up(before: np.ndarray | None, theta: np.ndarray) -> np.ndarray:
    """Return s d / ||d|| of (2), 0 where there is no direction."""
    if before is None:
        return 0.0 * theta
    return RADIUS * (before - theta) / np.linalg.norm(before - theta)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_global_direction_is_from_the_model_of_the_last_round_that_was_used(
    momentum: float,
) -> None:
    """FedAvg; client 0's reply of round 2 is lost, so that its direction is from round 1's."""
    problems, theta = quadratics(3), START
    before: list[np.ndarray | None] = [None] * 3
    for number in range(1, 5):
        models = {}
        for i, q in enumerate(problems):
            w, velocity = theta, 0.0 * theta
            for _ in range(STEPS):
                velocity = momentum * velocity + q.gradient(w + up(before[i], theta))
                w = w - RATE * velocity
            if (number, i) != (2, 0):
                models[i], before[i] = w, theta
        weights = {i: problems[i].n for i in models}
        theta = sum(weights[i] * w for i, w in models.items()) / sum(weights.values())
    settings = {"sam": RADIUS, "sam-direction": "global", "momentum": momentum}
    one = quiet(FedAvg, local=local(**settings), min_replies=2)
    found = train(one, grid(problems, fault=lose((2, 0))), 4)
    np.testing.assert_allclose(found, theta, rtol=1e-11)


def test_a_step_up_the_last_change_takes_one_gradient_and_leaves_w_to_the_bit() -> None:
    problem, calls = quadratics(1)[0].problem(), []
    problem.model.write(torch.tensor(START))
    problem.model.module.register_forward_hook(lambda *_: calls.append(problem.model.vector))
    climb = climb_of(torch.tensor(START + 1.0), torch.tensor(START), RADIUS)
    assert climb is not None
    climbed(problem, climb)(problem.data.whole)
    (seen,) = calls
    np.testing.assert_allclose(seen.numpy() - START, RADIUS / np.sqrt(5), rtol=1e-12)
    np.testing.assert_array_equal(problem.model.vector.numpy(), START)
    assert climb_of(None, torch.tensor(START), RADIUS) is None
    assert climb_of(torch.tensor(START), torch.tensor(START), RADIUS) is None


def test_a_direction_without_a_radius_is_refused() -> None:
    with pytest.raises(ValueError, match="sam-direction = 'global' has no effect: sam is 0"):
        FedAvg(local={"sam-direction": "global"})
    with pytest.raises(ValueError, match="sam_direction must be one of"):
        LocalTraining(sam=0.1, sam_direction="worldwide")


def test_solvers_that_need_the_gradient_at_w_refuse_it() -> None:
    for solver in WITHOUT_SAM:
        with pytest.raises(ValueError, match=f"sam must be 0 with the solver '{solver}', got 0.1"):
            LocalTraining(solver=solver, sam=0.1)
    with pytest.raises(ValueError, match="sam must be >= 0"):
        LocalTraining(sam=-0.1)
