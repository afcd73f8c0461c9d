"""What the clients of FedPD and FedPDVR share; the rule is in ``fl_strategies.skipping``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, count, value_of


class SkippingClient(FederatedClient):
    """Runs the algorithm rounds that a request names; keeps at least its model x and its dual."""

    def rounds(self, config: Config) -> range:
        first = int(value_of(config, "first-algorithm-round"))
        return range(first, first + count(config, "algorithm-rounds"))

    @staticmethod
    def personalized_model(state: Any) -> Tensor:
        own: Tensor = state.x
        return own
