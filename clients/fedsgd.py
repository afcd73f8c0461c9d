"""FedSGD's client half: FedAvg's client, asked for one gradient step."""

from __future__ import annotations

from clients.fedavg import FedAvgClient


class FedSGDClient(FedAvgClient):
    """Uploads its model after the one step that the request asks for; keeps nothing."""

    algorithm = "fedsgd"
