"""Laws of the parts that select clients."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from hosted import federation
from laws import START, TABLE, Row, local, one_of_each_mechanism, train
from problems import grid, make_client_app, quadratics, to_record, to_vector

from clients import Hosted
from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, Round
from fl_strategies.core.last_metrics import LastMetrics, Numbers
from fl_strategies.parts import (
    BySize,
    Clock,
    FedExP,
    HighLoss,
    Median,
    Momentum,
    PowerOfChoice,
    Probabilities,
    Selection,
    Uniform,
)

SAMPLES = {3: 40, 2**63 + 5: 10, 9: 30, 2**63 - 1: 20}
MANY, SOME = 4000, 1000


def rounds(count: int = MANY, **options: Any) -> list[Round]:
    clients = tuple(sorted(SAMPLES))
    return [Round(n, connected=clients, samples=SAMPLES, seed=5, **options) for n in range(count)]


def chi2(drawn: Counter[int], expected: dict[int, float]) -> float:
    return sum((drawn[c] - e) ** 2 / e for c, e in expected.items())


# ---- who is drawn -------------------------------------------------------------------------------


def test_clients_are_drawn_in_proportion_to_their_samples() -> None:
    drawn = Counter(client for r in rounds() for client in BySize().select(r, 2))
    total = sum(SAMPLES.values())
    expected = {client: 2 * MANY * n / total for client, n in SAMPLES.items()}
    assert drawn.keys() == SAMPLES.keys()
    assert chi2(drawn, expected) < 16.3  # 3 degrees of freedom, probability 0.1 %


@pytest.mark.slow
def test_the_plain_mean_by_size_is_unbiased_and_a_uniform_ratio_is_not() -> None:
    values = dict(zip(SAMPLES, (1.0, 5.0, -2.0, 9.0), strict=True))
    total = sum(SAMPLES.values())
    mean = sum(SAMPLES[c] * values[c] for c in SAMPLES) / total
    by_size = [np.mean([values[c] for c in BySize().select(r, 2)]) for r in rounds()]
    error = np.std(by_size) / MANY**0.5
    assert abs(np.mean(by_size) - mean) < 4 * error
    ratios = [
        np.average([values[c] for c in drawn], weights=[SAMPLES[c] for c in drawn])
        for r in rounds()
        for drawn in [Uniform().select(r, 2)]
    ]
    assert abs(np.mean(ratios) - mean) > 4 * np.std(ratios) / MANY**0.5


def test_given_weights_are_the_odds_of_one_draw_and_0_is_never() -> None:
    part = Probabilities(p={3: 2.0, 9: 0.0})  # the others have 1
    drawn = Counter(client for r in rounds() for client in part.select(r, 1))
    others = [c for c in SAMPLES if c not in (3, 9)]
    assert chi2(drawn, {3: MANY / 2, **dict.fromkeys(others, MANY / 4)}) < 13.8
    assert drawn[9] == 0
    assert all(sorted(part.select(r, 4)) == sorted({*SAMPLES} - {9}) for r in rounds(9))


PARTS = [Uniform(), BySize(), Probabilities(p={3: 5.0}), HighLoss(), PowerOfChoice(candidates=1.5)]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_draw_depends_on_seed_and_round_alone(part: Selection) -> None:
    first, again = ([part.select(r, 2) for r in rounds(20)] for _ in range(2))
    assert first == again
    assert len({tuple(drawn) for drawn in first}) > 3


# ---- by what is known of clients ----------------------------------------------------------------


def after(losses: dict[int, float | None], silent: tuple[int, ...] = ()) -> LastMetrics:
    """Return what is known once clients reported these losses, None for one that missed it."""
    rows = {c: {} if c in silent else {"train-loss": x} for c, x in losses.items() if x is not None}
    return LastMetrics().after(losses, rows, {})


def test_what_is_known_of_clients_is_that_of_their_last_requests() -> None:
    """Against a dictionary, for clients of any id, of which some miss or report nothing."""
    rng, metrics, twin = np.random.default_rng(0), LastMetrics(), dict[int, Numbers]()
    ids = [0, 7, 2**63 - 1, 2**63, 2**64 - 1, 41]
    for _ in range(60):
        asked = [ids[place] for place in rng.permutation(6)[: rng.integers(0, 4)]]
        rows: dict[int, dict[str, float]] = {}
        for client in asked:
            before = twin.get(client, Numbers())
            twin[client] = before._replace(missed=before.missed + 1)
            if rng.random() < 0.7:
                rows[client] = {"train-loss": rng.random(), "train_accuracy": 0.5, "samples": 3}
                twin[client] = Numbers(rows[client]["train-loss"], 0.5, 2.5)
        metrics = metrics.after(asked, rows, dict.fromkeys(rows, 2.5))
    assert [*metrics] == sorted(twin)
    for client in ids:
        assert (client in metrics) == (client in twin)
        np.testing.assert_array_equal(metrics[client], twin[client])
    losses = [twin[client].loss for client in ids]
    np.testing.assert_array_equal(metrics.column("loss", ids), losses)
    assert np.isnan(LastMetrics().column("missed", ids)).all()
    with pytest.raises(KeyError):
        metrics[5]


def test_the_highest_losses_are_asked_and_a_client_never_asked_comes_first() -> None:
    losses = {1: 0.2, 2: 5.0, 3: 0.9, 4: 7.0, 5: None, 6: 0.0, 2**63: 0.8}
    round = Round(3, connected=(1, 2, 3, 4, 5, 6, 9, 2**63), metrics=after(losses, silent=(6,)))
    asked = [set[int](), *({*HighLoss().select(round, size)} for size in range(1, 9))]
    # 5 missed its request, and 6 told no loss: both have the median, 0.9
    new = [{9}, {4}, {2}, {3, 5, 6}, {2**63}, {1}]
    ends = np.cumsum([0, *map(len, new)])
    for end, last, clients in zip(ends[1:], ends[:-1], new, strict=True):
        assert asked[end] - asked[last] == clients
    dead = after({1: 0.2, 2: 9.0}).after([2], {}, {})
    later = [Round(number, connected=(1, 2, 3), metrics=dead) for number in range(20)]
    assert all(3 in HighLoss().select(one, 2) for one in later)
    assert {client for one in later for client in HighLoss().select(one, 2)} == {1, 2, 3}


def test_equal_losses_are_drawn_alike_whatever_the_order_of_replies() -> None:
    clients, losses = tuple(range(5)), dict.fromkeys(range(4), 1.0)
    known = [after(dict(pairs)) for pairs in ([*losses.items()], [*losses.items()][::-1])]
    drawn: Counter[int] = Counter()
    for number in range(SOME):
        rounds = [Round(number, connected=clients, seed=5, metrics=m) for m in known]
        one, other = (HighLoss().select(round, 2) for round in rounds)
        assert one == other
        drawn.update(one)
    assert drawn.pop(4) == SOME  # never asked
    assert chi2(drawn, dict.fromkeys(range(4), SOME / 4)) < 16.3


def test_power_of_choice_asks_the_worst_of_candidates_drawn_by_data_share() -> None:
    """With d = 2 of clients of 4, 1, 3, 2 tens: the pair's probability, by (2), and its worse."""
    clients = sorted(SAMPLES)
    p = {client: SAMPLES[client] / 100 for client in clients}
    loss = dict(zip(clients, (3.0, 1.0, 4.0, 2.0), strict=True))
    expected = dict.fromkeys(clients, 0.0)
    for i in clients:
        for j in {*clients} - {i}:
            worse = max((i, j), key=lambda client: loss[client])
            expected[worse] += SOME * p[i] * p[j] / (1 - p[i])
    part, metrics = PowerOfChoice(candidates=2.0), after({**loss})
    drawn = Counter(c for r in rounds(SOME, metrics=metrics) for c in part.select(r, 1))
    assert drawn[min(loss, key=lambda client: loss[client])] == 0
    assert chi2(drawn, {c: e for c, e in expected.items() if e}) < 13.8


