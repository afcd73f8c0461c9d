"""Names that are not known, each with the known name that may be meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def unknown(names: Iterable[object], known: Iterable[str]) -> str:
    """Return ``names`` as text, each with the most similar of ``known``, if one is similar.

    Examples
    --------
    >>> unknown(["roh", "x"], ["rho", "eta"])
    "'roh' (did you mean 'rho'?), 'x'"
    """
    said, known = [], [*known]
    for name in names:
        near = [] if name in known else difflib.get_close_matches(str(name), known, 1, 0.5)
        said.append(f"{name!r} (did you mean {near[0]!r}?)" if near else repr(name))
    return ", ".join(said)


OTHER_WORDS = {"learning-rate": "lr", "optimizer": "solver"}
"""Names that others give to what has another name here."""


def misspelt(names: Iterable[str], known: Iterable[str]) -> str:
    """Return those of ``names`` that are almost ``known``, each with the known name.

    Examples
    --------
    >>> misspelt(["batch_size", "lr", "hospital"], ["lr", "batch-size"])
    "'batch_size' (did you mean 'batch-size'?)"
    """
    known, said = {*known}, []
    for name in sorted({*names} - known):
        kebab = name.replace("_", "-")
        near = difflib.get_close_matches(OTHER_WORDS.get(kebab, kebab), sorted(known), 1, 0.85)
        said += [f"{name!r} (did you mean {near[0]!r}?)"] if near else []
    return ", ".join(said)


def unknown_of(names: Iterable[object], known: Sequence[str]) -> str:
    """Return :func:`unknown`, and what is known.

    Examples
    --------
    >>> unknown_of(["x"], [])
    "'x'; it has none"
    """
    return f"{unknown(names, known)}; it has {known or 'none'}"
