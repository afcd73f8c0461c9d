"""Mistakes in a client's class or arguments, or in what its rule returns, each told by its name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from clients.learning.border import Border
from clients.learning.data import Batch, NoFixedSamples
from clients.learning.local_problem import LocalProblem
from clients.learning.problem import Problem
from clients.node.state import DirectoryStore
from fl_strategies import STRATEGIES, FederatedStrategy
from fl_strategies.core.oracle import Step
from fl_strategies.core.reasons import NOT_FINITE
from fl_strategies.core.schedules import check, check_names, plain, require, shown
from fl_strategies.messages.heeding import IN_TRAINING
from fl_strategies.solvers.local import LocalTraining
from fl_strategies.solvers.own_steps import check_only_fine_tuning

RESERVED = (*IN_TRAINING, "state-nonce", "num-examples")
"""What clients report in addition to the metrics of their work."""
OF_CLIENT = ("algorithm", "layout", "device", "clipping-norm")
"""What they say of themselves."""


class Client(Protocol):
    """What a client's class declares, and the problem that it trains."""

    algorithm: ClassVar[str]
    state_type: ClassVar[Any]
    extra_vectors: ClassVar[tuple[str, ...]]
    problem: LocalProblem

    def settings(self, config: Mapping[str, Any]) -> LocalTraining:
        """Return how a request has the client train."""


def check_id(client_id: Any, store: object) -> None:
    """Raise ``ValueError`` for an id that is none, or a store of another client."""
    check("client_id", client_id, low=0, integer=True)
    if isinstance(store, DirectoryStore) and store.client_id != client_id:
        raise ValueError(f"store is of client {store.client_id}, client_id is {client_id}")


def check_data(problem: LocalProblem, test: Problem | None, training: object) -> None:
    """Raise ``ValueError`` for a ``test`` of another module, or a ``training`` without effect."""
    require(hasattr(problem, "model"), "problem", "a Problem or an OwnTraining", problem)
    same = test is None or test.model.module is problem.model.module
    require(same, "test", "of the problem's module", "another module")
    if training is not None and not isinstance(problem, Problem):
        raise ValueError(
            "training says how a Problem is trained; a loop of one's own says it itself"
        )


def check_class(cls: type[Client], *, newcomers: bool) -> None:
    """Raise ``TypeError`` for a class whose declarations would be misunderstood.

    ``newcomers`` says whether the class has a ``first_state`` for them.
    """
    check_names(cls, "extra_vectors")
    if cls.state_type is None and newcomers:
        raise TypeError(f"{cls.__name__} has first_state, and no state_type: the state's class")


def check_halves(client: Client, strategy: type[FederatedStrategy]) -> None:
    """Raise ``ValueError`` if an algorithm's halves declare other extra vectors."""
    ours, theirs = [*client.extra_vectors], [*strategy.extra_vectors]
    if ours != theirs:
        raise ValueError(
            f"{strategy.__name__} has extra_vectors {theirs}, and {type(client).__name__} {ours}:"
            " both halves of an algorithm declare the same"
        )


