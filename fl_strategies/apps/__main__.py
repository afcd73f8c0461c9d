"""``python -m fl_strategies.apps``: write a small complete Flower App, or stop what ran it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fl_strategies import apps


def main() -> None:
    """Write the app that the command line asks for, and say how to run it."""
    parser = argparse.ArgumentParser(
        "python -m fl_strategies.apps",
        description=apps.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=[*apps.KINDS, *apps.HUB, "stop"], help="one of the above")
    parser.add_argument("folder", type=Path, nargs="?", help="the app's; must not exist")
    given = parser.parse_args()
    if given.kind == "stop":
        if given.folder is not None:
            parser.error(f"stop ends this user's SuperLink and takes no folder, got {given.folder}")
        try:
            from fl_strategies.apps.stop import stop
        except ModuleNotFoundError:
            parser.error("stop needs psutil: pip install psutil")

        print(f"{stop()} processes ended")
        return
    if given.folder is None:
        parser.error("a folder for the app is missing")
    if given.folder.exists():
        parser.error(f"{given.folder} exists already")
    apps.write(given.kind, given.folder)
    folder = shlex.quote(str(given.folder))
    print(
        f"{given.folder} holds the app. To run it, installing first what it needs:\n"
        f'flwr run {folder} --stream --federation-config "num-supernodes=10"'
    )


if __name__ == "__main__":
    main()
