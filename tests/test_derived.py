"""Clients that are derived: what a rule gets of a request, and which classes are made."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hosted import federation
from laws import START, local
from local_work import CONFIG, refused
from problems import grid, make_client_app, quadratics, to_record, to_vector

import clients
from clients import CLIENTS, ContextStore, FederatedClient, InProcessGrid, client_of
from fl_strategies import (
    STRATEGIES,
    Averaging,
    ClientHalf,
    FedAvg,
    FedProx,
    Step,
    Subproblem,
    number,
)


class Pulled(NamedTuple):
    """What a client keeps: what its rule got."""

    w: Any
    eta: float
    pull: float
    extra: float


def first_state(theta: Any, *, eta: float) -> Pulled:
    return Pulled(theta, eta, 0.0, 0.0)


def client_rule(
    state: Pulled, theta: Any, oracle: Any, *, eta: float, pull: float, extra: float = 7.0
) -> Step:
    """FedProx by other names; its state tells what it got."""
    solved = oracle.solve(theta, Subproblem(pull=pull, centre=theta))
    return Step(solved.w, Pulled(solved.w, eta, pull, extra), solved=solved)


class Own(Averaging):
    algorithm = "own"
    client_half = ClientHalf(
        client_rule, Pulled, first_state, own="w", reads={"pull": lambda request: request["mu"] / 2}
    )
    eta: float = number(default=0.5, about="A number.", sent="own-eta")
    mu: float = number(default=0.4, about="Twice the pull.", sent="mu")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    STRATEGIES["own"] = Own
    yield
    del STRATEGIES["own"]


def kept(**request: Any) -> Pulled:
    """Return what a client keeps after one request."""
    (q,) = quadratics(1)
    store = ContextStore(next(iter(grid([q]).contexts.values())))
    client = client_of("own")(q.problem(), client_id=0, store=store)
    client.fit([START[:4].reshape(2, 2), START[4:]], {**CONFIG, **request})
    keeper = client.keeper(request, client.settings(request))
    state: Pulled = keeper.peeked({"acked-round": 1}, client.problem.model.vector).state
    return state


def test_a_rule_gets_its_arguments_by_their_names() -> None:
    """A hyperparameter by the key under which it is sent, what is read, what has a default."""
    assert kept(**{"own-eta": 0.25, "mu": 3.0})[1:] == (0.25, 1.5, 7.0)
    assert kept(**{"own-eta": 0.25, "mu": 3.0, "extra": 2})[1:] == (0.25, 1.5, 2.0)
    for lacking in ("own-eta", "mu"):
        request = {"own-eta": 0.25, "mu": 3.0}
        del request[lacking]
        assert f"the request lacks {lacking!r}" in refused(lambda: kept(**request))  # noqa: B023


def test_a_hyperparameter_is_needed_although_the_argument_has_a_default() -> None:
    def rule(theta: Any, oracle: Any, *, eta: float = 1.0) -> Step:
        return Step(theta)

    class Unsent(Own):
        algorithm = "own"
        client_half = ClientHalf(rule)
        eta: float = number(default=0.5, about="A number that is not sent.")

    STRATEGIES["own"] = Unsent
    assert "the strategy sends what it declares with sent='eta'" in refused(kept)


def in_processes() -> InProcessGrid:
    return InProcessGrid(make_client_app(quadratics(6)), 6, workers=2)


@pytest.mark.parametrize(
    "made",
    [
        lambda: grid(quadratics(6)),
        federation,
        pytest.param(in_processes, marks=[pytest.mark.slow, pytest.mark.xdist_group("workers")]),
    ],
    ids=["nodes", "hosts", "processes"],
)
def test_one_entry_registers_an_algorithm(made: Any) -> None:
    """It is FedProx of half the mu."""
    options: dict[str, Any] = {"local": local(), "fraction_evaluate": 0.0}
    models = [
        to_vector(strategy.start(made(), to_record(START), 3).arrays)
        for strategy in (Own(mu=0.4, **options), FedProx(mu=0.2, **options))
    ]
    np.testing.assert_array_equal(*models)


def test_an_entry_that_is_made_again_has_the_clients_of_the_last() -> None:
    class Again(Own):
        algorithm = "own"
        client_half = FedAvg.client_half

    before = client_of("own")
    assert (before.__module__, before.__name__) == (__name__, "OwnClient")
    STRATEGIES["own"] = Again
    assert client_of("own") is not before
    assert client_of("own").state_type is None


@pytest.mark.parametrize(
    ("half", "said"),
    [
        (None, "Bad has no clients: it needs client_half = ClientHalf(client_rule, ...), or an"),
        (ClientHalf(client_rule, Pulled), "Bad.client_half needs both a state and a first_state"),
        (ClientHalf(client_rule, None, first_state), "needs both a state and a first_state, or"),
    ],
)
def test_a_half_that_lacks_something_makes_no_client(half: Any, said: str) -> None:
    members = {"algorithm": "own", "client_half": half, "__module__": __name__}
    STRATEGIES["own"] = type("Bad", (Own,), members)
    with pytest.raises(TypeError) as caught:
        client_of("own")
    assert said in str(caught.value)


def by_place(theta: Any, oracle: Any, mu: float = 3.0) -> Step:
    return Step(theta)


def any_name(theta: Any, oracle: Any, **others: Any) -> Step:
    return Step(theta)


@pytest.mark.parametrize("rule", [by_place, any_name])
def test_an_argument_that_no_rule_would_get_is_refused(rule: Any) -> None:
    half = {"algorithm": "own", "client_half": ClientHalf(rule), "__module__": __name__}
    STRATEGIES["own"] = type("Bad", (Own,), half)
    with pytest.raises(TypeError, match=r"must take all but its first 2 by name, after \*: \['"):
        client_of("own")


HALF = ClientHalf(lambda theta, oracle: Step(theta))


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"client_half": HALF}, "Bad has a client_half of its own, and needs an `algorithm` of"),
        ({"client_half": HALF, "algorithm": "bad", "runs": "fedavg"}, "and no `runs`"),
        ({"catch_up": lambda *_: None, "for_client": lambda *_: None}, "either a catch_up or a"),
        ({"extra_vectors": ("catch_up",)}, "extra_vectors must not be called ['catch_up']"),
    ],
)
def test_what_clients_would_never_get_is_refused(members: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        type("Bad", (FedAvg,), members)


def test_a_plain_value_in_a_subclass_is_the_default_of_what_it_hides() -> None:
    class Stronger(FedProx):
        mu = 5.0  # type: ignore[assignment]

    assert (Stronger().mu, Stronger(mu=2.0).mu, FedProx().mu) == (5.0, 2.0, 0.01)
    with pytest.raises(ValueError, match="mu must be >= 0"):
        type("Wrong", (FedProx,), {"mu": -1.0})()


@pytest.mark.parametrize("client", dict.fromkeys(CLIENTS.values()), ids=lambda c: c.__name__)
def test_the_client_of_an_algorithm_is_a_class_like_any_other(
    client: type[FederatedClient],
) -> None:
    assert getattr(clients, client.__name__) is client
    assert pickle.loads(pickle.dumps(client)) is client
    assert inspect.signature(client) == inspect.signature(FederatedClient)
    assert client.__doc__
    assert client.__name__ in clients.__all__


def test_type_checkers_know_the_clients() -> None:
    stub = Path(clients.__file__).with_name("algorithms.pyi")
    known = [
        node.name for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ClassDef)
    ]
    made = {each for each in CLIENTS.values() if each.__module__ == "clients.algorithms"}
    assert sorted(known) == sorted(each.__name__ for each in made)
