"""Clients that join late, leave, lose replies or state, where the server keeps a sum over all.

Limits are linear solves: each client that is away, or has lost its state, is a term of its own.
The mistakes that these laws are written against: no theta - theta^0 for newcomers, for all of them,
for one that lost its state too; D/m by the clients used, by those connected; D kept in a void
round, not saved, forgotten by a second start; m without the departed, without ``num_clients``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import Trouble, Troubled, never
from flwr.app import Array, Message, RecordDict
from laws import START, local, train
from problems import (
    CLIENT_OF,
    DIM,
    NODES,
    Quadratic,
    grid,
    optimum,
    quadratics,
    to_record,
    to_vector,
)

from clients import ContextStore
from clients.node.state import Owner, peek
from fl_strategies import (
    SCAFFOLD,
    STRATEGIES,
    Checkpoints,
    FedADMM,
    FederatedStrategy,
    FedPD,
    RoundInfo,
    fedadmm,
)

CLIENTS = 4
RHO = 1.5


class Members(Troubled):
    """As Troubled; a client may lose its state before a round, ``forgets(round, client)``."""

    def __init__(
        self, clients: int = CLIENTS, *, forgets: Trouble = never, **trouble: Trouble
    ) -> None:
        super().__init__(clients, **trouble)
        self.forgets = forgets

    def watch(self, info: RoundInfo) -> None:
        """Go on to the next round; to be called at the end of each."""
        self.now += 1
        for client in range(len(self.contexts)):
            if self.forgets(self.now, client):
                self.forget(client)

    def forget(self, client: int) -> None:
        state = self.contexts[NODES[client]].state
        for key in list(state):
            del state[key]

    def state_of(self, client: int, acked: int) -> dict[str, np.ndarray]:
        """Return the fields of the state that the server booked."""
        context = self.contexts[NODES[client]]
        store = ContextStore(context)
        about = context.state.config_records[store.prefix]
        owner = Owner(*(str(about[name]) for name in ("algorithm", "model", "run")))
        _, fields = peek(store, owner, acked)
        assert fields is not None
        return dict(fields)

    def u(self, strategy: FederatedStrategy) -> dict[int, np.ndarray]:
        """Return w + y/rho of each client that was ever booked."""
        found = {c: self.state_of(c, acked) for c, acked in strategy.ledger.acked.items()}
        return {c: f["w"] + f["y"] / f["rho"] for c, f in found.items()}


def admm(federation: Members | None = None, **knobs: Any) -> FedADMM:
    """FedADMM as in Theorem 1, two of four clients a round."""
    also = knobs.pop("callbacks", [])
    usual = {"rho": RHO, "eta": "fraction", "fraction_train": 0.5, "fraction_evaluate": 0.0}
    usual |= {"local": local(lr=0.4), "node_wait": 0.01}
    watch = [] if federation is None else [federation.watch]
    return FedADMM(**{**usual, **knobs, "callbacks": [*also, *watch]})


def scaffold_(federation: Members, **knobs: Any) -> SCAFFOLD:
    usual = {"local": local(lr=0.2), "fraction_evaluate": 0.0, "node_wait": 0.01}
    return SCAFFOLD(**{**usual, **knobs, "callbacks": [federation.watch]})


def limit(
    problems: list[Quadratic],
    *,
    pulls: list[tuple[float, np.ndarray]] | None = None,
    slope: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Return argmin of sum_i f_i(w) + <slope, w> + sum_j (r_j/2) ||w - c_j||^2."""
    left = sum(q.A for q in problems)
    right = sum(q.A @ q.b for q in problems) - slope
    for pull, centre in pulls or []:
        left, right = left + pull * np.eye(DIM), right + pull * centre
    return np.linalg.solve(left, right)


def from_round(first: int, *clients: int) -> Trouble:
    return lambda number, client: client in clients and number >= first


def before_round(first: int, *clients: int) -> Trouble:
    return lambda number, client: client in clients and number < first


# ---- theta is the mean of all clients' w + y/rho ------------------------------------------------


