"""Small complete Flower Apps to begin with; ``python -m fl_strategies.apps`` writes one of them.

    python -m fl_strategies.apps problem my-app
    flwr run my-app --stream

flower      Flower's own PyTorch quickstart, on scikit-learn's digits: the start of the others
strategy    the same with a strategy of this package, and the app's own client
problem     the same with a client of this package, which serves every strategy
legacy      the same client in a deployment of the legacy kind, by ``client_fn`` and ``server_fn``

``python -m fl_strategies.apps stop`` ends the SuperLink that ``flwr run`` leaves running.
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

HERE = Path(__file__).parent
KINDS = ("flower", "strategy", "problem", "legacy")


def write(kind: str, folder: Path) -> None:
    """Write the app of this ``kind`` into a new ``folder``.

    Raises ``ValueError`` for an unknown kind and ``FileExistsError`` if there is such a folder.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE / "common", folder, ignore=left_out)
    shutil.copytree(HERE / kind, folder, dirs_exist_ok=True, ignore=left_out)
    if (path := source()) is not None:
        with (folder / "pyproject.toml").open("a") as file:
            file.write(SOURCE.format(path=json.dumps(str(path))))


SOURCE = """
# Where this machine has the package from, which is on no index: `flwr run` installs it from there.
[tool.uv.sources]
fl-strategies = {{ path = {path} }}
"""


def source() -> Path | None:
    """Return the folder or wheel from which this package is installed, or None if from an index."""
    clone = HERE.parents[1]
    if (clone / "pyproject.toml").exists():
        return clone
    try:
        text = distribution("fl-strategies").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(text or "{}").get("url", ""))
    path = Path(url2pathname(url.path))
    return path if url.scheme == "file" and path.exists() else None
