"""Clients that hand the rule of their strategy's ``client_half`` what it names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

from clients.base import FederatedClient
from clients.keeping import State
from clients.request import Config, Received, RequestConfig
from fl_strategies import ClientHalf, FederatedStrategy
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.records import NOTHING
from fl_strategies.solvers.local import LocalTraining


class DerivedClient(FederatedClient):
    """Runs the client rule that its strategy declares, and adds nothing to it."""

    strategy: ClassVar[type[FederatedStrategy]]
    half: ClassVar[ClientHalf]
    """The strategy's ``client_half``."""

    def check(self, config: Config) -> LocalTraining:
        training = super().check(config)
        if self.half.check is not None:
            self.half.check(self.algorithm, training.settings)
        return training

    def rounds(self, config: Config) -> Sequence[int]:
        if self.half.rounds is None:
            return super().rounds(config)
        return self.half.rounds(RequestConfig(config))

    def step(self, state: State, received: Received, oracle: Oracle, config: Config) -> Step:
        sent = dict.fromkeys(("catch_up", "for_client"), received.catch_up)
        vectors = {**received.extra_vectors, **sent}
        kept = () if self.state_type is None else (state,)
        named = self._named(self.half.rule, vectors, config)
        return self.half.rule(*kept, received.theta, oracle, **named)

    def newcomer(self, theta: Tensor, config: Config) -> State:
        """Return the state of a newcomer: ``first_state`` of clients that keep any."""
        assert self.half.first_state is not None
        return self.half.first_state(theta, **self._named(self.half.first_state, NOTHING, config))

    def _named(
        self, function: Callable[..., Any], vectors: Mapping[str, Any], config: Config
    ) -> dict[str, Any]:
        """Return the arguments of a function of the client half, as :class:`.ClientHalf` says."""
        declarations, named = self.strategy.declarations, {}
        for name, has_default in named_by(function):
            declared = declarations.get(name)
            key = (declared.sent if declared else "") or name.replace("_", "-")
            if name in vectors:
                named[name] = vectors[name]
            elif name in self.half.reads:
                named[name] = self.half.reads[name](config)
            elif key in config or declared or not has_default:
                named[name] = config[key]  # which says what it lacks
        return named


@functools.cache
def named_by(function: Callable[..., Any]) -> list[tuple[str, bool]]:
    """Return the arguments that a function takes by name alone, and which have a default."""
    return [
        (name, parameter.default is not parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]


def is_ours(strategy: type[FederatedStrategy]) -> bool:
    """Return whether a strategy is one of this package."""
    return strategy.__module__.startswith("fl_strategies.")


@functools.cache
def derived(strategy: type[FederatedStrategy]) -> type[FederatedClient]:
    """Return the client of a strategy that declares a ``client_half``; ``TypeError`` without."""
    half, name = strategy.client_half, strategy.__name__
    if half is None:
        raise TypeError(
            f"{name} has no clients: it needs client_half = ClientHalf(client_rule, ...), or an"
            f" entry CLIENTS[{strategy.algorithm!r}]"
        )
    if (half.state is None) != (half.first_state is None):
        raise TypeError(f"{name}.client_half needs both a state and a first_state, or neither")
    _check_arguments(half.rule, 2 if half.state is None else 3)
    if half.first_state is not None:
        _check_arguments(half.first_state, 1)
    keeps = "nothing" if half.state is None else ", ".join(half.state._fields)
    members: dict[str, Any] = {
        "__doc__": f"Runs the client rule of ``{strategy.__module__}``; keeps {keeps}.",
        "__module__": "clients.algorithms" if is_ours(strategy) else strategy.__module__,
        "strategy": strategy,
        "half": half,
        "algorithm": strategy.algorithm,
        "state_type": half.state,
        "extra_vectors": strategy.extra_vectors,
        "stacks": is_ours(strategy) if half.stacks is None else half.stacks,
    }
    if half.state is not None:
        members["first_state"] = DerivedClient.newcomer
    if half.own:
        members["personalized_model"] = staticmethod(attrgetter(half.own))
    return type(f"{name}Client", (DerivedClient,), members)


def _check_arguments(function: Callable[..., Any], by_place: int) -> None:
    """Raise ``TypeError`` for arguments that would never be given."""
    parameters = [*inspect.signature(function).parameters.values()][by_place:]
    if never := [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]:
        name = getattr(function, "__name__", "the rule")
        raise TypeError(f"{name} must take all but its first {by_place} by name, after *: {never}")
