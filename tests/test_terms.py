"""Terms added at optimizer steps are the terms written into the loss, whatever optimizer steps.

Mistakes these laws are written against: terms twice where an optimizer steps another, none where a
gradient is missing or sparse, unscaled ones in scaled gradients, a value that line searches do not
see, another sum of weights than that of the steps taken, hooks that stay.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from emulated_gpu import EmulatedGPU
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import (
    LBFGS,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    NAdam,
    Optimizer,
    RMSprop,
    lr_scheduler,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from clients import SPS, DeltaSGD
from clients.learning.border import Border
from clients.learning.terms import Ahead, Terms
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.gradient_weights import weight_of

PULL = 0.7


def net() -> nn.Module:
    """A net with matrices, vectors, BatchNorm, a tied weight and a frozen bias."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)
    ).double()
    model[5].weight = model[3].weight
    model[5].bias.requires_grad_(False)
    return model


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    shapes = [(steps, 12, 5), (steps, 12, 4)]
    x, y = (torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes)
    return [*zip(x, y, strict=True)]


BATCHES = batches(8)


class Case:
    """One training of a net: with the terms written into its loss, or added at its steps."""

    def __init__(self, subproblem: str, written: bool, model: nn.Module | None = None) -> None:
        self.model = model or net()
        self.border = Border(self.model)
        self.start = self.border.vector.clone()
        made = torch.Generator().manual_seed(2)
        slope, centre = torch.randn(2, len(self.start), generator=made, dtype=torch.float64) / 20
        parts = {
            "slope and pull": Subproblem(slope, PULL, self.start + centre),
            "slope": Subproblem(slope),
            "pull": Subproblem(pull=PULL, centre=self.start + centre),
        }
        self.subproblem, self.written = parts[subproblem], written

    def terms(self, w: Tensor) -> Any:
        """The terms' value, less the constant of ``clients.learning.terms``."""
        slope, pull, centre = self.subproblem
        if not pull:
            return (slope * (w - self.start)).sum()
        return pull / 2 * ((w - centre + slope / pull) ** 2).sum()

    def loss(self, x: Tensor, y: Tensor, scale: Any = 1.0) -> Tensor:
        loss = mse_loss(self.model(x), y)
        if self.written:
            w = torch.cat([p.reshape(-1) for p in self.border.shared])
            loss = loss + self.terms(w)
        return loss * scale

    @contextlib.contextmanager
    def active(self, **options: Any) -> Iterator[Terms]:
        terms = Terms(self.subproblem, self.start, self.border.views, **options)
        if self.written:
            yield terms
            return
        with terms.active():
            terms.attach(self.border.shared)
            yield terms
        terms.check_seen()


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def plain(make: Callable[[list[nn.Parameter]], Optimizer], schedule: Any = None) -> Any:
    """A loop of backward and step."""

    def loop(case: Case) -> int:
        optimizer = make(parameters(case.model))
        scheduler = schedule(optimizer) if schedule else None
        for x, y in BATCHES:
            optimizer.zero_grad()
            case.loss(x, y).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
        return len(BATCHES)

    return loop


def by_closure(
    make: Callable[[list[nn.Parameter]], Optimizer], *, inside: bool = True, full: bool = False
) -> Any:
    """A loop of steps with a closure, which zeroes the gradients or not; of one batch if full."""

    def loop(case: Case) -> int:
        optimizer = make(parameters(case.model))
        for x, y in BATCHES[:1] * 2 if full else BATCHES:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                if inside:
                    optimizer.zero_grad()
                loss = case.loss(x, y)
                loss.backward()
                return loss

            if not inside:
                optimizer.zero_grad(set_to_none=False)
            optimizer.step(closure)
        return 2 if full else len(BATCHES)

    return loop


# ---- optimizers that are not torch's ------------------------------------------------------------


