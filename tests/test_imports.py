"""Imports load what they need: packages that take seconds wait until something uses them."""

from __future__ import annotations

import ast
import functools
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from tiny_data import cifar100

import clients
import fl_strategies
import simulations

ROOT = Path(__file__).parents[1]
SLOW = {
    "datasets",
    "flwr_datasets",
    "matplotlib",
    "pandas",
    "ray",
    "scipy",
    "seaborn",
    "sklearn",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torchvision",
    "transformers",
    "wandb",
}
"""What takes 0.4 to 3 CPU seconds to import, in this project or under a package it uses."""


def loaded_after(*statements: str) -> set[str]:
    """Return the modules that a new interpreter has after ``statements``."""
    program = "\n".join([*statements, "import sys", "print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
def test_no_import_loads_a_slow_package_that_it_may_not_need() -> None:
    modules = [
        info.name
        for package in (fl_strategies, clients, simulations)
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    assert modules
    assert loaded_after(*(f"import {name}" for name in modules)) & SLOW == set()


@pytest.mark.slow
def test_a_run_on_images_of_a_folder_loads_only_what_draws_its_curves(tmp_path: Path) -> None:
    """Also when torch's flags are as before: its function that sets them loads a compiler."""
    keys = {"partition": "imbalanced", "clients": 4, "rounds": 1, "steps": 1}
    keys |= {"dataset": str(cifar100(tmp_path)), "output": str(tmp_path / "run")}
    program = f"""
from simulations.config import RunConfig
from simulations.experiment import run_in_process
run_in_process(RunConfig.parse({keys}))"""
    assert loaded_after(program) & SLOW == {"matplotlib"}


@pytest.mark.slow
def test_neither_half_needs_what_windows_lacks(tmp_path: Path) -> None:
    """A folder is kept to one run there too, and folders are not fsynced."""
    lacking = {"fcntl", "grp", "pwd", "resource", "termios"}
    program = f"""
import os, sys, warnings
from pathlib import Path
import flwr.serverapp.strategy, flwr.server.workflow, torch  # whose own imports are theirs
sys.modules.update(dict.fromkeys({lacking}))
for name in ("O_DIRECTORY", "fork", "getuid", "pread", "pwrite", "sched_getaffinity"):
    delattr(os, name)
warnings.simplefilter("ignore")  # filelock tells that no lock of the kernel's is there
import fl_strategies, clients, simulations.server_app, simulations.client_app
from fl_strategies.core.files import FolderLock
folder = Path({str(tmp_path)!r})
for _ in range(2):
    with FolderLock(folder).held("first"):
        try:
            FolderLock(folder).take()
        except ValueError as error:
            print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{tmp_path} is in use by run first (process ") == 2


def test_the_server_half_needs_no_torch() -> None:
    assert "torch" not in loaded_after("import fl_strategies, fl_strategies.testing")


@pytest.mark.slow
def test_only_as_legacy_loads_the_legacy_server() -> None:
    """Beside what Flower loads of it for its own strategies, on which ours are built."""

    def legacy(modules: set[str]) -> set[str]:
        return {name for name in modules if name.startswith("flwr.server.")}

    flowers = loaded_after("import flwr.app, flwr.common, flwr.serverapp.strategy")
    ours = loaded_after("import fl_strategies, clients")
    assert legacy(ours) <= legacy(flowers)
    assert "fl_strategies.compat.legacy" not in ours
    assert "fl_strategies.compat.legacy" in loaded_after("from fl_strategies import as_legacy")


def test_no_module_but_those_of_compat_names_the_legacy_server() -> None:
    """Flower 1.41 loads it by itself; this holds for a Flower that does not."""
    folder = Path(fl_strategies.__file__).parent
    for path in sorted({*folder.rglob("*.py")} - {*folder.glob("apps/*/**/*.py")}):
        names = re.findall(r"^ *(?:from|import) (flwr\.server\b)", path.read_text(), re.MULTILINE)
        assert path.parent.name == "compat" or not names, path.name
    assert not hasattr(fl_strategies, "nothing")


@pytest.mark.slow
def test_another_package_named_clients_is_named_with_the_one_it_hides(tmp_path: Path) -> None:
    def said() -> str:
        done = subprocess.run(
            [sys.executable, "-c", "import fl_strategies"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr

    (tmp_path / "clients").mkdir()
    assert said() == ""
    hiding = tmp_path / "clients/__init__.py"
    hiding.write_text("")
    assert f"`import clients` finds {hiding}" in said()
    assert f"fl_strategies, {ROOT / 'clients/__init__.py'}: rename yours" in said()


# ---- floors -------------------------------------------------------------------------------------

FLOORS = {
    "fl_strategies/core": {
        *("flwr", "torch", "clients", "simulations", "fl_strategies.server"),
        *("fl_strategies.messages", "fl_strategies.solvers"),
    },
    "fl_strategies/solvers": {
        *("flwr", "torch", "clients", "simulations", "fl_strategies.server"),
        "fl_strategies.messages",
    },
    "fl_strategies/parts": {
        *("flwr", "torch", "clients", "simulations", "fl_strategies.server"),
        "fl_strategies.messages",
    },
    "fl_strategies/messages": {"torch", "clients", "simulations", "fl_strategies.server"},
    "fl_strategies/server": {"torch", "clients", "simulations", "fl_strategies.compat"},
    "fl_strategies/testing": {"torch", "clients", "simulations"},
    "fl_strategies/apps": {"simulations"},
    "fl_strategies": {"torch", "clients", "simulations", "flwr"},
    "clients/learning": {
        *("flwr", "simulations", "clients.base", "clients.node", "clients.stacking"),
    },
    "clients/stacking": {"simulations", "fl_strategies.server", "clients.node"},
    "clients/node": {"simulations", "fl_strategies.server"},
    "clients": {"simulations", "fl_strategies.server", "clients.stacking"},
    "simulations": {"simulations.lab"},
}
"""What modules of a folder (its subfolders have rows of their own) must not import when loaded."""
ALLOWED = {
    "fl_strategies/compat/legacy.py": {"flwr"},
    "fl_strategies/compat/translation.py": {"flwr"},
    "fl_strategies/__init__.py": {"flwr"},
}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a module imports when it is loaded."""

    def visit(nodes: Iterable[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.ClassDef | ast.Try):
                yield from visit(node.body)

    yield from visit(tree_of(path).body)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("folder", FLOORS)
def test_no_floor_imports_what_is_above_it(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        inner = [f for f in FLOORS if f.startswith(f"{folder}/")]
        if name.startswith(("simulations/lab/", *(f"{f}/" for f in inner))):
            continue
        for module in imported(path):
            for above in FLOORS[folder] - ALLOWED.get(name, set()):
                if module == above or module.startswith(f"{above}."):
                    found.append(f"{name} imports {module}")
    assert not found


MAP = (ROOT / "notebooks/pages/inside.md").read_text()


def test_the_map_shows_the_folders_in_the_order_of_their_imports() -> None:
    """No folder of the picture imports one that stands above it, but for the papers' rules."""
    picture = MAP.split("```")[1]
    folders = [line.split()[0] for line in picture.strip().splitlines()]
    there = {
        str(path.parent.relative_to(ROOT))
        for top in ("fl_strategies", "clients", "simulations")
        for path in (ROOT / top).rglob("*.py")
    }
    inner = ("fl_strategies/apps", "fl_strategies/bcd")  # templates, and the files of one paper
    assert {*folders} == {folder for folder in there if not folder.startswith(inner)}
    allowed = ("clients", "fl_strategies")  # each is above its own folders, which they import
    wrong = []
    for place, folder in enumerate(folders):
        above = [f"{name.replace('/', '.')}." for name in folders[:place] if name not in allowed]
        for path in sorted((ROOT / folder).glob("*.py")):
            for module in imported(path):
                if module.startswith(tuple(above)):
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_every_file_of_the_map_is_there() -> None:
    tops = ("", "fl_strategies", "clients", "simulations")
    named = [n for n in re.findall(r"`([\w/-]+\.py)`", MAP) if "NAME" not in n]
    assert len(named) > 20
    missing = [n for n in named if not any((ROOT / top / n).is_file() for top in tops)]
    assert not missing


FOR_TYPES = {
    "fl_strategies.compat.legacy",  # loaded when it is asked for
    "matplotlib.axes",
    "matplotlib.figure",
}


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Return, by module, the modules that it imports: also in functions, and for types alone."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for package in ("fl_strategies", "clients", "simulations")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    return {n: {*every_import(p)} & names.keys() - {n} for n, p in names.items()}


@functools.cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return all import statements of a module, also those in functions."""
    nodes = statements(tree_of(path))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all that is below a node, but for expressions, in which no statement is."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


def every_import(path: Path) -> Iterator[str]:
    """Yield all modules that a module names in its imports."""
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached(module: str, needs: Mapping[str, set[str]]) -> set[str]:
    """Return what a module imports, and what that imports."""
    found, new = set[str](), {module}
    while new:
        new = set[str]().union(*(needs[name] for name in new)) - found
        found |= new
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    needs = arrows()
    reach = {name: reached(name, needs) for name in needs}
    circles = {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in needs
        if name in reach[name]
    }
    assert not circles


def test_replies_are_read_without_algorithm_and_strategy() -> None:
    above = {f"fl_strategies.server.{name}" for name in ("algorithm", "stages", "strategy")}
    for name in ("asked", "replies", "reading", "timing", "phases"):
        assert not above & reached(f"fl_strategies.server.{name}", arrows())


def test_only_types_of_flower_are_imported_for_types_alone() -> None:
    """What else a module needs for its types it may as well import."""
    modules = {
        line.module
        for folder in ("fl_strategies", "clients", "simulations")
        for path in (ROOT / folder).rglob("*.py")
        if "TYPE_CHECKING" in path.read_text()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in node.body
        if isinstance(line, ast.ImportFrom) and line.module
    }
    assert {name for name in modules if name.split(".")[0] != "flwr"} == FOR_TYPES


INTERNAL = re.compile(r"flwr\.(cli|proto|supercore|superlink|supernode|common\.\w+)\b")


def test_flowers_internals_are_imported_in_one_module() -> None:
    importing = [
        path.relative_to(ROOT).as_posix()
        for package in ("fl_strategies", "clients", "simulations")
        for path in sorted((ROOT / package).rglob("*.py"))
        if any(INTERNAL.match(name) for name in flower_modules(path))
    ]
    assert importing == ["fl_strategies/messages/internals.py"]


def flower_modules(path: Path) -> Iterator[str]:
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr"):
            yield str(node.module)
