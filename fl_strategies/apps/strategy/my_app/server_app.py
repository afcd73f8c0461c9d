"""The server half."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from my_app.task import Net

from fl_strategies import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the global model."""
    strategy = FedAvg(fraction_train=context.run_config["fraction-train"], clipping_norm=10.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    print("accuracy:", [m["eval_acc"] for m in result.evaluate_metrics_clientapp.values()])
