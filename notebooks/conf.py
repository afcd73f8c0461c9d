"""The documentation site, built by `make docs`.

Its pages are the Markdown files of the repository, the notebooks as the tests executed them last,
and the docstrings. Docstrings of modules are plain text with equations: their paragraphs are read
as reStructuredText, what is indented or set in columns is shown as it stands.
"""

import importlib
import pkgutil
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docutils.nodes import Node
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]

project = "fl_strategies"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "simulations/README.md",
    "simulations/DEPLOYMENT.md",
    "notebooks/*.ipynb",
    "notebooks/*.rst",
]
exclude_patterns = [".*", "build"]
html_theme = "furo"
html_title = "fl_strategies"
html_copy_source = False
highlight_language = "none"  # equations are no Python
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
# two modules may have a `State` each, and a signature does not say whose it means
suppress_warnings = ["ref.python"]

CONTENTS = """
```{toctree}
:hidden:
:caption: Tutorials
:glob:
notebooks/[0-9]*
```

```{toctree}
:hidden:
:caption: Reference
notebooks/fl_strategies
notebooks/clients
simulations/README
simulations/DEPLOYMENT
SECURITY
CONTRIBUTING
```
"""


class Modules(SphinxDirective):
    """``.. modules:: package`` documents every module of a package, a new one too."""

    required_arguments = 1

    def run(self) -> list[Node]:
        package = importlib.import_module(self.arguments[0])
        lines = []
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            lines += [info.name, "-" * len(info.name), ""]
            lines += [f".. automodule:: {info.name}", "   :members:", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def page(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the first page its table of contents, and a notebook the outputs it had last."""
    if name == root_doc:
        source[0] += CONTENTS
    executed = ROOT / "build" / f"{name}.ipynb"
    if executed.exists():
        app.env.note_dependency(executed)
        source[0] = executed.read_text()


def docstring(
    app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]
) -> None:
    """Turn a docstring, in place, into reStructuredText without surprises."""
    lines[:] = plain(lines) if what == "module" else map(escaped, lines)


def plain(lines: Iterable[str]) -> Iterable[str]:
    """Yield a module's docstring, its indented and columned paragraphs as literal blocks."""
    for block in "\n".join(lines).strip().split("\n\n"):
        if block.startswith("- ") or not re.search(r"^ |\S  +\S", block, re.MULTILINE):
            yield from map(escaped, block.split("\n"))
        else:
            yield from ["::", "", *(f"   {line}" for line in block.split("\n"))]
        yield ""


def escaped(line: str) -> str:
    """Return the line with |S|, a number of clients, no longer a name to be substituted."""
    pieces = re.split(r"(``.*?``)", line)
    return "".join(p if p.startswith("``") else p.replace("|", r"\|") for p in pieces)


def skip(app: Sphinx, what: str, name: str, thing: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples that have no docstring of their own."""
    return True if (thing.__doc__ or "").startswith("Alias for field number") else None


def index(app: Sphinx, error: Exception | None) -> None:
    """Let the first page answer for the folder as well."""
    if error is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.add_directive("modules", Modules)
    app.connect("source-read", page)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-skip-member", skip)
    app.connect("build-finished", index)
