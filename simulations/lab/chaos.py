"""A deployment whose components are killed at random moments, checked against an undisturbed run.

    python -m simulations.lab.chaos --minutes 10 [--seed 1] [--supernodes 3] [--rounds 12]

A SuperLink and SuperNodes with TLS and keys run on the loopback interface, as in ``make
deployment``; the SuperLink has a database. Until the minutes are over, SIGKILL ends one component
after the other, each once in a random order before any comes again: the SuperLink, each SuperNode
(both with all that they started, as systemd does), the ServerApp, and a ClientApp. SuperLink and
SuperNodes are started again after ``RestartSec`` seconds, as often as they end. A Flower run that
failed is resumed by the same ``flwr run``, when ``flwr list`` shows that it has finished.

When a run has ended, an undisturbed run of the same settings is made in this process, in which the
same replies count in each round: a reply that was lost by a kill is lost there too. Both models
must be equal to the bit, or the command ends with exit code 1. Then the next run begins. All
started processes are stopped at the end, also on failure and on Ctrl-C.
"""

from __future__ import annotations

import datetime
import json
import logging
import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from flwr.app import Message

from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES
from fl_strategies.core.log import mute_below
from fl_strategies.core.schedules import check
from simulations import client_app, experiment
from simulations.config import RunConfig
from simulations.lab.command_line import Command
from simulations.lab.deployment import Federation
from simulations.lab.superlink import ROOT, running, with_home

RESTART_SECONDS = 5.0
"""``RestartSec`` of SuperLink and SuperNodes."""
QUIET_SECONDS = (30.0, 90.0)
"""Between two kills, drawn at random."""
GRACE_SECONDS = 1200.0
"""How long after the last kill a run may take to its end."""
TICK_SECONDS = 0.5
ROUND = "server-round"
SETTINGS: dict[str, Any] = {
    "partition": "shards",
    "fraction": 1.0,
    "timeout": 90.0,  # nobody answers a request whose SuperNode was killed
}
APPS = {"serverapp": "flwr-serverapp", "clientapp": "flwr-clientapp"}
"""Components that Flower starts, by the name of their program."""


@dataclass
class Unit:
    """A process that is started again whenever it ends, as systemd's ``Restart=always`` does."""

    start: Callable[[], subprocess.Popen[str]]
    process: subprocess.Popen[str]
    starts: int = 1
    _due: float = 0.0

    def keep(self) -> None:
        """Start the process again if it ended ``RESTART_SECONDS`` ago."""
        if self.process.poll() is None:
            self._due = 0.0
        elif not self._due:
            self._due = time.monotonic() + RESTART_SECONDS
        elif time.monotonic() > self._due:
            self.process, self._due, self.starts = self.start(), 0.0, self.starts + 1


class Chaos:
    """Kills and restarts the components of a federation, and resumes its runs."""

    def __init__(self, link: Federation, clients: int, draws: random.Random) -> None:
        self.link, self.clients, self.draws = link, clients, draws
        self.started = time.monotonic()
        self.kills: Counter[str] = Counter()
        self.round, self.submitted = "", 0
        self.over = threading.Event()
        self.units: dict[str, Unit] = {}
        self._next: list[str] = []
        self._when = self._moment()

    def open(self) -> None:
        """Start SuperLink and SuperNodes."""
        self.link.open()
        self.units["superlink"] = Unit(self.link.superlink, self.link.processes[-1])
        for i in range(self.clients):
            name = f"supernode-{i}"
            self.link.register(name)
            start = partial(self.link.supernode, name, i, self.clients)
            self.units[name] = Unit(start, start())

    def run(self, config: RunConfig, end: float) -> None:
        """Run ``config`` to its end, with kills until the time ``end``.

        Raises ``RuntimeError`` if it does not end in ``GRACE_SECONDS`` after that.
        """
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(self._submit, config)
            try:
                while not ended.done():
                    self.over.wait(TICK_SECONDS)
                    for unit in self.units.values():
                        unit.keep()
                    if time.monotonic() > end + GRACE_SECONDS:
                        raise RuntimeError(f"the run did not end: {self.link.status()}")
                    if self._when < time.monotonic() < end:
                        self._kill()
                ended.result()
            except BaseException:
                self.over.set()
                self.link.close()
                raise

    def _submit(self, config: RunConfig) -> None:
        """Start the run, and resume it until it has completed."""
        while not self.over.is_set():
            self.submitted += 1
            try:
                self.link.run(ROOT, config.to_run_config(), on_line=self._read)
            except RuntimeError as error:
                lines = [line for line in str(error).splitlines() if line.strip()]
                self.say(f"{lines[0]} {lines[-1][:150] if lines[1:] else ''}")
            while not self.over.is_set() and self._active():
                self.over.wait(2.0)
            if _finished(config):
                return

    def _active(self) -> bool:
        """Return whether a run may still be active, as an operator sees it by ``flwr list``."""
        command = ["flwr", "list", "--format", "json"]
        listing = self.link.start(command, stdout=subprocess.PIPE).communicate()[0]
        try:
            runs = json.loads(listing)["runs"]
        except (ValueError, KeyError):
            return True  # the SuperLink is down
        return not all(run["status"].startswith("finished") for run in runs)

    def _read(self, line: str) -> None:
        if match := re.search(r" round (\d+/\d+)", line):
            self.round = f"after round {match[1]}"

    def _moment(self) -> float:
        return time.monotonic() + self.draws.uniform(*QUIET_SECONDS)

    def _kill(self) -> None:
        """Kill the next component; one that does not run at the moment is waited for."""
        if not self._next:
            self._next = [*self.units, *APPS]
            self.draws.shuffle(self._next)
        name = self._next[-1]
        if name in self.units:
            unit, victims = self.units[name].process, []
            if unit.poll() is None:
                main = psutil.Process(unit.pid)
                victims = [main, *main.children(recursive=True)]
        else:
            victims = [*_running(self.link.home, APPS[name])]
            victims = [self.draws.choice(victims)] if victims else []
        if not victims:
            return
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        self._next.pop()
        self._when = self._moment()
        self.kills[name] += 1
        more = f" and {len(victims) - 1} that it started" if victims[1:] else ""
        self.say(f"SIGKILL {name} (process {victims[0].pid}{more}) {self.round}")

    def say(self, what: str) -> None:
        """Print what happened, and after how many seconds."""
        print(f"{time.monotonic() - self.started:7.1f} s  {what}".rstrip(), flush=True)


