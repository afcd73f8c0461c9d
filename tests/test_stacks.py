"""A rule on a stack of clients gives each what it would give that client alone.

Three clients that differ in everything: losses, states, hyperparameters, numbers of samples and of
steps, clocks. In the stack vectors are [3, d] and numbers columns [3, 1]; alone they are [d] and
plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from problems import DIM

from clients import CLIENTS
from fl_strategies import (
    STRATEGIES,
    a_fedpd,
    apfl,
    ditto,
    fedadmm,
    fedamp,
    fedavg,
    fedbabu,
    fedbc,
    feddyn,
    fednova,
    fedpd,
    fedpd_vr,
    fedprox,
    fedrep,
    per_fedavg,
    per_fedbc,
    pfedme,
    proximity,
    proxskip,
    q_fedavg,
    scaffold,
)
from fl_strategies.bcd import fedbcd, fedbcd_i
from fl_strategies.core.oracle import Gradient, Idle, Solved, Step
from fl_strategies.core.stacks import choose, clip, for_each, repeated, square_norm
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.proximity import Dual, Turn
from fl_strategies.solvers.gradient_weights import weight_of


@dataclass
class Curved:
    """f(w) = c/4 sum w^4: its derivatives are entry by entry, and differ from client to client."""

    c: Any
    rate: Any
    steps: Any
    counts_steps: bool = False

    def slope(self, w: Any) -> Any:
        return self.c * w**3

    def loss(self, w: Any) -> Any:
        return self.c / 4 * square_norm(w**2)

    def gradient(self, w: Any) -> Gradient:
        return Gradient(self.slope(w), self.loss(w), self.loss(w) / 2)

    def full_gradient(self, w: Any) -> Any:
        return self.slope(w)

    def hessian_product(self, w: Any, v: Any) -> Any:
        return 3 * self.c * w**2 * v

    def difference(self, new: Any, old: Any, *, samples: Any) -> Gradient:
        return Gradient((self.slope(new) - self.slope(old)) / samples, self.loss(new), 0.5)

    def solve(
        self, start: Any, subproblem: Subproblem, *, previous: Any = None, rates: bool = False
    ) -> Solved:
        solved = self._walked(start, subproblem, self.steps, previous)
        weight = weight_of(self.steps, momentum=0.3, pull=self.rate * subproblem.pull)
        return solved._replace(weight=weight, rates=self.rate * weight)

    def solve_aside(self, start: Any, subproblem: Subproblem) -> Solved:
        return self.solve(start, subproblem)

    def only(self, part: str, *, epochs: int = 0) -> Any:
        return self if part == "shared" else Idle()

    def solve_on_next(self, start: Any, subproblem: Subproblem, *, steps: Any) -> Solved:
        return self._walked(start, subproblem, steps, None)

    def _walked(self, start: Any, subproblem: Subproblem, steps: Any, previous: Any) -> Solved:
        def step(x: Any, before: Any) -> tuple[Any, Any]:
            e = x + 0.4 * (x - before)
            return e - self.rate * subproblem.gradient(e, self.slope(e)), x

        x, before = repeated(steps, step, start, start if previous is None else previous)
        left = square_norm(subproblem.gradient(x, self.slope(x)))
        return Solved(x, before, steps, 2 * steps, self.loss(x), self.loss(x) / 3, left)


class Clients:
    """Draws a stack and hands out all of it, or one of its clients.

    The same questions in the same order get the same answers.
    """

    def __init__(self, kind: Callable[[Any], Any], client: int | None) -> None:
        self.kind, self.client, self._rng = kind, client, np.random.default_rng(5)
        self.given: list[tuple[Any, np.ndarray]] = []

    def vector(self) -> Any:
        return self._given(self._rng.normal(size=(3, DIM)))

    def number(self, low: float, high: float) -> Any:
        return self._number(self._rng.uniform(low, high, (3, 1)))

    def count(self, *of_each: float) -> Any:
        return self._number(np.array(of_each, np.float64)[:, None])

    def oracle(self, *, counts_steps: bool = False) -> Curved:
        c, rate, steps = self.number(0.2, 0.9), self.number(0.05, 0.3), self.count(1, 4, 2)
        return Curved(c, rate, steps, counts_steps)

    def _number(self, column: np.ndarray) -> Any:
        return self._given(column) if self.client is None else float(column[self.client, 0])

    def _given(self, values: np.ndarray) -> Any:
        given = self.kind((values if self.client is None else values[self.client]).copy())
        self.given.append((given, np.asarray(given).copy()))
        return given


def dual(of: Clients, gamma: Any = "heuristic") -> Dual:
    return Dual(
        of.number(0.01, 0.2), of.number(0.01, 0.2), gamma, of.number(0.1, 0.2),
        of.number(0.5, 0.9), of.number(0.2, 0.6),
    )  # fmt: skip


def near(of: Clients) -> proximity.State:
    numbers = [of.number(0.2, 0.8) for _ in range(4)]
    return proximity.State(of.vector(), *numbers, of.count(0, 3, 9))


def turn(of: Clients) -> Turn:
    return Turn(of.count(2, 7, 9), of.count(5, 0, 3))


def variance_reduced(of: Clients, round: Any) -> Step:
    return fedpd_vr.client_rule(
        fedpd_vr.State(of.vector(), of.vector(), of.vector()), of.vector(), of.oracle(),
        eta=of.number(0.3, 0.9), gamma=of.number(0.1, 0.5), inner_steps=of.count(3, 1, 4),
        inner_batch=of.count(1, 2, 5), full_every=2, round=round,
    )  # fmt: skip


def bcd_i(of: Clients, *, counts_steps: bool = False, **others: Any) -> Step:
    return fedbcd_i.client_rule(
        fedbcd_i.State(of.vector(), of.vector()), of.vector(), of.oracle(counts_steps=counts_steps),
        gamma=of.number(0.1, 0.9), offline_rounds=of.count(3, 1, 2), **others,
    )  # fmt: skip


def maml(of: Clients, form: Any) -> Step:
    return per_fedavg.client_rule(
        of.vector(), of.oracle(),
        inner_rate=of.number(0.05, 0.2), meta_gradient=form,
    )  # fmt: skip


RULES: dict[str, Callable[[Clients], Step]] = {
    "fedavg": lambda of: fedavg.client_rule(of.vector(), of.oracle()),
    "fedprox": lambda of: fedprox.client_rule(of.vector(), of.oracle(), mu=of.number(0.1, 2.0)),
    "scaffold": lambda of: scaffold.client_rule(
        scaffold.State(of.vector()), of.vector(), of.oracle(), control=of.vector()
    ),
    "scaffold, option I": lambda of: scaffold.client_rule(
        scaffold.State(of.vector()), of.vector(), of.oracle(), control=of.vector(), option="I"
    ),
    "proxskip": lambda of: proxskip.client_rule(
        proxskip.State(of.vector(), of.vector(), of.number(0.1, 0.3)), of.vector(), of.oracle(),
        catch_up=of.vector(), p=of.number(0.1, 0.9),
    ),
    "proxskip, newcomers": lambda of: proxskip.client_rule(
        proxskip.first_state(of.vector()), of.vector(), of.oracle(), catch_up=0.0, p=0.3
    ),
    "q-fedavg": lambda of: q_fedavg.client_rule(of.vector(), of.oracle()),
    "fedadmm": lambda of: fedadmm.client_rule(
        fedadmm.State(of.vector(), of.vector(), of.number(0.3, 0.9)),
        of.vector(), of.oracle(), rho=of.number(0.2, 0.7),
    ),
    "fedadmm, authors": lambda of: fedadmm.client_rule(
        fedadmm.State(of.vector(), of.vector(), of.number(0.3, 0.9)),
        of.vector(), of.oracle(), rho=of.number(0.2, 0.7), local_start="global", tracking="global",
    ),
    "fedadmm, newcomers": lambda of: fedadmm.client_rule(
        fedadmm.first_state(theta := of.vector(), rho=(rho := of.number(0.2, 0.7))),
        theta, of.oracle(), rho=rho,
    ),
    "fedpd": lambda of: fedpd.client_rule(
        fedpd.first_state(of.vector())._replace(lam=of.vector()),
        of.vector(), of.oracle(), eta=of.number(0.3, 0.9),
    ),
    "fedpd, authors": lambda of: fedpd.client_rule(
        fedpd.State(of.vector(), of.vector()),
        of.vector(), of.oracle(), eta=of.number(0.3, 0.9), x0_rule="authors",
    ),
    "fedpd-vr": lambda of: variance_reduced(of, of.count(2, 3, 4)),
    "fedpd-vr, without full gradients": lambda of: variance_reduced(of, round=1),
    "fedbc": lambda of: fedbc.client_rule(
        near(of), of.vector(), of.oracle(), dual=dual(of), turn=turn(of)
    ),
    "fedbc, fixed gamma": lambda of: fedbc.client_rule(
        near(of), of.vector(), of.oracle(), dual=dual(of, of.number(0.1, 2.0)), turn=turn(of),
        local_start="global",
    ),
    "fedbc, newcomers": lambda of: fedbc.client_rule(
        proximity.first_state(
            z := of.vector(), dual=(hyperparameters := dual(of, of.number(0.1, 2.0)))
        ),
        z, of.oracle(), dual=hyperparameters, turn=turn(of),
    ),
    "per-fedbc": lambda of: per_fedbc.client_rule(
        near(of), of.vector(), of.oracle(), dual=dual(of), turn=turn(of),
        inner_rate=of.number(0.05, 0.2), inner_steps=of.count(2, 1, 4),
    ),
    "fedbcd": lambda of: fedbcd.client_rule(
        fedbcd.State(of.vector(), of.vector(), of.count(1, 0, 1)),
        of.vector(), of.oracle(counts_steps=True), gamma=of.number(0.2, 0.9),
    ),
    "fedbcd, newcomers": lambda of: fedbcd.client_rule(
        fedbcd.first_state(of.vector()), of.vector(), of.oracle(), gamma=of.number(0.2, 0.9)
    ),
    "fedbcd-i": lambda of: bcd_i(of, box=of.number(0.2, 0.8)),
    "fedbcd-i, no box": lambda of: bcd_i(of, counts_steps=True),
    "feddyn": lambda of: feddyn.client_rule(
        feddyn.State(of.vector()), of.vector(), of.oracle(), alpha=of.number(0.1, 0.9)
    ),
    "a-fedpd": lambda of: a_fedpd.client_rule(
        a_fedpd.State(of.vector()), of.vector(), of.oracle(), catch_up=of.vector(),
        rho=of.number(0.1, 0.9),
    ),
    "a-fedpd, nothing missed": lambda of: a_fedpd.client_rule(
        a_fedpd.State(of.vector()), of.vector(), of.oracle(), catch_up=0.0, rho=of.number(0.1, 0.9)
    ),
    "fednova": lambda of: fednova.client_rule(of.vector(), of.oracle()),
    "fednova, pulled": lambda of: fednova.client_rule(
        of.vector(), of.oracle(), mu=of.count(1, 0, 2)
    ),
    "ditto": lambda of: ditto.client_rule(
        ditto.State(of.vector()), of.vector(), of.oracle(), lam=of.number(0.1, 0.9)
    ),
    "fedrep": lambda of: fedrep.client_rule(of.vector(), of.oracle(), head_epochs=2),
    "fedbabu": lambda of: fedbabu.client_rule(of.vector(), of.oracle()),
    "fedamp": lambda of: fedamp.client_rule(
        fedamp.State(of.vector()), of.vector(), of.oracle(), for_client=of.vector(),
        lam=of.number(0.1, 0.9), alpha=0.7,
    ),
    "apfl": lambda of: apfl.client_rule(
        apfl.State(of.vector(), of.number(0.1, 0.9), of.vector()), of.vector(), of.oracle(),
        adaptive=True,
    ),
    "moon": lambda of: fedavg.client_rule(of.vector(), of.oracle()),
    "per-fedavg": lambda of: maml(of, "exact"),
    "per-fedavg, first-order": lambda of: maml(of, "first-order"),
    "pfedme": lambda of: pfedme.client_rule(
        pfedme.State(of.vector()), of.vector(), of.oracle(), lam=of.number(1.0, 3.0),
        eta=of.number(0.05, 0.2), inner_steps=of.count(2, 4, 1),
    ),
    "pfedme, authors": lambda of: pfedme.client_rule(
        pfedme.State(of.vector()), of.vector(), of.oracle(), lam=of.number(1.0, 3.0),
        eta=of.number(0.05, 0.2), inner_steps=of.count(2, 4, 1),
        local_start="global",
    ),
}  # fmt: skip

KINDS = pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])


def leaves(made: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all numbers and vectors of a step by their names."""
    if isinstance(made, tuple):
        for field in made._fields:
            yield from leaves(getattr(made, field), f"{name}.{field}")
    elif hasattr(made, "items"):
        for key, value in made.items():
            yield from leaves(value, f"{name}.{key}")
    elif made is not None:
        yield name, made


