"""What a round costs next to a plain loop, Flower's own FedAvg and pfl-research."""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import flwr
import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import AnyAlgorithmClient, Border, InProcessGrid, Problem, client_app, client_id
from fl_strategies import FedAvg
from fl_strategies.core.log import mute_below
from simulations.tables import grid

PAGE = Path(__file__).parents[2] / "notebooks/pages/scale.md"
MARKS = "<!-- peers -->\n", "<!-- end of peers -->\n"
BATCH, RATE, WARM = 20, 0.1, 2
"""Samples of a step, the learning rate, and rounds at the beginning that do not count."""


class Case(NamedTuple):
    """A federation in which ``asked`` of the clients train for an epoch in each round."""

    clients: int
    asked: int
    samples: int
    """Of each client."""
    rounds: int = 14


CASES = {"small round": Case(100, 10, 600), "few steps": Case(1000, 100, 60)}


class Federation:
    """The clients' samples, the model, and what every framework notes at each round's end."""

    def __init__(self, case: Case) -> None:
        self.case = case
        random = torch.Generator().manual_seed(0)
        self.x = torch.randn(case.clients * case.samples, 784, generator=random)
        self.y = (self.x @ torch.randn(784, 10, generator=random)).argmax(1)
        self.rows = torch.split(torch.arange(len(self.x)), case.samples)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        self.initial = ArrayRecord(self.model.state_dict())
        self.options: dict[str, Any] = {
            "fraction_train": case.asked / case.clients,
            "min_train_nodes": case.asked,
            "min_available_nodes": case.clients,
            "fraction_evaluate": 0.0,
        }
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def note(self, *_: object) -> None:
        """Note the time; Flower calls it before the first round and after each."""
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())

    def train(self, client: int) -> dict[str, float]:
        """Train the model on a client's samples, as one writes it; return what ours reports."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        order = self.rows[client][torch.randperm(self.case.samples)]
        losses, scores = [], []
        for batch in torch.split(order, BATCH):
            optimizer.zero_grad()
            outputs = self.model(self.x[batch])
            loss = cross_entropy(outputs, self.y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
            scores.append(outputs.detach())
        right = torch.cat(scores).argmax(1) == self.y[order]
        return {
            "train-loss": float(torch.stack(losses).mean()),
            "train-accuracy": float(right.float().mean()),
            "steps": len(losses),
            "epochs": 1,
        }


def plain(of: Federation) -> list[Tensor]:
    """A plain loop: one client after the other, the mean of their models and of their reports."""
    theta = [p.detach().clone() for p in of.model.parameters()]
    parameters: list[Tensor] = [*of.model.parameters()]
    rng = np.random.default_rng(0)
    of.note()
    for _ in range(of.case.rounds):
        total, weight, reports = [torch.zeros_like(p) for p in theta], 0, []
        for client in rng.choice(of.case.clients, of.case.asked, replace=False):
            with torch.no_grad():
                torch._foreach_copy_(parameters, theta)
            reports.append(of.train(client))
            with torch.no_grad():
                torch._foreach_add_(total, parameters, alpha=of.case.samples)
            weight += of.case.samples
        theta = [part / weight for part in total]
        _ = {name: statistics.fmean(report[name] for report in reports) for name in reports[0]}
        of.note()
    return theta


def client_fn_of(of: Federation) -> Callable[[Context], AnyAlgorithmClient]:
    """Return the function that makes our clients."""
    model, x, y, rows = Border(of.model), of.x, of.y, of.rows  # workers get these, not ``of``

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        return AnyAlgorithmClient(Problem(model, cross_entropy, x, y, rows=rows[me]), client_id=me)

    return client_fn


def ours(of: Federation) -> list[Tensor]:
    """FedAvg on the in-process engine, a node for each client."""
    return on_engine(of, client_app(client_fn_of(of)))


def two_workers(of: Federation) -> list[Tensor]:
    """The same, trained by two processes."""
    return on_engine(of, client_app(client_fn_of(of)), workers=2)


def stacked(of: Federation) -> list[Tensor]:
    """The same, all clients on one host, which trains those asked in stacks."""
    app = client_app(client_fn_of(of), hosts=of.case.clients, stack="auto")
    return on_engine(of, app, hosts=1, shared_population=of.case.clients)


def echo(of: Federation) -> list[Tensor]:
    """The same with clients that return the arrays that they got."""

    class Echo(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, of.case.samples, {"train-loss": 1.0, "train-accuracy": 0.0}

    return on_engine(of, client_app(lambda context: Echo()))


def on_engine(
    of: Federation,
    app: ClientApp,
    *,
    hosts: int = 0,
    workers: int = 1,
    shared_population: int = 0,
) -> list[Tensor]:
    """Run our FedAvg."""
    local: dict[str, Any] = {"lr": RATE, "batch-size": BATCH, "epochs": 1}
    engine = InProcessGrid(app, of.case.clients, hosts=hosts, workers=workers)
    strategy = FedAvg(**of.options, local=local, shared_population=shared_population)
    return tensors(strategy.start(engine, of.initial, of.case.rounds, evaluate_fn=of.note))


def flowers(of: Federation) -> list[Tensor]:
    """Flower's own FedAvg on this engine, with the plain loop as ``@app.train``."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        of.model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        report = of.train(int(context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": of.case.samples, **report})
        arrays = ArrayRecord(of.model.state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    engine, strategy = InProcessGrid(app, of.case.clients), FlowerFedAvg(**of.options)
    return tensors(strategy.start(engine, of.initial, of.case.rounds, evaluate_fn=of.note))


def tensors(result: Any) -> list[Tensor]:
    """Return the arrays of a run's result."""
    return [*result.arrays.to_torch_state_dict().values()]


def pfl(of: Federation) -> list[Tensor]:
    """pfl-research's FedAvg, which reports nothing of the steps."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = of.model

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            self.train()
            return cross_entropy(self.layers(x), y)

        def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
            return {}

    class Note(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            of.note()
            return False, Metrics()

    def client(number: int) -> Any:
        order = of.rows[number][torch.randperm(of.case.samples)]
        return Dataset(raw_data=[of.x[order], of.y[order]])

    module = Module()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    users = FederatedDataset(client, get_user_sampler("random", [*range(of.case.clients)]))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=of.case.rounds + 1,  # the first mark is after a round
            evaluation_frequency=10**9,
            train_cohort_size=of.case.asked,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, val_data=None, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        None,
        callbacks=[Note()],
    )
    return [p.detach() for p in module.parameters()]


def with_pfl(path: str) -> Path:
    """Return the folder in which pfl-research is; a type of argparse."""
    if not Path(path, "pfl").is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder pfl in {path}")
    return Path(path)


PLAIN, OURS = "a plain loop", "ours"
FRAMEWORKS: dict[str, Callable[[Federation], list[Tensor]]] = {
    PLAIN: plain,
    OURS: ours,
    "ours, two workers (time)": two_workers,
    "ours, stacked on one host": stacked,
    "an echo client on our engine": echo,
    "Flower's FedAvg on our engine": flowers,
    "pfl-research": pfl,
}


class Measured(NamedTuple):
    """Milliseconds of a round, the median of a run, and the last model's loss on all samples."""

    cpu: float
    wall: float
    loss: float


def measured(name: str, case: Case, path: Path | None) -> Measured:
    """Run a framework, which is perhaps found in the folder ``path``, in a process of its own.

    It is no child of ``multiprocessing``, in which pfl-research does not run.
    """
    call = "from simulations.lab.benchmark_peers import alone; alone()"
    words = [sys.executable, "-c", call, json.dumps([name, case, str(path or "")])]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
    return Measured(*json.loads(done.stdout.splitlines()[-1]))


def alone() -> None:
    """Measure what the process was told to; print the numbers."""
    name, case, path = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    mute_below(logging.ERROR)
    sys.path.append(path)
    of = Federation(Case(*case))
    parameters = FRAMEWORKS[name](of)
    vector = torch.cat([p.flatten() for p in parameters])
    nn.utils.vector_to_parameters(vector, of.model.parameters())
    with torch.no_grad():
        loss = float(cross_entropy(of.model(of.x), of.y))
    print(json.dumps([*(1000 * np.median(np.diff(t)[WARM:]) for t in (of.cpu, of.wall)), loss]))


def peers(
    folder: Path, write: bool = False, peers: Path | None = None, turns: int = 3
) -> list[list[str]]:
    """FedAvg of an MLP 784-128-10, B = 20, E = 1: CPU milliseconds of a round, the median of 12,
    each framework in fresh processes of one thread, by turns: median and range. The row of two
    workers is in elapsed time, and so are its ratios."""
    rows = [
        ["case", "framework", "CPU ms a round", "of the plain loop", "ours of it", "loss after"]
    ]
    for title, case in CASES.items():
        runs: dict[str, list[Measured]] = {}
        for turn in range(turns):
            for name in FRAMEWORKS:
                if name == "pfl-research" and peers is None:
                    continue
                run = measured(name, case, peers)
                runs.setdefault(name, []).append(run)
                print(title, turn, name, run, file=sys.stderr)
        for name in FRAMEWORKS:
            if name not in runs:
                rows.append([title, name, "left out: no --peers", "", "", ""])
                continue
            column = 1 if "workers" in name else 0
            times, base, own = ([run[column] for run in runs[n]] for n in (name, PLAIN, OURS))
            cells = [
                shown(times, ".0f"),
                shown(np.divide(times, base)),
                shown(np.divide(own, times)),
            ]
            loss = statistics.median(run.loss for run in runs[name])
            rows.append([title, name, *cells, f"{loss:.2f}"])
    if write:
        put_on_page(rows)
    return rows


def shown(values: Any, form: str = ".2f") -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} ... {max(values):{form}})"


def put_on_page(rows: list[list[str]]) -> None:
    """Write the table, and how it was measured, between the marks of the page."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    command = f"python -m simulations.lab.benchmark {' '.join(sys.argv[1:])}"
    versions = f"torch {torch.__version__}, Flower {flwr.__version__}"
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}, {versions}"
    begin, end = MARKS
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    said = f"`{command}`, commit {commit}, {date.today().isoformat()}, {machine}:"
    PAGE.write_text(f"{before}{begin}\n{said}\n\n{grid(rows[0], rows[1:])}\n{end}{after}")
