"""A shared population's clients go to hosts by expected work, and the history says who was busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from laws import local, train
from problems import make_client_app, quadratics

from clients import Hosted, InProcessGrid
from fl_strategies import FedADMM, RoundInfo
from fl_strategies.core.spread import expected_work, spread
from fl_strategies.messages.hosting import unpack_request

works = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


def loads_of(work: Sequence[float], hosts: int) -> list[float]:
    spreading = spread(dict(enumerate(work)), range(hosts))
    return [sum(work[c] for c in spreading.get(host, [])) for host in range(hosts)]


@given(works, st.integers(1, 7))
def test_every_client_has_one_host_and_the_last_ends_one_clients_work_after_the_mean(
    work: list[float], hosts: int
) -> None:
    spreading = spread(dict(enumerate(work)), range(hosts))
    assert sorted(c for clients in spreading.values() for c in clients) == [*range(len(work))]
    mean = sum(work) / hosts
    assert max(loads_of(work, hosts)) <= mean + (1 - 1 / hosts) * max(work) + 1e-6 * mean + 1e-9


@given(works, st.integers(1, 7), st.randoms())
def test_the_order_of_clients_does_not_matter(work: list[float], hosts: int, random: Any) -> None:
    pairs = [*enumerate(work)]
    expected = spread(dict(pairs), range(hosts))
    random.shuffle(pairs)
    assert spread(dict(pairs), range(hosts)) == expected


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("clients", [10, 100])
def test_of_two_workers_the_last_is_near_the_mean_or_has_one_long_client(
    clients: int, seed: int
) -> None:
    """Sizes by a power law, of tails that have no mean even."""
    rng = np.random.default_rng(seed)
    work = 10 * (1 + rng.pareto(rng.uniform(0.5, 3.0), clients))
    worst, mean = max(loads_of(work, 2)), work.sum() / 2
    assert worst <= 1.1 * mean or worst == work.max()


def test_work_is_steps_or_epochs_of_what_a_client_has() -> None:
    assert expected_work(30, {"epochs": 5, "batch-size": 10}) == 150
    assert expected_work(30, {"epochs": 5, "steps": 7, "batch-size": 10}) == 70
    assert expected_work(30, {"steps": 7, "batch-size": 0}) == 210
    assert expected_work(30, {"epochs": 5}, trains=False) == 30


def federation(samples: Sequence[int], seen: list[Any]) -> InProcessGrid:
    """Return two hosts that share the clients of these ``samples``."""

    def note(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            seen.append({*unpack_request(request.content)[1]})
        return reply

    n = len(samples)
    app = make_client_app(quadratics(n), hosts=Hosted(n, samples))
    return InProcessGrid(app, n, hosts=2, fault=note)


def test_hosts_get_alike_work_by_the_sizes_that_they_report() -> None:
    seen: list[Any] = []
    one = FedADMM(local=local(), fraction_evaluate=0.0, shared_population=5)
    rows: list[dict[str, Any]] = []
    one.callbacks = (lambda info: rows.append(dict(info.metrics)),)
    train(one, federation([10, 40, 10, 10, 10], seen), 2)
    assert sorted(seen, key=len) == 2 * [{1}] + 2 * [{0, 2, 3, 4}]
    for row in rows:
        shares = [row["busy-share-0"], row["busy-share-1"]]
        assert 0 < min(shares) == row["busy-share-min"]
        assert max(shares) == row["busy-share-max"] <= 1


def test_clients_cannot_speak_of_hosts() -> None:
    seen: list[Any] = []
    grid = federation([1, 1], seen)
    usual = grid.fault
    assert usual is not None

    def lie(request: Message, reply: Message) -> Any:
        if request.metadata.message_type == "train":
            for name in [n for n in reply.content if n.startswith("metrics")]:
                entry = reply.content[name]["num-examples"]
                number: Any = [7.0] * len(entry) if isinstance(entry, list) else 7.0
                reply.content[name]["busy-share-0"] = number
        return usual(request, reply)

    rows: list[RoundInfo] = []
    grid.fault = lie
    train(
        FedADMM(local=local(), fraction_evaluate=0.0, shared_population=2, callbacks=[rows.append]),
        grid,
        1,
    )
    assert rows[0].metrics["busy-share-0"] <= 1
    assert rows[0].metrics["client-busy-share-0"] == 7


@pytest.mark.parametrize("samples", [[1], [1, -2], [1, "3"]])
def test_a_host_that_says_nonsense_of_its_samples_is_taken_without(
    samples: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    grid = federation([1, 1], [])

    def lie(request: Message, reply: Message) -> Message:
        about: dict[str, Any] = {"any-of": 2, "num-partitions": 2, "samples": [*map(str, samples)]}
        if not isinstance(samples[-1], str):
            about["samples"] = samples
        reply.content = RecordDict({"client": ConfigRecord(about)})
        return reply

    grid.fault = lie
    one = FedADMM(shared_population=2)
    assert one.nodes.connected(grid).keys() == {0, 1}
    assert one.nodes.samples == {}
    assert "gives no usable numbers of its clients' samples" in caplog.text
