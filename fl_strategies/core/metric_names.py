"""A metric's name says who reported it.

Metrics of a round come from three sources, and each source has its own names:

- the server: ``SERVER``, names that begin with ``test-`` or ``busy-share``, the ``reports`` of an
  algorithm of one's own, and every name that ``evaluate_fn`` has reported in the run (it should
  report before the first round, or use ``test-``);
- clients in evaluation: names that begin with ``eval-``, ``eval_``, ``own-`` or ``tuned-``; any
  other name that a client reports there gets the prefix ``eval-``;
- clients in training: all other names.

A client's metric whose name belongs to another source gets the prefix ``client-``. So no client's
metric has a name of the server, and no metric of an evaluation has a name of training.
"""

from __future__ import annotations

from collections.abc import Collection

COUNTS = (
    "clients-asked",
    "clients-used",
    "clients-rejected",
    "clients-failed",
    "clients-lost",
    "bytes-down",
    "bytes-up",
)
"""What the server counts in each phase; in evaluation the names get the prefix "eval-"."""

SHARES = ("data-share", "weight-share")
"""A client's share of the round's samples and of the next global model."""

SPREAD = ("-mean", "-variance", "-min", "-max", "-smallest", "-largest")
"""Suffixes of numbers that summarize all clients' metrics of one name."""

SKIPPED = "skipped"
"""1 in the metrics of a round after which the model was as before."""

REPORTED = frozenset({"algorithm-round", "communication-rounds", "bytes-saved", "virtual-seconds"})
"""What some algorithms of this package report. In a run of any other algorithm these names are the
server's, too: whoever reads a file need not know which algorithm ran."""

SERVER = frozenset(
    {
        *REPORTED,
        SKIPPED,
        "round",
        "client",
        "seconds",
        "gradient-norm2",
        "server-rate",
        "epsilon",
        "clip",
        "clients-late",
        "clients-dropped",
        "reply-age",
        "oldest-reply",
        *(f"{phase}{name}" for name in ("samples", *COUNTS) for phase in ("", "eval-")),
        *(f"{share}{end}" for share in SHARES for end in ("", "-smallest", "-largest")),
    }
)
"""The names of the server's own numbers; an algorithm of one's own has others in ``reports``."""

TESTED = "test-"
BUSY = "busy-share"
"""The share of a training phase in which hosts worked."""
EVALUATED = ("eval-", "eval_", "own-", "tuned-")
FOREIGN = "client-"


def in_training(name: str, *, reports: Collection[str] = ()) -> str:
    """Return the metric's name for a client's number ``name`` in a training reply.

    ``reports`` are the names that the algorithm's server half reports.

    Examples
    --------
    >>> [in_training(name) for name in ("train-loss", "seconds", "test-accuracy", "loss-mean")]
    ['train-loss', 'client-seconds', 'client-test-accuracy', 'client-loss-mean']
    """
    # "client-" too, so that different names stay different
    taken = (
        name in SERVER or name in reports or name.startswith((TESTED, BUSY, *EVALUATED, FOREIGN))
    )
    return f"{FOREIGN}{name}" if taken or name.endswith(SPREAD) else name


def in_evaluation(name: str) -> str:
    """Return the metric's name for a client's number ``name`` in an evaluation reply.

    Examples
    --------
    >>> [in_evaluation(name) for name in ("own-loss", "accuracy", "eval_acc", "clients-used")]
    ['own-loss', 'eval-accuracy', 'eval_acc', 'eval-client-clients-used']
    """
    called = name if name.startswith(EVALUATED) else f"eval-{name}"
    taken = called in SERVER or called.startswith(f"eval-{FOREIGN}")
    if taken or called.endswith(SPREAD):
        return f"eval-{FOREIGN}{called.removeprefix('eval-')}"
    return called
