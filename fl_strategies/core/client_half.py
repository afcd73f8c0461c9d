"""What an algorithm's clients do: the rule, and what a client must know to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from fl_strategies.core.oracle import Step

Request: TypeAlias = Mapping[str, Any]
"""What a request says, by kebab-case keys."""


class ClientHalf(NamedTuple):
    """What an algorithm's clients do: a strategy declares it as ``client_half``.

    ``rule`` and ``first_state`` get their arguments after ``*`` by name: a vector that came with
    the model (``extra_vectors``, ``catch_up``, ``for_client``), a hyperparameter that is ``sent``,
    or else what the request says under that name in kebab-case. An argument with a default may be
    missing from the request, unless the strategy declares it as a hyperparameter.
    """

    rule: Callable[..., Step]
    """``rule(state, theta, oracle, *, ...)``; ``rule(theta, oracle, *, ...)`` without a state."""
    state: type[NamedTuple] | None = None
    """The named tuple of vectors and numbers that a client keeps, if it keeps anything."""
    first_state: Callable[..., Any] | None = None
    """``first_state(theta, *, ...)`` returns the state of a client that has never taken part."""
    own: str = ""
    """The field of the state that is the client's personalized model [d], if there is one."""
    reads: Mapping[str, Callable[[Request], Any]] = {}
    """Functions of the request, by the arguments that are made of several of its values."""
    check: Callable[[str, Mapping[str, Any]], None] | None = None
    """``check(algorithm, settings)`` raises ``ValueError`` for local settings that the rule does
    not use."""
    rounds: Callable[[Request], Sequence[int]] | None = None
    """Returns the numbers of the rounds that a request asks for, if it may ask for several. Each
    starts from the upload of the one before. By default it is the server's round alone."""
    stacks: bool | None = None
    """Whether the rule takes [clients, d], too (``core/stacks.py``). By default the rules of this
    package do, and those of your own do not."""
