"""Where each algorithm converges to on quadratics, if all clients take K steps of descent a round.

It is worked out by linear algebra, and MOON's by running its equations in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from problems import DIM, Quadratic, optimum

STEPS, RATE = 4, 0.1

START = np.array([2.0, -1.0, 0.5, 3.0, -2.0])


def biased(mu: float, *, uniform: bool = False) -> Callable[[list[Quadratic]], np.ndarray]:
    """The fixed point of averaging after K steps on f_i + (mu/2) ||w - theta||^2, by samples."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
        for q in problems:
            weight = 1 if uniform else q.n
            # K steps from theta: w = theta - P A (theta - b), P = lr sum_k (I - lr (A + mu I))^k
            shrink = np.eye(DIM) - RATE * (q.A + mu * np.eye(DIM))
            P = RATE * sum(np.linalg.matrix_power(shrink, k) for k in range(STEPS))
            left += weight * P @ q.A
            right += weight * P @ q.A @ q.b
        return np.linalg.solve(left, right)

    return limit


def penalised(gamma: float) -> Callable[[list[Quadratic]], np.ndarray]:
    """The z of min sum_i f_i(x_i) + (gamma/2) ||x_i - z||^2: the mean of its x_i."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
        for q in problems:
            # x_i = R (A b + gamma z), so that z - x_i = R A (z - b)
            R = np.linalg.inv(q.A + gamma * np.eye(DIM))
            left, right = left + R @ q.A, right + R @ q.A @ q.b
        return np.linalg.solve(left, right)

    return limit


def pulled(gamma: float, zeta: float) -> Callable[[list[Quadratic]], np.ndarray]:
    """FedBCD-I's fixed point: z is the mean of the x_i that STEPS of (1) and of (2) reproduce."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        unit, none, flat = np.eye(DIM), np.zeros((DIM, DIM)), np.zeros((DIM, 1))
        left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
        for q in problems:
            # both steps as matrices on (x, x_prev, z, 1)
            step = unit - RATE * q.A
            rest = [[none, none, unit, flat], [flat.T, flat.T, flat.T, np.ones((1, 1))]]
            train = [(1 + zeta) * step, -zeta * step, none, (RATE * q.A @ q.b)[:, None]]
            pull = [(1 - gamma) * unit, none, gamma * unit, flat]
            both = [np.block([row, [unit, none, none, flat], *rest]) for row in (train, pull)]
            cycle = np.linalg.matrix_power(both[1], STEPS) @ np.linalg.matrix_power(both[0], STEPS)
            n = 2 * DIM
            stays = np.linalg.solve(np.eye(n) - cycle[:n, :n], cycle[:n, n:])[:DIM]
            left, right = left + unit - stays[:, :DIM], right + stays[:, DIM]
        return np.linalg.solve(left, right)

    return limit


def pooled(problems: list[Quadratic]) -> np.ndarray:
    """Where the mean loss over all examples is least."""
    return optimum(problems, by_examples=True)


def mean_of_minimisers(problems: list[Quadratic]) -> np.ndarray:
    """Where every lambda has come down to 0, each client is at its own minimiser."""
    return np.mean([q.b for q in problems], axis=0)


def contrast_gradient(
    q: Quadratic, w: np.ndarray, theta: np.ndarray, previous: np.ndarray, tau: float
) -> np.ndarray:
    """The gradient at w of MOON's term, in features x_j w_j of an input x."""

    def length(v: np.ndarray) -> np.ndarray:
        return np.linalg.norm(q.X * v, axis=1, keepdims=True)

    def sim(v: np.ndarray) -> np.ndarray:
        return (q.X * w * q.X * v).sum(1, keepdims=True) / length(w) / length(v)

    def slope(v: np.ndarray) -> np.ndarray:  # of sim(v) by the features X w
        return q.X * v / length(w) / length(v) - sim(v) * q.X * w / length(w) ** 2

    wrong = 1 / (1 + np.exp((sim(theta) - sim(previous)) / tau))
    return (q.X * wrong * (slope(previous) - slope(theta)) / tau).mean(0)


def contrasted_steps(
    q: Quadratic, theta: np.ndarray, previous: np.ndarray, mu: float = 1.0, tau: float = 0.5
) -> np.ndarray:
    """What a client of MOON makes of theta in STEPS steps."""
    w = theta
    for _ in range(STEPS):
        w = w - RATE * (q.gradient(w) + mu * contrast_gradient(q, w, theta, previous, tau))
    return w


