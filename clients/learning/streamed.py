"""A loss over a ``torch.utils.data`` Dataset or DataLoader as a function of the model's vector."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from clients.learning.model import FlatModel
from clients.learning.objective import Loss, Measure, Objective, Penalty
from clients.learning.passes import TESTED, Batch
from clients.learning.problem import check_made_of
from clients.learning.samples import (
    Randomness,
    as_targets,
    as_tensor,
    fetching,
    formatted,
    items,
    of_loader,
    parted,
)
from fl_strategies.core.spelling import hinted
from fl_strategies.solvers.local import LocalTraining

T = TypeVar("T")


@hinted
class StreamedProblem(Objective):
    """f(w) = mean loss over samples that are fetched, and perhaps augmented, for each mini-batch.

    A batch is either a tuple or list, or a mapping such as a Hugging Face Dataset or a tokenizer
    makes. The last item of a tuple or list is the targets, and the module is called with the items
    before it. In a mapping, ``target`` names the targets. The module is called with the rest by
    name where its ``forward`` takes all of them by name; else it gets the only tensor among them by
    position. Tensors are moved to the model's device; floating-point ones get the model's type.

    Fetching may draw from the global generators of torch, NumPy and Python's ``random``: for
    augmentation, shuffling, the seeds of a DataLoader's workers. These draws derive from the
    client's random stream, and the generators are left as they were.

    What needs the same samples twice is refused: full gradients (and ``residual``, FedPDVR,
    SCAFFOLD's option I), draws with replacement, and MOON, which passes each sample through three
    models.

    Parameters
    ----------
    model, loss, penalty, autocast, metrics
        As of :class:`.Objective`.
    data : Dataset or DataLoader
        The local settings say how a map-style Dataset is cut into mini-batches. A DataLoader makes
        them itself: ``batch-size`` must be the DataLoader's. A Hugging Face Dataset without a
        format gets that of tensors, unless ``collate`` is given.
    samples : int, optional
        The number of samples, which is the client's weight; by default those that the DataLoader's
        sampler takes in an epoch. Needed where the data have no length.
    target : str, optional
        Key of the targets, where a batch is a mapping; by default the only one of ``label``,
        ``labels``, ``target``, ``targets`` and ``y`` that it has.
    collate : callable, optional
        Makes a batch from a list of a Dataset's items; by default torch's ``default_collate``.

    Raises
    ------
    ValueError
        For data without samples, for data that are no Dataset, or for an iterable Dataset without a
        DataLoader. When a batch is made: if it does not say which of it are inputs and targets.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        data: Any,
        *,
        samples: int | None = None,
        target: str | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        penalty: Penalty | None = None,
        autocast: torch.dtype | None = None,
        metrics: Measure | None = None,
    ) -> None:
        check_made_of(model, loss)
        super().__init__(model, loss, penalty=penalty, autocast=autocast, metrics=metrics)
        if isinstance(data, Tensor | np.ndarray | tuple | Mapping):
            raise ValueError(
                f"data must be a Dataset or DataLoader, got {type(data).__name__}: of arrays make a"
                " Problem(model, loss, inputs, targets)"
            )
        if not isinstance(data, DataLoader) and (
            isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
        ):
            raise ValueError(
                f"data of the type {type(data).__name__} need a DataLoader, which makes their"
                " mini-batches"
            )
        self.data = formatted(data) if collate is default_collate else data
        self.target, self.collate = target, collate
        of = data.dataset if isinstance(data, DataLoader) else data
        if samples is None:
            if not hasattr(of, "__len__"):
                raise ValueError(f"samples must be given: a {type(of).__name__} has no length")
            sampler: Any = getattr(data, "sampler", None)  # of a subset, or of so many draws
            samples = len(sampler if hasattr(sampler, "__len__") else of)
        if samples < 1:
            raise ValueError(
                f"a problem needs a sample at least, got {samples}: of a client without test"
                " samples, test=None"
            )
        self.samples = samples
        self._classifies: bool | None = None

    def __len__(self) -> int:
        return self.samples

    @property
    def classifies(self) -> bool:
        if self._classifies is None:
            _, targets = next(self._fetched(0, range(1), 1))
            self._classifies = not targets.is_floating_point()
        return self._classifies

    def batches(self, rng: np.random.Generator, batch_size: int) -> Iterator[Batch]:
        if isinstance(self.data, DataLoader):
            self._check_size(batch_size)
            yield from self._fetched(int(rng.integers(2**63)), (), 0)
            return
        whole = batch_size == 0 or batch_size >= len(self)
        order = range(len(self)) if whole else rng.permutation(len(self)).tolist()
        seed = int(rng.integers(2**63))
        yield from self._fetched(seed, order, len(self) if whole else batch_size)

    def chunks(self) -> Iterator[Batch]:
        yield from self._fetched(0, range(len(self)), TESTED)

    def planned(self, training: LocalTraining) -> int:
        if not isinstance(self.data, DataLoader):
            return super().planned(training)
        self._check_size(0 if training.full_batch else training.batch_size)
        try:
            return len(self.data)
        except TypeError:  # of an iterable Dataset
            return math.ceil(self.samples / (self.data.batch_size or 1))

    def most_steps(self, training: LocalTraining) -> float:
        if not isinstance(self.data, DataLoader):
            return super().most_steps(training)
        steps = training.steps or training.epochs * self.planned(training)
        return replace(training, steps=steps, random_steps=False).most_steps(len(self))

    def _check_size(self, batch_size: int) -> None:
        assert isinstance(self.data, DataLoader)
        own = self.data.batch_size
        if batch_size == 0 or (own is not None and batch_size != own):
            asked = batch_size or "the full batch"
            raise ValueError(
                "a DataLoader makes its own mini-batches: local['batch-size'] must be"
                f" {own}, got {asked}"
            )

    def _fetched(self, seed: int, order: Sequence[int], batch_size: int) -> Iterator[Batch]:
        """Yield the batches of an epoch; a DataLoader has its own order."""
        if isinstance(self.data, DataLoader):
            randomness, loader = of_loader(seed, self.data), self.data
            batches: Iterator[Any] = randomness.during(lambda: iter(loader))
        else:
            data, collate, randomness = self.data, self.collate, Randomness(seed)
            starts = range(0, len(order), batch_size)
            batches = (collate(items(data, order[s : s + batch_size])) for s in starts)
        for number in itertools.count():
            batch = fetching(lambda: randomness.during(lambda: next(batches, None)))
            if batch is None:
                if number == 0:
                    raise ValueError(f"the {type(self.data).__name__} has no samples")
                return
            yield self._placed(batch)

    def _placed(self, batch: Any) -> Batch:
        inputs, targets = parted(batch, self.target, self.model.module)
        if isinstance(inputs, Mapping):
            inputs = {name: self._moved(value) for name, value in inputs.items()}
        else:
            several = isinstance(inputs, tuple)
            inputs = tuple(map(self._moved, inputs)) if several else self._moved(inputs)
        return inputs, as_targets(targets, self.loss, self.model.vector)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            value = as_tensor("a batch", value)
        if not isinstance(value, Tensor):
            return value
        like = self.model.vector
        return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
