"""Spread clients over hosts by expected work, the longest first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

H = TypeVar("H")


def spread(work: Mapping[int, float], hosts: Sequence[H]) -> dict[H, list[int]]:
    """Return the clients, ascending, of each host that has any.

    ``work`` is each client's expected work. Clients are assigned one by one, the longest work
    first, to the host with the least work so far (Graham 1969): the last host ends at most one
    client's work after the mean. The result depends on the arguments only.

    Examples
    --------
    >>> spread({0: 5.0, 1: 3.0, 2: 2.0, 3: 1.0}, ["a", "b"])
    {'a': [0, 3], 'b': [1, 2]}
    """
    loads = [(0.0, place) for place in range(len(hosts))]
    assigned: dict[H, list[int]] = {}
    for client in sorted(work, key=lambda client: (-work[client], client)):
        load, place = heapq.heappop(loads)
        assigned.setdefault(hosts[place], []).append(client)
        heapq.heappush(loads, (load + work[client], place))
    return {host: sorted(clients) for host, clients in assigned.items()}


def expected_work(samples: float, config: Mapping[str, Any], *, trains: bool = True) -> float:
    """Return how many samples a client with ``samples`` samples is expected to train on.

    ``config`` is the request's: ``steps`` of ``batch-size`` (0: all samples), else ``epochs``.
    """
    if not trains:
        return samples
    if steps := config.get("steps"):
        return float(steps) * (config.get("batch-size") or samples)
    return samples * float(config.get("epochs", 1))
