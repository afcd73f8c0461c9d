"""What the papers prove, counted in runs: FedADMM's and FedBCD's rates, FedBCD's latency.

    python -m simulations.lab.theory --output DIR

writes ``DIR/theory.md``, a table for each, of runs with exact gradients: logistic regression on
digits, 20 clients of two label-sorted shards, half of them active in a round.

- FedADMM, Theorem 1: its gap V (7), mean over the first T rounds, and the bound (8), which needs
  eta = |S|/m; and the mean with eta = 1
- FedBCD, Theorem 1: the means of its three numbers over T rounds, sync- and async-cloud
- FedBCD, (7) and (8): how much shorter a round is that waits for the first B of 10 cloud servers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, Context
from torch import Tensor

from clients import AnyAlgorithmClient, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from clients.node.state import ContextStore, Fields, peek
from fl_strategies import FedADMM, FedBCD, FedBCDAsync
from fl_strategies.bcd.latency import large_latency_gain, latency_gain
from fl_strategies.core.files import write_atomically
from fl_strategies.core.randomness import stream
from fl_strategies.core.schedules import check
from fl_strategies.parts.exponential import Exponential
from fl_strategies.server.strategy import FederatedStrategy
from simulations.config import RunConfig
from simulations.folders import writable
from simulations.lab.command_line import Command, numbers
from simulations.problems import fresh_model, parts, problem
from simulations.stationarity import CloudGap, admm_gap, cloud_gap, gradient_at
from simulations.tables import grid

CLIENTS, SERVERS, BOX = 20, 4, 2.0
TIMES = "10,30,100,300"
"""T, numbers of rounds."""
GROWS = 50
"""The most rounds with eta = 1, whose V overflows float32 after about 100."""
Kept: TypeAlias = Mapping[int, Mapping[str, Tensor]]
"""The fields of each client's state, without clients that never took part."""


def digits() -> tuple[list[Problem], Tensor]:
    """Return the clients' problems, and the model [d] that a run begins with."""
    keys = {"dataset": "digits", "model": "logistic", "partition": "shards", "clients": CLIENTS}
    config = RunConfig.parse(keys)
    problems = [problem(config, "train", rows) for rows, _ in parts(config)]
    problems[0].model.module.load_state_dict(fresh_model(config).state_dict())
    return problems, problems[0].model.vector.clone()


def smoothness(problems: Sequence[Problem]) -> float:
    """Return L, a bound on the Hessians of the clients' losses.

    That of the cross entropy of a logistic model is at most half the largest eigenvalue of the mean
    of x x^T over the samples x, to which a 1 is added for the bias.
    """
    bounds = []
    for one in problems:
        inputs = one.whole[0].flatten(1)
        x = torch.cat([inputs, torch.ones(len(inputs), 1)], 1)
        bounds.append(float(torch.linalg.matrix_norm(x, 2)) ** 2 / (2 * len(x)))
    return max(bounds)


def measured(
    strategy: FederatedStrategy,
    problems: Sequence[Problem],
    rounds: int,
    gap: Callable[[Tensor, Kept], Any],
) -> list[Any]:
    """Run the strategy from the model that the problems hold.

    Return, round by round, ``gap`` of the next global model and of the clients' states, as of the
    replies that the server used.
    """
    model, found = problems[0].model, list[Any]()

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        return AnyAlgorithmClient(problems[me], client_id=me, store=ContextStore(context))

    nodes = InProcessGrid(client_app(client_fn), len(problems))

    def kept(context: Context) -> Fields | None:
        store, acked = ContextStore(context), strategy.ledger.acked.get(client_id(context))
        owner = store.owner()
        return None if owner is None or acked is None else peek(store, owner, acked)[1]

    def look(info: Any) -> None:
        states = {client_id(context): kept(context) for context in nodes.client_contexts()}
        fields = {
            client: {name: torch.from_numpy(value) for name, value in state.items()}
            for client, state in states.items()
            if state is not None
        }
        arrays = [array.numpy() for array in info.arrays.values()]
        found.append(gap(model.load(arrays).clone(), fields))

    strategy.callbacks = (look,)
    strategy.start(nodes, ArrayRecord(model.module.state_dict()), rounds)
    return found


