"""One message about several clients of a node: how it is packed, and how it is read without trust.

A *host* is a node with several clients. A request to it holds

- the model and the extra vectors, once (one ArrayRecord), and the config that all share;
- ``hosted``: a ConfigRecord that gives, for each further record, the ids of its clients;
- ``per-client-0``, ``per-client-1`` ...: tables (:mod:`.tables`) of settings that differ by client;
- ``catch-up``: the catch-up vectors, each once; a client's row has the place of its vector.

The reply also holds ``hosted``, which lists the clients that failed and their reasons; the arrays
stacked ``[k, ...]``, with a slice for each client listed under ``arrays``; and tables of what each
client reports, numbers in ``metrics-0`` ... and texts in ``config-0`` .... If a request has
``fold`` in ``hosted`` (:mod:`.folding`), its reply has one mean instead of the
stacks, lists the mean's clients under ``folded``, and lists under ``refused`` the failed clients
whose uploads the host rejected. :data:`MOST_CLIENTS` and :data:`MOST_BYTES` limit a message, so
that a host may get several in a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_strategies.core.records import CATCH_UP, BadReply
from fl_strategies.messages.folding import Fold
from fl_strategies.messages.tables import in_common, rows_of, tabulate
from fl_strategies.messages.wire import Content, Failed, decode

HOSTED = "hosted"
"""The record that marks a message about several clients."""
PER_CLIENT, ARRAYS, METRICS, CONFIG = "per-client", "arrays", "metrics", "config"
FAILED, REASONS, SECONDS = "failed", "reasons", "seconds"
FOLD, FOLDED, REFUSED = "fold", "folded", "refused"
MOST_CLIENTS = 1000
"""The most clients in one message."""
MOST_BYTES = 1 << 28
"""The most bytes of arrays in one reply; a single client's reply may be larger."""


def is_hosted(content: RecordDict) -> bool:
    """Return whether a message is about several clients."""
    return isinstance(content.get(HOSTED), ConfigRecord)


