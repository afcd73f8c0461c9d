"""Settings of every test: no network, one thread, no curves; and the folder of real data sets.

It imports nothing large: the process that hands out the tests to others reads it too.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",  # Ray's own, 15, would have its workers wait for the other tests
}

import pytest

os.fsync = lambda _: None  # it is for a machine that stops, which none does here; it takes 4 ms

REAL = Path(os.environ.get("FL_DATA", Path(__file__).parents[2] / "shared/datasets")).absolute()
"""The folder of real data sets; it need not exist."""
ON_REAL_DATA = f"on real data ({REAL})"
ON_STAND_INS = f"on stand-ins, as there is no {REAL}"
LEFT_OUT = f"left out, as they need real data and there is no {REAL}"
"""How a test's data are told at the end of a test run."""
SAMPLE = {"fedavg", "scaffold", "fedadmm", "fedpd", "fedbcd-async"}
"""The algorithms for which the quick tests run what takes long: one of each mechanism."""
NAMED = pytest.StashKey[dict[str, tuple[set[str], set[str]]]]()
"""By test with the mark ``sampled``: the names that the mark has, and those that cases have."""
DRAWN = (
    ("simulations.experiment", "draw_curves"),
    ("simulations.lab.compare", "draw_curves"),
    ("simulations.lab.compare", "draw_partition"),
)
"""The functions that draw figures, by the modules that call them."""
SHOWN_LINES = 30
"""Of each stream that a failed test printed or logged to."""


@pytest.fixture(autouse=True)
def log_levels() -> None:
    """Log all, whatever level a command before has set."""
    for name in ("flwr", "fl_strategies"):
        logger = logging.getLogger(name)
        if logger.level != logging.DEBUG:  # to set it has all loggers forget what they know
            logger.setLevel(logging.DEBUG)


@pytest.fixture(autouse=True)
def no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what runs and comparisons draw, which takes longer than these if they are small.

    It is drawn in tests with the mark `figures`.
    """
    if not request.node.get_closest_marker("figures"):
        for module, name in DRAWN:
            if module in sys.modules:
                monkeypatch.setattr(sys.modules[module], name, lambda *_: None)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for replies without a pause."""
    from fl_strategies.server import phases

    monkeypatch.setattr(phases, "PAUSE", 0.0)


@pytest.fixture
def federation() -> Generator[Any]:
    """Yield a SuperLink with TLS; afterwards none of its processes is left."""
    from processes import members

    from simulations.lab.deployment import Federation
    from simulations.lab.superlink import running

    with running(Federation) as link:
        link.open()
        yield link
    assert members(link.group) == []


@pytest.fixture(scope="session")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few random images under the names of the real data sets."""
    return stand_in(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="session")
def many_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of ``few_images``, repeated until they are as many as MNIST's."""
    return stand_in(tmp_path_factory.mktemp("datasets"), train=60_000, test=10_000)


@pytest.fixture
def datasets_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of data sets (``FL_DATA``, else the shared one) and set ``FL_DATA``.

    It is the one of ``many_images`` where there is neither, and of ``few_images`` for the parameter
    ``"few"``.
    """
    if getattr(request, "param", "all") == "few":
        folder: Path = request.getfixturevalue("few_images")
    elif REAL.is_dir():
        folder = REAL
        note(request, ON_REAL_DATA)
    else:
        folder = request.getfixturevalue("many_images")
        note(request, ON_STAND_INS)
    monkeypatch.setenv("FL_DATA", str(folder))
    return folder


@pytest.fixture
def real_datasets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of real data sets and set ``FL_DATA``; skip the test if there is none."""
    note(request, ON_REAL_DATA if REAL.is_dir() else LEFT_OUT)
    if not REAL.is_dir():
        pytest.skip(f"no data sets in {REAL}")
    monkeypatch.setenv("FL_DATA", str(REAL))
    return REAL


def note(request: pytest.FixtureRequest, what: str) -> None:
    """Have the end of the test run count this test."""
    request.node.user_properties.append(("data", what))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected and modules imported: nearly all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # what stays is not looked through again
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that read real data sets where there are some, and those that take long."""
    named = config.stash.setdefault(NAMED, {})
    for item in items:
        chosen = item.callspec.params if hasattr(item, "callspec") else {}
        if sampled := item.get_closest_marker("sampled"):
            names = {item.callspec.id, *(str(getattr(it, "name", it)) for it in chosen.values())}
            quick = names & {*(sampled.args or SAMPLE)}
            test = named.setdefault(item.nodeid.partition("[")[0], ({*sampled.args}, set()))
            test[1].update(quick)
            if not quick:
                item.add_marker("slow")
        if item.get_closest_marker("release"):
            item.add_marker("slow")
        fixtures = {"datasets_folder", "real_datasets"} & set(getattr(item, "fixturenames", ()))
        if fixtures and chosen.get("datasets_folder") != "few":
            item.add_marker("data")
            item.add_marker(pytest.mark.xdist_group("data"))  # one process reads each set once


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of what a failed test printed and logged, not some hundred lines of rounds."""
    report = yield
    report.sections = [
        (name, "".join(text.splitlines(keepends=True)[-SHOWN_LINES:]))
        for name, text in report.sections
    ]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which tests ran on real data sets and which did not."""
    tests = {
        (what, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, what in getattr(report, "user_properties", ())
        if name == "data"
    }
    for what in sorted({what for what, _ in tests}):
        files = Counter(name.partition("::")[0] for told, name in tests if told == what)
        counts = ", ".join(f"{count} of {file}" for file, count in sorted(files.items()))
        terminalreporter.write_line(f"{what}: {counts}")


def stand_in(folder: Path, *, train: int = 400, test: int = 50) -> Path:
    """Write training and test samples under the names of the real data sets.

    400 and 50 images are different ones; more repeat them. Shakespeare has its 138 roles.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet
    from tiny_data import encoded, windows

    rng = np.random.default_rng(0)
    for name, column, labels, shape in (
        ("mnist", "image", "label", (28, 28)),
        ("mnist_writers", "image", "character", (28, 28)),
        ("fashion_mnist", "image", "label", (28, 28)),
        ("cifar10", "img", "label", (32, 32, 3)),
    ):
        (folder / name).mkdir()
        for split, different, count in (("train", 400, train), ("test", 50, test)):
            images = rng.integers(0, 256, (different, *shape), dtype=np.uint8)
            columns = {column: encoded(images), labels: np.arange(different) % 10}
            if name == "mnist_writers":  # 100 for training and others for testing
                columns["writer_id"] = [f"{split}-{i % 100}" for i in range(different)]
            table = pa.concat_tables([pa.table(columns)] * (count // different))
            file = folder / name / f"{split}.parquet"
            pa.parquet.write_table(table, file, dictionary_pagesize_limit=2**24)
    (folder / "shakespeare").mkdir()
    x, y = windows(0, 4)
    roles = pa.table(
        {"character_id": np.repeat(np.arange(138), 4).astype(str), "x": x * 138, "y": y * 138}
    )
    for split in ("train", "test"):
        pa.parquet.write_table(roles, folder / "shakespeare" / f"{split}.parquet")
    return folder
