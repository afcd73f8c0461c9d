"""Which clients are trained as a stack: by a table of what was measured, never by the moment.

``cohort.json`` holds how many times faster than one by one stacks were, by the kind of device and
of model, its number d of parameters and the number of clients; ``python -m
simulations.lab.benchmark cohort`` writes it. So a run's settings fix which clients are stacked, on
any machine.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any, Literal, TypeAlias

from torch import nn

from clients.learning.model import FlatModel

Setting: TypeAlias = Literal["auto", "off"] | int

GAIN = 1.05
"""From which a stack is preferred."""


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
        files("clients.learning").joinpath("cohort.json").read_text()
    )
    return rows


def measured_gain(device: str, kind: str, d: int, clients: int) -> float:
    """Return the gain of the next larger model and the next smaller stack; 0 where none was."""
    rows = [row for row in table() if (row["device"], row["kind"]) == (device, kind)]
    larger = min((row["d"] for row in rows if row["d"] >= d), default=None)
    fewer = [row for row in rows if row["d"] == larger and row["clients"] <= clients]
    return float(max(fewer, key=lambda row: row["clients"])["gain"]) if fewer else 0.0


def check_setting(cohort: Any) -> None:
    """Raise ``ValueError`` unless this is a setting."""
    number = isinstance(cohort, int) and not isinstance(cohort, bool) and cohort >= 2
    if cohort not in ("auto", "off") and not number:
        raise ValueError(f'cohort must be "auto", "off" or a whole number >= 2, got {cohort!r}')


def setting_of(text: str) -> Setting:
    """Return the setting that ``text`` spells; ``ValueError`` if it spells none."""
    setting: Any = int(text) if text.isdecimal() else text
    check_setting(setting)
    found: Setting = setting
    return found


def most_at_once(setting: Setting, model: FlatModel, clients: int) -> int:
    """Return how many of so many ``clients`` to stack at most; 1 for one by one."""
    if setting == "off":
        return 1
    if setting != "auto":
        return setting
    vector, kind = model.vector, kind_of(model.module)
    gain = measured_gain(vector.device.type, kind, len(vector), clients)
    return clients if gain >= GAIN else 1
