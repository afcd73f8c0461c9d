"""Callbacks that show a run in TensorBoard, Weights & Biases or MLflow, round by round.

Each logs the numbers of ``RoundInfo.metrics``. The extra ``trackers`` of this package installs the
libraries.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from fl_strategies.server.callbacks import RoundInfo, Rows


class TensorBoard:
    """Writes each round's metrics, as scalars by round, under ``folder``.

    ``tensorboard --logdir FOLDER`` shows them. Each round is written to disk at its end. After a
    run is resumed, rounds that it wrote after its last checkpoint are no longer shown. Raises
    ``ImportError`` if TensorBoard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._writer_of = _library("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None

    def __call__(self, info: RoundInfo) -> None:
        self._writer = self._writer or self._writer_of(str(self.folder))
        for name, value in info.metrics.items():
            self._writer.add_scalar(name, value, info.server_round)
        self._writer.flush()

    def recall(self, rows: Rows) -> None:
        """Continue after the earlier rounds."""
        self._writer = self._writer_of(str(self.folder), purge_step=max(rows, default=0) + 1)

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Logs each round's metrics, by round, to Weights & Biases.

    Takes the arguments of ``wandb.init`` (``project="..."``, ``mode="offline"`` ...), which begins
    the run ``run``; :meth:`close` ends it. Raises ``ImportError`` if wandb is not installed.
    """

    def __init__(self, **init: Any) -> None:
        self.run = _library("wandb").init(**init)

    def __call__(self, info: RoundInfo) -> None:
        self.run.log(dict(info.metrics), step=info.server_round)

    def close(self) -> None:
        """End the run."""
        self.run.finish()


class MLflow:
    """Logs each round's metrics, by round, to the tracking server or folder ``uri`` of MLflow.

    Further arguments are those of ``MlflowClient.create_run``: ``run_name="..."``, ``tags={...}``.
    Without ``uri`` it is MLflow's own (``MLFLOW_TRACKING_URI``). Raises ``ImportError`` if MLflow
    is not installed.
    """

    def __init__(self, experiment: str = "Default", *, uri: str | None = None, **run: Any) -> None:
        self._client = _library("mlflow").MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        self.run_id: str = self._client.create_run(number, **run).info.run_id

    def __call__(self, info: RoundInfo) -> None:
        for name, value in info.metrics.items():
            self._client.log_metric(self.run_id, name, value, step=info.server_round)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self.run_id)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}: pip install tensorboard wandb mlflow-skinny") from None
