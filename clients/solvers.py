"""Local solvers, written once on the subproblem of ``fl_strategies.subproblem``.

Every solver is a ``torch.optim.Optimizer`` over one parameter, the model's vector, whose gradient
is that of the subproblem: f's on a mini-batch, plus slope, plus pull. So any optimizer works with
any algorithm.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from clients.delta_sgd import DeltaSGD
from clients.problem import Problem
from clients.sps import SPS
from fl_strategies.params import parse_params
from fl_strategies.schedules import check, one_of
from fl_strategies.subproblem import Iterates, Subproblem

MakeOptimizer: TypeAlias = Callable[..., Optimizer]
"""``make([parameter], lr=...)``: an optimizer class, or a function that builds one. If it has
arguments ``module`` or ``batch_share``, it gets the torch module and batch size / data set size."""

SOLVERS: dict[str, MakeOptimizer] = {
    "gd": torch.optim.SGD,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "delta-sgd": DeltaSGD,
    "sps": SPS,
    "lbfgs": functools.partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"),
}
"""Solvers by name; ``gd`` and ``lbfgs`` run on the full batch. Any other name is looked up in
``torch.optim`` (``"RMSprop"``)."""

FULL_BATCH = ("gd", "lbfgs")
OWN_KEY = ("lr", "momentum", "nesterov", "weight_decay")
"""Arguments of optimizers that are fields of their own."""
GRADIENT_ONLY = ("gd", "sgd", "adam", "adagrad", "delta-sgd")
"""Solvers that do not look at the loss, so that the subproblem's need not be worked out."""

FINE_TUNE = ("", "train", "test-batch")
"""What ``fine_tune`` may be."""


