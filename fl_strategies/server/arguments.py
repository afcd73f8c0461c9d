"""Checks of what ``start`` is given, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp

from fl_strategies.core.log import log
from fl_strategies.core.records import CATCH_UP
from fl_strategies.core.schedules import check, require
from fl_strategies.core.spelling import misspelt
from fl_strategies.messages.codes import DOWNLOAD
from fl_strategies.solvers.local import check_local, default_training

OF_LAYOUT = ("layout", "frozen", "checksums", DOWNLOAD)
"""Names in a request that depend on the model's layout."""


def check_start(
    grid: object, initial_arrays: object, num_rounds: int, timeout: float, evaluate_fn: object
) -> None:
    """Raise ``ValueError`` for an argument of ``start`` of another kind or outside its range."""
    if isinstance(grid, ClientApp):
        raise ValueError("grid must be a Grid, got a ClientApp: InProcessGrid(app, ...) makes one")
    require(hasattr(grid, "send_and_receive"), "grid", "a Grid", grid)
    wanted = "an ArrayRecord: ArrayRecord(module.state_dict())"
    require(isinstance(initial_arrays, ArrayRecord), "initial_arrays", wanted, initial_arrays)
    check("num_rounds", num_rounds, low=1, integer=True)
    if timeout not in (None, math.inf):  # both mean: no limit
        check("timeout", timeout, low=0.0)
    if evaluate_fn is not None:
        require(callable(evaluate_fn), "evaluate_fn", "a function (round, arrays)", evaluate_fn)


def check_configs(
    configs: Mapping[str, ConfigRecord | None],
    *,
    ours: Collection[str],
    declared: Collection[str],
    local: Mapping[str, Any],
) -> None:
    """Raise ``ValueError`` for what is no config, or sets what the strategy itself sends.

    Settings of local training are checked together with the strategy's ``local``.

    Misspellings are warned of.

    ``ours`` are the names in a request before the layout is known, ``declared`` those of
    hyperparameters that may be sent.
    """
    taken, known = {*ours, *declared, *OF_LAYOUT, CATCH_UP}, default_training().settings
    for name, config in configs.items():
        wanted = "a ConfigRecord, or None"
        require(config is None or isinstance(config, Mapping), name, wanted, config)
        if clash := sorted(taken & {*(config or ())}):
            raise ValueError(f"{name} must not set {clash}: the strategy does")
        spelt = {n.replace("_", "-"): value for n, value in (config or {}).items()}
        check_local({**local, **{n: value for n, value in spelt.items() if n in known}})
        if near := misspelt(config or (), {*known, *declared}):
            log(WARNING, "%s has %s", name, near)