def undisturbed(config: RunConfig, folder: Path) -> str:
    """Return the SHA-256 of the in-process engine's model, in whose rounds the same replies count.

    ``config`` is of a run that has ended; ``folder`` gets the results.
    """
    used: dict[int, set[int]] = {}
    for line in (Path(config.output) / "clients.jsonl").read_text().splitlines():
        row = json.loads(line)
        used.setdefault(row["round"], set()).add(row["client"])

    def lose(request: Message, reply: Message) -> Message | None:
        settings = request.content.config_records.get("config")
        if settings is None:  # a query
            return reply
        counts = places[request.metadata.dst_node_id] in used.get(int(str(settings[ROUND])), ())
        return reply if counts else None

    again = replace(config, output=str(folder), state_dir="", resume=False, checkpoint_every=0)
    again = replace(again, lost_rounds=0)  # however many are lost in a row
    grid = InProcessGrid(
        client_app.app, config.clients, run_config=again.to_run_config(), fault=lose
    )
    places = {node: i for i, node in enumerate(grid.contexts)}
    return experiment.run(again, grid, quiet=True).model_sha256


def _finished(config: RunConfig) -> bool:
    summary = Path(config.output) / "summary.json"
    return summary.exists() and bool(json.loads(summary.read_text())["finished"])


def _running(home: Path, program: str) -> Iterator[psutil.Process]:
    """Yield the processes of a program with this Flower home, ascending by id."""
    for process in with_home(home):
        with suppress(psutil.NoSuchProcess):  # gone meanwhile
            if any(Path(word).name == program for word in process.cmdline()[:2]):
                yield process


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the federation, the kills and the comparisons from the command line."""
    name = f"chaos-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    default = Path.home() / "fl-strategies-results" / name
    parser = Command("chaos", __doc__)
    parser.add_argument("--output", type=Path, default=default, help=f"default: {default}")
    parser.add_argument("--minutes", type=float, required=True, help="for how long to kill")
    parser.add_argument("--seed", type=int, default=1, help="of moments and victims (1)")
    parser.add_argument("--supernodes", type=int, default=3, help="SuperNodes, one client each (3)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each run (12)")
    known = ", ".join(sorted(STRATEGIES))
    parser.add_argument("--algorithm", default="fedadmm", help=f"fedadmm, or another of {known}")
    args = parser.read(arguments)
    folder: Path = args.output.expanduser().absolute()
    mute_below(logging.WARNING)
    with parser.explained():
        check("minutes", args.minutes, above=0.0)
        check("supernodes", args.supernodes, low=1)
        keys = {"algorithm": args.algorithm, "clients": args.supernodes, "rounds": args.rounds}
        config = RunConfig.parse(SETTINGS | keys)
        equal = endured(config, folder, minutes=args.minutes, seed=args.seed)
    print(f"results: {folder}")
    if not equal:
        raise SystemExit("a model differs from the undisturbed run's")


def endured(config: RunConfig, folder: Path, *, minutes: float, seed: int) -> bool:
    """Return whether all runs under kills for so many minutes equal undisturbed ones."""
    equal: list[bool] = []
    with running(Federation) as link:
        chaos = Chaos(link, config.clients, random.Random(seed))
        chaos.open()
        end = time.monotonic() + 60.0 * minutes
        while time.monotonic() < end:
            place = folder / f"run-{len(equal) + 1}"
            there = replace(
                config,
                output=str(place / "deployment"),
                state_dir=str(place / "state") * config.stateful,
                checkpoint_every=1,
                resume=True,
            )
            experiment.prepare(there)
            chaos.run(there, end)
            alone = undisturbed(there, place / "in-process")
            summary = json.loads((Path(there.output) / "summary.json").read_text())
            equal.append(summary["model_sha256"] == alone)
            chaos.say(f"{place.name}: {'equal to the bit' if equal[-1] else 'THE MODELS DIFFER'}")
        starts = {name: unit.starts for name, unit in chaos.units.items()}
    kills = ", ".join(f"{count} of {name}" for name, count in sorted(chaos.kills.items()))
    spent = (time.monotonic() - chaos.started) / 60.0
    print(f"{chaos.kills.total()} kills ({kills}) in {spent:.1f} minutes")
    print(f"starts: {starts}; {chaos.submitted} times flwr run")
    print(f"{sum(equal)} of {len(equal)} runs equal to the bit; nothing is left running")
    return all(equal)


if __name__ == "__main__":
    main()
