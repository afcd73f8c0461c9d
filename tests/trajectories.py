"""What every algorithm computes with every solver and option, held to twelve digits.

    python tests/trajectories.py               # compares a run with trajectories.json
    python tests/trajectories.py fedadmm sam   # the rows whose names have all these words
    python tests/trajectories.py --shake       # the same with the last bits of outputs changed
    python tests/trajectories.py --write       # writes the file anew, or these rows of it

The numbers in ``trajectories.json`` are those of commit 6959195 with torch 2.14.1 on a CPU.

Four clients of 7 to 11 samples train small networks in float64 for ten rounds, or five with an
option or another network. Half of them take part in a round, where the server may choose, and some
replies are lost: so states, what is acknowledged of them, and all random streams show.

A row is "algorithm/solver", then perhaps "+option", "/network" or a hyperparameter. It holds the
global model's norm and inner product with a fixed vector after three of the rounds, the sum of the
reported train losses, the norm and sum of all states on the clients, and the sum of the losses that
clients measured, if they did. A row of what is refused says so. Rows of "dataset" and "loader" are
those of samples that are fetched.

--shake tells whether rounding alone can fail a row: it moves each output of a network by up to two
units in the last place, anew at each call. No row then moves by more than 2e-14, but for ``lbfgs``,
whose line search amplifies rounding: by 8e-12, so its tolerance is 1e-9 and not 1e-12.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    InProcessGrid,
    Problem,
    client_app,
    client_id,
)
from fl_strategies import STRATEGIES, NothingUsable
from fl_strategies.messages.one_process import node_ids
from fl_strategies.parts import QSGD, TopK


def problem_of(
    module: nn.Module,
    loss: Any,
    x: Tensor,
    y: Tensor,
    *,
    data: str = "tensors",
    share: str | None = None,
    penalised: bool = False,
) -> Any:
    """Return the problem of training ``module`` on ``x`` [n, ...] and classes ``y`` [n].

    All that is known here of how a problem is made. ``penalised`` adds 0.1 sum w^4 to the loss.
    """
    penalty = (lambda w: 0.1 * (w**4).sum()) if penalised else None
    samples: Any = x, y
    if data != "tensors":
        samples = [*zip(x, y, strict=True)]
    if data == "loader":
        samples = DataLoader(samples, batch_size=BATCH, shuffle=True)
    return Problem(Border(module, share=share), loss, samples, penalty=penalty)


SIZES = (7, 8, 10, 11)
"""Samples of each client; no batch is of one sample, which BatchNorm refuses."""
BATCH = 4
CLIENTS = len(SIZES)
LOST = {(2, 0), (2, 3), (4, 1), (5, 2), (7, 0), (8, 3)}
"""(round, client) of replies that do not arrive."""
FILE = Path(__file__).with_suffix(".json")


# ---- networks ------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two names of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def frozen() -> nn.Module:
    module = plain()
    module[0].requires_grad_(False)
    return module


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def convolution() -> nn.Module:
    head = (nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), *head)


NETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (plain, {}),
    "norm": (normalised, {}),
    "own-norm": (normalised, {"share": "!1"}),
    "own-head": (plain, {"share": "!2"}),
    "frozen": (frozen, {}),
    "tied": (Tied, {}),
    "conv": (convolution, {}),
    "dataset": (plain, {"data": "dataset"}),
    "loader": (plain, {"data": "loader"}),
}
"""What makes each network, and how its problem is made."""


def network(name: str) -> nn.Module:
    """Return a network with fixed parameters in [-0.6, 0.6]."""
    module: nn.Module = NETS[name][0]().double()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(rng.uniform(-0.6, 0.6, parameter.shape)))
    return module


def samples(name: str, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's inputs and classes; the classes of each client are mostly two of three."""
    n, rng = SIZES[client], np.random.default_rng([2, client])
    shape = (2, 5, 5) if name == "conv" else (4,)
    y = (rng.integers(0, 5, n) // 2 + client) % 3
    x = rng.normal(0.2 * client, 1.0, (n, *shape)) + y.reshape(n, *(1 for _ in shape))
    return torch.from_numpy(x), torch.from_numpy(y)


# ---- rows ----------------------------------------------------------------------------------------

LOCAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch-size": BATCH}

CLOUDS = {"box": 0.8, "zeta": 0.5, "gamma": 0.5}
TWO = {**CLOUDS, "servers": 2, "first": 1}

RULES: dict[str, dict[str, Any]] = {
    "fedsgd": {"local": {"lr": 0.2}},
    "fedavg": {},
    "fedprox": {"mu": 0.5},
    "fednova": {"mu": 0.2},
    "scaffold": {},
    "proxskip": {"p": 0.4, "local": {"lr": 0.1, "batch-size": BATCH}},
    "q-fedavg": {"q": 0.5},
    "fedadmm": {"rho": 0.5},
    "fedadmm-insa": {"rho": 0.5},
    "feddyn": {"alpha": 0.5},
    "a-fedpd": {"rho": 1.0},
    "fedpd": {"eta": 0.5},
    "fedpd-vr": {
        "eta": 0.5,
        "gamma": 0.2,
        "inner_steps": 4,
        "inner_batch": 3,
        "full_every": 3,
        "local": {},
    },
    "fedbc": {"alpha": 0.05, "alpha_gamma": 0.5},
    "per-fedbc": {"alpha": 0.05, "alpha_gamma": 0.5, "inner_rate": 0.1},
    "fedbcd": CLOUDS,
    "fedbcd-i": CLOUDS,
    "fedbcd-async": TWO,
    "fedbcd-i-async": TWO,
    "ditto": {"lam": 0.5},
    "fedrep": {},
    "fedbabu": {},
    "apfl": {},
    "fedamp": {"lam": 0.5, "alpha": 0.8, "sigma": 20.0},
    "moon": {},
    "per-fedavg": {"inner_rate": 0.1},
    "pfedme": {"lam": 2.0, "eta": 0.05, "inner_steps": 3},
}
"""Every algorithm, and its hyperparameters."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{"weights": "uniform"}],
    "fednova": [{"mu": 0.0}],
    "scaffold": [{"option": "I"}, {"eta_g": 0.5}],
    "fedadmm": [
        {"eta": "fraction"},
        {"local_start": "global"},
        {"tracking": "global"},
        {"newcomer": "origin"},
    ],
    "fedpd": [{"x0_rule": "authors"}, {"missing": "proceed"}, {"p": 0.5}],
    "fedpd-vr": [{"x0_rule": "authors"}, {"missing": "proceed"}, {"p": 0.5}, {"inner_batch": 0}],
    "fedbc": [{"local_start": "client"}, {"dual_momentum": 0.5}],
    "per-fedbc": [{"inner_steps": 2}],
    "fedbcd": [{"reduce": "sum", "eta_z": 0.2}, {"servers": 2}, {"box": None}, {"repeats": 2}],
    "fedbcd-i": [{"offline_rounds": 1, "fraction_available": 0.5}, {"servers": 2}],
    "fedbcd-async": [{"rigorous": True}, {"servers": 4, "first": 2, "staleness": 2}],
    "fedbcd-i-async": [{"rigorous": True}],
    "moon": [{"mu": 5.0, "tau": 0.2}],
    "per-fedavg": [{"meta_gradient": "first-order"}],
    "pfedme": [{"beta": 1.5}, {"local_start": "global"}],
}
"""Other hyperparameters of an algorithm, each a row more."""

SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight-decay": 0.01},
    "gd": {"solver": "gd", "batch-size": None},
    "adam": {"solver": "adam", "lr": 0.02},
    "lbfgs": {"solver": "lbfgs", "batch-size": None, "solver-params": "max_iter=4"},
    "delta-sgd": {"solver": "delta-sgd"},
    "sps": {"solver": "sps"},
    "RMSprop": {"solver": "RMSprop", "lr": 0.01},
}
"""The local settings of each; None: not set, as it would have no effect."""

OPTIONS: dict[str, dict[str, Any]] = {
    "sam": {"local": {"sam": 0.1}},
    "svrg": {"local": {"variance-reduction": "svrg"}},
    "sarah": {"local": {"variance-reduction": "sarah"}},
    "residual": {"local": {"residual": 0.1, "epochs": 4, "weight-decay": 0.02}},
    "extrapolation": {"local": {"extrapolation": 0.5}},
    "box": {"local": {"box": 0.7}},
    "step-limit": {"local": {"step-limit": 3}},
    "random-epochs": {"local": {"random-epochs": True, "epochs": 3}},
    "random-steps": {"local": {"steps": 5, "random-steps": True, "epochs": None}},
    "penalty": {"problem": {"penalised": True}},
    "top-k": {"strategy": {"compression": TopK(share=0.2)}},
    "qsgd": {"strategy": {"compression": QSGD(levels=7)}},
    "evaluated": {"local": {"fine-tune": "train"}, "strategy": {"fraction_evaluate": 1.0}},
}
"""What each adds to the local settings, the problem, the strategy's arguments."""


@dataclass(frozen=True)
class Row:
    """A run: an algorithm with its hyperparameters, local settings, an option, a network."""

    algorithm: str
    solver: str = "sgd"
    option: str = ""
    net: str = "plain"
    variant: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        name = f"{self.algorithm}/{self.solver}"
        name += f"+{self.option}" if self.option else ""
        name += f"/{self.net}" if self.net != "plain" else ""
        return name + "".join(f"/{key}={value}" for key, value in self.variant.items())

    @property
    def quick(self) -> bool:
        """Whether it is one of the few that every test run compares."""
        if self.net != "plain" or self.variant or (self.option and self.solver != "sgd"):
            return False
        return self.algorithm == "fedadmm" or (self.solver == "sgd" and not self.option)

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds of which it holds the model; it has the last of them."""
        return (1, 3, 5) if self.option or self.net != "plain" else (1, 3, 10)

    @property
    def tolerance(self) -> float:
        """By how much a number may differ, relative to itself and in all."""
        return 1e-9 if self.solver == "lbfgs" else 1e-12

    def strategy(self, **others: Any) -> Any:
        """Return the strategy; raise ``ValueError`` if it refuses its arguments."""
        option = OPTIONS.get(self.option, {})
        given = RULES[self.algorithm] | self.variant
        local = given.pop("local", LOCAL) | SOLVERS[self.solver] | option.get("local", {})
        local = {name: value for name, value in local.items() if value is not None}
        partial = {} if self.algorithm.startswith("fedpd") else {"fraction_train": 0.5}
        options = {"fraction_evaluate": 0.0, **partial, **option.get("strategy", {}), **others}
        return STRATEGIES[self.algorithm](
            local=local, seed=5, min_available_nodes=CLIENTS, quiet=True, **given, **options
        )


ON_NETS = {
    "fedavg": "adam",
    "scaffold": "momentum",
    "fedadmm": "adam",
    "fedbcd": "adam",
    "ditto": "momentum",
    "moon": "adam",
    "per-fedavg": "gd",
}
"""Algorithms that train every network, and the solver by which they do it beside ``sgd``."""


def table() -> Iterator[Row]:
    """Yield all rows."""
    for algorithm in RULES:
        yield from (Row(algorithm, solver) for solver in SOLVERS)
        yield from (Row(algorithm, option=option) for option in OPTIONS)
        yield from (Row(algorithm, variant=variant) for variant in VARIANTS.get(algorithm, []))
    for algorithm in ("fedavg", "fedadmm", "fedbcd"):
        for solver in ("momentum", "adam"):
            yield from (Row(algorithm, solver, option) for option in OPTIONS)
    yield from (Row("scaffold", s, variant={"option": "I"}) for s in ("momentum", "adam"))
    for net in list(NETS)[1:]:
        for algorithm, other in ON_NETS.items():
            yield from (Row(algorithm, solver, net=net) for solver in ("sgd", other))


ROWS = {str(row): row for row in table()}


# ---- runs ----------------------------------------------------------------------------------------

CLIENT_OF = {node: client for client, node in enumerate(node_ids(CLIENTS))}


def losing(request: Message, reply: Message) -> Message | None:
    """Lose the replies ``LOST``."""
    config = request.content.config_records.get("config", {})
    about = config.get("server-round"), CLIENT_OF[request.metadata.dst_node_id]
    return None if request.metadata.message_type == "train" and about in LOST else reply


class Shaken:
    """Cross entropy of outputs that are each changed in the last two bits, anew at each call."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        last = 1.0 + 2.0**-52 * self.rng.integers(-2, 2, outputs.shape, endpoint=True)
        return cross_entropy(outputs * torch.from_numpy(last), targets)


def run(row: Row, *, shake: bool = False) -> dict[str, list[float]] | str:
    """Return what the row holds, by name."""
    option = OPTIONS.get(row.option, {})
    build = NETS[row.net][1] | option.get("problem", {})
    module = network(row.net)
    problems = []
    loss = Shaken() if shake else cross_entropy
    for client in range(CLIENTS):
        problems.append(problem_of(copy.deepcopy(module), loss, *samples(row.net, client), **build))

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        mine, store = problems[me], ContextStore(context)
        return AnyAlgorithmClient(mine, client_id=me, test=mine, store=store)

    found: dict[str, list[float]] = {}
    losses, evaluated = [], []

    def ended(info: Any) -> None:
        losses.append(info.metrics.get("train-loss", 0.0))
        measured = {name: x for name, x in info.metrics.items() if name.endswith("-loss")}
        evaluated.append(sum(x for name, x in sorted(measured.items()) if name != "train-loss"))
        if info.server_round in row.rounds:
            found[f"round {info.server_round}"] = summary(info.arrays)

    grid = InProcessGrid(client_app(client_fn), CLIENTS, fault=losing)
    try:
        strategy = row.strategy(callbacks=[ended], max_unusable_rounds=4)
        strategy.start(grid, ArrayRecord(module.state_dict()), row.rounds[-1])
    except (ValueError, NothingUsable):
        return "refused"
    found["train-loss"] = [math.fsum(losses)]
    states = numbers(context.state for context in grid.client_contexts())
    if len(states):
        found["states"] = [float(np.linalg.norm(states)), math.fsum(states)]
    if "fraction_evaluate" in option.get("strategy", {}):
        found["evaluated"] = [math.fsum(evaluated)]
    return found


def numbers(records: Any) -> np.ndarray:
    """Return the floating-point numbers of clients' states."""
    arrays = [
        array.numpy().ravel()
        for record in records
        for kept in record.array_records.values()
        for array in kept.values()
        if array.dtype == "float64"
    ]
    return np.concatenate([np.zeros(0), *arrays])


def summary(arrays: ArrayRecord) -> list[float]:
    """Return the norm of a model's numbers, and their product with a fixed vector."""
    named = sorted((name, array.numpy()) for name, array in arrays.items())
    w = np.concatenate([array.ravel() for _, array in named if array.dtype == np.float64])
    v = np.random.default_rng(4).normal(size=w.size)
    return [float(np.linalg.norm(w)), math.fsum(v * w) / math.sqrt(w.size)]


def difference(row: Row, wanted: Any, got: Any) -> str:
    """Return a sentence on the first thing in which ``got`` is not ``wanted``; "" if nothing is."""
    if isinstance(wanted, str) or isinstance(got, str):
        return "" if wanted == got else f"{row}: wanted {wanted}, got {got}"
    if list(wanted) != list(got):
        return f"{row}: wanted {list(wanted)}, got {list(got)}"
    for name in wanted:
        for old, new in zip(wanted[name], got[name], strict=True):
            if not math.isclose(old, new, rel_tol=row.tolerance, abs_tol=row.tolerance):
                apart = abs(new - old) / max(abs(old), 1e-300)
                return f"{row}, {name}: wanted {old!r}, got {new!r}, {apart:.1e} off"
    return ""


def recorded() -> dict[str, Any]:
    """Return the file's rows."""
    rows: dict[str, Any] = json.loads(FILE.read_text())
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--shake", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("fl_strategies").setLevel(logging.ERROR)
    names = [name for name in ROWS if all(word in name for word in asked.words)]
    found = {name: run(ROWS[name], shake=asked.shake) for name in names}
    if asked.write:
        rows = (recorded() if asked.words else {}) | found
        lines = (f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in ROWS if name in rows)
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    wanted = recorded()
    wrong = [difference(ROWS[name], wanted.get(name), found[name]) for name in names]
    print(*filter(None, wrong), f"{sum(map(bool, wrong))} of {len(names)} rows differ", sep="\n")
    return int(any(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
