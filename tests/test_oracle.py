"""A client's oracle answers for f with its weight decay, and counts the steps that it is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import oracle_of, quadratics

from clients import LocalTraining
from fl_strategies.core.subproblem import Subproblem

RIDGE = 0.7


def test_all_derivatives_are_those_of_f_with_its_weight_decay() -> None:
    (q,) = quadratics(1)
    rng = np.random.default_rng(1)
    w, v, old = (rng.normal(size=5) for _ in range(3))
    oracle = oracle_of(q.problem(), LocalTraining(solver="gd", weight_decay=RIDGE))
    ridged = q.A + RIDGE * np.eye(5)

    def found(tensor: torch.Tensor) -> np.ndarray:
        return tensor.numpy()

    here, direction, before = (torch.from_numpy(each) for each in (w, v, old))
    expected = q.gradient(w) + RIDGE * w
    np.testing.assert_allclose(found(oracle.gradient(here).vector), expected, rtol=1e-12)
    np.testing.assert_allclose(found(oracle.full_gradient(here)), expected, rtol=1e-12)
    product = oracle.hessian_product(here, direction)
    np.testing.assert_allclose(found(product), ridged @ v, rtol=1e-12)
    difference = oracle.difference(here, before, samples=0).vector
    np.testing.assert_allclose(found(difference), ridged @ (w - old), rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"steps": 4}, 4), ({"epochs": 2}, 6), ({"steps": 4, "epochs": 5}, 4), ({"epochs": 1}, 3)],
)
def test_the_steps_of_a_rule_are_as_many_as_the_solver_takes(
    settings: dict[str, int], steps: int
) -> None:
    """Seven samples in batches of three: three steps an epoch, the last of one sample."""
    (q,) = quadratics(1)
    training = LocalTraining(batch_size=3, **settings)  # type: ignore[arg-type]
    assert oracle_of(q.problem(), training).steps == steps
    start = torch.zeros(5, dtype=torch.float64)
    assert oracle_of(q.problem(), training).solve(start, Subproblem()).steps == steps
