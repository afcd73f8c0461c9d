"""FedBCD and FedBCD-I: ASPG, the running sum, the penalised problem, offline work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bcd import aspg, devices, fedbcd_, sum_of_last_models
from federations import drop, lose
from flwr.app import Message
from laws import RATE, START, STEPS, local, train
from problems import (
    DIM,
    NODES,
    Formula,
    forget,
    grid,
    make_client_app,
    quadratics,
    to_record,
    to_vector,
)

from clients import LocalTraining, solve
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FedBCD, FedBCDI, RoundInfo
from fl_strategies.bcd import fedbcd, fedbcd_i
from fl_strategies.bcd.latency import Clock
from fl_strategies.core.oracle import Solved
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem


def fedbcd_i_(**knobs: Any) -> FedBCDI:
    return FedBCDI(**{"box": None, "fraction_evaluate": 0.0, "local": local(), **knobs})


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
    total = sum(book.total for book in one.state.books)
    np.testing.assert_allclose(
        total, sum_of_last_models(federation, one.ledger.acked, 8), rtol=1e-12
    )
    assert [book.weight for book in one.state.books] == [4.0, 4.0]
    assert len(one.ledger.acked) == 8 or rounds < 12


def test_without_acknowledgement_lost_replies_break_the_sum() -> None:
    federation = grid(quadratics(8), fault=drop(0.3))
    one = fedbcd_(acknowledge=False)
    train(one, federation, 12)
    newest = {
        client: max(int(key.rsplit("-", 1)[1]) for key in context.state.array_records)
        for client, context in enumerate(federation.contexts.values())
    }
    gap = one.state.books[0].total - sum_of_last_models(federation, newest, 8)
    assert np.abs(gap).max() > 1e-2


def test_a_device_whose_state_is_lost_counts_as_one_more_beside_what_it_was() -> None:
    federation, one = grid(quadratics(4)), fedbcd_(gamma=0.7)
    z = train(one, federation, 3)
    lost = devices(federation, one.ledger.acked)[2]["x"]
    forget(federation, 2)
    after = to_vector(one.start(federation, to_record(z), 1).arrays)
    every = [*(f["x"] for f in devices(federation, one.ledger.acked).values()), lost]
    np.testing.assert_allclose(one.state.books[0].total, 0.7 * np.sum(every, axis=0), rtol=1e-12)
    assert one.state.books[0].weight == pytest.approx(0.7 * 5)
    np.testing.assert_allclose(after, z - 0.5 * (z - np.mean(every, axis=0)), rtol=1e-12)
    again = to_vector(one.start(federation, to_record(after), 1).arrays)
    assert np.isfinite(again).all()
    assert one.state.books[0].weight == pytest.approx(0.7 * 5)  # the same loss counts once


def test_refuse_leaves_out_a_device_whose_state_is_lost() -> None:
    federation, one = grid(quadratics(4)), fedbcd_(lost_state="refuse")
    z = train(one, federation, 3)
    kept = devices(federation, one.ledger.acked)[2]["x"]
    forget(federation, 2)
    result = one.start(federation, to_record(z), 1)
    assert result.train_metrics_clientapp[1]["clients-rejected"] == 1
    others = [f["x"] for i, f in devices(federation, one.ledger.acked).items() if i != 2]
    np.testing.assert_allclose(
        one.state.books[0].total, np.sum([*others, kept], axis=0), rtol=1e-12
    )


def test_a_newcomer_starts_from_the_model_it_receives_and_uploads_its_own_whole() -> None:
    (q,) = quadratics(1)
    state = fedbcd.first_state(START)

    class Watched(Formula):
        def solve(self, start: Any, subproblem: Subproblem, *, previous: Any = None) -> Solved:
            np.testing.assert_array_equal(start, START)
            np.testing.assert_array_equal(previous, START)
            return Solved(q.argmin(pull=subproblem.pull, centre=subproblem.centre), start)

    made = fedbcd.client_rule(state, START, Watched(), gamma=0.5)
    np.testing.assert_array_equal(made.upload, made.state.x)


# ---- FedBCD-I -----------------------------------------------------------------------------------


def test_pulling_k_times_shrinks_the_distance_to_z_by_one_minus_gamma_to_the_k() -> None:
    z = START + np.array([1.0, -2.0, 0.5, 0.0, 3.0])
    for times in (1, 2, 5):
        state = fedbcd_i.pull(fedbcd_i.State(START, 0 * z), z, gamma=0.3, times=times, box=None)
        np.testing.assert_allclose(state.x, z + 0.7**times * (START - z), rtol=1e-12)
        np.testing.assert_allclose(state.previous, z + 0.7 ** (times - 1) * (START - z), rtol=1e-12)


def test_a_pull_that_leaves_the_box_is_projected_and_goes_on_from_there() -> None:
    x, z, gamma, box = START, START + np.array([1.0, -2.0, 0.5, 0.0, 3.0]), 0.5, 1.2
    state = fedbcd_i.pull(fedbcd_i.State(x, x), z, gamma=gamma, times=2, box=box)
    for _ in range(2):
        x, previous = np.minimum(np.maximum((1 - gamma) * x + gamma * z, -box), box), x
    assert np.abs(x).max() == box
    np.testing.assert_allclose(state.x, x, rtol=1e-12)
    np.testing.assert_allclose(state.previous, previous, rtol=1e-12)


class Watched(FedBCDI):
    """Keeps who was available and who active, round by round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[tuple[set[int], set[int]]] = []

    def choose(self, server_round: int, nodes: Mapping[int, int]) -> list[int]:
        chosen = super().choose(server_round, nodes)
        self.seen.append((set(self.available), set(chosen)))
        return chosen


