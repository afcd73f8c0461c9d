"""The Board's page is made from its data; a row leads to its settings, a *not* has a cause."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from board_settings import by_name

from simulations.lab import papers
from simulations.lab.measured import KINDS
from simulations.lab.papers import PAGES
from simulations.lab.verdicts import Row, judge

NOTES = Path(papers.__file__).with_name("notes")
BOARD = json.loads((PAGES / "board.json").read_text())
TEXT = (PAGES / "board.md").read_text()
ROWS = [row for paper in BOARD["papers"] for row in paper["rows"]]
RECORDS: dict[str, list[dict[str, Any]]] = {}
for one in BOARD["records"]:
    RECORDS.setdefault(one["setting"], []).append(one)


def anchors(text: str) -> dict[str, str]:
    """Return the section below each heading, by the address that readers of Markdown give it."""
    parts = re.split(r"^(#+ .*)$", re.sub(r"```.*?```", fenced, text, flags=re.DOTALL), flags=re.M)
    names = [re.sub(r"[^\w\- ]", "", head.lstrip("# ").lower()) for head in parts[1::2]]
    return {name.replace(" ", "-"): body for name, body in zip(names, parts[2::2], strict=True)}


def fenced(block: re.Match[str]) -> str:
    return block[0].replace("\n#", "\n ")


LINES = [
    (name, papers.cells_of({"setting": name, "against": row.get("against", "")}, RECORDS))
    for row in ROWS
    for name in [*row.get("settings", {}), *[row[key] for key in row if key == "setting"]]
]
"""The settings of all rows, each with its cells."""


def test_the_page_is_made_from_its_data_and_is_short() -> None:
    assert papers.page(BOARD["papers"], BOARD["records"]) == TEXT
    assert papers.written(BOARD["papers"], BOARD["records"]) == (PAGES / "board.json").read_text()
    assert len(TEXT.split()) <= 2600
    assert len(papers.HEADS) <= 7


def test_a_row_leads_to_its_settings_and_a_not_has_a_cause() -> None:
    for row in ROWS:
        file, _, anchor = row["note"].partition("#")
        section = anchors((NOTES / file).read_text())[anchor]
        cells = papers.cells_of(row, RECORDS)
        assert not cells.get("ours") or "python -m simulations.lab." in section, row
        assert cells["verdict"] != "*not*" or row["cause"], row


def test_every_setting_of_the_data_has_a_row_and_every_note_is_linked() -> None:
    assert sorted(name for name, _ in LINES) == sorted(RECORDS)
    notes = {path.name for path in NOTES.glob("*.md")}
    assert notes == set(re.findall(r"lab/notes/([\w-]+\.md)", TEXT))


def test_a_record_is_of_its_setting_and_a_verdict_is_that_of_the_values() -> None:
    for name, records in RECORDS.items():
        setting = by_name()[name]
        for record in records:
            assert (record["where"], record["figure"]) == (setting.where, setting.figure)
            assert record["published"] == setting.published.get(record["rule"])
            assert record["paper's"] == (record["rule"] == setting.ours)
        if records[0]["values"]:
            rows = [
                Row(one["rule"], one["published"], tuple(one["values"]), "", 0.0) for one in records
            ]
            assert {one["verdict"] for one in records} == {judge(setting, rows).verdict}, name


def test_a_rows_numbers_are_those_of_its_record() -> None:
    for name, cells in LINES:
        (ours,) = [record for record in RECORDS[name] if record["paper's"]]
        unit = KINDS[ours["figure"]].unit
        assert f"({len(ours['seeds'])})" in cells["ours"]
        if ours["figure"] == "rounds_to_target" and len(ours["values"]) < 5:
            horizon = by_name()[name].horizon
            rounds = [str(int(min(value, horizon))) for value in ours["values"]]
            rounds = rounds[:1] if ours["missed"] == len(rounds) else rounds
            assert re.findall(r"\d+", cells["ours"]) == [*rounds, str(len(ours["seeds"]))]
            assert "±" not in cells.get("difference", "")
        else:
            low, high = ours["interval"]
            assert f"[{unit * low:.1f}, {unit * high:.1f}]" in cells["ours"]
        if ours["published"] is not None:
            stated = float(cells["published"].split(";")[0])
            assert stated == pytest.approx(unit * ours["published"], abs=0.0501)


@pytest.mark.slow
def test_a_study_takes_the_place_of_its_settings_and_no_other(tmp_path: Path) -> None:
    name = "fedbc-authors-E1-set1"
    later = [{**record, "verdict": "order only"} for record in RECORDS[name]]
    study = tmp_path / "study"
    study.mkdir()
    (study / "board.json").write_text(json.dumps(later))
    papers.main(["--add", str(study), "--output", str(tmp_path)])
    found = json.loads((tmp_path / "board.json").read_text())
    assert found["papers"] == BOARD["papers"]
    others = [record for record in BOARD["records"] if record["setting"] != name]
    assert found["records"] == others + later
    assert (tmp_path / "board.md").read_text() == papers.page(BOARD["papers"], found["records"])
    assert "*order only*<br>*order only*<br>*reproduced*" in (tmp_path / "board.md").read_text()


def test_a_row_of_several_settings_has_a_line_for_each() -> None:
    names = {"fedbc-authors-E1-set1": "E = 1", "fedbc-authors-E50-set1": "E = 50"}
    cells = papers.cells_of({"settings": names, "note": "", "cause": "why"}, RECORDS)
    each = [papers.cells_of({"setting": name}, RECORDS) for name in names]
    assert cells["cell"] == "E = 1<br>E = 50"
    assert cells["verdict"] == "*reproduced*<br>*not*"
    for column in ("published", "ours", "difference"):
        assert cells[column].split("<br>") == [one[column] for one in each]


def test_the_first_sentence_counts_the_verdicts_of_all_lines() -> None:
    settings = {name: records[0]["verdict"] for name, records in RECORDS.items()}
    named = [row for row in ROWS if not {"setting", "settings"} & row.keys()]
    words = [row["verdict"].strip("*") for row in named for _ in row["cell"].split("<br>")]
    first = TEXT.split("\n\n")[1]
    for verdict in {*settings.values(), *words} - {"the order, on another model"}:
        count = [*settings.values(), *words].count(verdict)
        assert f"{count} *{verdict}*" in first or verdict.startswith("the order"), verdict
    counted = sum(map(int, re.findall(r"(\d+) (?:\*|show)", first)))
    assert counted == len(settings) + len(words)
