"""A comparison as one page: ``report.html``, one file that needs neither other files nor a network.

It holds the table, which a click on a column sorts; the curves and the partition as vectors; the
settings in which the runs differ and those that all share; and the command. ``compare`` writes it
next to the tables and figures from which it is made.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fl_strategies.core.files import write_atomically
from simulations.config import RunConfig
from simulations.figures import title as title_of
from simulations.tables import grid

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid #8888; padding: .3rem .6rem; text-align: left; }}
th {{ cursor: pointer; white-space: nowrap; }}
th[aria-sort=ascending]::after {{ content: " \\25b2"; }}
th[aria-sort=descending]::after {{ content: " \\25bc"; }}
figure {{ background: white; color: black; margin: 1rem 0; }}
figcaption {{ padding: .3rem .6rem; }}
svg {{ max-width: 100%; height: auto; }}
pre {{ overflow-x: auto; padding: .6rem; border: 1px solid #8888; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
<script>
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => {{
  const table = head.closest("table"), rows = [...table.tBodies[0].rows], at = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => row.cells[at].textContent, number = row => parseFloat(value(row));
  rows.sort((a, b) => isNaN(number(a)) || isNaN(number(b))
    ? isNaN(number(a)) - isNaN(number(b)) || value(a).localeCompare(value(b))
    : number(a) - number(b));
  table.tBodies[0].append(...(down ? rows.reverse() : rows));
}});
</script>
</body>
</html>
"""
PLACED = ("output", "state_dir", "seed")
"""Settings that differ between runs by where and with which seed they ran."""


def write_report(folder: Path, configs: Sequence[RunConfig], command: str = "") -> None:
    """Write ``report.html`` from the tables and figures in ``folder``, of runs of ``configs``."""
    table = (folder / "table.md").read_text()
    parts = [
        ("Results", from_markdown(table)),
        ("Curves", picture(folder / "curves.svg", "c", "Each algorithm's mean over its seeds")),
        (
            "Partition",
            picture(folder / "partition.svg", "p", "Samples of each class at each client"),
        ),
        ("Settings of each algorithm", from_markdown(differing(configs))),
        ("Settings of all", f"<pre>{html.escape(common(configs))}</pre>"),
    ]
    if (folder / "tuning.md").exists():
        parts.insert(3, ("Hyperparameters", from_markdown((folder / "tuning.md").read_text())))
    if command:
        parts.append(("Command", f"<pre>{html.escape(command)}</pre>"))
    body = "\n".join(f"<h2>{html.escape(head)}</h2>\n{text}" for head, text in parts if text)
    rules = ", ".join(dict.fromkeys(title_of(config.rule) for config in configs))
    first = configs[0]
    title = html.escape(f"{rules} on {first.dataset}, {first.clients:,} clients")
    write_atomically(folder / "report.html", PAGE.format(title=title, body=body).encode())


def from_markdown(text: str) -> str:
    """Return Markdown as HTML: tables and paragraphs, as a comparison writes no other Markdown."""
    blocks = []
    if not text:
        return ""
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        if not lines[0].startswith("|"):
            blocks.append(f"<p>{html.escape(block)}</p>")
            continue
        head, _, *rows = (
            [cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines
        )
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        shown = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n"
            for row in rows
        )
        table = f"<table><thead><tr>{cells}</tr></thead><tbody>\n{shown}</tbody></table>"
        blocks.append(f'<div class="wide">{table}</div>')
    return "\n".join(blocks)


def picture(path: Path, name: str, caption: str) -> str:
    """Return an SVG as a figure of a page, with ids made unique by ``name``; "" without a file."""
    if not path.exists():
        return ""
    drawn = path.read_text()
    drawn = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", drawn[drawn.index("<svg") :])
    drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{html.escape(caption)}"', 1)
    return f"<figure>{drawn}<figcaption>{html.escape(caption)}.</figcaption></figure>"


def settings(config: RunConfig) -> dict[str, Any]:
    """Return the run's settings, by their names in the run-config."""
    kept = {name: value for name, value in asdict(config).items() if name not in PLACED}
    return {name.replace("_", "-"): value for name, value in kept.items()}


def common(configs: Sequence[RunConfig]) -> str:
    """Return the settings that are the same in all runs, one per line."""
    first, *others = map(settings, configs)
    alike = {n: v for n, v in first.items() if all(other[n] == v for other in others)}
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in alike.items())


def differing(configs: Sequence[RunConfig]) -> str:
    """Return the settings that differ, as a Markdown table with a row per algorithm."""
    by_algorithm: dict[str, Mapping[str, Any]] = {c.rule: settings(c) for c in configs}
    names = [
        name
        for name in settings(configs[0])
        if len({str(values[name]) for values in by_algorithm.values()}) > 1
    ]
    if not names:
        return ""
    return grid(
        names, [[str(values[name]) or "-" for name in names] for values in by_algorithm.values()]
    )
