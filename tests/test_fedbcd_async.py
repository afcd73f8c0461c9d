"""Async-cloud FedBCD: against a twin in NumPy, against sync-cloud; what holds of both forms."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bcd import aspg, async_, both, fedbcd_, mixed_in, sum_of_last_models
from federations import drop
from flwr.app import Array, ArrayRecord
from laws import START, STEPS, Shuffled, local, train
from problems import DIM, grid, make_client_app, quadratics, to_record, to_vector
from torch.nn.functional import cross_entropy

from clients import AnyAlgorithmClient, Border, DirectoryStore, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import Checkpoints, RoundInfo
from simulations import models


def test_one_cloud_server_is_sync_cloud_to_the_bit() -> None:
    problems = quadratics(4)
    for hyperparameters in ({}, {"fraction_train": 0.5, "repeats": 2, "eta_z": 0.3, "gamma": 0.6}):
        np.testing.assert_array_equal(
            train(async_(**hyperparameters), grid(problems), 3),
            train(fedbcd_(**hyperparameters), grid(problems), 3),
        )


def test_when_all_cloud_servers_mix_their_mean_takes_sync_clouds_first_step() -> None:
    """From the second round on each device is pulled to its own cloud server's model."""
    problems = quadratics(6)
    together = train(async_(servers=3, first=3), grid(problems), 1)
    np.testing.assert_allclose(together, train(fedbcd_(), grid(problems), 1), rtol=1e-12)


@pytest.mark.slow
def test_when_all_cloud_servers_mix_it_rests_where_each_reproduces_its_model() -> None:
    """z_n = w - eta (w - mean of x_i(z_n)), w = mean of z_n, x_i(z) = argmin of f_i + pull."""
    problems, gamma, eta = quadratics(4), 0.8, 0.5
    one = async_(servers=2, first=2, gamma=gamma, eta_z=eta, zeta=0.5)
    z = train(one, grid(problems), 80)
    n = 2 * DIM
    matrix, right = np.eye(n), np.zeros(n)
    for cloud in range(2):
        rows = slice(cloud * DIM, (cloud + 1) * DIM)
        for other in range(2):
            matrix[rows, other * DIM : (other + 1) * DIM] -= (1 - eta) / 2 * np.eye(DIM)
        for q in problems[cloud::2]:
            R = np.linalg.inv(q.A + gamma * np.eye(DIM))
            matrix[rows, rows] -= eta / 2 * gamma * R
            right[rows] += eta / 2 * R @ q.A @ q.b
    clouds = np.linalg.solve(matrix, right).reshape(2, DIM)
    np.testing.assert_allclose(z, clouds.mean(axis=0), atol=1e-7)
    for model, expected in zip(one.cloud_models, clouds, strict=True):
        np.testing.assert_allclose(to_vector(model), expected, atol=1e-7)
    assert np.abs(clouds[0] - clouds[1]).max() > 1e-2


@pytest.mark.parametrize("rigorous", [False, True])
@pytest.mark.parametrize(
    ("first", "repeats", "staleness"), [(1, 1, None), (2, 1, None), (2, 3, None), (None, 1, 2)]
)
def test_a_run_is_that_of_the_protocol_played_out_event_by_event(
    first: int | None, repeats: int, staleness: int | None, rigorous: bool
) -> None:
    servers, eta, gamma = 3 if staleness is None else 5, 0.4, 0.6
    devices = 2 * servers
    problems = quadratics(devices)
    seen: list[RoundInfo] = []
    one = async_(
        servers=servers, first=first, repeats=repeats, rigorous=rigorous, eta_z=eta, gamma=gamma,
        staleness=staleness, fraction_train=0.5, callbacks=[seen.append], seed=3,
    )  # fmt: skip
    found = train(one, grid(problems), 8)

    z = [START] * servers
    x: list[Any] = [START] * devices
    kept: list[Any] = [None] * devices
    mixed, many = [0] * servers, first or 3
    ready_at: list[float | None] = [None] * servers
    free_at, work, times = [0.0] * servers, [{}] * servers, []
    for t in range(1, 9):
        for n in range(servers):
            if ready_at[n] is None:
                i = min((n, n + servers), key=lambda i: one.device_clock.begins(3, t, i))
                start = kept[i] or (z[n], z[n])
                work[n] = {i: aspg(problems[i], *start, STEPS, zeta=0.9, gamma=gamma, z=z[n])}
                ready_at[n] = free_at[n] + one.device_clock.seconds(3, t, i, STEPS)
        queue = sorted(range(servers), key=lambda n: ready_at[n])
        overdue = [n for n in queue if staleness and t - mixed[n] >= staleness]
        others = [n for n in queue if n not in overdue]
        mixing = overdue + others[: max(many - len(overdue), 0)]
        rest = [n for n in queue if n not in mixing]
        now = max([*times[-1:], *(ready_at[n] for n in mixing)])
        mixed = [t if n in mixing else last for n, last in enumerate(mixed)]
        for n in mixing + (rest if rigorous else []):
            for i, pair in work[n].items():
                kept[i], x[i] = pair, pair[0]
            free_at[n] = now if n in mixing else ready_at[n]
            ready_at[n] = None
        for _ in range(repeats):
            w = {n: np.mean([z[m] for m in mixing], axis=0) for n in mixing}
            if rigorous:
                w |= {n: z[n] for n in rest}
            for n, mean in w.items():
                z[n] = mean - eta * (mean - (x[n] + x[n + servers]) / 2)
        times.append(now)
    np.testing.assert_allclose(found, np.mean(z, axis=0), rtol=1e-10)
    for model, expected in zip(one.cloud_models, z, strict=True):
        np.testing.assert_allclose(to_vector(model), expected, rtol=1e-10)
    np.testing.assert_allclose([info.metrics["virtual-seconds"] for info in seen], times)
    assert times == sorted(times)


