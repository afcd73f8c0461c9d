"""``python -m fl_strategies.apps KIND FOLDER``: write a small complete Flower App."""

from __future__ import annotations

import argparse
from pathlib import Path

from fl_strategies import apps


def main() -> None:
    """Write the app that the command line asks for, and say how to run it."""
    parser = argparse.ArgumentParser(
        "python -m fl_strategies.apps",
        description=apps.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=apps.KINDS, help="one of the above")
    parser.add_argument("folder", type=Path, help="where the app is written; must not exist")
    given = parser.parse_args()
    if given.folder.exists():
        parser.error(f"{given.folder} exists already")
    apps.write(given.kind, given.folder)
    print(
        f"{given.folder} holds the app. Where fl-strategies[simulation] is installed:\n"
        f"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 flwr run {given.folder} --stream"
        ' --federation-config "num-supernodes=10"'
    )


if __name__ == "__main__":
    main()
