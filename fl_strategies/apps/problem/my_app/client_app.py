"""The client half."""

from flwr.app import Context
from my_app.task import Net, load_data
from torch import nn

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    FlatModel,
    StreamedProblem,
    client_app,
    client_id,
)


def client_fn(context: Context) -> AnyAlgorithmClient:
    """Return the client of this node, which serves every strategy."""
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    trainloader, valloader = load_data(partition_id, num_partitions)

    model = FlatModel(Net())
    loss = nn.functional.cross_entropy
    return AnyAlgorithmClient(
        StreamedProblem(model, loss, trainloader.dataset),
        client_id=client_id(context),
        test=StreamedProblem(model, loss, valloader.dataset),
        store=ContextStore(context),
    )


app = client_app(client_fn)
