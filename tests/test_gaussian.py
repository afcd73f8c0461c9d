"""Laws of the privacy part: the formula, the noise, the sample, epsilon, and what is refused."""

from __future__ import annotations

import json
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from flwr.app import Array, ArrayRecord, Message, MessageType
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import strategy as flower
from laws import REVIEWED, START, TABLE, local, train
from problems import CLIENT_OF, grid, quadratics, to_record, to_vector
from resumed import interrupted, outcome, run
from scipy import stats

from fl_strategies import Checkpoints, FedAvg, FederatedStrategy, PFedMe, as_legacy
from fl_strategies.core.clipping import norm
from fl_strategies.core.metric_names import in_training
from fl_strategies.core.records import Round
from fl_strategies.core.vectors import Pieces, weighted_mean
from fl_strategies.parts import (
    QSGD,
    BFloat16,
    BySize,
    FedExP,
    Gaussian,
    Median,
    Momentum,
    TopK,
    Uniform,
)
from fl_strategies.parts.accounting import epsilon
from simulations.lab.compare import main

ROW = {row.name: row for row in TABLE}
BOTH = pytest.mark.parametrize("sampling", ["poisson", "fixed"])
NONE: dict[str, Any] = {"clip": 1e30, "noise": 0.0, "sampling": "fixed"}
"""Hyperparameters with which the part changes nothing."""


def private(make: Any = FedAvg, *, fraction: float = 1.0, seed: int = 0, **part: Any) -> Any:
    """Return FedAvg, or what ``make`` makes, with a part whose seed is known."""
    part = {"seed": 5} | part
    options = {"weights": "uniform", "local": local(), "fraction_evaluate": 0.0}
    return make(**options, fraction_train=fraction, seed=seed, privacy=Gaussian(**part))


def a_round(theta: np.ndarray, asked: int, connected: int, number: int = 1) -> Round:
    clients = tuple(range(connected))
    return Round(number=number, theta=theta, connected=clients, asked=clients[:asked])


def epsilons(strategy: FederatedStrategy) -> list[float]:
    return [float(row["epsilon"]) for row in strategy.result.train_metrics_clientapp.values()]


def lost(*clients: int) -> Any:
    nodes = [node for node, client in CLIENT_OF.items() if client in clients]

    def fault(request: Message, reply: Message) -> Message | None:
        trained = request.metadata.message_type == MessageType.TRAIN
        return None if trained and request.metadata.dst_node_id in nodes else reply

    return fault


# ---- the formula --------------------------------------------------------------------------------


@pytest.mark.parametrize("divisor", [None, 4.5])
@BOTH
def test_the_model_moves_by_the_clipped_changes_over_the_expected_number(
    sampling: str, divisor: float | None
) -> None:
    rng = np.random.default_rng(1)
    theta, models = rng.normal(2.0, 1.0, 7), list(rng.normal(2.0, 3.0, (4, 7)))
    models[0] = theta + 0.01  # too near to be clipped
    part = Gaussian(clip=2.0, noise=0.0, sampling=sampling, divisor=divisor)
    found = part.mean(part.begin(None), a_round(theta, 6, 20), models, 0.35)
    n = divisor or (6 if sampling == "fixed" else 0.35 * 20)
    changes = [w - theta for w in models]
    clipped = [u * min(1.0, 2.0 / np.linalg.norm(u)) for u in changes]
    np.testing.assert_allclose(found, theta + sum(clipped) / n, rtol=1e-12)


def test_one_client_moves_the_sum_by_its_bound() -> None:
    rng = np.random.default_rng(2)
    part, theta = Gaussian(clip=1.5, noise=0.0), rng.normal(0.0, 1.0, 9)
    models = [Pieces([w]) for w in rng.normal(0.0, 8.0, (5, 9))]

    def total(models: Any) -> np.ndarray:
        return 5 * (part.mean(part.begin(None), a_round(theta, 5, 5), models, 1.0) - theta)

    assert np.linalg.norm(total(models) - total(models[1:])) <= 1.5 * (1 + 1e-12)
    opposite = [theta - 1e9 * (np.asarray(models[0]) - theta), *models[1:]]
    moved = np.linalg.norm(total(models) - total(opposite))
    assert moved == pytest.approx(3.0, rel=1e-9)


