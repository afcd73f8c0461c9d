"""Hyperparameters and options, each declared once.

A declaration says which values are allowed, the default, whether the value may change from round
to round, whether it is sent to clients, and what it means. The constructor, requests and clients
check values by the declaration, and the documentation is made from it:

    class FedProx(FederatedStrategy):
        mu: Schedule = number(
            default=0.01, about="Pull towards the global model.", low=0.0, sent="proximal-mu"
        )
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, dataclass_transform

from fl_strategies.core.schedules import Schedule as Schedule
from fl_strategies.core.schedules import check, check_flag, one_of, plain, require, shown
from fl_strategies.core.schedules import values as all_values
from fl_strategies.core.spelling import unknown_of

Scalar: TypeAlias = bool | int | float | str
PerClient: TypeAlias = float | Sequence[float]
"""A number, or a sequence of one for each client, by the client's id."""


@dataclass(frozen=True)
class Hyperparameter:
    """The declaration of one hyperparameter or option.

    ``kind`` is float, int, bool, str or object. Numbers lie within ``bounds`` (``above``, ``low``,
    ``high``, ``below``), may be schedules if ``scheduled``, and may be replaced by one of
    ``words``. ``sent`` is the name in requests, in kebab-case; "" if it is not sent. ``accepts``
    says of an object whether it is allowed. With ``per_client`` clients may have numbers of their
    own.

    Examples
    --------
    >>> from fl_strategies import FedADMM
    >>> FedADMM.declarations["rho"].default
    0.1
    """

    default: Any
    about: str
    kind: type
    bounds: Mapping[str, float] = field(default_factory=dict)
    scheduled: bool = False
    words: tuple[str, ...] = ()
    optional: bool = False
    sent: str = ""
    type_name: str = ""
    accepts: Callable[[Any], bool] = lambda value: value is not None
    per_client: bool = False

    def check_argument(self, name: str, value: Any) -> None:
        """Raise ``ValueError`` unless ``value``, or that of each client, is allowed."""
        if not (self.per_client and is_per_client(value)):
            self.check(name, value)
            return
        require(len(value) > 0, name, "a number, or one for each client", value)
        of_one = replace(self, words=(), optional=False)
        for client, one in enumerate(value):
            of_one.check(f"{name} of client {client}", one)

    def check(self, name: str, value: Any) -> None:
        """Raise ``ValueError``, which names ``name``, unless ``value`` is allowed."""
        if self.optional and value is None:
            return
        if self.kind is str:
            one_of(name, value, self.words)
        elif self.kind is bool:
            check_flag(name, value)
        elif self.kind is object:
            require(self.accepts(value), name, self.type_name, value)
        elif self.kind in (float, int) and not (isinstance(value, str) and value in self.words):
            integer = self.kind is int
            try:
                check(name, value, integer=integer, scheduled=self.scheduled, **self.bounds)
            except ValueError as error:
                words = f", or one of {list(self.words)}" if self.words else ""
                raise ValueError(f"{words}, got ".join(str(error).rsplit(", got ", 1))) from None

    @property
    def range(self) -> str:
        """The allowed values, in words."""
        if self.type_name:
            return self.type_name
        if self.kind is str:
            return " or ".join(f'"{word}"' for word in self.words)
        text = self.kind.__name__
        if self.scheduled:
            text = f"{text} or {{first round: {text}}}"
        signs = {"above": ">", "low": ">=", "high": "<=", "below": "<"}
        limits = [f"{signs[n]} {bound:g}" for n, bound in self.bounds.items()]
        text = ", ".join([text, " and ".join(limits)]) if limits else text
        text += ", or a sequence of them by client id" * self.per_client
        return " or ".join([text, *(f'"{word}"' for word in self.words)])

    def documented(self, name: str) -> str:
        """Return the entry for a docstring's "Parameters"."""
        default = f'"{self.default}"' if isinstance(self.default, str) else self.default
        ends = ", optional" if self.default is None else f" (default {default})"
        about = textwrap.fill(self.about, 92, initial_indent=" " * 4, subsequent_indent=" " * 4)
        return f"{name} : {self.range}{ends}\n{about}"


def number(
    *,
    default: Any,
    about: str,
    integer: bool = False,
    scheduled: bool = False,
    words: Sequence[str] = (),
    optional: bool = False,
    sent: str = "",
    per_client: bool = False,
    **bounds: float,
) -> Any:
    """Declare a number within ``bounds``: ``above`` <, ``low`` <=, ``high`` >=, ``below`` >.

    Examples
    --------
    >>> number(default=1.0, about="Penalty.", above=0.0, scheduled=True).range
    'float or {first round: float}, > 0'
    """
    return Hyperparameter(
        default,
        about,
        int if integer else float,
        bounds,
        scheduled,
        tuple(words),
        optional or default is None,
        sent,
        per_client=per_client,
    )


