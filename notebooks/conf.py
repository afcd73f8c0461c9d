"""The documentation site, built by `make docs`, without network; it needs none to be read either.

Its pages are the Markdown files of the repository, the notebooks as the tests executed them last,
and the docstrings. Docstrings of modules are plain text with equations: their paragraphs are read
as reStructuredText, what is indented or set in columns is shown as it stands.
"""

import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import toctree
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

import directives  # noqa: E402
import public  # noqa: E402

project = "fl_strategies"
author = "the fl_strategies authors"
copyright = f"2026, {author}. Apache-2.0"
version = release = importlib.metadata.version("fl-strategies")
extensions = ["sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "myst_nb"]
root_doc = "notebooks/pages/home"
include_patterns = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "simulations/README.md",
    "simulations/DEPLOYMENT.md",
    "simulations/lab/notes/*.md",
    "notebooks/*.ipynb",
    "notebooks/api/*.rst",
    "notebooks/pages/**.md",
]
exclude_patterns = [".*", "build"]
html_theme = "furo"
html_title = f"fl_strategies {release}"
html_copy_source = False
html_domain_indices = False  # the page of modules lists them
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
highlight_language = "none"  # equations are no Python
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
# two modules may have a `State` each, and a signature does not say whose it means
suppress_warnings = ["ref.python"]

_mathjax = importlib.util.find_spec("sphinx-mathjax-offline")
if _mathjax is None or _mathjax.origin is None:
    raise ImportError("the site's formulas need the package sphinx-mathjax-offline: make docs")
mathjax_path = "tex-svg-full.js"  # one file, without fonts to load
html_static_path = ["site.css", str(Path(_mathjax.origin).parent / "static/mathjax" / mathjax_path)]

CONTENTS = """
```{toctree}
:hidden:
:caption: Start
/notebooks/pages/install
/notebooks/pages/quickstart
/notebooks/pages/flower-app
/notebooks/pages/app-clients
/notebooks/pages/algorithms/index
/notebooks/pages/solvers
/notebooks/pages/parts
/notebooks/pages/combinations
/notebooks/pages/recipes/index
/notebooks/pages/questions
/notebooks/pages/coming-from
```

```{toctree}
:hidden:
:caption: Operation
/simulations/README
/notebooks/pages/scale
/notebooks/pages/stacked
/notebooks/pages/costs
/notebooks/pages/faults
/notebooks/pages/heterogeneity
/notebooks/pages/asynchronous
/notebooks/pages/testing
/simulations/DEPLOYMENT
/notebooks/pages/deployment-at-scale
/SECURITY
```

```{toctree}
:hidden:
:caption: Results
/notebooks/pages/board
/notebooks/pages/delta-sgd
/notebooks/pages/fedadmm-needs
```

```{toctree}
:hidden:
:caption: Tutorials
:glob:
/notebooks/[0-9]-*
/notebooks/[0-9][0-9]-*
```

```{toctree}
:hidden:
:caption: Project
/CONTRIBUTING
/notebooks/pages/inside
/notebooks/pages/versions
/CHANGELOG
```

```{toctree}
:hidden:
:caption: API
/notebooks/pages/api/fl_strategies
/notebooks/pages/api/clients
/notebooks/pages/api/parts
/notebooks/pages/api/testing
/notebooks/api/modules
```
"""


NOTES = """
```{toctree}
:hidden:
:glob:
/simulations/lab/notes/*
```
"""
BOARD = "notebooks/pages/board"


FIGURE = re.compile(r"^!\[(.+?)\]\((\S+)\)\n\*([^*]+)\*$", re.MULTILINE)
"""An image and the lines below it in italics, its caption."""