@both
def test_a_seed_fixes_an_asynchronous_run_whatever_the_order_of_replies(make: Any) -> None:
    problems = quadratics(6)

    def run(seed: int, kind: Any = InProcessGrid) -> np.ndarray:
        settings = local(solver="sgd", **{"batch-size": 3, "random-epochs": True})
        one = make(servers=3, first=1, local=settings, fraction_train=0.5, seed=seed)
        return train(one, kind(make_client_app(problems), 6), 6)

    found = run(1)
    np.testing.assert_array_equal(found, run(1, Shuffled))
    assert np.abs(found - run(2)).max() > 1e-6


@pytest.mark.parametrize("rounds", [1, 9])
def test_the_sums_hold_after_lost_replies_also_with_work_that_waits(rounds: int) -> None:
    federation = grid(quadratics(8), fault=drop(0.3))
    one = async_(servers=4, first=2)
    train(one, federation, rounds)
    total = sum(book.total for book in one.state.sums)
    np.testing.assert_allclose(
        total, sum_of_last_models(federation, one.ledger.acked, 8), rtol=1e-12
    )


def test_waiting_for_fewer_cloud_servers_takes_less_virtual_time() -> None:
    seen: list[RoundInfo] = []
    for first in (1, 2, 4):
        train(async_(servers=4, first=first, callbacks=[seen.append]), grid(quadratics(4)), 5)
    one, two, four = (info.metrics["virtual-seconds"] for info in seen[4::5])
    assert one < two < four


@pytest.mark.parametrize("staleness", [1, 2, 4])
@both
def test_no_cloud_server_goes_longer_without_a_mix_than_staleness_allows(
    make: Any, staleness: int
) -> None:
    seen: list[tuple[set[int], float]] = []
    one = make(servers=4, first=1, staleness=staleness, seed=2)
    one.callbacks = (
        lambda info: seen.append((set(mixed_in(one, info)), info.metrics["virtual-seconds"])),
    )
    train(one, grid(quadratics(4)), 3 * staleness)
    last = dict.fromkeys(range(4), 0)
    for t, (mixed, _) in enumerate(seen, start=1):
        overdue = {n for n in range(4) if t - last[n] >= staleness}
        assert overdue <= mixed
        assert len(mixed) == max(1, len(overdue))
        last |= dict.fromkeys(mixed, t)
    times = [seconds for _, seconds in seen]
    assert times == sorted(times)


def test_a_cloud_server_whose_devices_are_all_gone_is_not_waited_for() -> None:
    class Half(InProcessGrid):
        rounds = 0

        def get_node_ids(self) -> Iterable[int]:
            nodes = list(super().get_node_ids())
            return nodes if self.rounds < 2 else nodes[::2]

    federation, mixes = Half(make_client_app(quadratics(4)), 4), []
    one = async_(servers=2, first=2)

    def seen(info: RoundInfo) -> None:
        federation.rounds = info.server_round
        mixes.append(mixed_in(one, info))

    one.callbacks = (seen,)
    train(one, federation, 4)
    assert mixes == [[0, 1], [0, 1], [0], [0]]


