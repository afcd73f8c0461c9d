"""A client, its state by round, and its stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from clients import Owner

OWNER = Owner("fedadmm", "0123456789abcdef")
CLIENT = 3


def version(number: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(int(number))
    return {
        "w": rng.normal(size=6).astype(np.float32),
        "y": rng.normal(size=6),
        "rho": np.asarray(number / 7),
        "nonce": np.frombuffer(b"abc123", np.uint8),
    }


def assert_version(fields: Any, number: int) -> None:
    assert fields is not None
    assert fields.keys() == version(number).keys()
    for name, value in version(number).items():
        np.testing.assert_array_equal(fields[name], value)
        assert fields[name].dtype == value.dtype
        assert fields[name].shape == value.shape