def test_every_clients_rule_is_here() -> None:
    clients = {strategy.runs or name for name, strategy in STRATEGIES.items()}
    alone = {name for name in clients if not CLIENTS[name].stacks} - {"moon"}  # whose rule stacks
    assert {name.partition(",")[0] for name in RULES} == clients - alone


@KINDS
@pytest.mark.parametrize("name", RULES)
def test_a_stack_of_clients_that_differ_in_all_gets_the_single_results(
    name: str, kind: Callable[[Any], Any]
) -> None:
    stack = Clients(kind, None)
    stacked = dict(leaves(RULES[name](stack)))
    assert stacked
    for client in range(3):
        alone = dict(leaves(RULES[name](Clients(kind, client))))
        assert alone.keys() == stacked.keys()
        for field, expected in alone.items():
            found = np.asarray(stacked[field])
            assert found.shape in ((3, np.asarray(expected).size), ()), field
            mine = found[client] if found.ndim else found
            np.testing.assert_allclose(
                mine, np.ravel(np.asarray(expected)), rtol=1e-12, atol=1e-14, err_msg=field
            )
    for given, before in stack.given:
        np.testing.assert_array_equal(np.asarray(given), before)


@KINDS
def test_each_client_of_a_stack_gets_its_own_number_of_steps(kind: Callable[[Any], Any]) -> None:
    times, start = kind(np.array([[3.0], [0.0], [5.0]])), kind(np.ones((3, 2)))
    (doubled,) = repeated(times, lambda w: (2.0 * w,), start)
    np.testing.assert_array_equal(np.asarray(doubled), [[8.0, 8.0], [1.0, 1.0], [32.0, 32.0]])
    np.testing.assert_array_equal(np.asarray(start), 1.0)
    assert repeated(3, lambda w: (2.0 * w,), 1.0) == (8.0,)
    assert repeated(0, lambda w: (2.0 * w,), 1.0) == (1.0,)


