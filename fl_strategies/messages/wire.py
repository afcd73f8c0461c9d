"""Decoding received messages without trust."""

from __future__ import annotations

import functools
import io
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_strategies.core.layout import Layout, negative_variance
from fl_strategies.core.reasons import NOT_FINITE
from fl_strategies.core.records import BadReply, Reply, Upload
from fl_strategies.core.vectors import Pieces, finite

MAX_SAMPLES = 10**9
"""The most samples of one client."""
MAX_HEADER = 4096
"""The most bytes of a NumPy array header (a usual one has 128)."""
MAX_METRICS = 1000
"""The most names in a reply's MetricRecords, and in its ConfigRecords."""
MAX_NUMBERS = 10_000
"""The most numbers in a reply, including numbers in lists."""
MAX_NAME, MAX_TEXT = 200, 1000
"""The most characters of a name, and of a text."""
MAX_LISTING = 100
"""The most characters for each array of the model in a text about all arrays."""
LISTINGS = ("checksums", "layout")
"""Texts about all arrays."""
FEW = 5
"""How many of many names an error shows."""


class Content(NamedTuple):
    """What one client sent, in its own message (its ``RecordDict``) or in its host's."""

    metric_records: Mapping[str, Mapping[str, Any]]
    config_records: Mapping[str, Mapping[str, Any]]
    array_records: Mapping[str, Mapping[str, Any]]
    fold: Any = None
    """The mean that its host sent instead of uploads (``folding.Fold``), if it did."""

    @classmethod
    def of(cls, records: RecordDict) -> Content:
        """Return what a client's own message holds."""
        kinds: Any = MetricRecord, ConfigRecord, ArrayRecord
        return cls(*({n: r for n, r in records.items() if isinstance(r, kind)} for kind in kinds))


class Failed(BadReply):
    """A client's error instead of a reply."""


def decode(array: Array) -> npt.NDArray[Any]:
    """Return the array in ``array.data`` as a read-only view of those bytes.

    The bytes' claims never decide how much memory is allocated. Raises :class:`BadReply` unless the
    bytes are one plain NumPy array (no pickle) of exactly the size that their header states.
    """
    try:
        width = {b"\x01\x00": 2, b"\x02\x00": 4}[array.data[6:8]]  # by the format's version
        start = 8 + width + int.from_bytes(array.data[8 : 8 + width], "little")
        shape, fortran_order, dtype = _header(array.data[:start])
        size = math.prod(shape)
        fits = size * dtype.itemsize == len(array.data) - start
        if dtype.hasobject or min(shape, default=0) < 0 or not fits:
            raise ValueError(f"{len(array.data)} bytes do not hold an array {dtype} {shape}")
        flat: npt.NDArray[Any] = np.frombuffer(array.data, dtype, size, offset=start)
        return flat.reshape(shape, order="F" if fortran_order else "C")
    except Exception as error:
        raise BadReply(f"not a NumPy array ({error})") from None


