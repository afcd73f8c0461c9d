"""Settings as text, the form in which a run-config holds them and clients get them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fl_strategies.core.hyperparameters import is_per_client
from fl_strategies.core.schedules import DECAYS, shown

BRACKETED = r"\([^][()]*\)|\[[^][()]*\]"
"""A tuple or list as Python has it, perhaps with spaces."""
CALL = rf"({'|'.join(DECAYS)})(\([^()]*\))"
"""A schedule in closed form."""


def parse_params(text: str, setting: str = "") -> dict[str, Any]:
    """Return ``{"rho": 0.01, "eta": {1: 1.0, 60: 0.5}}`` from ``"rho=0.01 eta=1:1.0;60:0.5"``.

    Raises ``ValueError``, which begins with the ``setting`` that has the text, for an item that is
    not ``name=value``, a name that is given twice, or an invalid schedule. A tuple, a list and a
    function that makes a schedule may be as in Python.

    Examples
    --------
    >>> parse_params("rho=0.01 eta=1:1.0;60:0.5 weights=uniform gamma=0.5,2")
    {'rho': 0.01, 'eta': {1: 1.0, 60: 0.5}, 'weights': 'uniform', 'gamma': [0.5, 2.0]}
    >>> parse_params("betas=(0.9, 0.95) eps=1e-6")
    {'betas': (0.9, 0.95), 'eps': 1e-06}
    >>> parse_params("rho=linear_decay(1.0, 0.5, 3)")
    {'rho': {1: 1.0, 2: 0.75, 3: 0.5}}
    """
    try:
        return _params(text)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}" if setting else str(error)) from None


def _params(text: str) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for item in re.findall(rf"(?:{BRACKETED}|\S)+", text):
        name, sign, value = item.partition("=")
        if not (name and sign and value):
            raise ValueError(f"an option is given as name=value, got {shown(item)}")
        name = name.replace("-", "_")
        if name in params:
            raise ValueError(f"each option once, got {shown(name)} twice in {shown(text)}")
        params[name] = _value(name, value)
    return params


def format_params(params: Mapping[str, Any]) -> str:
    """Return the text of ``params``, the inverse of :func:`parse_params`."""
    texts = []
    for name, value in params.items():
        if isinstance(value, Mapping):
            value = ";".join(f"{first}:{number}" for first, number in value.items())
        elif is_per_client(value):
            value = ",".join(map(str, value))
        texts.append(f"{name}={value}")
    return " ".join(texts)


def _value(name: str, text: str) -> Any:
    if re.fullmatch(BRACKETED, text):
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(text)
    if call := re.fullmatch(CALL, text):
        try:
            return DECAYS[call[1]](*ast.literal_eval(call[2]))
        except (ValueError, SyntaxError, TypeError) as error:
            raise ValueError(f"{name}: {call[0]}: {error}") from None
    if ":" in text:
        try:
            pairs = [part.partition(":") for part in text.split(";")]
            schedule = {int(first): float(number) for first, _, number in pairs}
        except ValueError:
            raise ValueError(
                f"a schedule is given as 1:1.0;60:0.5, got {shown(f'{name}={text}')}"
            ) from None
        if len(schedule) < len(pairs):
            raise ValueError(f"a schedule has each round once, got {shown(f'{name}={text}')}")
        return schedule
    if "," in text:
        with suppress(ValueError):
            return [float(number) for number in text.split(",")]
    if text in ("None", "none"):
        return None
    if text in ("True", "true", "False", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