# ---- FedADMM, Theorem 1 -------------------------------------------------------------------------


def fedadmm(times: Sequence[int]) -> str:
    """Return the table: (1/(mT)) sum of V over rounds 0 to T - 1, T times it, and its bound."""
    problems, start = digits()
    smooth, chosen = smoothness(problems), 0.5
    least = (1 + 5**0.5) * smooth
    rho = 1.05 * least
    never = start, torch.zeros_like(start)
    begin = admm_gap(problems, start, [never] * CLIENTS, rho)

    def gap(theta: Tensor, kept: Kept) -> tuple[float, float]:
        """Return V, and the largest squared residual of a local solve."""
        own = {client: (state["w"], state["y"]) for client, state in kept.items()}
        residuals = [gradient_at(problems[i], w) + y for i, (w, y) in own.items()]
        every = [own.get(client, never) for client in range(CLIENTS)]
        return admm_gap(problems, theta, every, rho), max(float(r.dot(r)) for r in residuals)

    def run(eta: Any, rounds: int) -> tuple[npt.NDArray[np.float64], float]:
        """Return the mean of V/m over the first T rounds, for T = 1 to ``rounds``, and epsilon."""
        strategy = FedADMM(
            rho=rho,
            eta=eta,
            newcomer="origin",
            fraction_train=chosen,
            fraction_evaluate=0.0,
            local={"solver": "gd", "lr": 1 / (smooth + rho), "steps": 30},
        )
        problems[0].model.vector.copy_(start)
        found = np.array(measured(strategy, problems, rounds - 1, gap))
        sums = np.cumsum([begin, *found[:, 0]]) / CLIENTS
        return sums / np.arange(1, rounds + 1), float(found[:, 1].max())

    first = sum(problem_loss(one, start) for one in problems)
    means, inexact = run("fraction", max(times))
    others, _ = run(1.0, min(GROWS, max(times)))
    rows = [
        [f"{t}", f"{means[t - 1]:.3g}", f"{t * means[t - 1]:.3g}",
         f"{bound(t, smooth, rho, chosen, first, inexact):.3g}",
         f"{others[t - 1]:.3g}" if t <= len(others) else ""]
        for t in times
    ]  # fmt: skip
    about = (
        f"L = {smooth:.3g}, rho = {rho:.3g} > (1 + sqrt(5)) L = {least:.3g},"
        f" squared residual of a local solve {inexact:.1g}"
    )
    heads = ["T", "mean of V", "T times it", "bound (8)", "mean of V, eta = 1"]
    return f"FedADMM: {about}\n\n" + grid(heads, rows)


def bound(
    rounds: int, smooth: float, rho: float, chosen: float, first: float, inexact: float
) -> float:
    """Return the right side of (8), for losses >= 0; ``first`` is the sum of all f_i at theta^0.

    ``chosen`` is p_min and ``inexact`` epsilon_max.
    """
    c1 = chosen * ((rho - 2 * smooth) / 2 - 2 * smooth**2 / rho)
    c2 = 3 * (smooth**2 + rho**2) + 2 * (1 + 2 * smooth**2 / rho**2)
    c3 = 3 + 16 / rho**2 + c2 / c1 * (rho + 16 * smooth) / (2 * smooth * rho)
    descent = first + CLIENTS * inexact / (2 * smooth)
    return c2 / c1 * descent / (CLIENTS * rounds) + c3 * inexact


def problem_loss(one: Problem, w: Tensor) -> float:
    """Return the client's loss at ``w``."""
    one.model.vector.copy_(w)
    return float(one.full_gradient())


# ---- FedBCD, Theorem 1 --------------------------------------------------------------------------


