"""Small complete Flower Apps to begin with; ``python -m fl_strategies.apps`` writes one of them.

    python -m fl_strategies.apps problem my-app
    flwr run my-app --stream

flower      Flower's own PyTorch quickstart, on scikit-learn's digits: the start of the others
attach      the same with a strategy of this package around the app's own training loop
strategy    the same with a strategy of this package, and the app's own client
problem     the same with a client of this package, which serves every strategy
legacy      the same client in a deployment of the legacy kind, by ``client_fn`` and ``server_fn``

Apps as Flower Hub takes them, with a name, a description and a README of their own:

fedadmm-quickstart    FedADMM, by ``problem``
own-trainer           FedADMM with the app's own training loop, by ``attach``
lora                  adapters of a frozen transformer, by ``problem``

``python -m fl_strategies.apps stop`` ends the SuperLink that ``flwr run`` leaves running.
"""

from __future__ import annotations

import json
import re
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

HERE = Path(__file__).parent
KINDS = ("flower", "attach", "strategy", "problem", "legacy")
HUB = {"fedadmm-quickstart": "problem", "own-trainer": "attach", "lora": "problem"}
"""The apps for Flower Hub, and the kind to which each adds its files."""
RECEIVED = '''
    """Train the received model on the client's data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
'''
TASK = "from my_app.task import Net, load_centralized_dataset, test\n"
ADMM = {
    f"from flwr.serverapp.strategy import FedAvg\n{TASK}": (
        f"{TASK}\nfrom fl_strategies import FedADMM\n"
    ),
    "FedAvg(fraction": "FedADMM(fraction",
}
CHANGES = {
    "attach": ADMM
    | {
        "from flwr.clientapp import ClientApp\n": "",
        "\napp = ClientApp()": "\nfrom clients import ClientApp, attach\n\napp = ClientApp()",
        RECEIVED: f"{RECEIVED}    attach(model)\n",
    },
    "strategy": {
        f"from flwr.serverapp.strategy import FedAvg\n{TASK}": (
            f"{TASK}\nfrom fl_strategies import FedAvg\n"
        ),
        "fraction_evaluate)": "fraction_evaluate, clipping_norm=10.0)",
    },
    "problem": ADMM
    | {
        "FedADMM(fraction_evaluate=fraction_evaluate)": (
            "FedADMM(\n"
            "        fraction_evaluate=fraction_evaluate,\n"
            '        local={"epochs": context.run_config["local-epochs"]},\n'
            "    )"
        ),
    },
    "lora": {
        "import Net, ": "import ",
        "from my_app.task ": "from my_app.adapted import Adapted\nfrom my_app.task ",
        "Net()": "Adapted()",
        "FedADMM": "FedAvg",
        'local={"epochs"': 'local={"solver": "adam", "epochs"',
        "learning-rate = 0.02": "learning-rate = 0.01",
        '"fl-strategies>=': '"fl-strategies[adapters]>=',
    },
}
"""What differs from Flower's app, or from that kind, beside files of the same name."""


def write(kind: str, folder: Path) -> None:
    """Write the app of this ``kind`` into a new ``folder``: Flower's, and what differs.

    Raises ``ValueError`` for an unknown kind and ``FileExistsError`` if there is such a folder.
    """
    if kind not in (*KINDS, *HUB):
        raise ValueError(f"kind must be one of {', '.join([*KINDS, *HUB])}, got {kind!r}")
    folder.mkdir(parents=True)
    for layer in filter(None, ("common", "flower", HUB.get(kind), kind)):
        add(layer, folder)
    if kind in HUB:
        name_it(kind, folder)
    if (path := source()) is not None:
        with (folder / "pyproject.toml").open("a") as file:
            file.write(SOURCE.format(path=json.dumps(str(path))))


def add(layer: str, folder: Path) -> None:
    """Add a layer's files to the app in ``folder``, and make its changes."""
    if (files := HERE / layer).exists():
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(files, folder, dirs_exist_ok=True, ignore=left_out)
    for path in [*folder.rglob("*.py"), folder / "pyproject.toml"]:
        for before, after in CHANGES.get(layer, {}).items():
            path.write_text(path.read_text().replace(before, after))


def name_it(kind: str, folder: Path) -> None:
    """Give the app the name and the description of its README."""
    description = (folder / "README.md").read_text().split("\n\n")[1]
    text = (folder / "pyproject.toml").read_text()
    text = text.replace('name = "my-app"', f'name = "{kind}"')
    text = re.sub(r'(?m)^description = ".*"$', f'description = "{description}"', text)
    text = text.replace("license = {", 'readme = "README.md"\nlicense = {')
    (folder / "pyproject.toml").write_text(text)


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
