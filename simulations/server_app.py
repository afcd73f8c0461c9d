"""The ServerApp of this Flower App: one run, as its run-config describes it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from simulations.config import RunConfig
from simulations.experiment import run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured algorithm; see ``simulations.experiment.run`` for what is written."""
    run(RunConfig.parse(context.run_config), grid)
