"""The ServerApp of this Flower App: one run, as its run-config describes it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from simulations.config import RunConfig
from simulations.experiment import run

PULL_SECONDS = 0.01
"""How often a simulation looks for replies: Flower's 0.1 is as long as a round of a small model."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured algorithm; see ``simulations.experiment.run`` for what is written."""
    if hasattr(grid, "pull_interval"):  # the simulation's; the grid of a deployment has none
        grid.pull_interval = PULL_SECONDS
    run(RunConfig.parse(context.run_config), grid)