@dataclass(frozen=True)
class LocalTraining:
    """How a client solves its subproblem. Each field can be set from the server (kebab-case).

    Parameters
    ----------
    solver : str or callable (default "sgd")
        A name in ``SOLVERS``, a class name in ``torch.optim``, or ``make([parameter], lr=...)``.
    lr : float > 0 (default 0.1)
        Learning rate. What the solver makes of it: eta_0 in "delta-sgd", the step size that a
        round's first may grow from in "sps" (as optimizers these begin at 0.2 and 1).
    solver_params : str (default "")
        Further arguments of the solver, as text: "gamma=2 delta=0.1".
    epochs : int >= 1 (default 1)
        Passes over the client's examples.
    random_epochs : bool (default False)
        Draw the number of epochs from U{1, ..., ``epochs``} by the client's own stream.
    steps : int >= 0 (default 0: by epochs)
        Mini-batch steps to take instead of epochs.
    random_steps : bool (default False)
        Draw the number of steps from U{1, ..., ``steps``} by the client's own stream.
    batch_size : int >= 0 (default 32; 0: the full batch)
        Examples in a mini-batch.
    momentum, weight_decay : float >= 0 (default 0)
    nesterov : bool (default False)
        Handed to the optimizer, which must know them where they are not 0.
    extrapolation : float >= 0 (default 0)
        Each step is taken at e = w + extrapolation (w - w_previous) in place of w.
    box : float >= 0 (default 0: no bound)
        Each step ends with the projection onto [-box, box]^d. With ``sgd`` and an extrapolation
        this is FedBCD's ASPG (accelerated stochastic projected gradient).
    residual : float >= 0 or -1 (default -1: not measured)
        Stop after the first epoch that ends with a squared norm of the subproblem's full gradient
        of at most this; ``residual`` is then reported. 0 only measures.
    fine_tune : "", "train" or "test-batch" (default "": not)
        Measure models also after one gradient step on one mini-batch of the client's training
        examples, or of the very examples that they are then tested on: the latter only to reproduce
        tables that were made so (FedBC-FineTune and Per-FedAvg in FedBC's Table 3).
    fine_tune_lr : float >= 0 or -1 (default -1: ``lr``)
        Rate of that step.

    Raises
    ------
    ValueError
        For a field outside its range, an unknown solver, or an option that the solver lacks.
    """

    solver: str | MakeOptimizer = "sgd"
    lr: float = 0.1
    solver_params: str = ""
    epochs: int = 1
    random_epochs: bool = False
    steps: int = 0
    random_steps: bool = False
    batch_size: int = 32
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    extrapolation: float = 0.0
    box: float = 0.0
    residual: float = -1.0
    fine_tune: str = ""
    fine_tune_lr: float = -1.0

    def __post_init__(self) -> None:
        check("lr", self.lr, above=0.0)
        check("epochs", self.epochs, low=1)
        check("steps", self.steps, low=0)
        check("batch_size", self.batch_size, low=0)
        check("momentum", self.momentum, low=0.0)
        check("weight_decay", self.weight_decay, low=0.0)
        check("extrapolation", self.extrapolation, low=0.0)
        check("box", self.box, low=0.0)
        if self.fine_tune_lr != -1.0:
            check("fine_tune_lr", self.fine_tune_lr, low=0.0)
        one_of("fine_tune", self.fine_tune, FINE_TUNE)
        if self.residual != -1.0:
            check("residual", self.residual, low=0.0)
        kinds = {"epochs": int, "steps": int, "batch_size": int, "random_epochs": bool,
                 "random_steps": bool, "nesterov": bool, "solver_params": str}  # fmt: skip
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ValueError(f"{name} must be {kind.__name__}, got {value!r}")
        self.optimizer([torch.nn.Parameter(torch.zeros(1))], module=None, batch_share=1.0)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields by the names that they have in requests."""
        return {field.name.replace("_", "-"): getattr(self, field.name) for field in fields(self)}

    def updated(self, config: Mapping[str, Any]) -> LocalTraining:
        """Return these settings with those that ``config`` (kebab-case keys) sets."""
        names = [field.name for field in fields(self)]
        found = [(n, config[k]) for n in names if (k := n.replace("_", "-")) in config]
        return _updated(self, tuple(found))

    def optimizer(self, parameters: list[torch.nn.Parameter], **offered: Any) -> Optimizer:
        """Return the optimizer over ``parameters``, given what it takes of ``offered``."""
        make = self.solver
        if isinstance(make, str):
            found = SOLVERS.get(make, getattr(torch.optim, make, None))
            if not callable(found):
                known = [*SOLVERS, "any class of torch.optim"]
                raise ValueError(f"unknown solver {make!r}; known: {known}")
            make = found
        wanted = {
            name: value
            for name in ("momentum", "nesterov", "weight_decay")
            if (value := getattr(self, name))
        }
        accepted = _arguments(make)
        if unknown := sorted(wanted.keys() - set(accepted)):
            raise ValueError(f"solver {self.solver!r} has no {', '.join(unknown)}")
        params = parse_params(self.solver_params)
        options = accepted[1:]
        free = [name for name in options if name not in (*offered, *OWN_KEY)]
        if unknown := sorted(params.keys() - set(free)):
            raise ValueError(f"solver {self.solver!r} has no option {unknown}; it has {free}")
        taken = {name: value for name, value in offered.items() if name in options}
        return make(parameters, lr=self.lr, **wanted, **params, **taken)


@functools.lru_cache(maxsize=64)
def _arguments(make: MakeOptimizer) -> tuple[str, ...]:
    return tuple(inspect.signature(make).parameters)


@functools.cache
def default_training() -> LocalTraining:
    """Return ``LocalTraining()``, which is the same for all."""
    return LocalTraining()


@functools.lru_cache(maxsize=64)
def _updated(training: LocalTraining, found: tuple[tuple[str, Any], ...]) -> LocalTraining:
    return replace(training, **dict(found))


class Info(NamedTuple):
    """What a solver did: steps, epochs, mean loss and accuracy on its last epoch's batches."""

    steps: int
    epochs: int
    loss: float
    accuracy: float
    residual: float


@overload
def solve(
    problem: Problem,
    start: Tensor,
    subproblem: Subproblem,
    training: LocalTraining,
    rng: np.random.Generator,
) -> tuple[Tensor, Info]: ...


@overload
def solve(
    problem: Problem,
    start: Iterates,
    subproblem: Subproblem,
    training: LocalTraining,
    rng: np.random.Generator,
) -> tuple[Iterates, Info]: ...