@pytest.mark.parametrize("name", ["fedavg", "per-fedavg", "pfedme"])
def test_without_noise_and_bound_it_is_the_rule_to_the_bit(name: str) -> None:
    options = {"local": local(), "fraction_train": 0.6, "seed": 4, "weights": "uniform"}
    plain = train(ROW[name].strategy(**options), grid(quadratics(5)), 2)
    part = Gaussian(**NONE, seed=4)
    found = train(ROW[name].strategy(**options, privacy=part), grid(quadratics(5)), 2)
    np.testing.assert_array_equal(found, plain)


def test_rules_that_average_models_with_equal_weights_take_it() -> None:
    taken = {
        name
        for name in ROW
        for weights in [{"weights": "uniform"} if "weights" in ROW[name].others else {}]
        if not Gaussian.refusal(ROW[name].strategy(local=local(), **weights), name)
    }
    assert REVIEWED & taken == {
        "fedavg", "fedprox", "ditto", "fedrep", "fedbabu", "apfl", "moon", "per-fedavg", "pfedme",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r'use FedAvg, .* with weights="uniform"$'):
        FedAvg(privacy=Gaussian())
    assert PFedMe(privacy=Gaussian()).weights == "uniform"


@pytest.mark.parametrize("n", [7, 50])
def test_many_long_uploads_are_the_uniform_mean_to_the_bit(n: int) -> None:
    models = list(np.random.default_rng(3).normal(1.0, 1.0, (n, 70_000)).astype(np.float32))
    part, theta = Gaussian(**NONE), np.zeros(70_000)
    found = part.mean(part.begin(None), a_round(theta, n, n), map(Pieces, zip(models)), 1.0)
    np.testing.assert_array_equal(found, weighted_mean((w, 1.0) for w in models))


# ---- noise and sample ---------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("replies", [0, 3])
def test_the_noise_has_the_variance_of_the_formula(sampling: str, replies: int) -> None:
    d, theta = 20_000, np.full(20_000, 3.0)
    part = Gaussian(clip=0.7, noise=1.3, sampling=sampling, seed=8)
    round = a_round(theta, 10, 40)
    found = part.mean(part.begin(None), round, [theta] * replies, 0.2)
    n = 10 if sampling == "fixed" else 0.2 * 40
    squares = float((((found - theta) * n / (0.7 * 1.3)) ** 2).sum())
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], d)
    assert low < squares < high
    assert abs((found - theta).mean()) < 5 * 0.7 * 1.3 / n / np.sqrt(d)


def test_the_noise_tells_how_many_are_connected_unless_n_is_given() -> None:
    def scale(connected: int, divisor: float | None) -> float:
        part = Gaussian(seed=8, divisor=divisor)
        theta = np.zeros(20)
        return float(norm(part.mean(part.begin(None), a_round(theta, 0, connected), [], 0.1)))

    assert scale(100, 10.0) == scale(101, 10.0)
    assert scale(100, None) == pytest.approx(scale(101, None) * 1.01, rel=1e-12)


def test_noise_differs_between_rounds_and_sets_of_replies() -> None:
    theta, part = np.zeros(5), Gaussian(seed=8)
    cases = [(1, [theta + 0.2]), (2, [theta + 0.2]), (1, [theta + 0.1]), (1, [])]
    noises = [
        part.mean(part.begin(None), a_round(theta, 4, 4, number), models, 1.0) * 4 - sum(models)
        for number, models in cases
    ]
    for i, noise in enumerate(noises):
        for other in noises[:i]:
            assert np.abs(noise - other).min() > 1e-9
    again = part.mean(part.begin(None), a_round(theta, 4, 4), [theta + 0.2], 1.0) * 4 - 0.2
    np.testing.assert_array_equal(again, noises[0])


