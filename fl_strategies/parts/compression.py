"""Compression: clients compress what changed, send that, and remember what it leaves out.

    p = change + e        sent = C(p)        e <- p - C(p)                      (1)

change  w - theta of an uploaded model w [d], with theta as received; an upload that is a change is
        itself, and so is each vector that travels in addition to it
e       error feedback [d], at first 0: the client keeps it as state, in the version of the round
        that the server acknowledged last, so that sum(sent and used) + e = sum(change)
C       the codec: top-k and bfloat16 are contractions, ||C(p) - p||^2 <= delta ||p||^2 with
        delta < 1, and have feedback; QSGD is unbiased, E C(p) = p, can expand, and has none (e = 0)

The server uses theta + C(p), or C(p). Buffers travel as they are. Clients that compress nothing,
such as third-party ones, are taken at their word; the log names them once.

Downloads: with ``download=BFloat16()`` clients receive theta rounded, and the server keeps theta:

    received = C(theta),        theta <- theta + (rule(received, uploads) - received)       (2)

for rules whose uploads are the received model as training moved it (``moves_received``), so that
steps below the rounding add up. Other rules have theta itself, and the model that clients received
wherever they measure from it.

    TopK(share)   the k = ceil(share d) largest numbers                 k (4 + b) bytes
    BFloat16()    each number as the nearest bfloat16                   2 d bytes
    QSGD(levels)  see ``fl_strategies.parts.qsgd``

b  bytes of a number of the model

Reference: Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019, Algorithm 2.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fl_strategies.core.bfloat16 import halves, numbers_of
from fl_strategies.core.hyperparameters import number
from fl_strategies.parts.part import Need, Part

Code = npt.NDArray[np.uint8]
Numbers = npt.NDArray[Any]
SAME_KIND = Need(
    lambda rule: rule.compresses,
    "a new client of {rule} uploads its whole model, and later its changes, which one memory of"
    " errors does not fit",
    "FedADMM or FedDyn, whose uploads are all changes",
)


EXACT = Need(
    lambda rule: not rule.needs_exact_model,
    "clients of {rule} add up how far the model that they get is from the mean of what they sent,"
    " and with it the roundings",
    "`compression`",
)


class Compression(Part):
    """Base of the codecs."""

    stage = "compression"
    needs: ClassVar[tuple[Need, ...]] = (SAME_KIND,)
    feedback: ClassVar[bool] = True
    """Whether the client keeps what the compressed update leaves out."""

    def encode(self, p: Numbers, rng: np.random.Generator) -> Code:
        """Return the code of ``p`` [d]."""
        raise NotImplementedError

    def decode(self, code: Code, size: int, dtype: np.dtype[Any]) -> Numbers:
        """Return C(p) [size]; raise ``ValueError`` for a code that :meth:`encode` cannot make."""
        raise NotImplementedError


class TopK(Compression):
    """The largest numbers alone; see the module's docstring."""

    name = "topk"
    about = "sends the largest numbers of a change, and keeps the rest for later"
    paper = "Karimireddy et al., ICML 2019"
    share: float = number(default=0.01, about="Share of the numbers sent.", above=0.0, high=1.0)

    def encode(self, p: Numbers, rng: np.random.Generator) -> Code:
        k = self.count(p.size)
        largest = np.argpartition(-np.abs(p), k - 1)[:k] if k < p.size else np.arange(k)
        places = np.sort(largest).astype(np.uint32)
        return np.concatenate([places.view(np.uint8), p[places].view(np.uint8)])

    def decode(self, code: Code, size: int, dtype: np.dtype[Any]) -> Numbers:
        k = self.count(size)
        check_size(code, k * (4 + dtype.itemsize))
        places, p = code[: 4 * k].view(np.uint32), np.zeros(size, dtype)
        if k and (int(places[-1]) >= size or not (places[1:] > places[:-1]).all()):
            raise ValueError(f"its places do not ascend below {size}")
        p[places] = code[4 * k :].view(dtype)
        return p

    def count(self, size: int) -> int:
        """Return k."""
        return min(size, math.ceil(self.share * size - 1e-9))


class BFloat16(Compression):
    """The nearest bfloat16 of each number; see the module's docstring."""

    name = "bfloat16"
    about = "sends two bytes a number, and keeps the rounding errors for later"
    paper = "Karimireddy et al., ICML 2019"
    needs_elsewhere = (EXACT,)

    def encode(self, p: Numbers, rng: np.random.Generator) -> Code:
        return halves(p).view(np.uint8)

    def decode(self, code: Code, size: int, dtype: np.dtype[Any]) -> Numbers:
        check_size(code, 2 * size)
        return numbers_of(code.view(np.uint16), dtype)


def check_size(code: Code, expected: int) -> None:
    """Raise ``ValueError`` unless the code has ``expected`` bytes."""
    if code.size != expected:
        raise ValueError(
            f"it has {code.size} bytes, and a compressed update of this model {expected}"
        )
