"""FedBC: its dual step, the KKT conditions, its reductions, lost replies, and the rule itself."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from federations import lose
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from laws import RATE, START, local, train
from problems import (
    CLIENT_OF,
    DIM,
    NODES,
    Formula,
    Linear,
    Quadratic,
    forget,
    grid,
    kept,
    make_client_app,
    optimum,
    oracle_of,
    quadratics,
    to_record,
    to_vector,
)
from scipy.optimize import minimize

from clients import DirectoryStore, FlatModel, LocalTraining, client_id
from clients.fedbc import dual_of
from clients.keeping import to_fields
from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, FedBC, FedProx, PerFedBC, fedbc
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.proximity import (
    Dual,
    State,
    Turn,
    dual_step,
    first_state,
    idle_steps,
    server_rule,
)

PLAIN = Dual(0.05, 0.05, "heuristic", 0.0, math.inf, 0.0)


def strategy(**knobs: Any) -> FedBC:
    return FedBC(**{"alpha": 0.01, "fraction_evaluate": 0.0, "local": local(), **knobs})


def states(federation: InProcessGrid, acked: dict[int, int]) -> list[State]:
    """Return the state of each client that the server counts on."""
    return [
        State(x=fields["x"], **{n: fields[n].item() for n in State._fields if n != "x"})
        for fields in kept(federation, acked)
    ]


# ---- the dual step ------------------------------------------------------------------------------


def test_lambda_climbs_by_the_squared_distance_beyond_gamma_and_gamma_by_the_old_lambda() -> None:
    """By hand: ||x - z||^2 = 9 + 16, lambda 2 + 0.1 (25 - 5), gamma 5 + 0.3 * 2."""
    dual = Dual(0.1, 0.3, "heuristic", 0.0, math.inf, 0.0)
    state = State(x=np.zeros(2), lam=2.0, gamma=5.0)
    new = dual_step(state, np.array([4.0, 1.0]), np.array([1.0, 5.0]), dual, Turn())
    assert new.lam == pytest.approx(4.0)
    assert new.gamma == pytest.approx(5.6)
    np.testing.assert_array_equal(new.x, [4.0, 1.0])


def test_lambda_stays_within_its_range_and_a_fixed_gamma_stays() -> None:
    z, x = np.zeros(2), np.array([3.0, 4.0])
    for gamma, expected in ((0.0, 0.7), (24.9, 0.51), (100.0, 0.2)):
        dual = Dual(0.1, 0.3, gamma, 0.2, 0.7, 0.0)
        new = dual_step(State(x=z, lam=0.5, gamma=gamma), x, z, dual, Turn())
        assert (new.lam, new.gamma) == (pytest.approx(expected), gamma)


def test_a_newcomer_has_z_and_lambda_zero_brought_into_its_range() -> None:
    assert first_state(START, PLAIN)[1:] == (0.0, 0.0, 0.0, 0.0, 0)
    np.testing.assert_array_equal(first_state(START, PLAIN).x, START)
    fixed = Dual(0.1, 0.1, 3.0, 0.25, 0.5, 0.0)
    assert first_state(START, fixed)[1:3] == (0.25, 3.0)


@pytest.mark.parametrize("gamma", ["heuristic", 4.0])
def test_with_momentum_the_duals_are_those_of_one_sgd_over_all_clients(gamma: Any) -> None:
    """The authors' program: a vector of lambda and one of gamma, all stepped for each client."""
    rng = np.random.default_rng(4)
    clients, m, alpha = 5, 0.5, 0.3
    lam, gam = (torch.zeros(clients, dtype=torch.float64, requires_grad=True) for _ in range(2))
    if gamma != "heuristic":
        with torch.no_grad():
            gam += gamma
    optimizer = torch.optim.SGD([lam] if gamma != "heuristic" else [lam, gam], alpha, momentum=m)
    dual = Dual(alpha, alpha, gamma, 0.0, math.inf, m)
    kept: dict[int, State] = {}
    clock, z = 0, np.zeros(3)
    met_zero = False
    for _ in range(12):
        order = rng.permutation(clients)[:3]
        for place, i in enumerate(order):
            x = rng.normal(size=3) * rng.uniform(0, 3)
            turn = Turn(clock + place, len(order) - 1 - place)
            state = kept.get(i, first_state(z, dual))
            state = idle_steps(state, dual, turn.clock - state.clock)
            assert state.lam == pytest.approx(
                lam[i].item(), rel=1e-12, abs=1e-12
            )  # what its training sees
            kept[i] = dual_step(state, x, z, dual, turn)
            optimizer.zero_grad()
            (-(float(x @ x) - gam[i]) * lam[i]).backward()
            if gam.grad is not None:  # the loss's own sign for gamma: it descends
                gam.grad.neg_()
            optimizer.step()
            with torch.no_grad():
                lam.clamp_(min=0.0)
        clock += len(order)
        for i in order:  # what it uploads, at the end of the round
            assert kept[i].lam == pytest.approx(lam[i].item(), rel=1e-12, abs=1e-12)
            assert kept[i].gamma == pytest.approx(gam[i].item(), rel=1e-12, abs=1e-12)
            met_zero |= kept[i].lam == 0.0
    assert met_zero


