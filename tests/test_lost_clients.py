"""What an operator sees of a run: a line a round, the time left, lost clients; when it fails."""

from __future__ import annotations

import json
import os
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message, MessageType
from processes import descendants, members

from clients.node.in_process import InProcessGrid
from fl_strategies import NothingUsable
from simulations.client_app import app
from simulations.config import RunConfig
from simulations.experiment import run
from simulations.lab.compare import main
from simulations.lab.superlink import flwr_run, print_progress
from simulations.results import LAST_ROUNDS, seconds_left
from simulations.tables import algorithm_row, markdown

CLIENTS = 6
DIED = "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly.\n\tpid: 7'>"


def config_for(tmp_path: Path, **others: Any) -> RunConfig:
    keys = {"clients": CLIENTS, "rounds": 5, "steps": 1, "fraction": 1.0}
    return RunConfig.parse(keys | {"output": str(tmp_path / "run")} | others)


class Flaky(InProcessGrid):
    """All clients but the first are lost in some rounds: by no reply, or by an error."""

    def __init__(
        self, config: RunConfig, rounds: set[int], *, error: bool = True, last: str = DIED
    ) -> None:
        super().__init__(app, CLIENTS, run_config=config.to_run_config())
        self.rounds, self.error = rounds, error
        self.reasons = dict.fromkeys(self.contexts, DIED) | {[*self.contexts][-1]: last}
        self.first = next(iter(self.contexts))

    def answer(self, message: Message) -> Message | None:
        if message.metadata.message_type == MessageType.TRAIN:
            number = message.content.config_records["config"]["server-round"]
            if number in self.rounds and message.metadata.dst_node_id != self.first:
                return self.lost(message) if self.error else None
        return super().answer(message)

    def lost(self, message: Message) -> Message:
        return Message(Error(0, self.reasons[message.metadata.dst_node_id]), reply_to=message)


both = pytest.mark.parametrize("error", [True, False], ids=["error", "no reply"])


@both
def test_a_simulation_fails_where_clients_stay_lost_and_says_why(
    error: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tmp_path)
    text = "lost in 3 rounds in a row, in round 4 5 of 6"
    reason = ": .*ActorDiedError'>:<'The actor died unexpectedly. pid: 7'> " if error else ""
    with pytest.raises(RuntimeError, match=text + reason):
        run(config, Flaky(config, {2, 3, 4}, error=error))
    shown = [line for line in capsys.readouterr().out.splitlines() if " round " in line]
    assert ["1 of 6 clients (5 " in line for line in shown] == [False, True, True, True]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert not summary["finished"]
    assert summary["missing"] == 15 / 24


def test_that_clients_diverge_is_a_result(tmp_path: Path) -> None:
    """Also where others are lost in another way, as by numbers that are too large."""
    config = config_for(tmp_path)
    with pytest.raises(NothingUsable, match="lost in 3 rounds in a row, in round 4 5 of 6"):
        run(config, Flaky(config, {2, 3, 4}, last="the trained model is not finite"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["finished"]
    assert summary["given_up"].startswith("clients were lost in 3 rounds")


@both
@pytest.mark.sampled("error")
def test_a_simulation_goes_on_where_lost_clients_come_back_or_the_user_says_so(
    error: bool, tmp_path: Path
) -> None:
    config = config_for(tmp_path)
    assert run(config, Flaky(config, {1, 2, 4, 5}, error=error)).rounds == 5
    config = config_for(tmp_path, **{"lost-rounds": 0})
    assert run(config, Flaky(config, {1, 2, 3, 4, 5}, error=error)).rounds == 5
    config = config_for(tmp_path, **{"lost-rounds": 1})
    with pytest.raises(RuntimeError, match="in 1 rounds in a row"):
        run(config, Flaky(config, {3}, error=error))


def test_a_deployment_goes_on_without_its_lost_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients come and go, and one of them must not end the others' run."""
    config = config_for(tmp_path)
    grid = Flaky(config, {1, 2, 3, 4, 5})
    monkeypatch.setattr("simulations.population.InProcessGrid", type("Other", (), {}))
    assert run(config, grid).rounds == 5


@both
@pytest.mark.sampled("error")
def test_tables_mark_the_share_of_lost_replies_where_there_are_any(
    error: bool, tmp_path: Path
) -> None:
    config = config_for(tmp_path)
    for rounds, shown in (({2, 4}, "33.3 %"), (set(), None)):
        run(config, Flaky(config, rounds, error=error))
        summary = json.loads((tmp_path / "run/summary.json").read_text())
        table = markdown([algorithm_row([config], [summary])])
        assert ("lost replies" in table) == (shown is not None)
        assert shown is None or shown in table


@pytest.mark.slow
def test_a_replys_own_faults_are_not_losses(tmp_path: Path) -> None:
    """What the server's checks leave out, as after divergence, ends no simulation."""
    config = config_for(tmp_path)

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == MessageType.TRAIN:
            reply.content.metric_records["metrics"]["num-examples"] = -1
        return reply

    grid = InProcessGrid(app, CLIENTS, run_config=config.to_run_config(), fault=spoil)
    first = grid.contexts.copy()
    grid.fault = lambda request, reply: (
        reply if request.metadata.dst_node_id == next(iter(first)) else spoil(request, reply)
    )
    summary = run(config, grid)
    assert (summary.rounds, summary.missing) == (5, 0.0)


# ---- progress ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0.01, 1.0, 1000.0])
def test_the_time_left_is_that_of_the_last_rounds_whatever_the_first_took(first: float) -> None:
    ends = list(accumulate([first] + 30 * [2.0] + LAST_ROUNDS * [3.0]))
    assert seconds_left(ends, 7) == pytest.approx(21.0)
    assert seconds_left(ends[:2], 7) == pytest.approx(14.0)
    assert seconds_left(ends[:1], 7) is None


@pytest.mark.slow
def test_each_round_is_one_line_in_output_and_log_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tmp_path)
    run(config, Flaky(config, set()))
    text = "".join(capfd.readouterr())
    assert len(re.findall(r"\bround[ =]\d", text)) == config.rounds
    assert len(text.splitlines()) <= config.rounds + 2
    assert "fraction_evaluate" not in text


@pytest.mark.slow
def test_a_quiet_run_shows_only_rounds_with_lost_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tmp_path)
    run(config, Flaky(config, {2, 4}), quiet=True)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in shown] == ["2/5:", "4/5:"]


