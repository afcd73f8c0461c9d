"""The ServerApp of this Flower App: one run, as its run-config describes it."""

import ctypes
from contextlib import suppress

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from threadpoolctl import threadpool_limits

from simulations.config import RunConfig
from simulations.experiment import run

PULL_SECONDS = 0.01
"""Seconds between polls for replies: Flower's 0.1 is as long as a round of a small model."""
M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3
"""Numbers of glibc's options (``malloc.h``)."""

app = ServerApp()


def return_memory() -> None:
    """Have glibc give arrays of a megabyte and more back to the system when they are freed.

    By default glibc keeps what Flower's and Ray's threads have used for messages, separately for
    each thread: some 300 MB with a model of 7 MB. Other C libraries stay as they are.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_ARENA_MAX, 2)
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


def multiply_in_one_thread() -> None:
    """Have NumPy multiply matrices without threads from now on.

    In a simulation the main thread starts Ray, by fork, while this one already makes data. OpenBLAS
    ends its threads before a fork, and a product that waits for them would wait for ever.
    """
    threadpool_limits(1, user_api="blas")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured algorithm; ``simulations.experiment.run`` describes the results."""
    return_memory()
    if hasattr(grid, "pull_interval"):  # the simulation's; the grid of a deployment has none
        multiply_in_one_thread()
        grid.pull_interval = PULL_SECONDS
    run(RunConfig.parse(context.run_config), grid)
