"""FedBCD: ASPG, the penalised problem, the running sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bcd import aspg, devices, fedbcd_, sum_of_last_models
from federations import drop
from laws import RATE, START, STEPS, train
from problems import DIM, Formula, forget, grid, quadratics, to_record, to_vector

from clients import LocalTraining, solve
from fl_strategies import FedBCD
from fl_strategies.bcd import fedbcd
from fl_strategies.core.oracle import Solved
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem

# ---- the devices' steps -------------------------------------------------------------------------


@pytest.mark.parametrize(("zeta", "box"), [(0.0, 1.5), (0.9, 0.0), (0.9, 1.5), (0.4, 2.5)])
def test_the_solver_takes_the_papers_steps_and_goes_on_with_its_momentum(
    zeta: float, box: float
) -> None:
    (q,) = quadratics(1)
    training = LocalTraining(solver="gd", lr=RATE, steps=3, extrapolation=zeta, box=box)
    sub = Subproblem(pull=0.7, centre=torch.tensor(START))
    x, previous = before = torch.tensor(0.3 * START), torch.tensor(0.5 * START)
    for _ in range(2):
        found = solve(q.problem(), x, sub, training, stream(1, "local"), previous=previous)
        assert found.previous is not None
        x, previous = found.w, found.previous
    options = {"zeta": zeta, "gamma": 0.7, "z": START, "box": box or np.inf}
    expected = aspg(q, 0.3 * START, 0.5 * START, 6, **options)
    np.testing.assert_allclose(x, expected[0], rtol=1e-12)
    np.testing.assert_allclose(previous, expected[1], rtol=1e-12)
    np.testing.assert_array_equal(before[0], 0.3 * START)
    if box == 1.5:
        assert np.abs(expected[0]).max() == 1.5  # the bound is met


def test_without_extrapolation_and_box_the_last_iterates_are_those_of_plain_descent() -> None:
    (q,) = quadratics(1)
    start = torch.tensor(START)
    plain = LocalTraining(solver="gd", lr=RATE, steps=4)
    w = solve(q.problem(), start, Subproblem(), plain, stream(1, "l")).w
    fewer = LocalTraining(solver="gd", lr=RATE, steps=3)
    before = solve(q.problem(), start, Subproblem(), fewer, stream(1, "l")).w
    options = {"previous": start - 1.0}
    both = solve(q.problem(), start, Subproblem(), plain, stream(1, "l"), **options)
    torch.testing.assert_close(both.w, w, rtol=0, atol=0)
    torch.testing.assert_close(both.previous, before, rtol=0, atol=0)


def test_steps_may_be_drawn_by_the_clients_own_stream() -> None:
    (q,) = quadratics(1)
    training = LocalTraining(lr=0.01, steps=5, random_steps=True, batch_size=2)
    drawn = {
        solve(q.problem(), torch.tensor(START), Subproblem(), training, stream(s, "l")).steps
        for s in range(40)
    }
    assert drawn == {1, 2, 3, 4, 5}


def test_with_zeta_zero_a_round_is_projected_gradient_descent() -> None:
    problems = quadratics(3)
    found = train(fedbcd_(zeta=0.0, box=3.0, gamma=0.6), grid(problems), 1)
    after = []
    for q in problems:
        x = START
        for _ in range(STEPS):
            x = np.clip(x - RATE * (q.gradient(x) + 0.6 * (x - START)), -3.0, 3.0)
        after.append(x)
    np.testing.assert_allclose(found, START - 0.5 * (START - np.mean(after, axis=0)), rtol=1e-12)


def test_rounds_through_flower_equal_the_papers_steps_with_each_devices_own_momentum() -> None:
    problems = quadratics(3)
    federation, one = grid(problems), fedbcd_(gamma=0.6, eta_z=0.8, repeats=2)
    found = train(one, federation, 4)
    z, kept = START, [(START, START)] * 3
    for _ in range(4):
        kept = [
            aspg(q, *pair, STEPS, zeta=0.9, gamma=0.6, z=z)
            for q, pair in zip(problems, kept, strict=True)
        ]
        for _ in range(2):
            z = z - 0.8 * (z - np.mean([x for x, _ in kept], axis=0))
    np.testing.assert_allclose(found, z, rtol=1e-10)
    for client, fields in devices(federation, one.ledger.acked).items():
        np.testing.assert_allclose(fields["x"], kept[client][0], rtol=1e-10)
        np.testing.assert_allclose(fields["previous"], kept[client][1], rtol=1e-10)


# ---- the problem it solves ----------------------------------------------------------------------


@pytest.mark.slow
def test_fedbcd_rests_at_the_weighted_penalised_problem() -> None:
    """z = sum gamma_i x_i / sum gamma_i, x_i = argmin f_i + (gamma_i/2) ||x - z||^2."""
    problems, gammas = quadratics(3), [0.5, 1.2, 0.8]
    federation, one = grid(problems), fedbcd_(gamma=gammas, eta_z=1.0, zeta=0.5)
    z = train(one, federation, 80)
    left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
    for q, gamma in zip(problems, gammas, strict=True):
        R = gamma * np.linalg.inv(q.A + gamma * np.eye(DIM))
        left, right = left + R @ q.A, right + R @ q.A @ q.b
    np.testing.assert_allclose(z, np.linalg.solve(left, right), atol=1e-8)
    for client, fields in devices(federation, one.ledger.acked).items():
        best = problems[client].argmin(pull=gammas[client], centre=z)
        np.testing.assert_allclose(fields["x"], best, atol=1e-8)


@pytest.mark.slow
def test_with_a_box_in_the_way_it_rests_where_no_feasible_step_descends() -> None:
    problems, box = quadratics(3), 2.2
    federation, one = grid(problems), fedbcd_(box=box, eta_z=1.0, zeta=0.5)
    start = np.clip(START, -box, box)
    z = to_vector(one.start(federation, to_record(start), 80).arrays)
    bound = free = 0
    kept = devices(federation, one.ledger.acked)
    for client, fields in kept.items():
        x = fields["x"]
        slope = problems[client].gradient(x) + (x - z)
        at_bound = np.isclose(np.abs(x), box, rtol=0, atol=1e-12)
        np.testing.assert_allclose(slope[~at_bound], 0.0, atol=1e-7)
        assert np.all(slope[at_bound] * x[at_bound] < 0.0)  # descent leads out of the box
        bound, free = bound + at_bound.sum(), free + (~at_bound).sum()
    assert bound >= 3
    assert free >= 3
    np.testing.assert_allclose(z, np.mean([f["x"] for f in kept.values()], axis=0), atol=1e-9)


def test_a_sum_is_a_mean_with_the_step_times_the_sum_of_gammas() -> None:
    problems = quadratics(4)
    summed = train(fedbcd_(reduce="sum", eta_z=0.15, gamma=1.5), grid(problems), 4)
    averaged = train(fedbcd_(reduce="mean", eta_z=0.15 * 4 * 1.5, gamma=1.5), grid(problems), 4)
    np.testing.assert_allclose(summed, averaged, rtol=1e-12)


def test_the_authors_penalty_is_twice_as_steep_as_its_factor_says() -> None:
    """The slope of (gamma = 2) ||x - z||^2 is 4 (x - z); heavy ball is the solver's."""
    rule, settings = FedBCD.authors_rule, dict(FedBCD.authors_local)
    w = torch.tensor(START, requires_grad=True)
    penalty = 2.0 * ((w - 1.0) ** 2).sum()
    (slope,) = torch.autograd.grad(penalty, w)
    expected = Subproblem(pull=rule["gamma"], centre=1.0).gradient(START, 0.0)
    np.testing.assert_allclose(slope.numpy(), expected, rtol=1e-12)
    one = FedBCD(**rule, local=settings)
    training = LocalTraining().updated(one.request(1, 0))
    wanted = (0.9, 1e-4, 5, True, 0.0, 0.0)
    assert wanted == (
        training.momentum,
        training.weight_decay,
        training.steps,
        training.random_steps,
        training.extrapolation,
        training.box,
    )


