"""Which clients can be stacked: by their problem, and by a trial of their model and loss."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from clients.learning.model import FlatModel
from clients.learning.objective import Objective
from clients.learning.problem import Problem, gathered
from clients.learning.replay import seed_generators, without_trace
from clients.stacking.forms import PLAIN, Form
from clients.stacking.masks import Masks, dropouts
from clients.stacking.means import NoMean
from clients.stacking.stack import Stack
from fl_strategies.core.reasons import of_exception

_TRIED: weakref.WeakKeyDictionary[FlatModel, dict[Any, str]] = weakref.WeakKeyDictionary()
"""Results of :func:`obstacle`: by model, then by form, loss and kind of inputs."""


def obstacle(problem: Objective, form: Form = PLAIN) -> str:
    """Return why the problem's client must be trained alone, or "" if it can be stacked.

    ``form`` is the loss that the client's algorithm trains on.
    """
    if type(problem) is not Problem:
        return f"a {type(problem).__name__} has no fixed samples or a loss of its own"
    if problem.own_gradient:
        return "it has a gradient of its own"
    model = problem.model
    if model.kept:
        return f"arrays are each client's own ({model.kept[0]})"
    if problem.autocast is not None:
        return f"it runs in {problem.autocast}"
    try:
        hash((problem.loss, problem.penalty))
    except TypeError as error:
        return f"its loss and penalty tell what can be stacked, and one has no hash: {error}"
    like = problem.inputs.shape[1:], problem.inputs.dtype, problem.targets.dtype
    key = (form, problem.loss, *like)
    obstacles = _TRIED.setdefault(model, {})
    if key not in obstacles:
        obstacles[key] = _of_module(model) or _of_trial(problem, form)
    return obstacles[key]


def _of_module(model: FlatModel) -> str:
    device = model.vector.device.type
    for part in model.module.modules():
        name = type(part).__name__
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return f"{name} looks at a whole mini-batch and keeps running statistics"
        if isinstance(part, nn.RNNBase):
            return f"torch.vmap does not take recurrent layers ({name})"
        drops = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0.0
        if drops and (type(part) is not nn.Dropout or part.p == 1.0 or device != "cpu"):
            return f"{name} on {device} draws masks that a stack does not"
    return ""


def _of_trial(problem: Problem, form: Form) -> str:
    """Return why two stacked clients do not get the gradients of each alone, or "" if they do."""
    model, (inputs, targets) = problem.model, problem.whole
    other = next((i for i in range(1, len(targets)) if not targets[i].equal(targets[0])), 0)
    pair = torch.tensor([0, other], device=targets.device)
    problem = Problem(
        model, problem.loss, gathered(inputs, pair), targets[pair], penalty=problem.penalty
    )
    before = model.vector.clone()
    w = torch.randn(len(before), generator=torch.Generator().manual_seed(1)).to(before) / 20
    with without_trace([before], model.module):
        model.vector.copy_(w)
        try:
            both = Stack([problem, problem])
            both.masks = Masks([1, 1]) if dropouts(model.module) else None
            stack = form.stacked_in_trial(both)
            alone = form.alone_in_trial(problem)
            model.vector.copy_(w)
            model.module.train()
            x, y = alone.whole
            numbers = np.array([[0, 1], [0, 1]])  # the first client's batch is one sample, padded
            sizes = np.array([1, 2])
            with both.masks.of(np.arange(2), sizes) if both.masks else nullcontext():
                gradients, _ = stack.gradient(w.expand(2, -1), stack.batches(numbers, sizes))
            for gradient, count in zip(gradients, (1, 2), strict=True):
                seed_generators(1, w.device)
                alone.gradient(x[:count], y[:count])
                error, size = gradient - model.gradient, model.gradient.norm()
                if not error.norm() <= torch.finfo(gradient.dtype).eps ** 0.5 * size:
                    return (
                        "its loss is no mean over samples, a sample's depends on others, or a"
                        " convolution's output has dropout"
                    )
        except NoMean as error:
            return str(error)
        except Exception as error:
            return f"a trial stack fails: {of_exception(error)}"
        finally:
            model.vector.copy_(before)
    return ""
