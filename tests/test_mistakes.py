"""Mistakes in an algorithm of one's own: each is told at once, in one sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from laws import START, quiet
from problems import grid, quadratics, to_record

from clients import CLIENTS, FederatedClient, Step
from fl_strategies import STRATEGIES, FedAvg, FederatedStrategy, FedProx, number, weighted_mean
from fl_strategies.server.declared import OWN

ALL = np.ones(5)
RATE: Any = number(default=1.0, about="Rate.")


def sent(key: str) -> dict[str, Any]:
    """Return the attributes of a class whose hyperparameter ``b`` is sent as ``key``."""
    return {"b": number(default=1.0, about="Rate.", sent=key)}


class Own(FedAvg):
    """An algorithm without mistakes, whose model travels with a vector and a catch-up vector."""

    algorithm, averages, extra_vectors = "own", "", ("v",)

    def vectors(self, state: Any, round: Any) -> Any:
        return {"v": ALL}

    def catch_up(self, state: Any, since: int) -> Any:
        return ALL

    def aggregate(self, state: Any, round: Any, uploads: Any) -> Any:
        return weighted_mean((upload.vector, 1.0) for upload in uploads), state, {"own": 1.0}


class OwnClient(FederatedClient):
    """Its client half."""

    algorithm, extra_vectors = "own", ("v",)

    def step(self, state: Any, received: Any, oracle: Any, config: Any) -> Any:
        v = received.extra_vectors["v"]
        return Step(received.theta + v + received.catch_up, extra_vectors={"v": v})


Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs ``Own`` and ``OwnClient``, of which some methods return other things."""

    def start(server: dict[str, Any], client: dict[str, Any], rounds: int = 1) -> Any:
        def returning(made: Any) -> Any:
            return made if callable(made) else lambda *_: made

        methods = {name: returning(made) for name, made in server.items()}
        strategy: type[FederatedStrategy] = type("Own", (Own,), {"averages": "", **methods})
        monkeypatch.setitem(STRATEGIES, "own", strategy)
        monkeypatch.setitem(CLIENTS, "own", type("OwnClient", (OwnClient,), client))
        return quiet(strategy).start(grid(quadratics(2)), to_record(START), rounds)

    return start


@pytest.mark.parametrize(
    ("hook", "made", "message"),
    [
        ("vectors", {"v": np.ones(7)}, r"Own.vectors must return 'v' [5], got (7,)"),
        ("vectors", {"v": np.ones(4)}, r"'v' [5], got (4,)"),
        ("vectors", {"v": 1.0}, r"'v' [5], a NumPy array, got 1.0"),
        ("vectors", {"v": torch.ones(5)}, r"'v' [5], a NumPy array, got tensor([1., 1., 1., 1."),
        ("vectors", {"v": np.full(5, np.nan)}, r"'v' [5] of finite numbers, got nan at 0"),
        ("vectors", {"v": np.full(5, "one")}, r"'v' [5] of real numbers, got the type <U3"),
        ("vectors", {}, r"Own.vectors must return vectors of the names ['v'], got []"),
        ("vectors", {"v": ALL, "u": ALL}, r"of the names ['v'], got ['v', 'u']"),
        ("vectors", None, r"Own.vectors must return a vector for each of ['v'], got None"),
        ("catch_up", np.ones(7), r"Own.catch_up must return a vector [5], got (7,)"),
        ("catch_up", np.ones((1, 5)), r"Own.catch_up must return a vector [5], got (1, 5)"),
        ("catch_up", 1.0, r"a vector [5], a NumPy array, got 1.0"),
        ("catch_up", np.full(5, np.inf), r"a vector [5] of finite numbers, got inf at 0"),
    ],
)
def test_what_a_hook_must_return_is_said_with_what_it_returned(
    hook: str, made: Any, message: str, run: Run
) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        run({hook: made}, {})
    assert message in str(error.value)


def test_an_algorithm_without_mistakes_runs(run: Run) -> None:
    found = run({}, {}).arrays["tail"].numpy()
    np.testing.assert_array_equal(found, START[-1:] + 2.0)


@pytest.mark.parametrize(
    ("base", "attributes", "message"),
    [
        *(
            (base, {"extra_vectors": "v"}, "Bad.extra_vectors must be a tuple of names, as ('c',)")
            for base in (FederatedStrategy, FederatedClient)
        ),
        (FedAvg, {"reports": "mine"}, "Bad.reports must be a tuple of names"),
        (FedAvg, sent("lr"), "Bad.b is sent as 'lr', which requests use for a setting of `local`"),
        *(
            (FedAvg, sent(key), f"Bad.b is sent as '{key}', which requests use for the run itself")
            for key in ("seed", "server-round", "acked-round", "run-id", "algorithm", "round")
        ),
        (
            FedProx,
            sent("proximal-mu"),
            "is sent as 'proximal-mu', which requests use for the hyperparameter",
        ),
        (FedAvg, sent("beta_1"), "is sent as 'beta_1', and clients read 'beta-1': send it as that"),
        (FedAvg, {"seed": RATE}, "Bad.seed is an option of every strategy"),
        (FedAvg, {"weight": RATE}, "Bad.weight is a hook or attribute of every strategy"),
        (FedAvg, {"state": RATE}, "Bad.state is an attribute of every strategy"),
    ],
)
def test_a_wrong_declaration_is_told_when_the_class_is_defined(
    base: type, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as error:
        type("Bad", (base,), {"algorithm": "bad", **attributes})
    assert message in str(error.value)


def test_every_attribute_that_a_strategy_sets_itself_is_taken() -> None:
    made = FedAvg()
    assert vars(made).keys() - made.declarations.keys() == OWN
