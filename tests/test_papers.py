"""The Board's page is made from its data; a row leads to its settings, a *not* has a cause."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from simulations.lab import papers, published
from simulations.lab.front import NOTES, PAGES
from simulations.lab.measured import KINDS
from simulations.lab.verdicts import Row, judge

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


def test_the_page_is_made_from_its_data_and_is_short() -> None:
    assert papers.page(BOARD["papers"], BOARD["records"]) == TEXT
    assert papers.written(BOARD["papers"], BOARD["records"]) == (PAGES / "board.json").read_text()
    assert sum(word != "|" for word in TEXT.split()) <= 2500
    assert len(papers.HEADS) <= 7


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.get("setting", row.get("cell")))
def test_a_row_leads_to_its_settings_and_a_not_has_a_cause(row: dict[str, str]) -> None:
    file, _, anchor = row["note"].partition("#")
    section = anchors((NOTES / file).read_text())[anchor]
    cells = papers.cells_of(row, RECORDS)
    if cells.get("ours"):
        assert "python -m simulations.lab." in section
    if cells["verdict"] == "*not*":
        assert row["cause"]


def test_every_setting_of_the_data_has_a_row_and_every_note_is_linked() -> None:
    assert {row["setting"] for row in ROWS if "setting" in row} == RECORDS.keys()
    notes = {path.name for path in NOTES.glob("*.md")}
    assert notes == set(re.findall(r"lab/notes/([\w-]+\.md)", TEXT))


@pytest.mark.parametrize("name", [n for n, of in RECORDS.items() if of[0]["values"]])
def test_a_verdict_is_that_of_the_values(name: str) -> None:
    setting = next(one for study in published.BOARD.values() for one in study if one.name == name)
    rows = [
        Row(one["rule"], one["published"], tuple(one["values"]), "", 0.0) for one in RECORDS[name]
    ]
    assert {one["verdict"] for one in RECORDS[name]} == {judge(setting, rows).verdict}


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "setting" in row], ids=lambda row: row["setting"]
)
def test_a_rows_numbers_are_those_of_its_record(row: dict[str, str]) -> None:
    cells = papers.cells_of(row, RECORDS)
    (ours,) = [record for record in RECORDS[row["setting"]] if record["paper's"]]
    unit = KINDS[ours["figure"]].unit
    assert f"({len(ours['seeds'])})" in cells["ours"]
    if ours["missed"]:
        assert cells["ours"].startswith("at least ")
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
    assert "*order only* | uniform weights" in (tmp_path / "board.md").read_text()
