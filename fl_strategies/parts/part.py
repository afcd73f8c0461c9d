"""A part: what is added to an algorithm, at one stage of a round.

A part is declared like a strategy: its hyperparameters, each once, and what it ``needs`` of the
algorithm. A strategy refuses a part whose needs the algorithm does not fill, when it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

from fl_strategies.core.hyperparameters import Declared
from fl_strategies.core.schedules import shown
from fl_strategies.core.settings_text import format_params


class Rule(Protocol):
    """What a part asks of an algorithm (``fl_strategies.server.algorithm``)."""

    @property
    def averages(self) -> str: ...
    @property
    def model_from_state(self) -> bool: ...
    @property
    def chooses_clients(self) -> bool: ...
    @property
    def overlaps(self) -> bool: ...
    @property
    def needs_everyone(self) -> bool: ...
    @property
    def counts_time(self) -> bool: ...
    @property
    def compresses(self) -> bool: ...
    @property
    def equal_weights(self) -> bool: ...
    @property
    def takes_late_changes(self) -> bool: ...
    @property
    def accumulates_changes(self) -> bool: ...
    @property
    def needs_exact_model(self) -> bool: ...
    def proximal_rate(self, server_round: int) -> float | None: ...


class Need(NamedTuple):
    """What a part needs of an algorithm."""

    holds: Callable[[Rule], bool]
    """Whether the algorithm fills the need."""
    why: str
    """Why the part does not work with the others, with ``{rule}`` for the algorithm's class."""
    instead: str
    """What to use in its place."""


FREE_MODEL = Need(
    lambda rule: not rule.model_from_state,
    "{rule} computes each next model from what the server keeps, and not from the last model: the"
    " next round would take the step back",
    "FedADMM with a number for eta, or an algorithm that steps from the last model",
)
MEAN_OF_MODELS = Need(
    lambda rule: rule.averages == "models",
    "{rule} does not take the mean of uploaded models, which this part's formula is of",
    "FedAvg, FedProx or another algorithm that averages models",
)


class Part(Declared):
    """Base of all parts. Two parts are equal if they are of one class and have equal values."""

    name: ClassVar[str]
    """Name by which run-configs and commands know the part."""
    stage: ClassVar[str]
    """The stage of a round at which it stands, which is also its option of every strategy.

    ``BFloat16`` goes to a second one, ``download``."""
    about: ClassVar[str]
    """What it does, in one line."""
    paper: ClassVar[str]
    needs: ClassVar[tuple[Need, ...]] = ()
    """What it asks of an algorithm, at its own stage, and ``needs_elsewhere`` at a second one."""
    needs_elsewhere: ClassVar[tuple[Need, ...]] = ()

    @classmethod
    def refusal(cls, rule: Rule, called: str, stage: str = "") -> str:
        """Return why the part does not work with ``rule``, ``called`` so; "" if it does."""
        for need in cls.needs if stage in ("", cls.stage) else cls.needs_elsewhere:
            if not need.holds(rule):
                return f"{need.why.format(rule=called)}; use {need.instead}"
        return ""

    @property
    def values(self) -> dict[str, Any]:
        """The hyperparameters that are not at their default."""
        every = {name: getattr(self, name) for name in self.declarations}
        return {n: value for n, value in every.items() if value != self.declarations[n].default}

    def __str__(self) -> str:
        """Return the part as run-configs have it: ``adam lr=0.01``."""
        return f"{self.name} {format_params(self.values)}".strip()

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={shown(value)}" for name, value in self.values.items())
        return f"{type(self).__name__}({given})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))
