"""The server half."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from my_app.task import Net

from clients import FlatModel
from fl_strategies import FedADMM

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the global model."""
    config = context.run_config
    model = FlatModel(Net())
    strategy = FedADMM(
        fraction_train=config["fraction-train"],
        local={"lr": config["lr"], "epochs": config["local-epochs"], "batch-size": 16},
        **model.layout_options,  # arrays that are tied or frozen
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=config["num-server-rounds"],
    )
    print("accuracy:", [m["eval-accuracy"] for m in result.evaluate_metrics_clientapp.values()])
