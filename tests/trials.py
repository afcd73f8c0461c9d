"""Try mutants: run the tests of each on a copy of the tree that has its fault (mutants.py)."""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fl_strategies", "clients", "simulations")
LARGE = ("numpy", "torch", "flwr.serverapp.strategy", "flwr.client")
FORK = multiprocessing.get_context("fork")
COPIED = (*PACKAGES, "tests", "pyproject.toml", "README.md")
ENOUGH = 0.95
"""Share of the mutants that must be caught."""
PATIENCE = 300.0
"""Seconds for a mutant's tests, which may have become endless; that is no proof of being caught."""


class Mutant(NamedTuple):
    """``new`` in the place of ``old`` in a file, and pytest's arguments for tests that find it."""

    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {old} -> {new or '(nothing)'}"


def of(file: str, tests: str, changes: Mapping[str, str]) -> list[Mutant]:
    """Return a mutant of ``file`` for each of ``changes``, new text by old."""
    return [Mutant(file, old, new, tests) for old, new in changes.items()]


class Stale(ValueError):
    """A mutant whose text its file does not hold exactly once."""


def mutated(source: str, mutant: Mutant) -> str:
    """Return the file's text with the mutant in it; raise :class:`Stale` where it has no place."""
    if (times := source.count(mutant.old)) != 1:
        raise Stale(f"its text is there {times} times")
    return source.replace(mutant.old, mutant.new)


def run_tests(tree: Path, mutant: Mutant) -> None:
    """Run the mutant's tests on ``tree`` and leave this process with pytest's exit code."""
    import pytest

    with (tree / "output").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    plain = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    os._exit(int(pytest.main([*plain, *shlex.split(mutant.tests)])))


class Trial:
    """The tests of one mutant, run in a process of their own on a copy of the tree at ``root``."""

    def __init__(self, mutant: Mutant, root: Path) -> None:
        self.mutant, self.began = mutant, time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-")
        self._tree = Path(self._folder.name)
        self._process: Any = None
        for name in COPIED:
            if (root / name).is_dir():
                skipped = shutil.ignore_patterns("__pycache__")
                shutil.copytree(root / name, self._tree / name, ignore=skipped)
            else:
                shutil.copy(root / name, self._tree)
        path = self._tree / mutant.file
        try:
            path.write_text(mutated(path.read_text(), mutant))
        except (OSError, Stale) as error:
            self._stale = str(error)
            return
        self._process = FORK.Process(target=run_tests, args=(self._tree, mutant))
        self._process.start()

    def verdict(self) -> str:
        """Return "caught" or "survived", in words why it is neither, or "" while tests run."""
        if self._process is None:
            return f"stale: {self._stale}"
        if self._process.is_alive() and time.monotonic() < self.began + PATIENCE:
            return ""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        code = self._process.exitcode
        if code in (0, 1):
            return "caught" if code else "survived"
        if code == -signal.SIGKILL:
            return f"no result: not done in {PATIENCE:.0f} s"
        said = (self._tree / "output").read_text(errors="replace").strip().splitlines()
        return f"no result: {' | '.join(said[-3:])}"

    def close(self) -> None:
        """Remove the copy."""
        self._folder.cleanup()


def verdicts(
    mutants: Sequence[Mutant], *, jobs: int = 2, root: Path = ROOT
) -> Iterator[tuple[Mutant, str, float]]:
    """Yield each mutant, what became of it, and the seconds it took, as they end."""
    waiting, running = list(mutants), list[Trial]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Trial(waiting.pop(0), root))
        time.sleep(0.05)
        for trial in [trial for trial in running if trial.verdict()]:
            running.remove(trial)
            yield trial.mutant, trial.verdict(), time.monotonic() - trial.began
            trial.close()


def main(
    mutants: Sequence[Mutant],
    about: str,
    arguments: Sequence[str] | None = None,
    *,
    large: Sequence[str] = LARGE,
) -> int:
    """Try the mutants that the command line asks for; return the exit code.

    A trial is a fork of this process, which imports ``large`` packages first, once for all.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a text in a mutant's file, texts or tests")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--sound", action="store_true", help="run the tests on unchanged source")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in mutants if given.only in " ".join(mutant)]
    for name in large:
        importlib.import_module(name)
    if given.sound:
        return sound(chosen, jobs=given.jobs)
    counts: Counter[str] = Counter()
    for mutant, verdict, seconds in verdicts(chosen, jobs=given.jobs):
        counts[verdict.partition(":")[0]] += 1
        print(f"{verdict:9} {seconds:5.1f} s  {mutant}", flush=True)
    share = counts["caught"] / max(1, len(chosen))
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{len(chosen)} mutants: {told}; {share:.1%} caught, at least {ENOUGH:.0%} must be")
    return int(share < ENOUGH or counts["stale"] > 0)


def sound(mutants: Sequence[Mutant], *, jobs: int) -> int:
    """Return 1 if tests fail where there is no mutant, which would seem to catch any."""
    unchanged = {mutant.tests: mutant._replace(new=mutant.old) for mutant in mutants}
    failing = 0
    for mutant, verdict, seconds in verdicts(list(unchanged.values()), jobs=jobs):
        failing += verdict != "survived"
        said = "pass" if verdict == "survived" else f"fail: {verdict}"
        print(f"{said:9} {seconds:5.1f} s  {mutant.tests}", flush=True)
    return int(failing > 0)
