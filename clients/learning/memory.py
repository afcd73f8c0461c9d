"""The memory that a client's work needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clients.learning.objective import Objective

VECTORS = 12
"""Vectors [d] of one client, a generous estimate: its state, its subproblem and its solver."""


def client_bytes(problem: Objective, samples: int) -> tuple[int, int]:
    """Return the bytes of a client's vectors, and of a mini-batch of ``samples`` samples."""
    size = problem.model.vector.element_size()
    vectors = VECTORS * len(problem.model.vector) * size
    return vectors, 2 * samples * activations(problem) * size


def activations(problem: Objective) -> int:
    """Return how many numbers a sample needs in the model: its inputs and all layers' outputs."""
    model, outputs = problem.model, [0]

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[0] += output.numel() if isinstance(output, Tensor) else 0

    layers = [part for part in model.module.modules() if not any(part.children())]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        inputs, targets = (part[:1] for part in problem.whole)
        model.module.eval()
        with torch.no_grad():
            problem.forward(inputs, targets)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs[0] + inputs.numel()
