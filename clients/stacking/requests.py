"""The requests of several clients as one, and the steps of a stack as each client's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clients.base import FederatedClient, Start
from clients.keeping import State
from clients.learning.problem import Problem
from clients.request import Config, Received
from clients.stacking.batches import column
from clients.stacking.oracle import StackOracle
from fl_strategies.core.oracle import Solved, Step
from fl_strategies.core.records import CATCH_UP
from fl_strategies.solvers.local import LocalTraining

FOR_EACH = ("acked-round", "kept-rounds", "checksums", "layout", CATCH_UP)
"""Settings that are read for each client separately, and that no rule uses."""


class Member(NamedTuple):
    """A client of the request's algorithm, its place among the clients, and its request."""

    place: int
    client: FederatedClient
    config: Config
    training: LocalTraining


def stacked_steps(
    members: Sequence[tuple[Member, Start]], received: Received, samples_at_once: int
) -> list[list[Step]]:
    """Return the steps of each client's rounds, trained as one stack.

    ``samples_at_once`` is as of :class:`.Stack`.
    """
    _, clients, configs, trainings = zip(*(member for member, _ in members), strict=True)
    first, like, count = clients[0], received.theta, len(clients)
    states = [begun.state for _, begun in members]
    problems: list[Problem] = [client.problem for client in clients]

    def oracle(number: int, config: Config) -> StackOracle:
        pairs = zip(clients, configs, strict=True)
        rngs, _, streams = zip(*(c.streams(number, its) for c, its in pairs), strict=True)

        def by_purpose(purpose: str) -> list[np.random.Generator]:
            return [stream(purpose) for stream in streams]

        return StackOracle(
            problems, trainings[0], rngs, by_purpose, samples_at_once=samples_at_once
        )

    wide = Received(
        like.expand(count, -1),
        {name: vector.expand(count, -1) for name, vector in received.extra_vectors.items()},
        _catch_ups([begun.catch_up for _, begun in members], like),
    )
    made = first.steps_made(
        _stack_of(states, like.device), wide, _common(configs, like.device), oracle
    )
    return _taken_apart(made, states, like)


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
    uploads, kept = _rows(last.upload, count, like), _states(last.state, states, like)
    further = {name: _rows(vectors, count, like) for name, vectors in last.extra_vectors.items()}
    scalars = {name: _numbers(value, count) for name, value in last.scalars.items()}
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


def _states(stacked: State, before: Sequence[State], like: Tensor) -> list[State]:
    """Return the clients' states, whose numbers have the types that they had ``before``."""
    if stacked is None:
        return [None] * len(before)
    fields: list[Sequence[Any]] = []
    for value, were in zip(stacked, zip(*before, strict=True), strict=True):
        if isinstance(were[0], Tensor):
            fields.append(_rows(value, len(before), like))
        else:
            numbers = zip(were, _numbers(value, len(before)), strict=True)
            fields.append([type(was)(number) for was, number in numbers])
    return [type(stacked)(*values) for values in zip(*fields, strict=True)]


def _solved(solved: Solved | None, count: int) -> list[Any]:
    """Return what each client's solver reports, without its iterates."""
    if solved is None:
        return [None] * count
    steps, epochs, *others = (_numbers(value, count) for value in solved[2:])
    steps = [int(n) for n in steps]
    epochs = [None if n is None else int(n) for n in epochs]
    return [Solved(None, None, *row) for row in zip(steps, epochs, *others, strict=True)]


def _numbers(value: Any, count: int) -> list[Any]:
    """Return the clients' numbers, from a column or from one number for all."""
    if not isinstance(value, Tensor):
        return [value] * count
    numbers: list[Any] = value.expand(count, 1)[:, 0].tolist()
    return numbers


def _rows(vectors: Tensor, count: int, like: Tensor) -> Sequence[Tensor]:
    """Return the clients' vectors, or one vector for all, on the host and in the model's type."""
    return vectors.expand(count, -1).to("cpu", like.dtype).unbind(0)
