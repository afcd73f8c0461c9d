"""Warn of another package named ``clients``, which would hide the client half."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path


def warn_if_hidden(ours: Path, name: str = "clients") -> None:
    """Warn if ``import name`` would find another package than the one in the folder ``ours``."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, made by hand
        return
    # a folder without __init__.py has no origin, and hides nothing
    if spec is None or spec.origin is None or Path(spec.origin).parent.samefile(ours):
        return
    warnings.warn(
        f"`import {name}` finds {spec.origin}, which comes first on sys.path and hides the client"
        f" half of fl_strategies in {ours}: rename yours, or put it into a package",
        stacklevel=2,
    )