# ---- the running sum ----------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 12])
def test_the_servers_sum_is_that_of_all_devices_last_models_after_lost_replies(rounds: int) -> None:
    federation = grid(quadratics(8), fault=drop(0.3))
    one = fedbcd_(fraction_train=0.5, servers=2)
    train(one, federation, rounds)
    total = sum(book.total for book in one.state.sums)
    np.testing.assert_allclose(
        total, sum_of_last_models(federation, one.ledger.acked, 8), rtol=1e-12
    )
    assert [book.weight for book in one.state.sums] == [4.0, 4.0]
    assert len(one.ledger.acked) == 8 or rounds < 12


def test_without_acknowledgement_lost_replies_break_the_sum() -> None:
    federation = grid(quadratics(8), fault=drop(0.3))
    one = fedbcd_(acknowledge=False)
    train(one, federation, 6)
    newest = {
        client: max(int(key.rsplit("-", 1)[1]) for key in context.state.array_records)
        for client, context in enumerate(federation.contexts.values())
    }
    gap = one.state.sums[0].total - sum_of_last_models(federation, newest, 8)
    assert np.abs(gap).max() > 1e-2


def test_a_device_whose_state_is_lost_counts_as_one_more_beside_what_it_was() -> None:
    federation, one = grid(quadratics(4)), fedbcd_(gamma=0.7)
    z = train(one, federation, 3)
    lost = devices(federation, one.ledger.acked)[2]["x"]
    forget(federation, 2)
    after = to_vector(one.start(federation, to_record(z), 1).arrays)
    every = [*(f["x"] for f in devices(federation, one.ledger.acked).values()), lost]
    np.testing.assert_allclose(one.state.sums[0].total, 0.7 * np.sum(every, axis=0), rtol=1e-12)
    assert one.state.sums[0].weight == pytest.approx(0.7 * 5)
    np.testing.assert_allclose(after, z - 0.5 * (z - np.mean(every, axis=0)), rtol=1e-12)
    again = to_vector(one.start(federation, to_record(after), 1).arrays)
    assert np.isfinite(again).all()
    assert one.state.sums[0].weight == pytest.approx(0.7 * 5)  # the same loss counts once


