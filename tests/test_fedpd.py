"""FedPD: Algorithm 2 by hand, skipped exchanges, missing clients, both oracles, Fig. 2."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from laws import RATE, START, local, train
from problems import (
    CLIENT_OF,
    DIM,
    Formula,
    Linear,
    Quadratic,
    grid,
    half_mean_square,
    kept,
    make_client_app,
    optimum,
    quadratics,
    to_record,
    to_vector,
)
from torch import nn

from clients import (
    ClientOracle,
    FedPDClient,
    FlatModel,
    LocalTraining,
    Objective,
    Problem,
    Received,
    Step,
    client_id,
    solve,
)
from clients.node.in_process import Fault, InProcessGrid
from fl_strategies import FedPD, Uploads, fedpd
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from simulations import data, worker
from simulations.config import RunConfig
from simulations.lab.reproduce import run_cell, table
from simulations.lab.studies import STUDIES, Cell
from simulations.stationarity import stationarity

SGD = local(solver="sgd", epochs=2, **{"batch-size": 3})
VR = {"oracle": "II", "gamma": 0.3, "inner_steps": 3, "inner_batch": 2, "full_every": 3}


def strategy(**knobs: Any) -> FedPD:
    settings = {} if knobs.get("oracle") == "II" else SGD
    return FedPD(**{"eta": 0.5, "fraction_evaluate": 0.0, "local": settings, **knobs})


def states(federation: InProcessGrid, acked: dict[int, int]) -> list[fedpd.State]:
    """Return the state of each client that the server counts on."""
    return [fedpd.State(f["x"], f["lam"], f["g"]) for f in kept(federation, acked)]


def same(ours: list[fedpd.State], theirs: list[fedpd.State]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for value, expected in zip(mine, other, strict=True):
            np.testing.assert_array_equal(value, np.asarray(expected))


def lose(*which: tuple[int, int]) -> Fault:
    """Lose the training replies of (server round, client)."""

    def fault(request: Message, reply: Message) -> Message | None:
        server_round = request.content.config_records.get("config", {}).get("server-round", 0)
        client = CLIENT_OF[request.metadata.dst_node_id]
        lost = request.metadata.message_type == "train" and (server_round, client) in which
        return None if lost else reply

    return fault


# ---- Algorithm 2 by hand -----------------------------------------------------------------------


def vr_by_hand(
    q: Quadratic, state: fedpd.State, x0: np.ndarray, r: int, i: int, eta: float
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 4 with the gradients of a quadratic, whose rows are drawn as clients do."""
    gamma, rng, (x, lam, g) = VR["gamma"], stream(0, "oracle", r, i), state
    if r % VR["full_every"] == 0 or len(g) == 0:
        g = q.gradient(x)
    for _ in range(VR["inner_steps"]):
        # the minimiser of <g + lam, w> + ||w - x||^2/(2 gamma) + ||w - x0||^2/(2 eta)
        new = (x / gamma + x0 / eta - g - lam) / (1 / gamma + 1 / eta)
        rows = rng.integers(q.n, size=VR["inner_batch"])
        g = g + q.X[rows].T @ (q.X[rows] @ (new - x)) / len(rows)
        x = new
    return x, g


def by_hand(
    problems: list[Quadratic],
    rounds: int,
    *,
    p: float = 0.0,
    eta: float = 0.5,
    oracle: str = "I",
    absent: tuple[tuple[int, int], ...] = (),
    forget: tuple[tuple[int, int], ...] = (),
) -> tuple[np.ndarray, list[fedpd.State]]:
    """Run Algorithm 2 as it is printed, every client keeping its own x0.

    ``absent`` holds the (algorithm round, client) that are left out and keep their state, and
    ``forget`` those whose state is lost before the round.
    """
    training = LocalTraining().updated(SGD)
    kept: dict[int, fedpd.State] = {}
    x0 = dict.fromkeys(range(len(problems)), START)
    for r in range(rounds):
        plus = {}
        for i, q in enumerate(problems):
            if (r, i) in forget:
                kept.pop(i)
            if (r, i) in absent:
                continue
            state = kept.get(i, fedpd.State(x0[i], np.zeros(DIM), np.zeros(0)))
            if oracle == "I":
                rng, g = stream(0, "local", r, i), np.zeros(0)
                rng.integers(2**63)  # the seed for torch
                subproblem = Subproblem(torch.tensor(state.lam), 1 / eta, torch.tensor(x0[i]))
                start = torch.tensor(state.x)
                x = solve(q.problem(), start, subproblem, training, rng)[0].numpy()
            else:
                x, g = vr_by_hand(q, state, x0[i], r, i, eta)
            lam = state.lam + (x - x0[i]) / eta
            kept[i] = fedpd.State(x, lam, g)
            plus[i] = x + eta * lam
        if stream(0, "coin", r).random() < p:
            x0 = x0 | plus
        else:
            mean = sum(plus.values()) / len(plus)
            x0 = dict.fromkeys(x0, mean)
    return x0[0], [kept[i] for i in sorted(kept)]


