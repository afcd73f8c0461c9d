"""The settings of all studies, which take seconds to read: each process reads them once."""

from __future__ import annotations

from functools import cache

from simulations.lab.studies import STUDIES, Setting, load


@cache
def by_study() -> dict[str, list[Setting]]:
    """Return the settings of each study, by its name."""
    return {study: load(study) for study in STUDIES}


@cache
def by_name() -> dict[str, Setting]:
    """Return all settings by name."""
    return {setting.name: setting for settings in by_study().values() for setting in settings}
