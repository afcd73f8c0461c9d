"""The server half: a strategy behind Flower's legacy ``server_fn``."""

from flwr.app import ArrayRecord, Context
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from my_app.task import Net

from clients import FlatModel
from fl_strategies import FedADMM, as_legacy


def server_fn(context: Context) -> ServerAppComponents:
    """Return the strategy and the number of rounds."""
    config = context.run_config
    model = FlatModel(Net())
    strategy = FedADMM(
        fraction_train=config["fraction-train"],
        local={"lr": config["lr"], "epochs": config["local-epochs"], "batch-size": 16},
        min_available_nodes=2,
        **model.layout_options,  # arrays that are tied or frozen
    )
    return ServerAppComponents(
        strategy=as_legacy(strategy, ArrayRecord(model.state_dict())),
        config=ServerConfig(num_rounds=config["num-server-rounds"]),
    )


app = ServerApp(server_fn=server_fn)
