"""Which clients can be stacked: models, losses and solvers that are known to treat each sample, and
each entry of a vector, by itself. All others are trained one by one.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional

from clients.base import FederatedClient
from clients.learning.data import Tensors
from clients.learning.evaluate import IGNORED
from clients.learning.problem import Loss, Problem
from fl_strategies.solvers.local import LocalTraining

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU)
"""Layers that act on every number separately."""
LAYERS = (
    *ELEMENTWISE, nn.Linear, nn.Flatten, nn.Unflatten, nn.Identity, nn.Softmax, nn.ConstantPad1d,
    nn.LayerNorm, nn.GroupNorm, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d,
)  # fmt: skip
"""Layers of models that are stacked. A module class of one's own says ``stacks = True``, if what
it makes of a sample does not depend on the batch or on random numbers; its layers are of these."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

LOSSES = (
    functional.cross_entropy, functional.mse_loss, functional.l1_loss, functional.huber_loss,
    functional.smooth_l1_loss, functional.binary_cross_entropy_with_logits,
)  # fmt: skip
LOSS_MODULES = (
    nn.CrossEntropyLoss, nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss
)  # fmt: skip
"""Losses that are means over samples; the modules with their defaults, except for numbers."""
SOLVERS = ("gd", "sgd", "delta-sgd")
"""Solvers that run on stacks: steps of each client along its own gradients."""


def obstacle(client: FederatedClient, training: LocalTraining) -> str:
    """Return why a client is trained alone, or "" if it can be stacked."""
    problem, kind = client.problem, type(client)
    if not vars(kind).get("stacks"):
        return f"{kind.__name__} does not say `stacks = True` (its rule takes [clients, d], too)"
    if why := _of_training(training):
        return why
    if type(problem) is not Problem:
        return f"a {type(problem).__name__} may have a loss of its own"
    if not isinstance(problem.data, Tensors):
        return "its samples are no tensors"
    if problem.micro_batch:
        return f"it has a micro_batch = {problem.micro_batch}"
    if problem.own_gradient:
        return "its problem has a gradient of its own"
    if problem.autocast is not None:
        return f"it runs in {problem.autocast}"
    if problem.model.kept:
        return f"arrays are each client's own ({problem.model.kept[0]})"
    if loss_of_each(problem.loss) is None:
        return "its loss is not one of PyTorch's that are means over samples"
    return _of_module(problem.model.module)


def loss_of_each(loss: Loss) -> Loss | None:
    """Return a function of outputs and targets that returns the loss of each sample.

    Their mean is ``loss``. None if the loss is not known to be such a mean.
    """
    each: Any = copy.copy(loss)
    if any(loss is known for known in LOSSES):
        return partial(each, reduction="none")
    options: dict[str, Any] = {"reduction": "mean", "weight": None, "pos_weight": None}
    options |= {"ignore_index": IGNORED}
    if type(loss) not in LOSS_MODULES or any(
        getattr(loss, name, usual) != usual for name, usual in options.items()
    ):
        return None
    each.reduction = "none"
    of_sample: Loss = each
    return of_sample


def _of_training(training: LocalTraining) -> str:
    if training.solver not in SOLVERS:
        return f"the solver {training.solver!r} does not run on stacks"
    own = {
        "solver-params of sgd": training.solver != "delta-sgd" and training.solver_params,
        "lr-schedule": training.lr_schedule,
        "max-grad-norm": training.max_grad_norm,
        "sam": training.sam,
        "variance-reduction": training.variance_reduction != "off",
        "residual": training.residual is not None,
    }
    return next((f"{name} does not run on stacks" for name, used in own.items() if used), "")


def _of_module(module: nn.Module) -> str:
    for part in module.modules():
        kind = type(part)
        along = getattr(part, "dim", 1), getattr(part, "start_dim", 1)
        known = kind in (*LAYERS, *CONTAINERS) and along == (1, 1)
        if not known and not vars(kind).get("stacks"):
            return f"{kind.__name__} is not a layer that stacks take"
        hooks: list[Any] = [part._forward_hooks, part._forward_pre_hooks, part._backward_hooks]
        hooks += [part._backward_pre_hooks]
        for parameter in part.parameters(recurse=False):
            hooks += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
        if any(hooks):
            return f"{kind.__name__} has a hook"
        if "forward" in vars(part):
            return f"{kind.__name__} has a forward of its own"
    return ""
