"""Federations whose clients join, leave and lose their state, and where these come to."""

from __future__ import annotations

from typing import Any

import numpy as np
from federations import CLIENTS, Trouble, Troubled, never
from laws import local
from problems import NODES, fields_of, forget

from clients.node.state import Fields
from fl_strategies import FedADMM, FederatedStrategy, RoundInfo

RHO = 1.5


class Members(Troubled):
    """As Troubled; a client may lose its state before a round, ``forgets(round, client)``."""

    def __init__(
        self, clients: int = CLIENTS, *, forgets: Trouble = never, **trouble: Trouble
    ) -> None:
        super().__init__(clients, **trouble)
        self.forgets = forgets

    def watch(self, info: RoundInfo) -> None:
        """Go on to the next round; to be called at the end of each."""
        self.now += 1
        for client in range(len(self.contexts)):
            if self.forgets(self.now, client):
                forget(self, client)

    def state_of(self, client: int, acked: int) -> Fields:
        """Return the fields of the state that the server recorded."""
        fields = fields_of(self.contexts[NODES[client]], acked)
        assert fields is not None
        return fields

    def u(self, strategy: FederatedStrategy) -> dict[int, np.ndarray]:
        """Return w + y/rho of each client that was ever recorded."""
        found = {c: self.state_of(c, acked) for c, acked in strategy.ledger.acked.items()}
        return {c: f["w"] + f["y"] / f["rho"] for c, f in found.items()}


def admm(federation: Members | None = None, **hyperparameters: Any) -> FedADMM:
    """FedADMM as in Theorem 1, two of four clients a round."""
    also = hyperparameters.pop("callbacks", [])
    usual = {"rho": RHO, "eta": "fraction", "fraction_train": 0.5, "fraction_evaluate": 0.0}
    usual |= {"local": local(lr=0.4), "node_wait": 0.01}
    watch = [] if federation is None else [federation.watch]
    return FedADMM(**{**usual, **hyperparameters, "callbacks": [*also, *watch]})


def before_round(first: int, *clients: int) -> Trouble:
    return lambda number, client: client in clients and number < first
