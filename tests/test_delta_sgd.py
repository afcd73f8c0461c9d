"""Delta-SGD: closed forms of its step sizes, optimizer, rule and plain loop alike, its use."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi
from laws import START, train
from problems import (
    CENTRE,
    DIM,
    SLOPE,
    Softplus,
    bowl,
    closure_of,
    grid,
    optimum,
    quadratics,
    shared_minimiser,
    to_record,
    to_vector,
)
from torch import nn
from torch.nn.functional import cross_entropy

from clients import DeltaSGD, FlatModel, LocalTraining, Problem, solve
from clients.learning.solvers import make_optimizer
from fl_strategies import STRATEGIES, delta_sgd
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from simulations.config import RunConfig

USUAL = {"gamma": 2.0, "delta": 0.1, "epsilon": 0.0, "amplify_first": False, "same_batch": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "gamma": {"gamma": 0.7, "delta": 1.0},
    "authors": dict(delta_sgd.AUTHORS_RULE),
    "epsilon": {"epsilon": 0.01, "delta": 0.5},
    "own batch": {"same_batch": False, "delta": 0.5},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
ETA_0, THETA_0 = 0.6, 1.3


def by_hand(
    gradient: Callable[[np.ndarray, int], np.ndarray],
    x: np.ndarray,
    steps: int,
    eta: float = ETA_0,
    theta: float = THETA_0,
    **options: Any,
) -> tuple[list[np.ndarray], list[float]]:
    """Return the points and step sizes of Algorithm 1, written down as it stands in the paper."""
    o = USUAL | options
    points, etas, before, g_before = [x], [], x, None
    for k in range(steps):
        g = gradient(x, k)
        if k > 0 or o["amplify_first"]:
            old = gradient(before, k) if o["same_batch"] else g_before
            bounds = [math.sqrt(1 + o["delta"] * theta) * eta]
            if k > 0 and np.linalg.norm(g - old) > 0:
                moved = np.linalg.norm(x - before)
                bounds.append(o["gamma"] * moved / (2 * np.linalg.norm(g - old)))
            theta, eta = (min(bounds) + o["epsilon"]) / eta, min(bounds) + o["epsilon"]
        before, g_before, x = x, g, x - eta * g
        points.append(x)
        etas.append(eta)
    return points, etas


def rule(
    gradient: Callable[[Any, int], Any],
    x: Any,
    steps: int,
    eta_0: float = ETA_0,
    theta_0: float = THETA_0,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Return the points and step sizes of the pure rule."""
    state, points, etas = delta_sgd.first_state(eta_0=eta_0, theta_0=theta_0), [x], []
    for k in range(steps):
        state, x = delta_sgd.step(state, x, lambda w, k=k: gradient(w, k), **USUAL | options)
        points.append(x)
        etas.append(state.eta)
    return points, etas


def optimized(
    loss: Callable[[torch.Tensor, int], torch.Tensor], x: Any, steps: int, **options: Any
) -> tuple[list[np.ndarray], list[float]]:
    """Return the points and step sizes of the optimizer, on one parameter [d]."""
    w = nn.Parameter(torch.tensor(x))
    options = {"lr": ETA_0, "theta_0": THETA_0} | options
    optimizer = DeltaSGD([w], **options)
    points, etas = [x], []
    for k in range(steps):
        optimizer.step(closure_of(optimizer, lambda k=k: loss(w, k)))
        points.append(w.detach().numpy().copy())
        etas.append(float(optimizer.param_groups[0]["eta"]))
    return points, etas


# ---- optimizer, rule and paper --------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("seed", range(3))
def test_the_optimizer_the_rule_and_the_paper_take_the_same_steps(variant: str, seed: int) -> None:
    f, options = Softplus(seed), VARIANTS[variant]
    points, etas = by_hand(f.gradient, f.start, 15, **options)
    for found, sizes in (
        optimized(f.loss, f.start, 15, **options),
        rule(f.gradient, f.start, 15, **options),
    ):
        np.testing.assert_allclose(np.array(found), points, rtol=1e-9)
        np.testing.assert_allclose([float(eta) for eta in map(np.squeeze, sizes)], etas, rtol=1e-9)
    assert len(set(etas)) > 8


