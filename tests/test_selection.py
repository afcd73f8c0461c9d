"""Laws of the parts that select clients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hosted import federation
from laws import START, TABLE, Row, every_algorithm, local, train
from problems import grid, make_client_app, quadratics, to_record, to_vector

from clients import Hosted
from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, Round
from fl_strategies.parts import BySize, FedExP, Median, Momentum, Probabilities, Selection, Uniform

SAMPLES = {3: 40, 2**63 + 5: 10, 9: 30, 2**63 - 1: 20}
MANY = 4000


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


@pytest.mark.parametrize("part", [Uniform(), BySize(), Probabilities(p={3: 5.0})], ids=str)
def test_a_draw_depends_on_seed_and_round_alone(part: Selection) -> None:
    first, again = ([part.select(r, 2) for r in rounds(20)] for _ in range(2))
    assert first == again
    assert len({tuple(drawn) for drawn in first}) > 3


# ---- in a run -----------------------------------------------------------------------------------


@every_algorithm
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


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("name", ["fedavg", "pfedme", "moon"])
def test_a_client_that_is_drawn_k_times_trains_once_with_weight_k(name: str, hosts: int) -> None:
    (row,) = [row for row in TABLE if row.name == name]
    options: dict[str, Any] = {"local": local(), "seed": 2}
    strategy = row.strategy(selection=BySize(), **options)
    found = train(strategy, of_sizes(1, 1, 1, 97, hosts=hosts), 1)
    asked = strategy.result.train_metrics_clientapp[1]["clients-asked"]
    round = Round(1, connected=(0, 1, 2, 3), samples={0: 1, 1: 1, 2: 1, 3: 97}, seed=2)
    draws = Counter(BySize().select(round, 4))
    assert asked == len(draws)
    models = {
        client: train(
            row.strategy(selection=lambda r, c=client: [c], **options), grid(quadratics(4)), 1
        )
        for client in draws
    }
    expected = sum(k * models[client] for client, k in draws.items()) / 4
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
