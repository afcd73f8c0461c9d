"""Delta-SGD as the paper has it, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

USUAL = {"gamma": 2.0, "delta": 0.1, "epsilon": 0.0, "amplify_first": False}

ETA_0, THETA_0 = 0.6, 1.3


def by_hand(
    gradient: Callable[[np.ndarray, int], np.ndarray],
    x: np.ndarray,
    steps: int,
    eta: float = ETA_0,
    theta: float = THETA_0,
    same_batch: bool = True,
    **options: Any,
) -> tuple[list[np.ndarray], list[float]]:
    """Return the points and step sizes of Algorithm 1, written down as it stands in the paper."""
    o = USUAL | options
    points, etas, before, g_before = [x], [], x, None
    for k in range(steps):
        g = gradient(x, k)
        if k > 0 or o["amplify_first"]:
            old = gradient(before, k) if same_batch else g_before
            bounds = [math.sqrt(1 + o["delta"] * theta) * eta]
            if k > 0 and np.linalg.norm(g - old) > 0:
                moved = np.linalg.norm(x - before)
                bounds.append(o["gamma"] * moved / (2 * np.linalg.norm(g - old)))
            theta, eta = (min(bounds) + o["epsilon"]) / eta, min(bounds) + o["epsilon"]
        before, g_before, x = x, g, x - eta * g
        points.append(x)
        etas.append(eta)
    return points, etas


class Dropping(nn.Module):
    """BatchNorm and dropout; remembers each mask and each mean that BatchNorm saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.masks: list[torch.Tensor] = []
        self.means: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.means.append(h.detach().mean(0))
        mask = nn.functional.dropout(torch.ones_like(h), 0.5, self.training)
        self.masks.append(mask)
        return self.last(mask * self.norm(h))
