"""The Hugging Face Hub may be out of reach; this module finds out in seconds, without retries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HUB_SECONDS = 5.0
"""Seconds in which the Hub must answer."""


def reachable() -> bool:
    """Return whether the Hub answers in time; False if ``HF_HUB_OFFLINE`` is set."""
    import huggingface_hub
    from huggingface_hub import constants

    answers: list[int] = []

    def ask() -> None:
        try:
            session = huggingface_hub.get_session()
            answer = session.head(constants.ENDPOINT, timeout=HUB_SECONDS)
            answers.append(answer.status_code)
        except Exception:  # of the network in all its kinds
            return

    if constants.HF_HUB_OFFLINE:
        return False
    thread = threading.Thread(target=ask, daemon=True)  # a name may be looked up for much longer
    thread.start()
    thread.join(HUB_SECONDS)
    return any(status < 500 for status in answers)  # else it is a proxy's answer


@contextmanager
def asked_briefly() -> Iterator[None]:
    """If the Hub does not answer, let ``datasets`` and ``transformers`` use earlier downloads, or
    fail, at once."""
    if reachable():
        yield
        return
    import datasets
    from huggingface_hub import constants

    switches: tuple[Any, ...] = (constants, datasets.config)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value
