"""A client's uploads as codes, and what these leave out (``fl_strategies.parts.compression``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clients.learning.arrays import to_host
from clients.learning.model import FlatModel
from clients.request import Config
from fl_strategies.messages.codes import CODEC
from fl_strategies.parts import parse_part
from fl_strategies.parts.compression import Compression

Arrays = list[npt.NDArray[Any]]


def codec_of(config: Config) -> Compression | None:
    """Return the codec that a request asks for, if any."""
    return _parsed(str(config[CODEC])) if config.get(CODEC) else None


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> Compression:
    codec = parse_part(text, Compression.stage)
    assert isinstance(codec, Compression)
    return codec


def compressed(
    codec: Compression,
    model: FlatModel,
    changes: Sequence[Tensor],
    memory: npt.NDArray[Any] | None,
    rng: np.random.Generator,
) -> tuple[Arrays, npt.NDArray[Any] | None]:
    """Return the arrays to send in place of ``FlatModel.all_arrays``, and the next memory.

    ``changes`` are vectors [d], ``memory`` [len(changes), d] what was left out before (None: 0).
    Of the trained arrays of each vector the first one is the code, and the others are empty.
    """
    empty = np.zeros(0, np.uint8)
    arrays: Arrays = []
    left_out = []
    for number, change in enumerate(changes):
        pieces = to_host(model.views(change))
        p = np.concatenate([piece.ravel() for piece in pieces])
        if memory is not None:
            p = p + memory[number]
        code = codec.encode(p, rng)
        left_out.append(p - codec.decode(code, p.size, p.dtype))
        codes = dict.fromkeys([*model.layout.trainable, *model.layout.copies], empty)
        codes[model.layout.trainable[0]] = code
        if number == 0:
            others = dict(zip(model.names, model.arrays(change), strict=True))
            arrays += [codes.get(name, others[name]) for name in model.names]
        else:
            arrays += [codes[name] for name in model.layout.trainable]
    return arrays, np.stack(left_out) if codec.feedback else None
