"""Problems with a known solution, shared by all tests: `from problems import ...`.

A client's f_i(w) = (1/2n) ||X w - y||^2 = 1/2 (w - b)^T A (w - b) + f_i(b), with curvature A and
minimiser b that differ from client to client and lie off the origin, all in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import Tensor, nn

from clients import (
    AnyAlgorithmClient,
    Border,
    ClientOracle,
    ContextStore,
    LocalTraining,
    Problem,
    client_app,
)
from clients import client_id as id_of
from clients.node.in_process import Fault, InProcessGrid
from clients.node.state import Fields, Owner, peek
from fl_strategies.core.oracle import Gradient, Idle, Part, Solved, Solver
from fl_strategies.core.stacks import repeated
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.messages.one_process import node_ids

DIM = 5
"""Numbers in a model: `head` [2, 2] and `tail` [1], in this order."""

NODES = node_ids(1000)
"""Ids of the in-process nodes, by the client that each serves; ids lie on both sides of 2^63."""

CLIENT_OF = {node: client for client, node in enumerate(NODES)}


class Sum(nn.Module):
    """z [n, p] -> its row sums: the head of `Linear`."""

    def forward(self, z: Tensor) -> Tensor:
        return z.sum(1)


class Linear(nn.Module):
    """x [n, 5] -> x . (head, tail): two arrays, so that their order and shapes matter.

    Its features are the five products that `out` adds up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        self.tail = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.out = Sum()

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.out(x * torch.cat([self.head.reshape(-1), self.tail]))
        return summed


def half_mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().mean()


@dataclass(frozen=True)
class Quadratic:
    """One client's data X [n, 5], y [n] and what a linear solve knows about them."""

    X: np.ndarray
    y: np.ndarray

    @property
    def n(self) -> int:
        return len(self.y)

    @functools.cached_property
    def A(self) -> np.ndarray:  # noqa: N802
        """Curvature: the Hessian X^T X / n, with eigenvalues in [0.4, 2.5]."""
        return self.X.T @ self.X / self.n

    @functools.cached_property
    def b(self) -> np.ndarray:
        """The minimiser."""
        return np.linalg.lstsq(self.X, self.y, rcond=None)[0]

    def value(self, w: np.ndarray) -> float:
        return float(((self.X @ w - self.y) ** 2).mean() / 2)

    def gradient(self, w: np.ndarray) -> np.ndarray:
        return self.A @ (w - self.b)

    def argmin(self, slope: Any = 0.0, pull: float = 0.0, centre: Any = 0.0) -> np.ndarray:
        """Return the minimiser of f(w) + <slope, w> + (pull/2) ||w - centre||^2."""
        right = self.A @ self.b - slope + pull * np.asarray(centre)
        return np.linalg.solve(self.A + pull * np.eye(DIM), right)

    def oracle(self) -> Formula:
        """Return an oracle that solves exactly."""
        return Formula(
            self.gradient,
            lambda start, sub: self.argmin(sub.slope, sub.pull, sub.centre),
            product=lambda w, v: self.A @ v,
            value=self.value,
        )

    def problem(self, model: Border | None = None) -> Problem:
        model = model or Border(Linear())
        return Problem(model, half_mean_square, torch.tensor(self.X), torch.tensor(self.y))


def quadratics(clients: int = 3, seed: int = 0) -> list[Quadratic]:
    """Return crooked problems: curvature, minimiser, noise and size (7, 9, 11 ...) differ."""
    return [*_quadratics(clients, seed)]


@functools.cache
def _quadratics(clients: int, seed: int) -> list[Quadratic]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(clients):
        n = 7 + 2 * i
        columns = np.linalg.qr(rng.normal(size=(n, DIM)))[0]
        turn = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
        X = np.sqrt(n) * columns * np.sqrt(rng.uniform(0.4, 2.5, DIM)) @ turn
        b = rng.normal(3.0 * (-1) ** i, 1.0, DIM)
        made.append(Quadratic(X, X @ b + 0.1 * rng.normal(size=n)))
    return made


