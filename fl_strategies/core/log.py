"""The logger ``fl_strategies``, which prints wherever Flower's prints, and has a level of its own.

``logging.getLogger("fl_strategies").setLevel("WARNING")`` mutes this package and not Flower.
Records go to the handlers of Flower's logger: in a terminal, in a notebook and in ``flwr run`` they
look like Flower's, and ``FLWR_LOG_LEVEL`` acts on them. Handlers of the root logger get them too.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

FLOWER = logging.getLogger("flwr")
LOGGER = logging.getLogger("fl_strategies")
log = LOGGER.log

_quiet = ContextVar("quiet", default=False)
_serving = ContextVar("serving", default=False)


class _FlowersHandlers(logging.Handler):
    """Gives records to Flower's handlers; to its console only if the root logger has none."""

    def emit(self, record: logging.LogRecord) -> None:
        printed = any(map(_is_console, logging.getLogger().handlers))
        for handler in FLOWER.handlers:
            if record.levelno >= handler.level and not (printed and _is_console(handler)):
                handler.handle(record)


def _is_console(handler: logging.Handler) -> bool:
    consoles = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in consoles


def _is_wanted(record: logging.LogRecord) -> bool:
    return not (_quiet.get() and record.levelno == logging.INFO)


LOGGER.setLevel("DEBUG" if os.getenv("FLWR_LOG_LEVEL", "").upper() == "DEBUG" else "INFO")
LOGGER.addHandler(_FlowersHandlers())
LOGGER.addFilter(_is_wanted)


@functools.cache
def log_once(text: str) -> None:
    """Log ``text`` once in a process."""
    LOGGER.info(text)


def mute_below(level: int) -> None:
    """Leave out what is below ``level``, of Flower too: for a command, never for the library."""
    for logger in (FLOWER, LOGGER):
        logger.setLevel(level)


@contextmanager
def quiet_log(quiet: bool) -> Iterator[None]:
    """Leave out what is only informative, in this thread, if ``quiet``."""
    before = _quiet.set(quiet or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(before)


def serving(start: Callable[P, T]) -> Callable[P, T]:
    """Have a strategy's method log no rounds if the strategy is ``quiet``; see :func:`serves`."""

    @functools.wraps(start)
    def started(*args: P.args, **kwargs: P.kwargs) -> T:
        strategy: Any = args[0]
        before = _serving.set(True)
        try:
            with quiet_log(strategy.quiet):
                return start(*args, **kwargs)
        finally:
            _serving.reset(before)

    return started


def serves() -> bool:
    """Return whether a strategy runs in this thread, whose log says why clients failed."""
    return _serving.get()


@contextmanager
def flowers_errors_as_debug() -> Iterator[None]:
    """Lower Flower's errors to DEBUG while their causes come as replies, too.

    Flower's simulation logs three errors for each client whose app answers no queries.
    """

    def lower(record: logging.LogRecord) -> bool:
        if record.levelno == logging.ERROR:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return True

    FLOWER.addFilter(lower)
    try:
        yield
    finally:
        FLOWER.removeFilter(lower)
