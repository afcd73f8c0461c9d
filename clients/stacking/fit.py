"""Training several clients of one process at once, as one stack.

:func:`fit_all` does for clients of one algorithm and model what ``FederatedClient.fit`` does for
each: checks, states, rule, metrics. The clients' vectors are stacked, [clients, d], so that one
local step of all clients is one forward and one backward pass (``clients.stacking.stack``). A stack
is faster where a step of one client is too small to keep the processor busy:
``clients.stacking.choice`` says where.

Each client's upload, metrics and state are, up to rounding, those of a client that trains alone. A
client whose request fails a check fails alone; what cannot be stacked
(``clients.stacking.stackable``) is trained alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from flwr.client import NumPyClient

from clients.any_algorithm import AnyAlgorithmClient
from clients.base import FederatedClient, Reply, Start
from clients.learning.memory import client_bytes
from clients.request import Arrays, Config
from clients.stacking.batches import batch_size
from clients.stacking.choice import Setting, check_setting, kind_of, stacked_at
from clients.stacking.requests import FOR_EACH, Member, stacked_steps
from clients.stacking.stackable import obstacle
from fl_strategies.core.log import log_once
from fl_strategies.core.oracle import Step
from fl_strategies.core.reasons import of_exception

Outcome: TypeAlias = Reply | Exception

MEMORY = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Bytes that a stack's vectors, gradients and activations may take by device, a rough estimate. On
a processor stacks of up to 256 MB gained nothing more."""


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
        Bytes that a stack may take, by default its device's in ``MEMORY``; more clients make
        several stacks.

    Raises
    ------
    ValueError
        For an unknown ``stack``.
    """
    check_setting(stack)
    outcomes: dict[int, Outcome] = {}
    groups: dict[Any, list[Member]] = {}
    for place, (client, config) in enumerate(zip(clients, configs, strict=True)):
        try:
            member = _member(place, client, config) if stack != "off" else None
            if member is None:
                outcomes[place] = _alone(client, parameters, config)
                continue
            member.client.check(member.config)
            groups.setdefault(_kind(member), []).append(member)
        except Exception as error:
            outcomes[place] = error
    for members in groups.values():
        outcomes |= _grouped(members, parameters, stack, memory)
    return [outcomes[place] for place in range(len(clients))]


def _member(place: int, client: NumPyClient, config: Config) -> Member | None:
    """Return the client of the request's algorithm, and the request with our keys.

    None for a client that is trained alone.
    """
    acting: NumPyClient = client
    if isinstance(client, AnyAlgorithmClient):
        acting, config = client.acting(config)
    if not isinstance(acting, FederatedClient):
        return None
    training = acting.settings(config)
    if why := obstacle(acting, training):
        log_once(f"clients are trained one by one: {why}")
        return None
    return Member(place, acting, config, training)


def _kind(member: Member) -> Any:
    """Return what the clients of one stack share."""
    _, client, config, training = member
    problem: Any = client.problem
    held, border = problem.tensors, problem.model
    like = held.inputs.shape[1:], held.inputs.dtype, held.targets.dtype
    words = [(n, v) for n, v in config.items() if n not in FOR_EACH and isinstance(v, str | bool)]
    names = [name for name in config if name not in FOR_EACH]
    return (
        type(client), border.module, border.signature, id(problem.loss), id(problem.penalty), like,
        training, tuple(client.rounds(config)), tuple(words), tuple(names),
    )  # fmt: skip


def _alone(client: NumPyClient, parameters: Arrays, config: Config) -> Outcome:
    try:
        return client.fit(parameters, dict(config))
    except Exception as error:
        return error


def _grouped(
    members: Sequence[Member], parameters: Arrays, stack: Setting, memory: int | None
) -> dict[int, Outcome]:
    """Return the outcomes of clients of one kind, in stacks of clients that take similar work."""
    members = sorted(members, key=lambda member: -len(member.client.problem))
    try:
        alone, count, samples_at_once = _sizes(members, stack, memory)
    except Exception as error:  # of a model that fails at a sample
        _say_alone(error)
        alone, count, samples_at_once = len(members), 1, 1
    outcomes = {m.place: _alone(m.client, parameters, m.config) for m in members[:alone]}
    for start in range(alone, len(members), count):
        outcomes |= _stacked(members[start : start + count], parameters, samples_at_once)
    return outcomes


def _sizes(members: Sequence[Member], stack: Setting, memory: int | None) -> tuple[int, int, int]:
    """Return how many clients to train alone, how many to stack, and the samples in a pass."""
    problem: Any = members[0].client.problem  # the largest
    model, training = problem.model, members[0].training
    steps = [member.client.most_steps(member.config) for member in members]
    alone, most = stacked_at(stack, model, steps)
    how = "several at once" if alone < len(members) else "one by one"
    kind = f"{kind_of(model.module)}, d = {model.size:,}, on {model.device.type}"
    log_once(f"stack = {stack}: clients are trained {how} (model: {kind})")
    vectors, of_sample = client_bytes(problem, 1)
    samples = min(batch_size(training) or len(problem), len(problem))
    memory = memory or MEMORY["cpu" if model.device.type == "cpu" else "cuda"]
    return alone, max(1, min(most, memory // (vectors + samples * of_sample))), memory // of_sample


def _say_alone(error: Exception) -> None:
    log_once(f"clients are trained one by one: {of_exception(error)}")


def _stacked(
    members: Sequence[Member], parameters: Arrays, samples_at_once: int
) -> dict[int, Outcome]:
    """Return the outcomes of clients that are trained as one stack.

    If the stack fails, say at one client's samples, each of its clients is trained alone.
    """
    outcomes: dict[int, Outcome] = {}
    try:
        received = members[0].client.received(parameters)
    except Exception as error:  # which all have, as they share the model
        return {member.place: error for member in members}
    begun: list[tuple[Member, Start]] = []
    for member in members:
        try:
            start = member.client.begun(received, member.config, member.training)
            begun.append((member, start))
        except Exception as error:
            outcomes[member.place] = error
    steps: list[list[Step]] = []
    if len(begun) > 1:
        try:
            steps = stacked_steps(begun, received, samples_at_once)
        except Exception as error:
            _say_alone(error)
    if not steps:
        return outcomes | {m.place: _alone(m.client, parameters, m.config) for m, _ in begun}
    for (member, start), made in zip(begun, steps, strict=True):
        try:
            outcomes[member.place] = member.client.finished(start, made, member.config)
        except Exception as error:
            outcomes[member.place] = error
    return outcomes