def test_refuse_leaves_out_a_device_whose_state_is_lost() -> None:
    federation, one = grid(quadratics(4)), fedbcd_(lost_state="refuse")
    z = train(one, federation, 3)
    kept = devices(federation, one.ledger.acked)[2]["x"]
    forget(federation, 2)
    result = one.start(federation, to_record(z), 1)
    assert result.train_metrics_clientapp[4]["clients-rejected"] == 1
    others = [f["x"] for i, f in devices(federation, one.ledger.acked).items() if i != 2]
    np.testing.assert_allclose(one.state.sums[0].total, np.sum([*others, kept], axis=0), rtol=1e-12)


def test_a_newcomer_starts_from_the_model_it_receives_and_uploads_its_own_whole() -> None:
    (q,) = quadratics(1)
    state = fedbcd.first_state(START)

    class Watched(Formula):
        def solve(
            self, start: Any, subproblem: Subproblem, *, previous: Any = None, rates: bool = False
        ) -> Solved:
            np.testing.assert_array_equal(start, START)
            np.testing.assert_array_equal(previous, START)
            return Solved(q.argmin(pull=subproblem.pull, centre=subproblem.centre), start)

    made = fedbcd.client_rule(state, START, Watched(), gamma=0.5)
    np.testing.assert_array_equal(made.upload, made.state.x)
