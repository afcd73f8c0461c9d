"""Problems, algorithms and wrappers of the tests of what Flower puts around a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from federations import serve
from flwr.client.mod import fixedclipping_mod as legacy_fixedclipping_mod
from flwr.clientapp.mod import fixedclipping_mod
from flwr.server import strategy as legacy_wrappers
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from laws import START, TABLE, local
from problems import grid, quadratics, to_record

from fl_strategies import STRATEGIES, FederatedStrategy, as_legacy

PROBLEMS = quadratics(3)

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "local": local()}
ADMM: dict[str, Any] = {"rho": 0.5, "min_available_nodes": 4, **QUIET}

OF_MODELS = {name for name, strategy in STRATEGIES.items() if strategy.averages == "models"}
OF_CHANGES = {name for name, strategy in STRATEGIES.items() if strategy.averages == "changes"}


def rows(names: set[str], *, but: bool = False) -> Any:
    found = [row for row in TABLE if (row.name in names) is not but]
    return pytest.mark.parametrize("row", found, ids=lambda row: row.name)


def server_side(strategy: Any, noise_multiplier: float, bound: float) -> tuple[Any, list[Any]]:
    wrapper = DifferentialPrivacyServerSideFixedClipping(strategy, noise_multiplier, bound, 3)
    return wrapper, []


def client_side(strategy: Any, noise_multiplier: float, bound: float) -> tuple[Any, list[Any]]:
    wrapper = DifferentialPrivacyClientSideFixedClipping(strategy, noise_multiplier, bound, 3)
    return wrapper, [fixedclipping_mod]


Side = Callable[[Any, float, float], tuple[Any, list[Any]]]
both_sides = pytest.mark.parametrize("side", [server_side, client_side])


def legacy_run(
    strategy: FederatedStrategy,
    wrap: Callable[[Any], Any],
    rounds: int,
    evaluate_fn: Any = None,
    **options: Any,
) -> np.ndarray:
    adapter = wrap(as_legacy(strategy, to_record(START), evaluate_fn=evaluate_fn))
    return serve(adapter, grid(PROBLEMS, **options), rounds)[0]


LEGACY_SIDES = [
    (legacy_wrappers.DifferentialPrivacyServerSideFixedClipping, []),
    (legacy_wrappers.DifferentialPrivacyClientSideFixedClipping, [legacy_fixedclipping_mod]),
]
legacy_sides = pytest.mark.parametrize(
    ("wrapper", "mods"), LEGACY_SIDES, ids=["server-side", "client-side"]
)
