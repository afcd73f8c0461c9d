"""A client's training or test samples, as mini-batches.

Tensors are cut by index, which is fast; a Dataset or DataLoader is iterated as PyTorch does.
"""

from __future__ import annotations

import abc
import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from clients.learning.border import Border
from clients.learning.replay import kept_generators, seed_everywhere
from fl_strategies.solvers.local import LocalTraining

Inputs: TypeAlias = Any
"""What the module is called with: one tensor, a tuple of arguments, or a dict of them by name."""

TARGETS = ("label", "labels", "target", "targets", "y")
"""Keys of a mapping that may be its targets."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
"""Types of stored inputs that the module gets as int64."""
TESTED = 250
"""Samples per forward pass without a gradient: on a CPU more are slower, and need more memory."""
BLOCK = 1 << 20
"""Bytes of inputs that a CPU gathers at a time: about what its cache holds."""
AHEAD = 1 << 16
"""Sample numbers that are drawn at a time, if they belong to several draws."""


class NoFixedSamples(ValueError):
    """Raised when something needs the same samples twice, and the data are drawn anew each time."""


@contextmanager
def fixed_samples(need: str) -> Iterator[None]:
    """Have the text of :class:`NoFixedSamples` begin with who has this ``need``."""
    try:
        yield
    except NoFixedSamples as error:
        raise NoFixedSamples(f"{need}: {error}") from None


class Batch(NamedTuple):
    """A mini-batch: what the module gets, what the loss gets, and how many samples it has."""

    inputs: Inputs
    targets: Any
    samples: int

    def copy(self) -> Batch:
        """Return a copy, for a pass before another one: modules may write into what they get."""

        def copied(value: Any) -> Any:
            return value.clone() if isinstance(value, Tensor) else value

        inputs, targets = tree_map(copied, (self.inputs, self.targets))
        return Batch(inputs, targets, self.samples)

    def pieces(self, size: int) -> Iterator[Batch]:
        """Yield the batch in even pieces of at most ``size`` samples; 0 is no limit.

        Raises ``ValueError`` unless all inputs and targets are tensors with a row for each sample.
        """
        count = math.ceil(self.samples / size) if size else 1
        if count == 1:
            yield self
            return
        both = self.inputs, self.targets
        if not all(isinstance(x, Tensor) and len(x) == self.samples for x in tree_leaves(both)):
            raise ValueError(
                f"micro_batch = {size} cuts tensors with a row for each sample, and a batch has"
                " other inputs or targets"
            )
        for rows in torch.arange(self.samples).tensor_split(count):
            x, y = tree_map(itemgetter(slice(int(rows[0]), int(rows[-1]) + 1)), both)
            yield Batch(x, y, len(rows))


class Samples(abc.ABC):
    """The samples of a problem."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples, which is the client's weight."""

    @abc.abstractmethod
    def batches(self, rng: np.random.Generator, batch_size: int) -> Iterator[Batch]:
        """Yield one epoch of mini-batches in an order drawn from ``rng``; size 0 is the full batch.

        The last batch holds the remaining samples, at least one.
        """

    @abc.abstractmethod
    def chunks(self) -> Iterator[Batch]:
        """Yield all samples, in their order, in pieces."""

    @property
    def whole(self) -> Batch:
        """All samples as one batch; raises :class:`NoFixedSamples` where there is none."""
        raise NoFixedSamples("a Dataset or DataLoader gives no fixed samples, tensors do")

    def draws(self, rng: np.random.Generator, samples: int) -> Iterator[Batch]:
        """Yield endless batches of ``samples`` samples, drawn with replacement."""
        raise NoFixedSamples(
            "from a Dataset or DataLoader none can be drawn, from tensors they can"
        )

    def leaving_no_trace(self) -> AbstractContextManager[None]:
        """Return the context to fetch samples in, which undoes what that draws of generators."""
        return nullcontext()

    def settings(self, training: LocalTraining, config: Mapping[str, Any]) -> LocalTraining:
        """Return the local settings, a request's over the client's."""
        return training.updated(config)

    def per_epoch(self, training: LocalTraining) -> int:
        """Return how many mini-batches ``training`` makes of an epoch."""
        return training.batches(len(self))


