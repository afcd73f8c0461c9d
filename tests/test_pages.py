"""The site's pages: what they show runs as shown, and what they say of the code is so."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MessageType

import fl_strategies
from clients import InProcessGrid

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "notebooks/pages"
QUICKSTART = PAGES / "quickstart.md"
ALGORITHMS = list(fl_strategies.STRATEGIES)
NEEDS = {
    "lora": "peft",
    "tokenizer": "transformers",
    "trackers": "tensorboard",
    "privacy": "dp_accounting",
}
"""Packages, by the page whose examples need them."""


def python(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


SHOWN = [page for page in sorted(PAGES.rglob("*.md")) if python(page)]


def run(page: Path, namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the names that the page's program leaves, the Quickstart's before it where it says."""
    if "Quickstart](" in page.read_text() and page != QUICKSTART:
        run(QUICKSTART, namespace)
    exec(compile(python(page), str(page), "exec"), namespace)
    return namespace


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by peft
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
@pytest.mark.slow
def test_a_pages_python_runs_as_one_program(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    monkeypatch.chdir(tmp_path)
    names = run(page, {"__name__": "page"})
    if page.parent.name == "algorithms":
        strategy = fl_strategies.STRATEGIES[page.stem]
        assert isinstance(names["strategy"], strategy)
        assert names["result"].train_metrics_clientapp[1]["train-loss"] > 0


def test_every_algorithm_has_a_page_in_the_order_of_the_registry() -> None:
    index = (PAGES / "algorithms/index.md").read_text()
    assert re.findall(r"^([a-z-]+)$", index, re.MULTILINE) == ALGORITHMS
    pages = {page.stem for page in (PAGES / "algorithms").glob("*.md")}
    assert pages == {*ALGORITHMS, "index"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_numbers_the_equations_of_the_docstring(name: str) -> None:
    module = importlib.import_module(fl_strategies.STRATEGIES[name].__module__)
    numbered = re.findall(r"^ +\S.* \((\d|[a-e])\)$", module.__doc__ or "", re.MULTILINE)
    shown = re.findall(r"\\tag\{(\w+)\}", (PAGES / f"algorithms/{name}.md").read_text())
    assert set(numbered) <= set(shown), sorted(set(numbered) - set(shown))
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_quotes_paragraphs_that_the_docstring_has(name: str) -> None:
    text = (PAGES / f"algorithms/{name}.md").read_text()
    directives = imported_directives()
    for module, words in re.findall(r"```\{paragraphs\} (\S+) (.*)", text):
        for word in directives.shlex.split(words):
            assert directives.paragraphs(module, [word]), (name, word)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_that_is_read_as_a_file_says_where_the_hyperparameters_are(name: str) -> None:
    text = (PAGES / f"algorithms/{name}.md").read_text()
    strategy = fl_strategies.STRATEGIES[name].__name__
    assert f"```{{hyperparameters}} {name}\nhelp(fl_strategies.{strategy})\n```" in text


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_card_links_to_its_paper(name: str) -> None:
    strategy = fl_strategies.STRATEGIES[name]
    assert re.fullmatch(r"\d{4}\.\d{5}", strategy.card.arxiv)
    assert f"https://arxiv.org/abs/{strategy.card.arxiv}" in "\n".join(
        imported_directives().card(name)
    )


@pytest.mark.parametrize("page", sorted((PAGES / "api").glob("*.md")), ids=lambda page: page.stem)
@pytest.mark.slow
def test_a_page_of_public_names_has_all_of_them(page: Path) -> None:
    public = imported_directives("public")
    shown = []
    for package, names in re.findall(r"```\{names\} (\S+) (.*)", page.read_text()):
        shown += public.covered(package, names.split())
        for name in names.split():
            assert public.one_line(package, name, getattr(sys.modules[package], name))
    assert set(shown) == set(sys.modules[package].__all__)


def imported_directives(name: str = "directives") -> Any:
    sys.path.insert(0, str(ROOT / "notebooks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize(
    ("averages", "line"), [("models", "*models*"), ("changes", "*changes*"), ("", "neither")]
)
def test_the_deployment_page_lists_what_each_rule_averages(averages: str, line: str) -> None:
    text = (ROOT / "simulations/DEPLOYMENT.md").read_text()
    (shown,) = re.findall(rf"^- {re.escape(line)}(.*)$", text, re.MULTILINE)
    names = [n for n, one in fl_strategies.STRATEGIES.items() if one.averages == averages]
    shown = shown.split(", and `pfedme` with beta > 1")[0]
    assert re.findall(r"`([\w-]+)`", shown) == names


class Weighed(InProcessGrid):
    """Counts the bytes of arrays that the first training request and its reply carry."""

    weights: tuple[int, int] = 0, 0

    def answer(self, message: Message) -> Message | None:
        reply = super().answer(message)
        if message.metadata.message_type == MessageType.TRAIN and reply is not None:
            self.weights = bytes_of(message), bytes_of(reply)
        return reply


def bytes_of(message: Message) -> int:
    (record,) = message.content.array_records.values()
    return sum(len(array.numpy().tobytes()) for array in record.values())


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.sampled
def test_a_page_states_the_bytes_that_travel(name: str) -> None:
    names = run(PAGES / f"algorithms/{name}.md", {"__name__": "page"})
    grid = Weighed(names["app"], num_clients=4)
    names["strategy"].start(grid, names["initial"], num_rounds=3)
    (stated,) = re.findall(r"(\d+)d bytes", imported_directives().traffic(name))
    d = len(names["make_model"]().vector)
    assert grid.weights == (int(stated) * d, int(stated) * d)


def test_links_between_pages_lead_to_files_of_the_repository() -> None:
    pages = [*ROOT.glob("*.md"), *PAGES.rglob("*.md"), *(ROOT / "simulations").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            target = link.split("#")[0]
            if not target or link.startswith(("http", "/notebooks/api/")):
                continue
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_the_version_has_one_source() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert fl_strategies.__version__ == importlib.metadata.version("fl-strategies")
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    dated = re.findall(r"^date-released: (.+)$", citation, re.MULTILINE)
    released = f"## {project['version']} ({dated[0]})"
    entries = re.findall(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == released
    wheel = f"fl_strategies-{project['version']}-py3-none-any.whl"
    assert wheel in (PAGES / "install.md").read_text()
    template = (ROOT / "fl_strategies/apps/common/pyproject.toml").read_text()
    assert f"fl-strategies>={project['version'].rpartition('.')[0]}" in template
