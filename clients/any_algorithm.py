"""One client for every algorithm: the request says which."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Self, TypeAlias

from flwr.app import Context
from flwr.client import NumPyClient

from clients.base import FederatedClient
from clients.derived import derived, is_ours
from clients.moon import MOONClient
from clients.request import Arrays, Config
from fl_strategies import STRATEGIES, FederatedStrategy
from fl_strategies.core.spelling import unknown

WRITTEN: dict[str, type[FederatedClient]] = {"moon": MOONClient}
"""Clients of this package that do more than their algorithm's rule says."""
CLIENTS: dict[str, type[FederatedClient]] = {}
"""The client of every algorithm, by its name: that of another if it changes the server alone."""


def client_of(algorithm: str) -> type[FederatedClient]:
    """Return the client of an algorithm: that of ``CLIENTS``, or the one that its rule makes.

    Raises ``ValueError`` for an unknown name.
    """
    if client := CLIENTS.get(algorithm) or WRITTEN.get(algorithm):
        return client
    if algorithm not in STRATEGIES:
        known = {*CLIENTS, *STRATEGIES}
        raise ValueError(
            f"unknown algorithm {unknown([algorithm], known)}; this client knows"
            f" {sorted(known)}. If it is your own: the module of the ClientApp must import that"
            " which registers it"
        )
    strategy = STRATEGIES[algorithm]
    return client_of(strategy.runs) if strategy.runs else derived(strategy)


CLIENTS |= {name: client_of(name) for name, strategy in STRATEGIES.items() if is_ours(strategy)}

BUILT_IN = frozenset(CLIENTS.values())
"""The clients of this package."""

Registered: TypeAlias = dict[
    str, tuple[type[FederatedStrategy] | None, type[FederatedClient] | None]
]
"""Both halves of algorithms, by name, each as far as it was registered."""


def registered() -> Registered:
    """Return both halves of each algorithm that was registered from outside of this package."""
    names = [name for name, strategy in STRATEGIES.items() if not is_ours(strategy)]
    names += [name for name, client in CLIENTS.items() if client not in BUILT_IN]
    return {name: (STRATEGIES.get(name), CLIENTS.get(name)) for name in names}


def register(algorithms: Registered) -> None:
    """Register what :func:`registered` returned in another process."""
    for name, (strategy, client) in algorithms.items():
        if client is not None:
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
        self._base = FederatedClient(*args, **kwargs)  # it checks the arguments

    @property
    def client_id(self) -> int:
        """As :attr:`clients.FederatedClient.client_id`."""
        return self._base.client_id

    def in_context(self, context: Context) -> Self:
        """As :meth:`clients.FederatedClient.in_context`."""
        base = self._base.in_context(context)
        if base is self._base:
            return self
        settled = copy.copy(self)
        settled._base = base
        settled._kwargs = self._kwargs | {"client_id": base.client_id, "store": base.store}
        return settled

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
        flowers_own = "fedprox" if "proximal-mu" in config else "fedavg"
        kind = client_of(config.get("algorithm", flowers_own))
        return kind(*self._args, **self._kwargs), config

    @property
    def array_names(self) -> list[str]:
        """As :attr:`clients.FederatedClient.array_names`."""
        return self._base.array_names

    def get_properties(self, config: Config) -> dict[str, Any]:
        """As :meth:`clients.FederatedClient.get_properties`."""
        return self._base.get_properties(config)

    def get_parameters(self, config: Config) -> Arrays:
        """As :meth:`clients.FederatedClient.get_parameters`."""
        return self._base.get_parameters(config)


def kebab(config: Config) -> Config:
    """Return ``config`` with legacy keys (``server_round``) in kebab case (``server-round``)."""
    return {name.replace("_", "-"): value for name, value in config.items()}