def test_poisson_asks_each_client_by_itself() -> None:
    part = Gaussian(sampling="poisson", seed=1)
    state = part.begin(None)
    drawn = np.zeros((2000, 6))
    for number in range(2000):
        asked = part.select(state, a_round(np.zeros(1), 0, 6, number + 1), 0.3, 99)
        drawn[number, asked] = 1.0
    expected = 2000 * stats.binom.pmf(range(7), 6, 0.3)
    sizes = np.bincount(drawn.sum(1).astype(int), minlength=7)
    assert stats.chisquare(sizes, expected).pvalue > 1e-3
    assert np.abs(drawn.mean(0) - 0.3).max() < 5 * np.sqrt(0.21 / 2000)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(6)).max() < 5 / np.sqrt(2000)


def test_a_round_that_asks_nobody_adds_noise_and_counts() -> None:
    strategy = private(fraction=1e-6, clip=1e-6, delta=1e-7)
    found = train(strategy, grid(quadratics(3)), 2)
    assert strategy.result.skipped == []
    rows = strategy.result.train_metrics_clientapp
    assert [row["clients-asked"] for row in rows.values()] == [0, 0]
    assert (found != START).all()
    assert epsilons(strategy)[1] > epsilons(strategy)[0] > 0.0
    still = private(fraction=1e-6, noise=0.0)
    np.testing.assert_allclose(train(still, grid(quadratics(3)), 2), START, rtol=1e-14)


def test_lost_replies_do_not_count_in_the_divisor() -> None:
    all_lost = private(noise=0.0)
    found = train(all_lost, grid(quadratics(4), fault=lost(0, 1, 2, 3)), 1)
    np.testing.assert_allclose(found, START, rtol=1e-14)
    assert all_lost.result.skipped == []
    one = train(private(**NONE), grid(quadratics(1)), 1)
    found = train(private(**NONE), grid(quadratics(4), fault=lost(1, 2, 3)), 1)
    np.testing.assert_allclose(found, START + (one - START) / 4, rtol=1e-12)


# ---- epsilon ------------------------------------------------------------------------------------


def gaussian(e: float, mu: float) -> float:
    """Return delta(e) of N(mu, 1) and N(0, 1), by Balle and Wang, ICML 2018, Theorem 8."""
    low, high = -e / mu - mu / 2, -e / mu + mu / 2
    return float(stats.norm.cdf(high) - np.exp(e + stats.norm.logcdf(low)))


def sampled(e: float, z: float, q: float, rounds: int) -> float:
    """Return the larger delta(e) of both orders of (1) in one or two rounds, by a sum over x."""
    x, step = np.linspace(-12 * z, 12 * z + 1, 1201, retstep=True)
    r = stats.norm.pdf(x, scale=z)
    p = (1 - q) * r + q * stats.norm.pdf(x, loc=1.0, scale=z)
    if rounds == 2:
        p, r = np.outer(p, p), np.outer(r, r)
    sums = [np.maximum(a - np.exp(e) * b, 0.0).sum() for a, b in ((p, r), (r, p))]
    return float(max(sums) * step**rounds)


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
@pytest.mark.parametrize(
    ("sampling", "z", "q", "rounds", "delta_of"),
    [
        ("poisson", 1.0, 1.0, 30, lambda e: gaussian(e, 30**0.5)),  # a round with less noise
        ("fixed", 0.5, 1.0, 30, lambda e: gaussian(e, 2 * 30**0.5)),
        ("poisson", 50.0, 1.0, 1000, lambda e: gaussian(e, 1000**0.5 / 50)),
        ("poisson", 0.02, 1.0, 3, lambda e: gaussian(e, 50 * 3**0.5)),
        ("fixed", 0.7, 0.1, 1, lambda e: sampled(e, 0.7, 0.1, 1)),
        ("poisson", 0.7, 0.1, 1, lambda e: sampled(e, 0.7, 0.1, 1)),
        ("poisson", 0.8, 0.3, 2, lambda e: sampled(e, 0.8, 0.3, 2)),
    ],
)
def test_epsilon_is_the_exact_one_rounded_up(
    sampling: str, z: float, q: float, rounds: int, delta_of: Any, delta: float
) -> None:
    found = epsilon(np.tile([z, q], (rounds, 1)), sampling, delta)
    assert delta_of(found) <= delta * (1 + 1e-4)
    assert delta_of(found * 0.998) > delta


