"""Data sets and models of one's own: a run-config names their functions, "module:function"."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fl_strategies.core.spelling import unknown

OF_A_MODULE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


def own(name: str) -> Callable[..., Any] | None:
    """Return the function that "module:function" names; None for a name of another form.

    Raises ``ValueError`` if there is no such module, or no such function in it.
    """
    if not (found := OF_A_MODULE.fullmatch(name)):
        return None
    module_name, function_name = found.groups()
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{name!r}: {error}; it is looked for where the run starts") from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise ValueError(f"{name!r}: no function {unknown([function_name], names)}")
    return function
