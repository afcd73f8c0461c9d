"""Rows of several clients as columns, the form in which records carry them: a list for each name.

A table holds clients whose rows have the same names and types. The table of a single client is its
row, which may also hold lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Table(NamedTuple):
    """Rows of ``clients``: a single client's row, or by name a list with an entry for each."""

    clients: list[int]
    columns: dict[str, Any]


def tabulate(rows: Mapping[int, Mapping[str, Any]]) -> list[Table]:
    """Return the ``rows`` of clients as tables, in the order of their first clients.

    Examples
    --------
    >>> tabulate({3: {"loss": 0.5}, 7: {"loss": 0.25}, 8: {"loss": 1}})
    [Table(clients=[3, 7], columns={'loss': [0.5, 0.25]}), Table(clients=[8], columns={'loss': 1})]
    """
    alike: dict[Any, list[int]] = {}
    for client, row in rows.items():
        kind: Any = frozenset((name, type(value)) for name, value in row.items())
        if any(isinstance(value, list) for value in row.values()):
            kind = client
        alike.setdefault(kind, []).append(client)
    return [
        Table(
            clients,
            dict(rows[clients[0]])
            if len(clients) == 1
            else {name: [rows[client][name] for client in clients] for name in rows[clients[0]]},
        )
        for clients in alike.values()
    ]


def rows_of(tables: Iterable[tuple[list[int], Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Return the rows by client: the inverse of :func:`tabulate`.

    Raises ``ValueError`` for a client that occurs twice, and for a column without an entry for each
    client.
    """
    rows: dict[int, dict[str, Any]] = {}
    for clients, columns in tables:
        if len({*clients} - rows.keys()) < len(clients):
            twice = sorted({c for c in clients if c in rows or clients.count(c) > 1})[:5]
            raise ValueError(f"clients {twice} are there twice")
        if len(clients) == 1:
            rows[clients[0]] = dict(columns)
            continue
        for name, column in columns.items():
            if not isinstance(column, list) or len(column) != len(clients):
                size = f"{len(column)} entries" if isinstance(column, list) else "no list"
                raise ValueError(f"{name!r} has {size} for {len(clients)} clients")
        names = list(columns)
        entries = zip(*columns.values(), strict=True) if names else ((),) * len(clients)
        for client, values in zip(clients, entries, strict=True):
            rows[client] = dict(zip(names, values, strict=True))
    return rows


def in_common(rows: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[int, Any]]:
    """Return the entries that all ``rows`` share, also in type, and by client the other entries.

    Examples
    --------
    >>> in_common({1: {"rho": 0.5, "acked": 2}, 4: {"rho": 0.5, "acked": -1}})
    ({'rho': 0.5}, {1: {'acked': 2}, 4: {'acked': -1}})
    """
    first, *others = rows.values()
    alike = {
        name: value
        for name, value in first.items()
        if all(
            name in row and type(row[name]) is type(value) and row[name] == value for row in others
        )
    }
    left = {c: {n: v for n, v in row.items() if n not in alike} for c, row in rows.items()}
    return alike, left
