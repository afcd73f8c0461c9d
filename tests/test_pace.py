"""Laws of deadlines and over-selection: who counts, for how long, and what late ones leave."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from arrivals import Slow
from federations import CLIENTS, Troubled
from federations import KNOBS as FAULTY
from flwr.app import Message
from laws import START, Row, local, one_of_each_mechanism, quiet, rounds_of, train
from limits import STEPS
from problems import grid, quadratics, to_vector, used_states

from fl_strategies import (
    APFL,
    Ditto,
    FedADMM,
    FedAvg,
    FederatedStrategy,
    FedNova,
    FedRep,
    NothingUsable,
    PFedMe,
    RoundInfo,
)
from fl_strategies.bcd.latency import exponential_quantile, mean_order_statistic
from fl_strategies.messages.internals import ObjectPushError
from fl_strategies.parts import BySize, Clock, Deadline, Exponential, Gaussian
from fl_strategies.parts.pace import Pace
from fl_strategies.server import phases

KNOBS = FAULTY | {name: {"missing": "proceed"} for name in ("fedpd", "fedpd-vr")}
CLOCK = Clock(step=1.0, spread=0.7, jitter=0.7)


@one_of_each_mechanism
def test_a_late_reply_leaves_as_little_behind_as_a_lost_one(row: Row) -> None:
    """Nothing: neither in the model nor in sums that must add up nor in a client's state."""
    knobs = KNOBS.get(row.name, {})
    rule = row.strategy(local=local(), **knobs)
    if Pace.refusal(rule, row.name):
        return
    patient = row.strategy(local=local(), clock=CLOCK, **knobs)
    train(patient, grid(quadratics(CLIENTS)), 1)
    part = Deadline(seconds=0.6 * rounds_of(patient, "virtual-seconds")[0])
    used: list[set[int]] = []
    strategy = row.strategy(
        local=local(),
        clock=CLOCK,
        pace=part,
        callbacks=[lambda info: used.append({*info.clients})],
        **knobs,
    )
    late = train(strategy, grid(quadratics(CLIENTS)), 4)
    assert 0 < sum(map(len, used)) < 4 * CLIENTS

    def lost(server_round: int, client: int) -> bool:
        return client not in used[server_round - 1]

    assert Troubled(lost=lost).run(row, 4, **knobs).tobytes() == late.tobytes()


def test_sums_are_exact_after_any_pattern() -> None:
    """FedADMM's theta is the mean of the clients' w + y/rho."""
    on = grid(quadratics(6))

    def check(info: RoundInfo) -> None:
        u = [
            np.asarray(f["w"]) + np.asarray(f["y"]) / 0.5
            for f in used_states(on, strategy.ledger.acked)
        ]
        u += [START] * (6 - len(u))
        np.testing.assert_allclose(to_vector(info.arrays), np.mean(u, 0), atol=1e-12)

    strategy = quiet(
        FedADMM,
        eta="fraction",
        rho=0.5,
        clock=Clock(step=1.0, spread=0.7, jitter=0.7, dropout=0.1),
        pace=Deadline(seconds=7.0, over_select=1.5, cut=True),
        fraction_train=0.5,
        callbacks=[check],
    )
    train(strategy, on, 15)
    assert sum(rounds_of(strategy, "clients-late")) > 0


@pytest.mark.parametrize("k", [2, 5])
def test_of_those_asked_the_first_count_and_the_kth_arrival_ends_the_round(k: int) -> None:
    clock = Exponential(mean_arrival=1.0, mean_work=2.0)
    seen: list[set[int]] = []
    strategy = quiet(
        FedAvg,
        clock=clock,
        pace=Deadline(over_select=1.3),
        fraction_train=k / 10,
        callbacks=[lambda info: seen.append({*info.clients})],
        seed=3,
    )
    train(strategy, grid(quadratics(10)), 6)
    asked = rounds_of(strategy, "clients-asked")
    assert asked == [{2: 3, 5: 7}[k]] * 6
    assert rounds_of(strategy, "clients-used") == [k] * 6
    assert rounds_of(strategy, "clients-late") == [asked[0] - k] * 6
    ends = np.diff([0.0, *rounds_of(strategy, "virtual-seconds")])
    for t, (clients, end) in enumerate(zip(seen, ends, strict=True), start=1):
        latest = max(clock.seconds(3, t, client, STEPS) for client in clients)
        assert end == pytest.approx(latest, rel=1e-9)