@pytest.mark.parametrize("rho", [RHO, {0: 0.5, 4: 1.5, 9: 0.2}], ids=["fixed", "scheduled"])
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
    grew, void, used = set(), [], []

    def check(info: RoundInfo) -> None:
        known = sorted(one.nodes.known)
        grew.add(len(known))
        (used if info.metrics["clients-used"] else void).append(info.server_round)
        if info.metrics["clients-used"]:
            found = federation.u(one)
            u = [found.get(i, START) for i in known] + [START] * max(told - len(known), 0)
            np.testing.assert_allclose(to_vector(info.arrays), np.mean(u, axis=0), atol=1e-12)

    one = admm(federation, seed=seed, rho=rho, num_clients=told, callbacks=[check])
    train(one, federation, 14)
    assert len(used) > 8
    assert len(grew) > 1


@pytest.mark.parametrize("away", [never, before_round(8, 1, 3)], ids=["all there", "two join"])
def test_with_some_of_the_clients_from_the_first_round_on_it_comes_to_the_optimum(
    away: Trouble,
) -> None:
    federation = Members(away=away)
    found = train(admm(federation), federation, 90)
    np.testing.assert_allclose(found, optimum(quadratics(CLIENTS)), atol=1e-6)


def test_without_the_correction_it_stays_off_the_optimum() -> None:
    found = train(admm(newcomer="received"), Members(), 90)
    assert np.abs(found - optimum(quadratics(CLIENTS))).max() > 0.1


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


# ---- those who leave, never come, or lose their state -------------------------------------------


def test_a_client_that_left_counts_on_with_its_last_u() -> None:
    federation = Members(away=from_round(4, 2))
    one = admm(federation, fraction_train=1.0)
    found = train(one, federation, 40)
    present = [q for i, q in enumerate(quadratics(CLIENTS)) if i != 2]
    expected = limit(present, pulls=[(RHO, federation.u(one)[2])])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found - optimum(quadratics(CLIENTS))).max() > 1e-2


def test_clients_that_do_not_exist_pull_towards_the_first_model() -> None:
    federation = Members()
    found = train(admm(federation, fraction_train=1.0, num_clients=6), federation, 60)
    expected = limit(quadratics(CLIENTS), pulls=2 * [(RHO, START)])
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_state_lost_by_fedadmm_leaves_its_u_in_the_sum_for_good(share: float) -> None:
    """Nor is theta - theta^0 added for it a second time."""
    federation = Members()
    one = admm(federation, fraction_train=share)
    theta = train(one, federation, 5)
    assert 2 in one.ledger.acked
    u = federation.u(one)[2]
    federation.forget(2)
    seen: list[np.ndarray] = []

    def received(request: Message, reply: Message) -> Message:
        mine = request.metadata.dst_node_id == NODES[2]
        if request.metadata.message_type == "train" and mine:
            seen.append(to_vector(request.content["arrays"]))
        return reply

    federation.fault = received
    found = to_vector(one.start(federation, to_record(theta), 90).arrays)
    expected = limit(quadratics(CLIENTS), slope=-RHO * (u - seen[0]))
    np.testing.assert_allclose(found, expected, atol=1e-6)