@KINDS
def test_what_is_not_finite_in_one_client_stays_with_it(kind: Callable[[Any], Any]) -> None:
    which = kind(np.array([[True], [False]]))
    yes, no = kind(np.array([[1.0], [np.nan]])), kind(np.array([[np.inf], [2.0]]))
    np.testing.assert_array_equal(np.asarray(choose(which, yes, no)), [[1.0], [2.0]])
    np.testing.assert_array_equal(np.asarray(choose(which, yes, 7.0)), [[1.0], [7.0]])
    np.testing.assert_array_equal(np.asarray(choose(which, 7.0, no)), [[7.0], [2.0]])
    np.testing.assert_array_equal(np.asarray(choose(which, 7.0, 3.0)), [[7.0], [3.0]])
    assert choose(True, (1.0, 2.0), (3.0, 4.0)) == (1.0, 2.0)
    assert choose(False, Gradient(1.0), Gradient(2.0)) == Gradient(2.0)


@KINDS
def test_numbers_beside_a_stack_are_columns_in_double_precision(kind: Callable[[Any], Any]) -> None:
    stack = kind(np.ones((3, 4), np.float32))
    column = for_each(0.1, stack)
    assert column.shape == (3, 1)
    assert np.asarray(column).dtype == np.float64
    assert for_each(0.1, stack[0]) == 0.1
    low, high = kind(np.array([[0.0], [0.5], [0.0]])), kind(np.array([[0.05], [0.9], [0.2]]))
    np.testing.assert_array_equal(np.asarray(clip(column, low, high)), [[0.05], [0.5], [0.1]])
    np.testing.assert_array_equal(np.asarray(clip(column, 0.2, high)), [[0.05], [0.2], [0.2]])
    assert clip(0.1, 0.2, 0.3) == 0.2
    np.testing.assert_array_equal(np.asarray(square_norm(stack)), [[4.0]] * 3)
    assert square_norm(stack[0]) == 4.0