def check_no_training(algorithm: str, training: LocalTraining, request: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a client is told how to train whose algorithm runs no solver."""
    check_only_fine_tuning(algorithm, request)
    if decay := training.weight_decay:
        raise ValueError(f"{algorithm} has no weight decay: weight_decay must be 0, got {decay}")


def check_step(client: Client, before: Any, step: Step, request: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a step that cannot be sent and kept.

    ``before`` is the state that the client had.
    """
    hook, model = f"{type(client).__name__}.step", client.problem.model
    vectors, state, kind = step.extra_vectors, step.state, client.state_type
    _check_vector(f"{hook} must return an upload", step.upload, model)
    if not _finite(step.upload):
        raise ValueError(f"the trained model {NOT_FINITE}: {_why(client, request)}")
    if vectors.keys() != {*client.extra_vectors}:
        names = [*client.extra_vectors]
        raise ValueError(f"{hook} must return extra vectors {names}, got {[*vectors]}")
    for name, vector in vectors.items():
        _check_vector(f"{hook} must return an extra vector {name!r}", vector, model)
    if kind is None and state is not None:
        raise TypeError(f"{hook} returns a state, {_kind(state)}, and the class has no state_type")
    if kind is None:
        return
    if not isinstance(state, kind):
        raise TypeError(f"{hook} must return a {kind.__name__} as its state, got {_kind(state)}")
    _check_state(hook, before, state)


def check_first(client: Client, state: Any) -> None:
    """Raise ``TypeError`` unless ``first_state`` returned the ``state`` of a newcomer."""
    kind = client.state_type
    if kind is not None and state is not None and not isinstance(state, kind):
        hook = f"{type(client).__name__}.first_state"
        raise TypeError(f"{hook} must return a {kind.__name__}, got {_kind(state)}")


def _why(client: Client, request: Mapping[str, Any]) -> str:
    """Return why a trained vector is not finite."""
    why, problem = "training diverged", client.problem
    if getattr(STRATEGIES.get(client.algorithm), "uses_local", True):
        why += f", with lr = {client.settings(request).rate:g}"
    if not isinstance(problem, Problem):
        return why
    try:
        return not_finite(problem.data.whole) or why
    except NoFixedSamples:
        return f"{why}, or samples have NaN or infinity"


def not_finite(batch: Batch) -> str:
    """Return in how many samples there are numbers that are not finite; "" for none."""
    for name, value in (("inputs", batch.inputs), ("targets", batch.targets)):
        bad = int((~value.isfinite()).reshape(len(value), -1).any(1).sum())
        if bad:
            return f"{name} have NaN or infinity in {bad} of {len(value)} samples"
    return ""


def check_reported(algorithm: str, steps: Sequence[Step]) -> None:
    """Raise ``ValueError`` if a training loop of one's own reports a number by a name of ours."""
    for step in steps:
        ours = {*RESERVED, *OF_CLIENT, *step.scalars}
        reported = {} if step.solved is None else step.solved.metrics
        if clash := sorted(ours & reported.keys()):
            raise ValueError(
                f"train must not return numbers {clash}, which the client of {algorithm} reports"
            )


def checked_scalars(
    client: Client, scalars: Mapping[str, Any], taken: Collection[str]
) -> dict[str, int | float]:
    """Return the numbers that a step returned; raise for a text, a vector or a ``taken`` name."""
    hook = f"{type(client).__name__}.step"
    if clash := sorted(scalars.keys() & {*taken, *RESERVED}):
        raise ValueError(f"{hook} must not return scalars {clash}, which the client itself reports")
    numbers = {
        name: value.item() if isinstance(value, Tensor) and value.ndim == 0 else plain(value)
        for name, value in scalars.items()
    }
    for name, number in numbers.items():
        if not isinstance(number, int | float):
            raise TypeError(f"{hook} must return a number as {name!r}, got {_kind(scalars[name])}")
    return numbers


def _check_vector(must: str, vector: Any, model: Border) -> None:
    if not isinstance(vector, Tensor) or vector.shape != (model.size,):
        raise TypeError(f"{must}, a tensor {[model.size]}, got {_kind(vector)}")


def _check_state(hook: str, before: Any, state: Any) -> None:
    """Raise for a state that cannot be kept: each field is a number, or a tensor of one shape.

    A tensor may be empty while there is nothing to keep.
    """
    must = f"{hook} must return a state whose"
    for name, value in zip(state._fields, state, strict=True):
        if not isinstance(value, Tensor | np.ndarray | np.generic | int | float):
            raise TypeError(f"{must} {name} is a tensor or a number, got {_kind(value)}")
        was = value if before is None else getattr(before, name)
        if np.shape(value) != np.shape(was) and 0 not in np.shape(value) + np.shape(was):
            kept = _kind(was) if np.shape(was) else "a number"
            raise ValueError(f"{must} {name} is {kept}, as before, got {_kind(value)}")
        if not _finite(value):
            raise ValueError(f"{hook} returns a state whose {name} {NOT_FINITE}")


def _finite(value: Any) -> bool:
    """Return whether a vector is finite; a number may be infinite."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    flat = value.reshape(-1)
    # a finite sum of squares has finite parts only; that of finite parts may overflow
    return math.isfinite(flat.dot(flat)) or bool(flat.isfinite().all())


def _kind(value: Any) -> str:
    """Return what ``value`` is, for messages: alike for all clients that make one mistake."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "a NumPy array"
        return f"{kind} {[*value.shape]}"
    plain_value = value is None or isinstance(value, str | int | float)
    return shown(value) if plain_value else f"a {type(value).__name__}"
