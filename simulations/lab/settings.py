"""A published comparison, and how it is run here: what the board's studies consist of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from simulations.lab.measured import Figure
from simulations.lab.tuners import Space
from simulations.models import TEXT

SMALL = {"rounds": 2, "evaluate-every": 1, "stop-at-target": False}
FEWER = {"epochs": 1, "steps": 2, "target": 0.05, "model": "logistic"}


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a short run of ``config``: two rounds of two clients with a small model.

    Where all clients train in each round they still do: FedPD asks all. A model of text stays.
    """
    changes = SMALL | {key: value for key, value in FEWER.items() if key in config}
    if config.get("model") in TEXT:
        del changes["model"]
    if config.get("fraction", 1.0) < 1.0:
        changes["fraction"] = min(1.0, 2 / int(config["clients"]))
    return changes


class Rule(NamedTuple):
    """An algorithm with hyperparameters, and what its run-config sets besides the setting's."""

    algorithm: str
    params: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    reference: bool = False
    """A row to compare with that is no baseline: training in one place, the authors' own form."""
    tune: Space | None = None
    """Values to choose from, by hyperparameter. None: the setting's; empty: nothing is tuned."""
    server: str = ""
    """A server of ``flower_server.SERVERS`` in place of the algorithm's."""


DRAWN = {"random-epochs": "true"}
"""Numbers of local epochs are drawn from 1..E."""
FIXED = {"random-epochs": "false"}


def centralised(**config: Any) -> Rule:
    """Return training on all data in one place: one client, which trains in every round."""
    one = {"clients": 1, "fraction": 1.0, "partition": "iid", "partition-params": ""}
    return Rule("fedavg", config=one | config, reference=True)


class Line(NamedTuple):
    """A setting's place in a figure of several settings: one line for each rule."""

    figure: str
    """The figure's file, without suffix."""
    axis: str
    at: float


class Setting(NamedTuple):
    """A published comparison, and how it is run here."""

    name: str
    where: str
    """Paper, table, row."""
    figure: Figure
    ours: str
    """The rule of the paper; "" for a benchmark's setting."""
    rules: Mapping[str, Rule]
    published: Mapping[str, float]
    """Its figure by rule: a share, or rounds (infinite if the target was not reached)."""
    config: Mapping[str, Any]
    tune: Space = MappingProxyType({})
    """Values to choose from, by hyperparameter or local setting (``{"lr": (0.01, 0.1)}``)."""
    trials: int = 0
    """Trials of each rule; 0: as many as there are values."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    impossible: str = ""
    """Why it cannot be run here."""
    runs_in: Setting | None = None
    """The setting whose runs it reads and adds to, if they are not its own alone."""
    tuned_by: Setting | None = None
    """The setting that chose the hyperparameters, if it did not itself; rules are of one name."""
    line: Line | None = None
    curves: tuple[str, ...] = ()
    """What test accuracy is drawn against: columns of ``simulations.tables.curve``."""

    @property
    def horizon(self) -> int:
        """Rounds of a run."""
        return int(self.config["rounds"])
