"""Studies: published comparisons, and how they are run here, from ``studies/NAME.toml``.

A file has the keys that its settings share, and a table ``[[settings]]`` for each comparison:

``name``, ``where``    of its folder; paper, table and row
``figure``, ``ours``   what is compared (``simulations.lab.measured``); the paper's rule, "" for a
                       benchmark's setting
``published``          the paper's figure by rule: a share, or rounds (inf: not reached)
``config``             run-config keys of all rules
``rules``              tables by name: run-config keys, and ``reference`` and ``tune`` of the rule
``only``               the rules that run, in this order; by default all
``tune``, ``trials``   values to choose from, by hyperparameter or local setting; trials of each
                       rule, 0: as many as there are values
``seeds``              (1 to 5)
``impossible``         why it cannot be run here
``line``, ``curves``   its place in a figure of several settings; what its accuracy is drawn against
``like``               a setting before it, whose keys it has where it does not set them itself
``runs-in``            the setting whose runs it reads and adds to
``tuned-by``           the setting that chooses its hyperparameters; rules are of one name. One of
                       ``[[choices]]``, which are written as settings, only chooses

``config`` and each rule add to those of the file and of ``like``. ``name``, ``line``, ``runs-in``
and ``tuned-by`` are a setting's own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_strategies.core.schedules import check_flag, one_of, require
from fl_strategies.core.spelling import unknown
from simulations.config import RunConfig
from simulations.lab.measured import KINDS, Figure
from simulations.lab.tuners import Space
from simulations.lab.tuning import tunable

FOLDER = Path(__file__).with_name("studies")
STUDIES = sorted(path.stem for path in FOLDER.glob("*.toml"))
"""The names of all studies."""


class Rule(NamedTuple):
    """An algorithm with hyperparameters: what its run-config sets besides the setting's."""

    config: Mapping[str, Any]
    reference: bool = False
    """A row to compare with that is no baseline: training in one place, the authors' own form."""
    tune: Space | None = None
    """Values to choose from, by hyperparameter. None: the setting's; empty: nothing is tuned."""


class Line(NamedTuple):
    """A setting's place in a figure of several settings: one line for each rule."""

    figure: str
    """The figure's file, without suffix."""
    axis: str
    at: float


class Setting(NamedTuple):
    """A published comparison, and how it is run here; the keys of the file as the module says."""

    name: str
    where: str
    figure: Figure
    ours: str
    rules: Mapping[str, Rule]
    published: Mapping[str, float]
    config: Mapping[str, Any]
    tune: Space = MappingProxyType({})
    trials: int = 0
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    impossible: str = ""
    runs_in: Setting | None = None
    tuned_by: Setting | None = None
    line: Line | None = None
    curves: tuple[str, ...] = ()

    @property
    def horizon(self) -> int:
        """Rounds of a run."""
        return int(self.config["rounds"])


# ---- reading ------------------------------------------------------------------------------------

OWN = {"name": str, "line": dict, "runs-in": str, "tuned-by": str, "like": str}
KEYS = {
    "where": str,
    "figure": str,
    "ours": str,
    "published": dict,
    "config": dict,
    "rules": dict,
    "only": list,
    "tune": dict,
    "trials": int,
    "seeds": list,
    "impossible": str,
    "curves": list,
}
"""The keys of a setting alone, and those that a file may set for all; with their types."""


def load(study: str) -> list[Setting]:
    """Return the settings of a study. ``ValueError`` names the file and the key of a mistake."""
    path = FOLDER / f"{study}.toml"
    with _of(path):
        return settings_of(tomllib.loads(path.read_text()))


