"""The requests of several clients as one, and the steps of a stack as each client's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.base import Begun, FederatedClient
from clients.keeping import State
from clients.learning.memory import activations
from clients.learning.problem import Problem
from clients.request import Config, Received
from clients.stacking.oracle import StackOracle
from clients.stacking.plans import column
from fl_strategies.core.oracle import Solved, Step
from fl_strategies.core.records import CATCH_UP

FOR_EACH = ("acked-round", "kept-rounds", "checksums", "layout", CATCH_UP)
"""Settings that are read for each client separately, and that no rule uses."""


def stacked_steps(
    clients: Sequence[FederatedClient],
    configs: Sequence[Config],
    begun: Sequence[Begun],
    received: Received,
    memory: int,
) -> list[list[Step]]:
    """Return the steps of each client's rounds, trained as one stack.

    A forward pass over whole data sets takes at most ``memory`` bytes, a rough estimate.
    """
    first, device = clients[0], received.theta.device
    states = [one.state for one in begun]
    training = first.training.updated(configs[0])
    problems: list[Problem] = [client.problem for client in clients]  # type: ignore[misc]
    samples = memory // (2 * activations(problems[0]) * received.theta.element_size())

    def oracle(number: int, config: Config) -> StackOracle:
        pairs = zip(clients, configs, strict=True)
        rngs, seeds, streams = zip(*(c.streams(number, its) for c, its in pairs), strict=True)

        def by_purpose(purpose: str) -> list[np.random.Generator]:
            return [stream(purpose) for stream in streams]

        return StackOracle(
            problems, training, rngs, by_purpose, seeds=seeds, samples_at_once=samples
        )

    wide = Received(
        received.theta.expand(len(clients), -1),
        {name: vector.expand(len(clients), -1) for name, vector in received.extra_vectors.items()},
        _catch_ups([one.catch_up for one in begun], received.theta),
    )
    made = first.steps_made(
        _stack_of(states, device),
        wide,
        _common(configs, device),
        oracle,
    )
    return _taken_apart(made, states, received.theta)


def _common(configs: Sequence[Config], device: torch.device) -> dict[str, Any]:
    """Return one request for all: numbers that differ between clients become a column."""
    common = {name: value for name, value in configs[0].items() if name not in FOR_EACH}
    for name, value in common.items():
        if any(config[name] != value for config in configs):
            common[name] = column([config[name] for config in configs], device)
    return common


def _catch_ups(vectors: Sequence[Tensor | float], like: Tensor) -> Tensor | float:
    """Return clients' catch-up vectors, [clients, d]; 0 if none has one."""
    if not any(isinstance(one, Tensor) for one in vectors):
        return 0.0
    return torch.stack([one if isinstance(one, Tensor) else 0.0 * like for one in vectors])


def shapes_of(state: State) -> Any:
    return state and tuple(value.shape if isinstance(value, Tensor) else () for value in state)


def _stack_of(states: Sequence[State], device: torch.device) -> State:
    """Return the stack of states: vectors [clients, d], and numbers as columns."""
    if states[0] is None:
        return None
    fields = [
        torch.stack(values) if isinstance(values[0], Tensor) else column(values, device)
        for values in zip(*states, strict=True)
    ]
    return type(states[0])(*fields)


def _taken_apart(made: Sequence[Step], states: Sequence[State], like: Tensor) -> list[list[Step]]:
    """Return each client's steps, on the host; steps before the last hold only what was solved."""
    count, last = len(states), made[-1]
    solved = [_solved(step.solved, count) for step in made]
    uploads = _rows(last.upload, count, like)
    further = {name: _rows(vectors, count, like) for name, vectors in last.extra_vectors.items()}
    scalars = {name: _numbers(value, count) for name, value in last.scalars.items()}
    kept: list[State] = [None] * count
    if last.state is not None:
        fields = [
            _rows(value, count, like) if isinstance(before, Tensor)
            else [type(was)(n) for was, n in zip(befores, _numbers(value, count), strict=True)]
            for value, befores in zip(last.state, zip(*states, strict=True), strict=True)
            for before in befores[:1]
        ]  # fmt: skip
        kept = [type(last.state)(*values) for values in zip(*fields, strict=True)]
    return [
        [
            *(Step(uploads[i], solved=each[i]) for each in solved[:-1]),
            Step(
                uploads[i],
                kept[i],
                {name: values[i] for name, values in scalars.items()},
                solved[-1][i],
                {name: rows[i] for name, rows in further.items()},
            ),
        ]
        for i in range(count)
    ]


def _solved(solved: Solved | None, count: int) -> list[Any]:
    if solved is None:
        return [None] * count
    numbers = [_numbers(value, count) for value in solved[2:]]
    steps, epochs, *others = numbers
    steps = [int(n) for n in steps]
    epochs = [None if n is None else int(n) for n in epochs]
    rows = zip(steps, epochs, *others, strict=True)
    return [Solved(None, None, *row) for row in rows]


def _numbers(value: Any, count: int) -> list[Any]:
    """Return the clients' numbers, from a column or from one number for all."""
    if not isinstance(value, Tensor):
        return [value] * count
    numbers: list[Any] = value.expand(count, 1)[:, 0].tolist()
    return numbers


def _rows(vectors: Tensor, count: int, like: Tensor) -> Sequence[Tensor]:
    """Return the clients' vectors, or one vector for all, on the host and in the model's type."""
    return vectors.expand(count, -1).to("cpu", like.dtype).unbind(0)
