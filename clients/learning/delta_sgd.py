"""Delta-SGD as a torch optimizer; the rule is in ``fl_strategies.delta_sgd``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clients.learning.replay import Generators, kept_buffers
from fl_strategies import delta_sgd

PAPER = delta_sgd.Options()
Values = dict[Tensor, Tensor]


class DeltaSGD(Optimizer):
    """Delta-SGD; see ``fl_strategies.delta_sgd`` for the rule and every symbol.

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
        For an option outside its range, and in ``step`` without a closure.
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return the loss at the step's start.

        ``closure`` computes the loss and its gradients on a mini-batch, and returns the loss.
        """
        if closure is None:
            raise ValueError("DeltaSGD.step needs a closure that computes loss and gradients")
        same_batch, same_masks = self.defaults["same_batch"], self.defaults["same_masks"]
        parameters = [p for group in self.param_groups for p in group["params"]]
        generators = Generators.of(parameters)
        with torch.enable_grad():
            loss = closure()
        x: Values = {p: p.clone() for p in parameters}
        g = _gradients(parameters)
        started = [p for p in parameters if "x" in self.state[p]]
        if same_batch and started:
            with kept_buffers(self.module):
                for p in started:
                    p.copy_(self.state[p]["x"])
                if same_masks:
                    generators.restore()
                with torch.enable_grad():
                    closure()
                g_before = _gradients(parameters)
        else:
            g_before = {p: self.state[p].get("g", g[p]) for p in parameters}
        x_before: Values = {p: self.state[p].get("x", x[p]) for p in parameters}
        for group in self.param_groups:
            of = group["params"]
            eta, theta = group["eta"], group["theta"]
            first = eta is None
            if first:
                eta, theta = group["lr"], group["theta_0"]
            if group["amplify_first"] or not first:
                eta, theta = delta_sgd.step_size(
                    _norm([x[p] - x_before[p] for p in of]),
                    _norm([g[p] - g_before[p] for p in of]),
                    eta,
                    theta,
                    gamma=group["gamma"],
                    delta=group["delta"],
                    epsilon=group["epsilon"],
                )
            group["eta"], group["theta"] = eta, theta
            for p in of:
                p.copy_(x[p] - eta * g[p])
                self.state[p] = {"x": x[p]} if same_batch else {"x": x[p], "g": g[p]}
        return loss


def _gradients(parameters: list[Tensor]) -> Values:
    """Return copies of the gradients, 0 for a parameter that the loss does not reach."""
    return {p: torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters}


def _norm(pieces: list[Tensor]) -> Tensor:
    """Return the norm of the vector that consists of ``pieces``, a scalar in double precision."""
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