def test_fixed_size_bounds_every_order_of_the_worst_neighbours() -> None:
    """Which of the two runs has the sampled sum in a round depends on the other clients."""
    mixed = privacy_loss_distribution.from_gaussian_mechanism(
        0.5, sampling_prob=0.1, value_discretization_interval=1e-3
    )
    reverse, forward = (
        pld.get_epsilon_for_delta(1e-5)
        for pld in (
            privacy_loss_distribution.PrivacyLossDistribution(mixed._pmf_add).self_compose(30),
            mixed.self_compose(30),
        )
    )
    assert reverse < forward < epsilon(np.tile([0.5, 0.1], (30, 1)), "fixed", 1e-5) < 1.05 * forward


@BOTH
def test_a_run_counts_its_rounds(sampling: str) -> None:
    strategy = private(fraction=0.4, noise=1.7, delta=1e-4, sampling=sampling)
    train(strategy, grid(quadratics(5), fault=lost(2)), 4)
    assert strategy.result.skipped == []
    row = [1.7, 0.4] if sampling == "poisson" else [1.7 / 2, 2 / 5]
    expected = [epsilon(np.tile(row, (t, 1)), sampling, 1e-4) for t in range(1, 5)]
    assert epsilons(strategy) == expected


def test_without_noise_epsilon_is_infinite() -> None:
    strategy = private(noise=0.0)
    train(strategy, grid(quadratics(2)), 2)
    assert epsilons(strategy) == [np.inf, np.inf]


@BOTH
def test_max_epsilon_ends_the_run_before_it_is_exceeded(sampling: str, tmp_path: Path) -> None:
    def strategy(bound: float | None) -> Any:
        one = private(fraction=0.5, noise=6.0, sampling=sampling, max_epsilon=bound)
        one.checkpoints = Checkpoints(tmp_path / f"{bound}", every=2)
        return one

    def start(one: Any, rounds: int = 6, **options: Any) -> Any:
        return one.start(grid(quadratics(4)), to_record(START), rounds, **options)

    start(free := strategy(None), rounds=3)
    bound = epsilons(free)[2] * (1 + 1e-9)
    start(bounded := strategy(bound))
    assert epsilons(bounded) == epsilons(free)[:3]
    start(resumed := strategy(bound), resume=True)
    assert epsilons(resumed) == epsilons(free)[:3]
    with pytest.raises(ValueError, match=r"with round 4 epsilon would be .* and max_epsilon is"):
        start(bounded)
    for wrong in (private(max_epsilon=0.1), private(noise=0.0, max_epsilon=1e9)):
        with pytest.raises(ValueError, match="with round 1 epsilon would be"):
            start(wrong)
        assert not wrong.result.train_metrics_clientapp


def test_no_client_reports_epsilon() -> None:
    assert in_training("epsilon") == "client-epsilon"


def test_a_run_without_dp_accounting_ends_before_it_begins(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match="pip install dp-accounting"):
        train(private(), grid(quadratics(2)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.001, 1.0])