def test_one_candidate_each_is_a_draw_by_size_and_enough_are_the_highest_losses() -> None:
    first = after({3: 0.1, 9: 0.2, 2**63 - 1: 0.3, 2**63 + 5: 0.4})
    for r in rounds(50, metrics=first):
        assert {*PowerOfChoice(candidates=2.0).select(r, 2)} == {*HighLoss().select(r, 2)}
    drawn = Counter(
        c for r in rounds(SOME, metrics=first) for c in PowerOfChoice(candidates=1.0).select(r, 1)
    )
    assert chi2(drawn, {client: SOME * n / 100 for client, n in SAMPLES.items()}) < 16.3


def test_a_client_that_lies_about_its_loss_is_asked_when_it_is_a_candidate() -> None:
    """With 2 candidates for each client asked it is asked twice as often."""
    clients = tuple(range(20))
    lies = after({**dict.fromkeys(clients, 1.0), 7: 1e300})
    drawn: Counter[int] = Counter()
    for number in range(SOME):
        drawn.update(PowerOfChoice().select(Round(number, connected=clients, metrics=lies), 2))
    candidate = SOME * 4 / 20
    assert abs(drawn[7] - candidate) < 4 * np.sqrt(candidate * 16 / 20)


# ---- in a run -----------------------------------------------------------------------------------


