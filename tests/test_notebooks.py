"""Notebooks: each runs in a kernel of its own and shows what it should; none is committed run.

Mutants tried by hand, each caught by a test here: a notebook with an output, an execution count,
metadata, a cell without id; one that warns, raises, draws nothing, writes a file, reads one beside
itself; a strategy in another than the one about that; one that the README lacks; a dead link.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  # else the first notebook reports its cache
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(
    (ROOT / "notebooks").glob("*.ipynb"), key=lambda path: int(path.stem.partition("-")[0])
)
NO_WIDGETS = "ignore:IProgress not found"
"""tqdm misses ipywidgets, which nothing here needs."""


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


STYLED = "from simulations.figures import STYLE"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_notebook_runs_anywhere_without_a_warning_and_draws(path: Path, tmp_path: Path) -> None:
    """In a folder that is neither its own nor the root. The result is what the site shows."""
    from nbclient import NotebookClient

    notebook = read(path)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}})
    client.execute(env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": NO_WIDGETS})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert list(tmp_path.iterdir()) == []
    executed = ROOT / "build/notebooks" / path.name
    executed.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, executed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    for cell in code(path):
        assert (cell.outputs, cell.execution_count, cell.metadata) == ([], None, {}), cell.id


def test_a_notebook_has_one_line_of_install_and_mutes_nobodys_log() -> None:
    for path in NOTEBOOKS:
        text = "\n".join(cell.source for cell in read(path).cells)
        assert text.count("pip install") == 1, path.name
        assert "getLogger" not in text, path.name
        assert "find_spec" not in text, path.name


def test_a_notebook_imports_what_the_wheel_and_its_extra_hold() -> None:
    """`simulations` is in the wheel, `simulations.lab` and the tests are not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "simulations/lab" in wheel["exclude"]
    needed = [*project["project"]["dependencies"]]
    needed += project["project"]["optional-dependencies"]["simulation"]
    installed = {re.split(r"[^\w-]", name)[0].replace("-", "_") for name in needed}
    installed = (installed - {"scikit_learn"}) | {"sklearn", *wheel["packages"]}
    for path in NOTEBOOKS:
        source = "\n".join(cell.source for cell in code(path))
        imported = re.findall(r"^(?:from|import) ([\w.]+)", source, re.MULTILINE)
        others = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
        assert others <= installed, path.name
        assert not [name for name in imported if name.startswith("simulations.lab")], path.name


def test_all_figures_have_one_style() -> None:
    """Notebooks by its settings, and no other colours; what draws elsewhere by its decorator."""
    for path in NOTEBOOKS:
        source = "\n".join(cell.source for cell in code(path))
        assert STYLED in source, path.name
        assert source.count("plt.rcParams") == source.count("plt.rcParams.update(STYLE)") == 1
        assert not re.findall('tab:|"red"|"blue"|"green"', source), path.name
    for path in [*(ROOT / "simulations").rglob("*.py"), *(ROOT / "notebooks").glob("*.py")]:
        text = path.read_text()
        styled = len(re.findall(r"^@styled$", text, re.MULTILINE))
        assert text.count(" Figure(") == styled, path.name
        assert "pyplot" not in text, path.name


def test_the_first_notebook_shows_the_api() -> None:
    source = "\n".join(cell.source for cell in code(NOTEBOOKS[0]))
    assert re.findall("from simulations.*", source) == [STYLED]
    for shown in ("FedADMM(", "AnyAlgorithmClient(", ".start("):
        assert shown in source


def test_one_notebook_alone_defines_an_algorithm() -> None:
    source = {path.stem: "\n".join(cell.source for cell in code(path)) for path in NOTEBOOKS}
    defining = [n for n, text in source.items() if re.search(r"^class \w+\(Federated", text, re.M)]
    assert defining == ["8-your-algorithm"]


def test_the_readme_names_every_notebook() -> None:
    named = re.findall(r"\]\(notebooks/([^/)]+\.ipynb)\)", (ROOT / "README.md").read_text())
    assert named == [path.name for path in NOTEBOOKS]


def test_links_between_pages_lead_to_files_of_the_repository() -> None:
    for path in NOTEBOOKS:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).is_file(), f"{path.name}: {link}"