def test_a_comparison_has_epsilon_in_its_summary(fraction: float, tmp_path: Path) -> None:
    """Also where hardly anybody is asked, and the rounds add noise alone."""
    line = "--dataset digits --clients 5 --rounds 2 --quiet --algorithms fedavg,fedavg+gaussian"
    params = f"--param weights=uniform --param gaussian.noise=2.0 --fraction {fraction}"
    summaries = main([*line.split(), *params.split(), "--output", str(tmp_path)])
    plain, found = (summary["epsilon"] for summary in summaries)
    assert plain is None
    rows = (tmp_path / "fedavg+gaussian/history.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["epsilon"] == found > json.loads(rows[0])["epsilon"] > 0.0


# ---- adaptive clipping --------------------------------------------------------------------------


def adapted(part: Gaussian, state: Any, norms: Any, number: int = 1) -> Any:
    """Return the state after a round in which changes of these norms were uploaded."""
    round = a_round(np.zeros(3), len(norms), len(norms), number)
    return part.moved(state, round, [np.array([0.6, 0.0, -0.8]) * r for r in norms], 1.0)


def test_the_bound_moves_by_the_share_of_changes_below_it() -> None:
    part = Gaussian(clip=2.0, noise=0.0, quantile=0.7, clip_rate=0.3, sampling="fixed")
    norms = [0.5, 2.0, 2.1, 9.0, 0.0]
    found = adapted(part, part.begin(None), norms)
    assert part.bound(found) == pytest.approx(2.0 * np.exp(-0.3 * (3 / 5 - 0.7)), rel=1e-12)
    lost = Gaussian(clip=2.0, noise=0.0, quantile=0.7, divisor=8.0)  # of 8 expected
    found = adapted(lost, lost.begin(None), norms)
    below = 1 / 2 + (3 - 5 / 2) / 8
    assert lost.bound(found) == pytest.approx(2.0 * np.exp(-0.2 * (below - 0.7)), rel=1e-12)
    still = Gaussian(clip=2.0, noise=0.0)
    assert still.bound(adapted(still, still.begin(None), norms)) == 2.0


@pytest.mark.parametrize(
    ("first", "quantile", "noise"), [(1e-3, 0.5, 0.0), (1e3, 0.5, 2.0), (1.0, 0.8, 2.0)]
)
def test_the_bound_reaches_the_quantile_of_a_stream_of_norms(
    first: float, quantile: float, noise: float
) -> None:
    """Of log-normal norms. Noise in the count is 1/20, as much as b has by chance."""
    rng = np.random.default_rng(4)
    part = Gaussian(clip=first, noise=noise, quantile=quantile, seed=3)
    state, bounds = part.begin(None), list[float]()
    for number in range(400):
        state = adapted(part, state, rng.lognormal(1.0, 0.6, 100), number)
        bounds.append(part.bound(state))
    target = np.exp(stats.norm.ppf(quantile, 1.0, 0.6))
    assert np.exp(np.mean(np.log(bounds[200:]))) == pytest.approx(target, rel=0.03)


def test_the_noise_of_changes_and_of_the_count_are_those_of_the_formulas() -> None:
    d, n, z, s = 20_000, 8, 1.3, 2.5
    theta, part = np.zeros(d), Gaussian(clip=0.7, noise=z, quantile=0.5, count_noise=s, seed=8)
    round = a_round(theta, n, n)
    state = part.begin(None)._replace(clip=0.2)
    squares = float(((part.mean(state, round, [], 1.0) * n / 0.2) ** 2).sum())
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], d)
    assert low < squares * (1 / z**2 - 1 / (2 * s) ** 2) < high
    counts = [
        (np.log(adapted(part, state, [0.1] * n, t).clip / 0.2) / -0.2 + 0.5 - 1) * n
        for t in range(2000)
    ]
    assert stats.kstest(counts, stats.norm(0, s).cdf).pvalue > 1e-3
    assert adapted(part, state, [0.1] * n, 1).clip == adapted(part, state, [0.1] * n, 1).clip


@pytest.mark.parametrize("asked", [10, 3])
@BOTH
def test_change_and_count_together_cost_what_the_change_alone_costs(
    sampling: str, asked: int
) -> None:
    """The two runs' pair of sums is as many standard deviations apart as the account says."""
    part = Gaussian(noise=1.1, quantile=0.5, count_noise=0.8, sampling=sampling)
    changed = 1 if sampling == "poisson" else 2  # to 0, or to the opposite
    apart = np.hypot(changed / part.noises(10.0)[0], changed / 2 / 0.8)
    round = a_round(np.zeros(1), asked, 10)
    ((z, q),) = part.counted(part.begin(None), round, asked / 10).rounds
    assert (1 / z, q) == (pytest.approx(apart, rel=1e-12), asked / 10)


