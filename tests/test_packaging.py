"""What indexes are told of the package."""

from __future__ import annotations

import re
import runpy
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
CONDA = {"torch": "pytorch"}
"""Packages that conda calls otherwise."""
PAPERS = ("FedADMM", "FedBC", "FedBCD", "FedPD")
"""The papers' algorithms that have a card."""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def specification(requirement: str) -> tuple[str, str]:
    name, bounds = re.fullmatch(r"([\w-]+) ?(.*)", requirement).groups()  # type: ignore[union-attr]
    return CONDA.get(name, name), bounds


def test_the_conda_recipe_asks_for_what_pyproject_asks() -> None:
    recipe, declared = yaml.safe_load((ROOT / ".ci/conda/recipe.yaml").read_text()), project()
    about = declared["project"]
    python = ("python", about["requires-python"])
    asked = recipe["requirements"]
    run, host = ([specification(text) for text in asked[part]] for part in ("run", "host"))
    assert run == [python, *map(specification, about["dependencies"])]
    assert host == [python, ("pip", ""), *map(specification, declared["build-system"]["requires"])]
    assert recipe["context"]["version"] == about["version"]
    assert recipe["package"]["name"] == about["name"]
    assert recipe["about"]["summary"] == about["description"]


def test_the_papers_addresses_are_those_of_the_algorithms_cards() -> None:
    cards = {
        name: f"https://arxiv.org/abs/{STRATEGIES[name.lower()].card.arxiv}" for name in PAPERS
    }
    assert project()["project"]["urls"].items() >= cards.items()


def test_classifiers_name_the_pythons_that_install_says_the_tests_ran_on() -> None:
    classifiers = " ".join(project()["project"]["classifiers"])
    named = re.findall(r"Python :: (3\.\d+)", classifiers)
    text = (ROOT / "notebooks/pages/install.md").read_text()
    assert f"the tests ran on Linux, on {named[0]} to {named[-1]}" in text
    assert "Operating System :: POSIX :: Linux" in classifiers


def test_the_tests_of_other_pythons_are_here() -> None:
    (line,) = re.findall(r'^TESTS="(.*)"$', (ROOT / ".ci/pythons").read_text(), re.MULTILINE)
    assert [name for name in line.split() if not (ROOT / f"tests/test_{name}.py").is_file()] == []


def test_the_release_workflow_checks_a_tag_before_a_person_lets_it_be_published() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    commands = [step.get("run", "") for step in jobs["check"]["steps"]]
    assert "make release-check PUBLIC=--public" in commands
    assert jobs["publish"]["needs"] == "check"
    assert jobs["publish"]["environment"] == "pypi"
    assert re.search(r"^release-check:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_a_public_release_is_refused_without_addresses_and_authors(tmp_path: Path) -> None:
    addresses = runpy.run_path(str(ROOT / ".ci/release-check"))["addresses"]
    for name in ("pyproject.toml", "CITATION.cff", "README.md"):
        shutil.copy(ROOT / name, tmp_path)

    def change(name: str, before: str, after: str) -> None:
        path = tmp_path / name
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))

    changes = {
        "[project.urls] Repository": (
            "pyproject.toml",
            "[project.urls]",
            '[project.urls]\nRepository = "r"\nDocumentation = "d"\nChangelog = "c"',
        ),
        "CITATION.cff repository-code": ("CITATION.cff", "type:", "repository-code: r\ntype:"),
        "CITATION.cff family-names": ("CITATION.cff", "- name: The", "- family-names: The"),
        "README.md: the address of": ("README.md", "](notebooks/badges", "](https://a/badges"),
    }
    for missing, change_of in changes.items():
        with pytest.raises(SystemExit, match=re.escape(missing)):
            addresses(tmp_path)
        change(*change_of)
    with pytest.raises(SystemExit, match="rounds-and-bytes"):
        addresses(tmp_path)
    change("README.md", "](notebooks/pages/rounds", "](https://a/rounds")
    addresses(tmp_path)