@one_of_each_mechanism
def test_uniform_is_what_an_algorithm_does_without_a_part(row: Row) -> None:
    options: dict[str, Any] = {"local": local(), "fraction_train": 0.5, "seed": 3}
    if row.strategy(**options).chooses_clients:
        with pytest.raises(ValueError, match=r"selection=Uniform\(\) does not go with .* itself"):
            row.strategy(selection=Uniform(), **options)
        return
    plain, found = (
        train(row.strategy(**given, **options), grid(quadratics(4)), 3)
        for given in ({}, {"selection": Uniform()})
    )
    np.testing.assert_array_equal(found, plain)


def of_sizes(*samples: int, hosts: int = 1) -> InProcessGrid:
    """Return hosts that say how many samples their clients have."""
    each = len(samples) // hosts

    def hosted(context: Any) -> Hosted:
        first = each * int(context.node_config["partition-id"])
        return Hosted([*range(first, first + each)], samples[first : first + each])

    app = make_client_app(quadratics(len(samples)), hosts=hosted)
    return InProcessGrid(app, len(samples), hosts=hosts)


@cache
def trained_alone(name: str, client: int) -> np.ndarray:
    """Return the model of the run below if it asks this client alone, computed once."""
    (row,) = [row for row in TABLE if row.name == name]
    strategy = row.strategy(selection=lambda r: [client], local=local(), seed=2)
    return train(strategy, grid(quadratics(4)), 1)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("name", ["fedavg", "pfedme", "moon"])
def test_a_client_that_is_drawn_k_times_trains_once_with_weight_k(name: str, hosts: int) -> None:
    (row,) = [row for row in TABLE if row.name == name]
    strategy = row.strategy(selection=BySize(), local=local(), seed=2)
    found = train(strategy, of_sizes(1, 1, 1, 97, hosts=hosts), 1)
    asked = strategy.result.train_metrics_clientapp[1]["clients-asked"]
    round = Round(1, connected=(0, 1, 2, 3), samples={0: 1, 1: 1, 2: 1, 3: 97}, seed=2)
    draws = Counter(BySize().select(round, 4))
    assert asked == len(draws)
    expected = sum(k * trained_alone(name, client) for client, k in draws.items()) / 4
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    shares = {c: row["weight-share"] for c, row in strategy.run.clients.items()}
    assert shares == {client: k / 4 for client, k in draws.items()}