def settings_of(tables: Mapping[str, Any]) -> list[Setting]:
    """Return the settings of a file's tables."""
    lists = {"settings": list, "choices": list}
    _check(tables, KEYS | lists, ["settings"])
    shared = {key: value for key, value in tables.items() if key not in lists}
    read: dict[str, dict[str, Any]] = {}
    for place, table in enumerate(table for key in lists for table in tables.get(key, [])):
        with _of(table.get("name", f"setting {place + 1}")):
            _check(table, KEYS | OWN, ["name"])
            base = read[_known("like", table["like"], read)] if "like" in table else shared
            if table["name"] in read:
                raise ValueError("a second setting of this name")
            read[table["name"]] = _merged(base, table)
            _check(read[table["name"]], KEYS | OWN, ["where", "figure", "ours"])
    made: dict[str, Setting] = {}
    for key in reversed(lists):
        for table in tables.get(key, []):
            with _of(table["name"]):
                made[table["name"]] = _setting(read[table["name"]], made)
    return [made[table["name"]] for table in tables["settings"]]


def _merged(base: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the keys of ``own``; config and rules add to those of ``base``."""
    merged = {"published": {}, **{key: base[key] for key in base if key not in OWN}, **own}
    merged["config"] = {**base.get("config", {}), **own.get("config", {})}
    merged["rules"] = dict(base.get("rules", {}))
    for name, rule in own.get("rules", {}).items():
        require(isinstance(rule, dict), f"rules.{name}", "a table", rule)
        merged["rules"][name] = merged["rules"].get(name, {}) | rule
    return merged


def _setting(table: Mapping[str, Any], made: Mapping[str, Setting]) -> Setting:
    """Return the setting of a table, which may refer to those made before."""
    values = {key: value for key, value in table.items() if key not in ("like", "only")}
    one_of("figure", table["figure"], [*KINDS])
    names = [_known("only", name, table["rules"]) for name in table.get("only", table["rules"])]
    values["rules"] = {}
    for name in names:
        with _of(f"rules.{name}"):
            values["rules"][name] = _rule(table["rules"][name], table)
    for name in table["published"]:
        _known("published", name, names)
    _known("ours", table["ours"], ["", *names])
    if "rounds" not in table["config"]:
        raise ValueError("config: missing keys ['rounds']")
    values["tune"] = _space(table.get("tune", {}))
    for key in {"seeds", "curves"} & table.keys():
        values[key] = tuple(table[key])
    if line := table.get("line"):
        require(line.keys() == {*Line._fields}, "line", f"of the keys {Line._fields}", line)
        values["line"] = Line(**line)
    for key in {"runs-in", "tuned-by"} & table.keys():
        values[key] = made[_known(key, table[key], made)]
    return Setting(**{key.replace("-", "_"): value for key, value in values.items()})


def _rule(table: Mapping[str, Any], setting: Mapping[str, Any]) -> Rule:
    config = {key: value for key, value in table.items() if key not in ("reference", "tune")}
    space = _space(table["tune"]) if "tune" in table else None
    check_flag("reference", reference := table.get("reference", False))
    run = RunConfig.parse(setting["config"] | config)
    for name in _space(setting.get("tune", {})) if space is None else space:
        _known("tune", name, tunable(run))
    return Rule(config, reference, space)


def _space(table: Mapping[str, Any]) -> Space:
    for name, values in table.items():
        require(isinstance(values, list), f"tune.{name}", "a list", values)
    return {name: tuple(values) for name, values in table.items()}


def _check(table: Mapping[str, Any], keys: Mapping[str, type], needed: Sequence[str] = ()) -> None:
    """Raise ``ValueError`` for a missing or an unknown key, or one whose value has another type."""
    if missing := [key for key in needed if key not in table]:
        raise ValueError(f"missing keys {missing}")
    if wrong := [key for key in table if key not in keys]:
        raise ValueError(f"unknown keys {unknown(wrong, keys)}")
    for key, value in table.items():
        require(isinstance(value, keys[key]), key, f"of type {keys[key].__name__}", value)


def _known(key: str, name: str, known: Iterable[str]) -> str:
    """Return ``name``; raise ``ValueError`` unless it is ``known``."""
    if name not in [*known]:
        raise ValueError(f"{key}: unknown {unknown([name], known)}")
    return name


@contextmanager
def _of(where: object) -> Iterator[None]:
    """Have a ``ValueError`` begin with where it was."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
