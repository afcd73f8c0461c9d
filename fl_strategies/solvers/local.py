"""How clients train: the settings of ``local``, their defaults and ranges.

A strategy checks the settings when it is built, and a client when it gets a request. Both use this
one record, so they refuse the same settings in the same words. Torch is loaded only to check a
solver of torch that has options or is named by its class.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from fl_strategies.core.schedules import at, check, check_flag, one_of, plain, shown
from fl_strategies.core.settings_text import parse_params
from fl_strategies.core.spelling import listed, unknown, unknown_of
from fl_strategies.solvers import delta_sgd, sps
from fl_strategies.solvers.rates import check_schedule

OURS: dict[str, type] = {"delta-sgd": delta_sgd.Options, "sps": sps.Options}
"""The options of the solvers that are not torch's."""

TORCH = {"gd": "SGD", "sgd": "SGD", "adam": "Adam", "adagrad": "Adagrad", "lbfgs": "LBFGS"}
"""Our names for classes of ``torch.optim``. ``gd`` and ``lbfgs`` run on the full batch; ``lbfgs``
uses the line search "strong_wolfe"."""

PACKAGED = {
    "prodigy": ("prodigyopt", "prodigyopt", "Prodigy"),
    "dog": ("dog-optimizer", "dog", "DoG"),
    "schedule-free": ("schedulefree", "schedulefree", "SGDScheduleFree"),
}
"""Our names for optimizers of other packages: the package's name on the index, its module, and the
optimizer. A strategy and its clients need the package."""

TAKES: dict[str, tuple[str, ...]] = {
    "gd": ("momentum", "nesterov", "weight_decay"),
    "sgd": ("momentum", "nesterov", "weight_decay"),
    "adam": ("weight_decay",),
    "adagrad": ("weight_decay",),
    "lbfgs": (),
}
"""The settings that each solver of ``TORCH`` takes, of those that are handed to the optimizer."""

FULL_BATCH = ("gd", "lbfgs")
WITHOUT_SAM = ("lbfgs", *OURS)
"""Solvers whose step sizes need the gradient at w."""

RATES: dict[str, float] = {
    **{name: record().lr for name, record in OURS.items()},
    **dict.fromkeys(PACKAGED, 1.0),
}
"""Default learning rates; all other solvers have ``RATE``."""
RATE = 0.1

HANDED_ON = ("momentum", "nesterov", "weight_decay")
OFFERED = ("module", "batch_share")
"""Arguments that an optimizer gets if it takes them: the torch module, batch / data set size."""

FINE_TUNE = ("off", "train", "test-batch")
VARIANCE_REDUCTION = ("off", "svrg", "sarah")
SAM_DIRECTION = ("local", "global")
"""The allowed values of ``fine_tune``, ``variance_reduction`` and ``sam_direction``."""
NOT_NEGATIVE = ("steps", "step_limit", "batch_size", "momentum", "weight_decay", "max_grad_norm",
                "extrapolation", "box", "sam", "residual", "fine_tune_lr",
                "fine_tune_epochs")  # fmt: skip