def test_a_function_selects_of_the_round_and_a_stranger_is_refused() -> None:
    seen: list[Round] = []

    def latest(round: Round) -> tuple[int, ...]:
        seen.append(round)
        return round.connected[-2:]

    strategy = FedAvg(local=local(), selection=latest)
    train(strategy, grid(quadratics(4)), 2)
    assert [r.number for r in seen] == [1, 2]
    assert [m["clients-asked"] for m in strategy.result.train_metrics_clientapp.values()] == [2, 2]
    with pytest.raises(ValueError, match=r"selection returned \[7\], which are not connected"):
        train(FedAvg(local=local(), selection=lambda round: [0, 7]), grid(quadratics(4)), 1)
    with pytest.raises(ValueError, match="selection must be selecting part"):
        FedAvg(selection=[0, 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("clock", [None, Clock(step=2.0)], ids=str)
def test_a_function_knows_what_each_client_reported_last(clock: Clock | None) -> None:
    seen: list[LastMetrics] = []

    def one_after_another(round: Round) -> list[int]:
        seen.append(round.metrics)
        return [(round.number - 1) % 3, 3]

    strategy = FedAvg(local=local(), selection=one_after_another, clock=clock)
    rows: list[dict[int, dict[str, float]]] = []
    strategy.callbacks = (lambda info: rows.append(info.clients),)
    train(strategy, grid(quadratics(4)), 4)
    assert [[*known] for known in seen] == [[], [0, 3], [0, 1, 3], [0, 1, 2, 3]]
    for number, known in enumerate(seen[1:], start=1):
        for client in ((number - 1) % 3, 3):
            row = rows[number - 1][client]
            assert known[client][:2] == pytest.approx((row["train-loss"], np.nan), nan_ok=True)
            seconds = np.nan if clock is None else 2.0 * row["steps"]
            assert known[client].seconds == pytest.approx(seconds, nan_ok=True)
    assert strategy.run.last_metrics[0].missed == 0


def test_losses_that_nobody_reports_are_named(caplog: pytest.LogCaptureFixture) -> None:
    said = "high-loss: no client reports train-loss, so all count alike"
    part, told = HighLoss(), after({1: 0.5, 2: None})
    part.select(Round(2, connected=(1, 2), metrics=told), 1)
    assert said not in caplog.text
    for number in (3, 4):
        part.select(Round(number, connected=(1, 2), metrics=after({1: 0.5}, silent=(1,))), 1)
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("part", [lambda by: Probabilities(p=by), lambda by: Clock(step=by)])
def test_clients_are_named_by_numbers(part: Any) -> None:
    part({np.int64(0): 1.0})
    with pytest.raises((TypeError, ValueError), match=r"mapping of clients.*'0'"):
        part({"0": 1.0})


def test_unknown_sizes_are_refused_with_what_tells_them() -> None:
    with pytest.raises(ValueError, match=r"4 of 4 clients were introduced without.*Hosted\("):
        train(FedAvg(local=local(), selection=BySize()), grid(quadratics(4)), 1)


def test_what_counts_draws_needs_each_upload_and_no_other_mean() -> None:
    with pytest.raises(ValueError, match=r"FedAvg with selection=BySize\(\), which needs each"):
        FedAvg(selection=BySize(), fold="on")
    with pytest.raises(ValueError, match=r"selection=BySize\(\) does not go with combine=Median"):
        FedAvg(selection=BySize(), combine=Median())
    for row in TABLE:
        if row.strategy(local=local()).averages != "models":
            with pytest.raises(ValueError, match=r"^selection=BySize\(\) does not go with"):
                row.strategy(local=local(), selection=BySize())


def test_selection_and_a_server_step_go_together() -> None:
    options: dict[str, Any] = {"local": local(), "selection": BySize(), "seed": 1}
    alone = train(FedAvg(**options), of_sizes(5, 6, 7, 8), 3)
    step = Momentum(lr=1.0, beta=0.0)
    np.testing.assert_array_equal(
        train(FedAvg(server_step=step, **options), of_sizes(5, 6, 7, 8), 3), alone
    )
    one = FedAvg(server_step=FedExP(eps=1e9), **options)
    result = one.start(of_sizes(5, 6, 7, 8), to_record(START), 3)
    assert np.isfinite(to_vector(result.arrays)).all()


def test_every_client_of_hosts_without_sizes_is_counted() -> None:
    with pytest.raises(ValueError, match="6 of 6 clients were introduced without"):
        train(FedAvg(local=local(), selection=BySize()), federation("2 hosts"), 1)
