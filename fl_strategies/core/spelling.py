"""Names that are not known, each with the known name that may be meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from fl_strategies.core.schedules import shown

MOST = 3
"""The most unknown names that a message shows."""
SIMILAR = 0.8
"""The least ratio of :mod:`difflib` of a typo to what was meant: below it are other words."""


def hint(name: object, known: Iterable[str]) -> str:
    """Return the question whether the known name most like ``name`` is meant; "" for none.

    Examples
    --------
    >>> hint("batch_size", ["batch-size", "lr"])
    " (did you mean 'batch-size'?)"
    >>> hint("batch", ["batch-size", "lr"]), hint("lr", ["lr"])
    ('', '')
    """
    spelt = {word.lower(): word for word in known}
    text = name[:100] if isinstance(name, str) else shown(name)
    near = difflib.get_close_matches(text.lower(), spelt, 1, SIMILAR)
    return f" (did you mean {spelt[near[0]]!r}?)" if near and spelt[near[0]] != name else ""


def unknown(names: Iterable[object], known: Iterable[str]) -> str:
    """Return ``names`` as text, each with its :func:`hint`.

    Examples
    --------
    >>> unknown(["gama", "x"], ["gamma", "eta"])
    "'gama' (did you mean 'gamma'?), 'x'"
    """
    known, names = [*known], [*names]
    texts = [shown(name) + hint(name, known) for name in names[:MOST]]
    more = [f"and {len(names) - MOST} more"] if len(names) > MOST else []
    return ", ".join(texts + more)


def unknown_of(names: Iterable[object], known: Sequence[str]) -> str:
    """Return :func:`unknown`, and what is known.

    Examples
    --------
    >>> unknown_of(["x"], [])
    "'x'; it has none"
    """
    return f"{unknown(names, known)}; it has {listed(known) if known else 'none'}"


def misspelt(names: Iterable[str], known: Iterable[str]) -> str:
    """Return those of ``names`` that are almost ``known``, each with its :func:`hint`.

    Examples
    --------
    >>> misspelt(["batch_size", "lr", "hospital", "epoch"], ["lr", "batch-size", "epochs"])
    "'batch_size' (did you mean 'batch-size'?), 'epoch' (did you mean 'epochs'?)"
    """
    known = sorted(known)
    hints = {name: hint(name, known) for name in sorted({*names} - {*known})}
    return ", ".join(shown(name) + said for name, said in hints.items() if said)


def listed(names: Iterable[object]) -> str:
    """Return ``names`` as the text of a list, which is cut off if it is long.

    Examples
    --------
    >>> listed(["rho", "eta"]), listed(range(1000))[-19:]
    ("['rho', 'eta']", ' ... (1000 in all)]')
    """
    names, items = [*names], ""
    for place, name in enumerate(names):
        text = f", {shown(name)}" if place else shown(name)
        if len(items) + len(text) > 170:
            return f"[{items}, ... ({len(names)} in all)]"
        items += text
    return f"[{items}]"