@every_variant
def test_a_stack_of_clients_goes_as_each_alone_on_numpy_and_on_torch(variant: str) -> None:
    fs, options = [Softplus(seed) for seed in range(4)], VARIANTS[variant]
    starts = np.array([f.start for f in fs])

    def stacked(w: Any, k: int) -> Any:
        rows = np.array([f.gradient(np.asarray(v), k) for f, v in zip(fs, w, strict=True)])
        return torch.tensor(rows) if isinstance(w, torch.Tensor) else rows

    alone = [rule(f.gradient, f.start, 8, **options)[0] for f in fs]
    for start in (starts, torch.tensor(starts)):
        points, etas = rule(stacked, start, 8, **options)
        assert isinstance(points[-1], type(start))
        assert etas[-1].shape == (4, 1)
        np.testing.assert_allclose(np.array(points), np.stack(alone, 1), rtol=1e-12)
    np.testing.assert_array_equal(starts, [f.start for f in fs])


def test_two_gradients_a_step_and_one_in_the_first() -> None:
    def calls(**options: Any) -> list[int]:
        f, w, seen = Softplus(0), nn.Parameter(torch.zeros(DIM, dtype=torch.float64)), []
        optimizer = DeltaSGD([w], **options)

        def loss(k: int) -> torch.Tensor:
            seen.append(k)
            return f.loss(w, k)

        for k in range(4):
            optimizer.step(closure_of(optimizer, lambda k=k: loss(k)))
        return [seen.count(k) for k in range(4)]

    assert calls() == [1, 2, 2, 2]
    assert calls(same_batch=False) == [1, 1, 1, 1]


def test_a_step_returns_the_loss_where_it_started() -> None:
    f = Softplus(1)
    w = nn.Parameter(torch.tensor(f.start))
    optimizer = DeltaSGD([w])
    for k in range(4):
        expected = float(f.loss(w.detach(), k))
        assert float(optimizer.step(closure_of(optimizer, lambda k=k: f.loss(w, k)))) == expected


# ---- closed forms ---------------------------------------------------------------------------


@pytest.mark.parametrize("eta_0", [0.003, 0.2, 50.0])
def test_the_first_step_is_eta_0_long(eta_0: float) -> None:
    x = np.array([2.0, -3.0, 1.0])
    gradient = np.array([0.5, 2.0, 4.0]) * (x - 1.5)
    points, _ = optimized(bowl([0.5, 2.0, 4.0]), x, 1, lr=eta_0)
    np.testing.assert_allclose(points[1], x - eta_0 * gradient, rtol=1e-13)
    points, _ = optimized(
        bowl([0.5, 2.0, 4.0]), x, 1, lr=eta_0, amplify_first=True, delta=0.4, epsilon=0.01
    )
    grown = math.sqrt(1 + 0.4 * THETA_0) * eta_0 + 0.01
    np.testing.assert_allclose(points[1], x - grown * gradient, rtol=1e-13)


@pytest.mark.parametrize("gamma", [0.4, 1.0, 1.9])
@pytest.mark.parametrize("L", [0.02, 3.0, 700.0])
def test_along_one_direction_the_step_goes_to_gamma_over_twice_the_curvature(
    gamma: float, L: float
) -> None:
    limit = gamma / (2 * L)
    x = np.array([1.5, 4.0, 1.5])  # off the minimiser along the second axis only
    long = optimized(bowl([0.1, L, 9.0]), x, 2, lr=40 * limit, gamma=gamma)[1]
    np.testing.assert_allclose(long, [40 * limit, limit], rtol=1e-12)  # at once
    short = optimized(bowl([0.1, L, 9.0]), x, 12, lr=limit / 3, gamma=gamma, delta=1.0)[1]
    assert min(np.diff(short)) > -1e-12 * limit
    assert short[2] < limit * 0.9  # theta <= 1.62, and 1.62^2 / 3 < 0.9
    np.testing.assert_allclose(short[-1], limit, rtol=1e-7)


