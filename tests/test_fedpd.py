"""FedPD and FedPDVR: a run is Algorithm 2 by hand, also with clients that are missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from federations import lose
from laws import START, train
from pd import SGD, VR, both, same, states, strategy
from problems import DIM, Quadratic, forget, grid, make_client_app, quadratics, to_record, to_vector

from clients import LocalTraining, client_id, solve
from clients.node.in_process import InProcessGrid
from fl_strategies import fedpd_vr, skipping
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem

# ---- Algorithm 2 by hand -----------------------------------------------------------------------


def vr_by_hand(
    q: Quadratic, state: fedpd_vr.State, x0: np.ndarray, r: int, i: int, eta: float
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
    name: str = "fedpd",
    absent: tuple[tuple[int, int], ...] = (),
    forget: tuple[tuple[int, int], ...] = (),
) -> tuple[np.ndarray, list[fedpd_vr.State]]:
    """Run Algorithm 2 as it is printed, every client keeping its own x0.

    ``absent`` holds the (algorithm round, client) that are left out and keep their state, and
    ``forget`` those whose state is lost before the round.
    """
    training = LocalTraining().updated(SGD)
    kept: dict[int, fedpd_vr.State] = {}
    x0 = dict.fromkeys(range(len(problems)), START)
    for r in range(rounds):
        plus = {}
        for i, q in enumerate(problems):
            if (r, i) in forget:
                kept.pop(i)
            if (r, i) in absent:
                continue
            state = kept.get(i, fedpd_vr.State(x0[i], np.zeros(DIM), np.zeros(0)))
            if name == "fedpd":
                rng, g = stream(0, "local", r, i), np.zeros(0)
                rng.integers(2**63)  # the seed for torch
                subproblem = Subproblem(torch.tensor(state.lam), 1 / eta, torch.tensor(x0[i]))
                start = torch.tensor(state.x)
                x = solve(q.problem(), start, subproblem, training, rng)[0].numpy()
            else:
                x, g = vr_by_hand(q, state, x0[i], r, i, eta)
            lam = state.lam + (x - x0[i]) / eta
            kept[i] = fedpd_vr.State(x, lam, g)
            plus[i] = x + eta * lam
        if stream(0, "coin", r).random() < p:
            x0 = x0 | plus
        else:
            mean = sum(plus.values()) / len(plus)
            x0 = dict.fromkeys(x0, mean)
    return x0[0], [kept[i] for i in sorted(kept)]


def close(
    found: tuple[np.ndarray, list[fedpd_vr.State]],
    expected: tuple[np.ndarray, list[fedpd_vr.State]],
) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-11)
    for mine, other in zip(found[1], expected[1], strict=True):
        for value, wanted in zip(mine, other, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-11)


@both
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_run_is_algorithm_2(p: float, name: str) -> None:
    problems, one = quadratics(3), strategy(name, p=p)
    federation = grid(problems)
    found = train(one, federation, 9)
    done = one.state.done
    assert (done == 9) if p == 0 else (5 < done <= 9)
    expected = by_hand(problems, done, p=p, name=name)
    close((found, states(federation, one.ledger.acked)), expected)


# ---- missing clients ---------------------------------------------------------------------------


@both
def test_void_rounds_leave_states_equal_to_those_of_an_uninterrupted_run(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    problems = quadratics(3)
    one = strategy(name, p=0.4)
    federation = grid(problems, fault=lose((1, 0), (3, 1), (4, 1), (4, 2)))
    model = train(one, federation, 14)
    assert "round 3 is skipped: 2 usable replies, at least 3 needed" in caplog.text
    plain, calm = strategy(name, p=0.4), grid(problems)
    np.testing.assert_array_equal(train(plain, calm, one.state.done), model)
    assert one.state.communication_rounds == plain.state.communication_rounds > 2
    same(states(federation, one.ledger.acked), states(calm, plain.ledger.acked))


def test_a_void_round_reports_no_progress_and_no_savings() -> None:
    one = strategy(p=0.5)
    result = one.start(grid(quadratics(2), fault=lose((2, 1))), to_record(START), 12)
    before, skipped = (result.train_metrics_clientapp[r] for r in (1, 2))
    assert skipped["algorithm-round"] == before["algorithm-round"]
    assert skipped["communication-rounds"] == before["communication-rounds"]
    assert skipped["bytes-saved"] == 0


@both
def test_with_proceed_newcomers_and_returning_clients_go_on_as_algorithm_2(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Client 1 first takes part in the second round; client 2 misses the third and fourth."""
    problems, one = quadratics(3), strategy(name, missing="proceed")
    federation = grid(problems, fault=lose((1, 1), (3, 2), (4, 2)))
    found = train(one, federation, 6)
    assert "round 4 continues with 2 of 3 clients" in caplog.text
    assert "round 5 continues" not in caplog.text
    absent = ((0, 1), (2, 2), (3, 2))
    expected = by_hand(problems, 6, name=name, absent=absent)
    close((found, states(federation, one.ledger.acked)), expected)


@both
def test_a_client_whose_state_is_lost_starts_as_a_newcomer(name: str) -> None:
    problems, one = quadratics(3), strategy(name)
    federation = grid(problems)
    half = one.start(federation, to_record(START), 4).arrays
    forget(federation, 1)
    found = to_vector(one.start(federation, half, 3).arrays)
    expected = by_hand(problems, 7, name=name, forget=((4, 1),))
    close((found, states(federation, one.ledger.acked)), expected)


def test_more_replies_can_be_asked_for_than_proceed_needs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = strategy(missing="proceed", min_replies=2)
    train(one, grid(quadratics(3), fault=lose((1, 0), (2, 0), (2, 1))), 2)
    assert "round 1 continues with 2 of 3 clients" in caplog.text
    assert "round 2 is skipped: 1 usable replies, at least 2 needed" in caplog.text


# ---- the client --------------------------------------------------------------------------------


@both
def test_a_round_reports_loss_steps_and_consensus(name: str) -> None:
    problems = quadratics(2)
    steps = [VR["inner_steps"]] * 2 if name == "fedpd-vr" else [2 * -(-q.n // 3) for q in problems]
    result = strategy(name).start(grid(problems), to_record(START), 1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["steps-min"], metrics["steps-max"]) == (min(steps), max(steps))
    _, kept = by_hand(problems, 1, name=name)
    apart = [float(((state.x - START) ** 2).sum()) for state in kept]
    assert metrics["consensus-mean"] == pytest.approx(np.mean(apart), rel=1e-9)
    seed = next(s for s in range(99) if skipping.rounds_from(0, p=0.5, seed=s) == range(3))
    result = strategy(name, p=0.5, seed=seed).start(grid(problems), to_record(START), 3)
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
