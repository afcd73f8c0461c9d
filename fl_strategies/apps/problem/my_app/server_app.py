"""The server half."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from my_app.task import Net, load_centralized_dataset, test

from fl_strategies import FedADMM

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the global model, and save it."""
    fraction_evaluate: float = context.run_config["fraction-evaluate"]
    num_rounds: int = context.run_config["num-server-rounds"]
    lr: float = context.run_config["learning-rate"]

    global_model = Net()
    arrays = ArrayRecord(global_model.state_dict())

    strategy = FedADMM(
        fraction_evaluate=fraction_evaluate,
        local={
            "epochs": context.run_config["local-epochs"],
            "batch-size": context.run_config["batch-size"],
            "momentum": 0.9,
        },
    )

    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=num_rounds,
        evaluate_fn=global_evaluate,
    )

    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the global model on samples that no client has."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    test_loss, test_acc = test(model, load_centralized_dataset(), device)

    return MetricRecord({"accuracy": test_acc, "loss": test_loss})
