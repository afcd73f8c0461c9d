"""Laws of the local solvers, on subproblems f(w) + <a, w> + (r/2) ||w - c||^2."""

from __future__ import annotations

import copy
import sys
from itertools import product
from typing import Any

import dog
import numpy as np
import prodigyopt
import pytest
import schedulefree
import torch
from problems import CENTRE, DIM, SLOPE, Quadratic, quadratics
from torch import nn
from torch.nn.functional import cross_entropy

from clients import Border, FedAvgClient, LocalTraining, Problem, solve
from fl_strategies import FedAvg
from fl_strategies.core.oracle import Solved
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.local import PACKAGED

QUADRATIC = quadratics(4)[3]
"""13 examples: mini-batches of 4 leave one of a single example."""
START = np.array([2.0, -1.0, 0.5, 3.0, -4.0])
PULL = 0.9


def bent() -> Subproblem:
    return Subproblem(torch.tensor(SLOPE), PULL, torch.tensor(CENTRE))


def run(
    training: LocalTraining,
    quadratic: Quadratic = QUADRATIC,
    subproblem: Subproblem | None = None,
    seed: int = 1,
) -> tuple[np.ndarray, Solved]:
    subproblem = bent() if subproblem is None else subproblem
    solved = solve(
        quadratic.problem(), torch.tensor(START), subproblem, training, stream(seed, "local")
    )
    return solved.w.numpy(), solved


def slope_at(w: np.ndarray, quadratic: Quadratic = QUADRATIC) -> np.ndarray:
    """The subproblem's gradient, by its matrix form."""
    slope: np.ndarray = quadratic.A @ (w - quadratic.b) + SLOPE + PULL * (w - CENTRE)
    return slope


def twin(make: Any, batch_size: int, epochs: int, seed: int = 1, decay: float = 0.0) -> np.ndarray:
    """Torch's own optimizer on the subproblem's loss, by autograd, over the same batches."""
    rng = stream(seed, "local")
    w = nn.Parameter(torch.tensor(START))
    optimizer = make([w])
    X, y = torch.tensor(QUADRATIC.X), torch.tensor(QUADRATIC.y)
    slope, centre = torch.tensor(SLOPE), torch.tensor(CENTRE)
    for _ in range(epochs):
        order = rng.permutation(QUADRATIC.n) if batch_size else np.arange(QUADRATIC.n)
        for first in range(0, QUADRATIC.n, batch_size or QUADRATIC.n):
            chosen = order[first : first + (batch_size or QUADRATIC.n)]

            def closure(chosen: Any = chosen) -> torch.Tensor:
                optimizer.zero_grad()
                loss = 0.5 * ((X[chosen] @ w - y[chosen]) ** 2).mean() + slope @ w
                loss = loss + PULL / 2 * ((w - centre) ** 2).sum() + decay / 2 * (w**2).sum()
                torch.autograd.backward(loss)
                return loss.detach()

            optimizer.step(closure)
    return w.detach().numpy()


def test_gradient_descent_follows_the_matrix_recursion() -> None:
    """w_K - w* = (I - lr (A + r I))^K (w_0 - w*), with the exact step on every direction."""
    for quadratic in quadratics(3):
        lr, steps = 0.25, 9
        w, info = run(LocalTraining(solver="gd", lr=lr, steps=steps), quadratic)
        target = quadratic.argmin(SLOPE, PULL, CENTRE)
        shrink = np.linalg.matrix_power(
            np.eye(DIM) - lr * (quadratic.A + PULL * np.eye(DIM)), steps
        )
        expected = target + shrink @ (START - target)
        np.testing.assert_allclose(w, expected, rtol=0, atol=1e-13 * np.abs(START).max() * 10)
        assert (info.steps, info.epochs) == (steps, steps)


def test_a_step_is_along_the_subproblems_own_gradient_formula() -> None:
    w, _ = run(LocalTraining(solver="gd", lr=0.3))
    formula = Subproblem(SLOPE, PULL, CENTRE).gradient(START, QUADRATIC.gradient(START))
    np.testing.assert_allclose(w, START - 0.3 * formula, rtol=1e-13)


