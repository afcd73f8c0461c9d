"""Data of large populations: drawn when they are needed, and the same as those drawn at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulations import data, drawn, generated, problems
from simulations.config import RunConfig
from simulations.experiment import run_in_process

CLIENTS = 7


def made(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> generated.Dataset:
    """Return a data set of which so many clients, at most, are drawn at once."""
    monkeypatch.setattr(drawn, "AT_ONCE", at_once)
    return generated.GENERATED[name](clients=CLIENTS)


@pytest.mark.parametrize("name", generated.GENERATED)
def test_any_rows_of_drawn_data_are_those_of_the_data_drawn_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, lazy = (made(name, at_once, monkeypatch) for at_once in (CLIENTS, 2))
    assert isinstance(lazy.x, drawn.Drawn)
    assert isinstance(lazy.owner, drawn.Owners)
    rng = np.random.default_rng(0)
    for field in ("x", "y", "owner", "test_x", "test_y", "test_owner"):
        array, like = getattr(whole, field), getattr(lazy, field)
        assert len(like) == len(array)
        np.testing.assert_array_equal(np.asarray(like), array)
        for rows in (slice(3, 90), rng.integers(0, len(array), 40), np.arange(5)):
            found = like[rows]
            np.testing.assert_array_equal(found, array[rows])
            assert found.dtype == array.dtype
        if field.endswith("x"):
            assert (like.shape, like.dtype, like.size) == (array.shape, array.dtype, array.size)
    for row in (0, 100, len(whole.x) - 1):
        np.testing.assert_array_equal(lazy.tests_of(row), whole.tests_of(row))


@pytest.mark.parametrize(
    "keys",
    [
        {"dataset": "synthetic", "fraction-evaluate": 1.0},
        {"dataset": "fedpd-strong", "dataset-params": "samples=20 test_samples=5"},
        {"dataset": "synthetic", "local-test": 0.25},
        {"dataset": "synthetic", "pooled": True, "local-test": 0.25},
        {"dataset": "synthetic", "partition": "iid"},
        {"dataset": "synthetic", "stack": "2"},
    ],
    ids=str,
)
def test_a_run_on_drawn_data_is_the_run_on_the_same_data_drawn_at_once(
    keys: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    for at_once in (CLIENTS, 2):
        monkeypatch.setattr(drawn, "AT_ONCE", at_once)
        own = (problems._dataset, problems._parts, problems._whole, problems._pooled)
        for cached in (data._made, *own):
            cached.cache_clear()
        config = RunConfig.parse(
            {
                "algorithm": "fedadmm",
                "dataset-params": "sizes=power-law" if keys["dataset"] == "synthetic" else "",
                "clients": CLIENTS,
                "rounds": 2,
                "output": str(tmp_path / f"{at_once}"),
            }
            | keys
        )
        models.append(run_in_process(config, quiet=True).model_sha256)
    assert models[0] == models[1]


def test_the_server_tests_on_the_same_clients_of_a_large_population(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lazy = made("synthetic", 3, monkeypatch)
    assert isinstance(lazy.test_owner, drawn.Owners)
    rows = lazy.test_owner.sample()
    tested = np.unique(lazy.test_owner[rows])
    assert len(tested) == 3
    assert len(rows) == sum(len(lazy.test_owner.of(client)) for client in tested)
    np.testing.assert_array_equal(rows, lazy.test_owner.sample())


def test_a_million_clients_are_there_at_once() -> None:
    many = generated.synthetic(clients=10**6)
    x, y = many.samples(np.array([10**7]))
    assert (x.shape, y.shape) == ((1, 60), (1,))
    assert many.x.shape[0] == len(many.y) > 3e7