@dataclass(frozen=True)
class LocalTraining:
    """How a client solves its subproblem. Each field can be set from the server (kebab-case).

    Parameters
    ----------
    solver : str or callable (default "sgd")
        A name in ``clients.SOLVERS``, a class name in ``torch.optim``, "module:function" of one's
        own, or, on a client only, such a function: ``make(parameters, lr=...)`` builds any
        optimizer. If it takes ``module``, it gets the torch module, for parameter groups by name.
    lr : float > 0, optional
        Learning rate; by default 0.2 for "delta-sgd", 1 for "sps" and the solvers of packages, and
        0.1 for all others (:attr:`rate`). For "delta-sgd" it is eta_0; for "sps" it bounds the
        first step of a round, together with ``growth``.
    lr_schedule : str (default "": constant)
        How the learning rate changes from step to step within a round
        (``fl_strategies.solvers.rates``): "cosine warm-up=10", "linear", or
        "step every=20 factor=0.5".
    solver_params : str (default "")
        Further arguments of the solver, as text: "gamma=2 delta=0.1".
    epochs : int >= 1 (default 1)
        Passes over the client's samples.
    random_epochs : bool (default False)
        Draw the number of epochs from U{1, ..., ``epochs``}, from the client's random stream.
    steps : int >= 0 (default 0: ``epochs`` count)
        Mini-batch steps to take instead of epochs.
    random_steps : bool (default False)
        Draw the number of steps from U{1, ..., ``steps``}, from the client's random stream.
    step_limit : int >= 0 (default 0: no limit)
        The most steps, whatever ``epochs`` or ``steps`` say.
    batch_size : int >= 0 (default 32; 0: the full batch)
        Samples in a mini-batch.
    momentum : float >= 0 (default 0)
        Handed to the optimizer; unless it is 0, the optimizer must take it.
    nesterov : bool (default False)
        Nesterov's momentum; needs ``momentum`` > 0.
    weight_decay : float >= 0 (default 0)
        The term (weight_decay/2) ||w||^2 of f_i, handed to the optimizer like ``momentum``.
    max_grad_norm : float >= 0 (default 0: no bound)
        Before each step the gradient of f_i is clipped to this norm, by
        ``torch.nn.utils.clip_grad_norm_``; the algorithm's terms are not.
    extrapolation : float >= 0 (default 0)
        Each step is taken at e = w + extrapolation (w - w_previous) instead of w.
    box : float >= 0 (default 0: no bound)
        Each step ends with the projection onto [-box, box]^d. With ``sgd`` and an extrapolation
        this is FedBCD's ASPG (accelerated stochastic projected gradient).
    sam : float >= 0 (default 0)
        Radius of sharpness-aware minimisation: each gradient of f_i is taken at w + sam g / ||g||,
        g being the one at w (``clients.learning.sam``). It doubles the work of a step. Not for
        "lbfgs", "delta-sgd" and "sps", whose step sizes need the gradient at w.
    sam_direction : "local" or "global" (default "local")
        The direction of ``sam``: that of g, or FedLESAM's, the global model that the client
        received in its last round less the one it received now. With "global" a step takes one
        gradient, clients keep the model, and a new client takes its gradients at w.
    variance_reduction : "off", "svrg" or "sarah" (default "off")
        Correct each mini-batch's gradient of f_i by the one on all of the client's samples, which
        each epoch begins with (``clients.learning.variance_reduction``). For the solvers that take
        ``sam``, and in place of it.
    residual : float >= 0, optional
        Stop after the first epoch at whose end the squared norm of the subproblem's full gradient
        is at most this. The metric ``residual`` then reports the norm. With 0 it is measured
        only; by default it is not measured.
    fine_tune : "off", "train" or "test-batch" (default "off")
        Also measure models after one gradient step on one mini-batch: of the client's training
        samples ("train"), or of the same samples on which the models are then tested
        ("test-batch"). The latter only reproduces tables that were made in this way
        (FedBC-FineTune and Per-FedAvg in FedBC's Table 3).
    fine_tune_lr : float >= 0, optional
        Learning rate of this step, by default ``lr``.
    fine_tune_epochs : int >= 0 (default 0: one step)
        With ``fine_tune="train"``: measure models after plain gradient steps on so many epochs.

    Raises
    ------
    ValueError
        For a field outside its range, an unknown solver, an option that the solver lacks, or
        ``random_steps`` without ``steps``.
    """

    solver: str | Callable[..., Any] = "sgd"
    lr: float | None = None
    lr_schedule: str = ""
    solver_params: str = ""
    epochs: int = 1
    random_epochs: bool = False
    steps: int = 0
    random_steps: bool = False
    step_limit: int = 0
    batch_size: int = 32
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    extrapolation: float = 0.0
    box: float = 0.0
    sam: float = 0.0
    sam_direction: str = "local"
    variance_reduction: str = "off"
    residual: float | None = None
    fine_tune: str = "off"
    fine_tune_lr: float | None = None
    fine_tune_epochs: int = 0

    def __post_init__(self) -> None:
        check("lr", self.rate, above=0.0)
        check("epochs", self.epochs, low=1)
        for name in NOT_NEGATIVE:
            if (value := getattr(self, name)) is not None:
                check(name, value, low=0)
        one_of("variance_reduction", self.variance_reduction, VARIANCE_REDUCTION)
        one_of("sam_direction", self.sam_direction, SAM_DIRECTION)
        one_of("fine_tune", self.fine_tune, FINE_TUNE)
        if (epochs := self.fine_tune_epochs) and self.fine_tune != "train":
            raise ValueError(
                f"fine_tune_epochs = {epochs} needs fine_tune train, got {self.fine_tune}"
            )
        for name in ("random_epochs", "random_steps", "nesterov"):
            check_flag(name, getattr(self, name))
        whole = dict.fromkeys(
            ("epochs", "steps", "step_limit", "batch_size", "fine_tune_epochs"), int
        )
        for name, kind in {**whole, "solver_params": str, "lr_schedule": str}.items():
            if not isinstance(value := getattr(self, name), kind):
                noun = "an integer" if kind is int else "a text"
                raise ValueError(f"{name} must be {noun}, got {shown(value)}")
        if self.random_steps and not self.steps:
            raise ValueError(f"random_steps needs steps >= 1, got {self.steps}")
        if self.nesterov and not self.momentum:
            raise ValueError(f"nesterov needs a momentum > 0, got {self.momentum}")
        check_schedule("lr_schedule", self.lr_schedule)
        if self.lr_schedule and self.solver in OURS:
            raise ValueError(
                f"lr_schedule must be empty with the solver {self.solver!r}, which tunes its own"
                f" step size, got {self.lr_schedule!r}"
            )
        if self.sam and self.solver in WITHOUT_SAM:
            raise ValueError(f"sam must be 0 with the solver {self.solver!r}, got {self.sam}")
        if (reduction := self.variance_reduction) != "off":
            excluded = {
                f"the solver {shown(self.solver)}": self.solver in (*FULL_BATCH, *OURS),
                f"sam = {self.sam}": self.sam > 0,
                "batch_size = 0": self.batch_size == 0,
            }
            if what := next((what for what, found in excluded.items() if found), ""):
                raise ValueError(f"variance_reduction must be off with {what}, got {reduction}")
        self._check_solver()

    @property
    def rate(self) -> float:
        """The learning rate: ``lr``, or the solver's default if it is not set."""
        if self.lr is not None:
            return self.lr
        return RATES.get(self.solver, RATE) if isinstance(self.solver, str) else RATE

    @property
    def climbs_globally(self) -> bool:
        """Whether gradients are taken up the last change of the global model."""
        return self.sam > 0.0 and self.sam_direction == "global"

    @property
    def full_batch(self) -> bool:
        """Whether each step is on all samples."""
        return self.batch_size == 0 or self.solver in FULL_BATCH

    @property
    def ridge(self) -> float:
        """r in the term (r/2) ||w||^2 of f_i: ``weight_decay``, unless the solver decouples it."""
        options = parse_params(self.solver_params)
        decoupled = self.solver == "AdamW" or options.get("decoupled_weight_decay", False)
        decoupled = decoupled or (self.solver == "prodigy" and options.get("decouple", True))
        return 0.0 if decoupled else self.weight_decay

    @property
    def settings(self) -> dict[str, Any]:
        """The fields by their names in requests."""
        return {kebab: getattr(self, name) for kebab, name in _names().items()}

    @property
    def handed_on(self) -> dict[str, Any]:
        """The settings, other than 0, that are handed to the optimizer, and its options."""
        handed_on = {name: value for name in HANDED_ON if (value := getattr(self, name))}
        return handed_on | parse_params(self.solver_params)

    def batches(self, samples: int) -> int:
        """Return the number of mini-batches in an epoch of ``samples`` samples."""
        return 1 if self.full_batch else math.ceil(samples / self.batch_size)

    def most_steps(self, samples: int, per_epoch: int | None = None) -> float:
        """Return the most steps; a step with ``max_iter`` iterations counts as ``max_iter``.

        An epoch has ``per_epoch`` mini-batches, by default as many as :meth:`batches` says.
        """
        iterations = parse_params(self.solver_params).get("max_iter", 1)
        per_step = iterations if isinstance(iterations, int | float) else 1
        steps = self.steps or self.epochs * (per_epoch or self.batches(samples))
        return min(steps, self.step_limit or steps) * max(per_step, 1)

    def updated(self, config: Mapping[str, Any]) -> LocalTraining:
        """Return these settings with those that ``config`` (kebab-case keys) sets."""
        changes = [
            (name, plain(config[kebab])) for kebab, name in _names().items() if kebab in config
        ]
        for name, value in changes:
            if not isinstance(value, bool | int | float | str) and not callable(value):
                raise ValueError(f"{name} must be one number or text, got {shown(value)}")
        # with types: 1, 1.0 and True are the same key of the cache, but not the same setting
        return _updated(self, tuple((name, type(value), value) for name, value in changes))

    def _check_solver(self) -> None:
        solver, params = self.solver, parse_params(self.solver_params, "solver_params")
        named = solver if isinstance(solver, str) else ""
        if ":" in named:
            return  # the client has the function
        if named in OURS:
            accepted: tuple[str, ...] = ()
            options = tuple(field.name for field in fields(OURS[named]))
        elif named in TORCH and not params:
            accepted, options = TAKES[named], ()
        else:
            make = solver if callable(solver) else named_solver(solver)
            accepted = options = _arguments(make)[1:]
        wanted = {name for name in HANDED_ON if getattr(self, name)}
        if lacking := sorted(wanted - set(accepted)):
            raise ValueError(f"solver {shown(solver)} has no {', '.join(lacking)}")
        free = [name for name in options if name not in ("lr", *HANDED_ON, *OFFERED)]
        if wrong := sorted(params.keys() - set(free)):
            fault = f"solver {shown(solver)} has no option {unknown_of(wrong, free)}"
            raise ValueError(f"solver_params: {fault}")
        if named in OURS:
            OURS[named](lr=self.rate, **params)