@pytest.mark.parametrize("delta", [0.0, 0.02, 0.1, 1.0])
def test_without_curvature_the_step_grows_by_sqrt_1_plus_delta_theta(delta: float) -> None:
    """theta_k -> the root of theta^2 = 1 + delta theta; the loss is linear."""
    slope = torch.tensor([2.0, -1.0], dtype=torch.float64)
    _, etas = optimized(lambda w, k: slope @ w, np.array([0.3, 0.4]), 40, delta=delta, theta_0=1.0)
    ratios = np.array(etas[1:]) / etas[:-1]
    np.testing.assert_allclose(ratios[0], math.sqrt(1 + delta), rtol=1e-12)
    np.testing.assert_allclose(ratios[1:] ** 2, 1 + delta * ratios[:-1], rtol=1e-12)
    assert ratios[-1] == pytest.approx((delta + math.sqrt(delta**2 + 4)) / 2, rel=1e-9)


def test_no_step_grows_beyond_the_bound_nor_beyond_the_inverse_curvature() -> None:
    curvatures = np.array([0.4, 1.0, 2.5])
    x = np.array([9.0, -8.0, 7.0])
    _, etas = optimized(bowl(curvatures), x, 30, gamma=1.0, delta=0.7, theta_0=1.0)
    theta = 1.0
    for before, eta in pairwise(etas):
        assert eta <= math.sqrt(1 + 0.7 * theta) * before * (1 + 1e-12)
        assert eta <= 1 / (2 * 0.4) * (1 + 1e-12)
        theta = eta / before
    assert min(etas[1:]) >= min(etas[0], 1 / (2 * 2.5)) * (1 - 1e-12)


@every_variant
@pytest.mark.parametrize("s", [0.01, 64.0])
def test_scaling_the_loss_or_the_axes_scales_the_steps(variant: str, s: float) -> None:
    """s f with eta_0/s goes through the same points; f(x/s) with s^2 eta_0 through s times them."""
    f, options = Softplus(2), VARIANTS[variant] | {"epsilon": 0.0}
    points, etas = optimized(f.loss, f.start, 10, **options)
    same, smaller = optimized(lambda w, k: s * f.loss(w, k), f.start, 10, lr=ETA_0 / s, **options)
    np.testing.assert_allclose(same, points, rtol=1e-8)
    np.testing.assert_allclose(smaller, np.array(etas) / s, rtol=1e-8)
    wide, larger = optimized(
        lambda w, k: f.loss(w / s, k), s * f.start, 10, lr=ETA_0 * s**2, **options
    )
    np.testing.assert_allclose(wide, s * np.array(points), rtol=1e-8)
    np.testing.assert_allclose(larger, np.array(etas) * s**2, rtol=1e-8)


@pytest.mark.parametrize("same_batch", [True, False])
def test_at_a_stationary_point_nothing_moves_and_nothing_is_nan(same_batch: bool) -> None:
    x = np.array([1.5, 1.5])
    points, etas = optimized(bowl([1.0, 2.0]), x, 5, delta=0.0, same_batch=same_batch)
    np.testing.assert_array_equal(points, np.tile(x, (6, 1)))
    assert etas == [ETA_0] * 5
    gradients = [0.0, 0.0, 3.0, 3.0]  # one batch without a gradient must not end all movement
    points, etas = optimized(
        lambda w, k: gradients[k] * w.sum(), x, 4, delta=0.0, same_batch=same_batch
    )
    np.testing.assert_allclose(points[-1], x - 2 * ETA_0 * 3.0, rtol=1e-14)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_gradients_in_single_precision_give_finite_steps(size: float) -> None:
    """||v||^2 would be 0 or infinite there; norms are taken in double precision."""
    w = nn.Parameter(torch.tensor([3.0, 1.0, -2.0]))
    curvature = torch.tensor([1.0, 2.0, 4.0]) * size
    optimizer = DeltaSGD([w], lr=0.1 / size, gamma=1.0)
    for _ in range(80):
        optimizer.step(closure_of(optimizer, lambda: 0.5 * (curvature * w**2).sum()))
    assert 1 / 8 <= float(optimizer.param_groups[0]["eta"]) * size <= 1 / 2
    assert float(w.detach().norm()) < 1e-3


