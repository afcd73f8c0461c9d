"""Clients that join late or lose replies, where the server keeps a sum over all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import CLIENTS, Trouble, never
from flwr.app import Array, Message, RecordDict
from laws import START, train
from members import RHO, Members, admm, before_round
from problems import CLIENT_OF, Quadratic, grid, optimum, quadratics, to_record, to_vector

from fl_strategies import STRATEGIES, Checkpoints, FedADMM, RoundInfo, fedadmm

# ---- theta is the mean of all clients' w + y/rho ------------------------------------------------


@pytest.mark.parametrize("rho", [RHO, {1: 0.5, 4: 1.5, 9: 0.2}], ids=["fixed", "scheduled"])
@pytest.mark.parametrize("told", [0, 9], ids=["m connected", "m told"])
@pytest.mark.parametrize("seed", range(2))
def test_theta_is_the_mean_of_u_in_every_round_whoever_joins_leaves_or_loses_replies(
    seed: int, told: int, rho: Any
) -> None:
    """u = theta^0 for each client that never took part, whether connected or only told of."""
    rng = np.random.default_rng(seed)
    joins, stays = rng.integers(1, 9, 6), rng.integers(3, 12, 6)
    joins[0], stays[0] = 1, 99
    lost = rng.random((20, 6)) < 0.3
    federation = Members(
        6,
        away=lambda t, c: not joins[c] <= t < joins[c] + stays[c],
        lost=lambda t, c: bool(lost[t, c]),
    )
    grew, skipped, used = set(), [], []

    def check(info: RoundInfo) -> None:
        known = sorted(one.nodes.known)
        grew.add(len(known))
        (used if info.metrics["clients-used"] else skipped).append(info.server_round)
        if info.metrics["clients-used"]:
            found = federation.u(one)
            u = [found.get(i, START) for i in known] + [START] * max(told - len(known), 0)
            np.testing.assert_allclose(to_vector(info.arrays), np.mean(u, axis=0), atol=1e-12)

    one = admm(federation, seed=seed, rho=rho, num_clients=told, callbacks=[check])
    train(one, federation, 14)
    assert len(used) > 8
    assert len(grew) > 1


@pytest.mark.parametrize("away", [never, before_round(8, 1, 3)], ids=["all there", "two join"])
@pytest.mark.slow
def test_with_some_of_the_clients_from_the_first_round_on_it_comes_to_the_optimum(
    away: Trouble,
) -> None:
    federation = Members(away=away)
    found = train(admm(federation), federation, 90)
    np.testing.assert_allclose(found, optimum(quadratics(CLIENTS)), atol=1e-6)


def test_without_the_correction_it_stays_off_the_optimum() -> None:
    found = train(admm(newcomer="received"), Members(), 40)
    assert np.abs(found - optimum(quadratics(CLIENTS))).max() > 0.1


@pytest.mark.slow
def test_a_model_of_growing_m_is_what_all_clients_from_the_start_would_come_to() -> None:
    """Six clients, of whom three are introduced later, against six that were told of."""
    late, told = (Members(6, away=before_round(5, 3, 4, 5)) for _ in range(2))
    found = train(admm(late, fraction_train=1.0), late, 40)
    np.testing.assert_allclose(found, optimum(quadratics(6)), atol=1e-6)
    also = train(admm(told, fraction_train=1.0, num_clients=6), told, 40)
    np.testing.assert_allclose(also, found, atol=1e-6)


def exact_rounds(
    problems: list[Quadratic], chosen: list[np.ndarray], *, rho: float, eta: float | None
) -> np.ndarray:
    """Return theta after rounds of ``chosen`` that solve (1) exactly; ``eta`` None: |S|/m."""
    theta, total, m = START, 0.0 * START, len(problems)
    states: dict[int, fedadmm.State] = {}
    for clients in chosen:
        deltas = []
        for i in clients:
            state = states.get(i, fedadmm.first_state(theta, rho=rho))
            made = fedadmm.client_rule(state, theta, problems[i].oracle(), rho=rho)
            deltas.append(made.upload if i in states or eta else made.upload + theta - START)
            states[i] = made.state
        if eta is None:
            theta, total = fedadmm.sum_rule(START, total, deltas, clients=m)
        else:
            theta = fedadmm.server_rule(theta, deltas, step=eta)
    return theta


@pytest.mark.slow
def test_with_eta_one_and_two_of_four_clients_it_rests_elsewhere_or_diverges() -> None:
    """What the docstring says, on the rule with exact local minima."""
    problems = quadratics(CLIENTS)
    best = optimum(problems)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        chosen = [rng.choice(CLIENTS, 2, replace=False) for _ in range(600)]

        def off(rho: float, eta: float | None, who: list[np.ndarray] = chosen) -> float:
            return float(np.abs(exact_rounds(problems, who, rho=rho, eta=eta) - best).max())

        assert 0.5 < off(1.0, 1.0) < 1.5
        assert off(2.0, 1.0) > 1e6
        assert off(1.0, None) < 1e-12
        assert off(2.0, None) < 1e-12


# ---- what the server keeps ----------------------------------------------------------------------


def test_the_sum_goes_on_in_a_second_start_and_from_a_checkpoint(tmp_path: Path) -> None:
    away = before_round(4, 3)
    at_once, in_two, resumed = (Members(away=away) for _ in range(3))
    expected = train(admm(at_once), at_once, 9)
    one = admm(in_two)
    first = train(one, in_two, 3)
    rest = to_vector(one.start(in_two, to_record(first), 6).arrays)
    np.testing.assert_array_equal(rest, expected)

    train(admm(resumed, checkpoints=Checkpoints(tmp_path)), resumed, 3)
    again = admm(resumed, checkpoints=Checkpoints(tmp_path))
    after = again.start(resumed, to_record(START), 9, resume=True).arrays
    np.testing.assert_array_equal(to_vector(after), expected)


def test_a_void_round_books_nothing() -> None:
    def huge(request: Message, reply: Message) -> Message:
        if request.content.config_records.get("config", {}).get("server-round") == 3:
            content = RecordDict({k: v.copy() for k, v in reply.content.items()})
            content["arrays"]["tail"] = Array(np.array([1.7e308]))
            del content["config"]["checksums"]  # as if the client had come to it
            reply.content = content
        return reply

    spoilt, plain = Members(), Members()
    spoilt.fault = huge
    one, other = (admm(on, fraction_train=1.0) for on in (spoilt, plain))
    found = train(one, spoilt, 3)
    np.testing.assert_array_equal(found, train(other, plain, 2))
    np.testing.assert_array_equal(one.state.total, other.state.total)


def test_a_bound_on_changes_is_on_what_the_newcomer_did_itself() -> None:
    """theta is 1 from theta^0 when client 3 joins; its own change is within the bound."""
    sizes: dict[tuple[int, int], float] = {}

    def note(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            number = request.content["config"]["server-round"]
            delta = to_vector(reply.content["arrays"])
            sizes[number, CLIENT_OF[request.metadata.dst_node_id]] = float(np.linalg.norm(delta))
        return reply

    free = Members(away=before_round(8, 3))
    free.fault = note
    expected = train(admm(free), free, 12)
    bound = max(sizes.values())
    held = Members(away=before_round(8, 3))
    found = train(admm(held, clipping_norm=bound * 1.0001), held, 12)
    np.testing.assert_array_equal(found, expected)
    tight = Members(away=before_round(8, 3))
    one = admm(tight, clipping_norm=bound * 0.9999)
    assert np.abs(train(one, tight, 12) - expected).max() > 1e-3


def test_two_of_four_clients_on_a_legacy_server_give_the_models_message_by_message() -> None:
    from federations import run_legacy

    options: dict[str, Any] = {"min_available_nodes": CLIENTS}
    usual = train(admm(**options), grid(quadratics(CLIENTS)), 8)
    legacy, _ = run_legacy(admm(**options), 8, on=grid(quadratics(CLIENTS)))
    np.testing.assert_array_equal(legacy, usual)


# ---- hyperparameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"newcomer": "zero"}, r"newcomer must be one of \['received', 'origin'\], got"),
        ({"newcomer": "origin", "tracking": "global"}, 'newcomer must be "received" with tracking'),
        ({"num_clients": -1}, r"num_clients must be an integer >= 0, got -1"),
        ({"num_clients": 2.5}, r"num_clients must be an integer >= 0, got 2.5"),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FedADMM(**hyperparameters)
    if set(hyperparameters) == {"num_clients"}:
        for name in ("scaffold", "fedpd"):
            with pytest.raises(ValueError, match=message):
                STRATEGIES[name](**hyperparameters)


def test_newcomers_begin_at_the_origin_where_theorem_1_has_them() -> None:
    assert FedADMM().newcomer == "received"
    assert FedADMM(eta="fraction").newcomer == "origin"
    assert FedADMM(eta="fraction", newcomer="received").newcomer == "received"
    assert FedADMM(newcomer="origin").newcomer == "origin"
    assert FedADMM(**FedADMM.authors_rule).newcomer == "received"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_lost_state_is_warned_of_wherever_changes_accumulate(name: str) -> None:
    expected = {"fedadmm", "feddyn", "a-fedpd", "scaffold", "fedbcd", "fedbcd-async"}
    expected |= {"fedadmm-insa", "proxskip"}
    one = STRATEGIES[name]()
    assert one.accumulates_changes is (name in expected)
    assert one.lost_state == ("warn" if name in expected else "reset")
    assert STRATEGIES[name](lost_state="refuse").lost_state == "refuse"
