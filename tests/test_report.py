"""A comparison's report: one file with everything in it, whose tables a browser sorts."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from simulations.config import RunConfig
from simulations.lab.report import write_report
from simulations.rules import configs_for

TABLE = """| algorithm | final accuracy | settings |
|---|---|---|
| fedavg | 9.50 ± 1.00 % | lr 0.1 |
| fedadmm | 93.00 ± 2.00 % | lr 0.1 <rho=0.1> |
| fedprox | - | lr 0.1 |

Mean ± standard deviation over seeds 1, 2.
"""
DRAWN = '<?xml version="1.0"?><svg id="a"><use xlink:href="#b"/><g clip-path="url(#b)"/></svg>'


@pytest.fixture
def report(tmp_path: Path) -> Path:
    (tmp_path / "table.md").write_text(TABLE)
    for name in ("curves", "partition"):
        (tmp_path / f"{name}.svg").write_text(DRAWN)
    configs = configs_for(["fedavg", "fedadmm"], ["rho=0.1"], {"rounds": 3}, tmp_path)
    runs: list[RunConfig] = [replace(c, seed=seed) for c in configs for seed in (1, 2)]
    write_report(tmp_path, runs, "python -m simulations.lab.compare --rounds 3")
    return tmp_path / "report.html"


def test_the_report_holds_tables_pictures_settings_and_the_command(report: Path) -> None:
    text = report.read_text()
    assert text.count("<svg") == 2
    ids = re.findall(r'<svg [^>]*\bid="([^"]+)"', text)
    assert "<title>FedAvg, FedADMM on " in text
    assert text.count("<figcaption>") == 2
    assert ids == ["c-a", "p-a"]
    assert all(f'href="#{name}-b"' in text and f"url(#{name}-b)" in text for name in "cp")
    assert "lr 0.1 &lt;rho=0.1&gt;" in text
    today = date.today().isoformat()
    assert f"<p>{today}. Seeds 1, 2. fl-strategies {version('fl-strategies')}, flwr " in text
    assert re.search(r"<td>fedadmm</td>\s*<td>rho=0.1 eta=1.0 ", text)
    assert re.search(r"<td>fedavg</td>\s*<td>weights=samples</td>", text)
    assert "rounds = 3" in text
    assert "python -m simulations.lab.compare --rounds 3" in text
    assert "Hyperparameters" not in text


def test_others_may_read_what_they_may_read_of_any_file(report: Path, tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    assert report.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_the_report_asks_for_no_other_file(report: Path) -> None:
    named = re.findall(r'(?:src|href)="([^"]*)"', report.read_text())
    assert all(name.startswith(("#", "data:")) for name in named)


@pytest.mark.slow
def test_a_click_on_a_head_sorts_the_table_by_numbers(report: Path) -> None:
    api: Any = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        page = browser.new_page()
        heard: list[str] = []
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.goto(report.as_uri())

        def first_column() -> list[str]:
            cells = page.locator("table").first.locator("tbody tr td:first-child")
            found: list[str] = cells.all_text_contents()
            return found

        head = page.locator("th", has_text="final accuracy")
        head.click()
        assert first_column() == ["fedavg", "fedadmm", "fedprox"]
        head.click()
        assert first_column() == ["fedprox", "fedadmm", "fedavg"]
        page.locator("th", has_text="algorithm").first.click()
        assert first_column() == ["fedadmm", "fedavg", "fedprox"]
        browser.close()
    assert heard == []
