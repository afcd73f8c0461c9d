"""Intervals cover what they say, verdicts are those of their rule, and pages say both."""

from __future__ import annotations

import json

import numpy as np
import pytest

from simulations.lab import board_page
from simulations.lab.studies import Rule, Setting
from simulations.lab.verdicts import Interval, Row, interval, judge

RULES = {
    "new": Rule({"algorithm": "fedadmm"}),
    "old": Rule({"algorithm": "fedavg"}),
    "all": Rule({"algorithm": "fedavg"}, reference=True),
}
ACCURACY = Setting(
    "one", "A paper, Table 1", "final_accuracy", "new", RULES, {"new": 0.9, "old": 0.8},
    {"rounds": 100, "clients": 10}, seeds=(1, 2, 3),
)  # fmt: skip
ROUNDS = ACCURACY._replace(figure="rounds_to_target", published={"new": 10.0, "old": 20.0})
BENCHMARK = ACCURACY._replace(ours="")
VARIANTS = ACCURACY._replace(published={})


def rows(setting: Setting, new: tuple[float, ...], old: tuple[float, ...]) -> list[Row]:
    """Rows with a reference that is best of all, which no verdict looks at."""
    best = 0.0 if setting.figure == "rounds_to_target" else 1.0
    values = {"new": new, "old": old, "all": (best,) * 3}
    return [Row(name, setting.published.get(name), v, "0.1", 1.0) for name, v in values.items()]


@pytest.mark.parametrize("of_next", [False, True])
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.slow
def test_intervals_hold_95_of_100_means_and_further_values(n: int, of_next: bool) -> None:
    rng = np.random.default_rng(n)
    drawn = rng.normal(3.0, 2.0, (4000, n + 1))
    found = [interval(list(values[:n]), of_next=of_next) for values in drawn]
    sought = drawn[:, n] if of_next else np.full(4000, 3.0)
    held = [one.low <= value <= one.high for one, value in zip(found, sought, strict=True)]
    assert np.mean(held) == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / 4000))


def test_one_value_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least two values, got 1"):
        interval([1.0])


@pytest.mark.parametrize(
    ("setting", "new", "old", "verdict"),
    [
        (ACCURACY, (0.89, 0.90, 0.91), (0.80, 0.81, 0.82), "reproduced"),
        (ACCURACY, (0.70, 0.71, 0.72), (0.60, 0.61, 0.62), "order only"),
        (ACCURACY, (0.89, 0.90, 0.91), (0.91, 0.90, 0.89), "not"),
        (ACCURACY, (0.80, 0.81, 0.82), (0.89, 0.90, 0.91), "not"),
        (ACCURACY, (0.80, 0.95, 0.65), (0.70, 0.85, 0.55), "reproduced"),  # seeds in pairs
        (ROUNDS, (9.0, 10.0, 11.0), (20.0, 21.0, 22.0), "reproduced"),
        (ROUNDS, (30.0, 31.0, 32.0), (50.0, 51.0, 52.0), "order only"),
        (ROUNDS, (20.0, 21.0, 22.0), (9.0, 10.0, 11.0), "not"),
        (ACCURACY, (0.89, 0.90), (0.80, 0.81, 0.82), "not run"),
        (ACCURACY, (0.89, 0.90, 0.91), (), "not run"),
        (BENCHMARK, (0.89, 0.90, 0.91), (0.79, 0.80, 0.81), "reproduced"),
        (BENCHMARK, (0.89, 0.90, 0.91), (0.89, 0.90, 0.91), "not"),
        (BENCHMARK, (0.89, 0.90, 0.91), (), "not run"),
        (BENCHMARK._replace(published={}), (0.89, 0.90, 0.91), (0.8, 0.8, 0.8), "no verdict"),
        (BENCHMARK._replace(published={}), (0.89, 0.90, 0.91), (), "not run"),
        (BENCHMARK._replace(seeds=(1,)), (0.89,), (0.8,), "no verdict"),
        (VARIANTS._replace(seeds=(1,)), (0.89,), (0.80,), "no verdict"),
        (VARIANTS, (0.89, 0.90, 0.91), (0.80, 0.81, 0.82), "ahead"),
        (VARIANTS, (0.80, 0.81, 0.82), (0.89, 0.90, 0.91), "behind"),
        (VARIANTS, (0.89, 0.90, 0.91), (0.91, 0.90, 0.89), "level"),
        (
            VARIANTS._replace(figure="rounds_to_target"),
            (9.0, 10.0, 11.0),
            (20.0, 21.0, 22.0),
            "ahead",
        ),
    ],
)
def test_a_verdict_follows_from_the_paired_difference_and_the_published_number(
    setting: Setting, new: tuple[float, ...], old: tuple[float, ...], verdict: str
) -> None:
    assert judge(setting, rows(setting, new, old)).verdict == verdict


