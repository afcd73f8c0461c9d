"""A client's weight decay is a term of its f."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from local_work import CONFIG, START
from problems import DIM, Quadratic, grid, quadratics, to_vector

from clients import CLIENTS, ContextStore, LocalTraining, solve
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from simulations.stationarity import stationarity

RIDGE = 0.3


def ridged(q: Quadratic, w: np.ndarray) -> np.ndarray:
    return q.gradient(w) + RIDGE * w


@pytest.mark.parametrize("solver", ["gd", "sgd", "adam", "RMSprop"])
def test_the_residual_is_that_of_f_with_its_weight_decay(solver: str) -> None:
    q, slope, pull, centre = quadratics(4)[3], START / 3, 0.9, START[::-1].copy()
    training = LocalTraining(
        solver=solver, lr=0.01, epochs=3, batch_size=4, weight_decay=RIDGE, residual=0.0
    )
    bent = Subproblem(torch.tensor(slope), pull, torch.tensor(centre))
    info = solve(q.problem(), torch.tensor(START), bent, training, stream(1, "local"))
    found = info.w
    w = found.numpy()
    gradient = ridged(q, w) + slope + pull * (w - centre)
    assert info.residual == pytest.approx(gradient @ gradient, rel=1e-9)


def test_the_minimiser_of_f_and_its_weight_decay_has_no_residual_and_ends_the_training() -> None:
    (q,) = quadratics(1)
    rest = np.linalg.solve(q.A + RIDGE * np.eye(DIM), q.A @ q.b)
    training = LocalTraining(solver="gd", epochs=9, weight_decay=RIDGE, residual=1e-20)
    info = solve(q.problem(), torch.tensor(rest), Subproblem(), training, stream(1, "local"))
    _ = info.w
    assert info.epochs == 1
    assert info.residual < 1e-20


@pytest.mark.parametrize(
    "settings",
    [{"solver": "AdamW"}, {"solver": "adam", "solver_params": "decoupled_weight_decay=true"}],
    ids=str,
)
def test_a_decay_that_the_solver_decouples_is_no_term_of_f(settings: dict[str, Any]) -> None:
    (q,) = quadratics(1)
    training = LocalTraining(**settings, lr=0.01, weight_decay=RIDGE, residual=0.0)
    info = solve(q.problem(), torch.tensor(START), Subproblem(), training, stream(1, "local"))
    w = info.w
    gradient = q.gradient(w.numpy())
    assert info.residual == pytest.approx(gradient @ gradient, rel=1e-9)


def test_the_stationarity_of_a_run_is_that_of_f_with_its_weight_decay() -> None:
    problems = quadratics(3)
    gradient = np.mean([ridged(q, START) for q in problems], axis=0)
    found = stationarity([q.problem() for q in problems], torch.tensor(START), ridge=RIDGE)
    assert found.gradient == pytest.approx(gradient @ gradient, rel=1e-12)


def test_scaffolds_gradient_of_f_has_its_weight_decay() -> None:
    """After (3) of option I, c_i+ - c_i is grad f_i at the model received, c_i being 0."""
    (q,) = quadratics(1)
    store = ContextStore(next(iter(grid([q]).contexts.values())))
    own = LocalTraining(solver="gd", weight_decay=RIDGE)
    client = CLIENTS["scaffold"](q.problem(), client_id=0, store=store, training=own)
    start = [START[:4].reshape(2, 2), START[4:], np.zeros((2, 2)), np.zeros(1)]
    arrays, _, _ = client.fit(start, {**CONFIG, "option": "I"})
    np.testing.assert_allclose(to_vector(arrays[2:]), ridged(q, START), rtol=1e-12)


def test_the_fine_tuning_step_goes_along_the_gradient_of_f_with_its_weight_decay() -> None:
    (q,) = quadratics(1)
    own = LocalTraining(solver="gd", lr=0.2, weight_decay=RIDGE, fine_tune="train")
    problem = q.problem()
    client = CLIENTS["fedavg"](problem, client_id=0, test=problem, training=own)
    _, _, metrics = client.evaluate([START[:4].reshape(2, 2), START[4:]], CONFIG)
    expected = q.value(START - 0.2 * ridged(q, START))
    assert metrics["tuned-loss"] == pytest.approx(expected, rel=1e-12)