def build(
    make: Callable[..., Any], training: LocalTraining, parameters: Any, **offered: Any
) -> Any:
    """Return ``make``'s optimizer; ``make`` gets the ``offered`` arguments that it takes."""
    taken = {name: value for name, value in offered.items() if name in _arguments(make)[1:]}
    return make(parameters, lr=training.rate, **training.handed_on, **taken)


def named_solver(name: str) -> Callable[..., Any]:
    """Return the function "module:function", or the optimizer of our name or torch's name.

    Raises ``ValueError`` if there is none, and ``ImportError`` if its package is not installed.
    """
    from torch import optim

    if name == "lbfgs":
        return functools.partial(optim.LBFGS, line_search_fn="strong_wolfe")
    if isinstance(name, str) and name in PACKAGED:
        package, module, optimizer = PACKAGED[name]
        try:
            return cast(Callable[..., Any], getattr(importlib.import_module(module), optimizer))
        except ImportError as error:
            raise ImportError(f"solver {name!r}: {error}: pip install {package}") from None
    if isinstance(name, str) and ":" in name:
        module, _, function = name.partition(":")
        made: Callable[..., Any] = getattr(importlib.import_module(module), function)
        if "lr" not in _arguments(made):  # a request must not have any other function called
            raise ValueError(f"solver {name!r} must be a function with an argument lr")
        return made
    kinds = {
        word: kind
        for word, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind != optim.Optimizer
    }
    if isinstance(name, str) and (kind := kinds.get(TORCH.get(name, name))):
        return kind
    known = [*TORCH, *OURS, *PACKAGED]
    hint = unknown([name], [*kinds, *known])
    raise ValueError(f"unknown solver {hint}; known: {known}, and the classes of torch.optim")


