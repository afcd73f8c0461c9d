"""Data that are drawn anew each time, such as images that are turned at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NoFixedSamples(ValueError):
    """Raised when something needs the same samples twice, and the data are drawn anew each time."""


@contextmanager
def fixed_samples(need: str) -> Iterator[None]:
    """Have the text of :class:`NoFixedSamples` begin with who has this ``need``."""
    try:
        yield
    except NoFixedSamples as error:
        raise NoFixedSamples(f"{need}: {error}") from None
