"""The server half: a strategy behind Flower's legacy ``server_fn``."""

from flwr.app import ArrayRecord, Context
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from my_app.task import Net

from fl_strategies import FedADMM, as_legacy


def server_fn(context: Context) -> ServerAppComponents:
    """Return the strategy and the number of rounds."""
    config = context.run_config
    global_model = Net()
    strategy = FedADMM(
        fraction_evaluate=config["fraction-evaluate"],
        local={"lr": config["learning-rate"], "epochs": config["local-epochs"]},
        min_available_nodes=2,
    )
    return ServerAppComponents(
        strategy=as_legacy(strategy, ArrayRecord(global_model.state_dict())),
        config=ServerConfig(num_rounds=config["num-server-rounds"]),
    )


app = ServerApp(server_fn=server_fn)
