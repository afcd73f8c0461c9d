"""The check of the site by a browser names each fault, and no other."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FAULTS = {
    "<script>nothing()</script>": "nothing is not defined",
    '<script src="away.js"></script>': "not loaded",
    '<script src="https://example.org/a.js"></script>': "https://example.org/a.js",
    '<img src="away.png">': "image not shown",
    '<a href="away.html">there</a>': "dead link",
    '<a href="search.html#away">there</a>': "dead link",
    '<span class="math">\\(x\\)</span>': "formula not drawn",
    '<img src="data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7">': (
        "image without a text"
    ),
    '<div style="width: 900px">wide</div>': "pixels wide",
    f'<div style="overflow: hidden"><table><td>{"wide" * 90}</table></div>': (
        'too wide in a window of 390 pixels: table "wide'
    ),
    f'<pre style="overflow: auto">{"x = 1; " * 90}</pre>': 'of 1280 pixels: pre "x = 1; ',
    '<table style="table-layout: fixed; width: 9em; overflow-wrap: anywhere">'
    "<td>a</td><td><code>per_fedavg_of_a_name</code></td></table>": (
        "broken in a window of 390 pixels: per_fedavg_of_a_name"
    ),
    '<table style="table-layout: fixed; width: 5em">'
    "<td><code>fedbcd-i-async</code></td><td>a</td></table>": (
        "broken in a window of 1280 pixels: fedbcd-i-async"
    ),
}


@pytest.fixture
def browse() -> Any:
    pytest.importorskip("playwright")
    sys.path.insert(0, str(ROOT / "notebooks"))
    try:
        return importlib.import_module("browse")
    finally:
        sys.path.pop(0)


def test_all_pages_need_a_browser(browse: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(browse, "BROWSERS", ())
    assert browse.main(tmp_path, "all") == 1
    assert browse.main(tmp_path, "10") == 0


@pytest.mark.slow
def test_each_fault_of_a_page_is_named(
    browse: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(map(shutil.which, browse.BROWSERS)):
        pytest.skip("no Chromium")
    searched = {"FedADMM": "fedadmm", "mixed precision": "pages/questions"}
    monkeypatch.setattr(browse, "SEARCHED", searched)
    head = '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    links = "".join(f'<li><a href="{page}.html">it</a></li>' for page in searched.values())
    for page in searched.values():
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / f"{page}.html").write_text(head)
    (tmp_path / "search.html").write_text(f'{head}<ul id="search-results">{links}</ul>')
    (tmp_path / "llms.txt").write_text("- [it](search.html)")
    (tmp_path / "index.html").write_text("<script>nothing()</script>")  # it only leads elsewhere
    assert browse.main(tmp_path, "all") == 0
    assert capsys.readouterr().out == "3 pages opened, 0 faults\n"
    for number, fault in enumerate(FAULTS):
        (tmp_path / f"{number}.html").write_text(head + fault)
    (tmp_path / "llms.txt").write_text("- [it](away.html)")
    links = '<li><a href="search.html">it</a></li>'
    (tmp_path / "search.html").write_text(f'{head}<ul id="search-results">{links}</ul>')
    assert browse.main(tmp_path, "all") == 1
    said = capsys.readouterr().out.splitlines()
    for number, words in enumerate(FAULTS.values()):
        assert any(line.startswith(f"{number}.html: ") and words in line for line in said), words
    assert "llms.txt: dead link: away.html" in said
    assert any(line.startswith("search.html: ") for line in said)
    assert browse.main(tmp_path, "6") == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("6 pages opened, ")