def fedbcd(times: Sequence[int]) -> str:
    """Return the table: for each T a run with eta_z = d/sqrt(T), and the means over its rounds."""
    problems, start = digits()
    rate = 1 / (smoothness(problems) + 1)
    common: dict[str, Any] = {
        "servers": SERVERS,
        "reduce": "sum",
        "zeta": 0.5,
        "box": BOX,
        "fraction_train": 0.5,
        "fraction_evaluate": 0.0,
        "local": {"solver": "gd", "lr": rate, "steps": 1},
    }
    rows = []
    for t in times:
        fall = (times[0] / t) ** 0.5
        for name, strategy in (
            ("sync-cloud", FedBCD(eta_z=fall / CLIENTS, **common)),
            ("async-cloud, beta = 0.5", FedBCDAsync(
                eta_z=fall * SERVERS / CLIENTS, first=SERVERS // 2, rigorous=True, **common)),
        ):  # fmt: skip
            means = theorem_1(strategy, problems, start, t).mean(0)
            rows.append([name, f"{t}", *(f"{mean:.3g}" for mean in means)])
    heads = ["", "T", "devices", "squared sum of gamma (z - x_i)", "z - z_n"]
    return f"FedBCD: eta_x = {rate:.3g}\n\n" + grid(heads, sorted(rows, key=lambda row: row[0]))


def theorem_1(
    strategy: FederatedStrategy, problems: Sequence[Problem], start: Tensor, rounds: int
) -> npt.NDArray[np.float64]:
    """Return the three numbers of each round [rounds, 3]: of x^(t+1) and z^(t)."""
    clouds = [start]

    def gap(z: Tensor, kept: Kept) -> CloudGap:
        own = [kept[i]["x"] if i in kept else start for i in range(CLIENTS)]
        found = cloud_gap(problems, own, clouds, gamma=1.0, box=BOX)
        after = getattr(strategy.state, "z", ())  # async-cloud
        clouds[:] = [torch.from_numpy(np.asarray(one)) for one in after] or [z]
        return found

    problems[0].model.vector.copy_(start)
    return np.array(measured(strategy, problems, rounds, gap))


# ---- FedBCD's latency ---------------------------------------------------------------------------


def latency(rounds: int, servers: int = 10, devices: int = 10, active: int = 3) -> str:
    """Return the table of r_{B,N}: of the engine's clock, by (7) and by (8).

    tau_n is the longest time of the ``active`` devices whose requests arrive first, K ~ U{1..5}.
    (7) and (8) have the quantiles of tau_n in as many other rounds.
    """
    clock, taus = Exponential(), np.empty((2 * rounds, servers))
    for number in range(2 * rounds):
        epochs = stream(1, "epochs", number).integers(1, 6, servers * devices)
        for n in range(servers):
            theirs = range(n * devices, (n + 1) * devices)
            early = sorted(theirs, key=lambda c: clock.begins(1, number, c))[:active]
            taus[number, n] = max(clock.seconds(1, number, c, float(epochs[c])) for c in early)
    ordered = np.sort(taus[:rounds], axis=1).mean(0)
    others = np.sort(taus[rounds:].ravel())

    def quantile(u: Any) -> Any:
        return np.quantile(others, u)

    rows = [
        [f"{b / servers:g}", f"{ordered[b - 1] / ordered[-1]:.3f}",
         f"{latency_gain(quantile, b, servers):.3f}",
         f"{large_latency_gain(quantile, b / servers, servers):.3f}"]
        for b in range(1, servers)
    ]  # fmt: skip
    return f"FedBCD: {rounds:,} rounds\n\n" + grid(["beta", "rounds", "(7)", "(8)"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables."""
    parser = Command("theory", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for theory.md")
    parser.add_argument(
        "--rounds", type=numbers(int), default=TIMES, help="all T, numbers of rounds >= 2"
    )
    parser.add_argument(
        "--draws", type=int, default=3000, help="rounds of the table of latencies, >= 1"
    )
    args = parser.read(arguments)
    with parser.explained():
        check("rounds", min(args.rounds), low=2)
        check("draws", args.draws, low=1)
        folder = args.output.expanduser().absolute()
        writable(folder, "results folder")
        torch.set_num_threads(1)
        times = sorted(args.rounds)
        text = "\n\n".join([fedadmm(times), fedbcd(times), latency(args.draws)])
        write_atomically(folder / "theory.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
