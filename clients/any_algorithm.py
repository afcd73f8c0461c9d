"""One client for every algorithm: the request says which."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, TypeAlias

from flwr.client import NumPyClient

from clients.base import FederatedClient
from clients.request import Arrays, Config
from fl_strategies import STRATEGIES, FederatedStrategy
from fl_strategies.core.spelling import unknown


def _client_of(strategy: type[FederatedStrategy]) -> type[FederatedClient]:
    """Return the client that the strategy runs, from the module of the same name."""
    if strategy.runs:
        return _client_of(STRATEGIES[strategy.runs])
    name = f"clients.{strategy.__module__.rpartition('.')[2]}"
    value: object
    for value in vars(importlib.import_module(name)).values():
        if (
            isinstance(value, type)
            and issubclass(value, FederatedClient)
            and vars(value).get("algorithm") == strategy.algorithm
        ):
            return value
    raise LookupError(f"{name} has no client with algorithm = {strategy.algorithm!r}")


CLIENTS: dict[str, type[FederatedClient]] = {
    name: _client_of(strategy) for name, strategy in STRATEGIES.items()
}
"""The client of every algorithm, by its name: that of another if it changes the server alone."""

BUILT_IN = frozenset(CLIENTS.values())
"""The clients of this package."""

Registered: TypeAlias = dict[str, tuple[type[FederatedStrategy] | None, type[FederatedClient]]]
"""Both halves of algorithms, by name; None if a process has the client half alone."""


def registered() -> Registered:
    """Return both halves of each algorithm that was registered from outside of this package."""
    return {
        name: (STRATEGIES.get(name), client)
        for name, client in CLIENTS.items()
        if client not in BUILT_IN
    }


def register(algorithms: Registered) -> None:
    """Register what :func:`registered` returned in another process."""
    for name, (strategy, client) in algorithms.items():
        CLIENTS[name] = client
        if strategy is not None:
            STRATEGIES[name] = strategy


class AnyAlgorithmClient(NumPyClient):
    """Acts as the client of the algorithm that a request names, so that one ClientApp serves all.

    Takes the arguments of :class:`clients.FederatedClient`. A request that names no algorithm comes
    from one of Flower's own strategies: the client acts as FedProx's if the request has
    ``proximal-mu``, else as FedAvg's. Raises ``ValueError`` for an unknown name.
    """

    __signature__ = inspect.signature(FederatedClient)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._args, self._kwargs = args, kwargs
        self.client_id = FederatedClient(*args, **kwargs).client_id  # it checks the arguments

    def fit(self, parameters: Arrays, config: Config) -> tuple[Arrays, int, dict[str, Any]]:
        """As :meth:`clients.FederatedClient.fit`."""
        client, config = self.acting(config)
        return client.fit(parameters, config)

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, dict[str, Any]]:
        """As :meth:`clients.FederatedClient.evaluate`."""
        client, config = self.acting(config)
        return client.evaluate(parameters, config)

    def acting(self, config: Config) -> tuple[FederatedClient, Config]:
        """Return the client of the request's algorithm, and the request with our keys."""
        config = kebab(config)
        return self._client(config), config

    @property
    def array_names(self) -> list[str]:
        """As :attr:`clients.FederatedClient.array_names`."""
        return self._client({}).array_names

    def get_properties(self, config: Config) -> dict[str, Any]:
        """As :meth:`clients.FederatedClient.get_properties`."""
        return self._client({}).get_properties(config)

    def get_parameters(self, config: Config) -> Arrays:
        """As :meth:`clients.FederatedClient.get_parameters`."""
        return self._client({}).get_parameters(config)

    def _client(self, config: Config) -> FederatedClient:
        flowers_own = "fedprox" if "proximal-mu" in config else "fedavg"
        name = config.get("algorithm", flowers_own)
        if name not in CLIENTS:
            hint = unknown([name], CLIENTS)
            raise ValueError(
                f"unknown algorithm {hint}; this client knows {sorted(CLIENTS)}. If it is your own:"
                " the module of the ClientApp must import that which registers it"
            )
        return CLIENTS[name](*self._args, **self._kwargs)


def kebab(config: Config) -> Config:
    """Return ``config`` with legacy keys (``server_round``) in kebab case (``server-round``)."""
    return {name.replace("_", "-"): value for name, value in config.items()}
