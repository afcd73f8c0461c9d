"""Small complete Flower Apps to begin with; ``python -m fl_strategies.apps`` writes one of them.

    python -m fl_strategies.apps problem my-app
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 flwr run my-app --stream

flower      Flower's own PyTorch quickstart, on scikit-learn's digits: the start of the others
strategy    the same with a strategy of this package, and the app's own client
problem     the same with a client of this package, which serves every strategy
legacy      the same client in a deployment of the legacy kind, by ``client_fn`` and ``server_fn``
"""

from __future__ import annotations

import shutil
from pathlib import Path

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
