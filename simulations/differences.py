"""How the settings of two runs differ, those of an earlier run perhaps by an earlier version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fl_strategies.core.settings_text import parse_params
from simulations.config import RunConfig, hyperparameter_defaults, keeps_state
from simulations.defaults import ANY

NO_SETTINGS = (
    "output",
    "checkpoint_every",
    "checkpoint_keep",
    "resume",
    "max_steps",
    "lost_rounds",
    "state_memory",
)
"""Keys that do not change the result of a run that finishes."""


def differences(stored: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the effective differences of ``settings`` from those ``stored`` by an earlier run."""
    before, now = _effective(stored), _effective(settings)
    return [
        f"{name} was {before.get(name)}, is {now.get(name)}"
        for name in dict.fromkeys([*now, *before])
        if before.get(name) != now.get(name)
    ]


def _effective(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the effective settings, for settings of any version of this package.

    A key that the version did not know had no effect and gets its neutral value. Missing
    hyperparameters of the algorithm get their defaults.
    """
    known = {key.name: ANY.get(key.name, key.default) for key in fields(RunConfig)}
    effective = known | dict(settings)
    params = parse_params(effective.pop("params"))
    for name in NO_SETTINGS:
        del effective[name]
    if not keeps_state(effective["algorithm"], effective["compression"], effective["share"]):
        del effective["state_dir"]
    effective |= hyperparameter_defaults(effective["algorithm"]) | params
    # flags and words for them are one
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in effective.items()
    }
