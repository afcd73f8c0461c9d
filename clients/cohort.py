"""Training several clients of one process at once, as one stack.

:func:`fit_cohort` does for clients of one algorithm and model what ``FederatedClient.fit`` does for
each: checks, states, rule, metrics. The clients' vectors are stacked, [clients, d], so that one
local step of all clients is one forward and one backward pass (``clients.learning.stack``). A stack
is faster where a step of one client is too small to keep the processor busy:
``clients.learning.choice`` says where.

Each client's upload, metrics and state are, up to rounding, those of a client that trains alone. A
client whose request fails a check fails alone; what cannot be stacked is trained alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import Tensor

from clients.any_algorithm import CLIENTS, AnyAlgorithmClient
from clients.base import Begun, FederatedClient, Reply
from clients.keeping import State
from clients.learning.choice import Setting, check_setting, kind_of, say_once, stacked_at
from clients.learning.cohort import CohortOracle
from clients.learning.masks import dropouts
from clients.learning.means import NoMean
from clients.learning.objective import CHUNK
from clients.learning.plans import batch_size, column
from clients.learning.problem import Problem
from clients.learning.room import client_bytes
from clients.learning.stack import activations
from clients.learning.stacked import STACKED
from clients.request import Arrays, Config, Received
from fl_strategies.core.local import LocalTraining
from fl_strategies.core.oracle import Solved, Step
from fl_strategies.core.reasons import of_exception
from fl_strategies.core.records import MISSED

Outcome: TypeAlias = Reply | Exception

MEMORY = 1 << 28
"""Bytes that a stack's vectors, gradients and activations may take, a rough estimate."""

OWN = ("acked-round", "kept-rounds", "checksums", "layout", MISSED)
"""Settings that are read for each client separately, and that no rule uses."""


def fit_cohort(
    clients: Sequence[NumPyClient],
    parameters: Arrays,
    configs: Sequence[Config],
    *,
    cohort: Setting = "auto",
    memory: int | None = None,
) -> list[Outcome]:
    """Return what ``client.fit(parameters, config)`` returns or raises, for each client.

    Parameters
    ----------
    clients : sequence of NumPyClient
        Clients of our algorithms that share a model are stacked; other clients are trained alone.
    parameters : list of arrays
        The request's arrays, the same for all clients.
    configs : sequence of dict
        The config of each client.
    cohort : "auto", "off" or int >= 2 (default "auto")
        How many clients are stacked at most; "auto" stacks where a stack was measured to be faster
        (``clients.learning.choice``).
    memory : int, optional
        Bytes that a stack may take, by default ``MEMORY``; more clients make several stacks.

    Raises
    ------
    ValueError
        For an unknown ``cohort``.
    """
    check_setting(cohort)
    outcomes: dict[int, Outcome] = {}
    groups: dict[Any, list[int]] = {}
    acting: dict[int, Member] = {}
    for number, (client, config) in enumerate(zip(clients, configs, strict=True)):
        try:
            member = _member(client, config) if cohort != "off" else None
            key = member and _kind(*member)
            if not member or not key:
                outcomes[number] = _alone(client, parameters, config)
                continue
            member[0].check(member[1])
            acting[number] = member
            groups.setdefault(key, []).append(number)
        except Exception as error:
            outcomes[number] = error
    for numbers in groups.values():
        members = [acting[number] for number in numbers]
        made = _grouped(members, parameters, cohort, memory or MEMORY)
        outcomes |= zip(numbers, made, strict=True)
    return [outcomes[number] for number in range(len(clients))]


Member: TypeAlias = tuple[FederatedClient, Config]


def _member(client: NumPyClient, config: Config) -> Member | None:
    """Return the client of the request's algorithm, and the request with our keys.

    None for a client that is not from this package.
    """
    if isinstance(client, AnyAlgorithmClient):
        return client.acting(config)
    return (client, config) if isinstance(client, FederatedClient) else None


def _alone(client: NumPyClient, parameters: Arrays, config: Config) -> Outcome:
    try:
        return client.fit(parameters, dict(config))
    except Exception as error:
        return error


def _kind(client: FederatedClient, config: Config) -> Any:
    """Return what the clients of one stack share; None for a client that is trained alone."""
    problem = client.problem
    training, rounds = client.training.updated(config), tuple(client.rounds(config))
    if why := _obstacle(client, training):
        say_once(f"clients are trained one by one: {why}")
        return None
    words = tuple((n, v) for n, v in config.items() if n not in OWN and isinstance(v, str | bool))
    like = problem.inputs.shape[1:], problem.inputs.dtype, problem.targets.dtype  # type: ignore[attr-defined]
    return (
        type(client), problem.model, problem.loss, problem.penalty, like, training, rounds, words,
        tuple(name for name in config if name not in OWN),
    )  # fmt: skip


def _obstacle(client: FederatedClient, training: LocalTraining) -> str:
    if CLIENTS.get(client.algorithm) is not type(client):
        return f"{type(client).__name__} is not one of the algorithms that were tried on stacks"
    if training.solver not in STACKED:
        return f"the solver {training.solver!r} does not run on stacks"
    if dropouts(client.problem.model.module) and (why := _draws_further(client, training)):
        return f"with dropout, {why}"
    return client.obstacle()


def _draws_further(client: FederatedClient, training: LocalTraining) -> str:
    """Return why a client draws other masks than one for each of its mini-batches."""
    if not client.only_solves:
        return f"{client.algorithm} draws masks beside those of mini-batches"
    if training.solver == "delta-sgd" or training.residual is not None:
        what = "residual" if training.residual is not None else training.solver
        return f"{what} draws masks beside those of mini-batches"
    size = min(batch_size(training) or len(client.problem), len(client.problem))
    return f"batches of more than {CHUNK} samples are computed in parts" if size > CHUNK else ""


