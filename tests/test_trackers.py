"""TensorBoard, Weights & Biases and MLflow hold what the history holds."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
from laws import START, local
from problems import grid, quadratics, to_record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_strategies import Checkpoints, FedAvg, RoundInfo
from fl_strategies.trackers import MLflow, TensorBoard, WandB


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def stop_after_three(info: RoundInfo) -> None:
    if info.server_round == 3:
        raise KeyboardInterrupt


def test_tensorboard_has_every_metric_of_every_round_once_also_of_a_resumed_run(
    tmp_path: Path,
) -> None:
    for others in ([stop_after_three], []):
        board = TensorBoard(tmp_path / "board")
        strategy = FedAvg(
            local=local(),
            fraction_evaluate=0.0,
            callbacks=[board, *others],
            checkpoints=Checkpoints(tmp_path / "checkpoints", every=2),
        )
        try:
            result = strategy.start(grid(quadratics(3)), to_record(START), 5, resume=True)
        except KeyboardInterrupt:
            assert len(scalars(tmp_path / "board", "train-loss")) == 3
        board.close()
    rows = result.train_metrics_clientapp
    for name in rows[1]:
        found = scalars(tmp_path / "board", name)
        assert [step for step, _ in found] == [1, 2, 3, 4, 5]
        for step, value in found:
            if name != "seconds":
                assert value == pytest.approx(rows[step][name], rel=1e-6)


@pytest.mark.slow
def test_weights_and_biases_offline_has_every_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WandB(mode="offline", dir=str(tmp_path), project="test")
    strategy = FedAvg(local=local(), fraction_evaluate=0.0, callbacks=[tracker])
    result = strategy.start(grid(quadratics(3)), to_record(START), 3)
    tracker.close()
    wandb.teardown()  # or its service lives as long as this process
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = logged(written)
    assert [row.pop("_step") for row in rows] == [1, 2, 3]
    for number, row in enumerate(rows, start=1):
        assert {name: row[name] for name in result.train_metrics_clientapp[number]} == dict(
            result.train_metrics_clientapp[number]
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own calls of SQLAlchemy
@pytest.mark.slow
def test_mlflow_has_every_metric_of_every_round(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = MLflow("digits", uri=uri, run_name="first")
    strategy = FedAvg(local=local(), fraction_evaluate=0.0, callbacks=[tracker])
    rows = strategy.start(grid(quadratics(3)), to_record(START), 3).train_metrics_clientapp
    tracker.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    assert client.get_run(tracker.run_id).info.status == "FINISHED"
    for name in rows[1]:
        found = client.get_metric_history(tracker.run_id, name)
        assert {each.step: each.value for each in found} == {n: rows[n][name] for n in rows}


def logged(path: Path) -> list[dict[str, float]]:
    """Return the rows of metrics in the file of an offline run: a log of LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, rows, parts, at = path.read_bytes(), [], b"", 7
    while at < len(content):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of the block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            if record.HasField("history"):
                rows.append(
                    {
                        item.key or item.nested_key[0]: json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
    return rows


@pytest.mark.parametrize(
    ("library", "tracker"),
    [("torch.utils.tensorboard", TensorBoard), ("wandb", WandB), ("mlflow", MLflow)],
)
def test_a_library_that_is_not_installed_is_named(
    library: str, tracker: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match="pip install tensorboard wandb"):
        tracker(**{"folder": tmp_path} if tracker is TensorBoard else {})