@pytest.mark.parametrize("offline_rounds", [1, 2, 4])
def test_offline_work_inside_a_message_equals_work_done_when_the_device_was_available(
    offline_rounds: int,
) -> None:
    problems = quadratics(6)
    one = Watched(
        box=3.5, fraction_evaluate=0.0, local=local(), fraction_train=0.34, servers=2,
        fraction_available=0.67, offline_rounds=offline_rounds, eta_z=0.6, gamma=0.3,
    )  # fmt: skip
    found = train(one, grid(problems), 9)
    z = START
    kept: list[Any] = [None] * 6  # a newcomer waits for its first model
    owed, since = [0] * 6, [0] * 6
    for available, active in one.seen:
        assert active < available
        assert (len(available), len(active)) == (4, 2)
        for i in available:
            if since[i] < offline_rounds:
                since[i] += 1
                if kept[i] is None:
                    owed[i] += 1
                else:
                    kept[i] = aspg(problems[i], *kept[i], STEPS, zeta=0.9, box=3.5)
        for i in active:
            if kept[i] is None:
                kept[i] = aspg(problems[i], z, z, STEPS * owed[i], zeta=0.9, box=3.5)
            x = kept[i][0]
            for _ in range(STEPS):
                x, previous = x - 0.3 * (x - z), x
            kept[i], since[i] = (x, previous), 0
        z = z - 0.6 * (z - np.mean([kept[i][0] for i in active], axis=0))
    np.testing.assert_allclose(found, z, rtol=1e-10)
    assert any(len(available - active) for available, active in one.seen)


def test_the_server_of_fedbcd_i_goes_over_the_active_devices_alone() -> None:
    federation = grid(quadratics(4))
    one = fedbcd_i_(fraction_train=0.5, eta_z=1.0)
    z = train(one, federation, 1)
    used = sorted(one.ledger.acked)
    assert len(used) == 2
    kept = devices(federation, one.ledger.acked)
    np.testing.assert_allclose(z, np.mean([kept[i]["x"] for i in used], axis=0), rtol=1e-12)


def test_the_papers_settings_of_fedbcd_i_are_the_defaults() -> None:
    one = FedBCDI()
    assert (one.gammas, one.fraction_available, one.offline_rounds) == ((0.2,), 0.8, 4)


def test_the_server_of_fedbcd_i_weighs_its_devices_by_gamma() -> None:
    federation, gammas = grid(quadratics(3)), [0.2, 0.9, 0.4]
    one = fedbcd_i_(eta_z=1.0, gamma=gammas)
    z = train(one, federation, 1)
    kept = devices(federation, one.ledger.acked)
    expected = np.average([kept[i]["x"] for i in range(3)], axis=0, weights=gammas)
    np.testing.assert_allclose(z, expected, rtol=1e-12)


