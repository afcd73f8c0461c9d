"""``python -m fl_strategies.apps stop``: end the SuperLink that ``flwr run`` leaves running."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

import psutil

PORT = "39091"
"""The local SuperLink's, unless ``FLWR_LOCAL_SUPERLINK_HTTP_API_PORT`` says another."""


def stop(port: str = "") -> int:
    """End the local SuperLink of this user, and what it started; return the number of processes."""
    port = port or os.environ.get("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", PORT)
    links = [p for p in psutil.process_iter() if _is_link(p, port)]
    ended = [*links, *(child for link in links for child in _children(link))]
    for process in ended:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(ended, timeout=10.0)
    return len(ended)


def _is_link(process: psutil.Process, port: str) -> bool:
    try:
        words: Sequence[str] = process.cmdline()
        own = process.uids().real == os.getuid()
    except psutil.Error:  # it has ended, or belongs to somebody else
        return False
    named = any(os.path.basename(word) == "flower-superlink" for word in words[:2])
    return own and named and ("--port", port) in pairwise(words)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children
