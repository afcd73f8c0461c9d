"""The memory that a client's work needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from clients.learning.problem import Problem, evaluating

VECTORS = 12
"""Vectors [d] of one client, a generous estimate: its state, its subproblem and its solver."""


def client_bytes(problem: Problem, samples: int) -> tuple[int, int]:
    """Return the bytes of a client's vectors, and of a mini-batch of ``samples`` samples."""
    size = problem.model.dtype.itemsize
    vectors = VECTORS * problem.model.size * size
    return vectors, 2 * samples * activations(problem) * size


def activations(problem: Problem) -> int:
    """Return how many numbers a sample needs in the model: its inputs and all layers' outputs."""
    model, outputs = problem.model, [0]

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[0] += output.numel() if isinstance(output, Tensor) else 0

    layers = [part for part in model.module.modules() if not any(part.children())]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        batch = next(problem.data.chunks())
        with torch.no_grad(), evaluating(model.module):
            problem.forward(batch.inputs, batch.targets)
    finally:
        for hook in hooks:
            hook.remove()
    read = sum(x.numel() for x in tree_leaves(batch.inputs) if isinstance(x, Tensor))
    return (outputs[0] + read) // batch.samples
