"""Which mini-batches the clients of a stack take: each draws what it would draw alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from clients.learning.solvers import planned, precise
from clients.stacking.stack import Batches, Numbers, Stack
from fl_strategies.solvers.local import LocalTraining

Generators: TypeAlias = Sequence[np.random.Generator]


class Plan(NamedTuple):
    """The steps that clients take in a solve.

    ``batches`` hold mini-batches [steps, clients, b], or [1, clients, b] where all steps use the
    same; ``sizes`` [steps or 1, clients] are their sizes. A client has ``epochs`` of ``per_epoch``
    steps each (the last may be shorter), and ``steps`` in total. Where a client may stop early,
    ``states`` are the states of its generator after each epoch's order was drawn.
    """

    batches: Batches
    sizes: Numbers
    epochs: Numbers
    per_epoch: Numbers
    steps: Numbers
    states: list[list[Any]]


def column(values: npt.ArrayLike, device: torch.device) -> Any:
    """Return the clients' numbers as a column in double precision, or one number if all agree."""
    numbers = np.asarray(values)
    first = numbers.flat[0]
    if (numbers == first).all():
        return first.item()
    placed = torch.from_numpy(numbers.reshape(-1, 1)).to(device)
    return precise(placed)


def batch_size(training: LocalTraining) -> int:
    """Return the size of mini-batches, 0 for the full batch."""
    return 0 if training.full_batch else training.batch_size


def batches_per_epoch(sizes: Numbers, training: LocalTraining) -> Numbers:
    """Return how many mini-batches the clients' epochs have."""
    size = batch_size(training)
    return -(-sizes // size) if size else np.ones_like(sizes)


def drawn_orders(rng: np.random.Generator, samples: int, size: int, epochs: int) -> list[Numbers]:
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
    epochs = np.array([len(each) for each in orders])
    steps, width = int((per_epoch * epochs).max()), min(size, int(sizes.max()))
    samples = np.zeros((len(sizes), steps, width), np.int64)
    counts = np.zeros((len(sizes), steps), np.int64)
    # where each sample of each epoch goes: client, step and place in the batch as one number
    owner = np.repeat(np.arange(len(sizes)), epochs)
    epoch = np.concatenate([np.arange(e) for e in epochs])
    lengths = sizes[owner]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first = np.repeat(owner * steps + epoch * per_epoch[owner], lengths)
    step = first + within // size
    samples.reshape(-1)[step * width + within % size] = np.concatenate(
        [order for each in orders for order in each]
    )
    counts.reshape(-1)[:] = np.bincount(step, minlength=counts.size)
    return samples.swapaxes(0, 1), counts.T


def plan(stack: Stack, training: LocalTraining, rngs: Generators) -> Plan:
    """Return each client's plan, drawn from its generator as if it trained alone."""
    size, per_epoch = batch_size(training), batches_per_epoch(stack.sizes, training)
    orders: list[list[Numbers]] = []
    limits: list[int] = []
    states: list[list[Any]] = []
    for rng, samples, batches in zip(rngs, stack.sizes.tolist(), per_epoch.tolist(), strict=True):
        count, limit = planned(training, batches, rng)
        limits.append(limit or count * batches)
        if training.residual is None:
            orders.append(drawn_orders(rng, samples, size, count))
            continue
        states.append([])
        orders.append([])
        for _ in range(count):
            orders[-1] += drawn_orders(rng, samples, size, 1)
            states[-1].append(rng.bit_generator.state)
    epochs: Numbers = np.array([len(each) for each in orders])
    whole = int(stack.sizes.max())
    if size == 0 or size >= whole:
        orders, size = [each[:1] for each in orders], whole
    numbers, sizes = laid_out(orders, stack.sizes, size)
    return Plan(stack.batches(numbers, sizes), sizes, epochs, per_epoch, np.array(limits), states)
