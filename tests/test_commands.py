"""Every command: its help, and what it says of bad arguments.

Commands are found, not listed: the modules of ``simulations`` that ``python -m`` runs. So are their
options. Mutants that these tests caught: a per cent sign of a help text read as a format; options
by their first letters; usage beside an error; what is missing named before what is misspelt.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import cycle
from pathlib import Path

import pytest

from simulations.config import RunConfig
from simulations.lab.command_line import Command
from simulations.lab.superlink import SuperLink

FOLDER = Path(__file__).parents[1] / "simulations/lab"
COMMANDS = sorted(p.stem for p in FOLDER.glob("*.py") if '__name__ == "__main__"' in p.read_text())
NEEDED = {
    "benchmark": ["half"],
    "chaos": ["--minutes", "1"],
    "compare": ["--algorithms", "fedavg", "--output", "{folder}"],
    "reproduce": ["fedpd-fig2", "--output", "{folder}"],
}
"""Arguments that a command cannot do without."""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return ``run(command, *words)``: ``python -m simulations.lab.COMMAND WORDS`` in this
    process, its exit code, and what it wrote to stdout and stderr. It cannot start anything."""

    def nothing(*_: object) -> None:
        raise AssertionError("what was to be refused has begun")

    monkeypatch.setattr(SuperLink, "__init__", nothing)

    def call(command: str, *words: str) -> tuple[int, str, str]:
        given = [word.format(folder=tmp_path) for word in words]
        monkeypatch.setattr(sys, "argv", [command, *given])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(FOLDER / f"{command}.py"), run_name="__main__")
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    return call


def refusal(found: tuple[int, str, str]) -> str:
    """Return the one line of an error, all that a command prints then."""
    code, out, err = found
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert re.match(r"python -m simulations\.lab\.[a-z]+: error: ", line)
    return line


def parser_of(command: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return what reads the command's arguments."""
    parsers: list[Command] = []
    with monkeypatch.context() as patch:
        patch.setattr(Command, "read", lambda parser, *_: parsers.append(parser) or sys.exit(0))
        run(command)
    return parsers[0]


def options_of(command: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> list[argparse.Action]:
    """Return the command's options, but for its help."""
    actions = parser_of(command, run, monkeypatch)._actions
    return [action for action in actions if action.dest != "help"]


def test_the_commands_to_test_are_found() -> None:
    assert {"demo", "deployment", *NEEDED} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_shows_every_option_with_its_meaning(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no line is broken
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: python -m simulations.lab.{command} ")
    second = re.compile(r"-\d{8}-\d{6}")  # a folder of results has the time in its name
    shown = second.sub("", " ".join(out.split()))
    for action in options_of(command, run, monkeypatch):
        assert action.help
        assert second.sub("", " ".join(action.help.replace("%%", "%").split())) in shown
        assert all(name in shown for name in action.option_strings)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_option_is_named_beside_the_one_that_is_meant(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else is given or missing."""
    parser, needed = parser_of(command, run, monkeypatch), NEEDED.get(command, [])
    for name in (options := [name for name in parser.options if name != "-h"]):
        for typo in (name[:-1], name[1:]):
            if typo not in options:
                for words in ([f"{typo}=1"], [*needed, typo, "1"]):
                    with pytest.raises(SystemExit) as stop:
                        parser.read(words)
                    line = refusal((stop.value.code, *capsys.readouterr()))
                    assert f"unknown option {typo!r}" in line
                    assert re.search(r"\(did you mean .--[a-z-]+.\?\)", line)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_typo_in_the_value_of_any_option_is_refused_by_naming_it(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results folders alone may have any name."""
    for option in options_of(command, run, monkeypatch):
        name = option.option_strings[0] if option.option_strings else ""
        if option.nargs == 0 or not (name or option.choices) or name == "--output":
            continue
        needed = [] if not name else NEEDED.get(command, [])
        for typo in ["typo", "typo=1"][: 1 + name.endswith(("-params", "--param"))]:
            line = refusal(run(command, *needed, *[name][: bool(name)], typo))
            assert "typo" in line


@pytest.mark.parametrize("command", sorted(NEEDED))
def test_what_is_missing_is_named(command: str, run: Run) -> None:
    assert "the following arguments are required: " in refusal(run(command))


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("compare", ["--clients", "5000"], "clients must be from 1 to 1437 (samples), got 5000"),
        ("compare", ["--workers", "0"], "--workers must be >= 1, got 0"),
        ("compare", ["--output", "/proc/x"], "the results folder /proc/x/fedavg cannot be written"),
        ("demo", ["--clients", "5000"], "clients must be from 1 to 1437 (samples), got 5000"),
        ("demo", ["--seeds", "1,1"], "each number once, got '1,1'"),
        ("deployment", ["--supernodes", "0"], "supernodes must be >= 1, got 0"),
        (
            "deployment",
            ["--output", "/proc/x"],
            "directory /proc/x/deployment/state/fedadmm cannot be written",
        ),
        ("benchmark", ["--write"], "--write is for peers and stack"),
        ("benchmark", ["--peers", "/x"], "there is no folder pfl in /x"),
        ("reproduce", ["--rules", "fedadm"], "no rule fedadm; rules: authors, fedavg, "),
        ("reproduce", ["--jobs", "0"], "jobs must be >= 1, got 0"),
        ("reproduce", ["--output", "/proc/x"], "the results folder /proc/x cannot be written"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line_that_says_why(
    command: str, words: list[str], message: str, run: Run
) -> None:
    assert message in refusal(run(command, *NEEDED.get(command, []), *words))


# ---- odd values ---------------------------------------------------------------------------------

NUMBERS = [
    f"--{f.name.replace('_', '-')}" for f in fields(RunConfig) if type(f.default) in (int, float)
]


ODD = ("-inf", "nan", "1" * 400, "x" * 100_000, "-Infinity", "-nan", "a\x1b[2Jb")


@pytest.mark.parametrize(("option", "word"), [*zip(NUMBERS, cycle(ODD), strict=False)])
def test_an_odd_number_is_refused_by_its_option_in_one_short_line(
    run: Run, option: str, word: str
) -> None:
    name = re.compile(option[2:].replace("-", "[-_]"))
    for words in ([option, word], [f"{option}={word}"]):
        said = refusal(run("compare", *NEEDED["compare"], *words))
        assert len(said) <= 300
        assert name.search(said)
        assert said.rstrip("\n").isprintable()
        assert "unknown option" not in said