def test_server_rules_take_the_rows_of_stacks_and_columns() -> None:
    rng = np.random.default_rng(3)
    w, lam, loss, lr = rng.normal(size=(3, DIM)), *rng.uniform(0.1, 0.9, (3, 3, 1))
    theta = rng.normal(size=DIM)
    plain = [q_fedavg.Local(w[i], float(loss[i, 0]), float(lr[i, 0])) for i in range(3)]
    made = q_fedavg.server_rule(theta, map(q_fedavg.Local, w, loss, lr), q=1.7)
    np.testing.assert_allclose(made, q_fedavg.server_rule(theta, plain, q=1.7), rtol=1e-13)
    z, total = proximity.server_rule(zip(w, lam, strict=True))
    alone = proximity.server_rule((w[i], float(lam[i, 0])) for i in range(3))
    np.testing.assert_allclose(z, alone[0], rtol=1e-13)
    assert total == pytest.approx(alone[1], rel=1e-13)
    total = total_alone = fedbcd.Sum()
    for i in range(3):
        total = fedbcd.added(total, w[i], gamma=lam[i], devices=1)
        total_alone = fedbcd.added(total_alone, w[i], gamma=float(lam[i, 0]), devices=1)
    step = {"rate": 0.3, "reduce": "mean", "repeats": 2}
    (found,), (expected,) = (fedbcd.server_rule([theta], [b], **step) for b in (total, total_alone))
    np.testing.assert_allclose(found, expected, rtol=1e-13)