class Tensors(Samples):
    """Samples in ``inputs`` [n, ...] and ``targets`` [n, ...], all or those in ``rows`` [k].

    Modules get copies of them, so that none can change what is stored.
    """

    def __init__(self, model: Border, inputs: Any, targets: Any, rows: Any = None) -> None:
        inputs, targets = torch.as_tensor(inputs), torch.as_tensor(targets)
        rows = None if rows is None else torch.as_tensor(rows)
        if len(inputs) == 0 or len(inputs) != len(targets) or (rows is not None and not len(rows)):
            chosen = "" if rows is None else f" with {len(rows)} rows"
            raise ValueError(
                "a problem needs as many inputs as targets and at least one,"
                f" got {len(inputs)} and {len(targets)}{chosen}"
            )
        self.inputs: Tensor = placed(inputs, model)
        self.targets: Tensor = placed(targets, model)
        if not (self.targets.is_floating_point() or self.targets.is_complex()):
            self.targets = self.targets.long()
        self.rows: Tensor | None = None if rows is None else rows.to(model.device)

    def __len__(self) -> int:
        return len(self.inputs if self.rows is None else self.rows)

    @property
    def whole(self) -> Batch:
        if self.rows is not None:
            return self.at(self.rows)
        return Batch(widened(self.inputs.clone()), self.targets.clone(), len(self))

    def batches(self, rng: np.random.Generator, batch_size: int) -> Iterator[Batch]:
        samples = len(self)
        if batch_size == 0 or batch_size >= samples:
            yield self.whole
            return
        order = torch.from_numpy(rng.permutation(samples)).to(self.inputs.device)
        if self.rows is not None:
            order = self.rows[order]
        for block in torch.split(order, self._at_once(batch_size)):
            inputs, targets, count = self.at(block)
            for start in range(0, count, batch_size):
                end = min(start + batch_size, count)
                yield Batch(inputs[start:end], targets[start:end], end - start)

    def draws(self, rng: np.random.Generator, samples: int) -> Iterator[Batch]:
        for block in self.drawn(rng, samples):
            drawn = torch.from_numpy(block).to(self.inputs.device)
            yield from map(self.at, drawn if self.rows is None else self.rows[drawn])

    def drawn(self, rng: np.random.Generator, samples: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield, without end, sample numbers [draws, samples] for several :meth:`draws` at once."""
        shape = max(1, min(64, AHEAD // samples)), samples
        for _ in itertools.count():
            yield rng.integers(len(self), size=shape)

    def chunks(self) -> Iterator[Batch]:
        device = self.inputs.device
        rows = torch.arange(len(self), device=device) if self.rows is None else self.rows
        yield from map(self.at, torch.split(rows, TESTED))

    def at(self, rows: Tensor) -> Batch:
        """Return the samples in these rows."""
        inputs = widened(gathered(self.inputs, rows))
        return Batch(inputs, self.targets.index_select(0, rows), len(rows))

    def _at_once(self, batch_size: int) -> int:
        """Return how many samples to gather at a time: whole batches; on a GPU all batches."""
        if self.inputs.device.type != "cpu":
            return len(self)
        each: int = self.inputs[0].numel() * self.inputs.element_size() * batch_size
        return batch_size * max(1, BLOCK // max(each, 1))


class Counted(NamedTuple):
    """What a DataLoader's collate function made of so many samples."""

    samples: int
    batch: Any


class Counting:
    """A DataLoader's collate function that also counts the samples."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, items: Any) -> Counted:
        return Counted(len(items), self.collate(items))


class Fetched(Samples):
    """Samples of a Dataset or DataLoader, fetched, and perhaps augmented, for each mini-batch.

    The local settings say how a Dataset is cut into mini-batches; a DataLoader makes its own. What
    fetching draws from the generators of torch, NumPy and Python is seeded by the client's stream.
    """

    def __init__(
        self, model: Border, data: Any, *, samples: int | None, target: str | None
    ) -> None:
        self._model, self._target = model, target
        self._loader: DataLoader[Any] | None = None
        if isinstance(data, DataLoader):
            self._loader = copy.copy(data)
            if data.batch_sampler is not None:
                self._loader.collate_fn = Counting(data.collate_fn)
            streams = isinstance(data.dataset, IterableDataset)
            of: Any = data.dataset if streams else sampler_of_batches(data)
        elif hasattr(data, "__getitem__") and not isinstance(
            data, Tensor | np.ndarray | IterableDataset
        ):
            of = self._data = _formatted(data)
        else:
            kind = "an iterable" if isinstance(data, IterableDataset) else "data without targets"
            raise ValueError(
                "data must be inputs and targets, a Dataset with a length, or a DataLoader, got"
                f" {kind}: {type(data).__name__}"
            )
        if samples is None:
            if not hasattr(of, "__len__"):
                kind = type(data).__name__
                raise ValueError(f"samples must be given: the {kind} does not say how many it has")
            samples = len(of)
        if samples < 1:
            raise ValueError(f"a problem needs a sample at least, got {samples}")
        self._samples: int = samples

    def __len__(self) -> int:
        return self._samples

    def batches(self, rng: np.random.Generator, batch_size: int) -> Iterator[Batch]:
        if self._loader is not None:
            self._seed(int(rng.integers(2**63)))
            yield from self._from(self._loader)
            return
        whole = batch_size == 0 or batch_size >= len(self)
        order = [*range(len(self))] if whole else rng.permutation(len(self)).tolist()
        self._seed(int(rng.integers(2**63)))
        yield from self._in_order(order, len(self) if whole else batch_size)

    def chunks(self) -> Iterator[Batch]:
        self._seed(0)
        if self._loader is not None:
            yield from self._from(self._loader)
        else:
            yield from self._in_order([*range(len(self))], TESTED)

    def leaving_no_trace(self) -> AbstractContextManager[None]:
        return kept_generators(self._model.shared[:1], everywhere=True)

    def settings(self, training: LocalTraining, config: Mapping[str, Any]) -> LocalTraining:
        """As of the base; a DataLoader's batch size is its own, whatever the client's default is.

        Raises ``ValueError`` for a request for other mini-batches than the DataLoader's.
        """
        settings = training.updated(config)
        if self._loader is None:
            return settings
        own, asked = self._loader.batch_size, config.get("batch-size")
        if settings.full_batch or asked not in (None, own):
            raise ValueError(
                f"a DataLoader makes its own mini-batches, here of batch_size = {own}, and local"
                f" asks for {asked or 'the full batch'}: leave batch-size out, or give a Dataset"
            )
        return replace(settings, batch_size=own) if own else settings

    def per_epoch(self, training: LocalTraining) -> int:
        if self._loader is None:
            return super().per_epoch(training)
        try:
            return len(self._loader)
        except TypeError:  # of an iterable Dataset
            batches = self._samples / (self._loader.batch_size or 1)
            return max(1, int(batches) if self._loader.drop_last else math.ceil(batches))

    def _seed(self, seed: int) -> None:
        """Seed all generators that fetching may draw from, a DataLoader's own too."""
        seed_everywhere(seed)
        loader = self._loader
        for owner in (loader, getattr(loader, "sampler", None), sampler_of_batches(loader)):
            if (generator := getattr(owner, "generator", None)) is not None:
                generator.manual_seed(seed)

    def _in_order(self, order: list[int], size: int) -> Iterator[Batch]:
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        loader: DataLoader[Any] = DataLoader(self._data, batch_sampler=batches)
        loader.collate_fn = Counting(loader.collate_fn)
        return self._from(loader)

    def _from(self, loader: DataLoader[Any]) -> Iterator[Batch]:
        none = True
        for got in loader:
            none = False
            batch = got.batch if isinstance(got, Counted) else got
            inputs, targets = parted(batch, self._target, self._model.module)
            inputs, targets = placed((inputs, targets), self._model)
            if isinstance(got, Counted):
                samples = got.samples
            else:
                samples = len(next(x for x in tree_leaves(inputs) if isinstance(x, Tensor)))
            yield Batch(inputs, targets, samples)
        if none:
            why = "drop_last leaves none" if loader.drop_last else "it has no samples"
            raise ValueError(f"no mini-batch comes of the {type(loader.dataset).__name__}: {why}")


class OneBatch(Samples):
    """The samples of one mini-batch, as all that there are."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.samples

    @property
    def whole(self) -> Batch:
        return self._batch.copy()

    def batches(self, rng: np.random.Generator, batch_size: int) -> Iterator[Batch]:
        yield self.whole

    def chunks(self) -> Iterator[Batch]:
        yield self.whole


def sampler_of_batches(loader: Any) -> Any:
    """Return what a DataLoader's batch sampler takes samples from; None if it does not say it."""
    return getattr(getattr(loader, "batch_sampler", None), "sampler", None)


def samples_of(
    model: Border, data: Any, targets: Any, *, rows: Any, samples: int | None, target: str | None
) -> Samples:
    """Return the samples in ``data``, as :class:`.Problem` takes them."""
    if targets is not None:
        return Tensors(model, data, targets, rows)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, tuple | Mapping):
        inputs, targets = parted(data, target, model.module)
        if isinstance(inputs, Mapping) and len(inputs) == 1:
            (inputs,) = inputs.values()
        if isinstance(inputs, tuple | Mapping):
            raise ValueError(
                f"data have {len(inputs)} inputs: give a Dataset of them, such as"
                " torch.utils.data.StackDataset"
            )
        return Tensors(model, inputs, targets, rows)
    if rows is not None:
        raise ValueError("rows choose samples of tensors: of a Dataset, Subset(data, rows) does")
    return Fetched(model, data, samples=samples, target=target)