def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    keys = "--algorithms fedavg,fedprox --clients 6 --rounds 3 --tune lr=0.1,0.2"
    main([*keys.split(), "--output", str(tmp_path), *options])
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_tuned_compare_shows_the_rounds_of_what_is_compared_and_quiet_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = re.compile(r" round \d+/3")
    for options, runs in ((["--quiet"], 0), ([], 2), (["--verbose"], 6)):
        folder = tmp_path / "".join(["all", *options])
        lines = compared(folder, capsys, *options)
        assert len([line for line in lines if rounds.search(line)]) == 3 * runs
        assert lines[-1] == f"results: {folder}"
        assert any("runs done" in line for line in lines)


@pytest.mark.parametrize(
    ("line", "shown", "quietly"),
    [
        ("fedavg round 3/9: test-accuracy 0.9000, 6 of 6 clients, 0.1 s", True, False),
        ("results: /x", True, False),
        ("fedavg round 3/9: 4 of 6 clients (2 lost), 0.1 s", True, True),
        ("WARNING :   replies of 2 clients [1, 4] left out: no", True, True),
        ("WARNING :   no reply from client 1", True, True),
        ("WARNING :   round 3 is skipped: 0 usable replies", True, True),
        ("INFO :      Starting Flower Simulation", False, False),
    ],
)
def test_of_a_log_progress_and_trouble_are_shown(
    line: str, shown: bool, quietly: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for quiet, expected in ((False, shown), (True, quietly)):
        print_progress(line, quiet=quiet)
        assert capsys.readouterr().out == (f"{line}\n" if expected else "")


# ---- on Ray --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_dead_worker_ends_a_run_on_ray_with_what_happened(tmp_path: Path) -> None:
    lines: list[str] = []
    killed: list[int] = []

    def kill_one(line: str) -> None:
        lines.append(line)
        if " round 1/" in line:
            workers = (one for one in descendants() if one.info["name"].startswith("ray::Client"))
            worker = next(workers)
            killed.append(os.getpgid(worker.pid))
            worker.kill()

    config = config_for(tmp_path, rounds=30, steps=0, partition="iid")
    told = r"(?s)finished:failed.*clients were lost in 3 rounds in a row"
    with pytest.raises(RuntimeError, match=told):
        flwr_run(config.to_run_config(), num_supernodes=6, workers=2, on_line=kill_one)
    assert len(killed) == 1
    reasons = [line for line in lines if " left out: " in line]
    assert reasons
    assert all("ActorDiedError'>:<'The actor " in line for line in reasons)
    assert any(" clients (" in line and " round " in line for line in lines)
    assert len([line for line in lines if re.search(r"\bround \d+", line)]) <= 2 * 8
    assert members(killed[0]) == []