def test_a_round_through_flower_takes_each_clients_turn_from_the_clock() -> None:
    """With momentum and 2 of 5 clients a round, all lambda are those of the sequential program."""
    problems = quadratics(5)
    one = strategy(alpha=0.02, dual_momentum=0.5, fraction_train=0.4, lambda_max=3.0)
    uploads: dict[int, dict[int, float]] = {}
    one.callbacks = (
        lambda info: uploads.update(
            {info.server_round: {c: row["lambda"] for c, row in info.clients.items()}}
        ),
    )
    turns: dict[int, dict[int, Turn]] = {}

    def watch(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("config", {})
        if request.metadata.message_type == "train":
            turn = Turn(config["dual-clock"], config["dual-after"])
            turns.setdefault(config["server-round"], {})[request.metadata.dst_node_id] = turn
        return reply

    train(one, grid(problems, fault=watch), 6)
    for server_round, asked in turns.items():
        places = sorted(turn.clock for turn in asked.values())
        assert places == [2 * server_round - 2, 2 * server_round - 1]
        assert all(turn.clock + 1 + turn.after == 2 * server_round for turn in asked.values())
    firsts = {min(asked, key=lambda node: asked[node].clock) for asked in turns.values()}
    assert len(firsts) > 1  # the order is drawn, not the clients' own
    assert all(0.0 <= lam <= 3.0 for round_ in uploads.values() for lam in round_.values())


# ---- where it goes ------------------------------------------------------------------------------


def constrained(problems: list[Quadratic], gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """Return z and the x_i that minimise sum f_i(x_i) within ||x_i - z||^2 <= gamma."""
    clients = len(problems)

    def split(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return v[:DIM], v[DIM:].reshape(clients, DIM)

    def value(v: np.ndarray) -> float:
        return sum(q.value(x) for q, x in zip(problems, split(v)[1], strict=True))

    def slope(v: np.ndarray) -> np.ndarray:
        pairs = zip(problems, split(v)[1], strict=True)
        return np.concatenate([np.zeros(DIM), *(q.gradient(x) for q, x in pairs)])

    def room(v: np.ndarray) -> np.ndarray:
        z, x = split(v)
        return gamma - ((x - z) ** 2).sum(1)

    middle = optimum(problems)
    start = np.concatenate([middle, *(middle + 1e-2 * (q.b - middle) for q in problems)])
    found = minimize(
        value,
        start,
        jac=slope,
        method="SLSQP",
        constraints={"type": "ineq", "fun": room},
        options={"ftol": 1e-11, "maxiter": 500},
    )
    assert found.success
    return split(found.x)


@pytest.mark.parametrize(("gamma", "alpha"), [(0.5, 0.2), (12.0, 0.02)])
def test_with_a_fixed_gamma_it_solves_the_constrained_problem(gamma: float, alpha: float) -> None:
    problems = quadratics(3)
    dual = Dual(alpha, 0.0, gamma, 0.0, math.inf, 0.0)
    z = START
    kept = [first_state(START, dual) for _ in problems]
    for _ in range(4000):
        kept = [
            fedbc.client_rule(state, z, q.oracle(), dual=dual).state
            for q, state in zip(problems, kept, strict=True)
        ]
        z, _ = server_rule((state.x, state.lam) for state in kept)
    best_z, best_x = constrained(problems, gamma)
    np.testing.assert_allclose([state.x for state in kept], best_x, atol=1e-4)
    if any(state.lam > 0 for state in kept):
        np.testing.assert_allclose(z, best_z, atol=1e-4)
    gradients = np.array([q.gradient(s.x) for q, s in zip(problems, kept, strict=True)])
    np.testing.assert_allclose(gradients.sum(0), 0.0, atol=1e-7)  # stationary in z
    for g, state in zip(gradients, kept, strict=True):
        np.testing.assert_allclose(g + 2 * state.lam * (state.x - z), 0.0, atol=1e-7)
        distance = ((state.x - z) ** 2).sum()
        assert distance <= gamma + 1e-7
        assert state.lam * (distance - gamma) == pytest.approx(0.0, abs=1e-6)


def test_a_small_gamma_brings_z_to_the_optimum_of_the_sum() -> None:
    problems = quadratics(3)
    gaps = [np.abs(constrained(problems, g)[0] - optimum(problems)).max() for g in (1.0, 0.01)]
    assert gaps[1] < 0.1 * gaps[0]
    assert gaps[1] < 0.05


# ---- what it reduces to -------------------------------------------------------------------------


def test_with_lambda_zero_it_is_fedavg_with_uniform_weights() -> None:
    problems, options = quadratics(3), {"fraction_evaluate": 0.0, "local": local()}
    averaged = train(FedAvg(weights="uniform", **options), grid(problems), 4)
    found = train(strategy(lambda_max=0.0, local_start="global"), grid(problems), 4)
    np.testing.assert_array_equal(found, averaged)


def test_with_lambda_half_of_mu_it_is_fedprox_with_uniform_weights() -> None:
    problems, options = quadratics(3), {"fraction_evaluate": 0.0, "local": local()}
    pulled = train(FedProx(mu=0.5, weights="uniform", **options), grid(problems), 4)
    fixed = {"lambda_min": 0.25, "lambda_max": 0.25}
    found = train(strategy(**fixed, local_start="global"), grid(problems), 4)
    np.testing.assert_array_equal(found, pulled)


def test_the_authors_rule_starts_from_z_and_has_momentum() -> None:
    authors, paper = strategy(**FedBC.authors_rule), strategy()
    assert (authors.local_start, authors.dual_momentum) == ("global", 0.5)
    assert (paper.local_start, paper.dual_momentum) == ("client", 0.0)


# ---- the server -------------------------------------------------------------------------------


def test_z_is_the_mean_by_lambda() -> None:
    rng = np.random.default_rng(2)
    x, lam = rng.normal(size=(4, DIM)), np.array([0.3, 0.0, 1.7, 0.01])
    z, total = server_rule(zip(x, lam, strict=True))
    np.testing.assert_allclose(z, lam @ x / lam.sum(), rtol=1e-13)
    assert total == pytest.approx(2.01)
    z, total = server_rule(zip(x, np.zeros(4), strict=True))
    np.testing.assert_allclose(z, x.mean(0), rtol=1e-13)
    assert total == 0.0
    with pytest.raises(ValueError, match="at least one"):
        server_rule([])


def test_where_all_lambda_are_zero_the_mean_is_plain_and_is_announced_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(strategy(lambda_max=0.0), grid(quadratics(3)), 3)
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    said = [line for line in lines if "lambda" in line]
    assert said == ["every lambda of round 1 is 0: their models are averaged plainly"]


def tampered(problems: list[Quadratic], client: int, value: float | None) -> InProcessGrid:
    """Return a federation in which ``client`` always reports ``value`` as its lambda."""

    def fault(request: Message, reply: Message) -> Message:
        mine = request.metadata.dst_node_id == NODES[client]
        if mine and request.metadata.message_type == "train":
            content = RecordDict({k: v.copy() for k, v in reply.content.items()})
            metrics = dict(content["metrics"])
            del metrics["lambda"]
            content["metrics"] = MetricRecord(
                metrics if value is None else metrics | {"lambda": value}
            )
            reply.content = content
        return reply

    return grid(problems, fault=fault)


@pytest.mark.parametrize(
    ("value", "knobs", "reason"),
    [
        (-1.0, {}, "metric 'lambda' must be in [0, 1e+12], got -1.0"),
        (1e300, {}, "metric 'lambda' must be in [0, 1e+12], got 1e+300"),
        (math.nan, {}, "metric 'lambda' is not finite: nan"),
        (3.5, {"lambda_max": 2.0}, "metric 'lambda' must be in [0, 2], got 3.5"),
        (0.1, {"lambda_min": 0.5}, "metric 'lambda' must be in [0.5, 1e+12], got 0.1"),
        (None, {}, "metric 'lambda' must be one number, got None"),
    ],
)
def test_a_lambda_out_of_range_is_left_out_with_one_line(
    value: float | None, knobs: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    problems = quadratics(3)
    found = train(strategy(**knobs), tampered(problems, 1, value), 1)
    others = strategy(**knobs)
    without = train(others, grid([problems[0], problems[2]]), 1)
    np.testing.assert_allclose(found, without, rtol=1e-12)
    assert [r.getMessage() for r in caplog.records if "left out" in r.getMessage()] == [
        f"reply of client 1 left out: {reason}"
    ]


@pytest.mark.parametrize("make", [FedBC, PerFedBC])
@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"alpha": -0.1}, r"alpha must be >= 0, got -0.1"),
        ({"alpha": {0: 0.1, 5: -1.0}}, r"alpha must be >= 0, got -1.0"),
        ({"alpha_gamma": math.nan}, r"alpha_gamma must be >= 0, got nan"),
        ({"gamma": -1.0}, r"gamma must be >= 0, got -1.0"),
        ({"gamma": "free"}, r"gamma must be >= 0, got 'free'"),
        ({"lambda_min": -0.5}, r"lambda_min must be >= 0, got -0.5"),
        ({"lambda_max": math.nan}, r"lambda_max must be >= 0, got nan"),
        (
            {"lambda_min": 2.0, "lambda_max": 1.0},
            r"lambda_min must be <= lambda_max \(1.0\), got 2",
        ),
        ({"dual_momentum": 0.5, "alpha": {0: 0.1}}, r"must be 0 where alpha .* got 0.5"),
        ({"dual_momentum": 1.0}, r"dual_momentum must be >= 0 and < 1, got 1.0"),
        ({"dual_momentum": -0.5}, r"dual_momentum must be >= 0 and < 1, got -0.5"),
    ],
)
def test_bad_knobs_are_refused_with_bound_and_value(
    make: Any, knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**knobs)


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"local_start must be one of \['client', 'global'\]"):
        FedBC(local_start="server")  # type: ignore[arg-type]


