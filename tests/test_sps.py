"""SPS: closed forms of Polyak's step size, optimizer against rule against a plain loop, its use."""

from __future__ import annotations

import io
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from laws import START, train
from problems import (
    CENTRE,
    DIM,
    SLOPE,
    Quadratic,
    Softplus,
    bowl,
    closure_of,
    grid,
    optimum,
    quadratics,
    shared_minimiser,
    steps_of,
)
from torch import nn

from clients import SPS, LocalTraining, solve
from fl_strategies import STRATEGIES
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers import sps
from simulations.config import RunConfig

USUAL = {"c": 0.5, "f_star": 0.0, "growth": 2.0, "batch_share": 1.0, "max_step": 0.0}
UNCAPPED = {"growth": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "official": {"batch_share": 0.25},
    "uncapped": {"growth": 0.0, "c": 0.9},
    "f star": {"growth": 1.3, "f_star": 0.4},
    "step cap": {"growth": 0.0, "max_step": 0.15},
    "both caps": {"growth": 1.5, "batch_share": 0.5, "max_step": 0.15},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def by_hand(f: Softplus, lr: float, steps: int, **options: Any) -> tuple[list[Any], list[float]]:
    """Return the points and step sizes of (1)-(3), written down as they stand."""
    o, x, eta = USUAL | options, f.start, lr
    points, etas = [x], []
    for k in range(steps):
        loss, g = float(f.loss(torch.tensor(x), k)), f.gradient(x, k)
        if loss > o["f_star"]:
            bounds = [(loss - o["f_star"]) / (o["c"] * np.linalg.norm(g) ** 2)]
            if o["growth"]:
                bounds.append(o["growth"] ** o["batch_share"] * eta)
            if o["max_step"]:
                bounds.append(o["max_step"])
            eta = min(bounds)
            x = x - eta * g
        points.append(x)
        etas.append(eta)
    return points, etas


optimized = partial(steps_of, SPS)


# ---- optimizer, rule and paper --------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("seed", range(3))
def test_the_optimizer_is_the_paper(variant: str, seed: int) -> None:
    f, options = Softplus(seed), VARIANTS[variant]
    points, etas = by_hand(f, 0.05, 12, **options)
    found, sizes = optimized(f.loss, f.start, 12, lr=0.05, **options)
    np.testing.assert_allclose(found, points, rtol=1e-8)
    np.testing.assert_allclose(sizes, etas, rtol=1e-8)


@every_variant
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_the_rule_is_the_paper_for_one_and_for_a_stack(variant: str, kind: Any) -> None:
    fs, options = [Softplus(seed) for seed in range(4)], USUAL | VARIANTS[variant]
    starts = kind(np.array([f.start for f in fs]))
    alone = [by_hand(f, 0.05, 8, **options)[0][-1] for f in fs]
    state, x = sps.State(0.05), starts
    for k in range(8):
        pairs = list(zip(fs, x, strict=True))
        loss = kind(np.array([[float(f.loss(torch.as_tensor(w), k))] for f, w in pairs]))
        g = kind(np.array([f.gradient(np.asarray(w), k) for f, w in pairs]))
        state, x = sps.step(state, x, loss, g, **options)
    assert isinstance(x, type(starts))
    np.testing.assert_allclose(np.asarray(x), alone, rtol=1e-8)
    state, x = sps.State(0.05), starts[0]
    for k in range(8):
        loss = kind(np.array([float(fs[0].loss(torch.as_tensor(x), k))]))
        state, x = sps.step(state, x, loss, kind(fs[0].gradient(np.asarray(x), k)), **options)
    np.testing.assert_allclose(np.asarray(x), alone[0], rtol=1e-8)


def test_one_gradient_a_step_and_the_loss_is_returned() -> None:
    f, calls = Softplus(0), []
    w = nn.Parameter(torch.tensor(f.start))
    optimizer = SPS([w])

    def loss(k: int) -> torch.Tensor:
        calls.append(k)
        return f.loss(w, k)

    for k in range(3):
        expected = float(f.loss(w.detach(), k))
        assert float(optimizer.step(closure_of(optimizer, lambda k=k: loss(k)))) == expected
    assert calls == [0, 1, 2]


# ---- closed forms ---------------------------------------------------------------------------


@pytest.mark.parametrize("L", [0.02, 3.0, 700.0])
@pytest.mark.parametrize("c", [0.5, 1.0, 2.0])
def test_on_a_bowl_the_step_is_one_over_2c_times_the_curvature(L: float, c: float) -> None:
    """(L/2) d^2 / (c L^2 d^2), so that c = 1/2 lands on the minimiser at once."""
    x = np.array([4.0, -3.0])
    points, etas = optimized(bowl([L, L]), x, 1, c=c, **UNCAPPED)
    assert etas[0] == pytest.approx(1 / (2 * c * L), rel=1e-12)
    np.testing.assert_allclose(points[-1] - 1.5, (x - 1.5) * (1 - 1 / (2 * c)), atol=1e-13)


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_the_step_grows_by_2_to_the_share_of_the_batch(share: float) -> None:
    _, etas = optimized(bowl([1.0, 1.0]), np.array([4.0, -3.0]), 6, lr=1e-4, batch_share=share)
    np.testing.assert_allclose(etas, 1e-4 * 2 ** (share * np.arange(1, 7)), rtol=1e-12)


def test_uncapped_steps_do_not_depend_on_lr_and_capped_ones_do() -> None:
    f = Softplus(1)
    np.testing.assert_array_equal(
        optimized(f.loss, f.start, 5, lr=9.0, **UNCAPPED)[0],
        optimized(f.loss, f.start, 5, lr=0.01, **UNCAPPED)[0],
    )
    assert optimized(f.loss, f.start, 5, lr=0.01)[1][0] == pytest.approx(0.02)


@pytest.mark.parametrize("s", [0.01, 64.0])
def test_scaling_the_loss_or_the_axes_scales_the_steps(s: float) -> None:
    f = Softplus(2)
    points, etas = optimized(f.loss, f.start, 8, lr=0.05)
    same, smaller = optimized(lambda w, k: s * f.loss(w, k), f.start, 8, lr=0.05 / s)
    np.testing.assert_allclose(same, points, rtol=1e-8)
    np.testing.assert_allclose(smaller, np.array(etas) / s, rtol=1e-8)
    wide, larger = optimized(lambda w, k: f.loss(w / s, k), s * f.start, 8, lr=0.05 * s**2)
    np.testing.assert_allclose(wide, s * np.array(points), rtol=1e-8)
    np.testing.assert_allclose(larger, np.array(etas) * s**2, rtol=1e-8)


@pytest.mark.parametrize("options", [{}, UNCAPPED, {"growth": 0.0, "max_step": 0.1}], ids=str)
def test_without_a_gradient_or_at_f_star_nothing_moves_and_later_steps_are_as_if_never(
    options: dict[str, Any],
) -> None:
    x = np.array([4.0, -3.0])
    useful = bowl([1.0, 1.0])
    still = {0: lambda w: 0.0 * w.sum() + 1.0, 2: lambda w: w.sum() - w.sum().detach() - 1.0}
    points, etas = optimized(
        lambda w, k: still[k](w) if k in still else useful(w, k), x, 5, lr=0.01, **options
    )
    np.testing.assert_array_equal(points[0], points[1])
    np.testing.assert_array_equal(points[2], points[3])
    plain, sizes = optimized(useful, x, 3, lr=0.01, **options)
    np.testing.assert_array_equal([points[i] for i in (0, 2, 4, 5)], plain)
    assert [etas[i] for i in (1, 3, 4)] == sizes
    assert np.isfinite(etas).all()


def test_the_step_is_one_over_all_parameters_and_an_unreached_one_stays() -> None:
    L, x = [1.0, 30.0, 5.0], np.array([4.0, -2.0, 3.0])
    parts = [nn.Parameter(torch.tensor(x[:1])), nn.Parameter(torch.tensor(x[1:])[None])]
    unused = nn.Parameter(torch.ones(2))
    optimizer = SPS([unused, *parts])
    for _ in range(5):
        optimizer.step(
            closure_of(optimizer, lambda: bowl(L)(torch.cat([parts[0], parts[1][0]]), 0))
        )
    w = np.concatenate([p.detach().numpy().ravel() for p in parts])
    np.testing.assert_allclose(w, optimized(bowl(L), x, 5)[0][-1], rtol=1e-12)
    assert unused.tolist() == [1.0, 1.0]
    lonely = SPS([unused])
    lonely.step(lambda: torch.tensor(2.0))
    assert unused.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_tiny_and_huge_gradients_in_single_precision_give_the_step(size: float) -> None:
    """||g||^2 would be 0 or infinite there; it is taken in double precision."""
    w = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = SPS([w], **UNCAPPED)
    optimizer.step(closure_of(optimizer, lambda: size * 0.5 * (w**2).sum()))
    assert float(optimizer.param_groups[0]["eta"]) * size == pytest.approx(1.0, rel=1e-6)


def test_a_saved_state_goes_on_where_it_stopped() -> None:
    f = Softplus(3)
    points, _ = optimized(f.loss, f.start, 6, lr=1e-3)
    w = nn.Parameter(torch.tensor(f.start))
    optimizer = SPS([w], lr=1e-3)
    for k in range(6):
        if k == 3:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            optimizer = SPS([w], lr=1e-3)
            optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        optimizer.step(closure_of(optimizer, lambda k=k: f.loss(w, k)))
    np.testing.assert_array_equal(w.detach(), points[-1])


BAD = [
    ({"lr": -1.0}, r"lr must be > 0, got -1\.0"),
    ({"c": 0.0}, r"c must be > 0, got 0\.0"),
    ({"f_star": float("nan")}, "f_star must be a finite number, got nan"),
    ({"growth": 0.5}, r"growth \(0: no limit\) must be >= 1, got 0\.5"),
    ({"batch_share": 0.0}, r"batch_share must be > 0 and <= 1, got 0\.0"),
    ({"batch_share": 1.5}, r"batch_share must be > 0 and <= 1, got 1\.5"),
    ({"max_step": -0.1}, r"max_step must be >= 0, got -0\.1"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_a_bad_option_is_refused_by_name_bound_and_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SPS([nn.Parameter(torch.ones(1))], **options)


def test_several_groups_are_refused() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)]
    with pytest.raises(ValueError, match="SPS takes one parameter group, got 2"):
        SPS(groups)


# ---- as a local solver ----------------------------------------------------------------------


def by_matrices(q: Quadratic, pull: float, slope: np.ndarray, **options: Any) -> np.ndarray:
    """SPS on the subproblem with its square completed, over the batches of 5 of one epoch."""
    o = USUAL | {"lr": 0.05} | options
    x, eta = START, o["lr"]
    for part in np.split(stream(1, "local").permutation(q.n), [5, 10]):
        X, y = q.X[part], q.y[part]
        loss = ((X @ x - y) ** 2).mean() / 2
        if pull:
            loss += pull / 2 * ((x - CENTRE + slope / pull) ** 2).sum()
        else:
            loss += slope @ (x - START)
        g = X.T @ (X @ x - y) / len(y) + slope + pull * (x - CENTRE)
        if loss > o["f_star"]:
            eta = min((loss - o["f_star"]) / (o["c"] * g @ g), 2 ** (5 / q.n) * eta)
            x = x - eta * g
    return x


@pytest.mark.parametrize("pull", [0.9, 0.05, 0.0])
@pytest.mark.parametrize("lr", [0.05, 2.0])
def test_the_solver_is_the_rule_on_the_subproblem_above_its_least_value(
    pull: float, lr: float
) -> None:
    """What slope and pull add to f is at least 0 after that, so that f* of f goes on to hold."""
    q = quadratics(4)[3]
    training = LocalTraining(solver="sps", lr=lr, solver_params="f_star=0.001", batch_size=5)
    bent = Subproblem(torch.tensor(SLOPE), pull, torch.tensor(CENTRE))
    w = solve(q.problem(), torch.tensor(START), bent, training, stream(1, "local")).w
    expected = by_matrices(q, pull, SLOPE, lr=lr, f_star=0.001)
    np.testing.assert_allclose(w, expected, rtol=1e-9)


def test_polyaks_own_step_is_that_of_c_one() -> None:
    """It minimises the bound ||x - x*||^2 - 2 eta (f - f*) + eta^2 ||g||^2 over eta."""
    q = quadratics(4)[3]
    gap, g = q.value(START) - q.value(q.b), q.gradient(START)
    options = {"f_star": q.value(q.b), "growth": 0.0, "batch_share": 1.0, "max_step": 0.0}
    loss, square = np.array([q.value(START)]), np.array([g @ g])
    eta, _ = sps.step_size(loss, square, 1.0, c=1.0, **options)
    bounds = [-2 * e * gap + e**2 * (g @ g) for e in (0.99 * eta, eta, 1.01 * eta)]
    assert np.argmin(bounds) == 1
    paper, _ = sps.step_size(loss, square, 1.0, c=sps.Options().c, **options)
    np.testing.assert_allclose(paper, 2 * eta, rtol=1e-12)


def test_f_alone_is_what_it_looks_at_without_slope_and_pull() -> None:
    q = quadratics(4)[3]
    training = LocalTraining(solver="sps", batch_size=0, solver_params="growth=0")
    w = solve(q.problem(), torch.tensor(START), Subproblem(), training, stream(1, "local")).w
    g = q.gradient(START)
    np.testing.assert_allclose(w, START - 2 * q.value(START) / (g @ g) * g, rtol=1e-12)


@pytest.mark.parametrize("message", ["batch_share", "module", "lr"])
def test_what_the_solver_itself_provides_is_no_option(message: str) -> None:
    with pytest.raises(ValueError, match=rf"no option '{message}'"):
        LocalTraining(solver="sps", solver_params=f"{message}=1")


def test_a_run_config_takes_the_solver() -> None:
    config = RunConfig.parse({"algorithm": "fedavg", "solver": "sps", "solver-params": "growth=0"})
    assert (config.local()["solver-params"], config.lr) == ("growth=0", 1.0)


# ---- inside federated algorithms ------------------------------------------------------------


@pytest.mark.slow
def test_fedavg_goes_to_a_minimiser_that_all_clients_share() -> None:
    """Interpolation: f* = 0 is attained by every batch, and the uncapped rule converges."""
    b = np.array([3.0, -1.0, 2.0, 0.5, -4.0])
    problems = shared_minimiser(quadratics(3), b)
    local = {"solver": "sps", "epochs": 2, "batch-size": 3, "solver-params": "growth=0"}
    strategy = STRATEGIES["fedavg"](fraction_evaluate=0.0, local=local)
    np.testing.assert_allclose(train(strategy, grid(problems), 60), b, atol=1e-8)


@pytest.mark.slow
def test_fedadmm_goes_to_the_optimum_of_clients_that_differ() -> None:
    """Near it f - f* > 0 while the gradient vanishes: the step cap makes it gradient descent."""
    problems = quadratics(3)
    local = {"solver": "sps", "epochs": 6, "batch-size": 0, "solver-params": "max-step=0.3"}
    strategy = STRATEGIES["fedadmm"](rho=0.5, fraction_evaluate=0.0, local=local)
    found = train(strategy, grid(problems), 80)
    np.testing.assert_allclose(found, optimum(problems), atol=1e-7)
    assert found.shape == (DIM,)
    assert math.isfinite(found.sum())