def close(
    found: tuple[np.ndarray, list[fedpd.State]], expected: tuple[np.ndarray, list[fedpd.State]]
) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-11)
    for mine, other in zip(found[1], expected[1], strict=True):
        for value, wanted in zip(mine, other, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("knobs", [{}, VR], ids=["I", "II"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_run_is_algorithm_2(p: float, knobs: dict[str, Any]) -> None:
    problems, one = quadratics(3), strategy(p=p, **knobs)
    federation = grid(problems)
    found = train(one, federation, 9)
    done = one.state.done
    assert (done == 9) if p == 0 else (5 < done <= 9)
    expected = by_hand(problems, done, p=p, oracle=knobs.get("oracle", "I"))
    close((found, states(federation, one.ledger.acked)), expected)


class OneMessageARound(FedPD):
    """Sends each client its own x0 in every algorithm round, and averages when the coin says so."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.own = dict[int, ArrayRecord]()

    def next_rounds(self, state: fedpd.ServerState) -> range:
        return range(state.done, state.done + 1)

    def exchanges_in(self, num_rounds: int) -> int:
        return num_rounds

    def configure_train(self, *args: Any) -> Iterable[Message]:
        for message in super().configure_train(*args):
            client = CLIENT_OF[message.metadata.dst_node_id]
            if client in self.own:
                message.content["arrays"] = self.own[client]
            yield message

    def aggregate(self, state: fedpd.ServerState, theta: Any, uploads: Uploads) -> Any:
        mean, after = super().aggregate(state, theta, uploads)
        if fedpd.exchanges_after(state.done, p=self.p, seed=self.seed):
            self.own = {}
            return mean, after
        self.own = {upload.client: to_record(upload.vector) for upload in uploads}
        return theta, after


@pytest.mark.parametrize("knobs", [{}, VR], ids=["I", "II"])
def test_skipped_rounds_inside_one_message_are_those_of_one_message_each(
    knobs: dict[str, Any],
) -> None:
    problems = quadratics(3)
    one, federation = strategy(p=0.6, seed=3, **knobs), grid(problems)
    model = train(one, federation, 12)
    done = one.state.done
    assert one.state.exchanges < done - 2
    options = {"eta": 0.5, "fraction_evaluate": 0.0, "local": one.local}
    twin, apart = OneMessageARound(p=0.6, seed=3, **options, **knobs), grid(problems)
    np.testing.assert_array_equal(train(twin, apart, done), model)
    same(states(federation, one.ledger.acked), states(apart, twin.ledger.acked))


# ---- messages ----------------------------------------------------------------------------------


def test_skipped_rounds_cost_no_message_and_are_reported() -> None:
    asked: list[int] = []

    def count(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            asked.append(int(request.content.config_records["config"]["algorithm-rounds"]))
        return reply

    rounds, problems = 20, quadratics(3)
    one = strategy(p=0.5, seed=1)
    result = one.start(grid(problems, fault=count), to_record(START), rounds)
    coins = [stream(1, "coin", r).random() >= 0.5 for r in range(rounds)]
    last = max(np.flatnonzero(coins)) + 1
    assert not coins[-1]  # so that there are rounds after the last exchange
    assert len(asked) == 3 * sum(coins)
    assert sum(asked) == 3 * last
    metrics = result.train_metrics_clientapp
    assert list(metrics) == list(range(1, sum(coins) + 1))
    final = metrics[sum(coins)]
    assert final["exchanges"] == sum(coins)
    assert final["algorithm-round"] == last
    saved = sum(float(record["bytes-saved"]) for record in metrics.values())  # type: ignore[arg-type]
    model = sum(len(array.data) for array in to_record(START).values())
    assert saved == 2 * 3 * model * (last - sum(coins))


def test_about_one_minus_p_of_the_rounds_exchange() -> None:
    for p in (0.0, 0.25, 0.9):
        share = np.mean([fedpd.exchanges_after(r, p=p, seed=5) for r in range(4000)])
        assert abs(share - (1 - p)) <= 4 * np.sqrt(p * (1 - p) / 4000)


def test_the_coins_follow_the_seed() -> None:
    def coins(seed: int) -> list[bool]:
        return [fedpd.exchanges_after(r, p=0.5, seed=seed) for r in range(40)]

    assert coins(1) == coins(1) != coins(2)


def test_starts_of_one_round_each_come_to_every_exchange() -> None:
    problems, short, whole = quadratics(3), strategy(p=0.5), strategy(p=0.5)
    federation, arrays = grid(problems), to_record(START)
    for _ in range(12):
        arrays = short.start(federation, arrays, 1).arrays
    np.testing.assert_array_equal(to_vector(arrays), train(whole, grid(problems), 12))
    assert short.state.exchanges == whole.state.exchanges > 3


def test_a_second_start_goes_on_with_the_rounds_that_were_left() -> None:
    problems = quadratics(3)
    at_once, in_two = strategy(p=0.5, seed=1), strategy(p=0.5, seed=1)
    model = train(at_once, grid(problems), 20)
    federation = grid(problems)
    half = in_two.start(federation, to_record(START), 7).arrays
    found = in_two.start(federation, half, 13).arrays
    np.testing.assert_array_equal(to_vector(found), model)


def test_a_run_without_any_exchange_leaves_the_model_as_it_was() -> None:
    seed = next(s for s in range(99) if not fedpd.exchanges_after(0, p=0.9, seed=s))
    np.testing.assert_array_equal(train(strategy(p=0.9, seed=seed), grid(quadratics(2)), 1), START)


# ---- missing clients ---------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{}, VR], ids=["I", "II"])
def test_void_rounds_leave_states_equal_to_those_of_an_uninterrupted_run(
    knobs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    problems = quadratics(3)
    one = strategy(p=0.4, **knobs)
    federation = grid(problems, fault=lose((1, 0), (3, 1), (4, 1), (4, 2)))
    model = train(one, federation, 14)
    assert "round 3 is void: 2 usable replies, at least 3 needed" in caplog.text
    plain, calm = strategy(p=0.4, **knobs), grid(problems)
    np.testing.assert_array_equal(train(plain, calm, one.state.done), model)
    assert one.state.exchanges == plain.state.exchanges > 2
    same(states(federation, one.ledger.acked), states(calm, plain.ledger.acked))


def test_a_void_round_reports_no_progress_and_no_savings() -> None:
    one = strategy(p=0.5)
    result = one.start(grid(quadratics(2), fault=lose((2, 1))), to_record(START), 12)
    before, void = (result.train_metrics_clientapp[r] for r in (1, 2))
    assert void["algorithm-round"] == before["algorithm-round"]
    assert void["exchanges"] == before["exchanges"]
    assert void["bytes-saved"] == 0


@pytest.mark.parametrize("knobs", [{}, VR], ids=["I", "II"])
def test_with_proceed_newcomers_and_returning_clients_go_on_as_algorithm_2(
    knobs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Client 1 first takes part in the second round; client 2 misses the third and fourth."""
    problems, one = quadratics(3), strategy(missing="proceed", **knobs)
    federation = grid(problems, fault=lose((1, 1), (3, 2), (4, 2)))
    found = train(one, federation, 6)
    assert "round 4 goes on with 2 of 3 clients" in caplog.text
    assert "round 5 goes on" not in caplog.text
    absent = ((0, 1), (2, 2), (3, 2))
    expected = by_hand(problems, 6, oracle=knobs.get("oracle", "I"), absent=absent)
    close((found, states(federation, one.ledger.acked)), expected)


@pytest.mark.parametrize("knobs", [{}, VR], ids=["I", "II"])
def test_a_client_whose_state_is_lost_starts_as_a_newcomer(knobs: dict[str, Any]) -> None:
    problems, one = quadratics(3), strategy(**knobs)
    federation = grid(problems)
    half = one.start(federation, to_record(START), 4).arrays
    context = list(federation.contexts.values())[1]
    for key in list(context.state):
        del context.state[key]
    found = to_vector(one.start(federation, half, 3).arrays)
    expected = by_hand(problems, 7, oracle=knobs.get("oracle", "I"), forget=((4, 1),))
    close((found, states(federation, one.ledger.acked)), expected)


def test_more_replies_can_be_asked_for_than_proceed_needs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = strategy(missing="proceed", min_replies=2)
    train(one, grid(quadratics(3), fault=lose((1, 0), (2, 0), (2, 1))), 2)
    assert "round 1 goes on with 2 of 3 clients" in caplog.text
    assert "round 2 is void: 1 usable replies, at least 2 needed" in caplog.text


# ---- the rules ---------------------------------------------------------------------------------


ETA = 0.12
"""Below the theory's bound (sqrt5 - 1)/(4 L) = 0.1236 for L = 2.5."""


FULL = fedpd.VarianceReduced(gamma=0.3, steps=4, samples=0, refresh=False)
"""Oracle II with all examples in every step."""


def descent(q: Quadratic) -> Formula:
    """Four steps of gradient descent."""
    return Formula(q.gradient, lr=RATE)


def one_round(
    problems: list[Quadratic], kept: list[fedpd.State], x0: np.ndarray, kind: str, **rule: Any
) -> tuple[list[fedpd.State], np.ndarray]:
    oracles = [q.oracle() if kind == "exact" else descent(q) for q in problems]
    two = FULL if kind == "II" else None
    made = [
        fedpd.client_rule(state, x0, oracle, eta=ETA, two=two, **rule)
        for state, oracle in zip(kept, oracles, strict=True)
    ]
    return [step.state for step in made], fedpd.server_rule(step.upload for step in made)


KINDS = pytest.mark.parametrize("kind", ["exact", "descent", "II"])
RULES = pytest.mark.parametrize("x0_rule", ["paper", "authors"])


@KINDS
@RULES
def test_a_stationary_point_with_its_duals_is_a_fixed_point(kind: str, x0_rule: str) -> None:
    problems = quadratics(3)
    best = optimum(problems)
    kept = [fedpd.State(best, -q.gradient(best), q.gradient(best)) for q in problems]
    after, x0 = one_round(problems, kept, best, kind, x0_rule=x0_rule)
    np.testing.assert_allclose(x0, best, atol=1e-12)
    for before, state in zip(kept, after, strict=True):
        np.testing.assert_allclose(state[:2], before[:2], atol=1e-11)
        np.testing.assert_allclose(state.g, before.g if kind == "II" else [], atol=1e-11)


@KINDS
@RULES
def test_with_eta_below_the_bound_the_gradient_vanishes_where_fedavg_stalls(
    kind: str, x0_rule: str
) -> None:
    problems = quadratics(4)
    x0, averaged = START, START
    kept = [fedpd.first_state(START) for _ in problems]
    for _ in range(500):
        kept, x0 = one_round(problems, kept, x0, kind, x0_rule=x0_rule)
        averaged = np.mean([descent(q).solve(averaged, Subproblem()).w for q in problems], axis=0)

    def norm2(w: np.ndarray) -> float:
        return float((np.mean([q.gradient(w) for q in problems], axis=0) ** 2).sum())

    assert norm2(x0) < 1e-20
    assert norm2(averaged) > 1e-3
    np.testing.assert_allclose([state.x for state in kept], [x0] * 4, atol=1e-9)
    duals = [-q.gradient(x0) for q in problems]
    np.testing.assert_allclose([state.lam for state in kept], duals, atol=1e-9)


def test_the_variance_reduced_oracle_with_one_example_a_step_reaches_the_optimum_exactly() -> None:
    """Its noise is that of gradient differences, which vanish; SGD's stays."""
    problems = quadratics(3)
    x0, rng = START, np.random.default_rng(1)

    def change(new: np.ndarray, old: np.ndarray, q: Quadratic) -> np.ndarray:
        row = q.X[rng.integers(q.n)]
        return row * (row @ (new - old))

    kept = [fedpd.first_state(START) for _ in problems]
    for r in range(800):
        two = fedpd.VarianceReduced(gamma=0.05, steps=2, samples=1, refresh=r % 2 == 0)
        made = [
            fedpd.client_rule(
                state, x0, Formula(q.gradient, change=lambda new, old, q=q: change(new, old, q)),
                eta=0.05, two=two,
            )
            for state, q in zip(kept, problems, strict=True)
        ]  # fmt: skip
        kept, x0 = [step.state for step in made], fedpd.server_rule(step.upload for step in made)
    np.testing.assert_allclose(x0, optimum(problems), atol=1e-6)


def test_an_exact_oracle_leaves_minus_the_gradient_as_dual() -> None:
    """Then the authors' x0+ is one gradient step of rate eta, taken at x+."""
    (q,) = quadratics(1)
    state = fedpd.State(START, 0.3 * START, START[:0])
    made = fedpd.client_rule(state, START + 1, q.oracle(), eta=ETA)
    new = made.state
    np.testing.assert_allclose(new.lam, -q.gradient(new.x), rtol=1e-10)
    np.testing.assert_allclose(made.upload, new.x - ETA * q.gradient(new.x), rtol=1e-10)
    authors = fedpd.client_rule(state, START + 1, q.oracle(), eta=ETA, x0_rule="authors")
    np.testing.assert_allclose(authors.upload, START + 1 - ETA * q.gradient(new.x), rtol=1e-10)


def test_on_the_problem_of_claim_ii_2_fedavg_diverges_and_fedpd_does_not() -> None:
    """f1 = x^2, f2 = -x^2: every point is stationary, gradients differ without bound (L = 2)."""
    eta, start, rounds = 0.12, np.array([1.0]), 200
    curvatures = (2.0, -2.0)
    averaged, x0 = start, start
    kept = [fedpd.first_state(start)] * 2
    for _ in range(rounds):
        twice = [(1 - eta * c) ** 2 * averaged for c in curvatures]
        averaged = np.mean(twice, axis=0)
        pairs = []
        for c, state in zip(curvatures, kept, strict=True):

            def exact(start: Any, sub: Subproblem, c: float = c) -> Any:
                return (sub.pull * sub.centre - sub.slope) / (c + sub.pull)

            pairs.append(fedpd.client_rule(state, x0, Formula(minimiser=exact), eta=eta))
        kept, x0 = [step.state for step in pairs], fedpd.server_rule(step.upload for step in pairs)
    np.testing.assert_allclose(averaged, (1 + 4 * eta**2) ** rounds, rtol=1e-9)
    assert averaged[0] > 1e4
    assert 0.1 < abs(x0[0]) < 10
    for c, state in zip(curvatures, kept, strict=True):
        np.testing.assert_allclose(state.x, x0, atol=1e-9)
        np.testing.assert_allclose(state.lam, -c * x0, atol=1e-9)


# ---- the client --------------------------------------------------------------------------------


def request(**others: Any) -> dict[str, Any]:
    first = {"first-algorithm-round": 1, "algorithm-rounds": 1, "round": 1}
    two = {"gamma": 1.0, "inner-steps": 4, "inner-batch": 3, "full-every": 5}
    return {"eta": 1.0, "oracle": "II", "x0-rule": "paper", **first, **two, **others}


def stepped(client: FedPDClient, state: fedpd.State, x0: torch.Tensor) -> Step:
    """Return the client's step in algorithm round 1 of oracle II."""
    rng = np.random.default_rng(0)
    asked_by = f"fedpd asks client {client.client_id}"
    oracle = ClientOracle(
        client.problem, client.training, rng, lambda purpose: rng, asked_by=asked_by
    )
    return client.step(state, Received(x0), oracle, request())


def test_both_gradients_of_oracle_two_see_the_same_dropout_masks() -> None:
    """Where the model does not move, g must not either: x = x0 and lam = -g make x' = x."""
    (q,) = quadratics(1)
    model = FlatModel(nn.Sequential(nn.Dropout(0.5), Linear()))
    problem = Problem(model, half_mean_square, torch.tensor(q.X), torch.tensor(q.y))
    client = FedPDClient(problem, client_id=0)
    x, g = torch.tensor(START), torch.tensor(START**2)
    with torch.random.fork_rng():
        step = stepped(client, fedpd.State(x, -g, g), x)
    assert torch.equal(step.state.g, g)
    assert torch.equal(step.state.x, x)


def test_oracle_two_updates_running_statistics_once_a_step() -> None:
    norm = nn.BatchNorm1d(2, dtype=torch.float64)
    inputs = torch.tensor(np.random.default_rng(0).normal(size=(6, 2)))
    module = nn.Sequential(norm, nn.Linear(2, 2, dtype=torch.float64))
    problem = Problem(FlatModel(module), nn.functional.cross_entropy, inputs, torch.arange(6) % 2)
    x = problem.model.vector.clone()
    step = stepped(FedPDClient(problem, client_id=0), fedpd.first_state(x), x)
    assert norm.num_batches_tracked == 4
    assert step.solved is not None
    assert 0 <= float(step.solved.accuracy) <= 1


def test_oracle_two_is_refused_without_access_to_full_gradients() -> None:
    class Stream(Problem):
        """Examples come and go: f_i is an expectation."""

        whole = Objective.whole

    (q,) = quadratics(1)
    model = FlatModel(Linear())
    problem = Stream(model, half_mean_square, torch.tensor(q.X), torch.tensor(q.y))
    client = FedPDClient(problem, client_id=4)
    message = "fedpd asks client 4 for a full gradient: a Stream has no fixed samples"
    with pytest.raises(ValueError, match=message):
        stepped(client, fedpd.first_state(model.vector), model.vector)


@pytest.mark.parametrize("knobs", [{}, VR], ids=["I", "II"])
def test_a_round_reports_loss_steps_and_consensus(knobs: dict[str, Any]) -> None:
    problems = quadratics(2)
    steps = [VR["inner_steps"]] * 2 if knobs else [2 * -(-q.n // 3) for q in problems]
    result = strategy(**knobs).start(grid(problems), to_record(START), 1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["steps-min"], metrics["steps-max"]) == (min(steps), max(steps))
    _, kept = by_hand(problems, 1, oracle=knobs.get("oracle", "I"))
    apart = [float(((state.x - START) ** 2).sum()) for state in kept]
    assert metrics["consensus-mean"] == pytest.approx(np.mean(apart), rel=1e-9)
    skipping = next(s for s in range(99) if fedpd.rounds_from(0, p=0.5, seed=s) == range(3))
    result = strategy(p=0.5, seed=skipping, **knobs).start(grid(problems), to_record(START), 3)
    assert result.train_metrics_clientapp[1]["steps-max"] == 3 * max(steps)
    assert result.train_metrics_clientapp[1]["train-loss"] > 0


def test_the_clients_own_model_is_measured_beside_the_global_one() -> None:
    problems = quadratics(3)
    federation, one = grid(problems), strategy(fraction_evaluate=1.0)
    result = one.start(federation, to_record(START), 3)
    own = [
        q.value(state.x)
        for q, state in zip(problems, states(federation, one.ledger.acked), strict=True)
    ]
    expected = np.average(own, weights=[q.n for q in problems])
    assert result.evaluate_metrics_clientapp[3]["own-loss"] == pytest.approx(expected, rel=1e-12)


def test_state_in_a_directory_gives_the_same_model_as_in_the_context(tmp_path: Path) -> None:
    from clients import DirectoryStore

    problems, lost = quadratics(2), lose((2, 1))
    app = make_client_app(problems, store=lambda c: DirectoryStore(tmp_path, client_id(c)))
    np.testing.assert_array_equal(
        train(strategy(), InProcessGrid(app, 2, fault=lost), 4),
        train(strategy(), grid(problems, fault=lost), 4),
    )


# ---- knobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"eta": 0.0}, r"eta must be > 0, got 0.0"),
        ({"p": -0.1}, r"p must be >= 0 and < 1, got -0.1"),
        ({"p": 1.0}, r"p must be >= 0 and < 1, got 1.0"),
        ({"p": float("nan")}, r"p must be >= 0 and < 1, got nan"),
        ({"oracle": "III"}, r"oracle must be one of \['I', 'II'\], got 'III'"),
        ({"gamma": -1.0}, r"gamma must be > 0, got -1.0"),
        ({"inner_steps": 0}, r"inner_steps must be an integer >= 1, got 0"),
        ({"inner_batch": -1}, r"inner_batch must be an integer >= 0, got -1"),
        ({"full_every": 0}, r"full_every must be an integer >= 1, got 0"),
        ({"x0_rule": "mine"}, r"x0_rule must be one of \['paper', 'authors'\], got 'mine'"),
        ({"missing": "wait"}, r"missing must be one of \['void', 'proceed'\], got 'wait'"),
        ({"fraction_train": 0.5}, r"fraction_train must be 1: FedPD asks all clients, got 0.5"),
    ],
)
def test_bad_knobs_are_refused_with_bound_and_value(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedPD(**knobs)


# ---- the benchmark of Fig. 2 -------------------------------------------------------------------


def test_stationarity_is_the_squared_norm_of_the_mean_gradient_and_the_consensus_error() -> None:
    problems = quadratics(3)
    w, own = START, [START + i for i in (1, 2, 4)]
    found = stationarity(
        [q.problem() for q in problems], torch.tensor(w), [torch.tensor(x) for x in own]
    )
    mean = sum(q.A @ (w - q.b) for q in problems) / 3
    assert found.gradient == pytest.approx(mean @ mean, rel=1e-11)
    assert found.consensus == pytest.approx(DIM * (1 + 4 + 16) / 3, rel=1e-12)
    assert found.gap == found.gradient + found.consensus
    with pytest.raises(ValueError, match="problems must be >= 1, got 0"):
        stationarity([], torch.tensor(w))


def test_the_problem_of_fig_2_is_the_penalised_logistic_loss() -> None:
    config = RunConfig.parse(
        {"algorithm": "fedpd", "dataset": "fedpd-strong", "clients": 3, "dtype": "float64"}
    )
    rows, _ = worker.parts(config)[1]
    made = worker.problem(config, "train", rows)
    found = worker.dataset(config)
    a, b = found.x[400:800].astype(float), 2 * found.y[400:800] - 1
    np.testing.assert_array_equal(found.owner[rows], 1)  # type: ignore[index]
    w = np.random.default_rng(0).normal(size=20)
    made.model.vector.copy_(torch.tensor(w))
    loss, accuracy = made.evaluate()
    z = b * (a @ w)
    expected = np.log1p(np.exp(-z)).mean() + 0.1 * (w**2 / (1 + w**2)).sum()
    assert loss == pytest.approx(expected, rel=1e-12)
    assert accuracy == pytest.approx((z > 0).mean())


def test_weak_labels_are_random_and_strong_ones_follow_a_model_per_client() -> None:
    for name, low, high in (("fedpd-weak", 0.45, 0.65), ("fedpd-strong", 0.9, 1.0)):
        found = data.load(name, clients=4, seed=2)
        assert found.x.shape == (1600, 20)
        assert found.test_x.shape == (400, 20)
        assert (found.x[:, -1] == 1).all()
        assert abs(found.x[:, :-1].mean()) < 0.03
        assert abs(found.x[:, :-1].std() - 1) < 0.03
        for i in range(4):
            x, y = found.x[found.owner == i], found.y[found.owner == i]
            w = np.linalg.lstsq(x, 2.0 * y - 1, rcond=None)[0]
            assert low < ((x @ w > 0) == y).mean() <= high
    with pytest.raises(ValueError, match="samples must be >= 1, got 0"):
        data.load(name, samples=0)


def test_the_study_of_fig_2_runs_and_tables_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "level", logging.INFO)  # the study lowers it
    cells = [
        Cell(cell.name, cell.config | {"clients": 3, "rounds": 4}, cell.patience)
        for cell in STUDIES["fedpd-fig2"]()
        if cell.name.endswith("strong")
    ]
    for cell in cells:
        run_cell(cell, tmp_path)
        summary = json.loads((tmp_path / cell.name / "summary.json").read_text())
        assert summary["finished"]
        last = (tmp_path / cell.name / "history.jsonl").read_text().splitlines()[-1]
        assert summary["gradient_norm2"] == json.loads(last)["gradient-norm2"] > 0
        assert f"| {summary['gradient_norm2']:.1e} |" in table(cells, tmp_path)
    assert len(cells) == 5


def test_fedpd_asks_all_clients_by_default_on_every_data_set() -> None:
    for name in ("digits", "mnist", "fedpd-weak"):
        assert RunConfig.parse({"algorithm": "fedpd", "dataset": name}).fraction == 1.0