def test_a_paper_whose_rule_is_behind_by_its_own_numbers_is_reproduced_where_it_is_behind() -> None:
    setting = ACCURACY._replace(published={"new": 0.8, "old": 0.9})
    behind = rows(setting, (0.79, 0.80, 0.81), (0.89, 0.90, 0.91))
    assert judge(setting, behind).verdict == "reproduced"
    ahead = rows(setting, (0.79, 0.80, 0.81), (0.69, 0.70, 0.71))
    assert judge(setting, ahead).verdict == "not"
    third = {"third": Rule({"algorithm": "fedprox"})}
    setting = setting._replace(
        rules=setting.rules | third, published=setting.published | {"third": 0.7}
    )
    for value, verdict in ((0.7, "reproduced"), (0.8, "not"), (0.85, "not")):
        between = [*behind, Row("third", 0.7, (value - 0.01, value, value + 0.01), "", 0.0)]
        assert judge(setting, between).verdict == verdict


THREE = RULES | {"third": Rule({"algorithm": "fedprox"})}
LEVEL, LOWER = (0.91, 0.90, 0.89), (0.80, 0.81, 0.82)


@pytest.mark.parametrize("published", [{}, ACCURACY.published | {"third": 0.7}])
@pytest.mark.parametrize("old", [LEVEL, LOWER])
def test_while_a_counted_baseline_is_missing_only_what_it_cannot_change_is_said(
    published: dict[str, float], old: tuple[float, ...]
) -> None:
    setting = ACCURACY._replace(rules=THREE, published=published)
    ran = rows(setting, (0.89, 0.90, 0.91), old)
    final = "not" if published and old == LEVEL else "not run"
    assert judge(setting, ran).verdict == final
    behind = rows(setting, LOWER, (0.89, 0.90, 0.91))
    assert judge(setting, behind).verdict == ("not" if published else "behind")


def test_a_baseline_that_the_paper_does_not_have_leaves_the_published_order_alone() -> None:
    setting = ACCURACY._replace(rules=THREE)
    ran = rows(setting, (0.89, 0.90, 0.91), LOWER)
    better = Row("third", None, (0.95, 0.96, 0.97), "0.1", 1.0)
    assert judge(setting, ran).verdict == judge(setting, [*ran, better]).verdict == "reproduced"


def test_a_target_that_is_not_reached_is_written_as_a_bound() -> None:
    setting = ROUNDS._replace(published={"new": 10.0, "old": float("inf")})
    found = judge(setting, rows(setting, (9.0, 10.0, 101.0), (101.0, 101.0, 101.0)))
    text = board_page.markdown([found], "command")
    assert "| **new** | 10 | 9, 10, more than 100 | - | - |" in text
    assert "| old | not reached | more than 100 | - | - |" in text
    assert "Difference of" not in text
    many = setting._replace(seeds=(1, 2, 3, 4, 5))
    values = (9.0, 10.0, 11.0, 12.0, 101.0)
    text = board_page.markdown([judge(many, rows(many, values, (101.0,) * 5))], "command")
    assert "| **new** | 10 | > 28.6 (4 of 5 reached it) | - | - |" in text
    assert "| old | not reached | > 100 | - | - |" in text
    (new, old, *_) = json.loads(json.dumps(board_page.records([found]), allow_nan=False))
    assert (new["published"], new["published not reached"]) == (10.0, False)
    assert (old["published"], old["published not reached"]) == (None, True)


def test_rounds_to_a_target_of_few_seeds_stand_one_by_one() -> None:
    found = judge(ROUNDS, rows(ROUNDS, (9.0, 10.0, 12.0), (20.0, 19.0, 25.0)))
    text = board_page.markdown([found], "command")
    assert "| 9, 10, 12 | - | - |" in text
    assert "| 20, 19, 25 | - | -11, -9, -13 |" in text
    assert "±" not in text
    assert "Difference of" not in text
    five = ROUNDS._replace(seeds=(1, 2, 3, 4, 5))
    found = judge(five, rows(five, (9.0, 10.0, 12.0, 9.0, 11.0), (20.0, 19.0, 25.0, 22.0, 21.0)))
    assert "Difference of" in board_page.markdown([found], "command")


def test_the_difference_is_that_to_the_best_baseline_in_pairs() -> None:
    found = judge(ACCURACY, rows(ACCURACY, (0.8, 0.9, 1.0), (0.7, 0.8, 0.9)))
    assert found.best == "old"
    assert found.difference is not None
    assert found.difference == pytest.approx(Interval(0.1, 0.0), abs=1e-12)


def test_what_cannot_be_run_says_why() -> None:
    setting = ACCURACY._replace(impossible="the data are not at hand")
    found = judge(setting, [])
    assert found.verdict == "not possible here"
    assert "the data are not at hand" in board_page.markdown([found], "command")


def test_settings_with_the_same_rules_stand_side_by_side() -> None:
    first = judge(ACCURACY, rows(ACCURACY, (0.89, 0.90, 0.91), (0.80, 0.81, 0.82)))
    other = ACCURACY._replace(name="two", rules={"new": Rule({"algorithm": "fedadmm"})})
    groups = board_page.alike([first, judge(other, []), first])
    assert [[each.setting.name for each in group] for group in groups] == [["one", "one"], ["two"]]
    table = board_page.side_by_side([first, first])
    half = 100 * interval([0.89, 0.90, 0.91]).half
    assert f"| new | 90.0 ± {half:.1f} (0.1) | 90.0 ± {half:.1f} (0.1) |" in table
    assert "9.0 ± 0.0 to old: *reproduced*" in table
