"""A host's weighted mean instead of its clients' uploads.

If the next global model depends on a round's uploads only through sum_i p_i v_i, where p_i is the
``Algorithm.weight`` of client i, a host may send

    v = sum_i p_i v_i / sum_i p_i    over the clients i of one message

in float64 (the plain mean if all p_i are 0), and buffers merged as the server merges them. The
server replaces each v_i by v: sum_i p_i v is the host's sum. Clients' numbers and texts are sent
client by client, so that weights, metrics and acknowledgements are exact. If the rule also needs
``||v_i - theta||^2`` (``Algorithm.folds_distances``), the host sends it with the client's numbers.

A request for a mean carries :class:`Terms`, by which the host checks each upload as the server
would. By rounding, sums then depend on how clients are spread over hosts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_strategies.core.layout import Arrays, BufferMean, Layout
from fl_strategies.core.records import BadReply
from fl_strategies.messages.bounds import NormBound
from fl_strategies.messages.identity import Identity
from fl_strategies.messages.wire import Content, Expected, decode_model, open_reply, upload_of

ROUNDING = 1e-9
"""The share of the bound by which rounding may put a mean of vectors beyond the bound."""
LOST = "its acknowledged state is lost"
DISTANCE = "folded-distance2"
"""The number of a folded client that is ||v_i - theta||^2."""


@dataclass(frozen=True)
class Terms:
    """The weights by which a host folds, and the checks that each upload must pass first.

    ``hyperparameters`` are those of the algorithm's weight (``Algorithm.weight``). ``nonces`` are,
    by client, those of the states that the server requires.
    ``distances`` says whether the host sends ``DISTANCE``.
    """

    hyperparameters: Mapping[str, Any]
    weighted_by: str
    strategy: str
    algorithm: str
    trust: str
    buffers: Sequence[str] = ()
    ties: Sequence[Sequence[str]] = ()
    frozen: Mapping[str, str] | None = None
    extra_vectors: Sequence[str] = ()
    bounds: Mapping[str, Sequence[float]] | None = None
    clipping_norm: float | None = None
    max_samples: int | None = None
    accumulates_changes: bool = False
    uploads_changes: bool = False
    nonces: Mapping[str, str] | None = None
    distances: bool = False

    def to_text(self) -> str:
        """Return the terms as they travel."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Terms:
        """Return the terms that a request carries."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Fold:
    """A host's mean as it was received: the clients whose uploads it holds, and its arrays."""

    clients: tuple[int, ...]
    arrays: Mapping[str, npt.NDArray[Any]]


class Folder:
    """Checks uploads one by one, and holds only their sum.

    ``received`` are the arrays of the request: the model and the extra vectors. ``weight`` is that
    of an upload, in the file of the algorithm that ``terms`` name.
    """

    def __init__(self, terms: Terms, received: Arrays, weight: Callable[..., float]) -> None:
        self.terms, self.received, self.weight = terms, received, weight
        extra = tuple(f"{name}/" for name in terms.extra_vectors)
        model = {name: array for name, array in received.items() if not name.startswith(extra)}
        self.layout = Layout.of(model, terms.buffers, terms.ties, dict(terms.frozen or {}))
        self.wire = self.layout.with_vectors(terms.extra_vectors)
        self.expected = Expected(
            len(self.wire.shapes),
            terms.weighted_by,
            terms.max_samples,
            {name: (low, high) for name, (low, high) in (terms.bounds or {}).items()},
            Identity(terms.strategy, terms.algorithm, terms.trust, self.layout).admit,
        )
        self.theta = self.layout.pack(model) if terms.distances else 0.0
        self.bound: NormBound | None = None
        if terms.clipping_norm is not None:
            theta = 0.0 if terms.uploads_changes else self.layout.pack(model)
            self.bound = NormBound(
                terms.clipping_norm, lambda upload: theta, terms.accumulates_changes, model
            )
        self._sums: list[npt.NDArray[Any]] = []
        self._plain: list[npt.NDArray[Any]] = []
        self._weight, self._count = 0.0, 0
        self._buffers = BufferMean()

    def take(
        self, client: int, numbers: Mapping[str, Any], words: Mapping[str, Any], arrays: Arrays
    ) -> dict[str, float]:
        """Add a client's upload, and return the numbers that the host sends with the client's own.

        Raises :class:`BadReply` for an upload that the server would reject.
        """
        content = Content({"metrics": numbers}, {"config": words}, {})
        reply = open_reply(client, 0, content, self.expected)
        nonce = (self.terms.nonces or {}).get(str(client), "")
        if nonce and reply.words.get("state-nonce", nonce) != nonce:
            raise BadReply(LOST)
        reply = replace(reply, arrays=decode_model(arrays, self.wire))
        upload = upload_of(reply, self.layout, self.terms.extra_vectors)
        if self.bound is not None:
            upload = self.bound.check(upload)
        weight = self.weight(upload, **self.terms.hyperparameters)
        extra = (upload.extra_vectors[name] for name in self.terms.extra_vectors)
        vectors = [np.asarray(vector, np.float64) for vector in (upload.vector, *extra)]
        if self._weight == 0.0:
            self._plain = added(self._plain, vectors, 1.0)
        self._sums = added(self._sums, vectors, weight)
        self._weight, self._count = self._weight + weight, self._count + 1
        self._buffers.add(upload.buffers, upload.num_examples)
        if not self.terms.distances:
            return {}
        moved = vectors[0] - self.theta
        return {DISTANCE: float(moved @ moved)}

    def mean(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the mean by name; trained arrays are in float64."""
        if self._weight > 0.0:
            vector = np.concatenate(self._sums) / self._weight
        else:
            vector = np.concatenate(self._plain) / self._count
        exact = replace(self.wire, dtypes=dict.fromkeys(self.wire.shapes, np.dtype(np.float64)))
        return exact.unpack(vector, self._buffers.value())


def added(
    sums: list[npt.NDArray[Any]], vectors: Sequence[npt.NDArray[Any]], weight: float
) -> list[npt.NDArray[Any]]:
    """Return ``sums`` plus ``weight`` times the vectors; changes ``sums`` unless it is empty."""
    if not sums:
        return [weight * vector for vector in vectors]
    for total, vector in zip(sums, vectors, strict=True):
        total += weight * vector
    return sums


def decode_fold(fold: Fold, wire: Layout) -> dict[str, npt.NDArray[Any]]:
    """Return a mean's arrays; raise :class:`BadReply` unless they fit ``wire``, in float64."""
    exact = {
        name: dtype if name in wire.buffers else np.dtype(np.float64)
        for name, dtype in wire.dtypes.items()
    }
    return decode_model(fold.arrays, replace(wire, dtypes=exact))
