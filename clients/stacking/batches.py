"""Which mini-batches the clients of a stack take: each draws what it would draw alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from clients.learning.loop import planned, precise
from clients.stacking.stack import Batches, Numbers, Stack
from fl_strategies.solvers.local import LocalTraining

Generators: TypeAlias = Sequence[np.random.Generator]


class Plan(NamedTuple):
    """The steps that clients take in a solve.

    ``batches`` hold mini-batches [steps, clients, b], or [1, clients, b] where all steps use the
    same; ``sizes`` [steps or 1, clients] are their sizes. A client has ``epochs`` of ``per_epoch``
    steps each (the last may be shorter), and ``steps`` in total.
    """

    batches: Batches
    sizes: Numbers
    epochs: Numbers
    per_epoch: Numbers
    steps: Numbers


def plan(stack: Stack, training: LocalTraining, rngs: Generators) -> Plan:
    """Return each client's plan, drawn from its generator as if it trained alone."""
    epochs, per_epoch, steps = _planned(stack.sizes, training, rngs)
    each = zip(rngs, stack.sizes.tolist(), epochs.tolist(), strict=True)
    size, whole = batch_size(training), int(stack.sizes.max())
    orders = [_orders(rng, samples, size, count) for rng, samples, count in each]
    if size == 0 or size >= whole:
        orders, size = [of_client[:1] for of_client in orders], whole
    numbers, sizes = laid_out(orders, stack.sizes, size)
    return Plan(stack.batches(numbers, sizes), sizes, epochs, per_epoch, steps)


class Feed:
    """Endless mini-batches of every client, one epoch after another."""

    def __init__(self, stack: Stack, training: LocalTraining, rngs: Generators) -> None:
        self._stack, pairs = stack, zip(rngs, stack.sizes.tolist(), strict=True)
        _, _, self.steps = _planned(stack.sizes, training, rngs)
        self._of_each = [_endless(rng, samples, batch_size(training)) for rng, samples in pairs]

    def __next__(self) -> tuple[Batches, Numbers]:
        """Return the next mini-batches, and their sizes [clients]."""
        drawn = [next(batches) for batches in self._of_each]
        sizes: Numbers = np.array([len(samples) for samples in drawn])
        numbers = np.zeros((len(drawn), sizes.max()), np.int64)
        numbers[np.arange(sizes.max()) < sizes[:, None]] = np.concatenate(drawn)
        return self._stack.batches(numbers, sizes), sizes


def _endless(rng: np.random.Generator, samples: int, size: int) -> Iterator[Numbers]:
    """Yield the samples of a client's mini-batches, one epoch after another."""
    while True:
        (order,) = _orders(rng, samples, size, 1)
        yield from np.split(order, range(size, samples, size) if size else [])


def column(values: npt.ArrayLike, device: torch.device) -> Any:
    """Return the clients' numbers as a column in double precision, or one number if all agree."""
    numbers = np.asarray(values)
    first = numbers.flat[0]
    if (numbers == first).all():
        return first.item()
    return precise(torch.from_numpy(numbers.reshape(-1, 1)).to(device))


def batch_size(training: LocalTraining) -> int:
    """Return the size of mini-batches, 0 for the full batch."""
    return 0 if training.full_batch else training.batch_size


def _planned(
    sizes: Numbers, training: LocalTraining, rngs: Generators
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the clients' epochs, the mini-batches in each, and the clients' steps."""
    size = batch_size(training)
    per_epoch = -(-sizes // size) if size else np.ones_like(sizes)
    pairs = zip(rngs, per_epoch.tolist(), strict=True)
    epochs, limits = np.array([planned(training, batches, rng) for rng, batches in pairs]).T
    return epochs, per_epoch, np.where(limits > 0, limits, epochs * per_epoch)


def _orders(rng: np.random.Generator, samples: int, size: int, epochs: int) -> list[Numbers]:
    """Return the orders in which a client visits its samples, drawn as ``batches`` draws them."""
    if size == 0 or size >= samples:
        return [np.arange(samples)] * epochs
    return [rng.permutation(samples) for _ in range(epochs)]


def laid_out(
    orders: Sequence[Sequence[Numbers]], sizes: Numbers, size: int
) -> tuple[Numbers, Numbers]:
    """Return mini-batches [steps, clients, b] of the clients' epochs, and how many samples count.

    Clients with fewer steps have empty mini-batches at the end.
    """
    per_epoch = -(-sizes // size)
    ends = per_epoch * [len(epochs) for epochs in orders]
    steps = np.arange(ends.max())
    in_batch = np.minimum(size, sizes[:, None] - size * (steps % per_epoch[:, None]))
    counts = np.where(steps < ends[:, None], in_batch, 0)
    samples = np.zeros((*counts.shape, size), np.int64)
    drawn = np.concatenate([order for epochs in orders for order in epochs])
    samples[np.arange(size) < counts[..., None]] = drawn
    return samples.swapaxes(0, 1), counts.T