class Layerwise(Optimizer):
    """LARS, and with ``adam`` LAMB: each tensor's step is scaled by its own norms."""

    def __init__(self, params: Any, lr: float, *, adam: bool = False) -> None:
        super().__init__(params, {"lr": lr, "adam": adam})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, along = self.state[p], p.grad
                if group["adam"]:
                    m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * p.grad
                    v = state["v"] = 0.99 * state.get("v", 0.0) + 0.01 * p.grad**2
                    along = m / (v.sqrt() + 1e-6)
                ratio = p.norm() / (along.norm() + 1e-9)
                p.sub_(along, alpha=float(group["lr"] * ratio))
        return None


class Lookahead(Optimizer):
    """Steps another optimizer, and every third time goes back half the way."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.slow, self.taken = base, [], 0
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.slow = [p.detach().clone() for p in self._all()]

    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.taken += 1
        if self.taken % 3 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self._all(), strict=True):
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)
        return loss


class SAM(Optimizer):
    """Steps another optimizer along the gradient at w + rho g/||g||; gradients at w are there."""

    def __init__(self, base: Optimizer, rho: float = 0.05) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.rho = base, rho

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        reached = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in reached]).norm()
        kept = [p.clone() for p in reached]
        for p in reached:
            p.add_(p.grad, alpha=float(self.rho / norm))
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for p, before in zip(reached, kept, strict=True):
            p.copy_(before)
        self.base.step()
        return loss


class ScheduleFree(Optimizer):
    """Schedule-free SGD: gradients at y = 0.9 x + 0.1 z; x is the mean of the z."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                z, x = state.get("z", p.clone()), state.get("x", p.clone())
                z = z - group["lr"] * p.grad
                x = x + (z - x) / self.taken
                state["z"], state["x"] = z, x
                p.copy_(0.9 * x + 0.1 * z)
        return None


class Clipped(SGD):
    """Clips its gradients' norm, or takes their means off, and steps as its base does."""

    centred = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        reached = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.centred:
            for p in reached:
                p.grad = p.grad - p.grad.mean()
        else:
            nn.utils.clip_grad_norm_(reached, 0.1)
        return super().step(closure)


SGD([nn.Parameter(torch.zeros(1))], 0.1)  # from now on PyTorch calls hooks in SGD.step itself


class Centred(Clipped):
    centred = True


