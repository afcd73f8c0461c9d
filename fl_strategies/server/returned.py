"""What an algorithm's hooks return: checked where it arrives, by errors that name the hook."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_strategies.core.metric_names import BUSY, EVALUATED, FOREIGN, SERVER, SPREAD, TESTED
from fl_strategies.core.schedules import plain, shown
from fl_strategies.core.vectors import Pieces, Vector, finite

WORK = ("train-loss", "train-accuracy", "residual", "steps", "epochs")
"""What clients report of their training."""
TAKEN = (SERVER - {"virtual-seconds"}).union(WORK, (f"{n}{end}" for n in WORK for end in SPREAD))
"""Names of others' numbers of a round; virtual seconds may be the algorithm's own."""


def checked_vector(hook: str, what: str, value: object, size: int) -> npt.NDArray[Any]:
    """Return ``value``, which ``hook`` returned as ``what``, as an array.

    Raises ``TypeError`` or ``ValueError`` for anything but a finite vector [size].
    """
    must = f"{hook} must return {what} [{size}]"
    if not isinstance(value, np.ndarray | Pieces):
        raise TypeError(f"{must}, a NumPy array, got {shown(value)}")
    if value.shape != (size,):
        raise ValueError(f"{must}, got {value.shape}")
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{must} of real numbers, got the type {array.dtype}")
    if not finite([array]):
        where = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"{must} of finite numbers, got {array[where]} at {where}")
    return array


def checked_vectors(hook: str, made: object, names: Sequence[str], size: int) -> list[Vector]:
    """Return the vectors [size] that ``hook`` returned by name, in the order of ``names``.

    Raises ``TypeError`` or ``ValueError`` for other names, and as :func:`checked_vector`.
    """
    if not isinstance(made, Mapping):
        raise TypeError(f"{hook} must return a vector for each of {[*names]}, got {shown(made)}")
    if made.keys() != {*names}:
        raise ValueError(f"{hook} must return vectors of the names {[*names]}, got {[*made]}")
    return [checked_vector(hook, repr(name), made[name], size) for name in names]


def checked_info(hook: str, info: object, scalars: Collection[str]) -> dict[str, float]:
    """Return the numbers of a round that ``hook`` returned, by name.

    ``scalars`` are clients' own. Raises ``TypeError`` or ``ValueError`` for what is no number, and
    for a name that clients or the server report already.
    """
    if not isinstance(info, Mapping):
        raise TypeError(f"{hook} must return a dict of numbers as info, got {shown(info)}")
    numbers = {name: plain(value) for name, value in info.items()}
    for name, number in numbers.items():
        if not isinstance(name, str) or not isinstance(number, int | float):
            told = f"{hook} must return numbers by name as info"
            raise TypeError(f"{told}, got {shown(info[name])} as {name!r:.60}")
    prefixes = (TESTED, BUSY, FOREIGN, *EVALUATED)
    if taken := [n for n in numbers if n in TAKEN or n in scalars or n.startswith(prefixes)]:
        raise ValueError(f"{hook} must not report {taken[:3]}: clients or the server report these")
    return numbers
