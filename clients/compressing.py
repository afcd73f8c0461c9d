"""A client's compressed uploads, and what these leave out (``fl_strategies.parts.compression``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clients.learning.border import Border
from clients.request import Config
from fl_strategies.messages.codes import CODEC, OF_CHANGES
from fl_strategies.parts import parse_part
from fl_strategies.parts.compression import Compression

Arrays = list[npt.NDArray[Any]]


def codec_of(config: Config) -> Compression | None:
    """Return the codec that a request asks for, if any."""
    asked = str(config.get(CODEC, "")).removeprefix(OF_CHANGES)
    return _parsed(asked) if asked else None


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> Compression:
    codec = parse_part(text, Compression.stage)
    assert isinstance(codec, Compression)
    return codec


def compressed(
    codec: Compression,
    model: Border,
    changes: Sequence[Tensor],
    memory: npt.NDArray[Any] | None,
    rng: np.random.Generator,
) -> tuple[Arrays, npt.NDArray[Any] | None]:
    """Return the arrays to send in place of ``Border.all_arrays``, and the next memory.

    ``changes`` are vectors [d], ``memory`` [len(changes), d] what was left out before (None: 0).
    Of the trained arrays of each vector the first one is the code, and the others are empty.
    """
    trained, first = model.layout.trainable, model.layout.trainable[0]
    coded = dict.fromkeys([*trained, *model.layout.copies], np.zeros(0, np.uint8))
    rest = iter(model.all_arrays(changes[0], changes[1:]))
    arrays: Arrays = []
    left_out = []
    for number in range(len(changes)):
        names = trained if number else model.names
        vector = dict(zip(names, rest, strict=False))
        p = np.concatenate([vector[name].ravel() for name in trained])
        if memory is not None:
            p = p + memory[number]
        code = codec.encode(p, rng)
        left_out.append(p - codec.decode(code, p.size, p.dtype))
        vector |= coded | {first: code}
        arrays += [vector[name] for name in names]
    return arrays, np.stack(left_out) if codec.feedback else None
