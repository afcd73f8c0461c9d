"""Work that Ctrl-C cannot split: it is completed, and the interruption takes effect after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def undivided() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the end of the block.

    Python delivers signals to the main thread only; in other threads there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []

    def hold(signum: int, _frame: FrameType | None) -> None:
        waiting.append(signum)

    handlers = {number: signal.getsignal(number) for number in STOPS}
    handled = {
        n: handler for n, handler in handlers.items() if handler not in (None, signal.SIG_IGN)
    }
    try:
        for number in handled:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for came in dict.fromkeys(waiting):
            signal.raise_signal(came)
