"""Strategies for the Flower federated-learning framework, for heterogeneous (non-IID) data."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fl_strategies import algorithms
from fl_strategies.algorithms import *  # noqa: F403
from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import (
    Hyperparameter,
    Schedule,
    choice,
    flag,
    number,
    option,
)
from fl_strategies.core.oracle import Oracle, Solved, Step, Tally
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import (
    at,
    cosine_decay,
    exponential_decay,
    linear_decay,
    step_decay,
)
from fl_strategies.core.stacks import repeated
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_mean, weighted_sum
from fl_strategies.fedavg import Averaging
from fl_strategies.server.algorithm import Card, Next
from fl_strategies.server.callbacks import BestModel, ClientHistory, EarlyStop, History, RoundInfo
from fl_strategies.server.checkpoints import Checkpoints
from fl_strategies.server.options import Options
from fl_strategies.server.run import NothingUsable
from fl_strategies.server.strategy import FederatedStrategy
from fl_strategies.solvers.own_steps import check_own_steps

if TYPE_CHECKING:
    __version__: str
    from fl_strategies.compat.legacy import as_legacy


def _warn_of_another_clients() -> None:
    """Warn if ``import clients`` finds the user's own package, which hides the client half."""
    try:
        found = find_spec("clients")
    except ValueError:  # a module without a spec, made by hand
        return
    ours = Path(__file__).parents[1] / "clients/__init__.py"
    # a folder without __init__.py has no origin, and hides nothing
    if found and found.origin and ours.exists() and not ours.samefile(found.origin):
        warnings.warn(
            f"`import clients` finds {found.origin}, which hides the client half of fl_strategies,"
            f" {ours}: rename yours, or put it into a package",
            stacklevel=3,
        )


_warn_of_another_clients()

STRATEGIES: dict[str, type[FederatedStrategy]] = {
    strategy.algorithm: strategy
    for strategy in vars(algorithms).values()
    if isinstance(strategy, type) and issubclass(strategy, FederatedStrategy)
}
"""Every strategy by the name of its algorithm."""

__all__ = [
    "STRATEGIES",
    "Averaging",
    "BestModel",
    "Card",
    "Checkpoints",
    "ClientHalf",
    "ClientHistory",
    "EarlyStop",
    "FederatedStrategy",
    "History",
    "Hyperparameter",
    "Next",
    "NothingUsable",
    "Options",
    "Oracle",
    "Round",
    "RoundInfo",
    "Schedule",
    "Solved",
    "Step",
    "Subproblem",
    "Tally",
    "Upload",
    "Vector",
    "as_legacy",
    "at",
    "check_own_steps",
    "choice",
    "cosine_decay",
    "exponential_decay",
    "flag",
    "linear_decay",
    "number",
    "option",
    "repeated",
    "step_decay",
    "weighted_mean",
    "weighted_sum",
]
__all__ += [strategy.__name__ for strategy in STRATEGIES.values()]


def __getattr__(name: str) -> object:
    """Load what only a legacy server needs, and the version, where they are asked for."""
    if name == "as_legacy":
        from fl_strategies.compat.legacy import as_legacy

        return as_legacy
    if name == "__version__":  # of the installed distribution: pyproject.toml alone states it
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("fl-strategies")
        except PackageNotFoundError:  # the source alone, as a Flower App carries it
            raise AttributeError("fl_strategies is not installed: it has no version") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