def test_who_is_available_is_drawn_anew_in_each_round_and_by_each_cloud_server() -> None:
    knobs = {"box": None, "fraction_train": 0.02, "fraction_available": 0.58, "servers": 2}
    one = Watched(fraction_evaluate=0.0, local=local(), **knobs)
    train(one, grid(quadratics(100)), 8)
    ranks = [
        {i // 2 for i in available if i % 2 == cloud}
        for available, _ in one.seen
        for cloud in range(2)
    ]
    assert {len(each) for each in ranks} == {29}  # 0.58 x 50 is 28.999... in floating point
    assert len({frozenset(each) for each in ranks}) == 16


def test_a_device_asked_in_vain_was_available_without_contact() -> None:
    one = fedbcd_i_()
    train(one, grid(quadratics(3), fault=lose((2, 0), (3, 0))), 3)
    assert [one.request(4, i)["offline-rounds"] for i in range(3)] == [3, 1, 1]


def test_every_round_of_offline_work_draws_its_own_epochs_and_the_last_ones_count() -> None:
    (q,) = quadratics(1)
    settings = local(**{"random-epochs": True, "epochs": 6})
    seen: list[RoundInfo] = []
    one = fedbcd_i_(local=settings, callbacks=[seen.append])
    one.state = replace(one.first_state(START), offline={0: 3})
    train(one, grid([q]), 1)
    rng = stream(0, "local", 1, 0)
    rng.integers(2**63)  # torch's seed is drawn first
    drawn = [int(rng.integers(1, 6, endpoint=True)) for _ in range(4)]
    assert seen[0].metrics["epochs"] == sum(drawn)
    assert seen[0].metrics["work"] == drawn[-1]


# ---- clock, knobs, evaluation -------------------------------------------------------------------


def test_a_round_lasts_until_its_slowest_device_is_done() -> None:
    seen: list[RoundInfo] = []
    one = fedbcd_(servers=2, fraction_train=0.34, callbacks=[seen.append], seed=5)
    one.clock = Clock(mean_arrival=3.0, mean_work=0.2)
    train(one, grid(quadratics(6)), 3)
    now = 0.0
    for t, info in enumerate(seen, start=1):
        done = []
        for cloud in ((0, 2, 4), (1, 3, 5)):
            first = min(cloud, key=lambda i: one.clock.arrival(5, t, i))
            done.append(one.clock.latency(5, t, first, STEPS))
        now += max(done)
        assert info.metrics["virtual-seconds"] == pytest.approx(now, rel=1e-12)
        assert info.metrics["clients-asked"] == 2


def test_every_cloud_server_has_an_active_device_however_small_the_fraction() -> None:
    one = fedbcd_(servers=3, fraction_train=0.01)
    train(one, grid(quadratics(6)), 1)
    assert sorted(client % 3 for client in one.ledger.acked) == [0, 1, 2]


@pytest.mark.parametrize("name", ["fedbcd", "fedbcd-i", "fedbcd-async"])
def test_a_device_by_which_a_summed_step_would_leave_its_bound_takes_no_part(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """eta_z gamma |Q| is 1 with four devices, and would be 1.25 with a fifth."""
    options: dict[str, Any] = {"box": None, "reduce": "sum", "eta_z": 0.5, "gamma": 0.5}
    one = STRATEGIES[name](**options, local=local(), fraction_evaluate=1.0, node_wait=0.01)
    federation = grid(quadratics(5))
    fifth = federation.contexts.pop(NODES[4])
    z = train(one, federation, 2)
    assert "must be <= 1" not in caplog.text
    federation.contexts[NODES[4]] = fifth
    result = one.start(federation, to_record(z), 2)
    told = "client 4 does not take part: eta_z * gamma * |Q| must be <= 1"
    assert caplog.text.count(told) == 1
    assert f"got {1.25:g}" in caplog.text
    assert [m["clients-asked"] for m in result.train_metrics_clientapp.values()] == [4, 4]
    assert result.evaluate_metrics_clientapp[2]["eval-clients-used"] == 5  # it may still measure


@pytest.mark.parametrize("name", ["fedbcd", "fedbcd-async"])
@pytest.mark.parametrize("backwards", [False, True])
def test_devices_begin_anew_as_long_as_a_summed_step_keeps_its_bound(
    name: str, backwards: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two that lost their state there is room for one beside what it was: the first by id."""

    class Ordered(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            return replies[::-1] if backwards else replies

    problems = quadratics(4)
    federation = Ordered(make_client_app(problems), 4)
    options: dict[str, Any] = {"box": None, "reduce": "sum", "eta_z": 0.4, "gamma": 0.5}
    one = STRATEGIES[name](**options, local=local(), fraction_evaluate=0.0)
    z = train(one, federation, 3)
    forget(federation, 1)
    forget(federation, 2)
    result = one.start(federation, to_record(z), 2)
    counts = [m["clients-rejected"] for m in result.train_metrics_clientapp.values()]
    assert counts == [1, 1]
    assert caplog.text.count("reply of client 2 left out: it begins anew beside what it was") == 2
    assert sum(book.weight for book in one.state.books) == pytest.approx(0.5 * 5)
    total = 0.4 * sum(book.weight for book in one.state.books)
    assert total <= 1.0 + 1e-12


def test_a_mean_has_room_for_every_device() -> None:
    one = fedbcd_(gamma=9.0)
    train(one, grid(quadratics(4)), 1)
    one.nodes.known |= {7, 8, 9}
    assert {7, 8, 9} <= one.meet(one.state, one.nodes.known).cloud_of.keys()


@pytest.mark.parametrize("name", ["box", "extrapolation"])
def test_what_the_strategy_sets_itself_is_not_taken_from_local(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} of local is this strategy's to set"):
        FedBCD(local={name: 0.3})
    FedBCD(local={"box": 2.0, "extrapolation": 0.0})


def test_the_history_has_each_devices_weight_by_gamma() -> None:
    rows: list[dict[int, dict[str, float]]] = []
    one = fedbcd_(gamma=[1.0, 2.0, 5.0], callbacks=[lambda info: rows.append(dict(info.clients))])
    train(one, grid(quadratics(3)), 1)
    assert [rows[0][i]["weight-share"] for i in range(3)] == pytest.approx([1 / 8, 2 / 8, 5 / 8])


def test_blocks_and_modulo_tell_which_cloud_server_a_device_has() -> None:
    for assignment, expected in (("modulo", [0, 1, 2, 0, 1, 2]), ("blocks", [0, 0, 1, 1, 2, 2])):
        one = fedbcd_(servers=3, assignment=assignment)
        train(one, grid(quadratics(6)), 1)
        assert [one.state.cloud_of[i] for i in range(6)] == expected
    one.nodes.known |= {6, 7}
    state = one.meet(one.state, one.nodes.known)
    assert [state.cloud_of[6], state.cloud_of[7]] == [0, 1]  # where the fewest are
    assert state.books[0].weight == 3.0


def test_the_devices_own_models_are_measured_beside_the_common_one() -> None:
    problems = quadratics(3)
    for make in (fedbcd_, fedbcd_i_):
        federation, one = grid(problems), make(fraction_evaluate=1.0)
        result = one.start(federation, to_record(START), 2)
        kept = devices(federation, one.ledger.acked)
        own = [q.value(kept[i]["x"]) for i, q in enumerate(problems)]
        expected = np.average(own, weights=[q.n for q in problems])
        metrics = result.evaluate_metrics_clientapp[2]
        assert metrics["own-loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["fedbcd", "fedbcd-i", "fedbcd-async"])
@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"gamma": 0.0}, r"gamma must be > 0, got 0.0"),
        ({"gamma": [0.5, -1.0]}, r"gamma must be > 0, got -1.0"),
        ({"eta_z": 1.5}, r"eta_z must be > 0 and <= 1, got 1.5"),
        ({"zeta": 1.0}, r"zeta must be >= 0 and < 1, got 1.0"),
        ({"zeta": -0.1}, r"zeta must be >= 0 and < 1, got -0.1"),
        ({"box": 0.0}, r"box must be > 0, got 0.0"),
        ({"reduce": "max"}, r"reduce must be one of \['mean', 'sum'\], got 'max'"),
        ({"repeats": 0}, r"repeats must be an integer >= 1, got 0"),
        ({"repeats": 1.5}, r"repeats must be an integer >= 1, got 1.5"),
        ({"servers": 0}, r"servers must be an integer >= 1, got 0"),
        ({"assignment": "random"}, r"assignment must be one of \['modulo', 'blocks'\]"),
        (
            {"reduce": "sum", "min_available_nodes": 3},
            r'eta_z \* gamma \* \|Q\| must be <= 1 with reduce="sum", got .* for \|Q\| = 3 devices',
        ),
    ],
)
def test_bad_knobs_are_refused_with_bound_and_value(
    name: str, knobs: dict[str, Any], message: str
) -> None:
    extra = {"eta_z": 2.0} if "reduce" in knobs and "min_available_nodes" in knobs else {}
    with pytest.raises(ValueError, match=message):
        STRATEGIES[name](**knobs, **extra)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"gamma": 1.1}, r"gamma must be > 0 and <= 1, got 1.1"),
        ({"offline_rounds": 0}, r"offline_rounds must be an integer >= 1, got 0"),
        ({"fraction_available": 0.0}, r"fraction_available must be > 0 and <= 1, got 0.0"),
    ],
)
def test_bad_knobs_of_fedbcd_i_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedBCDI(**knobs)


@pytest.mark.parametrize("name", ["fedbcd", "fedbcd-i", "fedbcd-async"])
@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"box": 2.5}, r"box must hold the initial model, whose largest entry is 3, got 2.5"),
        ({"servers": 3}, r"servers must divide the number of clients, 4, got 3"),
        (
            {"reduce": "sum", "eta_z": 0.3, "gamma": 0.9},
            r'must be <= 1 with reduce="sum", got 1.08',
        ),
        ({"gamma": [0.1, 0.2]}, r"gamma must have a value for client 2, got 2"),
    ],
)
def test_what_clients_or_the_model_rule_out_is_refused_before_any_training(
    name: str, knobs: dict[str, Any], message: str
) -> None:
    asked: list[str] = []

    def watch(request: Message, reply: Message) -> Message:
        asked.append(request.metadata.message_type)
        return reply

    one = STRATEGIES[name](**{"box": None, "local": local(), **knobs})
    with pytest.raises(ValueError, match=message):
        train(one, grid(quadratics(4), fault=watch), 1)
    assert "train" not in asked
