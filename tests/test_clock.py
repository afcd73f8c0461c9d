"""Laws of the clock and of availability: virtual seconds, who is there, lost work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from laws import START, TABLE, Row, local, one_of_each_mechanism, quiet, rounds_of, train
from limits import STEPS
from problems import NODES, grid, quadratics, used_states

from fl_strategies import FedADMM, FedAvg, FederatedStrategy, RoundInfo
from fl_strategies.bcd.latency import exponential_quantile, mean_order_statistic
from fl_strategies.core.records import Round
from fl_strategies.parts import (
    Availability,
    Bernoulli,
    Buffered,
    Clock,
    Daily,
    Deadline,
    Exponential,
    Gaussian,
    Markov,
    Trace,
)

SECONDS = "virtual-seconds"
KNOBS: dict[str, dict[str, Any]] = {name: {"missing": "proceed"} for name in ("fedpd", "fedpd-vr")}
ROW = {row.name: row for row in TABLE}


def made(row: Row, **options: Any) -> FederatedStrategy:
    return row.strategy(local=local(), **KNOBS.get(row.name, {}), **options)


# ---- the clock -----------------------------------------------------------------------------------


@one_of_each_mechanism
def test_an_infinitely_fast_clock_and_clients_always_there_change_no_bit(row: Row) -> None:
    plain = train(made(row), grid(quadratics(3)), 3)
    own = made(row).counts_time
    options: dict[str, Any] = {} if own else {"clock": Clock()}
    if not made(row).overlaps:
        options["availability"] = Bernoulli(p=1.0)
    timed = made(row, **options)
    assert train(timed, grid(quadratics(3)), 3).tobytes() == plain.tobytes()
    assert own or rounds_of(timed, SECONDS) == [0.0] * len(rounds_of(timed, SECONDS))


def test_a_round_takes_as_long_as_the_slowest_that_is_waited_for() -> None:
    steps = {0: 0.5, 1: 2.0, 2: 1.0}
    clock = Clock(step=steps, latency=0.25, download=1e-4, upload=2e-4)  # 12.5, 25 bytes a second
    strategy = quiet(FedAvg, clock=clock, fraction_train=0.7)
    asked: list[tuple[int, ...]] = []
    strategy.callbacks = (lambda info: asked.append(tuple(info.clients)),)
    train(strategy, grid(quadratics(3)), 4)
    expected, now = [], 0.0
    for clients in asked:
        assert len(clients) == 2
        now += max(0.5 + STEPS * steps[c] + 40 / 12.5 + 40 / 25.0 for c in clients)
        expected.append(now)
    assert rounds_of(strategy, SECONDS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("pace", "until"),
    [(None, []), (Deadline(seconds=1.5 * STEPS), [1.5 * STEPS, 3.0 * STEPS])],
)
def test_a_reply_that_cannot_be_used_takes_its_time(pace: Any, until: list[float]) -> None:
    def diverged(request: Message, reply: Message) -> Message:
        about = request.metadata
        if about.dst_node_id == NODES[1] and about.message_type == "train":
            reply.content["metrics"].update({"train-loss": math.nan, "steps": math.nan})
        return reply

    seconds = []
    for fault in (None, diverged):
        strategy = quiet(FedAvg, clock=Clock(step={0: 0.5, 1: 2.0, 2: 1.0}), pace=pace)
        train(strategy, grid(quadratics(3), fault=fault), 2)
        seconds.append(rounds_of(strategy, SECONDS))
        assert len(strategy.run.faults) == (fault is not None)
    usable, diverging = seconds
    assert diverging == (usable if pace is None else until)


def test_clients_of_a_device_work_one_after_another_and_reply_together() -> None:
    """Devices of clients 0, 1, of 2, 3, and of 4; the deadline is between the devices' ends."""
    clock = Clock(step={0: 1.0, 1: 2.0, 2: 0.5, 3: 0.25, 4: 3.5}, per_device=2)
    ends = {0: 3.0 * STEPS, 2: 0.75 * STEPS, 4: 3.5 * STEPS}
    used: list[set[int]] = []
    options: dict[str, Any] = {"callbacks": [lambda info: used.append({*info.clients})]}
    for pace in (None, Deadline(seconds=3.2 * STEPS)):
        strategy = quiet(FedAvg, clock=clock, pace=pace, **options)
        train(strategy, grid(quadratics(5)), 1)
        assert rounds_of(strategy, SECONDS) == [ends[4] if pace is None else 3.2 * STEPS]
    assert used == [{0, 1, 2, 3, 4}, {0, 1, 2, 3}]
    assert clock.together({1: 2.0, 2: 1.0}) == {1: 2.0, 2: 1.0}  # of those that are asked


