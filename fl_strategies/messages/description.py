"""What a client says of its model: its arrays, and which of them are trained, tied, kept at home.

Before the first round the server asks a few clients to describe their models
(``server/settling.py``). A description is a text, because a legacy client's properties hold no
lists; it is read without trust.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fl_strategies.core.records import NOTHING, BadReply
from fl_strategies.messages.wire import MAX_NAME

DESCRIBE = "describe"
"""The action of the query, and the key of its config that asks for a description."""
QUERY = f"query.{DESCRIBE}"
"""The type of the message."""
DESCRIPTION = "description"
"""The key of the answer."""
OWN_FIRST = "own-first"
"""The key of a request with the digests that each client's own arrays must begin with."""
WHOSE = "client-id"
"""The key of the query's config that says which client of a host is meant."""
MAX_DESCRIPTION = 1 << 22
"""The most characters of a description."""


class Description(NamedTuple):
    """A model's arrays by name, in its order, and their roles.

    ``buffers`` are not trained and travel; each group of ``ties`` is one parameter. Those that do
    not travel: ``frozen`` ones, which nobody trains, with a digest of each, and ``local`` ones,
    which are each client's own.
    """

    arrays: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    frozen: Mapping[str, str] = NOTHING
    local: tuple[str, ...] = ()
    kinds: Mapping[str, str] = NOTHING
    """The :func:`type_and_shape` of each array that travels."""

    @property
    def shared(self) -> list[str]:
        """The arrays that travel."""
        stay = {*self.frozen, *self.local}
        return [name for name in self.arrays if name not in stay]

    def to_text(self) -> str:
        """Return the description as it travels."""
        maps = {"frozen": dict(self.frozen), "kinds": dict(self.kinds)}
        return json.dumps({**self._asdict(), **maps}, separators=(",", ":"))

    @classmethod
    def of(cls, text: object) -> Description:
        """Return the description that ``text`` is; raise :class:`BadReply` if it is none."""
        if not isinstance(text, str) or len(text) > MAX_DESCRIPTION:
            length = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise BadReply(f"no text of at most {MAX_DESCRIPTION} characters: {length}")
        try:
            fields = json.loads(text)
            frozen, kinds = (dict(fields[name]) for name in ("frozen", "kinds"))
            parts = [_names(fields[name]) for name in ("arrays", "buffers", "local")]
            arrays, buffers, local = parts
            ties = tuple(_names(group) for group in fields["ties"])
            roles = [*buffers, *local, *_names([*frozen])]
            _names([*frozen.values(), *kinds.values()], distinct=False)
            if len({*roles}) < len(roles):
                raise ValueError("two roles of one array")
            _names([name for group in ties for name in group])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BadReply(f"it cannot be read: {type(error).__name__}: {error}") from None
        return cls(arrays, buffers, ties, frozen, local, kinds)


def _names(values: Any, *, distinct: bool = True) -> tuple[str, ...]:
    """Return a list of names; raise ``ValueError`` for anything else."""
    if not isinstance(values, list) or not all(
        isinstance(name, str) and len(name) <= MAX_NAME for name in values
    ):
        raise ValueError(f"no list of names: {values!r:.100}")
    if distinct and len({*values}) < len(values):
        raise ValueError(f"a name twice: {values!r:.100}")
    return tuple(values)


def type_and_shape(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """Return an array's type and shape as a text, "float32 (3, 4)"."""
    return f"{dtype} {shape}"


def digest(array: npt.NDArray[Any]) -> str:
    """Return a digest of the array's type, shape and values."""
    sha = hashlib.sha256(repr((array.dtype.str, array.shape)).encode())
    sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()[:8]
