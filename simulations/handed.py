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
    """Return the ClientApp that brings the run's data, images decoded and to scale, to workers.

    All workers map the arrays, so that the data are in memory once.
    """
    data = _Data(app.parsed(tuple(sorted(config.to_run_config().items()))))  # as clients read it
    client_fn, hosts, stack = (
        partial(_with, data, part) for part in (app.client_fn, app.hosts, app.stack)
    )
    return client_app(client_fn, hosts=hosts, stack=stack)


def _with(data: _Data, part: Callable[[Context], Any], context: Context) -> Any:
    return part(context)


class _Data:
    """A run's data: they are made when this is sent, and ``problems`` has them where it arrives."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def __reduce__(self) -> Any:
        data_set, split = problems.dataset(self.config), problems.split(self.config)
        images = data_set.scale is not None
        if images:  # arrays that lie as their indices say can be mapped
            x, test_x = (data_set.inputs(test=test).transpose(0, 2, 3, 1) for test in (False, True))
            data_set = replace(data_set, x=x, test_x=test_x, scale=None)
        return _arrived, (self.config, data_set, split, images)


def _arrived(config: RunConfig, data_set: Dataset, split: problems.Split, images: bool) -> _Data:
    if images:
        x, test_x = (_channels_first(pixels) for pixels in (data_set.x, data_set.test_x))
        data_set = replace(data_set, x=x, test_x=test_x)
    problems.HANDED[config] = data_set, split
    return _Data(config)


def _channels_first(pixels: Inputs) -> NDArray[np.float32]:
    return np.asarray(pixels).transpose(0, 3, 1, 2)