# ---- clients that come, go and lose their state -------------------------------------------------


def by_the_pure_rule(problems: list[Quadratic], asked: list[dict[int, Turn]], one: FedBC) -> Any:
    """Return z after these rounds of clients' turns, without Flower."""
    training = LocalTraining(solver="gd", lr=RATE, epochs=4)
    z, kept, dual = START, {}, dual_of(one.request(1, 0))
    for server_round, turns in enumerate(asked, start=1):
        for i, turn in sorted(turns.items()):
            problem, rng = problems[i].problem(), stream(0, "local", server_round, i)
            oracle = oracle_of(problem, training, rng)
            received = torch.tensor(z)
            state = kept.get(i, first_state(received, dual))
            kept[i] = fedbc.client_rule(
                state, received, oracle, dual=dual, turn=turn, local_start=one.local_start
            ).state
        z, _ = server_rule((kept[i].x.numpy(), kept[i].lam) for i in sorted(turns))
    return z


@pytest.mark.parametrize("knobs", [{}, {**FedBC.authors_rule}, {"gamma": 8.0}], ids=str)
def test_newcomers_and_returning_clients_follow_the_pure_rule_to_the_bit(
    knobs: dict[str, Any],
) -> None:
    asked: list[dict[int, Turn]] = [{} for _ in range(6)]

    def watch(request: Message, reply: Message) -> Message:
        config = request.content.config_records.get("config", {})
        if request.metadata.message_type == "train":
            turn = Turn(config["dual-clock"], config["dual-after"])
            asked[config["server-round"] - 1][CLIENT_OF[request.metadata.dst_node_id]] = turn
        return reply

    problems = quadratics(6)
    one = strategy(**knobs, fraction_train=0.5)
    found = train(one, grid(problems, fault=watch), 6)
    members = [set(turns) for turns in asked]
    assert members[0] != set(range(6))  # someone comes later
    assert any(i in members[0] and i not in members[1] and i in set.union(*members[2:])
               for i in range(6))  # someone comes back  # fmt: skip
    np.testing.assert_array_equal(found, by_the_pure_rule(problems, asked, one))


