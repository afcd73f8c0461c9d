"""Delta-SGD: closed forms of its step sizes; optimizer, rule and plain loop alike."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from delta import ETA_0, THETA_0, USUAL, Dropping, by_hand
from problems import DIM, Softplus, bowl, closure_of, steps_of
from torch import nn
from torch.nn.functional import cross_entropy

from clients import DeltaSGD
from fl_strategies.solvers import delta_sgd

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "gamma": {"gamma": 0.7, "delta": 1.0},
    "authors": dict(delta_sgd.Options.authors_rule),
    "epsilon": {"epsilon": 0.01, "delta": 0.5},
    "own batch": {"same_batch": False, "delta": 0.5},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def rule(
    gradient: Callable[[Any, int], Any],
    x: Any,
    steps: int,
    eta_0: float = ETA_0,
    theta_0: float = THETA_0,
    same_batch: bool = True,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Return the points and step sizes of the pure rule."""
    state, points, etas = delta_sgd.first_state(eta_0=eta_0, theta_0=theta_0), [x], []
    for k in range(steps):
        g_before = state.g if state.x is None or not same_batch else gradient(state.x, k)
        state, x = delta_sgd.step(state, x, gradient(x, k), g_before, **USUAL | options)
        points.append(x)
        etas.append(state.eta)
    return points, etas


optimized = partial(steps_of, DeltaSGD, lr=ETA_0, theta_0=THETA_0)


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


BAD = [
    ({"lr": 0.0}, r"lr must be > 0, got 0\.0"),
    ({"gamma": 0.0}, r"gamma must be > 0, got 0\.0"),
    ({"gamma": float("nan")}, "gamma must be a finite number > 0, got nan"),
    ({"delta": -0.1}, r"delta must be >= 0, got -0\.1"),
    ({"theta_0": 0}, "theta_0 must be > 0, got 0"),
    ({"epsilon": -1e-8}, "epsilon must be >= 0, got -1e-08"),
    ({"gamma": "2"}, "gamma must be a finite number > 0, got '2'"),
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
