"""Calls of our own functions: on the server in a round of three clients, and in a client's ``fit``.

    python -m simulations.lab.calls

A call counts in whatever file its function is. Comprehensions, lambdas and the methods that
``dataclass`` writes are no functions of ours, and a generator counts once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from flwr.app import ArrayRecord, Context

from clients import AnyAlgorithmClient, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg
from simulations.lab.command_line import Command

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / package) for package in ("fl_strategies", "clients"))
CLIENTS = 3


@dataclass
class Calls:
    """Calls by file; ``crossings`` counts those from another of our files."""

    of: Counter[str] = field(default_factory=Counter)
    crossings: int = 0

    def __str__(self) -> str:
        lines = [f"{self.of.total()} calls in {len(+self.of)} files, {self.crossings} between them"]
        return "\n".join([*lines, *(f"{n:6} {name}" for name, n in (+self.of).most_common())])

    def beyond(self, other: Calls) -> Calls:
        """Return the calls that ``other`` has not."""
        return Calls(self.of - other.of, self.crossings - other.crossings)


def counted(
    work: Callable[[], Any], inside: Callable[..., Any], but: Callable[..., Any] | None = None
) -> Calls:
    """Return the calls of ``work()`` under the function ``inside``, but those under ``but``."""
    calls, depth, generators = Calls(), [inside.__code__], list[FrameType]()
    leaves = but.__code__ if but else None

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "return" and depth[1:] and code is depth[-1]:
            depth.pop()
        elif event == "call" and code in (inside.__code__, leaves):
            depth.append(code)
        elif event == "call" and len(depth) == 2 and (file := file_of(code)):
            if code.co_flags & CO_GENERATOR:
                if any(frame is one for one in generators):
                    return
                generators.append(frame)
            calls.of[file] += 1
            calls.crossings += caller(frame) != file

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def file_of(code: CodeType) -> str:
    """Return the file of a function of ours, as seen from the repository's root; else ""."""
    if code.co_name.startswith("<") or not code.co_filename.startswith(OURS):
        return ""
    return str(Path(code.co_filename).relative_to(ROOT))


def caller(frame: FrameType) -> str:
    """Return the file of ours from which a frame was called, through whatever others."""
    back = frame.f_back
    while back is not None and not back.f_code.co_filename.startswith(OURS):
        back = back.f_back
    return "" if back is None else str(Path(back.f_code.co_filename).relative_to(ROOT))


def client_fn(context: Context) -> AnyAlgorithmClient:
    """Return a client of a logistic regression."""
    number = client_id(context)
    torch.manual_seed(number)
    images, labels = torch.randn(20, 4), torch.randint(3, (20,))
    problem = Problem(torch.nn.Linear(4, 3), torch.nn.functional.cross_entropy, images, labels)
    return AnyAlgorithmClient(problem, client_id=number)


def run(rounds: int) -> None:
    """Run FedAvg on three clients in this process."""
    strategy = FedAvg(local={"lr": 0.1, "epochs": 1}, fraction_evaluate=0.0, quiet=True)
    grid = InProcessGrid(client_app(client_fn), CLIENTS)
    strategy.start(grid, ArrayRecord(torch.nn.Linear(4, 3).state_dict()), rounds)


def of_a_round() -> Calls:
    """Return the server's calls in a round: those that one round more adds."""
    two, three = (
        counted(partial(run, rounds), run, InProcessGrid.send_and_receive) for rounds in (2, 3)
    )
    return three.beyond(two)


def of_a_fit() -> Calls:
    """Return a client's calls in one ``fit`` of one epoch."""
    every = counted(partial(run, 1), AnyAlgorithmClient.fit)
    assert all(count % CLIENTS == 0 for count in every.of.values())
    return Calls(
        Counter({name: count // CLIENTS for name, count in every.of.items()}),
        every.crossings // CLIENTS,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Count and print."""
    Command("calls", __doc__).read(arguments)
    print(f"server, a round of {CLIENTS} clients: {of_a_round()}\n")
    print(f"client, one fit: {of_a_fit()}")


if __name__ == "__main__":
    main()