def per_message(size: int) -> int:
    """Return the number of clients in one message whose reply has ``size`` bytes per client."""
    return min(MOST_CLIENTS, max(1, MOST_BYTES // max(size, 1)))


# ---- requests ---------------------------------------------------------------------------------


def pack_request(
    keys: tuple[str, str],
    arrays: ArrayRecord,
    configs: Mapping[int, Mapping[str, Any]],
    fold: str = "",
) -> RecordDict:
    """Return the request with ``arrays`` to the clients of ``configs``.

    ``keys`` are the names of the records of the model and of the common config; ``fold`` is how
    uploads are folded (``folding.Terms``), or "" if they are not.
    """
    common, rows = in_common(configs)
    catch_ups = list(dict.fromkeys(row[CATCH_UP] for row in rows.values() if CATCH_UP in row))
    place = {data: number for number, data in enumerate(catch_ups)}
    for row in rows.values():
        if CATCH_UP in row:
            row[CATCH_UP] = place[row[CATCH_UP]]
    content: dict[str, Any] = {keys[0]: arrays, keys[1]: ConfigRecord(common)}
    whose: dict[str, Any] = {FOLD: fold} if fold else {}
    if catch_ups:
        content[CATCH_UP] = ConfigRecord({CATCH_UP: catch_ups})
    for number, table in enumerate(tabulate(rows)):
        whose[f"{PER_CLIENT}-{number}"] = table.clients
        content[f"{PER_CLIENT}-{number}"] = ConfigRecord(table.columns)
    return RecordDict({**content, HOSTED: ConfigRecord(whose)})


def unpack_request(content: RecordDict) -> tuple[ArrayRecord, dict[int, dict[str, Any]]]:
    """Return the arrays and, by client, the config; raise ``ValueError`` for a broken request."""
    records = dict(content.config_records)
    whose = _whose(records.pop(HOSTED))
    catch_ups: Any = records.pop(CATCH_UP)[CATCH_UP] if CATCH_UP in records else []
    rows = rows_of((ids, records.pop(name, {})) for name, ids in whose.items())
    if len(content.array_records) != 1 or len(records) > 1:
        raise ValueError(
            "a request holds one ArrayRecord and at most one common ConfigRecord, got"
            f" {len(content.array_records)} and {len(records)}"
        )
    common = dict(next(iter(records.values()), {}))
    for row in rows.values():
        if CATCH_UP in row:
            row[CATCH_UP] = catch_ups[row[CATCH_UP]]
    return next(iter(content.array_records.values())), {c: common | row for c, row in rows.items()}


def asked_in(content: RecordDict) -> list[int]:
    """Return the ids of the clients that a request is about."""
    tables = _whose(content.config_records[HOSTED]).values()
    return list(dict.fromkeys(client for ids in tables for client in ids))


def _whose(hosted: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the ids of the clients of each table of a request."""
    return {name: _ids(name, ids) for name, ids in hosted.items() if name != FOLD}


def fold_of(content: RecordDict) -> str:
    """Return how a request wants uploads folded, or ""."""
    return str(content.config_records[HOSTED].get(FOLD, ""))


# ---- replies ----------------------------------------------------------------------------------


class Report(NamedTuple):
    """The numbers and texts that one hosted client reports."""

    numbers: Mapping[str, Any]
    words: Mapping[str, Any]


def pack_reply(
    reports: Mapping[int, Report],
    failed: Mapping[int, str],
    arrays: ArrayRecord | None = None,
    seconds: float = 0.0,
    *,
    folded: bool = False,
    refused: Sequence[int] = (),
) -> RecordDict:
    """Return the reply of a host that was busy for ``seconds``.

    ``arrays`` are stacked in the order of ``reports``, or ``folded``; ``failed`` are reasons by
    client, ``refused`` those of these clients whose uploads the host rejected.
    """
    content: dict[str, Any] = {}
    whose: dict[str, Any] = {SECONDS: seconds}
    if refused:
        whose[REFUSED] = [*refused]
    if failed:
        whose |= {FAILED: [*failed], REASONS: [*failed.values()]}
    for kind, record in ((METRICS, MetricRecord), (CONFIG, ConfigRecord)):
        rows = {
            client: row.numbers if kind == METRICS else row.words for client, row in reports.items()
        }
        for number, table in enumerate(tabulate({c: row for c, row in rows.items() if row})):
            whose[f"{kind}-{number}"] = table.clients
            content[f"{kind}-{number}"] = record(table.columns)
    if arrays is not None and reports:
        whose[FOLDED if folded else ARRAYS] = [*reports]
        content[ARRAYS] = arrays
    return RecordDict({**content, HOSTED: ConfigRecord(whose)})


def unpack_reply(content: RecordDict, *, folds: bool = False) -> dict[int, Content | BadReply]:
    """Return by client what it sent, or why it failed.

    ``folds`` says that the request asks for one mean of the uploads.

    Raises :class:`BadReply`, with one reason, for an inconsistent reply: ids that are invalid or
    occur twice, lists and stacks whose length is not the number of their clients. The content of a
    client's part is not checked.
    """
    try:
        whose = dict(content.config_records[HOSTED])
        named = {name: _ids(name, whose[name]) for name in whose if name not in (REASONS, SECONDS)}
        failures, refused = named.pop(FAILED, []), {*named.pop(REFUSED, [])}
        reasons = whose.get(REASONS, [])
        if not isinstance(reasons, list) or len(reasons) != len(failures):
            raise ValueError(
                f"{len(failures)} clients failed, and the reasons are {reasons!r:.100}"
            )
        stacked, folded = named.pop(ARRAYS, []), named.pop(FOLDED, []) if folds else []
        numbers = rows_of(_tables(METRICS, named, content.metric_records))
        words = rows_of(_tables(CONFIG, named, content.config_records))
        if named:
            raise ValueError(f"it names {sorted(named)[:5]}, which it does not have")
        slices = {} if folded else _slices(stacked, content.array_records)
        fold = _fold(folded, content.array_records) if folded else None
        if folds and (stacked or ({*numbers} - {*folded})):
            raise ValueError("it has uploads outside its mean")
        twice = {*failures} & {*numbers, *words, *slices}
        if twice or len({*failures}) < len(failures):
            raise ValueError(f"clients {sorted(twice or failures)[:5]} are there twice")
    except (ValueError, KeyError) as error:
        raise BadReply(f"its host's reply is inconsistent: {error}") from None
    contents: dict[int, Content | BadReply] = {
        client: (BadReply if client in refused else Failed)(str(reason))
        for client, reason in zip(failures, reasons, strict=True)
    }
    for client in sorted({*numbers, *words, *slices, *folded}):
        contents[client] = Content(
            {METRICS: numbers[client]} if client in numbers else {},
            {CONFIG: words[client]} if client in words else {},
            {ARRAYS: slices[client]} if client in slices else {},
            fold if client in folded else None,
        )
    return contents


def busy_seconds(content: RecordDict) -> float:
    """Return for how long the host says that it was busy; 0 if it says nothing valid."""
    records = content.config_records
    seconds = records[HOSTED].get(SECONDS, 0.0) if HOSTED in records else 0.0
    return seconds if isinstance(seconds, float) and 0.0 <= seconds < 1e9 else 0.0


def _tables(
    kind: str, named: dict[str, list[int]], records: Mapping[str, Any]
) -> Iterable[tuple[list[int], Mapping[str, Any]]]:
    """Yield the tables of ``kind`` with their clients, and remove them from ``named``."""
    for name in [name for name in named if name.rpartition("-")[0] == kind]:
        yield named.pop(name), records[name]


def _slices(
    clients: Sequence[int], records: Mapping[str, ArrayRecord]
) -> dict[int, dict[str, npt.NDArray[Any]]]:
    """Return by client its arrays, as views of the stacked ones."""
    if not clients and not records:
        return {}
    if len({*clients}) < len(clients):
        raise ValueError("clients have their arrays twice")
    if len(records) != 1:
        raise ValueError(f"{len(records)} ArrayRecords, expected one")
    stacks = {name: decode(array) for name, array in next(iter(records.values())).items()}
    for name, stack in stacks.items():
        if not stack.ndim or len(stack) != len(clients):
            raise ValueError(f"array {name!r} has shape {stack.shape} for {len(clients)} clients")
    return {
        client: {name: np.asarray(stack[place]) for name, stack in stacks.items()}
        for place, client in enumerate(clients)
    }


def _fold(clients: Sequence[int], records: Mapping[str, ArrayRecord]) -> Fold:
    """Return the mean that replaces the uploads of ``clients``."""
    if len({*clients}) < len(clients):
        raise ValueError("clients are in the mean twice")
    if len(records) != 1:
        raise ValueError(f"{len(records)} ArrayRecords, expected one")
    arrays = {name: decode(array) for name, array in next(iter(records.values())).items()}
    return Fold(tuple(clients), arrays)


def _ids(name: str, value: Any) -> list[int]:
    """Return the ids that ``name`` lists; raise ``ValueError`` for anything else."""
    if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
        raise ValueError(f"{name!r} must list ids of clients, got {value!r:.100}")
    return value
