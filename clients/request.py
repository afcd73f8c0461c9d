"""A request as a NumPyClient gets it: arrays, and a config of numbers and texts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fl_strategies import STRATEGIES
from fl_strategies.core.layout import Layout
from fl_strategies.core.log import log
from fl_strategies.core.randomness import stream
from fl_strategies.core.spelling import misspelt
from fl_strategies.solvers.local import default_training

TOLD = {d.sent for s in STRATEGIES.values() for d in s.declarations.values()}
"""The hyperparameters that any strategy tells its clients."""

Config: TypeAlias = Mapping[str, Any]
"""What a request says, by kebab-case keys."""
Arrays: TypeAlias = list[npt.NDArray[Any]]


class Received(NamedTuple):
    """The vectors that a request brought."""

    theta: Tensor
    """The model [d]."""
    extra_vectors: Mapping[str, Tensor] = {}
    """Further vectors [d], by the names in the client's ``extra_vectors``."""
    catch_up: Tensor | float = 0.0
    """The vector [d] of the strategy's ``for_client`` or ``catch_up`` for the client, 0 if none."""


class RequestConfig(dict[str, Any]):
    """A request's config as rules get it: it says which hyperparameter a missing key needs."""

    def __missing__(self, name: str) -> Any:
        lacks = f"the request lacks {name!r}"
        raise ValueError(f"{lacks}: the strategy sends what it declares with sent={name!r}")


def round_of(config: Config) -> int:
    """Return the number of the communication round, or 0 if the request names none."""
    return int(config.get("server-round", 0))


def generator(config: Config, purpose: str, number: int, client: int) -> np.random.Generator:
    """Return the client's generator of ``purpose`` in the round ``number``.

    Every call returns a generator of the same numbers. If the request names no communication round,
    every call returns one of new numbers.
    """
    if "server-round" not in config:
        return np.random.default_rng()
    return stream(int(config.get("seed", 0)), purpose, number, client)


def weight_in_secret(arrays: Sequence[npt.NDArray[Any]], samples: int, config: Config) -> int:
    """Return a client's weight in a secure sum; ``ValueError`` if it would cut a value off."""
    largest = max(float(np.abs(array).max(initial=0.0)) for array in arrays)
    if not largest <= config["secure-range"]:
        raise ValueError(
            "the upload's entries must be at most the clipping_range of SecAggPlusWorkflow,"
            f" {config['secure-range']:g}, in size, got {largest:g}"
        )
    if config["secure-alike"]:
        return int(config["secure-max-weight"])  # the full weight is rounded least
    if samples > config["secure-max-weight"]:
        raise ValueError(
            "the client's samples must be at most the max_weight of SecAggPlusWorkflow,"
            f" {config['secure-max-weight']:g}, got {samples}"
        )
    return samples


def check_frozen(layout: Layout, digests: str) -> None:
    """Raise ``ValueError`` if the client's frozen arrays differ from the server's, by digests."""
    frozen, others = layout.frozen, digests.split()
    if not digests or digests == layout.frozen_digests:
        return
    if len(others) != len(frozen):
        raise ValueError(f"the client has {len(frozen)} frozen arrays, the server {len(others)}")
    pairs = zip(sorted(frozen), others, strict=True)
    differ = [name for name, digest in pairs if frozen[name] != digest]
    raise ValueError(
        f"the client's frozen arrays {differ[:3]} are not the server's, and {len(differ)} of"
        f" {len(frozen)} differ: they do not travel, so all must have the same"
    )


def check_own_first(own: Mapping[str, str], digests: str) -> None:
    """Raise ``ValueError`` if the client's own arrays begin with other values than the server's.

    ``own`` are their digests, by name.
    """
    words = digests.split()
    theirs = dict(zip(words[::2], words[1::2], strict=True))
    if differ := [name for name, found in own.items() if theirs.get(name, found) != found]:
        raise ValueError(
            f"the client's own arrays {differ[:3]} begin with other values than the initial"
            " model's, and the algorithm never trains them: all must begin with the same (a seed)"
        )


@functools.cache
def warn_of_misspelt(names: frozenset[str]) -> None:
    """Warn of a request's names that are almost known; those of one kind of request once."""
    if near := misspelt(names, default_training().settings.keys() | TOLD):
        log(WARNING, "requests have %s", near)
