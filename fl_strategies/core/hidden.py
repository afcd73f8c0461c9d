"""Of two packages named ``clients`` one hides the other; errors for the latter's names say so.

Python's own message names the package that was found, not the one that was meant.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def warn_if_hidden(ours: Path, name: str = "clients") -> None:
    """Warn if ``import name`` would find another package than the one in the folder ``ours``.

    An import of our names from the other package then says so too.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, made by hand
        return
    # a folder without __init__.py has no origin, and hides nothing
    if spec is None or spec.origin is None or Path(spec.origin).parent.samefile(ours):
        return
    text = (
        f"`import {name}` finds {spec.origin}, which comes first on sys.path and hides the client"
        f" half of fl_strategies in {ours}: rename yours, or put it into a package"
    )
    warnings.warn(text, stacklevel=2)
    if name in sys.modules:
        explain(sys.modules[name], ours, text)
    else:
        sys.meta_path.insert(0, Explainer(name, ours, text))


def explain(module: ModuleType, ours: Path, text: str) -> None:
    """Have a ``module`` that lacks a name of the package in ``ours`` raise ImportError(text)."""
    if "__getattr__" in vars(module):
        return
    names = set(re.findall(r'"(\w+)"', (ours / "__init__.py").read_text()))  # those of __all__

    def lacking(name: str) -> Any:
        meant = name in names or name.endswith("Client")
        if meant and not has_submodule(module.__name__, name):
            raise ImportError(f"cannot import {name!r}: {text}", name=module.__name__)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = lacking


def has_submodule(package: str, name: str) -> bool:
    """Return whether ``from package import name`` would import a submodule."""
    folders = getattr(sys.modules[package], "__path__", None)
    return folders is not None and PathFinder.find_spec(f"{package}.{name}", folders) is not None


class Explainer:
    """Finds the package that hides ours, as Python does; once loaded, it explains its errors."""

    def __init__(self, name: str, ours: Path, text: str) -> None:
        self.name, self.ours, self.text = name, ours, text

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the package that hides ours; None for any other module."""
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_explain(module: ModuleType) -> None:
            load(module)
            explain(module, self.ours, self.text)

        setattr(spec.loader, "exec_module", load_and_explain)  # noqa: B010 - mypy refuses to assign
        return spec


def check_hides_nothing(ours: Path, wanted: str, name: str = "clients") -> None:
    """Raise ``ImportError`` if the package in ``ours``, which lacks ``wanted``, hides another."""
    if wanted.startswith("_") or has_submodule(name, wanted):
        return
    elsewhere = [path for path in sys.path if not Path(path, "fl_strategies").exists()]
    spec = PathFinder.find_spec(name, elsewhere)
    if spec is None:
        return
    other = Path(spec.origin or next(iter(spec.submodule_search_locations or [""])))
    raise ImportError(
        f"cannot import {wanted!r}: `import {name}` finds the client half of fl_strategies in"
        f" {ours}, which comes first on sys.path and hides {other}: rename yours, or put it into a"
        " package",
        name=name,
    )