# ---- as a torch optimizer -------------------------------------------------------------------


def test_one_step_size_over_a_group_and_one_for_each_group() -> None:
    """Split over parameters in one group: as one vector. In groups: as problems of their own."""
    L, x = np.array([1.0, 30.0, 5.0]), np.array([4.0, -2.0, 3.0])

    def split(groups: bool) -> tuple[np.ndarray, list[float]]:
        parts = [nn.Parameter(torch.tensor(x[:1])), nn.Parameter(torch.tensor(x[1:])[None])]
        params: Any = [{"params": [p]} for p in parts] if groups else parts
        optimizer = DeltaSGD(params, lr=0.05, theta_0=THETA_0)
        loss = bowl(L)
        for _ in range(6):
            optimizer.step(
                closure_of(optimizer, lambda: loss(torch.cat([parts[0], parts[1][0]]), 0))
            )
        w = np.concatenate([p.detach().numpy().ravel() for p in parts])
        return w, [float(group["eta"]) for group in optimizer.param_groups]

    def whole(part: slice) -> tuple[np.ndarray, float]:
        points, etas = optimized(bowl(L[part]), x[part], 6, lr=0.05)
        return points[-1], etas[-1]

    together, (eta,) = split(groups=False)
    np.testing.assert_allclose(together, whole(slice(0, 3))[0], rtol=1e-12)
    assert eta == pytest.approx(whole(slice(0, 3))[1], rel=1e-12)
    apart, etas = split(groups=True)
    expected = [whole(slice(0, 1)), whole(slice(1, 3))]
    np.testing.assert_allclose(apart, np.concatenate([e[0] for e in expected]), rtol=1e-12)
    np.testing.assert_allclose(etas, [e[1] for e in expected], rtol=1e-12)
    assert abs(etas[0] - etas[1]) > 1e-3


def test_a_group_has_options_of_its_own() -> None:
    a, b = (nn.Parameter(torch.tensor([3.0], dtype=torch.float64)) for _ in range(2))
    optimizer = DeltaSGD([{"params": [a], "lr": 0.01}, {"params": [b], "gamma": 0.5}], lr=4.0)
    for _ in range(2):
        optimizer.step(closure_of(optimizer, lambda: ((a - 1.5) ** 2 + (b - 1.5) ** 2).sum()))
    first, second = (float(group["eta"]) for group in optimizer.param_groups)
    assert first == pytest.approx(0.01 * math.sqrt(1.1))
    assert second == pytest.approx(0.5 / (2 * 2.0))  # curvature 2


def test_a_parameter_that_the_loss_does_not_reach_stays() -> None:
    used, unused = (nn.Parameter(torch.tensor([4.0, 2.0], dtype=torch.float64)) for _ in range(2))
    optimizer = DeltaSGD([unused, used], lr=0.1, theta_0=THETA_0)
    for _ in range(4):
        optimizer.step(closure_of(optimizer, lambda: bowl([1.0, 3.0])(used, 0)))
    points, _ = optimized(bowl([1.0, 3.0]), np.array([4.0, 2.0]), 4, lr=0.1)
    np.testing.assert_allclose(used.detach(), points[-1], rtol=1e-13)
    assert unused.tolist() == [4.0, 2.0]


@pytest.mark.parametrize("same_batch", [True, False])
def test_a_saved_state_goes_on_where_it_stopped(same_batch: bool) -> None:
    f = Softplus(3)
    options = {"lr": ETA_0, "theta_0": THETA_0, "same_batch": same_batch}
    points, _ = optimized(f.loss, f.start, 9, **options)
    w = nn.Parameter(torch.tensor(f.start))
    optimizer = DeltaSGD([w], **options)
    for k in range(9):
        if k == 4:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            optimizer = DeltaSGD([w], **options)
            optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        if k == 6:
            w, optimizer = copy.deepcopy((w, optimizer))
        optimizer.step(closure_of(optimizer, lambda k=k, w=w: f.loss(w, k)))
    np.testing.assert_array_equal(w.detach(), points[-1])


