"""Privacy: the models of a run tell little of any one client, and epsilon says how little.

    u_i   = (w_i - theta) min(1, C / ||w_i - theta||)                           (1)
    theta <- theta + (sum_{i in S} u_i + N(0, (z C)^2 I)) / n                   (2)

w_i  uploaded model [d], i in S: the clients whose replies can be used, perhaps none
C    ``clip``, the largest norm of a client's change
z    ``noise``, the noise's standard deviation as a multiple of C
n    "fixed": the number of clients asked, |S| if no reply is lost. "poisson": q m, as each of the m
     connected clients is asked with probability q = ``fraction_train``, by itself

n does not depend on the replies, which would tell who took part. A round without any adds noise
alone, and is not skipped. With C above all norms and z = 0, (2) is the uniform mean to the bit.

The guarantee. Two runs whose clients differ in one client, with all of its data, have models, all
rounds' together, whose probabilities differ by a factor of at most e^epsilon, up to ``delta``. With
"poisson" one client more or less is there, with "fixed" another in its place: that changes the sum
by up to 2 C, so it is counted with z/2. Epsilon is dp-accounting's,
which counts on nobody who sees the models knowing who was asked, or the noise. So both are drawn by
the part's own ``seed``, which is not sent, and by default secret: checkpoints hold it. The server
is trusted. Metrics, logs and what clients report are outside the guarantee: do not publish them.
Noise is of floating-point numbers, without protection from attacks on their last bits. A round that
a killed run repeats with other replies has other noise, and is counted once.

Each upload counts alike, and a model with buffers is refused, since these would be averaged without
noise. ``max_epsilon`` ends the run before a round that would exceed it.

Reference: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018, Algorithm 1; Wang, Balle, Kasiviswanathan, "Subsampled Renyi Differential
Privacy and Analytical Moments Accountant", AISTATS 2019.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from fl_strategies.core.clipping import clip, norm
from fl_strategies.core.hyperparameters import choice, number
from fl_strategies.core.randomness import draw, stream
from fl_strategies.core.records import Round
from fl_strategies.core.vectors import Vector, weighted_sum
from fl_strategies.parts import accounting
from fl_strategies.parts.part import MEAN_OF_MODELS, Need, Part
from fl_strategies.parts.selection import LEAVES_CHOICE

EQUAL_WEIGHTS = Need(
    lambda rule: rule.equal_weights,
    "{rule} weights uploads by what clients say of themselves, and the noise is that of equal"
    " weights",
    'FedAvg, FedProx or another algorithm with weights="uniform"',
)


class State(NamedTuple):
    """What the server keeps: seed and sampling, and the divergences of all rounds and the last."""

    seed: int
    sampling: str
    total: Vector
    last: Vector


class Gaussian(Part):
    """(1) and (2); see the module's docstring."""

    name = "gaussian"
    stage = "privacy"
    about = "clips each client's change, adds noise to their sum, and counts epsilon"
    paper = "McMahan et al., ICLR 2018"
    needs = (MEAN_OF_MODELS, EQUAL_WEIGHTS, LEAVES_CHOICE)
    clip: float = number(default=1.0, about="C.", above=0.0)
    noise: float = number(default=1.0, about="z. With 0 epsilon is infinite.", low=0.0)
    delta: float = number(default=1e-5, about="Below 1/m.", above=0.0, below=1.0)
    sampling: Literal["fixed", "poisson"] = choice(
        default="fixed", choices=("fixed", "poisson"), about="How clients are drawn."
    )
    max_epsilon: float | None = number(
        default=None, about="The largest epsilon; by default there is none.", above=0.0
    )
    seed: int | None = number(
        default=None,
        about="Fixes sample and noise, for whoever knows it; by default drawn by the system.",
        integer=True,
        low=0,
        high=2**63 - 1,
    )

    def begin(self, state: State | None) -> State:
        """Return the state at the beginning of a ``start``, given that of the last or None.

        Raises ``ImportError`` if dp-accounting is not installed.
        """
        if self.noise:
            accounting.package()
        if state is not None:
            return state
        seed, nothing = self.seed, np.zeros(len(accounting.ORDERS))
        seed = secrets.randbits(128) if seed is None else seed
        return State(seed, self.sampling, nothing, nothing)

    def select(self, state: State, round: Round, fraction: float, size: int) -> list[int]:
        """Return who is asked: ``size`` of ``round.connected``, or each with this probability."""
        rng, clients = stream(state.seed, "sample", round.number), round.connected
        if self.sampling == "fixed":
            return draw(rng, clients, size)
        return [c for c, u in zip(clients, rng.random(len(clients)), strict=True) if u < fraction]

    def mean(self, state: State, round: Round, models: Iterable[Vector], fraction: float) -> Vector:
        """Return the next model [d] for the uploaded ones, by (1) and (2)."""
        theta, fixed = np.asarray(round.theta), self.sampling == "fixed"
        n = float(len(round.asked)) if fixed else fraction * len(round.connected)
        total, used = weighted_sum((self.clipped(w, theta), 1.0) for w in models)
        if used != n:
            total = total + (n - used) * theta
        if self.noise:
            digest = hashlib.sha256(total.tobytes()).digest()
            rng = stream(state.seed, "noise", round.number, int.from_bytes(digest))
            total = total + rng.normal(0.0, self.noise * self.clip, theta.size)
        return total / n

    def clipped(self, w: Vector, theta: Vector) -> Vector:
        """Return theta + u of (1); ``w`` itself if its change is not longer than C."""
        change = w - theta
        return w if norm(change) <= self.clip else theta + clip(change, self.clip)

    def after(self, state: State, round: Round, fraction: float) -> State:
        """Return the state after the round; raise ``ValueError`` if sampling was another before."""
        if state.sampling != self.sampling:
            raise ValueError(f"sampling was {state.sampling!r} before, and is {self.sampling!r}")
        if not self.noise:
            cost: Vector = np.full(len(accounting.ORDERS), np.inf)
        elif self.sampling == "poisson":
            cost = accounting.of_poisson(self.noise, fraction)
        else:
            cost = accounting.of_fixed(self.noise / 2, len(round.asked), len(round.connected))
        return state._replace(total=state.total + cost, last=cost)

    def epsilon(self, state: State) -> float:
        """Return epsilon of the rounds so far."""
        return accounting.epsilon(state.total, self.delta)

    def is_spent(self, state: State) -> bool:
        """Return whether another round like the last would exceed ``max_epsilon``."""
        further = state._replace(total=state.total + state.last)
        return self.max_epsilon is not None and self.epsilon(further) > self.max_epsilon
