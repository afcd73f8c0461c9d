"""The command lines of this package: the options, and errors in one line."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from fl_strategies.core.schedules import brief
from fl_strategies.core.spelling import unknown
from simulations.folders import room

BAD_ARGUMENTS, RUN_FAILED = 2, 1
"""Exit codes."""
T = TypeVar("T", int, float)
OPTION = re.compile(r"--?[A-Za-z]")
NEGATIVE = re.compile(r"-([.\d]|(inf|infinity|nan)\b)", re.IGNORECASE)
"""How a value begins that looks like an option: -1,1 and -inf."""


class Command(argparse.ArgumentParser):
    """The options of ``python -m simulations.lab.NAME``, which cannot be abbreviated.

    An error is one line, without usage; the error about a misspelt option names a similar option.
    In help texts % is a per cent sign. ``given`` are arguments that precede those that are typed.
    """

    def __init__(self, name: str, about: str | None, given: Sequence[str] = ()) -> None:
        self.options: list[str] = []
        self.given = given
        super().__init__(
            prog=f"python -m simulations.lab.{name}",
            description=about,
            epilog=f"given unless you set them: {shlex.join(given)}" if given else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._negative_number_matcher = NEGATIVE

    def add_argument(  # type: ignore[override]
        self, *names: str, help: str, **options: Any
    ) -> argparse.Action:
        """Add an argument as argparse does; ``help`` is plain text."""
        self.options += [name for name in names if name.startswith("-")]
        if options.get("required"):
            options["required"] = not set(names) & set(self.given)
        return super().add_argument(*names, help=help.replace("%", "%%"), **options)

    def read(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the values of ``arguments``, those of this process by default."""
        words = [*self.given, *(sys.argv[1:] if arguments is None else arguments)]
        for word in words:
            name, _, _ = word.partition("=")
            option = OPTION.match(word) and " " not in name and not NEGATIVE.match(word)
            if option and name not in self.options:
                self.error(f"unknown option {unknown([name], self.options)}; --help lists all")
        return self.parse_args(words)

    def format_help(self) -> str:
        """Return the help, whose first line names only the arguments that must be given."""
        needed = [action for action in self._actions if action.required]
        words = [
            " ".join([*action.option_strings[-1:], str(action.metavar or action.dest.upper())])
            for action in needed
        ]
        self.usage = " ".join([self.prog, *words, "[OPTION ...]"])
        return super().format_help()

    def typed(self, arguments: Sequence[str] | None = None) -> str:
        """Return the command as a shell takes it, with ``arguments`` or those of this process."""
        words = sys.argv[1:] if arguments is None else arguments
        return f"{self.prog} {shlex.join(words)}"

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:  # it quotes the whole text
            raise argparse.ArgumentError(action, brief(error.message)) from None

    def error(self, message: str) -> NoReturn:
        """End with one line about bad arguments."""
        self.exit(BAD_ARGUMENTS, f"{self.prog}: error: {' '.join(message.splitlines())}\n")

    @contextmanager
    def explained(self, *, verbose: bool = False) -> Iterator[None]:
        """End the command with one line for an error; for a failed run also with its traceback if
        ``verbose``."""
        try:
            with room():
                yield
        except (ValueError, OSError) as error:
            self.error(str(error))
        except RuntimeError as error:
            if verbose:
                raise
            self.exit(RUN_FAILED, f"{self.prog}: error: {error}\n")


def imported(name: str) -> ModuleType:
    """Return the module of this name, found from the current folder too."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def numbers(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a reader of different numbers, separated by commas."""

    def read(text: str) -> list[T]:
        try:
            values = [kind(item) for item in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"numbers with commas, got {text!r}") from None
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"each number once, got {text!r}")
        return values

    return read
