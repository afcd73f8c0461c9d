"""Whatever value a setting is given: it is taken, or refused in one short line that names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from laws import START, TABLE, local
from problems import grid, quadratics, to_record

from fl_strategies import STRATEGIES, FedAvg
from fl_strategies.solvers.local import default_training
from simulations.config import RunConfig

LONG = 10_000
"""More characters than a message has, and more digits than Python makes an integer of (4300)."""
ODD: dict[str, Any] = {
    "long": 10**400,
    "longer": -(10**5000),
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-1e308": -1e308,
    "none": None,
    "true": True,
    "list": [0.1],
    "long list": [7] * LONG,
    "long number in a list": [10**5000],
    "dict": {1: 0.1},
    "bytes": b"\x00" * LONG,
    "complex": 1j,
    "object": object(),
    "class": int,
    "empty": "",
    "blank": " ",
    "long text": "x" * LONG,
    "long options": "x=" + "y" * LONG,
    "many options": " ".join(f"x{n}=1" for n in range(1000)),
    "schedule": "x=1:" + "1" * LONG,
    "lines": "a\nb\r\nc",
    "terminal": "\x1b[2J\x00\u202e",
    "surrogate": "\ud800",
}


def refusals(call: Callable[[Any], object]) -> Iterator[tuple[str, str]]:
    """Yield the odd values that ``call`` refuses, and in which words."""
    for name, value in ODD.items():
        try:
            call(value)
        except ValueError as error:
            yield name, str(error)


def check_short(name: str, odd: str, said: str) -> None:
    assert len(said) <= 300, (odd, said[:400])
    assert said.isprintable(), (odd, said)
    assert name in said, (odd, said)


@pytest.mark.parametrize("key", [f.name.replace("_", "-") for f in fields(RunConfig)])
def test_a_run_config_refuses_an_odd_value_in_one_short_line_with_the_key(key: str) -> None:
    refused = dict(refusals(lambda value: RunConfig.parse({key: value})))
    for odd, said in refused.items():
        check_short(key, odd, said)
    if isinstance(getattr(RunConfig, key.replace("-", "_")), int | float):
        assert {"long list", "nan", "long"} <= refused.keys()


DECLARED = {
    (name, declared.range): strategy
    for strategy in reversed(STRATEGIES.values())
    for name, declared in strategy.declarations.items()
}
"""A strategy for each name and range that any declares."""


def test_a_strategy_refuses_an_odd_value_in_one_short_line_with_the_name() -> None:
    for (name, _), strategy in DECLARED.items():
        for odd, said in refusals(
            lambda value, name=name, strategy=strategy: strategy(**{name: value})
        ):
            check_short(name, odd, said)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_an_extreme_number_is_refused_by_its_name_or_its_rounds_are_run() -> None:
    rows = {STRATEGIES[row.name]: row for row in TABLE}
    for (name, _), strategy in DECLARED.items():
        for value in (1e308, 5e-324) if strategy.declarations[name].kind is float else ():
            options = {"local": local(), "fraction_evaluate": 0.0, name: value}
            said = name
            try:
                rows[strategy].strategy(**options).start(grid(quadratics(3)), to_record(START), 2)
            except ValueError as error:
                said = str(error)
            assert name in said.replace("-", "_")


@pytest.mark.parametrize("setting", default_training().settings)
def test_local_refuses_an_odd_value_in_one_short_line_with_the_setting(setting: str) -> None:
    for odd, said in refusals(lambda value: FedAvg(local={setting: value})):
        check_short(setting, odd, said.replace("_", "-"))


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_name_is_refused_in_one_short_line(odd: str) -> None:
    name = ODD[odd] if isinstance(ODD[odd], str) else odd
    for call in (
        lambda: RunConfig.parse({name: 1}),
        lambda: FedAvg(local={name: 1}),
        lambda: FedAvg(**{name: 1}),
        lambda: RunConfig.parse({"params": f"{name}=1"}),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        said = str(caught.value)
        assert len(said) <= 300
        assert said.isprintable()
