"""Measuring models on a client's test samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clients.learning.model import FlatModel
from clients.learning.objective import Metrics, Objective
from clients.learning.replay import kept_generators, seed_generators
from clients.request import Arrays
from fl_strategies.solvers.local import LocalTraining


@dataclass(frozen=True)
class Rest:
    """A model's arrays that are not in its vector: received ``parameters``, and ``own`` arrays."""

    parameters: Arrays
    own: Mapping[str, npt.NDArray[Any]] | None

    def load(self, model: FlatModel, w: Tensor) -> None:
        """Put these arrays and ``w`` [d] into the model."""
        model.load(self.parameters)
        model.load_kept(self.own)
        model.vector.copy_(w)


def measured(test: Objective, rest: Rest, w: Tensor) -> Metrics:
    """Return loss and accuracy of ``w`` [d] on ``test``."""
    rest.load(test.model, w)
    return test.evaluate()


def named(models: Mapping[str, Metrics]) -> dict[str, float]:
    """Return ``own-loss``, ``own-accuracy`` and so on of models by their names.

    What is NaN is dropped, but for losses.
    """
    losses = {f"{name}-loss": metrics.loss for name, metrics in models.items()}
    shares = {
        f"{name}-{which}": share
        for name, metrics in models.items()
        for which, share in [("accuracy", metrics.accuracy), *metrics.others.items()]
    }
    return losses | {name: share for name, share in shares.items() if not math.isnan(share)}


def fine_tuned(
    problem: Objective,
    rest: Rest,
    w: Tensor,
    training: LocalTraining,
    rng: np.random.Generator,
) -> tuple[Rest, Tensor]:
    """Return ``rest`` and ``w`` [d] after one gradient step of both on one mini-batch.

    Of ``rest``, trained arrays are stepped that are the client's own. torch's generators stay as
    they were.
    """
    model, d = problem.model, len(w)
    batch_size = 0 if training.full_batch else training.batch_size
    rest.load(model, w)
    model.module.train()
    with kept_generators([w]):
        seed_generators(int(rng.integers(2**63)), w.device)
        problem.gradient(*next(problem.batches(rng, batch_size)))
    rate = training.rate if training.fine_tune_lr is None else training.fine_tune_lr
    step = rate * (model.trained_gradient + training.ridge * model.trained)
    model.load_kept(rest.own)  # running statistics are not trained
    model.trained[d:] -= step[d:]
    return Rest(rest.parameters, model.kept_arrays()), w - step[:d]
