"""What worker processes are handed of a run: its data, which one process has read and decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from clients import client_app
from simulations import client_app as app
from simulations import problems
from simulations.config import RunConfig
from simulations.generated import Dataset, Inputs


def app_with_data(config: RunConfig) -> ClientApp:
    """Return the ClientApp that holds the run's data, images decoded and to scale.

    All workers map the arrays, so that the data are in memory once.
    """
    config = app.parsed(tuple(sorted(config.to_run_config().items())))  # as clients read it
    data_set, split = problems.dataset(config), problems.split(config)
    images = data_set.scale is not None
    if images:  # arrays that lie as their indices say can be mapped
        x, test_x = (data_set.inputs(test=test).transpose(0, 2, 3, 1) for test in (False, True))
        data_set = replace(data_set, x=x, test_x=test_x, scale=None)
    given = (config, data_set, split, images)
    client_fn, hosts, stack = (
        partial(_with, part, *given) for part in (app.client_fn, app.hosts, app.stack)
    )
    return client_app(client_fn, hosts=hosts, stack=stack)


def _with(
    part: Callable[[Context], Any],
    config: RunConfig,
    data_set: Dataset,
    split: problems.Split,
    images: bool,
    context: Context,
) -> Any:
    """Call a part of the app where the data are handed to it."""
    if config not in problems.HANDED:
        if images:
            x, test_x = (_channels_first(pixels) for pixels in (data_set.x, data_set.test_x))
            data_set = replace(data_set, x=x, test_x=test_x)
        problems.HANDED[config] = data_set, split
    return part(context)


def _channels_first(pixels: Inputs) -> NDArray[np.float32]:
    return np.asarray(pixels).transpose(0, 3, 1, 2)
