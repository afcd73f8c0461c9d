"""FedBCD-I: the pull, the active devices, offline work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bcd import aspg, devices, fedbcd_i_
from federations import lose
from laws import START, STEPS, local, train
from problems import grid, quadratics

from fl_strategies import FedBCDI, Round, RoundInfo
from fl_strategies.bcd import fedbcd_i
from fl_strategies.core.randomness import stream


class Watched(FedBCDI):
    """Keeps who was available and who active, round by round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[tuple[set[int], set[int]]] = []

    def select(self, state: Any, round: Round) -> list[int]:
        chosen = super().select(state, round)
        available = {c for n in range(self.servers) for c in self.available(state, round, n)}
        self.seen.append((available, set(chosen)))
        return chosen


def test_pulling_k_times_shrinks_the_distance_to_z_by_one_minus_gamma_to_the_k() -> None:
    z = START + np.array([1.0, -2.0, 0.5, 0.0, 3.0])
    for times in (1, 2, 5):
        state = fedbcd_i.pull(fedbcd_i.State(START, 0 * z), z, gamma=0.3, times=times, box=0.0)
        np.testing.assert_allclose(state.x, z + 0.7**times * (START - z), rtol=1e-12)
        np.testing.assert_allclose(state.previous, z + 0.7 ** (times - 1) * (START - z), rtol=1e-12)


def test_a_pull_that_leaves_the_box_is_projected_and_goes_on_from_there() -> None:
    x, z, gamma, box = START, START + np.array([1.0, -2.0, 0.5, 0.0, 3.0]), 0.5, 1.2
    state = fedbcd_i.pull(fedbcd_i.State(x, x), z, gamma=gamma, times=2, box=box)
    for _ in range(2):
        x, previous = np.minimum(np.maximum((1 - gamma) * x + gamma * z, -box), box), x
    assert np.abs(x).max() == box
    np.testing.assert_allclose(state.x, x, rtol=1e-12)
    np.testing.assert_allclose(state.previous, previous, rtol=1e-12)


@pytest.mark.parametrize("offline_rounds", [1, 2, 4])
def test_offline_work_inside_a_message_equals_work_done_when_the_device_was_available(
    offline_rounds: int,
) -> None:
    problems = quadratics(6)
    one = Watched(
        box=3.5, fraction_evaluate=0.0, local=local(), fraction_train=0.34, servers=2,
        fraction_available=0.67, offline_rounds=offline_rounds, eta_z=0.6, gamma=0.3,
    )  # fmt: skip
    found = train(one, grid(problems), 9)
    z = START
    kept: list[Any] = [None] * 6  # a newcomer waits for its first model
    owed, since = [0] * 6, [0] * 6
    for available, active in one.seen:
        assert active < available
        assert (len(available), len(active)) == (4, 2)
        for i in available:
            if since[i] < offline_rounds:
                since[i] += 1
                if kept[i] is None:
                    owed[i] += 1
                else:
                    kept[i] = aspg(problems[i], *kept[i], STEPS, zeta=0.9, box=3.5)
        for i in active:
            if kept[i] is None:
                kept[i] = aspg(problems[i], z, z, STEPS * owed[i], zeta=0.9, box=3.5)
            x = kept[i][0]
            for _ in range(STEPS):
                x, previous = x - 0.3 * (x - z), x
            kept[i], since[i] = (x, previous), 0
        z = z - 0.6 * (z - np.mean([kept[i][0] for i in active], axis=0))
    np.testing.assert_allclose(found, z, rtol=1e-10)
    assert any(len(available - active) for available, active in one.seen)


def test_the_server_of_fedbcd_i_goes_over_the_active_devices_alone() -> None:
    federation = grid(quadratics(4))
    one = fedbcd_i_(fraction_train=0.5, eta_z=1.0)
    z = train(one, federation, 1)
    used = sorted(one.ledger.acked)
    assert len(used) == 2
    kept = devices(federation, one.ledger.acked)
    np.testing.assert_allclose(z, np.mean([kept[i]["x"] for i in used], axis=0), rtol=1e-12)


def test_the_papers_settings_of_fedbcd_i_are_the_defaults() -> None:
    one = FedBCDI()
    assert (one.gammas, one.fraction_available, one.offline_rounds) == ((0.2,), 0.8, 4)


def test_the_server_of_fedbcd_i_weighs_its_devices_by_gamma() -> None:
    federation, gammas = grid(quadratics(3)), [0.2, 0.9, 0.4]
    one = fedbcd_i_(eta_z=1.0, gamma=gammas)
    z = train(one, federation, 1)
    kept = devices(federation, one.ledger.acked)
    expected = np.average([kept[i]["x"] for i in range(3)], axis=0, weights=gammas)
    np.testing.assert_allclose(z, expected, rtol=1e-12)


def test_who_is_available_is_drawn_anew_in_each_round_and_by_each_cloud_server() -> None:
    hyperparameters = {
        "box": None,
        "fraction_train": 0.02,
        "fraction_available": 0.58,
        "servers": 2,
    }
    one = Watched(fraction_evaluate=0.0, local=local(), **hyperparameters)
    train(one, grid(quadratics(100)), 8)
    ranks = [
        {i // 2 for i in available if i % 2 == cloud}
        for available, _ in one.seen
        for cloud in range(2)
    ]
    assert {len(each) for each in ranks} == {29}  # 0.58 x 50 is 28.999... in floating point
    assert len({frozenset(each) for each in ranks}) == 16


def test_a_device_asked_in_vain_was_available_without_contact() -> None:
    one = fedbcd_i_()
    train(one, grid(quadratics(3), fault=lose((2, 0), (3, 0))), 3)
    assert [one.request(4, i)["offline-rounds"] for i in range(3)] == [3, 1, 1]


def test_every_round_of_offline_work_draws_its_own_epochs_and_the_last_ones_count() -> None:
    (q,) = quadratics(1)
    settings = local(**{"random-epochs": True, "epochs": 6})
    seen: list[RoundInfo] = []
    one = fedbcd_i_(local=settings, callbacks=[seen.append])
    one.state = replace(one.first_state(START), offline={0: 3})
    train(one, grid([q]), 1)
    rng = stream(0, "local", 1, 0)
    rng.integers(2**63)  # torch's seed is drawn first
    drawn = [int(rng.integers(1, 6, endpoint=True)) for _ in range(4)]
    assert seen[0].metrics["epochs"] == sum(drawn)
    assert seen[0].metrics["work"] == drawn[-1]