class Dropping(nn.Module):
    """BatchNorm and dropout; remembers each mask and each mean that BatchNorm saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.masks: list[torch.Tensor] = []
        self.means: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.means.append(h.detach().mean(0))
        mask = nn.functional.dropout(torch.ones_like(h), 0.5, self.training)
        self.masks.append(mask)
        return self.last(mask * self.norm(h))


def steps_with_dropout(
    steps: int = 3, **options: Any
) -> tuple[Dropping, torch.Tensor, list[torch.Tensor]]:
    """Return the model, the generator's state after ``steps``, and the parameters."""
    model = Dropping()
    x = torch.randn(7, 3)
    y = (x.sum(1) > 0).long()
    optimizer = DeltaSGD(model.parameters(), **options)
    if options.get("module") is not None:
        optimizer.module = model
    torch.manual_seed(11)
    for _ in range(steps):
        optimizer.step(closure_of(optimizer, lambda: cross_entropy(model(x), y)))
    return model, torch.get_rng_state(), [p.detach() for p in model.parameters()]


def test_both_gradients_see_the_same_masks_and_each_step_draws_new_ones() -> None:
    model, after, _ = steps_with_dropout()
    first, second, again, third, same = model.masks
    assert torch.equal(second, again)
    assert torch.equal(third, same)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    # as if each batch had been evaluated once
    torch.manual_seed(11)
    drawn = [nn.functional.dropout(torch.ones(7, 6), 0.5) for _ in range(3)]
    assert all(map(torch.equal, drawn, (first, second, third)))
    assert torch.equal(torch.get_rng_state(), after)
    others = steps_with_dropout(same_masks=False)[0].masks
    assert len({tuple(mask.flatten().tolist()) for mask in others}) == 5


def test_running_statistics_are_updated_once_a_step_by_the_present_point() -> None:
    model, _, _ = steps_with_dropout(module=nn.Module())
    assert int(model.norm.num_batches_tracked) == 3
    expected = torch.zeros(6)
    for mean in (model.means[i] for i in (0, 1, 3)):
        expected = 0.9 * expected + 0.1 * mean
    torch.testing.assert_close(model.norm.running_mean, expected)
    assert int(steps_with_dropout()[0].norm.num_batches_tracked) == 5  # unknown module


def test_a_closure_is_needed() -> None:
    optimizer = DeltaSGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"DeltaSGD\.step needs a closure"):
        optimizer.step()


