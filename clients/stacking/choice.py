"""Which clients are trained as a stack. A committed table decides, never a timing of the run.

``gains.json`` says how many times faster a stack was than clients trained one by one. Its rows
name the kind of device, the kind of model, the number d of parameters and the number of clients;
``python -m simulations.lab.benchmark stack`` writes the file. So a run's settings fix which
clients are stacked, on any machine.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from clients.learning.border import Border
from fl_strategies.core.schedules import shown

Setting: TypeAlias = Literal["auto", "off"] | int

GAIN = 1.05
"""A stack is preferred where it is this many times faster."""


def kind_of(module: nn.Module) -> str:
    """Return "conv", "dense" (linear layers alone), or "other"."""
    parts = [part for part in module.modules() if any(True for _ in part.parameters(False))]
    if any(isinstance(part, nn.modules.conv._ConvNd) for part in parts):
        return "conv"
    return "dense" if all(isinstance(part, nn.Linear) for part in parts) else "other"


@functools.cache
def table() -> list[dict[str, Any]]:
    """Return the rows: ``device``, ``kind``, ``d``, ``clients``, ``gain``."""
    rows: list[dict[str, Any]] = json.loads(
        files("clients.stacking").joinpath("gains.json").read_text()
    )
    return rows


def measured_gain(device: str, kind: str, d: int, clients: int) -> float:
    """Return the gain of the next larger model and next smaller stack; 0 if none was measured."""
    rows = [row for row in table() if (row["device"], row["kind"]) == (device, kind)]
    larger = min((row["d"] for row in rows if row["d"] >= d), default=None)
    fewer = [row for row in rows if row["d"] == larger and row["clients"] <= clients]
    return float(max(fewer, key=lambda row: row["clients"])["gain"]) if fewer else 0.0


def check_setting(stack: Any) -> None:
    """Raise ``ValueError`` unless ``stack`` is a valid setting."""
    number = isinstance(stack, int) and not isinstance(stack, bool) and stack >= 2
    if stack not in ("auto", "off") and not number:
        raise ValueError(f'stack must be "auto", "off" or a whole number >= 2, got {shown(stack)}')


def setting_of(text: str) -> Setting:
    """Return the setting that ``text`` stands for; ``ValueError`` if it stands for none."""
    setting: Any = int(text) if text.isdecimal() else text
    check_setting(setting)
    checked: Setting = setting
    return checked


def stacked_at(setting: Setting, model: Border, steps: Sequence[float]) -> tuple[int, int]:
    """Return how many clients to train one by one, and how many of the rest to stack at most.

    ``steps`` are the clients' local steps, in descending order. Where a few clients have many more
    steps than the others, only these few would remain in the stack for a long time. So "auto"
    trains such clients one by one.
    """
    clients = len(steps)
    if setting == "off":
        return clients, 1
    if setting != "auto":
        return 0, setting
    device, kind, d = model.device.type, kind_of(model.module), model.size
    work = np.append(np.asarray(steps, np.float64), 0.0)
    costs = _costs(device, kind, d, clients)
    cost, one_by_one = work.sum() / GAIN, clients
    for alone in (0, *(1 << power for power in range(clients.bit_length())), clients):
        # while j clients remain in the stack, a step of it costs costs[j]
        rest = work[alone:]
        total = work[:alone].sum() + (costs[: len(rest) - 1] * -np.diff(rest)).sum()
        if len(rest) > 2 and total < cost:
            cost, one_by_one = total, alone
    return one_by_one, clients


@functools.lru_cache(maxsize=64)
def _costs(device: str, kind: str, d: int, clients: int) -> npt.NDArray[np.float64]:
    """Return the cost of a step of 1, ..., ``clients`` stacked clients, in steps of one client.

    A stack smaller than every measured one costs as much as the smallest measured one. Where no
    stack was measured, stacking gains nothing.
    """
    gains = np.array([measured_gain(device, kind, d, n) for n in range(1, clients + 1)])
    costs = np.arange(1.0, clients + 1) / np.where(gains > 0.0, gains, 1.0)
    measured = np.flatnonzero(gains)
    if len(measured):
        costs[: measured[0]] = costs[measured[0]]
    return costs
