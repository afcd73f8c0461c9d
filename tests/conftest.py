"""Settings of every test: no network, one thread; and the folder of real data sets."""

from __future__ import annotations

import os
from pathlib import Path

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
}

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def datasets_folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of data sets (``FL_DATA``, else the shared one) and set ``FL_DATA``."""
    default = Path(__file__).parents[2] / "shared/datasets"
    folder = Path(os.environ.get("FL_DATA", default)).absolute()
    monkeypatch.setenv("FL_DATA", str(folder))
    return folder
