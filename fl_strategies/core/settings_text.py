"""Settings as text, the form in which a run-config holds them and clients get them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fl_strategies.core.hyperparameters import is_per_client
from fl_strategies.core.schedules import shown


def parse_params(text: str, setting: str = "") -> dict[str, Any]:
    """Return ``{"rho": 0.01, "eta": {1: 1.0, 60: 0.5}}`` from ``"rho=0.01 eta=1:1.0;60:0.5"``.

    Raises ``ValueError``, which begins with the ``setting`` that has the text, for an item that is
    not ``name=value``, a name that is given twice, or an invalid schedule.

    Examples
    --------
    >>> parse_params("rho=0.01 eta=1:1.0;60:0.5 weights=uniform gamma=0.5,2")
    {'rho': 0.01, 'eta': {1: 1.0, 60: 0.5}, 'weights': 'uniform', 'gamma': [0.5, 2.0]}
    """
    try:
        return _params(text)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}" if setting else str(error)) from None


def _params(text: str) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for item in text.split():
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