def test_a_run_clips_by_the_bound_of_the_round_and_reports_it() -> None:
    def start(clip: float, rounds: int = 3, **options: Any) -> Any:
        one = private(clip=clip, noise=0.0, **options)
        return one, train(one, grid(quadratics(4)), rounds)

    one, found = start(0.3, quantile=0.5)
    clips = [row["clip"] for row in one.result.train_metrics_clientapp.values()]
    assert clips == pytest.approx([0.3, 0.3 * np.exp(0.1), 0.3 * np.exp(0.2)])  # all are clipped
    expected = START
    for clip in clips:
        alone = private(clip=clip, noise=0.0)
        result = alone.start(grid(quadratics(4)), to_record(expected), 1)
        expected = to_vector(result.arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert "clip" not in start(0.3)[0].result.train_metrics_clientapp[1]
    assert in_training("clip") == "client-clip"


def test_too_much_noise_for_the_count_is_refused_before_anybody_is_asked() -> None:
    few = private(noise=0.4, quantile=0.5, sampling="fixed")
    with pytest.raises(
        ValueError, match=r"noise must be < 0\.4 with a quantile.*n = 4 here.*got 0"
    ):
        train(few, grid(quadratics(4)), 1)
    assert not few.result.train_metrics_clientapp
    train(private(noise=0.4, quantile=0.5, count_noise=0.21), grid(quadratics(4)), 1)


# ---- seeds, resumption, hosts -------------------------------------------------------------------


@BOTH
def test_the_parts_seed_fixes_the_run_and_by_default_is_secret(sampling: str) -> None:
    def found(**options: Any) -> np.ndarray:
        options = {"fraction": 0.5, "sampling": sampling} | options
        return train(private(**options), grid(quadratics(6)), 2)

    np.testing.assert_array_equal(found(seed=1), found(seed=2))  # the run's, which clients know
    unlike = [found(), train_with(6, seed=6, sampling=sampling), train_with(6, sampling=sampling)]
    unlike.append(train_with(6, sampling=sampling))
    for i, one in enumerate(unlike):
        for other in unlike[:i]:
            assert np.abs(one - other).max() > 1e-9


def train_with(clients: int, **part: Any) -> np.ndarray:
    """Return the model after two rounds with a part that has just these hyperparameters."""
    options: dict[str, Any] = {"local": local(), "fraction_train": 0.5, "fraction_evaluate": 0.0}
    strategy = FedAvg(weights="uniform", privacy=Gaussian(**part), **options)
    return train(strategy, grid(quadratics(clients)), 2)


@BOTH
def test_a_killed_run_resumes_to_the_bit(sampling: str, tmp_path: Path, monkeypatch: Any) -> None:
    def strategy(folder: Path, secret: int) -> FederatedStrategy:
        monkeypatch.setattr(secrets, "randbits", lambda bits: secret)
        options: dict[str, Any] = {"fraction_train": 0.6, "seed": 3, "weights": "uniform"}
        checkpoints = Checkpoints(folder / "checkpoints", every=2)
        part = Gaussian(sampling=sampling, noise=2.0, quantile=0.5, count_noise=1.5)
        return ROW["fedavg"].strategy(
            local=local(), privacy=part, server_step=Momentum(), checkpoints=checkpoints, **options
        )

    secret = 2**127 + 9
    whole = run(strategy(tmp_path / "whole", secret), tmp_path / "whole", 5)
    interrupted(strategy(tmp_path / "cut", secret), tmp_path / "cut", 3, rounds=5)
    found = run(strategy(tmp_path / "cut", 1), tmp_path / "cut", 5)
    assert outcome(found) == outcome(whole)


def test_earlier_rounds_count_with_what_they_had(tmp_path: Path) -> None:
    def start(rounds: int, **part: Any) -> Any:
        one = private(**part)
        one.checkpoints = Checkpoints(tmp_path)
        one.start(grid(quadratics(3)), to_record(START), rounds, resume=True)
        return one

    start(2, noise=4.0)
    after = epsilons(start(3, noise=9.0))
    mu = (2 / 4.0**2 + 1 / 9.0**2) ** 0.5
    assert gaussian(after[-1], mu) == pytest.approx(1e-5, rel=1e-2)
    with pytest.raises(ValueError, match="sampling was 'poisson' before, and is 'fixed'"):
        start(4, noise=9.0, sampling="fixed")


def test_a_second_start_continues_the_account() -> None:
    once, twice = private(noise=3.0), private(noise=3.0)
    train(once, grid(quadratics(3)), 4)
    train(twice, grid(quadratics(3)), 2)
    twice.start(grid(quadratics(3)), twice.result.arrays, 2)
    assert epsilons(twice) == epsilons(once)[2:]


# ---- with other parts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"combine": Median()}, "the noise is that of a sum"),
        ({"selection": BySize()}, "epsilon counts on the part's `sampling`"),
        ({"selection": Uniform()}, "epsilon counts on the part's `sampling`"),
        ({"selection": lambda round: round.connected}, "epsilon counts on the part's `sampling`"),
        ({"compression": TopK()}, "neither used nor sent later; use QSGD"),
        ({"compression": BFloat16()}, "neither used nor sent later; use QSGD"),
        ({"server_step": FedExP()}, "which reads uploads without noise; use Momentum"),
        ({"min_replies": 2}, "a skipped round would tell how many took part"),
        ({"min_train_nodes": 2}, r'use min_available_nodes, or sampling="fixed"'),
    ],
)
def test_what_breaks_the_guarantee_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=rf"^privacy=Gaussian\(\) does not go with .*{why}"):
        FedAvg(weights="uniform", privacy=Gaussian(), **options)