@functools.lru_cache(maxsize=256)
def _header(start: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, Fortran order and type from the bytes before the values.

    Results are cached: every round has the same few headers, and NumPy parses each as Python.
    """
    file = io.BytesIO(start)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[np.lib.format.read_magic(file)]
    return read(file, max_header_size=MAX_HEADER)


def decoded(
    record: Mapping[str, Array | npt.NDArray[Any]],
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of ``record``; those of a hosted client are decoded already."""
    arrays = {}
    for name, sent in record.items():
        try:
            arrays[name] = sent if isinstance(sent, np.ndarray) else decode(sent)
        except BadReply as error:
            raise BadReply(f"array {name!r}: {error}") from None
    return arrays


def decode_model(
    record: Mapping[str, Array | npt.NDArray[Any]], layout: Layout
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of ``record``; raise :class:`BadReply` unless they fit ``layout``."""
    if record.keys() != layout.shapes.keys():
        missing = sorted(layout.shapes.keys() - record.keys())[:FEW]
        extra = sorted(record.keys() - layout.shapes.keys())[:FEW]
        raise BadReply(f"array names differ: missing {missing}, unexpected {extra}")
    arrays = decoded({name: record[name] for name in layout.shapes})
    for name, shape in layout.shapes.items():
        array = arrays[name]
        if array.shape != shape:
            raise BadReply(f"array {name!r} has shape {array.shape}, the model's has {shape}")
        if array.dtype != layout.dtypes[name]:
            raise BadReply(
                f"array {name!r} has type {array.dtype.str}, the model's has"
                f" {layout.dtypes[name].str}"
            )
    if not finite(arrays.values()):
        name, array = next((n, a.ravel()) for n, a in arrays.items() if not finite([a]))
        where = int(np.flatnonzero(~np.isfinite(array))[0])
        raise BadReply(f"array {name!r} {NOT_FINITE}: element {where} is {array[where]}")
    if wrong := negative_variance(arrays, layout.buffers):
        raise BadReply(wrong)
    for copy, first in layout.copies.items():
        if not np.array_equal(arrays[copy], arrays[first]):
            raise BadReply(f"arrays {first!r} and {copy!r} are one tied parameter, and they differ")
    return arrays


def upload_of(reply: Reply, layout: Layout, extra_vectors: Sequence[str]) -> Upload:
    """Return ``reply`` as an upload for the rule, its arrays in place."""
    names, arrays = layout.trainable, reply.arrays
    return Upload(
        reply.client,
        Pieces([arrays[name] for name in names]),
        reply.num_examples,
        reply.numbers,
        {v: Pieces([arrays[f"{v}/{name}"] for name in names]) for v in extra_vectors},
        {name: arrays[name] for name in layout.buffers},
        round=reply.round,
    )


def checksum(array: npt.NDArray[Any]) -> str:
    """Return the CRC-32 of the array's bytes, which shows whether the array was changed."""
    return f"{zlib.crc32(np.ascontiguousarray(array).data):08x}"


def check_sizes(
    numbers: Iterable[Mapping[str, Any]], words: Iterable[Mapping[str, Any]], arrays: int
) -> None:
    """Raise :class:`BadReply` for more metrics, longer names or longer texts than a client needs.

    ``arrays`` is the number of the model's arrays, which limits the length of :data:`LISTINGS`.
    """
    listing = MAX_TEXT + MAX_LISTING * arrays
    for kind, records in (("metrics", list(numbers)), ("texts", list(words))):
        if (count := sum(len(record) for record in records)) > MAX_METRICS:
            raise BadReply(f"{count} {kind}, at most {MAX_METRICS} are taken")
        entries = 0
        for name, value in (pair for record in records for pair in record.items()):
            if len(name) > MAX_NAME:
                raise BadReply(
                    f"the name {name[:20]!r}... has {len(name)} characters, at most {MAX_NAME} are"
                    " taken"
                )
            parts = value if isinstance(value, list) else [value]
            entries += len(parts)
            most = listing if name in LISTINGS else MAX_TEXT
            size = sum(len(part) for part in parts if isinstance(part, str | bytes))
            if size > most:
                raise BadReply(f"the text {name!r} has {size} characters, at most {most} are taken")
        if entries > MAX_NUMBERS:
            raise BadReply(f"{entries} entries of {kind}, at most {MAX_NUMBERS} are taken")


class Expected(NamedTuple):
    """What a reply's numbers and texts must be, for a model of so many ``arrays``.

    ``bounds`` are those of the numbers that it must carry. ``admit`` raises :class:`BadReply` for
    the texts of a client that is not admitted.
    """

    arrays: int
    weighted_by: str
    max_samples: int | None
    bounds: Mapping[str, tuple[float, float]]
    admit: Callable[[int, Mapping[str, str]], None] = lambda client, words: None


def open_reply(client: int, server_round: int, content: Content, expected: Expected) -> Reply:
    """Return a reply's numbers and texts; its arrays are decoded later.

    A metric that is NaN, as an AUC of one class is, counts as not reported; a loss does not. Raises
    :class:`BadReply` for what is not as ``expected``; texts come before numbers.
    """
    records, texts = [*content.metric_records.values()], [*content.config_records.values()]
    check_sizes(records, texts, expected.arrays)
    words: dict[str, str] = {}
    for record in texts:
        words |= {n: w for n, w in record.items() if isinstance(w, str) and n not in words}
    expected.admit(client, words)
    if len(records) != 1:
        raise BadReply(f"{len(records)} MetricRecords, expected one")
    bounds = {expected.weighted_by: (1, MAX_SAMPLES), **expected.bounds}
    numbers = {
        name: value
        for name, value in records[0].items()
        if name in bounds or "loss" in name or value == value  # NaN alone is not itself
    }
    check_scalars(numbers, bounds)
    samples: Any = numbers.pop(expected.weighted_by)
    if (most := expected.max_samples) is not None and samples > most:
        raise BadReply(f"it reports {samples} samples, at most {most} (max_samples) are taken")
    return Reply(client, server_round, samples, numbers, words, content=content)


def check_scalars(scalars: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]]) -> None:
    """Raise :class:`BadReply` unless all numbers are finite and those in ``bounds`` within them."""
    for name, value in scalars.items():
        values = value if isinstance(value, list) else [value]
        if not all(math.isfinite(number) for number in values):
            raise BadReply(f"metric {name!r} {NOT_FINITE}: {value}")
    for name, (low, high) in bounds.items():
        value = scalars.get(name)
        if value is None:
            raise BadReply(f"metric {name!r} is missing")
        if isinstance(value, list):
            raise BadReply(f"metric {name!r} must be one number, got {value}")
        if not low <= value <= high:
            raise BadReply(f"metric {name!r} must be in [{low:g}, {high:g}], got {value}")
