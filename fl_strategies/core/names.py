"""Whose a number is, by its name.

A round's numbers and a client's row of them come from three sides, and each has names of its own:

- the server: ``SERVER``, what begins with "test-" or "busy-share", and whatever ``evaluate_fn`` has
  reported in the run (let it report before the first round, or begin with "test-");
- clients in evaluation: names that begin with "eval-", "own-" or "tuned-"; other names that they
  report there get "eval-" before them;
- clients in training: all other names.

What a client reports under a name that is another's is called "client-..." instead. No client's
number gets under a name of the server's, and none of its evaluation under one of training.
"""

from __future__ import annotations

COUNTS = (
    "clients-asked",
    "clients-used",
    "clients-rejected",
    "clients-failed",
    "clients-lost",
    "bytes-down",
    "bytes-up",
)
"""What the server counts in each phase, in evaluation with "eval-" before it."""

SHARES = ("data-share", "weight-share")
"""A client's part in the round's samples and in the next model."""

SPREAD = ("-mean", "-variance", "-min", "-max", "-smallest", "-largest")
"""How the names of the numbers end that are made of all clients' numbers of one name."""

SERVER = frozenset(
    {
        "round",
        "client",
        "seconds",
        "algorithm-round",
        "exchanges",
        "bytes-saved",
        "virtual-seconds",
        "gradient-norm2",
        *(f"{phase}{name}" for name in ("samples", *COUNTS) for phase in ("", "eval-")),
        *(f"{share}{end}" for share in SHARES for end in ("", "-smallest", "-largest")),
    }
)
"""All names under which the server itself writes a number, of any algorithm, or tests the model
where ``simulations`` run it."""

TESTED = "test-"
BUSY = "busy-share"
"""Of hosts: the share of a training phase in which they worked."""
EVALUATED = ("eval-", "own-", "tuned-")
FOREIGN = "client-"


def in_training(name: str) -> str:
    """Return what a client's number ``name`` of a training reply is called.

    Examples
    --------
    >>> [in_training(name) for name in ("train-loss", "seconds", "test-accuracy", "loss-mean")]
    ['train-loss', 'client-seconds', 'client-test-accuracy', 'client-loss-mean']
    """
    # with "client-" itself, so that different names stay different
    taken = name in SERVER or name.startswith((TESTED, BUSY, *EVALUATED, FOREIGN))
    return f"{FOREIGN}{name}" if taken or name.endswith(SPREAD) else name


def in_evaluation(name: str) -> str:
    """Return what a client's number ``name`` of an evaluation reply is called.

    Examples
    --------
    >>> [in_evaluation(name) for name in ("own-loss", "accuracy", "train-loss", "clients-used")]
    ['own-loss', 'eval-accuracy', 'eval-train-loss', 'eval-client-clients-used']
    """
    called = name if name.startswith(EVALUATED) else f"eval-{name}"
    taken = called in SERVER or called.startswith(f"eval-{FOREIGN}")
    if taken or called.endswith(SPREAD):
        return f"eval-{FOREIGN}{called.removeprefix('eval-')}"
    return called


def is_taken(name: str, called: str) -> bool:
    """Return whether ``name`` is another's, so that the client's number is ``called`` otherwise."""
    return called not in (name, f"eval-{name}")
