"""Whether there are enough clients: how many a round waits for, and when no run can succeed."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from fl_strategies.core.hyperparameters import of_client

if TYPE_CHECKING:
    from fl_strategies.server.strategy import FederatedStrategy


def clients_needed(strategy: FederatedStrategy) -> int:
    """Return how many clients a round waits for.

    The first one after a resumption waits for ``min_replies``, if the run has had so many: some
    may be away, for as long as their nodes take to come back.
    """
    least = max(strategy.min_available_nodes, strategy.min_train_nodes)
    run = strategy.run
    known = len(strategy.nodes.known) if run.round == run.first > 1 else 0
    enough = bisect_left(range(known + 1), strategy.min_replies, key=strategy.asked_of)
    return max(least, enough) if enough <= known else least


def check_enough(strategy: FederatedStrategy, clients: int, how: str) -> None:
    """Raise ``ValueError`` if a call's first round has too few clients for ``min_replies``.

    In later rounds clients may have left for a while: then the round is skipped. So it is if a part
    says that they are away.
    """
    if strategy.run.round == strategy.run.first and strategy.availability is None:
        _check_replies(strategy, clients, how)


def check_population(strategy: FederatedStrategy, clients: int) -> None:
    """Raise ``ValueError`` if no run with so many clients, all connected, can succeed."""
    strategy.check_clients(clients)
    for name, declaration in strategy.declarations.items():
        if declaration.per_client:
            of_client(name, getattr(strategy, name), clients - 1)
    how = f"that {strategy.algorithm} asks in a round"
    _check_replies(strategy, strategy.asked_of(clients), how)


def _check_replies(strategy: FederatedStrategy, clients: int, how: str) -> None:
    least, combine = strategy.min_replies, strategy.combine
    if clients < least:
        of_part = combine is not None and combine.least == least
        needs = f"{combine!r} needs {least} uploads" if of_part else f"min_replies is {least}"
        raise ValueError(f"{needs}, and the number of clients {how} is {clients}")