def rprop(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """An optimizer that a user might bring."""
    return torch.optim.Rprop(parameters, lr=lr, etas=(0.4, 1.3))


# full batch; gd and momentum converge linearly, here to rounding; torch's L-BFGS stops where the
# loss changes by less than 1e-9, which leaves ||w - w*|| < sqrt(2e-9 / r) = 5e-5
CONVERGENT = [
    (LocalTraining(solver="gd", lr=0.4, steps=200), 1e-11),
    (LocalTraining(solver="sgd", lr=0.3, steps=200, batch_size=0, momentum=0.4), 1e-11),
    (LocalTraining(solver="adam", lr=0.1, steps=500, batch_size=0), 1e-6),
    (LocalTraining(solver="adagrad", lr=1.5, steps=400, batch_size=0), 1e-8),
    (LocalTraining(solver="lbfgs", lr=1.0, steps=5), 5e-5),
    (LocalTraining(solver=rprop, lr=0.1, steps=200, batch_size=0), 1e-5),
]


@pytest.mark.parametrize(("training", "tolerance"), CONVERGENT, ids=lambda v: str(v)[:40])
def test_every_solver_goes_to_the_subproblems_minimiser(
    training: LocalTraining, tolerance: float
) -> None:
    w, _ = run(training)
    np.testing.assert_allclose(w, QUADRATIC.argmin(SLOPE, PULL, CENTRE), rtol=0, atol=tolerance)


SAME_AS_TORCH: dict[str, Any] = {
    "gd": ({}, 0, lambda p: torch.optim.SGD(p, lr=0.05)),
    "sgd": ({}, 4, lambda p: torch.optim.SGD(p, lr=0.05)),
    "sgd-momentum": ({"momentum": 0.9}, 4, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "sgd-nesterov": (
        {"momentum": 0.9, "nesterov": True},
        4,
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adam": ({}, 4, lambda p: torch.optim.Adam(p, lr=0.05)),
    "adagrad": ({}, 4, lambda p: torch.optim.Adagrad(p, lr=0.05)),
    "RMSprop": ({"momentum": 0.3}, 4, lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.3)),
    "AdamW": ({}, 4, lambda p: torch.optim.AdamW(p, lr=0.05)),
    "LBFGS": ({}, 4, lambda p: torch.optim.LBFGS(p, lr=0.05)),
    "lbfgs": ({}, 0, lambda p: torch.optim.LBFGS(p, lr=0.05, line_search_fn="strong_wolfe")),
}


@pytest.mark.parametrize("name", SAME_AS_TORCH)
def test_a_solver_is_torchs_optimizer_on_the_subproblems_loss(name: str) -> None:
    """The same batches, autograd on the whole bent loss instead of a bent gradient."""
    settings, batch_size, make = SAME_AS_TORCH[name]
    solver = name.split("-")[0]
    w, _ = run(LocalTraining(solver=solver, lr=0.05, epochs=3, batch_size=batch_size, **settings))
    np.testing.assert_allclose(w, twin(make, batch_size, 3), rtol=1e-9, atol=1e-11)


def steps_of(
    solver: str, slope: float, pull: float, dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    """Return where a small network comes to; ``sgd`` is taken directly, ``SGD`` by torch."""
    torch.manual_seed(3)
    x, module = torch.randn(13, 7), nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 3))
    problem = Problem(Border(module.to(dtype)), cross_entropy, x, (x.sum(1) > 0).long())
    start = problem.model.vector.clone()
    subproblem = Subproblem(slope * start if slope else 0.0, pull, start)
    training = LocalTraining(solver=solver, lr=0.07, epochs=4, batch_size=5, **options)
    w: torch.Tensor = solve(problem, start, subproblem, training, stream(1, "local")).w
    assert not torch.equal(w, start)
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_steps_down_f_are_torchs_to_the_bit(dtype: torch.dtype) -> None:
    directly, by_torch = (steps_of(name, 0.0, 0.0, dtype) for name in ("sgd", "SGD"))
    assert torch.equal(directly, by_torch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.7, "nesterov": True, "weight_decay": 0.3},
    ],
    ids=str,
)
def test_steps_with_momentum_or_decay_are_torchs_to_the_bit(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    directly, by_torch = (steps_of(name, 0.1, 0.3, dtype, **options) for name in ("sgd", "SGD"))
    assert torch.equal(directly, by_torch)


@pytest.mark.parametrize(("slope", "pull"), [(0.1, 0.0), (0.0, 0.3), (0.1, 0.3)])
def test_plain_steps_along_slope_and_pull_are_torchs_to_rounding(slope: float, pull: float) -> None:
    directly, by_torch = (steps_of(name, slope, pull, torch.float64) for name in ("sgd", "SGD"))
    torch.testing.assert_close(directly, by_torch, rtol=1e-13, atol=1e-15)
    # coarse numbers would lose a small pull that is not first added to the gradient
    directly, by_torch = (steps_of(name, slope, pull, torch.bfloat16) for name in ("sgd", "SGD"))
    assert torch.equal(directly, by_torch)


# ---- what everybody's loop has -------------------------------------------------------------------


class Layers(nn.Module):
    """A body of matrices and a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out


SAMPLES = torch.linspace(-3, 3, 65, dtype=torch.float64).reshape(13, 5).sin(), torch.arange(13) % 3


def layers(matrices: bool = False) -> nn.Module:
    torch.manual_seed(4)
    if matrices:
        return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False)).double()
    return Layers().double()


def clipped_in_a_hook(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer that clips by itself, as a user might."""
    chosen = [*parameters]
    optimizer = torch.optim.SGD(chosen, lr=lr, momentum=0.5)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(chosen, 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def grouped(parameters: Any, lr: float, module: nn.Module) -> torch.optim.Optimizer:
    """No decay of biases, and another rate for the head."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n.startswith("body")], "weight_decay": 0.2},
            {"params": [p for n, p in named if n.startswith("head")], "lr": 3 * lr},
        ],
        lr=lr,
        weight_decay=0.0,
    )


def without_rate(parameters: Any) -> None:
    """What a request must not call."""
    raise AssertionError


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "direct": ("sgd", {}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "direct, momentum and decay": (
        "sgd",
        {"momentum": 0.9, "weight_decay": 0.2},
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.2),
    ),
    "adam": ("adam", {}, lambda m: torch.optim.Adam(m.parameters(), lr=0.1)),
    "Muon": ("Muon", {}, lambda m: torch.optim.Muon(m.parameters(), lr=0.1)),
    "Adafactor": ("Adafactor", {}, lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1)),
    "a hook": (clipped_in_a_hook, {}, lambda m: clipped_in_a_hook(m.parameters(), 0.1)),
    "groups by name": (grouped, {}, lambda m: grouped(None, 0.1, m)),
    "by request": ("test_solvers:grouped", {}, lambda m: grouped(None, 0.1, m)),
    "prodigy": (
        "prodigy",
        {"solver_params": "d0=0.01", "weight_decay": 0.2},
        lambda m: prodigyopt.Prodigy(m.parameters(), lr=0.1, d0=0.01, weight_decay=0.2),
    ),
    "dog": (
        "dog",
        {"solver_params": "reps_rel=0.1"},
        lambda m: dog.DoG(m.parameters(), lr=0.1, reps_rel=0.1),
    ),
    "schedule-free": (
        "schedule-free",
        {"momentum": 0.7},
        lambda m: schedulefree.SGDScheduleFree(m.parameters(), lr=0.1, momentum=0.7),
    ),
}
SCHEDULES: dict[str, Any] = {
    "": lambda step, steps: 1.0,
    "cosine": lambda step, steps: (1 + np.cos(np.pi * step / steps)) / 2,
    "linear": lambda step, steps: 1 - step / steps,
    "step every=3 factor=0.5": lambda step, steps: 0.5 ** (step // 3),
    "constant warm-up=4": lambda step, steps: min(1.0, (step + 1) / 4),
    "cosine warm-up=2": lambda step, steps: (
        (step + 1) / 2 if step < 2 else (1 + np.cos(np.pi * (step - 2) / (steps - 2))) / 2
    ),
}


def plain_loop(
    make: Any, schedule: Any, bound: float, pull: float, matrices: bool, steps: int = 8
) -> torch.Tensor:
    """Two epochs of a plain loop: clip f's gradient, add FedProx's, step, and step the rate.

    A schedule-free optimizer has its modes, and DoG its authors' average.
    """
    module, rng = layers(matrices), stream(1, "t")
    begun = copy.deepcopy(module)
    optimizer = make(module)
    average = dog.PolynomialDecayAverager(module) if isinstance(optimizer, dog.DoG) else None
    if isinstance(optimizer, schedulefree.SGDScheduleFree):
        optimizer.train()
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    x, y = SAMPLES
    for _ in range(2):
        for rows in torch.split(torch.from_numpy(rng.permutation(13)), 4):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(module(x[rows]), y[rows]))
            if bound:
                nn.utils.clip_grad_norm_(module.parameters(), bound)
            for p, centre in zip(module.parameters(), begun.parameters(), strict=True):
                assert p.grad is not None
                p.grad += pull * (p.detach() - centre.detach())
            optimizer.step()
            rates.step()
            if average is not None:
                average.step()
    if isinstance(optimizer, schedulefree.SGDScheduleFree):
        optimizer.eval()
    module = module if average is None else average.averaged_model
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize(("bound", "pull"), [(0.0, 0.0), (0.2, 0.7)])
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *product(OPTIMIZERS, ["cosine warm-up=2"]),
        *product(["direct", "groups by name"], sorted(SCHEDULES.keys() - {"cosine warm-up=2"})),
    ],
)
def test_clipping_and_rates_by_step_are_those_of_a_plain_loop(
    name: str, schedule: str, bound: float, pull: float
) -> None:
    """Of f's gradient alone: FedProx's term is added after clipping."""
    solver, settings, make = OPTIMIZERS[name]
    matrices = name == "Muon"
    problem = Problem(layers(matrices), cross_entropy, *SAMPLES)
    start = problem.model.vector
    training = LocalTraining(
        solver=solver, lr=0.1, lr_schedule=schedule, max_grad_norm=bound, batch_size=4, epochs=2,
        **settings,
    )  # fmt: skip
    w = solve(problem, start, Subproblem(0.0, pull, start), training, stream(1, "t")).w
    expected = plain_loop(make, SCHEDULES[schedule], bound, pull, matrices)
    torch.testing.assert_close(w, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("solver", ["prodigy", "dog", "schedule-free"])
def test_a_solver_of_a_package_names_it_if_it_is_not_installed(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, module, _ = PACKAGED[solver]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"^solver '{solver}': .*: pip install {package}$"):
        FedAvg(local={"solver": solver})


@pytest.mark.parametrize("solver", ["dog", "schedule-free"])
def test_a_residual_is_that_of_the_model_which_would_be_returned(solver: str) -> None:
    """It is measured after each epoch, and the optimizer goes on from its own iterate."""
    options: dict[str, Any] = {"solver": solver, "lr": 0.3, "batch_size": 4, "epochs": 3}
    w, solved = run(LocalTraining(**options, residual=0.0))
    assert solved.residual == pytest.approx(slope_at(w) @ slope_at(w), rel=1e-9)
    np.testing.assert_allclose(w, run(LocalTraining(**options))[0], rtol=1e-12)


@pytest.mark.parametrize("solver", ["dog", "schedule-free"])
def test_an_average_lies_in_the_box(solver: str) -> None:
    options = {"dog": {"solver_params": "reps_rel=0.9"}, "schedule-free": {}}[solver]
    w, _ = run(LocalTraining(solver=solver, box=0.3, batch_size=4, epochs=2, **options))
    assert np.abs(w).max() == 0.3


def test_a_function_named_by_a_request_needs_a_learning_rate() -> None:
    problem = Problem(layers(), cross_entropy, *SAMPLES)
    client = FedAvgClient(problem, client_id=0)
    arrays = problem.model.arrays(problem.model.vector)
    client.fit(arrays, {"solver": "test_solvers:grouped", "lr": 0.1})
    with pytest.raises(ValueError, match="'test_solvers:without_rate' must be a function with an"):
        client.fit(arrays, {"solver": "test_solvers:without_rate", "lr": 0.1})


def test_an_optimizer_with_modes_trains_in_one_and_is_measured_in_the_other() -> None:
    """As those that are schedule-free: the model is an average of the iterates."""

    class Averaging(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)
            self.trains, self.sums, self.steps = False, list[torch.Tensor](), 0

        def train(self) -> None:
            self.trains = True

        def step(self, closure: Any = None) -> Any:
            assert self.trains
            loss = super().step(closure)
            here = [p.detach().clone() for p in self.param_groups[0]["params"]]
            self.sums = [a + b for a, b in zip(self.sums, here, strict=True)] if self.sums else here
            self.steps += 1
            return loss

        @torch.no_grad()
        def eval(self) -> None:
            self.trains = False
            for p, total in zip(self.param_groups[0]["params"], self.sums, strict=True):
                p.copy_(total / self.steps)

    lr, steps = 0.25, 5
    w, _ = run(LocalTraining(solver=Averaging, lr=lr, steps=steps, batch_size=0))
    here, total = START, np.zeros(DIM)
    for _ in range(steps):
        here = here - lr * slope_at(here)
        total = total + here
    np.testing.assert_allclose(w, total / steps, rtol=1e-12)


def test_weight_decay_is_a_ridge_on_the_loss() -> None:
    training = LocalTraining(lr=0.05, epochs=3, batch_size=4, momentum=0.5, weight_decay=0.2)
    w, _ = run(training)
    ridge = twin(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5), 4, 3, decay=0.2)
    np.testing.assert_allclose(w, ridge, rtol=1e-11)


def test_without_slope_and_pull_f_alone_is_minimised() -> None:
    training = LocalTraining(solver="gd", lr=0.5, steps=200)
    w, _ = run(training, subproblem=Subproblem())
    np.testing.assert_allclose(w, QUADRATIC.b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("epochs", "steps", "batch_size", "expected"),
    [
        (2, 0, 4, (8, 2)),  # 13 examples: 4 + 4 + 4 + 1
        (1, 0, 13, (1, 1)),
        (1, 0, 99, (1, 1)),
        (3, 0, 0, (3, 3)),
        (1, 6, 4, (6, 2)),  # steps instead of epochs, in the middle of the second
        (7, 4, 4, (4, 1)),
        (1, 3, 0, (3, 3)),
    ],
)
def test_work_is_counted_in_epochs_or_in_steps(
    epochs: int, steps: int, batch_size: int, expected: tuple[int, int]
) -> None:
    _, info = run(LocalTraining(epochs=epochs, steps=steps, batch_size=batch_size))
    assert (info.steps, info.epochs) == expected


def test_steps_are_the_first_of_the_epochs() -> None:
    whole, _ = run(LocalTraining(epochs=1, batch_size=4))
    same, _ = run(LocalTraining(steps=4, batch_size=4))
    fewer, _ = run(LocalTraining(steps=3, batch_size=4))
    np.testing.assert_array_equal(whole, same)
    assert not np.array_equal(whole, fewer)


def test_random_epochs_are_drawn_from_the_stream_and_cover_one_to_the_bound() -> None:
    training = LocalTraining(solver="gd", epochs=4, random_epochs=True)
    drawn = [run(training, seed=seed)[1].epochs for seed in range(40)]
    again = [run(training, seed=seed)[1].epochs for seed in range(40)]
    assert drawn == again
    assert set(drawn) == {1, 2, 3, 4}
    for seed in range(5):
        fixed, _ = run(LocalTraining(solver="gd", epochs=drawn[seed]))
        np.testing.assert_array_equal(run(training, seed=seed)[0], fixed)


@pytest.mark.parametrize("target", [1.0, 1e-4, 1e-9])
def test_training_stops_at_the_first_epoch_that_reaches_the_residual(target: float) -> None:
    lr = 0.2
    w, info = run(LocalTraining(solver="gd", lr=lr, epochs=500, residual=target))
    expected, epochs, residual = START, 0, np.inf
    while residual > target:
        expected = expected - lr * slope_at(expected)
        residual = slope_at(expected) @ slope_at(expected)
        epochs += 1
    assert info.epochs == info.steps == epochs
    np.testing.assert_allclose(w, expected, rtol=1e-10)
    assert info.residual == pytest.approx(residual, rel=1e-6)  # a cancelling sum
    assert info.residual <= target


def test_the_reported_residual_is_that_of_the_whole_data_also_after_mini_batches() -> None:
    w, info = run(LocalTraining(epochs=2, lr=0.05, batch_size=4, residual=0.0))
    assert info.residual == pytest.approx(slope_at(w) @ slope_at(w), rel=1e-10)
    assert info.epochs == 2
    _, silent = run(LocalTraining(epochs=2, lr=0.05, batch_size=4))
    assert np.isnan(silent.residual)


def batchnorm_problem() -> Problem:
    torch.manual_seed(2)
    module = nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2)
    )
    x = torch.randn(14, 3)
    return Problem(module, cross_entropy, x, (x.sum(1) > 0).long())


def test_measuring_the_residual_does_not_change_the_training() -> None:
    results = []
    for residual in (None, 0.0):
        problem = batchnorm_problem()
        torch.manual_seed(5)
        training = LocalTraining(epochs=3, batch_size=5, momentum=0.5, residual=residual)
        start = problem.model.vector.clone()
        solved = solve(problem, start, Subproblem(), training, stream(1, "local"))
        results.append(problem.model.arrays(solved.w))
    for plain, measured in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, measured)


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_loss_and_accuracy_are_those_of_the_last_epochs_batches(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clients.learning.loop.COUNTED", at_once)
    problem = batchnorm_problem()
    module = copy.deepcopy(problem.model.module).train()
    training = LocalTraining(epochs=1, batch_size=4, lr=1e-30)  # w stays, so the twin can follow
    torch.manual_seed(5)
    solved = solve(
        problem, problem.model.vector.clone(), Subproblem(), training, stream(1, "local")
    )
    torch.manual_seed(5)
    loss = right = 0.0
    with torch.no_grad():
        for x, y, _ in problem.data.batches(stream(1, "local"), 4):
            outputs = module(x)
            loss += float(cross_entropy(outputs, y, reduction="sum"))
            right += float((outputs.argmax(1) == y).sum())
    assert float(solved.loss) == pytest.approx(loss / 14, rel=1e-6)
    assert float(solved.accuracy) == right / 14


def test_the_order_of_batches_depends_on_the_stream_only() -> None:
    training = LocalTraining(epochs=2, batch_size=4)
    first, _ = run(training)
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    np.testing.assert_array_equal(run(training)[0], first)
    assert not np.array_equal(run(training, seed=2)[0], first)


@pytest.mark.parametrize("solver", ["gd", "sgd", "adam", "adagrad", "lbfgs", "RMSprop", rprop])
def test_inputs_are_never_written_to(solver: Any) -> None:
    problem = QUADRATIC.problem()
    start, subproblem = torch.tensor(START), bent()
    solve(problem, start, subproblem, LocalTraining(solver=solver, batch_size=4), stream(1, "l"))
    np.testing.assert_array_equal(start, START)
    np.testing.assert_array_equal(subproblem.slope, SLOPE)
    np.testing.assert_array_equal(subproblem.centre, CENTRE)
    np.testing.assert_array_equal(problem.tensors.inputs, QUADRATIC.X)
    np.testing.assert_array_equal(problem.tensors.targets, QUADRATIC.y)


def test_the_result_is_a_vector_of_its_own() -> None:
    problem = QUADRATIC.problem()
    w = solve(problem, torch.tensor(START), bent(), LocalTraining(), stream(1, "l")).w
    before = w.clone()
    problem.model.write(0.0 * w)
    assert torch.equal(w, before)


@pytest.mark.parametrize("name", ["lr", "epochs", "momentum", "weight_decay", "batch_size"])
def test_every_setting_changes_the_result_when_doubled(name: str) -> None:
    base: dict[str, Any] = {
        "lr": 0.05,
        "epochs": 2,
        "momentum": 0.4,
        "weight_decay": 0.1,
        "batch_size": 4,
    }
    doubled = base | {name: base[name] * 2}
    assert not np.array_equal(run(LocalTraining(**base))[0], run(LocalTraining(**doubled))[0])


BAD = [
    ({"lr": 0.0}, r"lr must be > 0, got 0\.0"),
    ({"lr": float("nan")}, "lr must be a finite number > 0, got nan"),
    ({"lr": "0.1"}, "lr must be a finite number > 0, got '0.1'"),
    ({"epochs": 0}, "epochs must be >= 1, got 0"),
    ({"epochs": 1.5}, r"epochs must be an integer, got 1\.5"),
    ({"steps": -1}, "steps must be >= 0, got -1"),
    ({"steps": 2.0}, r"steps must be an integer, got 2\.0"),
    ({"batch_size": -8}, "batch_size must be >= 0, got -8"),
    ({"batch_size": 0.5}, r"batch_size must be an integer, got 0\.5"),
    ({"momentum": -0.1}, r"momentum must be >= 0, got -0\.1"),
    ({"weight_decay": -1.0}, r"weight_decay must be >= 0, got -1\.0"),
    ({"residual": -0.5}, r"residual must be >= 0, got -0\.5"),
    ({"residual": float("inf")}, "residual must be a finite number >= 0, got inf"),
    ({"random_epochs": "false"}, "random_epochs must be bool, got 'false'"),
    ({"nesterov": True}, "(?i)nesterov .*momentum"),
    ({"solver": "newton"}, "unknown solver 'newton'; known: .*'gd'"),
    ({"solver": "lr_scheduler"}, "unknown solver 'lr_scheduler'"),
    ({"max_grad_norm": -1.0}, r"max_grad_norm must be >= 0, got -1\.0"),
    ({"lr_schedule": "cosin"}, "lr_schedule must be .*cosine.*got 'cosin'"),
    ({"lr_schedule": "step every=2"}, "lr_schedule: step needs factor"),
    ({"lr_schedule": "cosine every=2"}, "lr_schedule: cosine has no option 'every'"),
    ({"lr_schedule": "linear", "solver": "sps"}, "lr_schedule must be empty with the solver 'sps'"),
    ({"solver": "adam", "momentum": 0.9}, "solver 'adam' has no momentum"),
    ({"solver": rprop, "weight_decay": 0.1}, "has no weight_decay"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=lambda v: str(v)[:30])
def test_a_bad_setting_is_refused_by_name_bound_and_value(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LocalTraining(**settings)
    kebab = {name.replace("_", "-"): value for name, value in settings.items()}
    with pytest.raises(ValueError, match=message):
        LocalTraining().updated(kebab)


def test_a_request_sets_what_it_names_and_nothing_else() -> None:
    mine = LocalTraining(solver="adam", lr=0.3, batch_size=7)
    request = {"lr": 0.01, "random-epochs": True, "server-round": 3, "algorithm": "fedavg"}
    assert mine.updated(request) == LocalTraining(
        solver="adam", lr=0.01, batch_size=7, random_epochs=True
    )
    assert mine == LocalTraining(solver="adam", lr=0.3, batch_size=7)
