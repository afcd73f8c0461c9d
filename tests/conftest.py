"""Settings of every test: no network, one thread; and the folder of real data sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
}

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from flwr.common.logger import FLOWER_LOGGER
from tiny_data import encoded

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def flowers_log_level() -> Iterator[None]:
    """Undo what a command did to the level of Flower's log."""
    level = FLOWER_LOGGER.level
    yield
    FLOWER_LOGGER.setLevel(level)


@pytest.fixture
def datasets_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the folder of data sets (``FL_DATA``, else the shared one) and set ``FL_DATA``.

    Where there is neither, a few random images stand in under the real names.
    """
    default = Path(__file__).parents[2] / "shared/datasets"
    folder = Path(os.environ.get("FL_DATA", default)).absolute()
    if not folder.is_dir():
        folder = stand_in(tmp_path_factory.mktemp("datasets"))
    monkeypatch.setenv("FL_DATA", str(folder))
    return folder


def stand_in(folder: Path) -> Path:
    """Write 400 training and 50 test images under the names of the real data sets."""
    rng = np.random.default_rng(0)
    for name, column, shape in (
        ("mnist", "image", (28, 28)),
        ("fashion_mnist", "image", (28, 28)),
        ("cifar10", "img", (32, 32, 3)),
    ):
        (folder / name).mkdir()
        for split, count in (("train", 400), ("test", 50)):
            images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
            table = pa.table({column: encoded(images), "label": np.arange(count) % 10})
            pa.parquet.write_table(table, folder / name / f"{split}.parquet")
    return folder
