"""The rules of a comparison: algorithms, perhaps with parts, and the settings of their runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_strategies import STRATEGIES
from fl_strategies.core.schedules import shown
from fl_strategies.core.settings_text import format_params, parse_params
from fl_strategies.core.spelling import listed, unknown
from fl_strategies.parts import PARTS, STAGES, parse_part
from fl_strategies.solvers.local import default_training
from simulations.config import RunConfig, Unused, hyperparameters_of, keeps_state
from simulations.defaults import defaults


def parse_rule(name: str) -> tuple[str, dict[str, str]]:
    """Return the algorithm and the parts by stage of a rule's name.

    Examples
    --------
    >>> parse_rule("fedprox+adam")
    ('fedprox', {'server_step': 'adam'})
    >>> parse_rule("fedprox+download=bfloat16")
    ('fedprox', {'download': 'bfloat16'})
    """
    algorithm, *names = name.split("+")
    parts: dict[str, str] = {}
    for part in names:
        stage, _, other = part.rpartition("=")
        stage = stage.replace("-", "_") or parse_part(other).stage
        if stage not in STAGES:
            raise ValueError(f"{name}: no stage {unknown([stage], STAGES)}; known: {[*STAGES]}")
        part = parse_part(other, stage).name
        if stage in parts:
            raise ValueError(f"{name} has two parts of one stage: {parts[stage]} and {part}")
        parts[stage] = part
    return algorithm, parts


def given_to(
    known: Mapping[str, Sequence[str]],
    *,
    items: Sequence[str],
    read: Callable[[str], Mapping[str, Any]],
    option: str,
    parts: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Return what ``items`` of ``option`` give each rule of ``known`` and each of its ``parts``.

    "name=value", of which ``read`` makes a value by its name, goes to every rule that has the name,
    but for those that "rule.name=value" gives another; "adam.name=value" goes to this part. Raises
    ``ValueError`` for a name that none has, and for a name that is given twice.
    """
    owned = {**known, **{name: [*PARTS[name].declarations] for name in parts}}
    shared: dict[str, dict[str, Any]] = {rule: {} for rule in known}
    own: dict[str, dict[str, Any]] = {owner: {} for owner in owned}
    for item in items:
        owner, dot, _ = item.partition("=")[0].rpartition(".")
        if dot and owner not in owned:
            hint = unknown([owner], owned)
            said = f"no algorithm {hint} here, which has {[*owned]}"
            if owner in PARTS:
                stage, setting = PARTS[owner].stage.replace("_", "-"), item[len(owner) + 1 :]
                said = f"of a part behind its name: --{stage} {shown(f'{owner} {setting}')}"
            raise ValueError(f"{option} {shown(item)}: {said}")
        asked = {owner: owned[owner]} if dot else known
        for name, value in read(item[len(owner) + 1 :] if dot else item).items():
            takers = [taker for taker, names in asked.items() if name in names]
            if not takers:
                names = sorted({name for names in asked.values() for name in names})
                raise ValueError(
                    f"{option}: no algorithm here has the hyperparameter"
                    f" {unknown([name], names)}; they have {listed(names)}{_where(name, owned)}"
                )
            for taker in takers:
                taken = (own if dot else shared)[taker]
                if name in taken:
                    raise ValueError(f"{option} {shown(item)} gives {taker} a second {name}")
                taken[name] = value
    return {owner: shared.get(owner, {}) | own[owner] for owner in owned}


def _where(name: str, owned: Mapping[str, Sequence[str]]) -> str:
    """Return where ``name`` is given, if it is no algorithm's hyperparameter; "" if nowhere."""
    of = [owner for owner, names in owned.items() if owner in PARTS and name in names]
    if of:
        return f"; of a part: {of[0]}.{name}"
    key = name.replace("_", "-")
    return f"; a local setting: --{key}" if key in default_training().settings else ""


def configs_for(
    rules: Sequence[str], params: Sequence[str], common: dict[str, Any], folder: Path
) -> list[RunConfig]:
    """Return one checked config per rule, before anything runs.

    A rule is an algorithm, or one with parts: "fedprox+adam". ``params`` are given to those that
    have them (:func:`given_to`). Local settings that none uses are refused; an algorithm that alone
    has no use for them does not get them.
    """
    parsed_rules = {rule: parse_rule(rule) for rule in rules}
    if wrong := sorted({algorithm for algorithm, _ in parsed_rules.values()} - STRATEGIES.keys()):
        hint = unknown(wrong, STRATEGIES)
        raise ValueError(f"unknown algorithms {hint}; known: {listed(sorted(STRATEGIES))}")
    if len(parsed_rules) < len(rules):
        raise ValueError(f"each algorithm once, got {list(rules)}")
    for rule, (_, parts) in parsed_rules.items():
        if twice := [stage for stage in parts if common.get(stage.replace("_", "-"))]:
            key = twice[0].replace("_", "-")
            raise ValueError(f"{rule} names its {key}, and --{key} {shown(common[key])} another")
    known = {rule: hyperparameters_of(algorithm) for rule, (algorithm, _) in parsed_rules.items()}
    used = {name for _, parts in parsed_rules.values() for name in parts.values()}
    values = given_to(known, items=params, read=parse_params, option="param", parts=used)
    keeps = any(
        keeps_state(
            a, parts.get("compression", ""), common.get("share") or defaults(a, "").get("share")
        )
        for a, parts in parsed_rules.values()
    )
    if not keeps and (states := common.get("state-dir")):
        raise ValueError(f"state-dir is {shown(states)}, and no clients here keep a state")

    def parsed(rule: str, settings: Mapping[str, Any]) -> RunConfig:
        algorithm, parts = parsed_rules[rule]
        texts = {
            stage.replace("_", "-"): f"{name} {format_params(values[name])}".strip()
            for stage, name in parts.items()
        }
        params = format_params(values[rule])
        about = {"algorithm": algorithm, "params": params, "output": str(folder / rule)}
        return RunConfig.parse({**settings, **texts, **about})

    configs: dict[str, RunConfig | Unused] = {}
    for rule in rules:
        try:
            configs[rule] = parsed(rule, common)
        except Unused as error:
            configs[rule] = error
    useless = [one for one in configs.values() if isinstance(one, Unused)]
    if len(useless) == len(configs):
        raise useless[0]
    return [
        parsed(name, {k: v for k, v in common.items() if k not in one.names})
        if isinstance(one, Unused)
        else one
        for name, one in configs.items()
    ]
