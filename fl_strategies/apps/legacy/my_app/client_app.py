"""The client half: a NumPyClient behind Flower's legacy ``client_fn``."""

import torch
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from my_app.task import Net, load_data
from torch import nn

from clients import AnyAlgorithmClient, ContextStore, Problem, client_id


def client_fn(context: Context) -> Client:
    """Return the client of this node."""
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    batch_size = context.run_config["batch-size"]
    trainloader, valloader = load_data(partition_id, num_partitions, batch_size)

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = Net().to(device)
    loss = nn.CrossEntropyLoss()
    return AnyAlgorithmClient(
        Problem(model, loss, trainloader),
        client_id=client_id(context),
        test=Problem(model, loss, valloader),
        store=ContextStore(context),
    ).to_client()


app = ClientApp(client_fn=client_fn)
