"""Fewer clients than ``min_replies``: at the start, after a resumption, and in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from laws import START, quiet
from problems import grid, quadratics, to_record

from clients.node.in_process import InProcessGrid
from fl_strategies import (
    Checkpoints,
    FedAvg,
    FedBCDAsync,
    RoundInfo,
)
from simulations.config import RunConfig
from simulations.experiment import metrics_of
from simulations.rules import configs_for


@pytest.mark.parametrize(("strategy", "own"), [(FedAvg, {}), (FedBCDAsync, {"box": 5.0})])
def test_more_replies_than_clients_cannot_be_needed(strategy: Any, own: dict[str, Any]) -> None:
    one = strategy(min_replies=3, fraction_evaluate=0.0, **own)
    with pytest.raises(ValueError, match=r"min_replies is 3, and the number of clients \w+ is 2"):
        one.start(grid(quadratics(2)), to_record(START), 1)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedbcd", "fedbcd-i"])
def test_a_round_asks_as_many_clients_as_settings_are_checked_for(algorithm: str) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "clients": 20, "fraction": 0.29}
    config = RunConfig.parse(settings)
    (metrics,) = metrics_of(**settings, rounds=1)
    assert metrics["clients-asked"] == config.strategy().asked_of(20) < 20


def test_a_comparison_in_which_one_algorithm_asks_too_few_clients_begins_no_run(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"min-replies is 5, .* that fedavg asks in a round is 1"):
        configs_for(["fedpd", "fedavg"], [], {"clients": 10, "min-replies": 5}, tmp_path)


class Leaving(InProcessGrid):
    """A grid from which ``away`` clients are away, for ``looks`` looks at its nodes."""

    away, looks = 0, 10**9

    def get_node_ids(self) -> Iterable[int]:
        self.looks -= 1
        nodes = [*super().get_node_ids()]
        return nodes[: len(nodes) - self.away * (self.looks >= 0)]


class Open(Leaving):
    closed = False  # nodes may still come


def killed_after_two(path: Path, clients: int) -> Callable[..., FedAvg]:
    """Return a strategy that resumes a run of so many clients, of which 3 replies are needed."""

    def kill(info: RoundInfo) -> None:
        if info.server_round == 2:
            raise RuntimeError("killed")

    def kept(**options: Any) -> FedAvg:
        return quiet(FedAvg, checkpoints=Checkpoints(path), **{"min_replies": 3} | options)

    with pytest.raises(RuntimeError, match="killed"):
        kept(callbacks=[kill]).start(grid(quadratics(clients)), to_record(START), 5)
    return kept


def test_after_a_resumption_too_few_clients_are_told_at_once(tmp_path: Path) -> None:
    kept = killed_after_two(tmp_path, 3)
    with pytest.raises(ValueError, match="3 clients are to be connected, the grid has 2"):
        kept().start(grid(quadratics(2)), to_record(START), 5, resume=True)


def test_a_resumption_waits_for_clients_that_are_away(tmp_path: Path) -> None:
    kept = killed_after_two(tmp_path, 3)
    there = Open(grid(quadratics(3)).client_app, 3)
    there.away, there.looks = 1, 4
    found = kept().start(there, to_record(START), 5, resume=True).train_metrics_clientapp
    assert there.looks < 0
    assert [int(found[turn]["clients-used"]) for turn in range(1, 6)] == [3, 3, 3, 3, 3]


def test_a_resumption_waits_for_no_more_clients_than_there_were(tmp_path: Path) -> None:
    kept = killed_after_two(tmp_path, 3)
    there = Open(grid(quadratics(3)).client_app, 3)
    with pytest.raises(ValueError, match="min_replies is 4, and the number of clients asked is 3"):
        kept(min_replies=4).start(there, to_record(START), 5, resume=True)


def test_a_round_in_which_clients_are_away_is_void_and_the_run_continues() -> None:
    def leave(info: RoundInfo) -> None:
        on.away = 2 * (info.server_round in (2, 3))

    on = Leaving(grid(quadratics(4)).client_app, 4)
    one = quiet(FedAvg, min_replies=3, callbacks=[leave])
    found = one.start(on, to_record(START), 5).train_metrics_clientapp
    assert [int(found[turn]["clients-used"]) for turn in range(1, 6)] == [4, 4, 2, 2, 4]
