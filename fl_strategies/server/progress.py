"""The line that a person reads of a round; all numbers are in the history."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fl_strategies.core.metric_names import SPREAD
from fl_strategies.server.watched import KINDS

LONGEST = 160
"""Of a longer line, the clients and seconds remain: a million clients with every fault."""
LONGEST_NAME = 20
"""Metrics with longer names are not shown."""

LAST = ("own-", "tuned-", "global-")
"""Metrics of these models are shown only where there are no others."""

_PLAIN = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)


def round_line(number: int, of: int, metrics: Mapping[str, float]) -> str:
    """Return round ``number`` of ``of`` in at most 160 characters.

    Loss and accuracy are the first of ``metrics`` with this word in their name; those of ``LAST``
    come last, so that both are of one model where it has both. Of the clients that
    were asked, the line counts those that were used, and what happened to the others: lost (no
    reply), failed (an error), rejected (a reply that cannot be used).

    Examples
    --------
    >>> counts = {"clients-asked": 10, "clients-used": 8, "clients-lost": 2}
    >>> round_line(3, 30, {"test-loss": 0.51, "test-accuracy": 0.8, **counts, "seconds": 1.26})
    'round 3/30: test-loss 0.5100, test-accuracy 0.8000, 8 of 10 clients (2 lost), 1.3 s'
    """
    parts = [f"{name} {_shown(metrics[name])}" for name in _loss_and_accuracy(metrics)]
    place = len(parts)
    parts += [_clients(metrics, ""), _clients(metrics, "eval-")]
    parts += [f"{metrics['seconds']:.1f} s"] if "seconds" in metrics else []
    line = f"round {number}/{of}: {', '.join(filter(None, parts))}"
    if len(line) <= LONGEST:
        return line
    return f"round {number}/{of}: {', '.join([parts[place], parts[-1]])}"


def _loss_and_accuracy(metrics: Mapping[str, float]) -> list[str]:
    plain = [
        name
        for name in metrics
        if len(name) <= LONGEST_NAME and _PLAIN.fullmatch(name) and not name.endswith(SPREAD)
    ]
    plain.sort(key=lambda name: name.startswith(LAST))
    found = [
        next((name for name in plain if {*re.split("[-_.]", name.lower())} & {*words}), "")
        for words in KINDS.values()
    ]
    return [name for name in found if name]


def _shown(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def _clients(metrics: Mapping[str, float], phase: str) -> str:
    """Return the counts of a phase; of an evaluation without a fault nothing is said."""
    asked, used, lost, failed, rejected = (
        int(metrics.get(f"{phase}clients-{what}", 0))
        for what in ("asked", "used", "lost", "failed", "rejected")
    )
    counts = {"lost": lost, "failed": failed, "rejected": rejected - failed}
    faults = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if phase:
        return f"evaluation {used} of {asked} ({faults})" if faults else ""
    return f"{used} of {asked} clients" + (f" ({faults})" if faults else "")
