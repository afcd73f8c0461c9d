"""Every algorithm computes what it did before: the rows of ``trajectories.json``."""

from __future__ import annotations

import pytest
from trajectories import ROWS, RULES, difference, recorded, run

from fl_strategies import STRATEGIES

RECORDED = recorded()
QUICK = [name for name, row in ROWS.items() if row.quick]
"""One of each mechanism; ``python tests/trajectories.py`` compares all, as a release check does."""


def test_every_algorithm_has_its_rows_and_no_row_is_left_over() -> None:
    assert {*RULES} == {*STRATEGIES}
    assert [*RECORDED] == [*ROWS]


@pytest.mark.parametrize("name", QUICK)
def test_a_trajectory_is_the_recorded_one(name: str) -> None:
    assert not difference(ROWS[name], RECORDED[name], run(ROWS[name]))


@pytest.mark.parametrize("name", ["fedavg/sgd", "fedavg/lbfgs", "fedavg/sgd+evaluated"])
def test_each_number_counts(name: str) -> None:
    row, wanted = ROWS[name], RECORDED[name]
    assert not difference(row, wanted, wanted)
    for what, numbers in wanted.items():
        for place, number in enumerate(numbers):
            other = [*numbers]
            other[place] += 2e-9 * max(1.0, abs(number))
            said = difference(row, wanted, wanted | {what: other})
            assert said.startswith(f"{row}, {what}: wanted {number!r}, got")
