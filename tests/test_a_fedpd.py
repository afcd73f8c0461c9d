"""A-FedPD: the mean of all dual variables, those of absent clients, what reaches them of it.

Mistakes these laws are written against: an absent client's step over m, by another penalty than the
round's, or taken by present ones as well; V - V_r with r the last round asked in place of used; a
round's V dropped while it is some client's last, or kept for good; a lost reply recorded.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from federations import drop, lose, run_legacy
from flwr.app import Array, ArrayRecord, Message
from hosted import CLIENTS, shared
from hosted import federation as hosted
from laws import RATE, START, STEPS, quiet, train
from problems import (
    CLIENT_OF,
    NODES,
    Quadratic,
    fields_of,
    forget,
    grid,
    make_client_app,
    optimum,
    quadratics,
    to_record,
    to_vector,
)
from stacked_runs import ROWS, assert_alike, classified, smooth

from clients import Border
from clients.node.in_process import InProcessGrid
from fl_strategies import AFedPD, FedDyn, RoundInfo, a_fedpd
from fl_strategies.core.records import CATCH_UP
from fl_strategies.messages.hosting import unpack_request
from simulations import models

RHO = {1: 0.5, 4: 1.5}
strategy = partial(quiet, AFedPD, rho=0.5)


def duals(one: AFedPD, federation: InProcessGrid) -> np.ndarray:
    """Return the dual variables of all clients [m, 5], as they would next train with them."""
    found = []
    for node, context in federation.contexts.items():
        last = one.ledger.acked.get(CLIENT_OF[node], -1)
        fields = fields_of(context, last) if last > 0 else None
        catch_up = one.catch_up(one.state, last)
        kept = np.zeros(5) if fields is None else fields["y"]
        found.append(kept if catch_up is None else kept + catch_up)
    return np.array(found)


class Papers:
    """The paper's server: it keeps every dual variable, and moves those of absent clients."""

    def __init__(self, problems: list[Quadratic], rho: Any = 0.5) -> None:
        self.problems, self.rho, self.number = problems, rho, 0
        self.theta, self.y = START, np.zeros((len(problems), 5))

    def local_steps(self, client: int, rho: float) -> np.ndarray:
        w = self.theta
        for _ in range(STEPS):
            pulled = self.y[client] + rho * (w - self.theta)
            w = w - RATE * (self.problems[client].gradient(w) + pulled)
        return w

    def play(self, present: set[int]) -> None:
        self.number += 1
        rho = self.rho if isinstance(self.rho, float) else self.rho[4 if self.number >= 4 else 1]
        if not present:
            return
        models = {client: self.local_steps(client, rho) for client in present}
        mean = np.mean([*models.values()], axis=0)
        for client in range(len(self.problems)):
            self.y[client] += rho * (models.get(client, mean) - self.theta)
        self.theta = mean + self.y.mean(0) / rho


def in_step(one: AFedPD, papers: Papers) -> None:
    """Have the paper's server play the rounds that ``one`` does, and compare the models."""

    def ended(info: RoundInfo) -> None:
        used = {client for client, last in one.ledger.acked.items() if last == one.run.number}
        papers.play(used)
        np.testing.assert_allclose(to_vector(info.arrays), papers.theta, rtol=1e-9, atol=1e-11)

    one.callbacks = (ended,)