@dataclass
class Formula:
    """An oracle of functions, for what is known in closed form.

    ``minimiser(start, subproblem)`` is what ``solve`` finds; without it ``solve`` takes ``steps``
    steps of gradient descent of rate ``lr``.
    """

    slope: Callable[[Any], Any] | None = None
    minimiser: Callable[[Any, Subproblem], Any] | None = None
    product: Callable[[Any, Any], Any] | None = None
    change: Callable[[Any, Any], Any] | None = None
    lr: float = 0.1
    steps: Any = 4
    value: Callable[[Any], Any] | None = None

    counts_steps: bool = False

    @property
    def rate(self) -> float:
        return self.lr

    def solve(
        self, start: Any, subproblem: Subproblem, *, previous: Any = None, **measured: Any
    ) -> Solved:
        if self.minimiser is not None:
            return Solved(self.minimiser(start, subproblem), start, self.steps, 1)
        solved = self._descend(start, subproblem, self.steps)
        return solved._replace(weight=self.steps, rates=self.steps * self.lr)

    def only(self, part: Part, *, epochs: int = 0) -> Solver:
        return self if part == "shared" else Idle()

    def solve_on_next(self, start: Any, subproblem: Subproblem, *, steps: Any) -> Solved:
        if self.minimiser is not None:
            return Solved(self.minimiser(start, subproblem), start, steps, 1)
        return self._descend(start, subproblem, steps)

    def gradient(self, w: Any) -> Gradient:
        assert self.slope is not None
        return Gradient(self.slope(w))

    def full_gradient(self, w: Any) -> Any:
        return self.gradient(w).vector

    def hessian_product(self, w: Any, v: Any) -> Any:
        assert self.product is not None
        return self.product(w, v)

    def difference(self, new: Any, old: Any, *, samples: Any) -> Gradient:
        if self.change is not None:
            return Gradient(self.change(new, old))
        return Gradient(self.full_gradient(new) - self.full_gradient(old))

    def loss(self, w: Any) -> Any:
        assert self.value is not None
        return self.value(w)

    def _descend(self, start: Any, subproblem: Subproblem, steps: Any) -> Solved:
        def step(w: Any, before: Any) -> tuple[Any, Any]:
            return w - self.lr * subproblem.gradient(w, self.full_gradient(w)), w

        w, before = repeated(steps, step, start, start)
        return Solved(w, before, steps, 1)


def oracle_of(
    problem: Problem, training: LocalTraining | None = None, rng: np.random.Generator | None = None
) -> ClientOracle:
    """Return a client's oracle, all of whose streams are ``rng``."""
    rng = rng or np.random.default_rng(0)
    training = training or LocalTraining(solver="gd")
    return ClientOracle(problem, training, rng, functools.partial(_same, rng))


def _same(rng: np.random.Generator, purpose: str) -> np.random.Generator:
    return rng


def optimum(problems: Sequence[Quadratic], *, by_examples: bool = False) -> np.ndarray:
    """Return the minimiser of the mean of all f_i (weighted by their examples)."""
    weights = [q.n if by_examples else 1 for q in problems]
    pairs = list(zip(weights, problems, strict=True))
    return np.linalg.solve(sum(p * q.A for p, q in pairs), sum(p * q.A @ q.b for p, q in pairs))


def to_record(w: np.ndarray) -> ArrayRecord:
    """Return the vector w [5] as the model's ArrayRecord."""
    w = np.asarray(w, np.float64)
    return ArrayRecord({"head": Array(w[:4].reshape(2, 2).copy()), "tail": Array(w[4:].copy())})


def to_vector(arrays: ArrayRecord | Sequence[np.ndarray]) -> np.ndarray:
    """Return the model's arrays as one vector [5]."""
    if isinstance(arrays, ArrayRecord):
        arrays = [arrays["head"].numpy(), arrays["tail"].numpy()]
    return np.concatenate([np.ravel(array) for array in arrays])


def make_client_app(
    problems: Sequence[Quadratic],
    *,
    client: Callable[..., NumPyClient] = AnyAlgorithmClient,
    store: Callable[[Context], Any] = ContextStore,
    training: LocalTraining | None = None,
    dtype: torch.dtype = torch.float64,
    mods: list[Mod] | None = None,
    place: Callable[[Context], int] = id_of,
    hosts: Any = None,
) -> ClientApp:
    """Return a ClientApp whose client has problem ``place(context)``, to train and to evaluate.

    All clients share one module, as in a worker process. Full-batch steps of lr 0.1 by default.
    """
    training = training or LocalTraining(solver="gd", lr=0.1)
    model = Border(Linear().to(dtype), head="out")
    made = [q.problem(model) for q in problems]

    def client_fn(context: Context) -> NumPyClient:
        mine = made[place(context)]
        return client(
            mine, client_id=id_of(context), test=mine, store=store(context), training=training
        )

    return client_app(client_fn, mods, hosts=hosts)


