"""Mistakes in a client's class or arguments, or in what its rule returns, each told by its name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from clients.learning.drawn import NoFixedSamples
from clients.learning.mistakes import in_numbers
from clients.learning.objective import Objective
from fl_strategies.core.oracle import Step
from fl_strategies.core.reasons import NOT_FINITE
from fl_strategies.core.schedules import check_names, plain, require, shown
from fl_strategies.messages.codes import CODEC
from fl_strategies.solvers.local import LocalTraining

if TYPE_CHECKING:
    from clients.base import FederatedClient
    from fl_strategies import FederatedStrategy

RESERVED = (CODEC, "state-nonce", "checksums", "num-examples")
"""What clients report in addition to the metrics of their work."""


def check_kinds(problem: object, test: object, store: object, training: object) -> None:
    """Raise ``ValueError`` for an argument of another kind."""
    wanted = "an Objective, such as Problem(FlatModel(module), loss, inputs, targets)"
    require(isinstance(problem, Objective), "problem", wanted, problem)
    require(test is None or isinstance(test, Objective), "test", wanted, test)
    keeps = not isinstance(store, type) and hasattr(store, "rounds")
    wanted = "a Store, such as ContextStore(context) or DirectoryStore(path, client_id)"
    require(store is None or keeps, "store", wanted, store)
    trains = training is None or isinstance(training, LocalTraining)
    require(trains, "training", "LocalTraining(...)", training)


def check_class(cls: type[FederatedClient], *, newcomers: bool) -> None:
    """Raise ``TypeError`` for a class whose declarations would be misunderstood.

    ``newcomers`` says whether the class has a ``first_state`` for them.
    """
    check_names(cls, "extra_vectors")
    kind = cls.state_type
    if kind is not None and not hasattr(kind, "_fields"):
        raise TypeError(f"{cls.__name__}.state_type must be a NamedTuple, got {shown(kind)}")
    if kind is None and newcomers:
        raise TypeError(f"{cls.__name__} has first_state, and no state_type: the state's class")


def check_halves(client: FederatedClient, strategy: type[FederatedStrategy]) -> None:
    """Raise ``ValueError`` if an algorithm's halves declare other extra vectors."""
    ours, theirs = [*client.extra_vectors], [*strategy.extra_vectors]
    if ours != theirs:
        raise ValueError(
            f"{strategy.__name__} has extra_vectors {theirs}, and {type(client).__name__} {ours}:"
            " both halves of an algorithm declare the same"
        )


def check_returned(client: FederatedClient, step: object) -> None:
    """Raise ``TypeError`` unless ``step`` returned a ``Step``."""
    if not isinstance(step, Step):
        raise TypeError(f"{type(client).__name__}.step must return a Step, got {_kind(step)}")


def check_step(client: FederatedClient, before: Any, step: Step, rate: float) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a step that cannot be sent and kept.

    ``before`` is the state that the client had, ``rate`` its learning rate.
    """
    hook, like = f"{type(client).__name__}.step", client.problem.model.vector
    vectors, state, kind = step.extra_vectors, step.state, client.state_type
    _check_vector(f"{hook} must return an upload", step.upload, like)
    _check_finite(step.upload, client.problem, rate)
    if vectors.keys() != {*client.extra_vectors}:
        names = [*client.extra_vectors]
        raise ValueError(f"{hook} must return extra vectors {names}, got {[*vectors]}")
    for name, vector in vectors.items():
        _check_vector(f"{hook} must return an extra vector {name!r}", vector, like)
    if kind is None and state is not None:
        raise TypeError(f"{hook} returns a state, {_kind(state)}, and the class has no state_type")
    if kind is None:
        return
    if not isinstance(state, kind):
        raise TypeError(f"{hook} must return a {kind.__name__} as its state, got {_kind(state)}")
    _check_state(hook, before, state)


def check_first(client: FederatedClient, state: Any) -> None:
    """Raise ``TypeError`` unless ``first_state`` returned the ``state`` of a newcomer."""
    kind = client.state_type
    if kind is not None and state is not None and not isinstance(state, kind):
        hook = f"{type(client).__name__}.first_state"
        raise TypeError(f"{hook} must return a {kind.__name__}, got {_kind(state)}")


def _check_finite(vector: Tensor, problem: Objective, rate: float) -> None:
    """Raise ``ValueError``, which says why, if a trained vector [d] is not finite."""
    if _finite(vector):
        return
    why = f"training diverged, with lr = {rate:g}"
    try:
        why = in_numbers(*problem.whole) or why
    except NoFixedSamples:
        why += ", or samples have NaN or infinity"
    raise ValueError(f"the trained model {NOT_FINITE}: {why}")


def checked_scalars(
    client: FederatedClient, scalars: Mapping[str, Any], taken: Collection[str]
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


def _check_vector(must: str, vector: Any, like: Tensor) -> None:
    if not isinstance(vector, Tensor) or vector.shape != like.shape:
        raise TypeError(f"{must}, a tensor {[*like.shape]}, got {_kind(vector)}")


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
