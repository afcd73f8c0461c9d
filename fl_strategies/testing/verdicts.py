"""What a check finds: a law is kept, broken, or says nothing of what is checked."""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from fl_strategies.core.schedules import require

Subject = TypeVar("Subject")
Arrays = Mapping[str, np.ndarray]
ON_FAIL = ("raise", "report")


class Finding(NamedTuple):
    """What was found of one law.

    Attributes
    ----------
    law : str
        The law's name.
    outcome : "passed", "failed" or "not applicable"
    reason : str
        Why the law is broken, with the two values that differ, or why it says nothing; else "".
    """

    law: str
    outcome: Literal["passed", "failed", "not applicable"]
    reason: str = ""


class NotApplicable(Exception):
    """A law says nothing of what is checked; the text says why."""


def statement(law: Callable[..., None]) -> str:
    """Return the law in words: its docstring."""
    return " ".join((law.__doc__ or "").split())


def findings_of(
    laws: Iterable[Callable[[Subject], None]], subject: Subject, on_fail: str
) -> list[Finding]:
    """Return what is found of each law; raise ``AssertionError`` for the first broken one.

    With ``on_fail="report"`` nothing is raised.
    """
    require(on_fail in ON_FAIL, "on_fail", f"one of {[*ON_FAIL]}", on_fail)
    findings = []
    for law in laws:
        name = law.__name__
        try:
            with quiet():
                law(subject)
            findings.append(Finding(name, "passed"))
        except NotApplicable as why:
            findings.append(Finding(name, "not applicable", str(why)))
        except AssertionError as error:
            if on_fail == "raise":
                raise AssertionError(f"{name}: {error}\nThe law: {statement(law)}") from error
            findings.append(Finding(name, "failed", str(error)))
    return findings


def expect(met: bool, reason: str) -> None:
    """Raise ``AssertionError`` unless the law is met: also under ``python -O``."""
    if not met:
        raise AssertionError(reason)


def expect_same(
    found: Arrays, expected: Arrays, what: str, other: str, rounding: float = 0.0
) -> None:
    """Raise ``AssertionError`` unless two models are the same: to the bit, or but for rounding.

    ``rounding`` is relative to the largest number of an array.
    """
    expect([*found] == [*expected], f"the arrays are {[*found]} {what}, {[*expected]} {other}")
    for name, right in expected.items():
        left = found[name]
        expect(
            left.dtype == right.dtype and left.shape == right.shape,
            f"{name} is {left.dtype}{[*left.shape]} {what}, {right.dtype}{[*right.shape]} {other}",
        )
        if left.tobytes() == right.tobytes():
            continue
        with np.errstate(invalid="ignore"):  # of two infinite numbers
            apart = np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64))
        if (apart <= rounding * np.abs(right).max(initial=0.0)).all():
            continue
        place = np.unravel_index(np.argmax(np.nan_to_num(apart, nan=np.inf)), left.shape)
        where = f"{name}{[int(i) for i in place]}"
        expect(False, f"{where} is {left[place]!s} {what}, {right[place]!s} {other}")


def expect_finite(arrays: Arrays, when: str) -> None:
    """Raise ``AssertionError`` if a number of the arrays is not finite."""
    for name, array in arrays.items():
        if array.dtype.kind in "fc":
            wrong = array[~np.isfinite(array)]
            expect(not len(wrong), f"{name} holds {wrong[:1].tolist()} {when}, not finite numbers")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Begin with these states of the process's generators; leave them as they were."""
    torch: Any = sys.modules.get("torch")  # the server half needs none
    before = random.getstate(), np.random.get_state()  # noqa: NPY002  # they are what is checked
    of_torch = torch.get_rng_state() if torch else None
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    if torch:
        from clients.learning.replay import seed_generators

        seed_generators(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        if torch:
            torch.set_rng_state(of_torch)


@cache
def frozen_before() -> bool:
    """Return whether a caller has frozen objects, which stay so; Python counts them one by one."""
    return gc.get_freeze_count() > 0


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing: laws have clients fail and replies get lost.

    What exists before is not searched for garbage, which some of Flower's strategies do at each
    reply.
    """
    loggers = [logging.getLogger(name) for name in ("flwr", "fl_strategies")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    frozen = frozen_before()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
