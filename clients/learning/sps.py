"""SPS as a torch optimizer; the rule is in ``fl_strategies.sps``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch.optim import Optimizer

from fl_strategies import sps

AUTHORS = sps.Options()


class SPS(Optimizer):
    """Polyak's step size; see ``fl_strategies.sps`` for the rule and every symbol.

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
        For an option outside its range, several parameter groups, and in ``step`` without a
        closure.
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return the loss at the step's start.

        ``closure`` computes the loss and its gradients on a mini-batch, and returns the loss.
        """
        if closure is None:
            raise ValueError("SPS.step needs a closure that computes loss and gradients")
        with torch.enable_grad():
            loss = closure()
        (group,) = self.param_groups
        reached = [p for p in group["params"] if p.grad is not None]
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in reached]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.double)
        eta, group["eta"] = sps.step_size(
            torch.as_tensor(loss).detach().double(),
            square,
            group["lr"] if group["eta"] is None else group["eta"],
            c=group["c"],
            f_star=group["f_star"],
            growth=group["growth"],
            batch_share=group["batch_share"],
            max_step=group["max_step"],
        )
        for p in reached:
            p.sub_(eta * p.grad)
        return loss
