"""FedADMM: its invariant, its reductions, lost replies, and the rules themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from federations import drop
from flwr.app import Array, ArrayRecord
from laws import RATE, START, local, quiet, train
from problems import (
    DIM,
    NODES,
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

from clients import LocalTraining
from clients.node.in_process import InProcessGrid
from fl_strategies import FedADMM, FedAvg, FedProx, RoundInfo, fedadmm, fedavg, fedprox
from fl_strategies.core.randomness import stream
from fl_strategies.parts import L1

strategy = partial(quiet, FedADMM, rho=0.5)


def states(federation: InProcessGrid, acked: dict[int, int]) -> list[fedadmm.State]:
    """Return the state of each client that the server counts on."""
    return [fedadmm.State(f["w"], f["y"], float(f["rho"])) for f in kept(federation, acked)]


def invariant_gap(theta: np.ndarray, federation: InProcessGrid, acked: dict[int, int]) -> float:
    """Return max |theta - mean_i (w_i + y_i/rho)|."""
    u = [state.w + state.y / state.rho for state in states(federation, acked)]
    return float(np.abs(theta - np.mean(u, axis=0)).max())


def run(one: FedADMM, federation: InProcessGrid, rounds: int) -> tuple[np.ndarray, dict[int, int]]:
    return train(one, federation, rounds), one.ledger.acked


class FullFirst(FedADMM):
    """All clients in the first round, ``fraction_train`` of them from then on."""

    averages = "changes"

    def sample(self, purpose: str, round: Any, fraction: float, least: int) -> Any:
        first = purpose == "sample" and round.number == 1
        return super().sample(purpose, round, 1.0 if first else fraction, least)

    def aggregate(self, state: Any, round: Any, uploads: Any) -> Any:
        self.eta = 1.0 if round.number == 1 else "fraction"
        return super().aggregate(state, round, uploads)


def full_first(**hyperparameters: Any) -> FullFirst:
    return FullFirst(
        **{
            "rho": 0.5,
            "fraction_evaluate": 0.0,
            "local": local(),
            "fraction_train": 0.4,
            **hyperparameters,
        }
    )


@pytest.mark.parametrize("rho", [0.5, {1: 0.5, 4: 1.5, 9: 0.2}], ids=["fixed", "scheduled"])
def test_theta_is_the_mean_of_w_plus_y_over_rho(rho: Any) -> None:
    """After each round."""
    federation, gaps = grid(quadratics(10)), list[float]()

    def note(info: RoundInfo) -> None:
        gaps.append(invariant_gap(to_vector(info.arrays), federation, one.ledger.acked))

    one = full_first(rho=rho, callbacks=[note])
    theta, acked = run(one, federation, 12)
    assert len(gaps) == 12
    assert max(gaps) < 1e-12
    assert invariant_gap(theta, federation, acked) < 1e-12


def test_lost_replies_leave_the_invariant_exact() -> None:
    federation = grid(quadratics(10), fault=drop(0.3, after=1))
    theta, acked = run(full_first(), federation, 20)
    assert invariant_gap(theta, federation, acked) < 1e-11


@pytest.mark.slow
def test_the_invariant_holds_in_float32_with_mini_batches_and_lost_replies() -> None:
    """Rounding: u has entries below 100, rho = 0.5 doubles those of y, 50 rounds add up."""
    app = make_client_app(quadratics(10), dtype=torch.float32)
    federation = InProcessGrid(app, 10, fault=drop(0.3, after=1))
    one = full_first(local=local(solver="sgd", **{"batch-size": 3, "random-epochs": True}))
    start = ArrayRecord(
        {k: Array(a.numpy().astype(np.float32)) for k, a in to_record(START).items()}
    )
    theta = to_vector(one.start(federation, start, 50).arrays)
    assert invariant_gap(theta, federation, one.ledger.acked) < 50 * 100 * 2 * 2**-23


@pytest.mark.slow
def test_without_acknowledgement_lost_replies_break_the_invariant() -> None:
    federation = grid(quadratics(10), fault=drop(0.3, after=1))
    theta, _ = run(full_first(acknowledge=False), federation, 50)
    newest = {
        client: max(int(key.rsplit("-", 1)[1]) for key in context.state.array_records)
        for client, context in enumerate(federation.contexts.values())
    }
    assert invariant_gap(theta, federation, newest) > 1e-2


@pytest.mark.slow
def test_with_lost_replies_it_still_converges_to_the_optimum() -> None:
    problems = quadratics(6)
    theta, _ = run(full_first(), grid(problems, fault=drop(0.3, after=1)), 600)
    np.testing.assert_allclose(theta, optimum(problems), atol=1e-6)


@pytest.mark.slow
def test_fedavg_with_the_same_local_work_stays_off_the_optimum() -> None:
    problems = quadratics(6)
    averaged = train(
        FedAvg(weights="uniform", fraction_evaluate=0.0, local=local()), grid(problems), 600
    )
    assert np.abs(averaged - optimum(problems)).max() > 1e-2
    theta = train(strategy(), grid(problems), 600)
    np.testing.assert_allclose(theta, optimum(problems), atol=1e-9)


def test_a_client_whose_state_is_lost_counts_as_a_newcomer() -> None:
    """It moves the mean by (theta - u_old)/m for good, as w = theta, y = 0 stand for u_old."""
    federation = grid(quadratics(4))
    one = full_first(fraction_train=1.0)
    theta, acked = run(one, federation, 3)
    lost = states(federation, acked)[2]
    forget(federation, 2)
    after = to_vector(one.start(federation, to_record(theta), 1).arrays)
    offset = ((lost.w + lost.y / lost.rho) - theta) / 4
    u = [state.w + state.y / state.rho for state in states(federation, one.ledger.acked)]
    np.testing.assert_allclose(after - np.mean(u, axis=0), offset, atol=1e-12)


def test_refuse_leaves_out_a_client_whose_state_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    federation = grid(quadratics(4))
    one = full_first(fraction_train=1.0, lost_state="refuse")
    theta, _ = run(one, federation, 3)
    forget(federation, 2)
    result = one.start(federation, to_record(theta), 1)
    assert result.train_metrics_clientapp[4]["clients-rejected"] == 1
    assert "reply of client 2 left out: its acknowledged state is lost" in caplog.text


def test_a_newcomer_in_a_later_round_starts_from_the_theta_it_receives() -> None:
    """With w = theta, y = 0 it adds (u_new - theta)/|S|: nothing for the rounds it missed."""
    problems = quadratics(4)
    federation, one = grid(problems), strategy(node_wait=0.01)
    absent = federation.contexts.pop(NODES[3])
    theta, acked = run(one, federation, 3)
    old = [state.w + state.y / state.rho for state in states(federation, acked)]
    federation.contexts[NODES[3]] = absent
    after = to_vector(one.start(federation, to_record(theta), 1).arrays)
    new = [state.w + state.y / state.rho for state in states(federation, one.ledger.acked)]
    deltas = [u - before for u, before in zip(new, [*old, theta], strict=True)]
    np.testing.assert_allclose(after, theta + np.mean(deltas, axis=0), atol=1e-12)


def test_a_second_start_goes_on_where_the_first_ended() -> None:
    problems = quadratics(6)
    settings = local(solver="sgd", **{"batch-size": 3, "random-epochs": True})
    at_once, in_two = (grid(problems, fault=drop(0.3, after=1)) for _ in range(2))
    whole, acked = run(full_first(local=settings), at_once, 8)
    one = full_first(local=settings)
    first = train(one, in_two, 3)
    rest = to_vector(one.start(in_two, to_record(first), 5).arrays)
    np.testing.assert_array_equal(rest, whole)
    assert invariant_gap(rest, in_two, one.ledger.acked) < 1e-11
    assert one.ledger.acked == acked


def test_with_y_frozen_at_zero_it_is_fedprox_and_without_rho_fedavg() -> None:
    (q,) = quadratics(1)

    exact, state = q.oracle(), fedadmm.State(w=START + 1.0, y=np.zeros(DIM), rho=0.5)
    new = fedadmm.client_rule(state, START, exact, rho=0.5).state
    pulled, free = (fedprox.client_rule(START, exact, mu=mu).upload for mu in (0.5, 0.0))
    np.testing.assert_array_equal(new.w, pulled)
    np.testing.assert_array_equal(free, fedavg.client_rule(START, exact).upload)
    deltas = [new.w - START]
    np.testing.assert_array_equal(fedadmm.server_rule(START, deltas, step=1.0), START + deltas[0])


def test_the_optimum_with_its_duals_is_a_fixed_point_of_the_rule() -> None:
    problems = quadratics(3)
    best = optimum(problems)
    for q in problems:
        state = fedadmm.State(w=best, y=-q.gradient(best), rho=0.7)
        made = fedadmm.client_rule(state, best, q.oracle(), rho=0.7)
        np.testing.assert_allclose(made.upload, 0.0, atol=1e-12)
        np.testing.assert_allclose(made.state.y, state.y, atol=1e-12)


def test_a_round_through_flower_equals_the_pure_rule_to_the_bit() -> None:
    problems = quadratics(3)
    found = train(strategy(), grid(problems), 2)
    training = LocalTraining(solver="gd", lr=RATE, epochs=4)
    theta = START
    kept = [fedadmm.first_state(torch.tensor(START), rho=0.5) for _ in problems]
    for server_round in (1, 2):
        deltas = []
        for i, q in enumerate(problems):
            problem, rng = q.problem(), stream(0, "local", server_round, i)

            oracle = oracle_of(problem, training, rng)
            made = fedadmm.client_rule(kept[i], torch.tensor(theta), oracle, rho=0.5)
            kept[i] = made.state
            deltas.append(made.upload.numpy())
        theta = fedadmm.server_rule(theta, deltas, step=1.0)
    np.testing.assert_array_equal(found, theta)


def test_the_clients_own_model_is_measured_beside_the_global_one() -> None:
    problems = quadratics(3)
    federation = grid(problems)
    one = strategy(fraction_evaluate=1.0)
    result = one.start(federation, to_record(START), 3)
    theta = to_vector(result.arrays)
    own = [
        q.value(state.w)
        for q, state in zip(problems, states(federation, one.ledger.acked), strict=True)
    ]
    metrics = result.evaluate_metrics_clientapp[3]
    weights = [q.n for q in problems]
    assert metrics["own-loss"] == pytest.approx(np.average(own, weights=weights), rel=1e-12)
    expected = np.average([q.value(theta) for q in problems], weights=weights)
    assert metrics["eval-loss"] == pytest.approx(expected, rel=1e-12)
    assert metrics["own-loss-min"] == pytest.approx(min(own), rel=1e-12)


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"rho": 0.0}, r"rho must be > 0, got 0.0"),
        ({"rho": {1: 0.1, 5: -1.0}}, r"rho must be > 0, got -1.0"),
        ({"rho": {5: 0.1}}, r"rho: a schedule starts at round 1"),
        ({"eta": 2.5}, r"eta must be > 0 and <= 2, or one of \['fraction'\], got 2.5"),
        ({"eta": 0.0}, r"eta must be > 0 and <= 2, or one of \['fraction'\], got 0.0"),
        (
            {"eta": "half"},
            r"eta must be a finite number > 0 and <= 2, .*or one of \['fraction'\], got 'half'",
        ),
        ({"tracking": "server"}, r"tracking must be one of \['client', 'global'\], got 'server'"),
        ({"fraction_train": 0.0}, r"fraction_train must be > 0 and <= 1, got 0.0"),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FedADMM(**hyperparameters)


def test_eta_follows_its_schedule() -> None:
    def models(eta: Any) -> list[np.ndarray]:
        seen: list[np.ndarray] = []
        one = strategy(eta=eta, callbacks=[lambda info: seen.append(to_vector(info.arrays))])
        train(one, grid(quadratics(3)), 3)
        return seen

    scheduled, fixed = models({1: 1.0, 3: 0.25}), models(1.0)
    np.testing.assert_array_equal(scheduled[:2], fixed[:2])
    assert np.abs(scheduled[2] - fixed[2]).max() > 1e-3


def test_fedprox_with_mu_zero_equals_fedavg_to_the_bit() -> None:
    problems = quadratics(3)
    options = {"fraction_evaluate": 0.0, "local": local()}
    np.testing.assert_array_equal(
        train(FedProx(mu=0.0, **options), grid(problems), 3),
        train(FedAvg(**options), grid(problems), 3),
    )


def test_state_in_a_directory_gives_the_same_model_as_in_the_context(tmp_path: Any) -> None:
    from clients import DirectoryStore, client_id

    problems = quadratics(4)
    app = make_client_app(problems, store=lambda c: DirectoryStore(tmp_path, client_id(c)))
    np.testing.assert_array_equal(
        train(full_first(), InProcessGrid(app, 4, fault=drop(0.3, after=1)), 8),
        train(full_first(), grid(problems, fault=drop(0.3, after=1)), 8),
    )


@pytest.mark.parametrize("g", [L1(weight=0.0), L1(weight=0.4)], ids=["no g", "l1"])
def test_its_iterates_are_feddrs_and_those_of_wang_et_al(g: L1) -> None:
    """Both in their own variables and solved exactly: all clients at first, then two of four."""
    problems, rho, rng = quadratics(4), 0.7, np.random.default_rng(3)
    rounds = [[0, 1, 2, 3], *(sorted(rng.choice(4, 2, replace=False)) for _ in range(9))]

    y, x = [START] * 4, [START] * 4  # FedDR with alpha = 1: reflected points of prox steps
    reflected, dr = [START] * 4, START
    lam, hat, wang = [0.0 * START] * 4, [START] * 4, START  # Wang et al.: eta = 1/rho
    states = [fedadmm.first_state(START, rho=rho)] * 4
    theta, total = START, 0.0 * START
    for chosen in rounds:
        deltas = []
        for i in chosen:
            y[i] = y[i] + dr - x[i]
            x[i] = problems[i].argmin(pull=rho, centre=y[i])
            reflected[i] = 2 * x[i] - y[i]
            z = problems[i].argmin(lam[i], rho, wang)
            lam[i] = lam[i] + rho * (z - wang)
            hat[i] = z + lam[i] / rho
            step = fedadmm.client_rule(states[i], theta, problems[i].oracle(), rho=rho)
            states[i], deltas = step.state, [*deltas, step.upload]
        dr, wang = (g.prox(np.mean(of_all, axis=0), 1 / rho) for of_all in (reflected, hat))
        theta, total = fedadmm.sum_rule(START, total, deltas, clients=4)
        theta = g.prox(theta, 1 / rho)
        np.testing.assert_allclose(theta, dr, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(theta, wang, rtol=1e-11, atol=1e-12)
    assert np.abs(theta - START).max() > 0.5
