"""Async-cloud FedBCD-I: against a twin in NumPy, against sync-cloud, offline rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrivals import Slow
from bcd import aspg, devices, fedbcd_i_, i_async_, mixed_in
from federations import drop
from flwr.app import Error, Message
from laws import START, STEPS, train
from problems import CLIENT_OF, Quadratic, grid, quadratics, to_vector

from clients.node.in_process import Fault
from fl_strategies import FedBCDI, FedBCDIAsync, RoundInfo
from fl_strategies.core.randomness import stream

pytestmark = pytest.mark.usefixtures("no_pause")


def answers(server_round: int, client: int) -> bool:
    return (2 * server_round + client) % 5 != 0


def broken(request: Message, reply: Message) -> Message:
    if request.metadata.message_type != "train":
        return reply
    config, client = request.content["config"], CLIENT_OF[request.metadata.dst_node_id]
    if answers(config["server-round"], client):
        return reply
    return Message(Error(3, "the node died"), reply_to=request)


@pytest.mark.parametrize("order", ["virtual", "arrival"])
@pytest.mark.parametrize("fault", [None, broken], ids=["all", "some"])
@pytest.mark.sampled("arrival")
def test_one_cloud_server_is_sync_cloud_to_the_bit(order: str, fault: Fault | None) -> None:
    problems, less = quadratics(5), {"fraction_train": 0.4, "repeats": 2, "eta_z": 0.3}
    for options in ({}, less, less | {"fraction_available": 0.6, "offline_rounds": 2}):
        one, two = i_async_(order=order, **options), fedbcd_i_(**options)
        found = train(one, grid(problems, fault=fault), 7)
        np.testing.assert_array_equal(found, train(two, grid(problems, fault=fault), 7))
        assert one.state.offline == two.state.offline
        assert one.ledger.acked == two.ledger.acked


class Twin:
    """The protocol in NumPy: devices train offline in the very rounds in which they may."""

    gamma, zeta, eta = 0.3, 0.9, 0.6

    def __init__(self, one: FedBCDIAsync, problems: list[Quadratic], answers: Any) -> None:
        self.one, self.problems, self.answers = one, problems, answers
        self.z = np.array([START] * one.servers)
        clients = range(len(problems))
        self.pair: list[Any] = [None for _ in clients]  # x and the iterate before, once there is z
        self.offline, self.owed = np.zeros((2, len(clients)), int)
        self.free_at = np.zeros(one.servers)
        self.done_at: dict[int, float] = {}
        self.work: dict[int, Any] = {}
        self.now = 0.0

    def available(self, t: int, cloud: int) -> list[int]:
        theirs = np.arange(cloud, len(self.problems), self.one.servers)
        order = stream(self.one.seed, "available", t, cloud).permutation(len(theirs))
        return [int(i) for i in theirs[order][:2]]

    def train_offline(self, i: int) -> None:
        if self.offline[i] < self.one.offline_rounds:
            self.offline[i] += 1
            if self.pair[i] is None:
                self.owed[i] += 1
            else:
                self.pair[i] = aspg(self.problems[i], *self.pair[i], STEPS, zeta=self.zeta)

    def ask(self, t: int, cloud: int) -> None:
        """The first of two available devices is active: it trains, and is pulled to z_n."""
        i = min(self.available(t, cloud), key=lambda i: self.one.device_clock.begins(3, t, i))
        before, z = (self.pair[i], self.offline[i], self.owed[i]), self.z[cloud]
        self.train_offline(i)
        x, previous = self.pair[i] or aspg(
            self.problems[i], z, z, STEPS * self.owed[i], zeta=self.zeta
        )
        for _ in range(STEPS):
            x, previous = x - self.gamma * (x - z), x
        answered = self.answers(t, i)
        took = self.one.device_clock.seconds(3, t, i, STEPS if answered else 1)
        self.work[cloud] = (i, (x, previous) if answered else None, before)
        self.done_at[cloud] = self.free_at[cloud] + took

    def round(self, t: int) -> None:
        for cloud in range(self.one.servers):
            if cloud not in self.work:
                self.ask(t, cloud)
        at_work = {i for i, _, _ in self.work.values()}
        queue = sorted(self.done_at, key=lambda n: self.done_at[n])
        ready = queue[: self.one.many]
        alone = queue[self.one.many :] if self.one.rigorous else []
        self.now = max([self.now, *(self.done_at[n] for n in ready)])
        closed = {n: self.work.pop(n) for n in ready + alone}
        for n in closed:
            end = self.done_at.pop(n)
            self.free_at[n] = self.now if n in ready else end
        if all(pair is None for _, pair, _ in closed.values()):  # the round is skipped
            for i, _, before in closed.values():
                self.pair[i], self.offline[i], self.owed[i] = before
            return
        for i, pair, _ in closed.values():
            if pair is not None:
                self.pair[i], self.offline[i] = pair, 0
        for n in range(self.one.servers):
            for i in {*self.available(t, n)} - at_work:
                self.train_offline(i)
        for _ in range(self.one.repeats):
            w = self.z.copy()
            w[ready] = self.z[ready].mean(axis=0)
            for n, (_, pair, _) in closed.items():
                x = w[n] if pair is None else pair[0]
                w[n] = w[n] - self.eta * (w[n] - x)
            self.z = w


@pytest.mark.parametrize("rigorous", [False, True])
@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize(
    ("first", "repeats", "offline_rounds"), [(1, 1, 2), (2, 1, 4), (2, 3, 1), (3, 2, 3)]
)
@pytest.mark.sampled("4")
def test_a_run_is_that_of_the_protocol_played_out_round_by_round(
    first: int, repeats: int, offline_rounds: int, loses: bool, rigorous: bool
) -> None:
    problems, seen = quadratics(9), list[RoundInfo]()
    one = i_async_(
        servers=3, first=first, repeats=repeats, rigorous=rigorous, eta_z=Twin.eta,
        gamma=Twin.gamma, fraction_train=0.34, fraction_available=0.67, seed=3,
        offline_rounds=offline_rounds, callbacks=[seen.append], max_unusable_rounds=99,
    )  # fmt: skip
    federation = grid(problems, fault=broken if loses else None)
    found = train(one, federation, 14)
    twin = Twin(one, problems, answers if loses else lambda t, i: True)
    times = []
    for t in range(1, 15):
        twin.round(t)
        times.append(twin.now)
    np.testing.assert_allclose(found, twin.z.mean(axis=0), rtol=1e-12)
    for model, expected in zip(one.cloud_models, twin.z, strict=True):
        np.testing.assert_allclose(to_vector(model), expected, rtol=1e-12)
    np.testing.assert_allclose([info.metrics["virtual-seconds"] for info in seen], times)
    asked = {i for i, _, _ in twin.work.values()}
    for i in {*range(9)} - asked:  # one at work was counted by the twin when it was asked
        assert min(one.state.offline.get(i, 0), offline_rounds) == twin.offline[i]


def test_each_cloud_server_goes_over_its_own_active_devices_by_gamma() -> None:
    federation, gammas = grid(quadratics(6)), [0.2, 0.9, 0.4, 0.7, 0.1, 0.5]
    one = i_async_(servers=2, first=1, eta_z=1.0, gamma=gammas)
    train(one, federation, 1)
    kept = devices(federation, one.ledger.acked)
    (cloud,) = one.state.ready
    used = [i for i in range(6) if i % 2 == cloud]
    assert sorted(one.ledger.acked) == used
    expected = np.average([kept[i]["x"] for i in used], axis=0, weights=[gammas[i] for i in used])
    np.testing.assert_allclose(one.state.z[cloud], expected, rtol=1e-12)
    np.testing.assert_array_equal(one.state.z[1 - cloud], START)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_cloud_server_all_of_whose_replies_are_lost_mixes_and_takes_no_step(
    reduce: str,
) -> None:
    def of_cloud_0_in_round_3(request: Message, reply: Message) -> Message | None:
        if request.metadata.message_type != "train" or CLIENT_OF[request.metadata.dst_node_id] % 2:
            return reply
        return None if request.content["config"]["server-round"] == 3 else reply

    federation = grid(quadratics(4), fault=of_cloud_0_in_round_3)
    states: list[Any] = []
    one = i_async_(servers=2, first=2, reduce=reduce)
    one.callbacks = (lambda info: states.append((one.state, dict(one.ledger.acked))),)
    train(one, federation, 3)
    (before, _), (after, acked) = states[1:]
    np.testing.assert_array_equal(after.z[0], (before.z[0] + before.z[1]) / 2)
    assert np.abs(after.z[1] - after.z[0]).max() > 1e-3
    assert acked == {0: 2, 1: 3, 2: 2, 3: 3}
    assert after.offline == {0: 1, 1: 0, 2: 1, 3: 0}


def test_devices_of_a_slow_cloud_server_train_offline_while_others_mix() -> None:
    """Those that it asked do not; with ``fraction_available`` 1 the others do in every round."""
    federation, offline, mixes = Slow(6, {0: 4, 3: 4}), list[Any](), list[list[int]]()
    one = i_async_(
        servers=3, first=1, order="arrival", fraction_train=0.5, fraction_available=1.0,
        offline_rounds=3, seed=1,
    )  # fmt: skip

    def note(info: RoundInfo) -> None:
        offline.append(dict(one.state.offline))
        mixes.append(mixed_in(one, info))

    one.callbacks = (note,)
    train(one, federation, 6)
    (busy,) = (client for t, client in federation.asked if t == 1 and client % 3 == 0)
    idle = 3 - busy
    waits = next(t for t, mixing in enumerate(mixes, start=1) if 0 in mixing)
    assert waits > 2
    for t in range(1, waits):
        assert offline[t - 1].get(busy, 0) == 0
        assert offline[t - 1][idle] == t
    assert offline[waits - 1][busy] == 0
    assert offline[waits - 1][idle] == waits
    assert one.client_config(one.state, one.make_round(waits + 1), idle)["offline-rounds"] == 3


def test_lost_replies_leave_their_devices_where_they_were_and_their_cloud_servers_too() -> None:
    """After any pattern, a device keeps the x that its cloud server used last."""
    federation = grid(quadratics(8), fault=drop(0.4))
    one, used = i_async_(servers=4, first=2, fraction_train=0.5), dict[int, np.ndarray]()
    aggregate = FedBCDIAsync.aggregate

    class Watched(FedBCDIAsync):
        def aggregate(self, state: Any, round: Any, uploads: Any) -> Any:
            used.update({upload.client: np.array(upload.vector) for upload in uploads})
            return aggregate(self, state, round, uploads)

    one.__class__ = Watched
    train(one, federation, 12)
    kept = devices(federation, one.ledger.acked)
    assert used.keys() == kept.keys()
    for client, x in used.items():
        np.testing.assert_array_equal(kept[client]["x"], x)


def test_the_defaults_are_those_of_both() -> None:
    one = FedBCDIAsync(servers=4)
    assert (one.gammas, one.fraction_available, one.offline_rounds) == ((0.2,), 0.8, 4)
    assert one.many == 2
    assert FedBCDIAsync.paper_rule == FedBCDI.paper_rule
    with pytest.raises(ValueError, match=r"gamma must be > 0 and <= 1, got 1.5"):
        FedBCDIAsync(gamma=1.5)
    with pytest.raises(ValueError, match=r"first must be an integer >= 1 and <= 4, got 5"):
        FedBCDIAsync(servers=4, first=5)
