"""One client or a stack of them: numbers and vectors.

A rule runs on the vector ``[d]`` of one client, whose numbers are plain numbers, or on a stack
``[clients, d]``. In a stack, a number that differs between clients is a column ``[clients, 1]`` in
double precision. So a rule that is written elementwise gives each client of a stack what it would
give that client alone. Operations that are not elementwise are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from fl_strategies.core.vectors import Number, Vector

T = TypeVar("T")


def square_norm(v: Vector) -> Number:
    """Return ||v||^2: a number in double precision, or a column for a stack."""
    total = (v**2).sum(-1)
    return total[..., None] if total.ndim else float(total)


def norm(v: Vector) -> Number:
    """Return ||v|| in double precision, a 0-d array of the kind of ``v``; a column for a stack."""
    stack = v.ndim > 1
    if isinstance(v, np.ndarray):
        return np.linalg.norm(v.astype(np.float64), axis=-1, keepdims=stack)
    import torch  # which has made v

    return torch.linalg.vector_norm(v, dim=-1, keepdim=stack, dtype=torch.float64)


def dot(u: Vector, v: Vector) -> Number:
    """Return <u, v> in double precision, a 0-d array of their kind; a column for stacks."""
    product = u * v
    stack = product.ndim > 1
    if isinstance(product, np.ndarray):
        return product.sum(-1, dtype=np.float64, keepdims=stack)
    import torch  # which has made them

    return product.sum(-1, keepdim=stack, dtype=torch.float64)


def clip(number: Number, low: Number, high: Number) -> Number:
    """Return ``number`` clipped to [low, high]; for a vector or column, bounds may be columns."""
    if hasattr(number, "clip"):
        return number.clip(min=low).clip(max=high)
    return min(max(number, low), high)


def for_each(number: float, v: Vector) -> Number:
    """Return ``number``; if ``v`` is a stack, return a column with ``number`` for each client."""
    if v.ndim == 1:
        return number
    column = 0.0 * v[..., :1]
    return number + (column.double() if hasattr(column, "double") else column.astype(np.float64))


def is_nought(number: Number) -> bool:
    """Return whether ``number`` is a plain 0, which holds for all clients, and not a column."""
    return not getattr(number, "ndim", 0) and number == 0


def choose(which: Any, yes: Any, no: Any) -> Any:
    """Return ``yes`` for the clients where ``which``, a bool or a column, is true, else ``no``.

    ``yes`` and ``no`` are vectors, numbers, columns, or tuples of these.
    """
    if isinstance(which, bool) or yes is no:
        return yes if which is not False else no
    if isinstance(yes, tuple):
        parts = [choose(which, y, n) for y, n in zip(yes, no, strict=True)]
        return type(yes)(*parts) if hasattr(yes, "_fields") else tuple(parts)
    if isinstance(which, np.ndarray):
        return np.where(which, yes, no)
    if hasattr(yes, "where"):  # torch's, which is not imported here
        return yes.where(which, no)
    return no.where(~which, yes) if hasattr(no, "where") else which.double() * (yes - no) + no


def repeated(times: Number, step: Callable[..., T], *start: Any) -> T:
    """Return ``step(*step(*start))`` and so on, with ``step`` applied ``times`` times.

    ``step`` takes and returns a tuple. ``times`` is a whole number >= 0, or a column of them: then
    each client's part no longer changes after that client's last step.

    Examples
    --------
    >>> repeated(3, lambda w: (w / 2,), 8.0)
    (1.0,)
    """
    state: Any = start
    column = bool(getattr(times, "ndim", 0))
    for number in range(int(times.max() if column else times)):
        after = step(*state)
        state = choose(times > number, after, state) if column else after
    return state  # type: ignore[no-any-return]
