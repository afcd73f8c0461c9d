"""Checks for any Flower strategy and any client: the laws that they owe to their users."""

from fl_strategies.testing.federation import numpy_app
from fl_strategies.testing.of_clients import CLIENT_LAWS, check_client
from fl_strategies.testing.of_strategies import STRATEGY_LAWS, check_strategy
from fl_strategies.testing.verdicts import Finding

__all__ = [
    "CLIENT_LAWS",
    "STRATEGY_LAWS",
    "Finding",
    "check_client",
    "check_strategy",
    "numpy_app",
]
