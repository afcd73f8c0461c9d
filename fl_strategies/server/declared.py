"""What a strategy's class declares: checked when the class is defined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fl_strategies.core.hyperparameters import Hyperparameter
from fl_strategies.core.records import CATCH_UP
from fl_strategies.core.schedules import check_names
from fl_strategies.messages.codes import CHANGES, CODEC, DOWNLOAD
from fl_strategies.messages.description import DESCRIBE
from fl_strategies.server.stages import described
from fl_strategies.solvers.local import default_training

if TYPE_CHECKING:
    from fl_strategies.server.algorithm import Algorithm

KEYS = frozenset(
    {
        "algorithm", "run-id", "server-round", "round", "acked-round", "kept-rounds", "seed",
        "layout", "frozen", "checksums", "clipping-norm", "secure-range", "secure-max-weight",
        "secure-alike", CATCH_UP, CODEC, CHANGES, DOWNLOAD, DESCRIBE,
    }
)  # fmt: skip
"""Keys of a request that say no hyperparameter."""
OWN = frozenset(
    {
        "state", "parts", "ledger", "nodes", "run", "sender", "reader", "phases", "caller", "model",
    }
)  # fmt: skip
"""Attributes that every strategy sets itself."""


def check_declared(cls: type, declarations: Mapping[str, Hyperparameter]) -> None:
    """Raise ``TypeError`` for a declaration that would be misunderstood or overwritten."""
    for attribute in ("extra_vectors", "reports"):
        check_names(cls, attribute)
    taken = dict.fromkeys(KEYS, "the run itself")
    taken |= dict.fromkeys(default_training().settings, "a setting of `local`")
    for name, declaration in declarations.items():
        if whose := _owner(cls, name):
            raise TypeError(f"{cls.__name__}.{name} is {whose}: choose another name")
        if not (key := declaration.sent):
            continue
        told = f"{cls.__name__}.{name} is sent as {key!r}"
        if "_" in key:
            raise TypeError(f"{told}, and clients read {key.replace('_', '-')!r}: send it as that")
        if key in taken:
            raise TypeError(f"{told}, which requests use for {taken[key]}: choose another key")
        taken[key] = f"the hyperparameter {name!r}"


def check_built(strategy: Algorithm) -> None:
    """Raise for a class that says no ``algorithm``, and for hosts that must fold in vain."""
    if not getattr(strategy, "algorithm", ""):
        says = "must say its name, by which clients know it"
        raise TypeError(f'{type(strategy).__name__} {says}: algorithm = "..."')
    if strategy.fold == "on" and not strategy.can_fold:
        raise ValueError(
            f'fold must be "auto" or "off" for {described(strategy)}, which needs each upload, got'
            ' "on"'
        )


def _owner(cls: type, name: str) -> str:
    """Return what else ``name`` is, if a class of an algorithm declares it; "" if nothing."""
    owners = [base for base in cls.__mro__ if name in vars(base)]
    ours = [base for base in owners if base.__module__.startswith("fl_strategies.server.")]
    if name == "num_clients" or owners[:1] == ours[:1]:
        return ""
    if name in OWN:
        return "an attribute of every strategy"
    if not ours:
        return ""
    option = isinstance(vars(ours[0])[name], Hyperparameter)
    return "an option of every strategy" if option else "a hook or attribute of every strategy"
