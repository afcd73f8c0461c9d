"""Optimizers by name, and Delta-SGD and SPS as optimizers of PyTorch.

Their rules are in ``fl_strategies.solvers``. DoG gets the averaging of iterates that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clients.learning.replay import Generators, kept_buffers
from fl_strategies.solvers import delta_sgd, sps
from fl_strategies.solvers.local import TORCH, LocalTraining, build, named_solver

PAPER, AUTHORS = delta_sgd.Options(), sps.Options()
OF_A_STEP = ("gamma", "delta", "epsilon", "amplify_first")
OF_SPS = ("c", "f_star", "growth", "batch_share", "max_step")
"""The options of a group that are arguments of the rules."""


class DeltaSGD(Optimizer):
    """Delta-SGD; see ``fl_strategies.solvers.delta_sgd`` for the rule and every symbol.

    Each parameter group has its own step size, from norms over the whole group. The first ``step``
    calls the closure once; every later one calls it twice, at the current point and then at the
    previous one. The second call sees the dropout masks of the first, and leaves torch's generators
    as the first call left them. ``DeltaSGD.paper_rule`` and ``DeltaSGD.authors_rule`` are options:
    ``DeltaSGD(params, **DeltaSGD.authors_rule)``.

    Parameters
    ----------
    params : iterable
        As any torch optimizer's; a group may have its own ``lr``, ``gamma``, ``delta``,
        ``theta_0``, ``epsilon``, ``amplify_first``.
    lr : float > 0 (default 0.2, the paper's)
        eta_0, the size of the first step; it limits later steps by (2) only.
    gamma : float > 0 (default 2, the paper's)
        Share of the inverse curvature that a step takes.
    delta : float >= 0 (default 0.1, the paper's)
        How fast the step size may grow.
    theta_0 : float > 0 (default 1, the paper's)
        The ratio of step sizes before the first step.
    epsilon : float >= 0 (default 0)
        Added to each step size, except to a first one that is not amplified.
    amplify_first : bool (default False)
        Whether eta_0 is grown by (2) before the first step.
    same_batch : bool (default True)
        Whether both gradients of (1) are on the current mini-batch. If not, the gradient of the
        previous step is used again, and each step calls the closure once.
    same_masks : bool (default True)
        Whether the second call sees the dropout masks of the first. In the authors' code the
        second call draws new masks.
    module : torch.nn.Module, optional
        The module that the closure evaluates. If it is given, only the first call changes its
        buffers (BatchNorm's running statistics); else both calls do.

    Raises
    ------
    ValueError
        For an option outside its range.
    """

    paper_rule, authors_rule = delta_sgd.Options.paper_rule, delta_sgd.Options.authors_rule

    def __init__(
        self,
        params: Any,
        lr: float = PAPER.lr,
        *,
        gamma: float = PAPER.gamma,
        delta: float = PAPER.delta,
        theta_0: float = PAPER.theta_0,
        epsilon: float = PAPER.epsilon,
        amplify_first: bool = PAPER.amplify_first,
        same_batch: bool = PAPER.same_batch,
        same_masks: bool = PAPER.same_masks,
        module: nn.Module | None = None,
    ) -> None:
        self.module = module
        defaults = {
            "lr": lr,
            "gamma": gamma,
            "delta": delta,
            "theta_0": theta_0,
            "epsilon": epsilon,
            "amplify_first": amplify_first,
            "same_batch": same_batch,
            "same_masks": same_masks,
            "eta": None,
            "theta": None,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"module": self.module}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's method; raises ``ValueError`` for an option outside its range."""
        group = self.defaults | param_group
        delta_sgd.Options(**{name: group[name] for name in asdict(PAPER)})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Take a step; return the loss at the step's start.

        ``closure`` computes the loss and its gradients on a mini-batch, and returns the loss.
        """
        groups = [group["params"] for group in self.param_groups]
        generators = Generators.of([p for group in groups for p in group])
        with torch.enable_grad():
            loss = closure()
        x = [joined(group).clone() for group in groups]
        g = [gradient(group).clone() for group in groups]
        # a group's vectors are in the state of its first parameter
        states = [self.state[group[0]] for group in groups]
        g_before = [state.get("g") for state in states]
        if self.defaults["same_batch"] and any(states):
            with kept_buffers(self.module):
                for group, state in zip(groups, states, strict=True):
                    if state:
                        put(state["x"], group)
                if self.defaults["same_masks"]:
                    generators.restore()
                with torch.enable_grad():
                    closure()
                g_before = [gradient(group) for group in groups]
        for n, (group, state) in enumerate(zip(self.param_groups, states, strict=True)):
            first = group["eta"] is None
            eta, theta = group["lr" if first else "eta"], group["theta_0" if first else "theta"]
            before = delta_sgd.State(state.get("x"), state.get("g"), eta, theta)
            after, w = delta_sgd.step(
                before, x[n], g[n], g_before[n], **{name: group[name] for name in OF_A_STEP}
            )
            group["eta"], group["theta"] = after.eta, after.theta
            state["x"] = after.x
            if not self.defaults["same_batch"]:
                state["g"] = after.g
            put(w, group["params"])
        return loss


class SPS(Optimizer):
    """Polyak's step size; see ``fl_strategies.solvers.sps`` for the rule and every symbol.

    Parameters
    ----------
    params : iterable
        As any torch optimizer's, in one group: all share the loss, and so the step size.
    lr : float > 0 (default 1, the authors')
        eta_{-1}: the first step is at most growth^batch_share times this. Without ``growth`` it has
        no effect.
    c : float > 0 (default 0.5)
        Divides the step size.
    f_star : float (default 0)
        A lower bound of the loss on every batch.
    growth : float >= 1, or 0 for no limit (default 2, the authors')
        How much the step size may grow in an epoch.
    batch_share : float in (0, 1] (default 1)
        Size of a mini-batch / size of the data set.
    max_step : float >= 0, 0 for no limit (default 0)
        Largest step size.

    Raises
    ------
    ValueError
        For an option outside its range, and for several parameter groups.
    """

    def __init__(
        self,
        params: Any,
        lr: float = AUTHORS.lr,
        *,
        c: float = AUTHORS.c,
        f_star: float = AUTHORS.f_star,
        growth: float = AUTHORS.growth,
        batch_share: float = AUTHORS.batch_share,
        max_step: float = AUTHORS.max_step,
    ) -> None:
        options = sps.Options(lr, c, f_star, growth, batch_share, max_step)
        defaults: dict[str, Any] = {**asdict(options), "eta": None}
        super().__init__(params, defaults)
        if len(self.param_groups) > 1:
            raise ValueError(f"SPS takes one parameter group, got {len(self.param_groups)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Take a step; return the loss at the step's start.

        ``closure`` computes the loss and its gradients on a mini-batch, and returns the loss.
        """
        with torch.enable_grad():
            loss = closure()
        (group,) = self.param_groups
        reached = [p for p in group["params"] if p.grad is not None]
        if reached:
            state, w = sps.step(
                sps.State(group["lr"] if group["eta"] is None else group["eta"]),
                joined(reached),
                torch.as_tensor(loss).detach().double(),
                gradient(reached),
                **{name: group[name] for name in OF_SPS},
            )
            group["eta"] = state.eta
            put(w, reached)
        return loss


def joined(parameters: Sequence[Tensor]) -> Tensor:
    """Return the vector of all numbers of ``parameters``; it may be a view of a single one."""
    pieces = [p.detach().reshape(-1) for p in parameters]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def gradient(parameters: Sequence[Tensor]) -> Tensor:
    """Return :func:`joined` of their gradients, 0 for a parameter that the loss does not reach."""
    return joined([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])


def put(vector: Tensor, parameters: Sequence[Tensor]) -> None:
    """Write ``vector`` into ``parameters``."""
    pieces = torch.split(vector, [p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces, strict=True):
        p.copy_(piece.view_as(p))


class Averager:
    """The average of an optimizer's iterates w_t, with more weight on the last ones.

        mean <- mean + (gamma + 1) / (gamma + t) (w_t - mean),  t = 1, 2, ...

    gamma is that of DoG's authors, 8.

    Reference: Shamir, Zhang, "Stochastic Gradient Descent for Non-smooth Optimization", ICML 2013.
    """

    def __init__(self, optimizer: Optimizer, gamma: float = 8.0) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._gamma, self._steps = gamma, 0
        self._means: list[Tensor] = []
        self._iterate: list[Tensor] = []
        optimizer.register_step_post_hook(self._take)

    @torch.no_grad()
    def _take(self, *_: object) -> None:
        self._steps += 1
        if not self._means:
            self._means = [p.clone() for p in self._parameters]
        share = (self._gamma + 1) / (self._gamma + self._steps)
        torch._foreach_lerp_(self._means, self._parameters, share)

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the parameters."""
        if self._means:
            self._iterate = [p.clone() for p in self._parameters]
            torch._foreach_copy_(self._parameters, self._means)

    @torch.no_grad()
    def train(self) -> None:
        """Put the last iterate back."""
        if self._iterate:
            torch._foreach_copy_(self._parameters, self._iterate)
            self._iterate = []


def dog(params: Any, lr: float = 1.0, **options: Any) -> Optimizer:
    """Return DoG, which is evaluated at the average of its iterates, as its authors require.

    Buffers (running statistics) are those of the last step.

    Reference: Ivgi, Hinder, Carmon, "DoG is SGD's Best Friend", ICML 2023.
    """
    optimizer: Any = named_solver("dog")(params, lr=lr, **options)
    average = Averager(optimizer)
    optimizer.eval, optimizer.train = average.eval, average.train
    return cast(Optimizer, optimizer)


def packaged(name: str) -> Callable[..., Optimizer]:
    """Return what makes the optimizer of another package; its import waits until then."""

    def make(params: Any, lr: float = 1.0, **options: Any) -> Optimizer:
        return cast(Optimizer, named_solver(name)(params, lr=lr, **options))

    return make


MakeOptimizer: TypeAlias = Callable[..., Optimizer]
"""``make(parameters, lr=...)``: an optimizer class, or a function that builds one. If it takes
``module`` or ``batch_share``, it gets the torch module or batch size / data set size."""

SOLVERS: dict[str, MakeOptimizer] = {
    **{name: named_solver(name) for name in TORCH},
    "delta-sgd": DeltaSGD,
    "sps": SPS,
    "prodigy": packaged("prodigy"),
    "dog": dog,
    "schedule-free": packaged("schedule-free"),
}
"""Solvers by name; ``gd`` and ``lbfgs`` run on the full batch. Any other name is looked up in
``torch.optim`` (``"RMSprop"``), or is a function of one's own, ``"module:function"``."""


def make_optimizer(
    training: LocalTraining, parameters: list[nn.Parameter], **offered: Any
) -> Optimizer:
    """Return the optimizer over ``parameters``, called with the ``offered`` arguments it takes.

    An optimizer whose ``step`` has a closure without a default gets one, which computes loss and
    gradients; any other steps along gradients that are there.
    """
    make = training.solver
    if isinstance(make, str):
        make = SOLVERS[make] if make in SOLVERS else named_solver(make)
    optimizer: Optimizer = build(make, training, parameters, **offered)
    return optimizer
