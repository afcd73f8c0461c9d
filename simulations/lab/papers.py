"""The Board's page: what papers publish, and what runs here reach, a table for each paper.

    python -m simulations.lab.papers --add DIR

puts what ``reproduce`` has written into ``DIR/board.json`` in the place of the same settings of
``notebooks/pages/board.json``, and makes the page ``board.md`` and its figure ``board.svg`` of all
of them. Without ``--add`` it makes both alone.

``board.json`` has two parts. ``records`` are the numbers, an object per setting and rule.
``papers`` are the rows: a row names its setting, or several with one cause (``settings``, by name
what is said of each), or has its cells as words where there is no such number, as for curves;
``note`` leads to the settings and the command, ``cause`` says why a number did not come out, and
``against`` names the baseline if it is not the best published one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fl_strategies.core.files import write_atomically
from simulations.lab import forest
from simulations.lab.command_line import Command
from simulations.lab.forest import Records
from simulations.lab.measured import KINDS
from simulations.lab.verdicts import each_seed, interval, one_by_one
from simulations.tables import grid

PAGES = Path(__file__).resolve().parents[2] / "notebooks/pages"
HEADS = (
    "cell",
    "published",
    "ours, 95 % interval (seeds)",
    "a baseline here",
    "difference to it (paired by seed)",
    "verdict",
    "cause, or what is missing",
)
PUBLISHED = ("reproduced", "order only", "not", "not possible here", "not run", "no verdict")
COMPARED = ("ahead", "level", "behind")
"""Verdicts on what is published, and on comparisons in which nothing is."""
HEAD = """
![A line for each published number: the paper's, and ours with interval and verdict](board.svg)
*Published numbers of which at least three seeds ran here. A triangle is a run that did not reach
the target. The tables say why of each: fewer rounds than the paper's (Delta-SGD), local training
that starts where the paper prints it (FedBC's Table 7), or a baseline that is better here than
published.*

The tables and the figure are made from `board.json` by `python -m simulations.lab.papers`. A cell
links to its note, which has the settings, the command, the date and all rules.

## How to read the tables

Accuracies are in per cent, means over the seeds have 95 % t intervals, and *difference to it
(paired by seed)* is ours less the baseline over runs with the same seed. Rounds to a target of
fewer than five seeds stand one by one: an interval of the first round that touches a value is far
too short with so few. The baseline is the best published one that ran here. Hyperparameters are
chosen on training samples held out, unless a note says otherwise. E is the number of local epochs.

A verdict needs three seeds. *Order only*: the rules are in the published order, and the whole
interval of the difference says so. *Reproduced*: moreover, the published number lies in the
interval in which one more run of ours is expected. *Not*: the order is another one, or is not
certain. Where nothing is published, our rule is *ahead* of the best baseline, *level* with it or
*behind* it. With fewer seeds, or far fewer rounds than the paper's, there is *no verdict*.
Every *not* has a cause that a run has tested, or says that none was tested.
"""
TAIL = """## Which algorithm?

With the same rates to choose from and the same five seeds, A-FedPD, FedDyn and FedNova are ahead of
FedAvg on both data sets of the
[comparison of global models](../../simulations/lab/notes/comparisons.md#which-algorithm). Of the
personalized models Ditto has the best mean on digits; on synthetic data pFedMe, FedBCD, APFL, Ditto
and training alone are within two points, and far ahead of FedAvg. When to choose FedADMM and
Delta-SGD: [What FedADMM needs](fedadmm-needs.md), [Delta-SGD](delta-sgd.md).

## Other tables

- [Accuracy with default settings](../../simulations/lab/notes/comparisons.md), of every algorithm
  on four data sets.
- [What the engines cost](../../simulations/lab/notes/engines.md): time and memory, against aims
  set before measuring.
"""


def page(papers: Sequence[Mapping[str, Any]], records: Records) -> str:
    """Return the page: a table for each paper."""
    settings: dict[str, Records] = {}
    for record in records:
        settings.setdefault(record["setting"], []).append(record)
    sections = [f"# Board\n\n{counted(papers, settings)}{HEAD}"]
    for paper in papers:
        rows = []
        for row in paper["rows"]:
            cells = cells_of(row, settings)
            first = f"[{cells['cell']}](../../simulations/lab/notes/{row['note']})"
            names = ("published", "ours", "baseline", "difference", "verdict", "cause")
            texts = [first, *(cells.get(name, "") for name in names)]
            rows.append([text.replace("|", r"\|") for text in texts])
        sections.append(f"## {paper['paper']}\n\n{paper['about']}\n\n{grid(HEADS, rows)}")
    return "\n".join([*sections, TAIL])


def counted(papers: Sequence[Mapping[str, Any]], settings: Mapping[str, Records]) -> str:
    """Return the first sentence, which counts the verdicts."""
    verdicts = Counter(
        verdict.strip("*")
        for paper in papers
        for row in paper["rows"]
        for verdict in verdicts_of(row, settings)
    )

    def listed(names: Sequence[str]) -> str:
        return ", ".join(f"{verdicts[name]} *{name}*" for name in names if verdicts[name])

    published, compared = (sum(verdicts[name] for name in names) for names in (PUBLISHED, COMPARED))
    others = verdicts.total() - published - compared
    return (
        f"The verdicts on {published} published numbers and curves are {listed(PUBLISHED)};\n"
        f"those on {compared} comparisons in which nothing is published are {listed(COMPARED)};\n"
        f"{others} show the published order on another model or other data.\n"
    )


def verdicts_of(row: Mapping[str, Any], settings: Mapping[str, Records]) -> list[str]:
    """Return the verdict of each line of a row."""
    cells = cells_of(row, settings)
    verdicts = cells["verdict"].split("<br>")
    return verdicts * (len(cells["cell"].split("<br>")) // len(verdicts))


def cells_of(row: Mapping[str, Any], settings: Mapping[str, Records]) -> dict[str, str]:
    """Return the cells of a row: its own words, and the numbers of its settings, one a line."""
    against = row.get("against", "")
    own = {name: text for name, text in row.items() if isinstance(text, str)}
    if "settings" in row:
        each = [numbers(settings[name], against) for name in row["settings"]]
        names = dict.fromkeys(name for cells in each for name in cells)
        lines = {name: [cells.get(name, "") for cells in each] for name in names}
        lines["cell"] = [*row["settings"].values()]
        return {name: "<br>".join(one_or_all(texts)) for name, texts in lines.items()} | own
    return numbers(settings[row["setting"]], against) | own if "setting" in row else own


def one_or_all(texts: Sequence[str]) -> Sequence[str]:
    """Return one text if all are equal."""
    return texts if len(set(texts)) > 1 else texts[:1]


def numbers(records: Records, against: str = "") -> dict[str, str]:
    """Return the cells of a setting's row.

    The baseline is ``against``, else the best published one, else the best.
    """
    (ours,) = [record for record in records if record["paper's"]]
    kind = KINDS[ours["figure"]]

    def text(number: float) -> str:
        return f"{kind.unit * number:.1f}"

    def published(record: Mapping[str, Any]) -> str:
        return text(record["published"]).removesuffix(".0" * kind.less_is_better)

    def mean(record: Mapping[str, Any]) -> float:
        return fmean(record["values"] or record["interval"])

    def listed(record: Mapping[str, Any]) -> bool:
        return one_by_one(record["figure"], record["values"])

    def reached(record: Mapping[str, Any]) -> str:
        if listed(record):
            return ", ".join(each_seed(record["values"], record["missed"]))
        return f"{'at least ' * (record['missed'] > 0)}{text(mean(record))}"

    sign = 1.0 if kind.less_is_better else -1.0
    others = [record for record in records if record is not ours and record["interval"]]
    stated = [record for record in others if record["published"] is not None]
    name = against or ours.get("best baseline")
    if stated and not against:
        name = min(stated, key=lambda record: sign * mean(record))["rule"]
    baseline = next(record for record in others if record["rule"] == name)
    cells = {
        "cell": ours["where"].partition(": ")[2],
        "ours": reached(ours),
        "baseline": f"{name} {reached(baseline)}",
        "verdict": f"*{ours['verdict']}*",
    }
    if not ours["missed"] and not listed(ours):
        low, high = ours["interval"]
        if kind.unit == 100.0:  # a share is at most 1, whatever its t interval says
            low, high = max(low, 0.0), min(high, 1.0)
        cells["ours"] += f" [{text(low)}, {text(high)}]"
    cells["ours"] += f" ({len(ours['seeds'])})"
    if ours["published"] is not None:
        best = min(stated, key=lambda record: sign * record["published"])
        cells["published"] = f"{published(ours)}; {best['rule']} {published(best)}"
    if ours["values"] and not ours["missed"] and not baseline["missed"]:
        by_seed = dict(zip(baseline["seeds"], baseline["values"], strict=True))
        pairs = zip(ours["seeds"], ours["values"], strict=True)
        gaps = [value - by_seed[seed] for seed, value in pairs if seed in by_seed]
        gap = interval(gaps)
        cells["difference"] = f"{kind.unit * gap.mean:+.1f} ± {text(gap.half)}"
        if listed(ours):
            cells["difference"] = ", ".join(f"{value:+g}" for value in gaps)
    elif not ours["values"]:  # of means that were kept without their seeds
        low, high = ours["difference"]
        cells["difference"] = f"{kind.unit * (low + high) / 2:+.1f} ± {text((high - low) / 2)}"
    return cells


def merged(records: Records, new: Records) -> Records:
    """Return the records, with the ``new`` ones in the place of those of the same settings."""
    replaced = {record["setting"] for record in new}
    return [record for record in records if record["setting"] not in replaced] + new


def written(papers: Sequence[Mapping[str, Any]], records: Records) -> str:
    """Return ``board.json``: a record is a line."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    head = json.dumps({"papers": papers}, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{head},\n "records": [\n{lines}\n]\n}}\n'


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and the figure, and the records if some are added."""
    parser = Command("papers", __doc__)
    parser.add_argument("--add", type=Path, help="folder of a study, whose settings are put in")
    parser.add_argument("--output", type=Path, default=PAGES, help="folder of all three files")
    args = parser.read(arguments)
    with parser.explained():
        board = json.loads((PAGES / "board.json").read_text())
        papers, records = board["papers"], board["records"]
        if args.add is not None:
            new = json.loads((args.add / "board.json").read_text())
            records = merged(records, [record for record in new if record["values"]])
            write_atomically(args.output / "board.json", written(papers, records).encode())
        write_atomically(args.output / "board.md", page(papers, records).encode())
        forest.draw(records, args.output / "board.png")
        (args.output / "board.png").unlink()  # the page shows the vectors
        print(args.output / "board.md")


if __name__ == "__main__":
    main()