def test_a_server_step_and_codes_without_memory_go_with_it() -> None:
    def found(noise: float, **options: Any) -> np.ndarray:
        strategy = private(lambda **given: FedAvg(**given, **options), noise=noise)
        return train(strategy, grid(quadratics(4)), 3)

    np.testing.assert_array_equal(found(1.0, server_step=Momentum(lr=1.0, beta=0.0)), found(1.0))
    coded = found(0.0, compression=QSGD(levels=2**15 - 1))
    np.testing.assert_allclose(coded, found(0.0), atol=1e-2)


def test_buffers_are_refused() -> None:
    initial = {"w": np.ones(2), "running_mean": np.ones(2), "running_var": np.ones(2)}
    start = ArrayRecord({name: Array(array) for name, array in initial.items()})
    as_given = partial(FedAvg, buffers=[*initial][1:], ties=(), frozen={})
    with pytest.raises(ValueError, match=r"does not go with buffers .*running_mean.*GroupNorm"):
        private(as_given).start(grid(quadratics(2)), start, 1)


def test_poisson_sampling_on_a_legacy_server_is_refused() -> None:
    with pytest.raises(ValueError, match=r'leaves out a round that asks nobody.*sampling="fixed"$'):
        as_legacy(private())


def test_wrappers_and_masks_are_refused() -> None:
    wrapper = flower.DifferentialPrivacyServerSideFixedClipping(private(), 0.0, 1.0, 3)
    with pytest.raises(ValueError, match=r"^FedAvg with privacy=Gaussian\(.*cannot be run by"):
        wrapper.start(grid(quadratics(3)), to_record(START), 1)
    with pytest.raises(ValueError, match=r"^FedAvg with privacy=Gaussian\(.*does not work with"):
        as_legacy(private(sampling="fixed"), secure=SecAggPlusWorkflow(1.0, 0.5))
