"""The client half."""

import torch
from flwr.app import Context
from my_app.task import Net, load_data
from torch import nn

from clients import AnyAlgorithmClient, Problem, client_app


def client_fn(context: Context) -> AnyAlgorithmClient:
    """Return the client of this node, which serves every strategy."""
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    batch_size = context.run_config["batch-size"]
    trainloader, valloader = load_data(partition_id, num_partitions, batch_size)

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = Net().to(device)
    loss = nn.CrossEntropyLoss()
    return AnyAlgorithmClient(
        Problem(model, loss, trainloader), test=Problem(model, loss, valloader)
    )


app = client_app(client_fn)