BAD = [
    ({"lr": 0.0}, r"lr must be > 0, got 0\.0"),
    ({"gamma": 0.0}, r"gamma must be > 0, got 0\.0"),
    ({"gamma": float("nan")}, "gamma must be > 0, got nan"),
    ({"delta": -0.1}, r"delta must be >= 0, got -0\.1"),
    ({"theta_0": 0}, "theta_0 must be > 0, got 0"),
    ({"epsilon": -1e-8}, "epsilon must be >= 0, got -1e-08"),
    ({"gamma": "2"}, "gamma must be > 0, got '2'"),
    ({"amplify_first": 1}, "amplify_first must be bool, got 1"),
    ({"same_batch": "no"}, "same_batch must be bool, got 'no'"),
    ({"same_masks": 0}, "same_masks must be bool, got 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_a_bad_option_is_refused_by_name_bound_and_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DeltaSGD([nn.Parameter(torch.ones(1))], **options)
    if not {"same_batch", "same_masks"} & set(options):
        with pytest.raises(ValueError, match=message):
            DeltaSGD([{"params": [nn.Parameter(torch.ones(1))], **options}])


# ---- as a local solver ----------------------------------------------------------------------


def test_the_solver_is_the_rule_on_the_subproblem() -> None:
    """13 examples in batches of 5; the rule gets the batches' gradients by matrices."""
    q, pull = quadratics(4)[3], 0.9
    training = LocalTraining(
        solver="delta-sgd", lr=0.3, solver_params="gamma=1.5 delta=0.4", epochs=3, batch_size=5
    )
    bent = Subproblem(torch.tensor(SLOPE), pull, torch.tensor(CENTRE))
    info = solve(q.problem(), torch.tensor(START), bent, training, stream(1, "local"))
    w = info.w
    rng, parts = stream(1, "local"), []
    for _ in range(3):
        parts += np.split(rng.permutation(q.n), [5, 10])

    def gradient(w: np.ndarray, k: int) -> np.ndarray:
        X, y = q.X[parts[k]], q.y[parts[k]]
        return X.T @ (X @ w - y) / len(y) + SLOPE + pull * (w - CENTRE)

    points, _ = by_hand(gradient, START, 9, eta=0.3, theta=1.0, gamma=1.5, delta=0.4)
    np.testing.assert_allclose(w, points[-1], rtol=1e-9)
    assert info.steps == 9


def test_delta_sgd_goes_to_the_subproblems_minimiser_from_any_first_step() -> None:
    q, pull = quadratics(4)[3], 0.9
    bent = Subproblem(torch.tensor(SLOPE), pull, torch.tensor(CENTRE))
    for lr in (1e-3, 0.2, 20.0):  # gradient descent of 20 runs away
        training = LocalTraining(
            solver="delta-sgd", lr=lr, solver_params="gamma=1 delta=1", steps=150, batch_size=0
        )
        w = solve(q.problem(), torch.tensor(START), bent, training, stream(1, "local")).w
        np.testing.assert_allclose(w, q.argmin(SLOPE, pull, CENTRE), atol=1e-9)


def test_a_solvers_batch_norm_is_updated_once_a_step() -> None:
    torch.manual_seed(2)
    module = Dropping()
    x = torch.randn(13, 3)
    problem = Problem(FlatModel(module), cross_entropy, x, (x.sum(1) > 0).long())
    start = problem.model.vector.clone()
    training = LocalTraining(solver="delta-sgd", epochs=2, batch_size=4)
    info = solve(problem, start, Subproblem(), training, stream(1, "local"))
    w = info.w
    assert info.steps == 8
    # the last batch of an epoch has one example, which updates no statistics
    assert int(module.norm.num_batches_tracked) == 6
    assert w.isfinite().all()
    assert all(map(torch.equal, module.masks[1::2], module.masks[2::2]))


def test_options_of_a_solver_travel_as_text() -> None:
    request = {"solver": "delta-sgd", "lr": 0.5, "solver-params": "gamma=1.5 amplify-first=true"}
    training = LocalTraining().updated(request)
    (group,) = make_optimizer(training, [nn.Parameter(torch.ones(1))]).param_groups
    assert (group["lr"], group["gamma"], group["amplify_first"]) == (0.5, 1.5, True)
    adam = LocalTraining(solver="adam", solver_params="eps=1e-3 amsgrad=true")
    (group,) = make_optimizer(adam, [nn.Parameter(torch.ones(1))]).param_groups
    assert (group["eps"], group["amsgrad"]) == (1e-3, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver_params": "gama=2"}, r"no option \['gama'\]; it has \['gamma', 'delta',"),
        ({"solver_params": "lr=2"}, r"no option \['lr'\]"),
        ({"solver_params": "module=net"}, r"no option \['module'\]"),
        ({"solver_params": "gamma"}, "name=value, got 'gamma'"),
        ({"solver_params": "gamma=-1"}, "gamma must be > 0, got -1"),
        ({"solver_params": 2.0}, r"solver_params must be str, got 2\.0"),
        ({"momentum": 0.9}, "solver 'delta-sgd' has no momentum"),
    ],
)
def test_a_bad_option_of_a_solver_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalTraining(solver="delta-sgd", **settings)


def test_a_run_config_takes_the_solver_with_its_options() -> None:
    config = RunConfig.parse(
        {"algorithm": "fedadmm", "solver": "delta-sgd", "solver-params": "delta=0.02"}
    )
    assert config.local()["solver-params"] == "delta=0.02"
    assert config.lr == 0.2  # eta_0 of the paper, on any data set
    with pytest.raises(ValueError, match="delta must be >= 0, got -1"):
        RunConfig.parse({"solver": "delta-sgd", "solver-params": "delta=-1"})


# ---- inside federated algorithms ------------------------------------------------------------

LOCAL = {"solver": "delta-sgd", "lr": 0.9, "epochs": 8, "batch-size": 0, "solver-params": "gamma=1"}
"""A first step of 0.9 is too long for gradient descent: curvatures go up to 2.5."""


def test_fedadmm_goes_to_the_optimum_of_clients_that_differ() -> None:
    problems = quadratics(3)

    def distance(rounds: int, **local: Any) -> float:
        strategy = STRATEGIES["fedadmm"](rho=0.5, fraction_evaluate=0.0, local=LOCAL | local)
        with np.errstate(all="ignore"):
            return float(np.abs(train(strategy, grid(problems), rounds) - optimum(problems)).max())

    assert distance(80) < 1e-8
    assert distance(5, solver="gd", **{"solver-params": ""}) > 1e3


def test_fedavg_goes_to_a_minimiser_that_all_clients_share() -> None:
    b = np.array([3.0, -1.0, 2.0, 0.5, -4.0])
    problems = shared_minimiser(quadratics(3), b)
    strategy = STRATEGIES["fedavg"](fraction_evaluate=0.0, local=LOCAL)
    np.testing.assert_allclose(train(strategy, grid(problems), 40), b, atol=1e-9)


PROBLEMS = quadratics(3)


def mean_reply(theta: np.ndarray) -> np.ndarray:
    """What the clients' replies average to, by the paper's algorithm on matrices."""
    sizes = np.array([q.n for q in PROBLEMS])
    replies = [
        by_hand(lambda w, k, q=q: q.gradient(w), theta, 4, eta=0.2, theta=1.0, delta=0.3)[0][-1]
        for q in PROBLEMS
    ]
    return sizes @ np.array(replies) / sizes.sum()


def adam(theta: np.ndarray, rounds: int) -> np.ndarray:
    m, v = np.zeros(DIM), np.zeros(DIM)
    for t in range(1, rounds + 1):
        change = mean_reply(theta) - theta
        m, v = 0.8 * m + 0.2 * change, 0.9 * v + 0.1 * change**2
        rate = 0.3 * math.sqrt(1 - 0.9 ** (t + 1)) / (1 - 0.8 ** (t + 1))
        theta = theta + rate * m / (np.sqrt(v) + 0.01)
    return theta


def yogi(theta: np.ndarray, rounds: int) -> np.ndarray:
    m, v = np.zeros(DIM), np.zeros(DIM)
    for _ in range(rounds):
        change = mean_reply(theta) - theta
        m = 0.8 * m + 0.2 * change
        v = v + np.where(v < change**2, 0.1, -0.1) * change**2
        theta = theta + 0.3 * m / (np.sqrt(v) + 0.01)
    return theta


def heavy_ball(theta: np.ndarray, rounds: int) -> np.ndarray:
    velocity = np.zeros(DIM)
    for _ in range(rounds):
        velocity = 0.6 * velocity + mean_reply(theta) - theta
        theta = theta + 0.7 * velocity
    return theta


ALL_THREE = {"min_train_nodes": 3, "min_available_nodes": 3, "fraction_evaluate": 0.0}
RATES = {"eta": 0.3, "beta_1": 0.8, "beta_2": 0.9, "tau": 0.01}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (lambda: FedAdam(**RATES, **ALL_THREE), adam),
        (lambda: FedYogi(**RATES, **ALL_THREE), yogi),
        (
            lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.6, **ALL_THREE),
            heavy_ball,
        ),
    ],
    ids=["FedAdam", "FedYogi", "FedAvgM"],
)
def test_flowers_server_optimizers_step_by_our_clients_replies(
    strategy: Callable[[], Any], expected: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    config = ConfigRecord(
        {
            "solver": "delta-sgd",
            "lr": 0.2,
            "epochs": 4,
            "batch-size": 0,
            "solver-params": "delta=0.3",
        }
    )
    result = strategy().start(grid(PROBLEMS), to_record(START), num_rounds=3, train_config=config)
    np.testing.assert_allclose(to_vector(result.arrays), expected(START, 3), rtol=1e-9)
