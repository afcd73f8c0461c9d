"""Mistakes in an algorithm of one's own: each is told at once, in one sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from laws import START, quiet
from problems import grid, quadratics, to_record

from clients import CLIENTS, FederatedClient, Step
from fl_strategies import (
    STRATEGIES,
    FedAvg,
    FederatedStrategy,
    FedProx,
    NothingUsable,
    number,
    weighted_mean,
)
from fl_strategies.core.oracle import Tally
from fl_strategies.server.algorithm import OWN

ALL = np.ones(5)
RATE: Any = number(default=1.0, about="Rate.")


def sent(key: str) -> dict[str, Any]:
    """Return the attributes of a class whose hyperparameter ``b`` is sent as ``key``."""
    return {"b": number(default=1.0, about="Rate.", sent=key)}


class State(NamedTuple):
    """What the server and each client keep."""

    g: Any
    count: int = 0


class Own(FedAvg):
    """An algorithm without mistakes, whose model travels with a vector and a catch-up vector."""

    algorithm, averages, extra_vectors = "own", "", ("v",)

    def vectors(self, state: Any, round: Any) -> Any:
        return {"v": ALL}

    def catch_up(self, state: Any, since: int) -> Any:
        return ALL

    def aggregate(self, state: Any, round: Any, uploads: Any) -> Any:
        mean = weighted_mean((upload.vector, 1.0) for upload in uploads)
        return mean, self.next_state(state), self.info()

    def first_state(self, theta: Any) -> Any:
        return State(theta)

    def next_state(self, state: Any) -> Any:
        return state

    def info(self) -> Any:
        return {"own": np.float32(1.0)}

    @property
    def scalar_bounds(self) -> Any:
        return {"work": (0.0, 1.0)}


class OwnClient(FederatedClient):
    """Its client half, which keeps g and counts rounds."""

    algorithm, extra_vectors, state_type = "own", ("v",), State

    def first_state(self, theta: Any, config: Any) -> Any:
        return State(0.0 * theta)

    def step(self, state: State, received: Any, oracle: Any, config: Any) -> Any:
        v, g = received.extra_vectors["v"], oracle.gradient(received.theta)
        state = State(g.vector, state.count + 1)
        moved = received.theta + v + received.catch_up
        solved = Tally().plus(g).mean(moved, 1)
        return Step(moved, state, {"work": torch.tensor(0.5)}, solved, {"v": v})


def with_step(**fields: Any) -> dict[str, Any]:
    """Return the methods of a client whose step returns other ``fields``."""

    def step(self: Any, *args: Any) -> Any:
        return OwnClient.step(self, *args)._replace(**fields)

    return {"step": step}


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
        ("info", None, "Own.aggregate must return a dict of numbers as info, got None"),
        ("info", {"note": None}, "must return numbers by name as info, got None as 'note'"),
        ("info", {"note": "hi"}, "must return numbers by name as info, got 'hi' as 'note'"),
        ("info", {"note": ALL}, "as info, got array([1., 1., 1., 1., 1.]) as 'note'"),
        ("info", {"clients-used": 17.0}, "Own.aggregate must not report ['clients-used']: clients"),
        ("info", {"train-loss": 3.0, "a": 1.0}, "must not report ['train-loss']"),
        ("info", {"work": 3.0, "seconds": 1.0}, "must not report ['work', 'seconds']"),
        (
            "first_state",
            {"v": ALL},
            "Own.first_state must return a state that is a named tuple, a frozen",
        ),
        ("first_state", ALL, "or None, got array([1., 1., 1., 1., 1.])"),
        (
            "first_state",
            (ALL, 1),
            "Own.first_state must return a state that is a named tuple, a frozen",
        ),
        ("first_state", State({1, 2}), "NumPy arrays, lists and dicts, got {1, 2} as g"),
        ("first_state", State(torch.ones(2)), "lists and dicts, got tensor([1., 1.]) as g"),
        ("next_state", None, "Own.aggregate must return a State as its state, got None"),
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


FIVE, SEVEN = torch.ones(5, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
NAN = torch.full((5,), torch.nan, dtype=torch.float64)


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ({"step": lambda *_: FIVE}, "AttributeError: 'Tensor' object has no attribute 'state'"),
        (with_step(upload=SEVEN), "must return an upload, a tensor [5], got a tensor [7]"),
        (with_step(upload=0.5), "must return an upload, a tensor [5], got 0.5"),
        (with_step(upload=ALL), "must return an upload, a tensor [5], got a NumPy array [5]"),
        (with_step(extra_vectors={}), "must return extra vectors ['v'], got []"),
        (with_step(extra_vectors={"v": SEVEN}), "vector 'v', a tensor [5], got a tensor [7]"),
        (with_step(state=None), "OwnClient.step must return a State as its state, got None"),
        (with_step(state=FIVE), "must return a State as its state, got a tensor [5]"),
        (with_step(state={"g": FIVE}), "must return a State as its state, got a dict"),
        (with_step(state=State(SEVEN)), "whose g is a tensor [5], as before, got a tensor [7]"),
        (
            with_step(state=State(FIVE, FIVE)),
            "whose count is a number, as before, got a tensor",
        ),
        (with_step(state=State("g")), "whose g is a tensor or a number, got 'g'"),
        (with_step(state=State(NAN)), "OwnClient.step returns a state whose g is not finite"),
        ({"first_state": lambda *_: FIVE}, "first_state must return a State, got a tensor [5]"),
        (with_step(scalars={"work": "0.5"}), "must return a number as 'work', got '0.5'"),
        (with_step(scalars={"work": FIVE}), "must return a number as 'work', got a tensor [5]"),
        (
            with_step(scalars={"steps": 9, "train-loss": 7.0}),
            "must not return scalars ['steps', 'train-loss'], which the client itself reports",
        ),
        (
            {"step": lambda self, s, r, o, config: config["rho"]},
            "the request lacks 'rho': the strategy sends what it declares with sent='rho'",
        ),
        (
            {"extra_vectors": ()},
            "Own has extra_vectors ['v'], and OwnClient []: both halves of an algorithm declare",
        ),
    ],
)
def test_a_clients_mistake_is_told_by_the_name_of_its_class(
    client: dict[str, Any], message: str, run: Run
) -> None:
    with pytest.raises(NothingUsable) as error:
        run({}, client, 3)
    assert message in str(error.value)
    assert "2 clients [0, 1]" in str(error.value)


def test_an_algorithm_without_mistakes_runs(run: Run) -> None:
    result = run({}, {}, 2)
    np.testing.assert_array_equal(result.arrays["tail"].numpy(), START[-1:] + 4.0)
    assert result.train_metrics_clientapp[2]["work"] == 0.5


@pytest.mark.parametrize(
    ("base", "attributes", "message"),
    [
        *(
            (base, {"extra_vectors": "v"}, "Bad.extra_vectors must be a tuple of names, as ('c',)")
            for base in (FederatedStrategy, FederatedClient)
        ),
        (FederatedClient, {"first_state": lambda *_: 1}, "Bad has first_state, and no state_type"),
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


def writes_into_theta(self: Any, state: Any, round: Any, uploads: Any) -> Any:
    round.theta[:] = 1.0


def writes_into_state(self: Any, state: Any, round: Any, uploads: Any) -> Any:
    state.g[:] = 1.0


def writes_into_upload(self: Any, state: Any, round: Any, uploads: Any) -> Any:
    uploads[0].vector[:] = 1.0


@pytest.mark.parametrize("aggregate", [writes_into_theta, writes_into_state, writes_into_upload])
def test_aggregate_cannot_write_into_its_arguments(aggregate: Callable[..., Any], run: Run) -> None:
    with pytest.raises((ValueError, TypeError), match=r"read-only|item assignment"):
        run({"aggregate": aggregate}, {})


def test_a_strategy_without_a_name_is_refused() -> None:
    nameless: Any = type("Nameless", (FederatedStrategy,), {})
    with pytest.raises(TypeError, match="Nameless must say its name, by which clients know it"):
        nameless()


def test_every_attribute_that_a_strategy_sets_itself_is_taken() -> None:
    made = FedAvg()
    assert vars(made).keys() - made.declarations.keys() == OWN
