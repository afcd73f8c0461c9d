"""The Board's figure: its lines are the published numbers of settings that ran."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from simulations.lab import forest
from simulations.lab.board_page import records
from simulations.lab.papers import PAGES
from simulations.lab.studies import Rule, Setting
from simulations.lab.verdicts import Row, judge

PAGE = json.loads((PAGES / "board.json").read_text())["records"]
ROUNDS = Setting(
    "rounds", "One", "rounds_to_target", "new",
    {"new": Rule({"algorithm": "fedavg"}), "old": Rule({"algorithm": "fedprox"})},
    {"new": 3.0, "old": 9.0}, {"rounds": 30}, seeds=(1, 2),
)  # fmt: skip


@pytest.mark.slow
def test_the_pages_figure_is_drawn_from_its_records(tmp_path: Path) -> None:
    forest.draw(PAGE, tmp_path / "board.png")
    folders = (tmp_path, PAGES)
    drawn = [re.findall("<!-- (.*?) -->", (one / "board.svg").read_text()) for one in folders]
    assert drawn[0] == drawn[1]


def test_a_line_is_a_rule_of_a_paper_with_a_published_number_and_runs(tmp_path: Path) -> None:
    rows = [
        Row("new", 3.0, (5.0, 31.0), "0.1", 1.0, seeds=(1, 2)),
        Row("old", 9.0, (8.0, 9.0), "0.1", 1.0, seeds=(1, 2)),
    ]
    made = records([judge(ROUNDS, rows)])
    (line,) = forest.lines(made)
    assert (line["rule"], line["missed"], line["values"]) == ("new", 1, [5.0, 31.0])
    forest.draw(made, tmp_path / "board.png")
    text = (tmp_path / "board.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in ("One", "not", "rounds to the target"))