def parted(batch: Any, target: str | None, module: nn.Module) -> tuple[Inputs, Any]:
    """Return inputs and targets of a batch: a mapping, or a tuple or list that ends with targets.

    In a mapping, ``target`` is the key of the targets; None stands for the only one of
    :data:`TARGETS` that there is. The module gets the rest by name, and the targets too where its
    ``forward`` has an argument of their name; one tensor that it does not take by name, by its
    place.
    """
    if not isinstance(batch, Mapping):
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise ValueError(
                "a batch must be a mapping, or a tuple or list of inputs and targets, got"
                f" {type(batch).__name__}: an autoencoder has its inputs as targets, too"
            )
        *inputs, targets = batch
        alone = len(inputs) == 1 and not isinstance(inputs[0], Mapping | tuple)
        return (inputs[0] if alone else tuple(inputs)), targets
    found = [name for name in TARGETS if name in batch] if target is None else [target]
    if len(found) != 1 or found[0] not in batch:
        raise ValueError(
            f"a batch has {[*batch]}, and of targets {found}: name them by target=..., by default"
            f" the only one of {', '.join(TARGETS)}"
        )
    try:
        takes = {*inspect.signature(module.forward).parameters}
    except (TypeError, ValueError):  # a scripted module
        takes = set()
    named = {n: value for n, value in batch.items() if n not in found or n in takes}
    tensors = [value for value in named.values() if isinstance(value, Tensor | np.ndarray)]
    if not named.keys() <= takes and len(tensors) == 1:
        return tensors[0], batch[found[0]]
    return named, batch[found[0]]


def placed(values: Any, model: Border) -> Any:
    """Return values with their tensors on the model's device, floats in the model's type."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)

    return moved(values) if isinstance(values, Tensor) else tree_map(moved, values)


def gathered(inputs: Tensor, rows: Tensor) -> Tensor:
    """Return these rows of stored inputs; images that lie channels-last stay so."""
    channels_last = inputs.dim() == 4 and not inputs.is_contiguous()
    if channels_last and inputs.is_contiguous(memory_format=torch.channels_last):
        return inputs.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return inputs.index_select(0, rows)


def widened(inputs: Tensor) -> Tensor:
    """Return stored inputs as modules get them: small integers as int64."""
    return inputs.long() if inputs.dtype in INTEGERS else inputs


def _formatted(data: Any) -> Any:
    """Return ``data``; a Hugging Face Dataset that has no format yet, with that of tensors."""
    made = getattr(data, "format", None)
    plain = isinstance(made, Mapping) and "type" in made and made["type"] is None
    return data.with_format("torch") if plain and hasattr(data, "with_format") else data
