"""The attacks of SECURITY.md's table: what attackers upload, and what a run then comes to."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from simulations.lab.attacks import (
    ATTACKERS,
    ATTACKS,
    CLIENTS,
    PARTS,
    accuracy,
    packed,
    unpack_into,
)

SECURITY = Path(__file__).parents[1] / "SECURITY.md"


def test_attackers_upload_what_the_names_say() -> None:
    rng = np.random.default_rng(0)
    own, honest = rng.normal(size=(ATTACKERS, 3)), rng.normal(2.0, 1.0, (9, 3))
    np.testing.assert_array_equal(ATTACKS["none"](own, honest), own)
    assert (ATTACKS["large"](own, honest) == 1e30).all()
    np.testing.assert_array_equal(ATTACKS["sign flip"](own, honest), -5.0 * own)
    mean, deviation = honest.mean(axis=0), honest.std(axis=0)
    for name, change in (("ALIE", mean - 1.5 * deviation), ("inner product", -0.5 * mean)):
        np.testing.assert_allclose(ATTACKS[name](own, honest), [change] * ATTACKERS)


def test_a_records_arrays_are_replaced_by_a_vectors() -> None:
    arrays = {"w": np.ones((2, 2), np.float32), "b": np.zeros(3, np.float32)}
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    unpack_into(record, packed(record) + np.arange(7))
    assert record["w"].numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert record["b"].numpy().tolist() == [4.0, 5.0, 6.0]
    assert record["b"].numpy().dtype == np.float32


@pytest.mark.parametrize(("part", "survives"), [("mean", False), ("median", True)])
@pytest.mark.sampled("median")
def test_large_uploads_destroy_a_mean_and_not_a_median(part: str, survives: bool) -> None:
    found = accuracy(PARTS[part], ATTACKS["large"], seed=1, rounds=3)
    assert (found > 0.5) is survives


def test_the_table_has_every_attack_and_part() -> None:
    text = SECURITY.read_text()
    assert f"{ATTACKERS} of {CLIENTS} clients" in text
    (head,) = re.findall(r"^\| attack \|(.*)\|$", text, re.MULTILINE)
    assert [name.strip() for name in head.split("|")] == [*PARTS]
    for attack in ATTACKS:
        assert len(re.findall(rf"^\| {attack} \|", text, re.MULTILINE)) == 1
