"""What a client trains, whoever wrote the training loop."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from clients.learning.border import Border
from clients.learning.data import Batch
from fl_strategies.core.records import NOTHING
from fl_strategies.solvers.local import LocalTraining

Gradient: TypeAlias = Callable[[Batch], tuple[Tensor, Tensor | None]]
"""Leaves a gradient on a batch in the parameters; returns loss and scores."""


class Metrics(NamedTuple):
    """Mean loss and accuracy over samples; NaN is the accuracy where targets are no classes."""

    loss: float
    accuracy: float
    others: Mapping[str, float] = NOTHING
    """Further numbers by name."""


class Evaluation(Protocol):
    """Measures a model on a client's test samples."""

    model: Any
    fetches: bool
    """As :attr:`LocalProblem.fetches`."""

    def __len__(self) -> int:
        """Return the number of test samples."""

    def evaluate(self) -> Metrics:
        """Return the metrics of the model as it is."""


class LocalProblem(abc.ABC):
    """A client's model and its training samples."""

    model: Border
    evaluate_own: bool = True
    """Whether evaluation also measures the personalized model."""
    fetches: bool = False
    """Whether batches are fetched by third-party code, which may draw from any generator."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples, which is the client's weight."""

    @abc.abstractmethod
    def most_steps(self, training: LocalTraining) -> float:
        """Return the most local steps that ``training`` may take, as far as that is known."""

    def settings(self, training: LocalTraining, config: Mapping[str, Any]) -> LocalTraining:
        """Return the local settings, a request's over the client's; ``ValueError`` for bad ones."""
        return training.updated(config)

    def evaluation(self, config: Mapping[str, Any]) -> Evaluation | None:
        """Return what measures models, if the problem itself does."""
        return None