class Without(FedBC):
    """Does not ask client 1 in rounds 3 and 4."""

    def sample(self, purpose: str, server_round: int, *args: Any) -> list[int]:
        chosen = super().sample(purpose, server_round, *args)
        return [c for c in chosen if not (c == 1 and server_round in (3, 4))]


def test_lost_replies_leave_the_state_of_a_run_without_them() -> None:
    problems = quadratics(3)
    knobs = {"alpha": 0.01, "fraction_evaluate": 0.0, "local": local()}
    fault = lose((3, 1), (4, 1))
    losing, sparing = grid(problems, fault=fault), grid(problems)
    one, other = FedBC(**knobs), Without(**knobs)
    np.testing.assert_array_equal(train(one, losing, 6), train(other, sparing, 6))
    for a, b in zip(
        states(losing, one.ledger.acked), states(sparing, other.ledger.acked), strict=True
    ):
        np.testing.assert_array_equal(a.x, b.x)
        assert (a.lam, a.gamma) == (b.lam, b.gamma)
    deaf = grid(problems, fault=fault)
    assert np.abs(train(FedBC(**knobs, acknowledge=False), deaf, 6)
                  - train(other, grid(problems), 6)).max() > 1e-6  # fmt: skip


def test_the_clock_counts_the_dual_steps_of_clients_whose_replies_are_lost() -> None:
    """Present clients were told of them, and made up for them."""

    one = strategy()
    train(one, grid(quadratics(3), fault=lose((1, 1), (2, 1))), 2)
    assert one.state.clock == 2 * 3