@pytest.mark.parametrize(("k", "n"), [(1, 8), (3, 8), (8, 8)])
@pytest.mark.slow
def test_rounds_last_in_the_mean_as_the_formula_says(k: int, n: int) -> None:
    clock, part = Exponential(mean_arrival=0.0, mean_work=1.0), Deadline()
    times = [
        part.first({i: clock.seconds(1, t, i, 1.0) for i in range(n)}, {}, k)[1]
        for t in range(3000)
    ]
    expected = mean_order_statistic(exponential_quantile, k, n)
    assert np.mean(times) == pytest.approx(expected, abs=4 * np.std(times) / 3000**0.5)


@pytest.mark.parametrize(
    ("replies", "lost", "wanted", "used", "seconds"),
    [
        ({1: 2.0, 2: 1.0, 3: 9.0}, {}, 2, [2, 1], 2.0),
        ({1: 2.0, 2: 1.0, 3: 9.0}, {}, 3, [2, 1], 5.0),  # the deadline
        ({1: 2.0, 2: 1.0}, {3: 4.0}, 3, [2, 1], 4.0),  # nobody is at work any more
        ({1: 2.0, 2: 1.0}, {3: 7.0}, 3, [2, 1], 5.0),
        ({1: 5.0, 2: 5.0}, {}, 1, [1], 5.0),
        ({1: 6.0}, {}, 1, [], 5.0),
        ({}, {}, 1, [], 0.0),
    ],
)
def test_who_counts_and_when_the_round_ends(
    replies: dict[int, float], lost: dict[int, float], wanted: int, used: list[int], seconds: float
) -> None:
    assert Deadline(seconds=5.0).first(replies, lost, wanted) == (used, seconds)


@pytest.mark.parametrize("make", [FedNova, FedADMM])
def test_work_is_cut_to_the_deadline(make: Any) -> None:
    steps = {0: 0.5, 1: 1.0, 2: 2.0, 3: 30.0}
    rows: list[dict[int, Any]] = []
    strategy = quiet(
        make,
        clock=Clock(step=steps, latency=0.25),
        pace=Deadline(seconds=2.5, cut=True),
        callbacks=[lambda info: rows.append(dict(info.clients))],
        **({"eta": "fraction"} if make is FedADMM else {}),
    )
    train(strategy, grid(quadratics(4)), 2)
    for clients in rows:
        assert {c: row["steps"] for c, row in clients.items()} == {0: STEPS, 1: 2, 2: 1}
    assert rounds_of(strategy, "clients-late") == [1.0, 1.0]
    assert rounds_of(strategy, "virtual-seconds") == [2.5, 5.0]


@pytest.mark.parametrize("make", [APFL, Ditto, FedRep, functools.partial(PFedMe, inner_steps=2)])
def test_the_deadline_is_shared_by_the_trainings_of_a_request(make: Any) -> None:
    settings = local(epochs=9)
    pace = Deadline(seconds=24.5, cut=True)
    strategy = quiet(make, clock=Clock(step=1.0), pace=pace, local=settings)
    train(strategy, grid(quadratics(2)), 1)
    assert rounds_of(strategy, "clients-late") == [0.0]
    assert 0.0 < rounds_of(strategy, "virtual-seconds")[0] <= 24.0


def test_as_many_steps_as_fit_exactly_are_in_time() -> None:
    """7 x 0.05 is 0.35000000000000003 in floating point."""
    pace = Deadline(seconds=0.35, cut=True)
    settings = local(epochs=9)
    strategy = quiet(FedAvg, clock=Clock(step=0.05, spread=0.0), pace=pace, local=settings)
    train(strategy, grid(quadratics(2)), 1)
    assert rounds_of(strategy, "clients-late") == [0.0]
    assert rounds_of(strategy, "steps") == [7.0]


def test_a_deadline_that_nobody_meets_ends_the_run_and_says_so() -> None:
    strategy = quiet(FedAvg, clock=Clock(step=1.0), pace=Deadline(seconds=0.5))
    with pytest.raises(NothingUsable, match="it came after 4 s"):
        train(strategy, grid(quadratics(3)), 5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clock": None}, "pace=Deadline.* does not go with no clock: it goes by clock=Clock"),
        ({"privacy": Gaussian(), "weights": "uniform"}, "who is late depends on the others"),
        ({"selection": BySize()}, "which counts on each draw"),
        ({"selection": lambda round: round.connected}, "a function, which itself says who"),
        ({"pace": Deadline(order="arrival")}, "replies arrive in real time; leave out the clock"),
    ],
)
def test_what_a_pace_does_not_go_with_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FedAvg(**{"clock": CLOCK, "pace": Deadline(over_select=1.5), **options})