@pytest.mark.parametrize("pace", [Buffered(), Deadline(seconds=1.0, cut=True)])
def test_a_shared_device_goes_with_no_pace_that_counts_clients_alone(pace: Any) -> None:
    with pytest.raises(ValueError, match="wait for each other: use per_device=1"):
        FedAvg(clock=Clock(step=1.0, per_device=2), pace=pace)


def test_speeds_are_lognormal_over_clients_and_rounds_and_follow_from_the_seed() -> None:
    clock = Clock(step=3.0, spread=0.5, jitter=0.25)
    logs = np.array(
        [[math.log(clock.seconds(7, t, i, 2.0) / 6.0) for t in range(4)] for i in range(1500)]
    )
    each = logs.mean(1)
    assert abs(each.mean()) < 4 * 0.5 / 1500**0.5
    assert each.std() == pytest.approx((0.25 + 0.0625 / 4) ** 0.5, rel=0.08)
    assert (logs - each[:, None]).std() == pytest.approx(0.25 * (3 / 4) ** 0.5, rel=0.05)
    assert clock.seconds(7, 3, 5, 2.0) == clock.seconds(7, 3, 5, 2.0) != clock.seconds(8, 3, 5, 2.0)


def test_a_file_has_a_line_for_each_device(tmp_path: Path) -> None:
    (tmp_path / "speeds.csv").write_text("0.5\n2,8,4\n")
    clock = Clock(step=str(tmp_path / "speeds.csv"), download=2.0)
    assert clock.seconds(1, 1, 0, 3, down=500_000, up=10) == 1.5 + 2.0
    assert clock.seconds(1, 1, 3, 3, down=500_000, up=500_000) == 6.0 + 0.5 + 1.0
    (tmp_path / "wrong.csv").write_text("fast\n")
    with pytest.raises(ValueError, match=r"wrong\.csv is not a file of numbers"):
        Clock(step=str(tmp_path / "wrong.csv")).seconds(1, 1, 0, 1)


def test_the_kth_arrival_of_ten_takes_the_seconds_of_the_formula() -> None:
    clock = Exponential(mean_arrival=0.0, mean_work=1.0)
    times = np.array([[clock.seconds(3, t, i, 1.0) for i in range(10)] for t in range(2000)])
    for k in (1, 4, 10):
        found = np.sort(times, 1)[:, k - 1]
        expected = mean_order_statistic(exponential_quantile, k, 10)
        assert found.mean() == pytest.approx(expected, abs=4 * found.std() / 2000**0.5)


def test_fedbcd_takes_any_clock_and_refuses_what_it_does_not_count() -> None:
    strategy = ROW["fedbcd"].strategy(local=local(), clock=Clock(step=2.0))
    train(strategy, grid(quadratics(3)), 3)
    assert rounds_of(strategy, SECONDS) == [2.0 * STEPS * t for t in (1, 2, 3)]
    with pytest.raises(ValueError, match="FedBCD, whose clock counts work alone"):
        ROW["fedbcd"].strategy(local=local(), clock=Clock(upload=1.0))


# ---- lost work ----------------------------------------------------------------------------------


def test_lost_work_leaves_nothing_behind() -> None:
    """theta = theta^0 + D/m is the mean of the clients' u after every round."""
    problems = quadratics(5)
    strategy = quiet(FedADMM, eta="fraction", clock=Clock(step=1.0, dropout=0.4), rho=0.5)
    on = grid(problems)

    def check(info: RoundInfo) -> None:
        fields = used_states(on, strategy.ledger.acked)
        u = [np.asarray(f["w"]) + np.asarray(f["y"]) / 0.5 for f in fields]
        u += [START] * (5 - len(u))
        theta = np.concatenate([a.numpy().ravel() for a in info.arrays.values()])
        np.testing.assert_allclose(theta, np.mean(u, 0), atol=1e-12)

    strategy.callbacks = (check,)
    train(strategy, on, 12)
    dropped = rounds_of(strategy, "clients-dropped")
    assert 10 < sum(dropped) < 38
    assert {*dropped} - {0.0, 5.0}  # each client has a draw of its own
    assert [5 - n for n in dropped] == rounds_of(strategy, "clients-used")
    assert max(np.diff(rounds_of(strategy, SECONDS))) <= STEPS


