"""FedADMM's and FedBCD's gaps are 0 at stationary points alone, and runs keep to the theorems."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import DIM, optimum, quadratics

from simulations.lab import theory
from simulations.stationarity import CloudGap, admm_gap, cloud_gap

RHO, GAMMA, BOX = 1.5, 0.8, 2.5


def test_fedadmms_gap_is_that_of_its_lagrangian() -> None:
    """V is 0 at the optimum with y_i = -grad f_i, and the squared gradient of L elsewhere."""
    quadratic = quadratics(3)
    problems, best = [q.problem() for q in quadratic], optimum(quadratic)
    duals = [-q.gradient(best) for q in quadratic]
    at_best = [(torch.tensor(best), torch.tensor(y)) for y in duals]
    assert admm_gap(problems, torch.tensor(best), at_best, RHO) == pytest.approx(0.0, abs=1e-20)
    with pytest.raises(ValueError, match="zip"):
        admm_gap(problems, torch.tensor(best), at_best[1:], RHO)
    rng = np.random.default_rng(0)
    theta = rng.normal(size=DIM)
    w, y = rng.normal(size=(2, 3, DIM))
    variables = [torch.tensor(one, requires_grad=True) for one in (theta, *w)]
    lagrangian = torch.zeros(())
    for q, model, dual in zip(quadratic, variables[1:], y, strict=True):
        apart = model - variables[0]
        b = torch.tensor(q.b)
        f = 0.5 * (model - b) @ torch.tensor(q.A) @ (model - b)
        lagrangian = lagrangian + f + torch.tensor(dual) @ apart + RHO / 2 * apart @ apart
    slopes = torch.autograd.grad(lagrangian, variables)
    expected = sum(float(s @ s) for s in slopes) + float(((w - theta) ** 2).sum())
    own = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(w, y, strict=True)]
    assert admm_gap(problems, torch.tensor(theta), own, RHO) == pytest.approx(expected, rel=1e-10)


def test_fedbcds_gap_is_the_worst_corner_of_the_box_and_zero_at_the_fixed_point() -> None:
    quadratic = quadratics(3)
    problems, z = [q.problem() for q in quadratic], np.zeros(DIM)
    for _ in range(2000):
        own = [q.argmin(pull=GAMMA, centre=z) for q in quadratic]
        z = np.mean(own, axis=0)

    def gap(own: Any, clouds: Any) -> CloudGap:
        models = [[torch.tensor(one) for one in some] for some in (own, clouds)]
        return cloud_gap(problems, *models, gamma=GAMMA, box=BOX)

    assert gap(own, [z, z]) == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    rng = np.random.default_rng(1)
    own, clouds = rng.uniform(-BOX, BOX, (3, DIM)), rng.normal(size=(2, DIM))
    z = clouds.mean(0)
    corners = [np.array(corner) for corner in itertools.product((-BOX, BOX), repeat=DIM)]
    worst = []
    for q, x in zip(quadratic, own, strict=True):
        slope = q.gradient(x) + GAMMA * (x - z)
        worst.append(max(slope @ (x - corner) for corner in corners))
    pull = GAMMA * (3 * z - own.sum(0))
    apart = np.linalg.norm(clouds[0] - clouds[1]) / 2
    expected = (np.mean(worst), pull @ pull, apart)
    assert gap(own, clouds) == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_the_commands_runs_keep_to_the_theorems(tmp_path: Path) -> None:
    theory.main(["--rounds", "12,4", "--draws", "150", "--output", str(tmp_path)])
    lines = (tmp_path / "theory.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    admm = [[*map(float, row)] for row in cells[2:4]]
    (_, early, few, high, before), (_, late, many, low, after) = admm
    assert late < early < high
    assert late < low < high
    assert (few, many) == pytest.approx((4 * early, 12 * late), rel=0.01)
    assert after > 10 * before > 10 * early  # eta = 1 diverges
    clouds = [[*map(float, row[1:])] for row in cells if "cloud" in row[0]]
    for early_row, late_row in (clouds[:2], clouds[2:]):
        assert late_row[1] < early_row[1]
    assert [row[3] > 0 for row in clouds] == [True, True, False, False]  # async, sync
    for _, measured, exact, large in [[*map(float, row)] for row in cells[-9:]]:
        assert measured == pytest.approx(exact, abs=0.04)
        assert exact <= large


@pytest.mark.parametrize(
    ("option", "error"),
    [("--rounds=1,5", "rounds must be >= 2, got 1"), ("--draws=0", "draws must be >= 1, got 0")],
)
def test_the_command_names_the_bound_and_the_value(
    option: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        theory.main([option, "--output", str(tmp_path)])
    assert error in capsys.readouterr().err