MAKE: dict[str, Callable[..., FederatedStrategy]] = {
    "fedadmm": lambda on, **knobs: admm(on, fraction_train=1.0, **knobs),
    "scaffold": scaffold_,
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("policy", [None, "refuse"])
def test_a_state_lost_late_costs_the_optimum_unless_it_is_refused(
    name: str, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Begun anew, f_i counts twice: as it is, and by its gradient at the optimum, for good.

    The size is the docstrings': 1.1 off on this problem, whose clients start 3.8 off. A client that
    is refused leaves what it had put in, which at the optimum is right.
    """
    problems = quadratics(CLIENTS)
    best = optimum(problems)
    federation = Members(forgets=lambda number, client: number == 31 and client == 1)
    one = MAKE[name](federation, lost_state=policy)
    with caplog.at_level(logging.WARNING):
        found = train(one, federation, 60)
    if policy == "refuse":
        np.testing.assert_allclose(found, best, atol=1e-5)
    else:
        np.testing.assert_allclose(
            found, limit(problems, slope=problems[1].gradient(best)), atol=1e-5
        )
        assert round(float(np.abs(found - best).max()), 1) == 1.1
        assert "client 1 lost its state and counts as a newcomer" in caplog.text
    assert round(float(np.abs(START - best).max()), 1) == 3.8


def test_scaffolds_late_client_brings_the_optimum_and_one_that_left_its_last_c() -> None:
    problems = quadratics(CLIENTS)
    federation = Members(away=before_round(6, 3))
    found = train(scaffold_(federation), federation, 35)
    np.testing.assert_allclose(found, optimum(problems), atol=1e-7)
    federation = Members(away=from_round(4, 3))
    one = scaffold_(federation)
    found = train(one, federation, 35)
    left = federation.state_of(3, one.ledger.acked[3])["c"]
    np.testing.assert_allclose(found, limit(problems[:3], slope=left), atol=1e-7)


def test_scaffolds_c_is_over_m_clients() -> None:
    for told, m in ((0, 4), (3, 4), (7, 7)):
        federation = Members(away=from_round(3, 3))
        one = scaffold_(federation, num_clients=told)
        train(one, federation, 5)
        each = [federation.state_of(i, acked)["c"] for i, acked in one.ledger.acked.items()]
        np.testing.assert_allclose(
            one.vectors(one.state)["control"], np.sum(each, axis=0) / m, rtol=1e-10
        )


@pytest.mark.parametrize("told", [0, 4])
def test_fedpd_waits_for_those_it_was_told_of_and_comes_to_the_optimum_of_all(told: int) -> None:
    """A late client, one that lost its state: duals sum to 0 again after one exchange."""
    problems = quadratics(CLIENTS)
    federation = Members(
        away=before_round(5, 3), forgets=lambda number, client: number == 10 and client == 1
    )
    one = FedPD(
        eta=0.8,
        local=local(lr=0.3, epochs=6),
        num_clients=told,
        node_wait=0.01,
        fraction_evaluate=0.0,
        callbacks=[federation.watch],
    )
    result = one.start(federation, to_record(START), 45)
    np.testing.assert_allclose(to_vector(result.arrays), optimum(problems), atol=1e-6)
    assert one.state.exchanges == (45 - 4 if told else 45)


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


# ---- knobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"newcomer": "zero"}, r"newcomer must be one of \['received', 'origin'\], got"),
        ({"newcomer": "origin", "tracking": "global"}, 'newcomer must be "received" with tracking'),
        ({"num_clients": -1}, r"num_clients must be an integer >= 0, got -1"),
        ({"num_clients": 2.5}, r"num_clients must be an integer >= 0, got 2.5"),
    ],
)
def test_bad_knobs_are_refused_with_bound_and_value(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedADMM(**knobs)
    if set(knobs) == {"num_clients"}:
        for name in ("scaffold", "fedpd"):
            with pytest.raises(ValueError, match=message):
                STRATEGIES[name](**knobs)


def test_newcomers_begin_at_the_origin_where_theorem_1_has_them() -> None:
    assert FedADMM().newcomer == "received"
    assert FedADMM(eta="fraction").newcomer == "origin"
    assert FedADMM(eta="fraction", newcomer="received").newcomer == "received"
    assert FedADMM(newcomer="origin").newcomer == "origin"
    assert FedADMM(eta="fraction", **FedADMM.authors_rule).newcomer == "received"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_lost_state_is_warned_of_wherever_changes_are_booked(name: str) -> None:
    expected = {"fedadmm", "feddyn", "scaffold", "fedbcd", "fedbcd-async"}
    one = STRATEGIES[name]()
    assert one.books_changes is (name in expected)
    assert one.lost_state == ("warn" if name in expected else "reset")
    assert STRATEGIES[name](lost_state="refuse").lost_state == "refuse"