def choice(*, default: str | None, choices: Sequence[str], about: str, sent: str = "") -> Any:
    """Declare one word of ``choices``; a default None means absent.

    Examples
    --------
    >>> choice(default="samples", choices=("samples", "uniform"), about="Weights.").range
    '"samples" or "uniform"'
    """
    return Hyperparameter(
        default, about, str, words=tuple(choices), optional=default is None, sent=sent
    )


def flag(*, default: bool, about: str, sent: str = "") -> Any:
    """Declare a value that is true or false.

    Examples
    --------
    >>> flag(default=False, about="Whether to normalise.").range
    'bool'
    """
    return Hyperparameter(default, about, bool, sent=sent)


def option(
    *,
    default: Any,
    type_name: str,
    about: str,
    accepts: Callable[[Any], bool] = lambda value: value is not None,
) -> Any:
    """Declare a value that no range describes; the documentation calls its type ``type_name``.

    Examples
    --------
    >>> option(default=None, type_name="callable", about="A function.", accepts=callable).range
    'callable'
    """
    return Hyperparameter(
        default, about, object, type_name=type_name, optional=default is None, accepts=accepts
    )


@dataclass_transform(kw_only_default=True, field_specifiers=(number, choice, flag, option))
class Declared:
    """Takes keyword arguments as declared in the class and its bases; ``__post_init__`` follows.

    Raises ``ValueError`` for a value outside its range, and ``TypeError`` for an unknown name or an
    argument without a name.
    """

    declarations: ClassVar[Mapping[str, Hyperparameter]] = {}
    common: ClassVar[Collection[str]] = ()
    """Names that come after a class's own: those that all classes of a kind have."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ordered: dict[str, Hyperparameter] = {}
        for base in reversed(cls.__mro__):
            for name, value in vars(base).items():
                if isinstance(value, Hyperparameter):
                    ordered[name] = value
                elif name in ordered and not hasattr(value, "__get__"):  # mu = 0.5 in a subclass
                    ordered[name] = replace(ordered[name], default=value)
        cls.declarations = {n: d for n, d in ordered.items() if n not in cls.common} | ordered
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=d.default)
                for name, d in cls.declarations.items()
            ]
        )
        if own := {n: d for n, d in cls.declarations.items() if n not in cls.common}:
            entries = "\n".join(d.documented(name) for name, d in own.items())
            text = inspect.cleandoc(cls.__doc__ or "")
            cls.__doc__ = f"{text}\n\nParameters\n----------\n{entries}\n"

    def __init__(self, *unnamed: Any, **arguments: Any) -> None:
        if unnamed:
            name = type(self).__name__
            raise TypeError(
                f"{name} takes only named arguments, got {shown(unnamed[0])} without a name"
            )
        if unknown := arguments.keys() - self.declarations.keys():
            raise TypeError(self.unknown_names({n: arguments[n] for n in sorted(unknown)}))
        for name, declaration in self.declarations.items():
            value = plain(arguments.get(name, declaration.default))
            declaration.check_argument(name, value)
            setattr(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check conditions on several values, and set up what derives from them."""

    @classmethod
    def unknown_names(cls, arguments: Mapping[str, Any]) -> str:
        """Return the text that the class has none of ``arguments``, and which ones it has."""
        return f"{cls.__name__} has no argument {unknown_of(arguments, [*cls.declarations])}"


def sent_values(
    declarations: Mapping[str, Hyperparameter], values: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the values that are sent to clients, by their names in requests.

    An absent value (None) is not sent.
    """
    return {
        d.sent: value
        for name, d in declarations.items()
        if d.sent and (value := values(name)) is not None
    }


def count_of(config: Mapping[str, Any], name: str) -> int:
    """Return the count ``config[name]`` of a request, 1 if it has none.

    Raises ``ValueError`` unless it is a whole number >= 1.
    """
    value: int = config.get(name, 1)
    check(name, value, low=1, high=2**53, integer=True)
    return value


def check_request(declarations: Mapping[str, Hyperparameter], request: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a request has a hyperparameter outside its range.

    A missing hyperparameter raises an error where the client needs it.
    """
    for declaration in declarations.values():
        if declaration.sent in request:
            declaration.check(declaration.sent, request[declaration.sent])


def is_per_client(value: Any) -> bool:
    """Return whether ``value`` is a sequence of one number for each client."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def of_client(name: str, value: Any, client: int) -> float:
    """Return ``value``, or the client's number of a sequence.

    Raises ``ValueError``, which names ``name``, if the sequence ends before it.

    Examples
    --------
    >>> of_client("gamma", 0.5, 7), of_client("gamma", [0.5, 2.0], 1)
    (0.5, 2.0)
    """
    if is_per_client(value):
        until = f"a number, or one for each client up to client {client}"
        require(client < len(value), name, until, value)
        value = value[client]
    one: float = value
    return one


def largest(value: Schedule) -> float:
    """Return the largest number of a schedule."""
    return max(all_values(value))
