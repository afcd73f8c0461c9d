"""Training several clients of one process at once, as one stack.

:func:`fit_all` does for clients of one algorithm and model what ``FederatedClient.fit`` does for
each: checks, states, rule, metrics. The clients' vectors are stacked, [clients, d], so that one
local step of all clients is one forward and one backward pass (``clients.stacking.stack``). A stack
is faster where a step of one client is too small to keep the processor busy:
``clients.stacking.choice`` says where.

Each client's upload, metrics and state are, up to rounding, those of a client that trains alone. A
client whose request fails a check fails alone; what cannot be stacked is trained alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from flwr.client import NumPyClient

from clients.any_algorithm import BUILT_IN, AnyAlgorithmClient
from clients.base import Begun, FederatedClient, Reply
from clients.learning.memory import client_bytes
from clients.learning.passes import CHUNK
from clients.request import Arrays, Config
from clients.stacking.choice import Setting, check_setting, kind_of, stacked_at
from clients.stacking.forms import form_of
from clients.stacking.masks import FurtherMasks, dropouts
from clients.stacking.means import NoMean
from clients.stacking.obstacles import obstacle
from clients.stacking.optimizers import STACKED
from clients.stacking.plans import batch_size
from clients.stacking.requests import FOR_EACH, shapes_of, stacked_steps
from fl_strategies.core.log import log_once
from fl_strategies.core.reasons import of_exception
from fl_strategies.solvers.local import LocalTraining

Outcome: TypeAlias = Reply | Exception

MEMORY = 1 << 28
"""Bytes that a stack's vectors, gradients and activations may take, a rough estimate."""

DRAWS_FURTHER = "with dropout, {} draws masks in addition to those of mini-batches"


def fit_all(
    clients: Sequence[NumPyClient],
    parameters: Arrays,
    configs: Sequence[Config],
    *,
    stack: Setting = "auto",
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
    stack : "auto", "off" or int >= 2 (default "auto")
        How many clients are stacked at most; "auto" stacks where a stack was measured to be faster
        (``clients.stacking.choice``).
    memory : int, optional
        Bytes that a stack may take, by default ``MEMORY``; more clients make several stacks.

    Raises
    ------
    ValueError
        For an unknown ``stack``.
    """
    check_setting(stack)
    outcomes: dict[int, Outcome] = {}
    groups: dict[Any, list[int]] = {}
    acting: dict[int, Member] = {}
    for number, (client, config) in enumerate(zip(clients, configs, strict=True)):
        try:
            member = _member(client, config) if stack != "off" else None
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
        made = _grouped(members, parameters, stack, memory or MEMORY)
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
    if why := _obstacle(client, training, words := _words(config)):
        log_once(f"clients are trained one by one: {why}")
        return None
    like = problem.inputs.shape[1:], problem.inputs.dtype, problem.targets.dtype  # type: ignore[attr-defined]
    return (
        type(client), problem.model, problem.loss, problem.penalty, like, training, rounds, words,
        tuple(name for name in config if name not in FOR_EACH),
    )  # fmt: skip


def _words(config: Config) -> tuple[tuple[str, str | bool], ...]:
    """Return the request's settings that are no numbers: a rule may branch on them."""
    return tuple(
        (n, v) for n, v in config.items() if n not in FOR_EACH and isinstance(v, str | bool)
    )


_DRAWING_FURTHER: set[tuple[Any, ...]] = set()
"""Classes of clients, with the words of requests, whose rules raised :class:`.FurtherMasks`."""


def _obstacle(client: FederatedClient, training: LocalTraining, words: tuple[Any, ...]) -> str:
    kind = type(client)
    if kind not in BUILT_IN and not vars(kind).get("stacks"):
        return f"{kind.__name__} does not say `stacks = True` (its rule takes [clients, d], too)"
    if training.sam:
        return "sharpness-aware minimisation does not run on stacks"
    if training.variance_reduction != "off":
        return "variance-reduced gradients do not run on stacks"
    if training.solver not in STACKED:
        return f"the solver {training.solver!r} does not run on stacks"
    if dropouts(client.problem.model.module) and (why := _draws_further(client, training, words)):
        return why
    return obstacle(client.problem, form_of(type(client)))


def _draws_further(client: FederatedClient, training: LocalTraining, words: tuple[Any, ...]) -> str:
    """Return why a client draws other masks than one for each of its mini-batches."""
    if (type(client), words) in _DRAWING_FURTHER:
        return DRAWS_FURTHER.format(client.algorithm)
    if training.solver == "delta-sgd" or training.residual is not None:
        return DRAWS_FURTHER.format(training.solver if training.residual is None else "residual")
    size = min(batch_size(training) or len(client.problem), len(client.problem))
    parts = f"with dropout, batches of more than {CHUNK} samples are computed in parts"
    return parts if size > CHUNK else ""


def _grouped(
    members: Sequence[Member], parameters: Arrays, stack: Setting, memory: int
) -> list[Outcome]:
    """Return the outcomes of clients of one kind, in stacks of clients that take similar work."""
    problem, training = members[0][0].problem, members[0][0].training.updated(members[0][1])
    model, sizes = problem.model, [len(client.problem) for client, _ in members]
    order = sorted(range(len(members)), key=lambda number: -sizes[number])
    steps = [members[number][0].most_steps(members[number][1]) for number in order]
    alone, most = stacked_at(stack, model, steps)
    how = "several at once" if alone < len(members) else "one by one"
    kind = f"{kind_of(model.module)}, d = {len(model.vector):,}, on {model.vector.device.type}"
    log_once(f"stack = {stack}: clients are trained {how} (model: {kind})")
    outcomes = {number: _alone(members[number][0], parameters, members[number][1])
                for number in order[:alone]}  # fmt: skip
    order = order[alone:]
    while order:
        size = min(batch_size(training) or sizes[order[0]], sizes[order[0]])
        largest = members[order[0]][0]
        further = form_of(type(largest)).bytes_of(largest.problem)
        count = max(1, min(most, memory // (sum(client_bytes(problem, int(size))) + further)))
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
            alike.setdefault(shapes_of(begun[number].state), []).append(number)
        except Exception as error:
            outcomes[number] = error
    for numbers in alike.values():
        some, starts = [members[n] for n in numbers], [begun[n] for n in numbers]
        trained, asked = [client for client, _ in some], [config for _, config in some]
        try:
            steps = stacked_steps(trained, asked, starts, received, memory)
        except Exception as error:
            log_once(f"clients are trained one by one: {_why_alone(error, *some[0])}")
            outcomes |= {n: _alone(members[n][0], parameters, members[n][1]) for n in numbers}
            continue
        for number, (client, config), made in zip(numbers, some, steps, strict=True):
            try:
                outcomes[number] = client.finished(begun[number], made, config)
            except Exception as error:
                outcomes[number] = error
    return [outcomes[number] for number in range(len(members))]


def _why_alone(error: Exception, client: FederatedClient, config: Config) -> str:
    """Return why a stack failed; note rules that dropout keeps from being stacked."""
    if isinstance(error, FurtherMasks):
        _DRAWING_FURTHER.add((type(client), _words(config)))
        return DRAWS_FURTHER.format(client.algorithm)
    return str(error) if isinstance(error, NoMean) else of_exception(error)