def contrasted(problems: list[Quadratic]) -> np.ndarray:
    """Where MOON's rounds leave theta and every w_i."""
    theta, examples = START, sum(q.n for q in problems)
    own = [START for _ in problems]
    for _ in range(400):
        own = [contrasted_steps(q, theta, w) for q, w in zip(problems, own, strict=True)]
        theta = sum(q.n / examples * w for q, w in zip(problems, own, strict=True))
    return theta


def meta_biased(inner_rate: float, order: int) -> Callable[[list[Quadratic]], np.ndarray]:
    """The fixed point of plain averaging after K outer steps of MAML, of first or second order."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        left, right, one = np.zeros((DIM, DIM)), np.zeros(DIM), np.eye(DIM)
        for q in problems:
            # w - b = (I - RATE A (I - inner_rate A)^order) (w - b) in each outer step
            adapted = np.linalg.matrix_power(one - inner_rate * q.A, order)
            moved = one - np.linalg.matrix_power(one - RATE * q.A @ adapted, STEPS)
            left += moved
            right += moved @ q.b
        return np.linalg.solve(left, right)

    return limit


def attended(
    problems: list[Quadratic], models: list[np.ndarray], lam: float, alpha: float, sigma: float
) -> list[np.ndarray]:
    """The models of all clients after a round of FedAMP, by its equations in matrices."""
    W = np.array(models)
    xi = alpha / sigma * np.exp(-((W[:, None] - W[None]) ** 2).sum(-1) / sigma)
    np.fill_diagonal(xi, 0.0)
    xi /= np.maximum(xi.sum(1), 1.0)[:, None]
    U = (1 - xi.sum(1))[:, None] * W + xi @ W
    made = []
    for q, u in zip(problems, U, strict=True):
        w = u
        for _ in range(STEPS):
            w = w - RATE * (q.gradient(w) + lam / alpha * (w - u))
        made.append(w)
    return made


def attentive(lam: float, alpha: float, sigma: float) -> Callable[[list[Quadratic]], np.ndarray]:
    """The mean of the clients' models where FedAMP's rounds leave them."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        models = attended(problems, [START for _ in problems], lam, alpha, sigma)
        for _ in range(600):
            models = attended(problems, models, lam, alpha, sigma)
        return np.mean(models, axis=0)

    return limit


def enveloped(lam: float, eta: float, inner_steps: int) -> Callable[[list[Quadratic]], np.ndarray]:
    """pFedMe's fixed point: z is the mean of the uploads of clients whose theta_i stays."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        one, none, flat = np.eye(DIM), np.zeros((DIM, DIM)), np.zeros((DIM, 1))
        left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
        for q in problems:
            # both steps as matrices on (theta, w, 1)
            descend = [
                one - RATE * (q.A + lam * one),
                RATE * lam * one,
                RATE * (q.A @ q.b)[:, None],
            ]
            follow = [eta * lam * one, (1 - eta * lam) * one, flat]
            last = [flat.T, flat.T, np.ones((1, 1))]
            inner = np.block([descend, [none, one, flat], last])
            outer = np.block([[one, none, flat], follow, last])
            cycle = np.linalg.matrix_power(
                outer @ np.linalg.matrix_power(inner, inner_steps), STEPS
            )
            theta = np.linalg.solve(one - cycle[:DIM, :DIM], cycle[:DIM, DIM:])
            upload = cycle[DIM:-1, DIM:] + cycle[DIM:-1, :DIM] @ theta
            left, right = left + one - upload[:, :DIM], right + upload[:, DIM]
        return np.linalg.solve(left, right)

    return limit


def fair(q: float) -> Callable[[list[Quadratic]], np.ndarray]:
    """q-FedAvg's fixed point: ``biased``'s, with F_i^q for a client's weight."""

    def limit(problems: list[Quadratic]) -> np.ndarray:
        theta, one = START, np.eye(DIM)
        for _ in range(500):
            left, right = np.zeros((DIM, DIM)), np.zeros(DIM)
            for problem in problems:
                # theta - w = (I - (I - lr A)^K) (theta - b)
                moved = one - np.linalg.matrix_power(one - RATE * problem.A, STEPS)
                weight = problem.value(theta) ** q
                left, right = left + weight * moved, right + weight * moved @ problem.b
            theta = (theta + np.linalg.solve(left, right)) / 2
        return theta

    return limit