def test_a_newcomers_update_is_bounded_from_its_own_cloud_servers_model() -> None:
    problems = quadratics(20)
    one = async_(servers=2, first=2, gamma=0.5, fraction_train=0.5, clipping_norm=1e9)
    far: dict[int, float] = {}
    far_from_mean: dict[int, float] = {}

    def seen(info: RoundInfo) -> None:
        if info.server_round == 1:
            for i in set(range(20)) - one.ledger.acked.keys():
                z = one.state.z[i % 2]
                x, _ = aspg(problems[i], z, z, STEPS, zeta=0.9, gamma=0.5, z=z)
                far[i] = float(np.linalg.norm(x - z))
                far_from_mean[i] = float(np.linalg.norm(x - (one.state.z[0] + one.state.z[1]) / 2))
            one.clipping_norm = float(np.median(list(far.values())))
            one.fraction_train = 1.0

    one.callbacks = (seen,)
    train(one, grid(problems), 2)
    taken = far.keys() & one.ledger.acked.keys()
    assert taken == {i for i in far if far[i] <= one.clipping_norm}
    assert taken != {i for i in far if far_from_mean[i] <= one.clipping_norm}


@pytest.mark.parametrize("options", [{}, {"rigorous": True}, {"staleness": 2}], ids=str)
@both
def test_two_starts_are_one_that_is_as_long(make: Any, options: dict[str, Any]) -> None:
    problems, hyperparameters = (
        quadratics(6),
        {"servers": 3, "first": 1, "fraction_train": 0.5, **options},
    )
    one, two = make(**hyperparameters), make(**hyperparameters)
    whole = one.start(grid(problems), to_record(START), 7)
    federation = grid(problems)
    half = two.start(federation, to_record(START), 4)
    rest = two.start(federation, half.arrays, 3)
    np.testing.assert_array_equal(to_vector(rest.arrays), to_vector(whole.arrays))
    for mine, theirs in zip(two.cloud_models, one.cloud_models, strict=True):
        np.testing.assert_array_equal(to_vector(mine), to_vector(theirs))
    seconds = [r.train_metrics_clientapp for r in (whole, rest)]
    assert seconds[1][7]["virtual-seconds"] == seconds[0][7]["virtual-seconds"]


@both
def test_from_another_model_the_cloud_servers_begin_there(make: Any) -> None:
    one = make(servers=3, first=1)
    on = grid(quadratics(6))
    train(one, on, 3)
    one.open(to_record(2 * START), 1)
    one.settle(on)
    for model in one.cloud_models:
        np.testing.assert_array_equal(to_vector(model), 2 * START)


class EndAfter:
    """Ends the process, as it were, in the round after so many."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __call__(self, info: RoundInfo) -> None:
        if info.server_round > self.rounds:
            raise KeyboardInterrupt


@both
@pytest.mark.sampled("fedbcd")
def test_killed_with_work_under_way_and_running_statistics_it_ends_as_if_never(
    make: Any, tmp_path: Path
) -> None:
    """Cloud servers' devices are asked again with the statistics that they were sent before."""
    rng = np.random.default_rng(0)
    inputs = torch.tensor(rng.normal(size=(6, 5, 1, 4, 4)) + np.arange(6).reshape(6, 1, 1, 1, 1))
    targets = torch.tensor(rng.integers(0, 3, (6, 5)))

    def model() -> Border:
        return Border(models.build("cnn-bn", (1, 4, 4), 3, seed=0).double())

    def run(folder: Path, lives: list[int]) -> dict[str, np.ndarray]:
        def client_fn(context: Any) -> AnyAlgorithmClient:
            me = client_id(context)
            problem = Problem(model(), cross_entropy, inputs[me], targets[me])
            store = DirectoryStore(folder / "states", me)
            return AnyAlgorithmClient(problem, client_id=me, store=store)

        for rounds in lives:
            one = make(
                servers=3, first=1, seed=1, callbacks=[EndAfter(rounds)],
                local={"batch-size": 2, "epochs": 1, "lr": 0.05},  # 2 + 2 + 1: one alone
                checkpoints=Checkpoints(folder / "checkpoints"),
            )  # fmt: skip
            initial = {
                n: Array(t.numpy(force=True)) for n, t in model().module.state_dict().items()
            }
            with suppress(KeyboardInterrupt):
                one.start(
                    InProcessGrid(client_app(client_fn), 6), ArrayRecord(initial), 8, resume=True
                )
        arrays = [one.result.arrays, *one.cloud_models]
        return {f"{n} {name}": a.numpy() for n, r in enumerate(arrays) for name, a in r.items()}

    expected = run(tmp_path / "whole", [99])
    for folder, lives in (("cut", [3, 5, 99]), ("whole", [99])):  # the last had ended before
        found = run(tmp_path / folder, lives)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_the_bound_of_a_summed_step_is_on_one_cloud_servers_devices() -> None:
    hyperparameters: dict[str, Any] = {"reduce": "sum", "eta_z": 0.3, "gamma": 1.5}
    async_(servers=2, min_available_nodes=4, **hyperparameters)
    with pytest.raises(ValueError, match=r"got 1.8 for \|Q\| = 4 devices"):
        fedbcd_(servers=2, min_available_nodes=4, **hyperparameters)
