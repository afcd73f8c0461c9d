"""Settings of every test: no network, one thread, no curves; and the folder of real data sets.

It imports nothing large: the process that hands out the tests to others reads it too.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

import pytest


@pytest.fixture(autouse=True)
def flowers_log_level() -> Iterator[None]:
    """Undo what a command did to the level of Flower's log."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out a run's figure, which takes longer than a small run, but for the mark `curves`."""
    experiment = sys.modules.get("simulations.experiment")
    if experiment and not request.node.get_closest_marker("curves"):
        monkeypatch.setattr(experiment, "draw_curves", lambda *_: None)


@pytest.fixture(scope="session")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few random images under the names of the real data sets."""
    return stand_in(tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def datasets_folder(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, few_images: Path
) -> Path:
    """Return the folder of data sets (``FL_DATA``, else the shared one) and set ``FL_DATA``.

    It is the one of ``few_images`` where there is neither, and for the parameter ``"few"``.
    """
    default = Path(__file__).parents[2] / "shared/datasets"
    folder = Path(os.environ.get("FL_DATA", default)).absolute()
    if not folder.is_dir() or getattr(request, "param", "all") == "few":
        folder = few_images
    monkeypatch.setenv("FL_DATA", str(folder))
    return folder


def stand_in(folder: Path) -> Path:
    """Write 400 training and 50 test images under the names of the real data sets."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet
    from tiny_data import encoded

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