class Several(Optimizer):
    """Steps two optimizers; its own parameters are the first one's."""

    def __init__(self, *optimizers: Optimizer) -> None:
        super().__init__(optimizers[0].param_groups, {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.optimizers:
            optimizer.step()


def sam_loop(case: Case) -> int:
    optimizer = SAM(SGD(parameters(case.model), 0.05, momentum=0.9))
    for x, y in BATCHES:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = case.loss(x, y)
            loss.backward()
            return loss

        optimizer.zero_grad()
        closure()
        optimizer.step(closure)
    return len(BATCHES)


# ---- loops --------------------------------------------------------------------------------------


def accumulated(case: Case) -> int:
    """Gradients of two batches, each with half the terms where these are written into the loss."""
    optimizer = Adam(parameters(case.model), 0.02)
    for k, (x, y) in enumerate(BATCHES):
        (case.loss(x, y) / 2).backward()
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    return len(BATCHES) // 2


def scaled(make: Callable[[list[nn.Parameter]], Optimizer], *, unscale: bool = False) -> Any:
    """A loop with a GradScaler; some of its steps are skipped."""

    def loop(case: Case) -> int:
        optimizer = make(parameters(case.model))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for k, (x, y) in enumerate(BATCHES):
            optimizer.zero_grad()
            scaler.scale(case.loss(x, y, torch.inf if k == 3 else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return len(BATCHES) - 1

    return loop


def two_optimizers(case: Case) -> int:
    *body, last = parameters(case.model)
    optimizers = SGD(body, 0.05, momentum=0.9), Adam([last], 0.01)
    for x, y in BATCHES:
        for optimizer in optimizers:
            optimizer.zero_grad()
        case.loss(x, y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return 2 * len(BATCHES)


def two_optimizers_by_one(case: Case) -> int:
    *body, last = parameters(case.model)
    make = plain(lambda ps: Several(Clipped(body, 0.05), Adam([last], 0.01)))
    return 2 * int(make(case))


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    some = {"params": params[:2], "lr": 0.02}
    return [some, {"params": params[2:], "lr": 0.01, "weight_decay": 0.1}]


LOOPS: dict[str, Callable[[Case], int]] = {
    "momentum": plain(lambda ps: SGD(ps, 0.05, momentum=0.9)),
    "Nesterov, decay": plain(
        lambda ps: SGD(ps, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    ),
    "fused SGD": plain(lambda ps: SGD(ps, 0.05, momentum=0.9, fused=True)),
    "Adam": plain(lambda ps: Adam(ps, 0.02)),
    "fused Adam": plain(lambda ps: Adam(ps, 0.02, fused=True)),
    "AMSGrad, foreach": plain(lambda ps: Adam(ps, 0.02, amsgrad=True, foreach=True)),
    "AdamW, two groups": plain(lambda ps: AdamW(groups(ps))),
    "RMSprop": plain(lambda ps: RMSprop(ps, 0.01)),
    "Adagrad": plain(lambda ps: Adagrad(ps, 0.1)),
    "NAdam": plain(lambda ps: NAdam(ps, 0.01)),
    "Adafactor": plain(lambda ps: Adafactor(ps, 0.05)),
    "Muon": plain(lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], 0.02)),
    "LARS": plain(lambda ps: Layerwise(ps, 0.02)),
    "LAMB": plain(lambda ps: Layerwise(ps, 0.02, adam=True)),
    "schedule-free": plain(lambda ps: ScheduleFree(ps, 0.05)),
    "a schedule": plain(
        lambda ps: SGD(ps, 0.1, momentum=0.9), lambda o: lr_scheduler.CosineAnnealingLR(o, 8)
    ),
    "Lookahead": plain(lambda ps: Lookahead(Adam(ps, 0.02))),
    "Lookahead, closure": by_closure(lambda ps: Lookahead(SGD(ps, 0.05, momentum=0.9))),
    "clipped in the step": plain(lambda ps: Clipped(ps, 0.05, momentum=0.9)),
    "centred in the step": plain(lambda ps: Centred(ps, 0.05, momentum=0.9)),
    "SAM": sam_loop,
    "L-BFGS": by_closure(lambda ps: LBFGS(ps, 0.5, max_iter=3), full=True),
    "L-BFGS, strong Wolfe": by_closure(
        lambda ps: LBFGS(ps, max_iter=3, line_search_fn="strong_wolfe"), full=True
    ),
    "SPS": by_closure(lambda ps: SPS(ps)),
    "Delta-SGD": by_closure(lambda ps: DeltaSGD(ps, 0.1)),
    "a closure that adds to gradients": by_closure(lambda ps: Adam(ps, 0.02), inside=False),
    "accumulation": accumulated,
    "GradScaler": scaled(lambda ps: Adam(ps, 0.02)),
    "GradScaler, fused": scaled(lambda ps: Adam(ps, 0.02, fused=True)),
    "GradScaler, fused SGD": scaled(lambda ps: SGD(ps, 0.05, momentum=0.9, fused=True)),
    "GradScaler, unscaled before": scaled(lambda ps: Adam(ps, 0.02, fused=True), unscale=True),
    "two optimizers": two_optimizers,
    "an optimizer that steps two": two_optimizers_by_one,
}


ONE_TERM = ("Adam", "SPS", "L-BFGS, strong Wolfe", "GradScaler, fused")
"""Loops that show what one term alone adds: to gradients, to a closure's value, to scaled ones."""


@pytest.mark.parametrize(
    ("loop", "subproblem"),
    [*product(LOOPS, ["slope and pull"]), *product(ONE_TERM, ["slope", "pull"])],
)
def test_steps_are_those_on_the_loss_with_the_terms(loop: str, subproblem: str) -> None:
    written, added = Case(subproblem, written=True), Case(subproblem, written=False)
    LOOPS[loop](written)
    with added.active() as terms:
        steps = LOOPS[loop](added)
    assert terms.steps == steps
    np.testing.assert_allclose(added.border.vector, written.border.vector, 1e-12, 1e-12)
    assert float((added.border.vector - added.start).abs().max()) > 1e-3
    for ours, theirs in zip(added.model.buffers(), written.model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# ---- kinds of gradients and parameters ----------------------------------------------------------


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_and_rows_that_no_sample_reaches_get_the_terms(sparse: bool) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=sparse).double()
    w, slope = model.weight.detach().clone(), torch.ones(18, dtype=torch.float64)
    case = Case("slope", written=False, model=model)
    case.subproblem = Subproblem(slope)
    with case.active():
        optimizer = SGD(model.parameters(), 0.1)
        model(torch.tensor([1, 1, 4])).sum().backward()
        optimizer.step()
    counts = torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0, 0.0])[:, None]
    torch.testing.assert_close(model.weight.detach(), w - 0.1 * (counts + 1.0))


def test_a_parameter_without_a_gradient_moves_by_the_terms_and_a_frozen_one_does_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    case = Case("slope", written=False, model=model)
    case.subproblem = Subproblem(torch.ones(12, dtype=torch.float64))
    before = [p.detach().clone() for p in model.parameters()]
    with case.active():
        model[0].bias.requires_grad_(False)
        optimizer = SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model[0](torch.zeros(1, 2).double()).sum().backward()
            optimizer.step()
    moved = [
        float((a.detach() - b).mean()) for a, b in zip(model.parameters(), before, strict=True)
    ]
    np.testing.assert_allclose(moved, [-0.2, 0.0, -0.2, -0.2], atol=1e-15)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_a_wrapped_module_has_the_same_parameters(wrap: Any) -> None:
    ends = []
    for written in (True, False):
        case = Case("slope and pull", written=written)
        with case.active():
            wrapped = case.model if written else wrap(case.model)
            optimizer = SGD(wrapped.parameters(), 0.05, momentum=0.9)
            for x, y in BATCHES:
                optimizer.zero_grad()
                loss = mse_loss(wrapped(x), y)
                if written:
                    loss = loss + case.terms(torch.cat([p.reshape(-1) for p in case.border.shared]))
                loss.backward()
                optimizer.step()
        ends.append(case.border.vector)
    np.testing.assert_allclose(*ends, 1e-12, 1e-12)


@pytest.mark.slow
def test_a_compiled_step_gets_the_terms() -> None:
    ends = []
    for written in (True, False):
        case = Case("slope and pull", written=written)
        with case.active():
            optimizer = Adam(parameters(case.model), torch.tensor(0.02))
            step = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="eager")
            for x, y in BATCHES:
                optimizer.zero_grad()
                case.loss(x, y).backward()
                step()
        ends.append(case.border.vector)
    np.testing.assert_allclose(*ends, 1e-12, 1e-12)


def test_clipped_gradients_get_the_terms_whole() -> None:
    """f's gradient is clipped, the algorithm's correction is not."""
    case = Case("slope and pull", written=False)
    before, norm = case.border.vector, 0.01
    with case.active():
        optimizer = SGD(parameters(case.model), 0.1)
        case.loss(*BATCHES[0]).backward()
        nn.utils.clip_grad_norm_(case.model.parameters(), norm)
        clipped = torch.cat([p.grad.reshape(-1) for p in case.border.shared if p.grad is not None])
        optimizer.step()
    assert float(clipped.norm()) == pytest.approx(norm, rel=1e-3)
    expected = before - 0.1 * case.subproblem.gradient(before, clipped)
    torch.testing.assert_close(case.border.vector, expected, rtol=1e-12, atol=1e-12)


# ---- what steps add up to -----------------------------------------------------------------------


def weighed(make: Callable[[list[nn.Parameter]], Any], pull: float = 0.0, **how: Any) -> Any:
    """Return what 8 steps on a gradient of 1 are weighed with, and how far they went."""
    model = nn.ParameterList([torch.zeros(2), torch.zeros(3)]).double()
    border = Border(model)
    terms = Terms(Subproblem(pull=pull), border.vector, border.views, rates=True)
    with terms.active():
        terms.attach(border.shared)
        optimizers = make([*model])
        optimizers, schedules = optimizers if isinstance(optimizers, tuple) else (optimizers, [])
        for _ in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(p.sum() for p in model).backward()
            for optimizer in optimizers:
                optimizer.step()
            for schedule in schedules:
                schedule.step()
    return *terms.weights(), -border.vector


def with_cosine(ps: list[nn.Parameter]) -> Any:
    optimizer = SGD(ps, 0.1, momentum=0.9)
    return [optimizer], [lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def in_groups(ps: list[nn.Parameter]) -> Any:
    return [SGD([{"params": ps[:1], "lr": 0.3}, {"params": ps[1:]}], 0.1, momentum=0.5)]


STEPS: dict[str, tuple[Callable[[list[nn.Parameter]], Any], float]] = {
    "plain": (lambda ps: [SGD(ps, 0.1)], 0.0),
    "momentum": (lambda ps: [SGD(ps, 0.1, momentum=0.9)], 0.0),
    "Nesterov": (lambda ps: [SGD(ps, 0.1, momentum=0.9, nesterov=True)], 0.0),
    "momentum and a pull": (lambda ps: [SGD(ps, 0.1, momentum=0.9)], 0.7),
    "Nesterov and a pull": (lambda ps: [SGD(ps, 0.1, momentum=0.6, nesterov=True)], 0.7),
    "cosine": (with_cosine, 0.0),
    "groups": (in_groups, 0.0),
    "two optimizers": (lambda ps: [SGD(ps[:1], 0.1), SGD(ps[1:], 0.1, momentum=0.9)], 0.0),
    "twice the same": (lambda ps: [SGD(ps, 0.1), SGD(ps, 0.1, momentum=0.9)], 0.0),
}


@pytest.mark.parametrize("how", STEPS)
def test_the_rates_of_steps_are_how_far_they_go_on_a_gradient_of_one(how: str) -> None:
    """For SCAFFOLD's c, and FedNova's a in units of a parameter's own first rate."""
    a, A, moved = weighed(*STEPS[how])
    np.testing.assert_allclose(np.broadcast_to(A, 5), moved, rtol=1e-12)
    same = how != "two optimizers"
    assert np.isnan(a) != same
    if same:
        np.testing.assert_allclose(a * (0.3 if how == "groups" else 0.1), moved[0], rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("pull", [0.0, 0.7])
def test_door_twos_closed_form_is_the_sum_that_the_hook_makes(
    momentum: float, nesterov: bool, pull: float
) -> None:
    how = {"momentum": momentum, "nesterov": nesterov and momentum > 0.0}
    a, _, _ = weighed(lambda ps: [SGD(ps, 0.1, **how)], pull)
    assert weight_of(8, pull=0.1 * pull, **how) == pytest.approx(a, rel=1e-12)


def test_steps_that_a_scaler_skips_weigh_nothing() -> None:
    model = nn.ParameterList([torch.zeros(2)]).double()
    border = Border(model)
    terms = Terms(Subproblem(), border.vector, border.views, rates=True)
    with terms.active():
        terms.attach(border.shared)
        optimizer = SGD([*model], 0.1, momentum=0.9, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for k in range(5):
            optimizer.zero_grad()
            scaler.scale(model[0].sum() * (torch.inf if k == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert terms.steps == 4
    np.testing.assert_allclose(terms.weights()[1], -border.vector[0], rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda ps: Adam(ps, 0.1), "the training loop steps Adam$"),
        (lambda ps: SGD(ps, 0.1, momentum=0.9, dampening=0.1), "steps SGD with dampening$"),
        (lambda ps: SGD(ps, 0.1, maximize=True), "steps SGD with maximize$"),
        (lambda ps: Lookahead(SGD(ps, 0.1)), "steps Lookahead$"),
    ],
)
def test_steps_that_are_not_known_to_add_up_are_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        weighed(lambda ps: [make(ps)])


# ---- FedBCD's steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_that_go_ahead_are_accelerated_projected_gradient_steps(momentum: float) -> None:
    """By matrices: e = x + zeta (x - x_prev); x+ = Proj(e - lr v), v+ = m v + gradient at e."""
    rng = np.random.default_rng(0)
    A = rng.normal(size=(4, 4))
    A, b = A @ A.T / 4 + np.eye(4), rng.normal(size=4)
    start, previous, z = rng.normal(size=(3, 4)) / 2
    zeta, box, lr, gamma = 0.8, 0.6, 0.05, 0.3
    model = nn.ParameterList([torch.tensor(start[:1]), torch.tensor(start[1:])])
    border, ahead = Border(model), Ahead(torch.tensor(previous), zeta, box)
    subproblem = Subproblem(pull=gamma, centre=torch.tensor(z))
    terms = Terms(subproblem, torch.tensor(start), border.views, ahead=ahead)
    x, before, v = start, previous, 0.0
    border.write(ahead.of(torch.tensor(start)))
    with terms.active():
        terms.attach(border.shared)
        optimizer = SGD([*model], lr, momentum=momentum)
        for _ in range(6):
            optimizer.zero_grad()
            w = torch.cat([*model])
            (w @ torch.tensor(A) @ w / 2 - w @ torch.tensor(b)).backward()
            optimizer.step()
            e = x + zeta * (x - before)
            v = momentum * v + A @ e - b + gamma * (e - z)
            x, before = np.clip(e - lr * v, -box, box), x
    for ours, theirs in zip(terms.iterates, (x, before), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-15)


# ---- never silently FedAvg ----------------------------------------------------------------------


def hooks() -> int:
    return len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)


def stepped(model: nn.Module, *, of: nn.Module | None = None) -> None:
    optimizer = SGD(parameters(of or model), 0.1)
    mse_loss((of or model)(BATCHES[0][0]), BATCHES[0][1]).backward()
    optimizer.step()


def skipped_steps(model: nn.Module, fused: bool) -> None:
    optimizer = SGD(parameters(model), 0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        scaler.scale(model(BATCHES[0][0]).sum() * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()


SCALER_STEP = torch.amp.GradScaler.step


def swallowing(swallowed: bool) -> Any:
    return contextlib.suppress(ValueError) if swallowed else contextlib.nullcontext()


SILENT: dict[str, tuple[Callable[[Terms, Border], None], str]] = {
    "nothing attached": (lambda t, b: stepped(b.module), "nothing was attached.*1 steps were of"),
    "no step": (lambda t, b: t.attach(b.shared), "no optimizer stepped the attached"),
    "a copy": (
        lambda t, b: (t.attach(b.shared), stepped(b.module, of=copy.deepcopy(b.module)))[1],
        "no optimizer stepped the attached.*1 steps were of other parameters, such as a copy's",
    ),
    "a step before": (
        lambda t, b: (stepped(b.module), t.attach(b.shared))[0],
        "stepped the module before it was attached",
    ),
    "another after a step": (
        lambda t, b: (t.attach(b.shared), stepped(b.module), t.attach(Border(net()).shared))[1],
        "another module was attached after 1 optimizer steps",
    ),
    "all skipped": (
        lambda t, b: (t.attach(b.shared), skipped_steps(b.module, False))[1],
        "all its 3 steps were skipped for infinite gradients",
    ),
    "all skipped, fused": (
        lambda t, b: (t.attach(b.shared), skipped_steps(b.module, True))[1],
        "all its 3 steps were skipped for infinite gradients",
    ),
}


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("mistake", SILENT)
def test_a_loop_that_the_terms_do_not_reach_is_an_error(mistake: str, swallowed: bool) -> None:
    loop, message = SILENT[mistake]
    border = Border(net())
    terms = Terms(Subproblem(pull=0.1, centre=border.vector), border.vector, border.views)

    def solve() -> None:
        with terms.active(), swallowing(swallowed):
            loop(terms, border)
        terms.check_seen()

    with pytest.raises(ValueError, match=message):
        solve()
    assert hooks() == 0
    assert torch.amp.GradScaler.step is SCALER_STEP


def test_without_terms_nothing_need_be_attached() -> None:
    border = Border(net())
    terms = Terms(Subproblem(), border.vector, border.views)
    with terms.active():
        stepped(border.module)
    terms.check_seen()


def test_the_same_module_again_is_nothing_and_another_before_a_step_takes_its_place() -> None:
    border, other = Border(net()), Border(net())
    start, terms = border.vector, Terms(Subproblem(pull=1.0), border.vector, border.views)
    with terms.active():
        terms.attach(other.shared)
        terms.attach(border.shared)
        stepped(border.module)
        terms.attach(border.shared)
    terms.check_seen()
    assert terms.steps == 1
    assert not torch.equal(border.vector, start)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_loop_that_raises_leaves_no_hook_and_nothing_attached(error: type[BaseException]) -> None:
    case = Case("pull", written=False)

    def solve() -> None:
        with case.active():
            assert hooks() == 2
            raise error

    with pytest.raises(error):
        solve()
    assert hooks() == 0
    before = case.border.vector
    optimizer = SGD(parameters(case.model), 0.1)
    optimizer.step()
    torch.testing.assert_close(case.border.vector, before, rtol=0, atol=0)


class Failing(SGD):
    def step(self, closure: Any = None) -> Any:
        raise KeyError("no such batch")


@pytest.mark.parametrize("make", [Failing, lambda ps, lr: LBFGS(ps, lr)])
def test_a_step_that_raises_hides_no_later_step(make: Any) -> None:
    ends, errors = [], []
    for fails in (False, True):
        case = Case("pull", written=False)
        with case.active():
            optimizer = make(parameters(case.model), 0.1)
            case.loss(*BATCHES[0]).backward()
            if fails:
                with pytest.raises(KeyError) as error:
                    optimizer.step(lambda: {}["no such batch"])
                errors.append(error)  # whose traceback holds the call
            case.border.write(case.start)
            plain(lambda ps: SGD(ps, 0.1))(case)
        ends.append(case.border.vector)
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.parametrize("swallowed", [False, True])
def test_more_steps_than_the_most_are_refused_where_they_begin(swallowed: bool) -> None:
    case = Case("pull", written=False)
    taken = []

    def solve() -> None:
        with case.active(most=3):
            for _ in range(5):
                with swallowing(swallowed):
                    stepped(case.model)
                    taken.append(1)

    with pytest.raises(ValueError, match=r"more than 3 optimizer steps.*max_steps"):
        solve()
    assert len(taken) == 3


# ---- on a GPU -----------------------------------------------------------------------------------


def test_no_step_but_the_first_waits_for_a_device_and_terms_move_to_it_once() -> None:
    """With rates, too: the module goes to the device after it was attached."""

    def waits(steps: int) -> list[int]:
        with EmulatedGPU() as gpu:
            border = Border(nn.Linear(5, 4))
            start = border.vector
            subproblem = Subproblem(0.1 * start, 0.5, start)
            terms = Terms(subproblem, start, border.views, rates=True)
            with terms.active():
                terms.attach(border.shared)
                model = border.module.to("cuda")
                x = torch.ones(3, 5).to("cuda")
                optimizer = SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)
                before = gpu.reads, gpu.to_host, gpu.to_device
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
                after = gpu.reads, gpu.to_host, gpu.to_device
        return [b - a for a, b in zip(before, after, strict=True)]

    # two parameters: the first step compares each with its start; slope, centre and start move
    assert waits(2) == waits(7) == [2, 0, 6]