def grid(
    problems: Sequence[Quadratic], *, fault: Fault | None = None, **options: Any
) -> InProcessGrid:
    """Return an in-process federation of one node per problem; options of `make_client_app`."""
    return InProcessGrid(make_client_app(problems, **options), len(problems), fault=fault)


def fields_of(context: Context, acked: int) -> Fields | None:
    """Return the fields of a client's state as of the reply used last; a newcomer has none."""
    store = ContextStore(context)
    about = context.state.config_records.get(store.prefix)
    if about is None:
        return None
    owner = Owner(*(str(about[name]) for name in ("algorithm", "model", "run")))
    return peek(store, owner, acked)[1]


def kept(federation: InProcessGrid, acked: Mapping[int, int]) -> list[Fields]:
    """Return the fields of the state of each client that the server counts on."""
    found = []
    for node, context in federation.contexts.items():
        fields = fields_of(context, acked.get(CLIENT_OF[node], -1))
        assert fields is not None
        found.append(fields)
    return found


def used_states(federation: InProcessGrid, acked: Mapping[int, int]) -> list[Fields]:
    """Return these fields of the clients of which a reply was used."""
    found = []
    for node, context in federation.contexts.items():
        if (last := acked.get(CLIENT_OF[node])) is not None:
            fields = fields_of(context, last)
            assert fields is not None
            found.append(fields)
    return found


def forget(federation: InProcessGrid, client: int) -> None:
    """Let a client lose its state."""
    state = federation.contexts[NODES[client]].state
    for name in list(state):
        del state[name]


class Softplus:
    """mean over a batch of log(1 + exp(A w)) - y A w + ||w||^4/40, with gradients by hand."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.A = rng.normal(0.5, 1.5, (24, DIM)) * [1.0, 3.0, 0.3, 2.0, 0.7]
        self.y = rng.random(24)
        self.start = rng.normal(2.0, 1.0, DIM)

    def batch(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.arange(6 * k, 6 * k + 6) % 24
        return self.A[chosen], self.y[chosen]

    def gradient(self, w: np.ndarray, k: int) -> np.ndarray:
        A, y = self.batch(k)
        return A.T @ (1.0 / (1.0 + np.exp(-A @ w)) - y) / len(y) + (w @ w) * w / 10

    def loss(self, w: torch.Tensor, k: int) -> torch.Tensor:
        A, y = map(torch.tensor, self.batch(k))
        z = A @ w
        return (torch.logaddexp(z, torch.zeros_like(z)) - y * z).mean() + (w @ w) ** 2 / 40


def closure_of(
    optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    return closure


def bowl(L: Any) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return (w, k) -> sum of L (w - 1.5)^2 / 2 for curvatures L."""
    curvature = torch.tensor(L, dtype=torch.float64)
    return lambda w, k: 0.5 * (curvature * (w - 1.5) ** 2).sum()


def steps_of(
    make: Callable[..., torch.optim.Optimizer],
    loss: Callable[[torch.Tensor, int], torch.Tensor],
    x: Any,
    steps: int,
    **options: Any,
) -> tuple[list[np.ndarray], list[float]]:
    """Return the points and step sizes of an optimizer, on one parameter [d]."""
    w = nn.Parameter(torch.tensor(x))
    optimizer = make([w], **options)
    points, etas = [x], []
    for k in range(steps):
        optimizer.step(closure_of(optimizer, lambda k=k: loss(w, k)))
        points.append(w.detach().numpy().copy())
        etas.append(float(optimizer.param_groups[0]["eta"]))
    return points, etas


SLOPE = np.array([0.3, -0.8, 1.1, 0.2, -0.6])
CENTRE = np.array([-1.0, 2.0, 1.5, -0.5, 0.7])
"""Of a subproblem [5] beside f."""


def shared_minimiser(problems: list[Quadratic], b: np.ndarray) -> list[Quadratic]:
    """Return problems of the same curvatures that all have the minimiser ``b`` [5]."""
    return [Quadratic(q.X, q.X @ b) for q in problems]
