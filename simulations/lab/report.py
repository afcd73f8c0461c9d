"""A comparison as one page: ``report.html``, one file that needs neither other files nor a network.

It holds the date, the seeds and the versions; the table, which a click on a column sorts; the
curves and the partition as vectors; each algorithm's hyperparameters and the settings in which the
runs differ, those that all share; and the command. ``compare`` writes it next to the tables and
figures from which it is made.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from fl_strategies.core.files import write_atomically
from fl_strategies.core.settings_text import format_params, parse_params
from simulations.config import RunConfig, hyperparameter_defaults
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
<p>{head}</p>
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
PACKAGES = ("fl-strategies", "flwr", "torch", "numpy")


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
        ("Settings of each algorithm", from_markdown(of_each(configs))),
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
    page = PAGE.format(title=title, head=html.escape(head_of(configs)), body=body)
    write_atomically(folder / "report.html", page.encode())


def head_of(configs: Sequence[RunConfig]) -> str:
    """Return the report's date, its runs' seeds, and the versions of the packages."""
    seeds = sorted({config.seed for config in configs})
    named = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    what = "Seed" if len(seeds) == 1 else "Seeds"
    return f"{date.today().isoformat()}. {what} {', '.join(map(str, seeds))}. {named}."


def from_markdown(text: str) -> str:
    """Return Markdown as HTML: tables, paragraphs, code and emphasis; the rest as it stands."""
    markdown = MarkdownIt("zero").enable(["table", "backticks", "emphasis"])
    page = str(markdown.render(text)).replace("<table>", '<div class="wide"><table>')
    return page.replace("</table>", "</table></div>")


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


def of_each(configs: Sequence[RunConfig]) -> str:
    """Return a Markdown table: each algorithm's hyperparameters, and the settings that differ."""
    by_rule: dict[str, RunConfig] = {config.rule: config for config in configs}
    of_rule = {rule: settings(config) for rule, config in by_rule.items()}
    names = [
        name
        for name in settings(configs[0])
        if name not in ("algorithm", "params")
        and len({str(values[name]) for values in of_rule.values()}) > 1
    ]
    rows = [
        [rule, hyperparameters(by_rule[rule]), *(str(values[name]) or "-" for name in names)]
        for rule, values in of_rule.items()
    ]
    return grid(["algorithm", "hyperparameters", *names], rows)


def hyperparameters(config: RunConfig) -> str:
    """Return the algorithm's own hyperparameters of a run, those by default as well."""
    chosen = hyperparameter_defaults(config.algorithm) | parse_params(config.params)
    return format_params({n: "none" if v is None else v for n, v in chosen.items()}) or "-"
