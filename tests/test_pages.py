"""The site's pages: what they show runs as shown, and what they say of the code is so."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, MessageType
from torch import nn

import clients
import fl_strategies
from clients import Border, InProcessGrid, Problem
from fl_strategies import parts

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "notebooks/pages"
QUICKSTART = PAGES / "quickstart.md"
BEFORE = {
    "[Quickstart](": QUICKSTART,
    "[own loop](": PAGES / "recipes/own-loop.md",
    "[Trainer's program](": PAGES / "recipes/trainer.md",
}
"""Pages whose programs run before that of a page with such a link."""
ALGORITHMS = list(fl_strategies.STRATEGIES)
NEEDS = {
    "lightning": "lightning",
    "lora": "peft",
    "sample-privacy": "opacus",
    "tokenizer": "transformers",
    "trainer": "accelerate",
    "trackers": "tensorboard",
    "accelerate": "accelerate",
    "privacy": "dp_accounting",
}
"""Packages, by the page whose examples need them."""


def python(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


SHOWN = [
    page
    for page in sorted(PAGES.rglob("*.md"))
    if python(page) and page.parent.name != "algorithms"
]


def programs(page: Path) -> list[Path]:
    """Return the page after those whose programs its own goes on from."""
    text = page.read_text()
    before = [first for link, first in BEFORE.items() if link in text and first != page]
    return [*(one for first in before for one in programs(first)), page]


@cache
def quickstart() -> dict[str, Any]:
    return run(QUICKSTART)


def run(page: Path, after: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the names that the page's program leaves, those of the pages before it first.

    ``after`` has the names that these have left, if they have run.
    """
    namespace: dict[str, Any] = {"__name__": "page", **(after or {})}
    for one in [page] if after else dict.fromkeys(programs(page)):
        exec(compile(python(one), str(one), "exec"), namespace)
    return namespace


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by peft
@pytest.mark.filterwarnings("ignore:.isinstance.treespec")  # by lightning
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")  # by opacus
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # by opacus
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
@pytest.mark.slow
def test_a_pages_python_runs_as_one_program(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    monkeypatch.chdir(tmp_path)
    run(page)


def test_every_algorithm_has_a_page_in_the_order_of_the_registry() -> None:
    index = (PAGES / "algorithms/index.md").read_text()
    assert re.findall(r"^([a-z-]+)$", index, re.MULTILINE) == ALGORITHMS
    pages = {page.stem for page in (PAGES / "algorithms").glob("*.md")}
    assert pages == {*ALGORITHMS, "index"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_page_says_what_the_code_says(name: str) -> None:
    """Its equations, the paragraphs that it quotes, its hyperparameters and its paper."""
    strategy, directives = fl_strategies.STRATEGIES[name], imported_directives()
    text = (PAGES / f"algorithms/{name}.md").read_text()
    docstring = importlib.import_module(strategy.__module__).__doc__ or ""
    numbered = re.findall(r"^ +\S.* \((\d|[a-e])\)$", docstring, re.MULTILINE)
    shown = re.findall(r"\\tag\{(\w+)\}", text)
    assert set(numbered) <= set(shown), sorted(set(numbered) - set(shown))
    assert len(shown) == len(set(shown))
    for module, words in re.findall(r"```\{paragraphs\} (\S+) (.*)", text):
        for word in directives.shlex.split(words):
            assert directives.paragraphs(module, [word]), word
    assert f"```{{hyperparameters}} {name}\nhelp(fl_strategies.{strategy.__name__})\n```" in text
    assert re.fullmatch(r"\d{4}\.\d{5}", strategy.card.arxiv)
    assert f"https://arxiv.org/abs/{strategy.card.arxiv}" in "\n".join(directives.card(name))


@pytest.mark.parametrize("page", sorted((PAGES / "api").glob("*.md")), ids=lambda page: page.stem)
@pytest.mark.slow
def test_a_page_of_public_names_has_all_of_them(page: Path) -> None:
    public = imported_directives("public")
    shown = []
    for package, names in re.findall(r"```\{names\} (\S+) (.*)", page.read_text()):
        shown += public.covered(package, names.split())
        for name in names.split():
            assert public.one_line(package, name, getattr(sys.modules[package], name))
    for name in shown:
        assert public.example(package, name).code
    assert set(shown) == set(sys.modules[package].__all__)


def test_an_example_that_is_in_no_program_runs() -> None:
    """Those of clients and parts, of which all are made alike."""
    public = imported_directives("public")
    problem = Problem(nn.Linear(2, 2), nn.functional.cross_entropy, torch.ones(1, 2), torch.ones(1))
    names = {"problem": problem, **vars(fl_strategies), **vars(parts), **vars(clients)}
    made = set()
    for package in (parts, clients):
        for name in package.__all__:
            code, document = public.example(package.__name__, name)
            if not document and not code.startswith(">>>"):
                exec(code, namespace := dict(names))
                made.add(type(namespace.get("client", namespace.get("strategy"))).__name__)
    assert {"FedProxClient", "FedADMM", "FedAvg"} <= made


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
def test_an_algorithms_page_runs_and_states_the_bytes_that_travel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGES / f"algorithms/{name}.md"
    names = run(page, quickstart() if programs(page) == [QUICKSTART, page] else None)
    assert isinstance(names["strategy"], fl_strategies.STRATEGIES[name])
    assert names["result"].train_metrics_clientapp[1]["train-loss"] > 0
    grid = Weighed(names["app"], num_clients=4)
    names["strategy"].start(grid, names["initial"], num_rounds=2)
    (stated,) = re.findall(r"(\d+)d bytes", imported_directives().traffic(name))
    d = Border.of(names["make_model"]()).size
    assert grid.weights == (int(stated) * d, int(stated) * d)


@pytest.mark.parametrize(
    "page",
    [
        "home",
        "install",
        "quickstart",
        "flower-app",
        "app-clients",
        "algorithms/index",
        "solvers",
        "parts",
        "recipes/index",
        "questions",
        "scale",
        "../../README",
    ],
)
def test_a_page_that_a_newcomer_reads_has_1500_words_at_most(page: str) -> None:
    lines = (PAGES / f"{page}.md").read_text().splitlines()
    read = [line for line in lines if "](notebooks/pages/algorithms/" not in line]  # a row each
    assert len(" ".join(read).split()) <= 1500


def test_a_numbered_equation_has_no_line_break() -> None:
    """Sphinx puts a formula with a line break into an environment that takes no number."""
    for page in PAGES.rglob("*.md"):
        for formula in re.findall(r"\$\$(.*?)\$\$", page.read_text(), re.DOTALL):
            assert not ("\\tag" in formula and "\\\\" in formula), f"{page.name}: {formula}"


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