# ---- who is there --------------------------------------------------------------------------------

MANY = [*range(400), *range(2**63, 2**63 + 100)]


def shares(part: Availability, rounds: int = 60, now: float = 0.0) -> np.ndarray:
    return np.array([[part.is_there(4, t, now, c) for c in MANY] for t in range(1, rounds + 1)])


@pytest.mark.parametrize(("part", "share"), [(Bernoulli(p=0.3), 0.3), (Markov(on=6, off=3), 2 / 3)])
def test_clients_are_there_as_often_as_they_should(part: Availability, share: float) -> None:
    there = shares(part, 10)
    error = (share * (1 - share) / len(MANY)) ** 0.5
    assert np.abs(there.mean(1) - share).max() < 4.5 * error  # in each round, the first too


@pytest.mark.slow
def test_a_markov_chain_leaves_and_comes_back_with_its_probabilities() -> None:
    there = shares(Markov(on=8, off=4), 80)  # over several blocks
    before, after = there[:-1], there[1:]
    for stays, p in ((before, 1 / 8), (~before, 1 / 4)):
        changed = (before != after)[stays]
        assert changed.mean() == pytest.approx(p, abs=5 * (p * (1 - p) / changed.size) ** 0.5)


def test_a_day_has_its_hours_and_clients_their_time_zones() -> None:
    one_zone = Daily(p=0.5, swing=0.5, period=24.0, zones=0.0)
    assert shares(one_zone, 2, now=6.0).all()
    assert not shares(one_zone, 2, now=18.0).any()
    world = Daily(p=0.5, swing=0.5, period=24.0)
    assert shares(world, 5, now=6.0).mean() == pytest.approx(0.5, abs=0.06)


def test_a_trace_says_who_is_there(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("0-10 20-30\n\n5-25\n")
    part = Trace(file=str(tmp_path / "trace"), period=30.0)
    expected = {0.0: [0, 3], 7.0: [0, 2, 3, 5], 10.0: [2, 5], 20.0: [0, 2, 3, 5], 34.9: [0, 3]}
    for now, clients in expected.items():
        assert [*part.there(1, 1, now, range(6))] == clients
    assert not Trace(file=str(tmp_path / "trace")).is_there(1, 1, 30.0, 0)


def test_selection_chooses_among_those_that_are_there() -> None:
    seen: list[tuple[int, ...]] = []
    part = Markov(on=4, off=4)

    def choose(round: Round) -> list[int]:
        seen.append(round.connected)
        return [*round.connected[:2]]

    strategy = quiet(FedAvg, availability=part, selection=choose, seed=4)
    train(strategy, grid(quadratics(6)), 8)
    assert seen == [part.there(4, t, 0.0, range(6)) for t in range(1, 9) if
                    part.there(4, t, 0.0, range(6))]  # fmt: skip
    assert len({*seen}) > 3


def test_a_round_in_which_nobody_is_there_is_skipped_and_time_goes_on(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("5-1000\n")
    options: dict[str, Any] = {"availability": Trace(file=str(tmp_path / "trace"))}
    strategy = quiet(FedAvg, clock=Clock(step=1.0, idle=2.0), **options)
    train(strategy, grid(quadratics(2)), 5)
    assert strategy.result.skipped == [1, 2, 3]
    assert rounds_of(strategy, SECONDS) == [2.0, 4.0, 6.0, 6.0 + STEPS, 6.0 + 2 * STEPS]
    by_rounds = quiet(FedAvg, **options)
    train(by_rounds, grid(quadratics(2)), 7)
    assert by_rounds.result.skipped == [1, 2, 3, 4, 5]


def test_privacy_counts_on_all_being_there() -> None:
    with pytest.raises(ValueError, match=r"availability=Bernoulli.*epsilon counts on"):
        FedAvg(weights="uniform", privacy=Gaussian(), availability=Bernoulli())
