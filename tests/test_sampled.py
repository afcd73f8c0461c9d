"""Law of the mark ``sampled``: it leaves every test a quick case, and names cases alone."""

from __future__ import annotations

import pytest
from conftest import NAMED


def test_a_sampled_test_has_the_quick_cases_that_its_mark_names(
    pytestconfig: pytest.Config,
) -> None:
    marks = pytestconfig.stash[NAMED].items()
    assert [test for test, (_, cases) in marks if not cases] == []
    assert {test: named - cases for test, (named, cases) in marks if named - cases} == {}
