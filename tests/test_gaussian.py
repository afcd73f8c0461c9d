"""Laws of the privacy part: the formula, the noise, the sample, epsilon, and what is refused."""

from __future__ import annotations

import json
import re
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from flwr.app import Array, ArrayRecord, Message, MessageType
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import strategy as flower
from hosted import federation
from laws import REVIEWED, START, TABLE, Row, every_algorithm, local, train
from problems import CLIENT_OF, grid, quadratics, to_record
from resumed import interrupted, outcome, run
from scipy import stats

from fl_strategies import Checkpoints, FedAvg, FederatedStrategy, PFedMe, as_legacy
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
from fl_strategies.parts.accounting import ORDERS
from simulations.lab.compare import main

ROW = {row.name: row for row in TABLE}
BOTH = pytest.mark.parametrize("sampling", ["fixed", "poisson"])
NONE: dict[str, Any] = {"clip": 1e30, "noise": 0.0}
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


@BOTH
def test_the_model_moves_by_the_clipped_changes_over_the_expected_number(sampling: str) -> None:
    rng = np.random.default_rng(1)
    theta, models = rng.normal(2.0, 1.0, 7), list(rng.normal(2.0, 3.0, (4, 7)))
    models[0] = theta + 0.01  # too near to be clipped
    part = Gaussian(clip=2.0, noise=0.0, sampling=sampling)
    found = part.mean(part.begin(None), a_round(theta, 6, 20), models, 0.35)
    n = 6 if sampling == "fixed" else 0.35 * 20
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


@every_algorithm
def test_without_noise_and_bound_it_is_the_rule_to_the_bit_or_is_refused(row: Row) -> None:
    strategy = row.strategy(local=local())
    uniform = {"weights": "uniform"} if "weights" in strategy.hyperparameters() else {}
    if why := Gaussian.refusal(row.strategy(local=local(), **uniform), type(strategy).__name__):
        text = rf"^privacy=Gaussian\(.*\) does not go with \w+: {re.escape(why)}"
        with pytest.raises(ValueError, match=text):
            row.strategy(local=local(), privacy=Gaussian(**NONE), **uniform)
        return
    options = {"local": local(), "fraction_train": 0.6, "seed": 4, **uniform}
    plain = train(row.strategy(**options), grid(quadratics(5)), 3)
    part = Gaussian(**NONE, seed=4)
    found = train(row.strategy(**options, privacy=part), grid(quadratics(5)), 3)
    np.testing.assert_array_equal(found, plain)


def test_rules_that_average_models_with_equal_weights_take_it() -> None:
    taken = {
        name
        for name in ROW
        for weights in [{"weights": "uniform"} if "weights" in ROW[name].others else {}]
        if not Gaussian.refusal(ROW[name].strategy(local=local(), **weights), name)
    }
    assert REVIEWED & taken == {"fedavg", "fedprox", "ditto", "moon", "per-fedavg", "pfedme"}
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


def test_an_empty_sample_gives_noise_alone() -> None:
    strategy = private(fraction=1e-6, sampling="poisson", clip=1e-6)
    found = train(strategy, grid(quadratics(3)), 2)
    assert strategy.result.skipped == []
    rows = strategy.result.train_metrics_clientapp
    assert [row["clients-asked"] for row in rows.values()] == [0, 0]
    assert (found != START).all()
    still = private(fraction=1e-6, sampling="poisson", noise=0.0)
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


@BOTH
@pytest.mark.slow
def test_epsilon_is_that_of_dp_accounting(sampling: str) -> None:
    strategy = private(fraction=0.4, noise=1.7, delta=1e-4, sampling=sampling)
    train(strategy, grid(quadratics(5), fault=lost(2)), 4)
    assert strategy.result.skipped == []
    if sampling == "fixed":
        accountant = RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE)
        event: Any = dp.SampledWithoutReplacementDpEvent(5, 2, dp.GaussianDpEvent(1.7 / 2))
    else:
        accountant = RdpAccountant(ORDERS, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
        event = dp.PoissonSampledDpEvent(0.4, dp.GaussianDpEvent(1.7))
    expected = [accountant.compose(event).get_epsilon(1e-4) for _ in range(4)]
    np.testing.assert_allclose(epsilons(strategy), expected, rtol=1e-12)


def test_whole_orders_lose_little() -> None:
    event = dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(1.0))
    exact, ours = (RdpAccountant(orders).compose(event, 500) for orders in (None, ORDERS))
    assert exact.get_epsilon(1e-5) <= ours.get_epsilon(1e-5) <= 1.01 * exact.get_epsilon(1e-5)


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

    def start(one: Any, **options: Any) -> Any:
        return one.start(grid(quadratics(4)), to_record(START), 6, **options)

    start(free := strategy(None))
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
def test_a_comparison_has_epsilon_in_its_summary(tmp_path: Path) -> None:
    line = "--dataset digits --clients 5 --rounds 2 --quiet --algorithms fedavg,fedavg+gaussian"
    params = "--param weights=uniform --param gaussian.noise=2.0"
    summaries = main([*line.split(), *params.split(), "--output", str(tmp_path)])
    plain, found = (summary["epsilon"] for summary in summaries)
    assert plain is None
    rows = (tmp_path / "fedavg+gaussian/history.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["epsilon"] == found > json.loads(rows[0])["epsilon"] > 0.0


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
        part = Gaussian(sampling=sampling, noise=2.0)
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
    accountant = RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE)
    for z, rounds in ((4.0, 2), (9.0, 1)):
        event = dp.SampledWithoutReplacementDpEvent(3, 3, dp.GaussianDpEvent(z / 2))
        accountant.compose(event, rounds)
    assert after[-1] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    with pytest.raises(ValueError, match="sampling was 'fixed' before, and is 'poisson'"):
        start(4, noise=9.0, sampling="poisson")


def test_a_second_start_continues_the_account() -> None:
    once, twice = private(noise=3.0), private(noise=3.0)
    train(once, grid(quadratics(3)), 4)
    train(twice, grid(quadratics(3)), 2)
    twice.start(grid(quadratics(3)), twice.result.arrays, 2)
    assert epsilons(twice) == epsilons(once)[2:]


def test_hosts_send_every_upload_and_are_refused_to_fold() -> None:
    alone = train(private(), federation("nodes of one"), 3)
    strategy = private(lambda **options: FedAvg(fold_memory=0, **options))
    np.testing.assert_array_equal(train(strategy, federation("2 hosts"), 3), alone)
    with pytest.raises(ValueError, match=r"for FedAvg with privacy=Gaussian\(.*which needs each"):
        private(lambda **options: FedAvg(fold="on", **options))


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


def test_wrappers_and_masks_are_refused() -> None:
    wrapper = flower.DifferentialPrivacyServerSideFixedClipping(private(), 0.0, 1.0, 3)
    with pytest.raises(ValueError, match=r"^FedAvg with privacy=Gaussian\(.*cannot be run by"):
        wrapper.start(grid(quadratics(3)), to_record(START), 1)
    with pytest.raises(ValueError, match=r"^FedAvg with privacy=Gaussian\(.*does not work with"):
        as_legacy(private(), secure=SecAggPlusWorkflow(1.0, 0.5))