# ---- by arrival ---------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, no_pause: None) -> Callable[..., Slow]:
    """Return the function that makes a grid of which a look for replies takes a second."""

    def made(clients: int, looks: dict[int, int]) -> Slow:
        on = Slow(clients, looks)
        clock = SimpleNamespace(monotonic=lambda: float(on.now), sleep=time.sleep)
        monkeypatch.setattr(phases, "time", clock)
        return on

    return made


def by_arrival(**options: Any) -> FederatedStrategy:
    pace = Deadline(order="arrival", **options)
    return quiet(FedADMM, eta="fraction", rho=0.5, pace=pace)


@one_of_each_mechanism
def test_by_arrival_late_replies_leave_nothing_behind(row: Row, slow: Callable[..., Slow]) -> None:
    """And a client that is late is not asked again before it has answered."""
    knobs = KNOBS.get(row.name, {})
    if Pace.refusal(row.strategy(local=local(), **knobs), row.name):
        return
    used: list[set[int]] = []

    def answers(info: RoundInfo) -> None:
        used.append({*info.clients})
        if info.server_round == 3:
            on.now, on.looks = 10**9, {}

    pace = Deadline(seconds=5.0, order="arrival")
    strategy = row.strategy(local=local(), pace=pace, callbacks=[answers], **knobs)
    on = slow(CLIENTS, {1: 10**8})
    late = train(strategy, on, 5)
    assert [t for t, clients in enumerate(used, start=1) if 1 in clients] == [4, 5]
    assert [t for t, client in on.asked if client == 1] == [1, 4, 5]
    troubled = Troubled(
        lost=lambda t, client: (t, client) == (1, 1),
        away=lambda t, client: client == 1 and 1 < t < 4,
    )
    assert troubled.run(row, 5, **knobs).tobytes() == late.tobytes()


def test_by_arrival_the_first_count_and_the_others_are_late(slow: Callable[..., Slow]) -> None:
    strategy = by_arrival(over_select=1.5)
    strategy.fraction_train = 0.5
    on = slow(6, {5: 3, 4: 3, 3: 3})
    train(strategy, on, 5)
    asked, used, late = (
        rounds_of(strategy, f"clients-{word}") for word in ("asked", "used", "late")
    )
    assert used == [3.0] * 5
    assert max(asked) == 5.0
    assert [a - u for a, u in zip(asked, used, strict=True)] == late
    assert rounds_of(strategy, "clients-lost") == [0.0] * 5


def test_by_arrival_a_round_waits_while_all_clients_are_at_work(slow: Callable[..., Slow]) -> None:
    on = slow(2, {0: 40, 1: 40})
    strategy = by_arrival(seconds=1.0)
    train(strategy, on, 2)
    assert rounds_of(strategy, "clients-late") == [2.0, 2.0]
    assert [t for t, _ in on.asked] == [1, 1, 2, 2]


def test_who_is_late_is_not_asked_to_evaluate(slow: Callable[..., Slow]) -> None:
    on = slow(3, {2: 10**9})
    strategy = by_arrival(seconds=5.0)
    strategy.fraction_evaluate = 1.0
    train(strategy, on, 2)
    rounds = strategy.result.evaluate_metrics_clientapp.values()
    assert [row["eval-clients-asked"] for row in rounds] == [2, 2]


def test_by_arrival_requests_that_flower_could_not_send_cost_a_round(
    slow: Callable[..., Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = slow(3, {})
    push, fails = on.push_messages, iter([False, True])

    def failing(messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if messages and messages[0].metadata.message_type == "train" and next(fails, False):
            raise ObjectPushError("object", 1, "session")
        return push(messages)

    monkeypatch.setattr(on, "push_messages", failing)
    strategy = by_arrival(seconds=5.0)
    train(strategy, on, 3)
    assert rounds_of(strategy, "clients-used") == [3.0, 0.0, 3.0]


def test_by_arrival_nothing_says_what_a_step_takes() -> None:
    with pytest.raises(ValueError, match='cut needs order="virtual"'):
        Deadline(seconds=1.0, cut=True, order="arrival")