def test_a_client_whose_state_is_lost_begins_again_at_z_with_lambda_zero() -> None:
    problems = quadratics(4)
    federation = grid(problems)
    seen: dict[int, Any] = {}
    one = strategy(callbacks=[lambda info: seen.update(info.clients)])
    z = train(one, federation, 3)
    assert seen[2]["lambda"] > 0.0
    forget(federation, 2)
    one.start(federation, to_record(z), 1)
    w = z
    for _ in range(4):
        w = w - RATE * problems[2].gradient(w)
    assert seen[2]["lambda"] == pytest.approx(0.01 * ((w - z) ** 2).sum(), rel=1e-12)
    assert seen[2]["gamma"] == 0.0
    assert seen[1]["gamma"] > 0.0


def test_a_lost_state_may_be_refused(caplog: pytest.LogCaptureFixture) -> None:
    federation = grid(quadratics(3))
    one = strategy(lost_state="refuse")
    z = train(one, federation, 2)
    forget(federation, 0)
    one.start(federation, to_record(z), 1)
    assert "client 0 left out: the state which the server booked for it is lost" in caplog.text


def test_a_void_round_takes_no_dual_steps() -> None:
    problems = quadratics(3)
    one = strategy(dual_momentum=0.5)
    train(one, grid(problems, fault=lose(*((r, i) for r in (2, 3) for i in range(3)))), 4)
    assert one.state.clock == 2 * 3


def test_a_round_whose_model_its_type_cannot_hold_takes_no_dual_steps() -> None:
    """The mean is finite in double precision, and too large for the model's float32."""
    one = strategy(dual_momentum=0.5)
    one.aggregate = lambda state, *_: (np.full(5, 1e39), state)  # type: ignore[method-assign]
    app = make_client_app(quadratics(3), dtype=torch.float32)
    model = FlatModel(Linear(), dtype=torch.float32).module.state_dict()
    one.start(InProcessGrid(app, 3), ArrayRecord(model), 1)
    assert (one.state.clock, one.ledger.acked) == (0, {})


