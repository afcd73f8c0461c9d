"""An example of each public name: that of its docstring, or a statement of the site's programs.

Programs of pages, notebooks and docstrings run in the tests, so what is shown here works.
"""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from clients import CLIENTS
from fl_strategies.parts import PARTS

ROOT = Path(__file__).parents[1]
PACKAGES = ("fl_strategies", "clients", "fl_strategies.parts", "fl_strategies.testing")
LONGEST = 25
"""Lines of a statement that is still an example of one name."""
WITH_PART = {
    "regularizer": 'FedADMM(eta="fraction", regularizer={part})',
    "privacy": 'FedAvg(weights="uniform", privacy={part})',
    "availability": "FedAvg(clock=Clock(), availability={part})",
    "pace": "FedAvg(clock=Clock(), pace={part})",
}
"""A strategy with a part of the stage, where ``FedAvg`` needs something else in addition."""


class Example(NamedTuple):
    """A few lines of Python, and the document whose program they are from, "" if of none."""

    code: str
    document: str = ""


def example(package: str, name: str) -> Example:
    """Return the example of a public name; ``LookupError`` if there is none."""
    thing = getattr(importlib.import_module(package), name)
    if code := from_docstring(thing):
        return Example(code)
    found = [use for use in uses().get(name, ()) if use.thing is thing]
    if found:
        return min(found, key=lambda use: len(use.example.code.splitlines())).example
    if thing in CLIENTS.values():
        return Example(f"client = {name}(problem, client_id=0)")
    if thing in PARTS.values():
        shown = WITH_PART.get(thing.stage, f"FedAvg({thing.stage}={{part}})")
        first = next(iter(inspect.signature(thing).parameters.values()), "")
        return Example(f"strategy = {shown.format(part=f'{name}({first})')}")
    raise LookupError(
        f"{package}.{name} has no example: neither in its docstring nor, in a statement of at most"
        f" {LONGEST} lines, in a program of a page that imports it"
    )


def from_docstring(thing: Any) -> str:
    """Return the examples of a docstring; "" if it has none."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return ""
    lines = inspect.cleandoc(thing.__doc__ or "").partition("\nExamples\n--------\n")[2]
    return lines.split("\n\n\n")[0].strip()


class Use(NamedTuple):
    """A statement that uses a public name, and what the name stands for there."""

    thing: Any
    example: Example


@cache
def uses() -> dict[str, list[Use]]:
    """Return the short statements of all programs that use a public name, by name."""
    found: dict[str, list[Use]] = {}
    for document, blocks in programs():
        trees = [(block.splitlines(), ast.parse(block)) for block in blocks]
        known = {name: thing for _, tree in trees for name, thing in imported(tree)}
        for lines, tree in trees:
            for statement in tree.body:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    continue
                decorators = getattr(statement, "decorator_list", [])
                first = min(node.lineno for node in (statement, *decorators))
                shown = lines[first - 1 : statement.end_lineno]
                names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                if len(shown) <= LONGEST:
                    for name in names & known.keys():
                        use = Use(known[name], Example("\n".join(shown), document))
                        found.setdefault(name, []).append(use)
    return found


def imported(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a program imports from the packages: name and object."""
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and one.module in PACKAGES:
            for alias in one.names:
                if alias.asname is None:
                    yield alias.name, getattr(importlib.import_module(one.module), alias.name)


def programs() -> Iterator[tuple[str, list[str]]]:
    """Yield each page and notebook with Python, as document and blocks of code."""
    pages = ROOT / "notebooks/pages"
    for path in [*sorted(pages.rglob("*.md")), ROOT / "CONTRIBUTING.md"]:
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        yield f"/{path.relative_to(ROOT).with_suffix('')}", blocks
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        blocks = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        # commands of the notebook's own are no Python
        plain = [re.sub(r"^[%!].*$", "", block, flags=re.MULTILINE) for block in blocks]
        yield f"/{path.relative_to(ROOT).with_suffix('')}", plain