def solve(
    problem: Problem,
    start: Tensor | Iterates,
    subproblem: Subproblem,
    training: LocalTraining,
    rng: np.random.Generator,
) -> tuple[Tensor | Iterates, Info]:
    """Return an approximate minimiser [d] of (0), found from ``start`` [d], and what was done.

    From :class:`Iterates` (whose difference is the first step's momentum) to the last two iterates.
    """
    model = problem.model
    slope, pull, centre = subproblem
    w, previous = start if isinstance(start, Iterates) else (start, start)
    model.vector.copy_(w)
    model.module.train()
    model.attach_gradients()
    parameter = torch.nn.Parameter(model.vector)
    parameter.grad = model.gradient
    batch_size = 0 if training.solver in FULL_BATCH else training.batch_size
    share = min(1.0, batch_size / len(problem)) if batch_size else 1.0
    optimizer = training.optimizer([parameter], module=model.module, batch_share=share)
    needs_loss = training.solver not in GRADIENT_ONLY
    floor = _floor(subproblem, w) if needs_loss else 0.0
    epochs = training.epochs
    if training.random_epochs:
        epochs = int(rng.integers(1, training.epochs, endpoint=True))
    limit = training.steps
    if training.random_steps and limit:
        limit = int(rng.integers(1, limit, endpoint=True))
    if limit:
        epochs = math.ceil(limit / _batches(len(problem), batch_size))

    def bent(loss: Tensor) -> Tensor:
        """Turn f's gradient, in place, and loss into the subproblem's."""
        if isinstance(slope, Tensor) or slope != 0.0:
            model.gradient.add_(slope)
            if needs_loss:
                loss = loss + (slope * model.vector).sum()
        if pull:
            apart = model.vector - centre
            model.gradient.add_(apart, alpha=pull)
            if needs_loss:
                loss = loss + (pull / 2) * apart.dot(apart)
        return loss - floor if needs_loss else loss

    keeps_previous = training.extrapolation > 0.0 or isinstance(start, Iterates)
    steps = done = 0
    residual = float("nan")
    while done < epochs:
        seen: list[tuple[Tensor, Tensor, Tensor]] = []
        for x, y in problem.batches(rng, batch_size):
            first: list[tuple[Tensor, Tensor]] = []

            def closure(x: Tensor = x, y: Tensor = y, first: list[Any] = first) -> Tensor:
                loss, outputs = problem.gradient(x, y)
                first.append((loss, outputs))
                return bent(loss)

            before = model.vector.clone() if keeps_previous else previous
            if training.extrapolation:
                model.vector.add_(before - previous, alpha=training.extrapolation)
            optimizer.step(closure)  # type: ignore[arg-type]
            if training.box:
                model.vector.clamp_(-training.box, training.box)
            previous = before
            seen.append((*first[0], y))
            steps += 1
            if steps == limit:
                break
        done += 1
        if training.residual >= 0.0:
            bent(problem.full_gradient())
            residual = float(model.gradient.dot(model.gradient))
            if residual <= training.residual:
                break
    examples = sum(len(y) for _, _, y in seen)
    losses = torch.stack([loss for loss, _, _ in seen]).tolist()
    loss = sum(loss * len(y) for loss, (_, _, y) in zip(losses, seen, strict=True)) / examples
    accuracy = float("nan")
    if problem.classifies:
        outputs, targets = (torch.cat([batch[i] for batch in seen]) for i in (1, 2))
        accuracy = float(problem.right(outputs, targets)) / examples
    info = Info(steps, done, loss, accuracy, residual)
    last = model.vector.clone()
    return (Iterates(last, previous) if isinstance(start, Iterates) else last), info


def _floor(subproblem: Subproblem, start: Tensor) -> Tensor | float:
    """Return the least value of <a, w> + (r/2) ||w - c||^2.

    Taken off the loss, it makes a lower bound of f one of the subproblem's too, as SPS needs.
    Without a pull there is no least value, and that at ``start`` stands in.
    """
    slope, pull, centre = subproblem
    if not isinstance(slope, Tensor):
        return 0.0
    if not pull:
        return slope.dot(start)
    return (slope * (centre - slope / (2.0 * pull))).sum()


def _batches(examples: int, batch_size: int) -> int:
    return 1 if batch_size == 0 else math.ceil(examples / batch_size)