def check_local(local: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for settings that a client would refuse, in any round of a schedule.

    If no solver is named, clients may have their own, and its options cannot be checked here.
    """
    known = sorted(_names())
    if wrong := sorted(local.keys() - set(known)):
        raise ValueError(f"unknown local settings {unknown(wrong, known)}; known: {listed(known)}")
    firsts, without_effect = {1}, {*local}
    for name, setting in local.items():
        if isinstance(setting, Mapping):
            check(name, setting, scheduled=True)
            firsts |= setting.keys()
    for first in sorted(firsts):
        now = {name: at(setting, first) for name, setting in local.items()}
        if callable(now.get("solver")):
            raise ValueError(
                f"solver must be a name, which can be sent, got {shown(now['solver'])}"
            )
        without_effect &= idle(now).keys()
        if "solver" not in now and isinstance(options := now.get("solver-params"), str):
            parse_params(options, "solver-params")
            del now["solver-params"]
        default_training().updated(now)
    for name in sorted(without_effect):
        raise ValueError(f"{name} = {shown(local[name])} has no effect: {idle(now)[name]}")


def idle(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return which settings, that are not the defaults, have no effect with the others, and why.

    ``settings`` are numbers and texts by their names in requests.
    """
    without_effect = {}
    if settings.get("steps", 0):
        counted = f"steps = {shown(settings['steps'])} are counted in their place"
        without_effect = dict.fromkeys(("epochs", "random-epochs"), counted)
    if settings.get("solver") in FULL_BATCH and settings.get("batch-size"):
        without_effect["batch-size"] = f"{settings['solver']} takes all samples in each step"
    if not settings.get("sam", 0.0):
        without_effect["sam-direction"] = "sam is 0"
    usual = default_training().settings
    return {n: why for n, why in without_effect.items() if settings.get(n, usual[n]) != usual[n]}


@functools.cache
def default_training() -> LocalTraining:
    """Return ``LocalTraining()``, one object for all."""
    return LocalTraining()


@functools.cache
def _names() -> dict[str, str]:
    """Return the fields' names, by their names in requests."""
    return {field.name.replace("_", "-"): field.name for field in fields(LocalTraining)}


@functools.lru_cache(maxsize=64)
def _updated(training: LocalTraining, changes: tuple[tuple[str, type, Any], ...]) -> LocalTraining:
    return replace(training, **{name: value for name, _, value in changes})


@functools.lru_cache(maxsize=64)
def _arguments(make: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(make).parameters)