def page(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the first page and the Board contents, a notebook its outputs, figures captions."""
    if name == root_doc:
        source[0] += CONTENTS
    if name == BOARD:
        source[0] += NOTES
    executed = ROOT / "build" / f"{name}.ipynb"
    if executed.exists():
        app.env.note_dependency(executed)
        source[0] = described(executed.read_text())
    source[0] = re.sub(FIGURE, r"```{figure} \2\n:alt: \1\n\n\3\n```", source[0])


def described(notebook: str) -> str:
    """Return a notebook whose figures have an alternative text: the sentence that leads to them."""
    content = json.loads(notebook)
    before = ""
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"]).strip().split("\n\n")[-1]
            before = " ".join(re.sub(r"[*`#$\\\[\]]|\(\S+\)", "", text).split())
        else:
            cell["metadata"]["mystnb"] = {"image": {"alt": before}}
    return json.dumps(content)


def docstring(
    app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]
) -> None:
    """Turn a docstring, in place, into reStructuredText without surprises."""
    lines[:] = plain(lines) if what == "module" else map(directives.escaped, lines)


def plain(lines: Iterable[str]) -> Iterable[str]:
    """Yield a module's docstring, its indented and columned paragraphs as literal blocks."""
    for block in "\n".join(lines).strip().split("\n\n"):
        if block.startswith("- ") or not re.search(r"^ |\S  +\S", block, re.MULTILINE):
            yield from map(directives.escaped, block.split("\n"))
        else:
            yield from ["::", "", *(f"   {line}" for line in block.split("\n"))]
        yield ""


def skip(app: Sphinx, what: str, name: str, thing: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples that have no docstring of their own."""
    return True if (thing.__doc__ or "").startswith("Alias for field number") else None


FORWARD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={page}">
<title>{title}</title>
<link rel="icon" href="data:,">
<a href="{page}">{title}</a>
</html>
"""


def index(app: Sphinx, error: Exception | None) -> None:
    """Let the folder lead to the first page, and list all pages in ``llms.txt``."""
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir)
        (folder / "index.html").write_text(FORWARD.format(page=f"{root_doc}.html", title=project))
        (folder / "llms.txt").write_text(for_readers_of_text(app.env))


def for_readers_of_text(env: BuildEnvironment) -> str:
    """Return the list of the site's pages, by section: each one's name, address and first words."""
    lines = [f"# {project}", "", f"> {first_words(env, root_doc)}"]
    for contents in env.tocs[root_doc].findall(toctree):
        lines += ["", f"## {contents['caption']}", ""]
        for name in contents["includefiles"]:
            lines += listed(env, name)
    return "\n".join([*lines, ""])


def listed(env: BuildEnvironment, name: str, indent: str = "") -> list[str]:
    """Return the lines of a page and the pages below it; of the modules the list alone."""
    about = f"{env.titles[name].astext()}]({name}.html): {first_words(env, name)}"
    below = [] if name == "notebooks/api/modules" else env.toctree_includes.get(name, [])
    lines = [line for page in below for line in listed(env, page, f"{indent}  ")]
    return [f"{indent}- [{about.removesuffix(': ')}", *lines]


def first_words(env: BuildEnvironment, name: str) -> str:
    """Return the first sentence of a page; "" if it has none."""
    paragraph = next(iter(env.get_doctree(name).findall(nodes.paragraph)), None)
    text = "" if paragraph is None else " ".join(paragraph.astext().split())
    return re.split(r"(?<=[.:?]) (?=[A-Z])", text)[0].rstrip(",:")


def setup(app: Sphinx) -> None:
    """Connect the above."""
    directives.write_api(HERE / "api")
    app.add_directive("algorithm", directives.Algorithm)
    app.add_directive("algorithms", directives.Algorithms)
    app.add_directive("board", directives.Board)
    app.add_directive("combinations", directives.Combinations)
    app.add_directive("contracts", directives.Contracts)
    app.add_directive("around-loops", directives.AroundLoops)
    app.add_directive("hyperparameters", directives.Hyperparameters)
    app.add_directive("laws", directives.Laws)
    app.add_directive("names", public.Names)
    app.add_directive("options", directives.EveryStrategy)
    app.add_directive("paragraphs", directives.Paragraphs)
    app.add_directive("parts", directives.Parts)
    app.add_directive("parts-hyperparameters", directives.PartsHyperparameters)
    app.connect("source-read", page)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-skip-member", skip)
    app.connect("build-finished", index)