def _grouped(
    members: Sequence[Member], parameters: Arrays, cohort: Setting, memory: int
) -> list[Outcome]:
    """Return the outcomes of clients of one kind, in stacks of clients that take similar work."""
    problem, training = members[0][0].problem, members[0][0].training.updated(members[0][1])
    model, sizes = problem.model, [len(client.problem) for client, _ in members]
    order = sorted(range(len(members)), key=lambda number: -sizes[number])
    steps = [members[number][0].most_steps(members[number][1]) for number in order]
    alone, most = stacked_at(cohort, model, steps)
    how = "several at once" if alone < len(members) else "one by one"
    kind = f"{kind_of(model.module)}, d = {len(model.vector):,}, on {model.vector.device.type}"
    say_once(f"cohort = {cohort}: clients are trained {how} (model: {kind})")
    outcomes = {number: _alone(members[number][0], parameters, members[number][1])
                for number in order[:alone]}  # fmt: skip
    order = order[alone:]
    while order:
        size = min(batch_size(training) or sizes[order[0]], sizes[order[0]])
        each = sum(client_bytes(problem, int(size))) + members[order[0]][0].stacked_bytes()
        count = max(1, min(most, memory // each))
        numbers, order = order[:count], order[count:]
        some = [members[number] for number in numbers]
        outcomes |= zip(numbers, _stacked(some, parameters, memory), strict=True)
    return [outcomes[number] for number in range(len(members))]


def _stacked(members: Sequence[Member], parameters: Arrays, memory: int) -> list[Outcome]:
    """Return the outcomes of clients that are trained as one stack.

    If the stack fails, say at an operator without a rule for stacks, each client is trained alone.
    """
    if len(members) < 2:
        return [_alone(client, parameters, config) for client, config in members]
    outcomes: dict[int, Outcome] = {}
    begun: dict[int, Begun] = {}
    alike: dict[Any, list[int]] = {}
    try:
        received = members[0][0].received(parameters)
    except Exception:
        return [_alone(client, parameters, config) for client, config in members]
    for number, (client, config) in enumerate(members):
        try:
            begun[number] = client.begun(received, config)
            alike.setdefault(_shapes(begun[number].state), []).append(number)
        except Exception as error:
            outcomes[number] = error
    for numbers in alike.values():
        some = [members[number] for number in numbers]
        try:
            steps = _steps(some, [begun[number] for number in numbers], received, memory)
        except Exception as error:
            why = str(error) if isinstance(error, NoMean) else of_exception(error)
            say_once(f"clients are trained one by one: {why}")
            outcomes |= {n: _alone(members[n][0], parameters, members[n][1]) for n in numbers}
            continue
        for number, (client, config), made in zip(numbers, some, steps, strict=True):
            try:
                outcomes[number] = client.finished(begun[number], made, config)
            except Exception as error:
                outcomes[number] = error
    return [outcomes[number] for number in range(len(members))]


def _steps(
    members: Sequence[Member], begun: Sequence[Begun], received: Received, memory: int
) -> list[list[Step]]:
    """Return the steps of each client's rounds."""
    clients, configs = [c for c, _ in members], [c for _, c in members]
    first, device = clients[0], received.theta.device
    states = [one.state for one in begun]
    training = first.training.updated(configs[0])
    problems: list[Problem] = [client.problem for client in clients]  # type: ignore[misc]
    samples = memory // (2 * activations(problems[0]) * received.theta.element_size())

    def oracle(number: int, config: Config) -> CohortOracle:
        pairs = zip(clients, configs, strict=True)
        rngs, seeds, streams = zip(*(c.streams(number, own) for c, own in pairs), strict=True)

        def by_purpose(purpose: str) -> list[np.random.Generator]:
            return [stream(purpose) for stream in streams]

        return CohortOracle(
            problems, training, rngs, by_purpose, seeds=seeds, samples_at_once=samples
        )

    wide = Received(
        received.theta.expand(len(clients), -1),
        {name: vector.expand(len(clients), -1) for name, vector in received.beside.items()},
        _missed([one.missed for one in begun], received.theta),
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
    common = {name: value for name, value in configs[0].items() if name not in OWN}
    for name, value in common.items():
        if any(config[name] != value for config in configs):
            common[name] = column([config[name] for config in configs], device)
    return common


def _missed(missed: Sequence[Tensor | float], like: Tensor) -> Tensor | float:
    """Return what clients missed, [clients, d]; 0 if none missed anything."""
    if not any(isinstance(one, Tensor) for one in missed):
        return 0.0
    return torch.stack([one if isinstance(one, Tensor) else 0.0 * like for one in missed])


def _shapes(state: State) -> Any:
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
    uploads = _rows(last.upload, like)
    beside = {name: _rows(vectors, like) for name, vectors in last.beside.items()}
    scalars = {name: _numbers(value, count) for name, value in last.scalars.items()}
    kept: list[State] = [None] * count
    if last.state is not None:
        fields = [
            _rows(value, like) if isinstance(before, Tensor)
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
                {name: rows[i] for name, rows in beside.items()},
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
    found: list[Any] = value.expand(count, 1)[:, 0].tolist()
    return found


def _rows(vectors: Tensor, like: Tensor) -> Sequence[Tensor]:
    """Return the clients' vectors, on the host and in the model's type."""
    return vectors.expand(-1, -1).to("cpu", like.dtype).unbind(0)
