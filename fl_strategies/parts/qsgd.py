"""QSGD: random rounding of a change to a few levels, right in the mean.

    C(p)_j = sign(p_j) ||p|| l_j / levels             b + ceil(d q / 8) bytes   (1)

l_j  levels |p_j| / ||p||, rounded up with the probability of its fraction, else down
b    bytes of a number of the model
q    bits of a number, ceil(log2(2 levels + 1))

C is unbiased, E C(p) = p, and can expand: so it has no error feedback
(``fl_strategies.parts.compression``). What it leaves out is never sent. So rules whose clients add
each change to their states, as the server adds C of it to its own, are refused: their sums would
drift apart.

Reference: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient
Quantization and Encoding", NeurIPS 2017, eq. 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fl_strategies.core.hyperparameters import number
from fl_strategies.parts.compression import SAME_KIND, Code, Compression, Numbers, check_size
from fl_strategies.parts.part import Need

SENT_WHOLE = Need(
    lambda rule: not rule.accumulates_changes,
    "clients of {rule} add each change to what they keep, and what this codec leaves out is never"
    " sent: client and server would drift apart",
    "TopK or BFloat16, which send it later; or FedAvg",
)


class QSGD(Compression):
    """Random rounding to a few levels; see the module's docstring."""

    name = "qsgd"
    about = "sends a few bits a number, right in the mean"
    paper = "Alistarh et al., NeurIPS 2017"
    feedback = False
    needs = (SAME_KIND, SENT_WHOLE)
    levels: int = number(default=127, about="Of (1).", low=1, high=2**15 - 1, integer=True)

    def encode(self, p: Numbers, rng: np.random.Generator) -> Code:
        norm = np.linalg.norm(p.astype(np.float64)).astype(p.dtype)
        scaled = self.levels * (p / norm) if norm else p
        level = np.floor(scaled + rng.random(p.size)) + self.levels
        code = _packed(np.clip(level, 0, 2 * self.levels), self.bits)
        return np.concatenate([norm.reshape(1).view(np.uint8), code])

    def decode(self, code: Code, size: int, dtype: np.dtype[Any]) -> Numbers:
        check_size(code, dtype.itemsize + -(-size * self.bits // 8))
        norm = code[: dtype.itemsize].view(dtype)[0]
        level = _unpacked(code[dtype.itemsize :], size, self.bits)
        if level.max(initial=0) > 2 * self.levels or not 0 <= norm < math.inf:
            raise ValueError(f"it has a level above {self.levels}, or the norm {norm}")
        p: Numbers = norm * ((level - self.levels) / self.levels)
        return p.astype(dtype)

    @property
    def bits(self) -> int:
        """Return q."""
        return math.ceil(math.log2(2 * self.levels + 1))


def _packed(level: Numbers, bits: int) -> Code:
    """Return whole numbers below 2^bits, ``bits`` each; what fills bytes needs no packing."""
    width, kind = _bytes_for(bits)
    code = level.astype(kind).view(np.uint8)
    if bits == width:
        return code
    return np.packbits(np.unpackbits(code).reshape(-1, width)[:, width - bits :])


def _unpacked(code: Code, size: int, bits: int) -> Numbers:
    """Return the ``size`` numbers that were packed."""
    width, kind = _bytes_for(bits)
    if bits < width:
        padded = np.zeros((size, width), np.uint8)
        padded[:, width - bits :] = np.unpackbits(code, count=size * bits).reshape(size, bits)
        code = np.packbits(padded)
    return code.view(kind).astype(np.int32)


def _bytes_for(bits: int) -> tuple[int, str]:
    """Return how many bits the bytes have that hold so many, and their type."""
    return (8, "u1") if bits <= 8 else (16, ">u2")
