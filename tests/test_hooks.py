"""A declared hook has one reader, and a hook that nobody calls is told where its class is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hosted import federation
from laws import START, local
from problems import grid, quadratics, to_record, to_vector

from fl_strategies import FedAvg, FedBC, FedBCD, FederatedStrategy, FedNova, PFedMe, QFedAvg
from fl_strategies.core.records import Upload
from fl_strategies.parts import Clock, Deadline, Gaussian, Uniform

CLIENTS = 6
WEIGHTS = np.array([4.0, 0.0, 1.0, 0.0, 2.0, 3.0])


def by_table(upload: Upload) -> float:
    return float(WEIGHTS[upload.client])


def one_round(strategy: FederatedStrategy, federation: Any) -> np.ndarray:
    return to_vector(strategy.start(federation, to_record(START), 1).arrays)


@pytest.mark.parametrize(
    ("base", "options"), [(FedAvg, {}), (PFedMe, {"eta": 0.1}), (FedBC, {})], ids=str
)
def test_the_weights_that_a_class_overrides_are_those_of_the_rule(
    base: Any, options: dict[str, Any]
) -> None:
    """The models of single clients, averaged by these weights."""
    common = {"local": local(), "fraction_evaluate": 0.0, **options}
    mine = type("Mine", (base,), {"weight": staticmethod(by_table)})(**common)
    found = one_round(mine, grid(quadratics(CLIENTS)))
    shares = WEIGHTS / WEIGHTS.sum()
    assert [row["weight-share"] for row in mine.run.clients.values()] == pytest.approx(shares)
    models = [
        one_round(
            base(selection=lambda round, client=client: [client], **common),
            grid(quadratics(CLIENTS)),
        )
        for client in range(CLIENTS)
    ]
    np.testing.assert_allclose(found, shares @ models, rtol=1e-12)


def test_hosts_do_not_fold_by_weights_that_they_do_not_know() -> None:
    class Mine(FedAvg):
        weight = staticmethod(by_table)

    options: dict[str, Any] = {"local": local(), "fraction_evaluate": 0.0, "fold_memory": 0}
    alone = one_round(Mine(**options), federation("nodes of one"))
    np.testing.assert_array_equal(one_round(Mine(**options), federation("2 hosts")), alone)
    with pytest.raises(ValueError, match='fold must be "auto" or "off" for Mine'):
        Mine(fold="on")


def test_weights_of_ones_own_are_not_equal_for_privacy() -> None:
    class Mine(FedAvg):
        weight = staticmethod(by_table)

    with pytest.raises(ValueError, match="Mine weights uploads by what clients say"):
        Mine(weights="uniform", privacy=Gaussian())


class Middle:
    """Another rule, for any class."""

    def aggregate(self, state: Any, round: Any, uploads: Any) -> Any:
        return np.median([upload.vector for upload in uploads], axis=0), state, {}


class OfMiddle(Middle, FedAvg):
    averages = "models"


def test_a_class_with_another_rule_does_not_inherit_that_hosts_may_fold() -> None:
    assert not OfMiddle.folds
    assert not OfMiddle().can_fold


@pytest.mark.parametrize("hook", ["select", "sample"])
def test_no_part_selects_in_the_place_of_a_class_that_does(hook: str) -> None:
    class Mine(FedAvg):
        pass

    setattr(Mine, hook, lambda self, *_: [0])
    with pytest.raises(ValueError, match="Mine"):
        Mine(selection=Uniform())
    with pytest.raises(ValueError, match="Mine, which itself says who is asked"):
        Mine(clock=Clock(step=1.0), pace=Deadline(over_select=1.5))


def old(*names: str) -> Callable[..., Any]:
    """Return a method with these arguments."""
    scope: dict[str, Any] = {}
    exec(f"def method(self, {', '.join(names)}): ...", scope)  # a test's own text
    method: Callable[..., Any] = scope["method"]
    return method


REFUSED: list[tuple[Any, str, Any, str]] = [
    (FedAvg, "aggregate_fit", old("server_round", "results", "failures"), "aggregate_train"),
    (FedAvg, "configure_fit", old("server_round", "parameters", "client_manager"), "client_config"),
    (FedAvg, "initialize_parameters", old("client_manager"), "initial_arrays"),
    (FedAvg, "evaluate", old("server_round", "parameters"), "evaluate_fn"),
    (FedAvg, "num_fit_clients", old("available"), "min_train_nodes"),
    (FedAvg, "num_evaluation_clients", old("available"), "min_evaluate_nodes"),
    (
        FedAvg,
        "aggregate_evaluate",
        old("server_round", "results", "failures"),
        r"\(self, server_round, results, failures\), and is called with \(server_round, replies\)",
    ),
    (
        FedAvg,
        "configure_evaluate",
        old("server_round", "parameters", "client_manager"),
        r"called with \(server_round, arrays, config, grid\)",
    ),
    (FedAvg, "asked_of", old("clients"), "select does not read"),
    (FedAvg, "weight", old("upload"), r"takes \['upload'\], which are no hyperparameters"),
    (FedNova, "weight", staticmethod(by_table), r"FedNova\.aggregate does not read it"),
    (QFedAvg, "weight", staticmethod(by_table), r"QFedAvg\.aggregate does not read it"),
    (FedBCD, "weight", staticmethod(by_table), "aggregate does not read it"),
    (OfMiddle, "weight", staticmethod(by_table), r"Middle\.aggregate does not read it"),
]


@pytest.mark.parametrize(
    ("base", "name", "method", "said"), REFUSED, ids=[f"{b.__name__}.{n}" for b, n, *_ in REFUSED]
)
def test_a_hook_that_nobody_reads_is_told_when_the_class_is_made(
    base: Any, name: str, method: Any, said: str
) -> None:
    mixin = type("Mixin", (), {name: method})
    for bases, own in (((base,), {name: method}), ((mixin, base), {})):
        with pytest.raises(TypeError, match=rf"^Mine.*{name}.*{said}"):
            type("Mine", bases, own)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("evaluate", old("model")),
        ("aggregate_evaluate", old("server_round", "replies", "more=0")),
        ("aggregate_train", old("*given", "**named")),
    ],
)
def test_a_helper_of_the_same_name_and_wider_signatures_are_fine(name: str, method: Any) -> None:
    further = {"averages": ""} if name == "aggregate_train" else {}
    type("Mine", (FedAvg,), {name: method, **further})
