"""Damaged state files are lost states; nothing is ever pickled."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from laws import START, TABLE, local
from problems import grid, quadratics, to_record, to_vector
from scripted import ROWS, made, same

from clients import DirectoryStore, Owner, client_id
from fl_strategies import BestModel, History

# ---- state files --------------------------------------------------------------------------------


def damage(folder: Path, client: int) -> tuple[Path, bytes]:
    """Change one number in the client's last state file; return the file and what it held."""
    path = max((folder / str(client)).iterdir())
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return path, whole


def in_folder(folder: Path) -> Callable[[Any], DirectoryStore]:
    return lambda context: DirectoryStore(folder, client_id(context))


def test_a_damaged_state_is_treated_as_a_lost_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problems = quadratics(3)
    federation = grid(problems, store=in_folder(tmp_path / "kept"))
    lost = grid(problems, store=in_folder(tmp_path / "lost"))
    one, other = (made(ROWS["fedadmm"], lost_state="warn") for _ in range(2))
    theta = one.start(federation, to_record(START), 2).arrays
    assert same(to_vector(other.start(lost, to_record(START), 2).arrays), to_vector(theta))
    path, _ = damage(tmp_path / "kept", 1)
    for file in (tmp_path / "lost/1").iterdir():
        file.unlink()
    found = one.start(federation, theta, 2)
    assert f"client 1 begins anew: {path} is damaged" in caplog.text
    assert "client 1 lost its state and is treated as new" in caplog.text
    assert found.train_metrics_clientapp[3]["clients-used"] == 3
    expected = other.start(lost, theta, 2)
    assert same(to_vector(found.arrays), to_vector(expected.arrays))
    assert not path.exists()  # replaced by what was acknowledged since


def test_a_client_with_a_damaged_state_is_left_out_until_that_is_restored(tmp_path: Path) -> None:
    federation = grid(quadratics(3), store=in_folder(tmp_path))
    one = made(ROWS["fedadmm"], lost_state="refuse")
    theta = one.start(federation, to_record(START), 2).arrays
    path, whole = damage(tmp_path, 1)
    found = one.start(federation, theta, 2)
    used = [m["clients-used"] for m in found.train_metrics_clientapp.values()]
    assert used == [2, 2]
    assert one.run.faults == {1: "its acknowledged state is lost"}
    path.write_bytes(whole)
    found = one.start(federation, found.arrays, 1)
    assert found.train_metrics_clientapp[5]["clients-used"] == 3


def test_evaluation_with_a_damaged_state_measures_a_newcomer(tmp_path: Path) -> None:
    federation = grid(quadratics(2), store=in_folder(tmp_path))
    one = made(ROWS["fedadmm"], fraction_train=0.5)
    theta = one.start(federation, to_record(START), 1).arrays
    (client,) = one.ledger.acked
    damage(tmp_path, client)
    one.fraction_evaluate = 1.0
    requests = list(one.configure_evaluate(1, theta, ConfigRecord(), federation))
    metrics = one.aggregate_evaluate(1, federation.send_and_receive(requests))
    assert metrics is not None
    assert metrics["eval-clients-used"] == 2
    assert metrics["own-loss"] == metrics["eval-loss"]  # both clients have but the global model


def test_a_stray_file_among_the_states_is_not_a_state(tmp_path: Path) -> None:
    owner, store = Owner("fedadmm", "0123456789abcdef"), DirectoryStore(tmp_path, 3)
    store.save(owner, 5, {"w": np.ones(2)})
    for name in ("x.safetensors", "-1.safetensors", "5.bak.safetensors", ".safetensors"):
        (tmp_path / "3" / name).write_bytes(b"")
    assert store.rounds(owner) == [5]


# ---- pickle -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_state_files_works_where_pickle_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle is used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
        monkeypatch.setattr(f"_pickle.{name}", forbidden)
    for name in ("torch.load", "torch.save"):
        monkeypatch.setattr(name, forbidden)
    store = in_folder(tmp_path / "states")
    for row in TABLE:
        federation = grid(quadratics(2), store=store)
        best = BestModel(tmp_path / "best.safetensors", "train-loss", smaller=True)
        history = History(tmp_path / "history.jsonl")
        strategy = row.strategy(local=local(), callbacks=[best, history])
        strategy.fraction_evaluate = 1.0
        result = strategy.start(federation, to_record(START), 2)
        assert result.train_metrics_clientapp[2]["clients-used"] == 2
        shutil.rmtree(tmp_path / "states", ignore_errors=True)  # some keep nothing
    with pytest.raises(AssertionError, match="pickle is used"):
        pickle.loads(b"")