@pytest.mark.parametrize("rho", [0.5, RHO], ids=["fixed", "scheduled"])
@pytest.mark.parametrize("lost", [0.0, 0.4])
def test_it_is_the_papers_server_that_keeps_every_dual_variable(rho: Any, lost: float) -> None:
    problems = quadratics(6)
    federation, papers = grid(problems, fault=drop(lost)), Papers(problems, rho)
    one = strategy(rho=rho, fraction_train=0.34)
    in_step(one, papers)
    train(one, federation, 25)
    np.testing.assert_allclose(duals(one, federation), papers.y, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(one.state.mean, papers.y.mean(0), rtol=1e-9, atol=1e-11)
    assert np.abs(papers.y).max() > 1.0


def test_v_is_the_mean_of_all_dual_variables_after_every_round() -> None:
    federation = grid(quadratics(6), fault=drop(0.3))
    one, sizes = strategy(rho=RHO, fraction_train=0.5), []

    def ended(info: RoundInfo) -> None:
        sizes.append(np.abs(one.state.mean).max())
        np.testing.assert_allclose(one.state.mean, duals(one, federation).mean(0), atol=1e-12)

    one.callbacks = (ended,)
    train(one, federation, 20)
    assert len(sizes) == 20
    assert max(sizes) > 0.1


@pytest.mark.parametrize("rounds", [1, 2, 17])
@pytest.mark.sampled("2")
def test_with_all_clients_it_is_feddyn(rounds: int) -> None:
    problems = quadratics(5)
    dyn = quiet(FedDyn, alpha=RHO)
    found = train(strategy(rho=RHO), grid(problems), rounds)
    np.testing.assert_allclose(found, train(dyn, grid(problems), rounds), rtol=1e-11)


@pytest.mark.slow
def test_it_comes_to_the_optimum_with_half_of_the_clients_a_round() -> None:
    problems = quadratics(4)
    one = strategy(rho=1.0, fraction_train=0.5)
    np.testing.assert_allclose(train(one, grid(problems), 200), optimum(problems), atol=1e-6)


def test_a_client_that_joins_later_begins_with_v() -> None:
    problems = quadratics(4)
    federation, papers = grid(problems), Papers(problems)
    absent = federation.contexts.pop(NODES[3])
    one = strategy(node_wait=0.01, fraction_train=0.7)
    in_step(one, papers)
    theta = train(one, federation, 3)
    federation.contexts[NODES[3]] = absent
    one.fraction_train = 1.0
    one.start(federation, to_record(theta), 2)


def test_a_client_that_lost_its_state_leaves_the_mean_off_by_its_share(caplog: Any) -> None:
    """V is then the mean of what the clients have and of what was lost."""
    federation = grid(quadratics(3))
    one = strategy(fraction_train=1.0)
    theta = train(one, federation, 4)
    lost = duals(one, federation)[1]
    forget(federation, 1)
    with caplog.at_level(logging.WARNING):
        one.start(federation, to_record(theta), 6)
    assert "client 1 lost its state and is treated as new" in caplog.text
    np.testing.assert_allclose(one.state.mean, duals(one, federation).mean(0) + lost / 3, atol=1e-9)


# ---- what travels -------------------------------------------------------------------------------


def test_a_client_used_in_the_last_round_is_sent_the_model_alone_and_others_what_they_missed() -> (
    None
):
    """Client 2's reply of round 2 is lost: it goes on from round 1, and misses rounds 2 and 3."""
    means: list[Any] = [0.0]
    sent: list[dict[int, Any]] = [{}, {}, {}, {}]

    def seen(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            config = request.content["config"]
            catch_up = np.frombuffer(config.get(CATCH_UP, b""))
            number = int(config["server-round"]) - 1
            sent[number][CLIENT_OF[request.metadata.dst_node_id]] = catch_up
        return reply

    def fault(request: Message, reply: Message) -> Message | None:
        return lose((2, 2), (3, 2))(request, seen(request, reply))

    one = strategy(callbacks=[lambda info: means.append(one.state.mean)])
    train(one, grid(quadratics(3), fault=fault), 4)
    for number, clients in enumerate(sent):
        assert [len(clients[client]) for client in (0, 1)] == [0, 0]
        expected = means[number] - means[1] if number > 1 else []
        np.testing.assert_allclose(clients[2], expected)


def test_its_bytes_are_counted() -> None:
    """A first round of two, then one of all three, of whom one is new; a number takes 8 bytes."""
    federation = grid(quadratics(3))
    one = strategy(fraction_train=0.67)
    theta = train(one, federation, 1)
    usual = one.result.train_metrics_clientapp[1]["bytes-down"] / 2
    one.fraction_train = 1.0
    one.start(federation, to_record(theta), 1)
    assert one.result.train_metrics_clientapp[2]["bytes-down"] == 3 * usual + 5 * 8


def test_a_host_gets_what_several_clients_missed_once() -> None:
    """Half of six clients train in round 1, all in round 2; 3 are new, and have missed the same."""
    contents: list[Any] = []

    def seen(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            contents.append(request.content)
        return reply

    federation = hosted("1 host", fault=seen)
    one = strategy(fraction_train=0.5)
    theta = train(one, federation, 1)
    old = {*one.ledger.acked}
    one.fraction_train = 1.0
    one.start(federation, to_record(theta), 1)
    first, second = contents
    assert CATCH_UP not in first.config_records
    assert len(second[CATCH_UP][CATCH_UP]) == 1
    configs = unpack_request(second)[1]
    assert {client for client in configs if CATCH_UP not in configs[client]} == old
    assert len({*range(CLIENTS)} - old) == 3
    size = sum(len(array.data) for array in to_record(START).values())
    assert one.result.train_metrics_clientapp[2]["bytes-down"] == size + 5 * 8


def test_the_server_keeps_v_of_those_rounds_that_are_some_clients_last() -> None:
    one = strategy(fraction_train=0.34)
    seen: list[int] = []

    def ended(info: RoundInfo) -> None:
        assert {*one.state.means} == {*one.ledger.acked.values()}
        seen.append(len(one.state.means))

    one.callbacks = (ended,)
    train(one, grid(quadratics(6), fault=drop(0.3)), 30)
    assert 2 < max(seen) <= 6


def test_v_goes_on_in_double_precision_and_those_of_before_are_kept_as_they_travel() -> None:
    federation = grid(quadratics(6), dtype=torch.float32)
    one = strategy(fraction_train=0.34)
    head, tail = np.float32(START[:4]).reshape(2, 2), np.float32(START[4:])
    one.start(federation, ArrayRecord({"head": Array(head), "tail": Array(tail)}), 12)
    now = max(one.state.means)
    types = {number: mean.dtype for number, mean in one.state.means.items()}
    assert types.pop(now) == np.float64
    assert {*types.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(one.state.mean, duals(one, federation).mean(0), atol=1e-5)


def test_neither_its_bytes_nor_its_model_depend_on_a_shared_populations_hosts() -> None:
    def bytes_and_model(shape: str) -> list[Any]:
        found: list[Any] = []
        one = strategy(fraction_train=0.5, **shared(shape))
        one.callbacks = (lambda info: found.append(info.metrics["bytes-down"]),)
        model = train(one, hosted(shape), 6)
        return [*found, model.tobytes()]

    usual, *others = (
        bytes_and_model(shape)
        for shape in ("nodes of one", "1 host that shares", "3 hosts that share")
    )
    assert others == [usual, usual]
    assert usual[-2] > usual[0]


def test_a_legacy_server_sends_it_as_well() -> None:
    found, _ = run_legacy(strategy(fraction_train=0.5), 6)
    np.testing.assert_array_equal(
        found, train(strategy(fraction_train=0.5), grid(quadratics(4)), 6)
    )


def test_clients_of_a_stack_get_what_each_missed() -> None:
    problems, training = classified(smooth()), {"epochs": 3}
    options = {"rho": 0.3, "fraction_train": 0.5, "fraction_evaluate": 0.0}
    assert_alike(ROWS["a-fedpd"], problems, training=training, local=training, **options)


def test_a_vector_in_bytes_is_put_into_the_models_order_array_by_array() -> None:
    """Also into that of filters that the client keeps channels-last; buffers are no part of it."""
    model = Border(models.build("cnn-bn", (2, 4, 4), 3, seed=0).double())
    layout, rng = model.layout, np.random.default_rng(2)
    vector = rng.normal(size=len(model.vector))
    before = model.vector.clone()
    found = model.read(layout.to_bytes(vector))
    assert torch.equal(model.vector, before)
    arrays = dict(zip(model.names, model.arrays(found), strict=True))
    np.testing.assert_array_equal(layout.pack(arrays), vector)


def test_bytes_of_another_size_are_refused() -> None:
    (q,) = quadratics(1)
    app = make_client_app([q])
    federation = InProcessGrid(app, 1)
    model = Border(torch.nn.Linear(2, 1))
    with pytest.raises(ValueError, match="a vector of the model takes 12 bytes, got 8"):
        model.read(b"\0" * 8)
    with pytest.raises(ValueError, match=f"train_config must not set \\['{CATCH_UP}'\\]"):
        strategy().start(federation, to_record(START), 1, train_config={CATCH_UP: b""})  # type: ignore[arg-type]


# ---- the rules ----------------------------------------------------------------------------------


def test_the_rules_on_numbers() -> None:
    theta, mean, rho = np.array([1.0]), np.array([0.3]), 0.5
    moves = [np.array([2.0]), np.array([-1.0])]
    found, v = a_fedpd.server_rule(theta, mean, moves, rho=rho)
    np.testing.assert_allclose(v, [0.3 + 0.5 * 0.5])
    np.testing.assert_allclose(found, [1.0 + 0.5 + 0.55 / 0.5])
    (q,) = quadratics(1)
    y, catch_up = np.arange(5.0), np.array([0.1, -0.2, 0.3, 0.0, 1.0])
    step = a_fedpd.client_rule(a_fedpd.State(y), START, q.oracle(), catch_up=catch_up, rho=rho)
    w = q.argmin(y + catch_up, rho, START)
    np.testing.assert_allclose(step.upload, w - START)
    np.testing.assert_allclose(step.state.y, y + catch_up + rho * (w - START))
    np.testing.assert_allclose(q.gradient(w), -step.state.y, atol=1e-12)


def test_a_penalty_out_of_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="rho must be > 0, got 0"):
        AFedPD(rho=0)