def test_state_in_a_directory_gives_the_same_model_as_in_the_context(tmp_path: Any) -> None:
    problems = quadratics(4)
    app = make_client_app(problems, store=lambda c: DirectoryStore(tmp_path, client_id(c)))
    knobs = {"fraction_train": 0.5, "dual_momentum": 0.5}
    np.testing.assert_array_equal(
        train(strategy(**knobs), InProcessGrid(app, 4), 5),
        train(strategy(**knobs), grid(problems), 5),
    )


# ---- the rule -----------------------------------------------------------------------------------


def test_the_local_problem_is_f_plus_lambda_times_the_squared_distance() -> None:
    """Its minimiser has grad f + 2 lambda (x - z) = 0."""
    (q,) = quadratics(1)
    state = State(x=START, lam=0.35, gamma=1.0)
    z = START + 1.0
    new = fedbc.client_rule(state, z, q.oracle(), dual=PLAIN).state
    np.testing.assert_allclose(q.gradient(new.x) + 2 * 0.35 * (new.x - z), 0.0, atol=1e-12)
    starts = []

    def remember(start: Any, sub: Subproblem) -> Any:
        starts.append(start)
        return start

    oracle = Formula(minimiser=remember)
    fedbc.client_rule(state, z, oracle, dual=PLAIN)
    fedbc.client_rule(state, z, oracle, dual=PLAIN, local_start="global")
    np.testing.assert_array_equal(starts, [START, z])


def test_training_sees_the_lambda_that_others_steps_have_moved() -> None:
    """Two steps of others since the client's last: lambda + alpha (m + m^2) v, by hand."""
    pulls = []

    def remember(start: Any, sub: Subproblem) -> Any:
        pulls.append(sub.pull)
        return start

    dual = PLAIN._replace(alpha=0.1, dual_momentum=0.5)
    state = State(x=START, lam=0.4, gamma=1.0, v=2.0, clock=3)
    oracle = Formula(minimiser=remember)
    fedbc.client_rule(state, START, oracle, dual=dual, turn=Turn(5, 0))
    assert pulls == [pytest.approx(2 * (0.4 + 0.1 * 0.75 * 2.0))]


def test_lambda_does_not_leave_its_range_by_rounding_to_float32() -> None:
    dual = Dual(1.0, 1.0, "heuristic", 0.0, 0.1, 0.0)
    x = torch.full((3,), 5.0)
    state = dual_step(State(x, 0.0, 0.0), x, 0 * x, dual, Turn())
    fields = to_fields(state)
    assert fields["lam"].item() == 0.1
    assert fields["lam"].dtype == np.float64


# ---- what a round reports -----------------------------------------------------------------------


def test_history_has_each_clients_weight_and_the_smallest_and_largest_clients_figures() -> None:
    problems = quadratics(4)  # 7, 9, 11 and 13 examples
    seen: list[Any] = []
    one = strategy(callbacks=[seen.append], fraction_evaluate=1.0)
    federation = grid(problems)
    result = one.start(federation, to_record(START), 3)
    z, kept = to_vector(result.arrays), states(federation, one.ledger.acked)
    lam = np.array([state.lam for state in kept])
    info = seen[-1]
    assert list(info.clients) == [0, 1, 2, 3]
    for i, row in info.clients.items():
        assert row["weight-share"] == pytest.approx(lam[i] / lam.sum(), rel=1e-12)
        assert row["data-share"] == pytest.approx((7 + 2 * i) / 40, rel=1e-12)
        assert row["examples"] == row["eval-examples"] == 7 + 2 * i
        assert row["eval-loss"] == pytest.approx(problems[i].value(z), rel=1e-12)
        assert row["own-loss"] == pytest.approx(problems[i].value(kept[i].x), rel=1e-12)
    assert info.metrics["weight-share-smallest"] == pytest.approx(lam[0] / lam.sum())
    assert info.metrics["weight-share-largest"] == pytest.approx(lam[3] / lam.sum())
    assert info.metrics["data-share-largest"] == pytest.approx(13 / 40)
    assert info.metrics["eval-loss-smallest"] == pytest.approx(problems[0].value(z))
    assert info.metrics["eval-loss-largest"] == pytest.approx(problems[3].value(z))
    assert info.metrics["lambda-largest"] == pytest.approx(lam[3])
