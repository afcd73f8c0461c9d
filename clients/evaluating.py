"""Measuring models on a client's test samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clients.learning.border import Border
from clients.learning.data import Batch
from clients.learning.local_problem import Evaluation, Metrics
from clients.learning.problem import Problem, into_training
from clients.learning.replay import drawing_from
from clients.request import Arrays
from fl_strategies.solvers.local import LocalTraining


@dataclass(frozen=True)
class OtherArrays:
    """A model's arrays that are not in its vector: received ``parameters``, and ``own`` arrays."""

    parameters: Arrays
    own: Mapping[str, npt.NDArray[Any]] | None

    def load(self, model: Border, w: Tensor) -> None:
        """Put these arrays and ``w`` [d] into the model."""
        model.take(self.parameters)
        model.load_kept(self.own)
        model.write(w)


def measured(test: Evaluation, rest: OtherArrays, w: Tensor, rng: np.random.Generator) -> Metrics:
    """Return loss and accuracy of ``w`` [d] on ``test``.

    A model that draws when it is evaluated (a VAE, dropout that stays on) draws by ``rng``. torch's
    generators stay as they were.
    """
    rest.load(test.model, w)
    with drawing_from(rng, w, everywhere=test.fetches):
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
    problem: Problem,
    rest: OtherArrays,
    w: Tensor,
    training: LocalTraining,
    rng: np.random.Generator,
) -> tuple[OtherArrays, Tensor]:
    """Return ``rest`` and ``w`` [d] after gradient steps of both: one, or ``fine_tune_epochs``.

    Of ``rest``, trained arrays are stepped that are the client's own. torch's generators stay as
    they were.
    """
    model = problem.model
    rate = training.rate if training.fine_tune_lr is None else training.fine_tune_lr
    rest.load(model, w)
    into_training(model.module)
    with drawing_from(rng, w, everywhere=problem.fetches):
        for batch in tuning_batches(problem, training, rng):
            problem.gradient(batch)
            with torch.no_grad():
                pairs = zip(model.trained, model.gradients(model.trained), strict=True)
                for parameter, slope in pairs:
                    parameter.sub_(rate * (slope + training.ridge * parameter))
    own = [parameter.detach().clone() for parameter in model.own]
    model.load_kept(rest.own)  # running statistics are not trained
    with torch.no_grad():
        for parameter, value in zip(model.own, own, strict=True):
            parameter.copy_(value)
    return OtherArrays(rest.parameters, model.kept_arrays()), model.vector


def tuning_batches(
    problem: Problem, training: LocalTraining, rng: np.random.Generator
) -> Iterator[Batch]:
    """Yield the mini-batches of ``fine_tune_epochs``, the first one alone if these are 0."""
    batch_size = 0 if training.full_batch else training.batch_size
    for _ in range(training.fine_tune_epochs):
        yield from problem.data.batches(rng, batch_size)
    if not training.fine_tune_epochs:
        yield next(problem.data.batches(rng, batch_size))
