"""Problems with a known solution, shared by all tests: `from problems import ...`.

A client's f_i(w) = (1/2n) ||X w - y||^2 = 1/2 (w - b)^T A (w - b) + f_i(b), with curvature A and
minimiser b that differ from client to client and lie off the origin, all in float64.
"""

from __future__ import annotations

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

from clients import AnyAlgorithmClient, ContextStore, FlatModel, LocalTraining, Problem, client_app
from clients import client_id as id_of
from clients.state import Fields, Owner, peek
from simulations.in_process import Fault, InProcessGrid

DIM = 5
"""Numbers in a model: `head` [2, 2] and `tail` [1], in this order."""


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
    return 0.5 * ((outputs - targets) ** 2).mean()


@dataclass(frozen=True)
class Quadratic:
    """One client's data X [n, 5], y [n] and what a linear solve knows about them."""

    X: np.ndarray
    y: np.ndarray

    @property
    def n(self) -> int:
        return len(self.y)

    @property
    def A(self) -> np.ndarray:  # noqa: N802
        """Curvature: the Hessian X^T X / n, with eigenvalues in [0.4, 2.5]."""
        return self.X.T @ self.X / self.n

    @property
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

    def problem(self, model: FlatModel | None = None) -> Problem:
        model = model or FlatModel(Linear())
        return Problem(model, half_mean_square, torch.tensor(self.X), torch.tensor(self.y))


def quadratics(clients: int = 3, seed: int = 0) -> list[Quadratic]:
    """Return crooked problems: curvature, minimiser, noise and size (7, 9, 11 ...) differ."""
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
) -> ClientApp:
    """Return a ClientApp whose client i has problem i, for training and for evaluation.

    All clients share one module, as in a worker process. Full-batch steps of lr 0.1 by default.
    """
    training = training or LocalTraining(solver="gd", lr=0.1)
    model = FlatModel(Linear(), dtype=dtype, head="out")
    made = [q.problem(model) for q in problems]

    def client_fn(context: Context) -> NumPyClient:
        i = id_of(context)
        return client(made[i], client_id=i, test=made[i], store=store(context), training=training)

    return client_app(client_fn, mods)


def grid(
    problems: Sequence[Quadratic], *, fault: Fault | None = None, **options: Any
) -> InProcessGrid:
    """Return an in-process federation of one node per problem; options of `make_client_app`."""
    return InProcessGrid(make_client_app(problems, **options), len(problems), fault=fault)


def kept(federation: InProcessGrid, acked: Mapping[int, int]) -> list[Fields]:
    """Return the fields of the state of each client that the server counts on."""
    found = []
    for client, context in enumerate(federation.contexts.values()):
        store = ContextStore(context)
        about = context.state.config_records[store.prefix]
        owner = Owner(str(about["algorithm"]), str(about["model"]))
        _, fields = peek(store, owner, acked.get(client, -1))
        assert fields is not None
        found.append(fields)
    return found
