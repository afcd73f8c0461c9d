"""One client for every algorithm: the request says which."""

from __future__ import annotations

from typing import Any

from flwr.client import NumPyClient

from clients.base import Arrays, Config, FederatedClient
from clients.fedadmm import FedADMMClient
from clients.fedavg import FedAvgClient
from clients.fedbc import FedBCClient
from clients.fedprox import FedProxClient
from clients.per_fedbc import PerFedBCClient

CLIENTS: dict[str, type[FederatedClient]] = {
    client.algorithm: client
    for client in (FedAvgClient, FedProxClient, FedADMMClient, FedBCClient, PerFedBCClient)
}
"""Every client by the name of its algorithm."""


class AnyAlgorithmClient(NumPyClient):
    """Acts as the client of the algorithm that a request names, so that one ClientApp serves all.

    Takes the arguments of :class:`clients.FederatedClient`. A request that names none comes from
    one of Flower's own strategies: with ``proximal-mu`` it is answered as FedProx, else as FedAvg.
    Raises ``ValueError`` for an unknown name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._args, self._kwargs = args, kwargs

    def fit(self, parameters: Arrays, config: Config) -> tuple[Arrays, int, dict[str, Any]]:
        """As :meth:`clients.FederatedClient.fit`."""
        if "proximal_mu" in config:  # as Flower's legacy FedProx spells it
            config = {**config, "proximal-mu": config["proximal_mu"]}
        return self._client(config).fit(parameters, config)

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, dict[str, Any]]:
        """As :meth:`clients.FederatedClient.evaluate`."""
        return self._client(config).evaluate(parameters, config)

    def _client(self, config: Config) -> FederatedClient:
        flowers_own = "fedprox" if "proximal-mu" in config else "fedavg"
        name = config.get("algorithm", flowers_own)
        if name not in CLIENTS:
            raise ValueError(f"unknown algorithm {name!r}; this client knows {sorted(CLIENTS)}")
        return CLIENTS[name](*self._args, **self._kwargs)
