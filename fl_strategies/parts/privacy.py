"""Privacy: the models of a run tell little of any one client, and epsilon says how little.

    u_i   = (w_i - theta) min(1, C / ||w_i - theta||)                           (1)
    theta <- theta + (sum_{i in S} u_i + N(0, (z C)^2 I)) / n                   (2)

w_i  uploaded model [d], i in S: the clients whose replies can be used, perhaps none
C    ``clip``, the largest norm of a client's change
z    ``noise``, the noise's standard deviation as a multiple of C
n    ``divisor``; by default "poisson" q m, as each of the m connected clients is asked with
     probability q = ``fraction_train``, by itself, and "fixed" the number of clients asked

n does not depend on the replies, which would tell who took part. A round without any, or that asks
nobody, adds noise alone, counts, and is not skipped. With C above all norms and z = 0, (2) is the
uniform mean to the bit.

With a ``quantile``, C moves to the norm below which this share of the changes lies, round by round:

    b   = 1/2 + (sum_{i in S} (1[||w_i - theta|| <= C] - 1/2) + N(0, s^2)) / n  (3)
    C  <- C exp(-r (b - quantile)),    (2) and (3) having the C of the round    (4)
    z_u = (z^-2 - (2 s)^-2)^(-1/2)     in the place of z in (2)                 (5)

r    ``clip_rate``; ``clip`` is the C of the first round
s    ``count_noise``, by default n/20; z must be below 2 s. With z = 0 there is no noise in (3)

A client moves the sum of (3) by 1/2, so that by (5) its change and its bit together cost what the
change alone costs with z: epsilon is that of z. If fewer than n clients reply, b is drawn to 1/2.
Flower's adaptive wrappers put the share of the changes above C into (4), in the place of the share
below, and so move C away from the quantile.

The guarantee. Two runs that differ in one client's data have models, all rounds' together, whose
probabilities differ by a factor of at most e^epsilon, up to ``delta``. In one run the client's
changes and bits count as 0 (zero-out neighbours); with "fixed" they may also be any others, so the
sum moves by up to 2 C, and z/2 is counted. The client is connected in both runs, since n is public:
by default the scale of the noise tells m. With "poisson" and a ``divisor`` it may be absent from
one.

Epsilon (:mod:`fl_strategies.parts.accounting`) counts on nobody who sees the models knowing who was
asked, or the noise. So both are drawn by the part's own ``seed``, which is not sent, and by default
secret: checkpoints hold it. The server is trusted. Metrics, logs and what clients report are
outside the guarantee: do not publish them. Noise is of floating-point numbers, without protection
from attacks on their last bits. A round that a killed run repeats with other replies has other
noise, and is counted once.

Each upload counts alike, and a model with buffers is refused, since these would be averaged without
noise. ``max_epsilon`` ends the run before a round that would exceed it.

Reference: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018, Algorithm 1; (3) to (5): Andrew, Thakkar, McMahan, Ramaswamy, "Differentially
Private Learning with Adaptive Clipping", NeurIPS 2021; zero-out neighbours: Kairouz, McMahan, Song,
Thakkar, Thakurta, Xu, "Practical and Private (Deep) Learning Without Sampling or Shuffling", ICML
2021, Definition 1.1.
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


LEAST, MOST = 1e-30, 1e30
"""The bounds of C."""


class State(NamedTuple):
    """What the server keeps: seed, sampling, z and sampling rate of each round [T, 2], the next C.

    Without a ``quantile`` C is ``clip``.
    """

    seed: int
    sampling: str
    rounds: Vector
    clip: float


def moved_bound(clip: float, below: float, quantile: float, rate: float) -> float:
    """Return the next C by (4), for the share ``below`` of (3)."""
    with np.errstate(over="ignore"):
        return float(np.clip(clip * np.exp(-rate * (below - quantile)), LEAST, MOST))


def change_noise(z: float, s: float) -> float:
    """Return z_u of (5), for z < 2 s."""
    return z / float(np.sqrt(1.0 - (z / (2.0 * s)) ** 2))


class Gaussian(Part):
    """(1) and (2); see the module's docstring."""

    name = "gaussian"
    stage = "privacy"
    about = "clips each client's change, adds noise to their sum, and counts epsilon"
    paper = "McMahan et al., ICLR 2018"
    needs = (MEAN_OF_MODELS, EQUAL_WEIGHTS, LEAVES_CHOICE)
    clip: float = number(default=1.0, about="C.", above=0.0, high=MOST)
    noise: float = number(default=1.0, about="z. With 0 epsilon is infinite.", low=0.0, high=1e6)
    quantile: float | None = number(
        default=None,
        about="The share of the changes that C is to leave as they are; by default C stays.",
        above=0.0,
        below=1.0,
    )
    clip_rate: float = number(default=0.2, about="r, the paper's by default.", above=0.0, high=10.0)
    count_noise: float | None = number(
        default=None, about="s, by default n/20.", above=0.0, high=1e9
    )
    delta: float = number(default=1e-5, about="Below 1/m.", low=1e-12, below=1.0)
    sampling: Literal["poisson", "fixed"] = choice(
        default="poisson",
        choices=("poisson", "fixed"),
        about="How clients are drawn: each by itself, so that a round may ask nobody, or so many.",
    )
    divisor: float | None = number(
        default=None,
        about="n, a public number: the clients that a round is expected to ask. By default it is"
        " computed from the number of connected clients, and tells it.",
        above=0.0,
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
        seed = secrets.randbits(128) if self.seed is None else self.seed
        return State(seed, self.sampling, np.empty((0, 2)), self.clip)

    def bound(self, state: State) -> float:
        """Return C of the next round."""
        return self.clip if self.quantile is None else state.clip

    def expected(self, asked: int, connected: int, fraction: float) -> float:
        """Return n."""
        if self.divisor is not None:
            return self.divisor
        return float(asked) if self.sampling == "fixed" else fraction * connected

    def noises(self, n: float) -> tuple[float, float]:
        """Return the noise multiplier of (2), and s; raise ``ValueError`` if (5) is not real."""
        if self.quantile is None or not self.noise:
            return self.noise, 0.0
        s = n / 20 if self.count_noise is None else self.count_noise
        if self.noise >= 2 * s:
            raise ValueError(
                f"noise must be < {2 * s:g} with a quantile, twice count_noise (by default n / 20,"
                f" n = {n:g} here), got {self.noise:g}: ask more clients, or give a larger"
                " count_noise"
            )
        return change_noise(self.noise, s), s

    def select(self, state: State, round: Round, fraction: float, size: int) -> list[int]:
        """Return who is asked: ``size`` of ``round.connected``, or each with this probability."""
        rng, clients = stream(state.seed, "sample", round.number), round.connected
        self.noises(self.expected(size, len(clients), fraction))
        if self.sampling == "fixed":
            return draw(rng, clients, size)
        return [c for c, u in zip(clients, rng.random(len(clients)), strict=True) if u < fraction]

    def mean(self, state: State, round: Round, models: Iterable[Vector], fraction: float) -> Vector:
        """Return the next model [d] for the uploaded ones, by (1) and (2)."""
        theta, bound = np.asarray(round.theta), self.bound(state)
        n = self.expected(len(round.asked), len(round.connected), fraction)
        total, used = weighted_sum((clipped(w, theta, bound), 1.0) for w in models)
        if used != n:
            total = total + (n - used) * theta
        if z := self.noises(n)[0]:
            rng = _noise(state, "noise", round, total)
            total = total + rng.normal(0.0, z * bound, theta.size)
        return total / n

    def counted(self, state: State, round: Round, fraction: float) -> State:
        """Return the state with the round in the account of epsilon.

        Raises ``ValueError`` if sampling was another before.
        """
        if state.sampling != self.sampling:
            raise ValueError(f"sampling was {state.sampling!r} before, and is {self.sampling!r}")
        z, q = self.noise, fraction
        if self.sampling == "fixed":
            z, q = z / 2, len(round.asked) / len(round.connected)
        return state._replace(rounds=np.vstack([state.rounds, [z, q]]))

    def moved(
        self, state: State, round: Round, changes: Iterable[Vector], fraction: float
    ) -> State:
        """Return the state with the next C, by (3) and (4), for the clients' ``changes`` [d]."""
        if self.quantile is None:
            return state
        n = self.expected(len(round.asked), len(round.connected), fraction)
        norms = np.array([norm(change) for change in changes])
        rng, s = _noise(state, "count", round, norms), self.noises(n)[1]
        count = float((norms <= state.clip).sum()) - len(norms) / 2
        below = 0.5 + (count + rng.normal(0.0, s)) / n
        return state._replace(clip=moved_bound(state.clip, below, self.quantile, self.clip_rate))

    def epsilon(self, state: State) -> float:
        """Return epsilon of the rounds so far."""
        return accounting.epsilon(state.rounds, self.sampling, self.delta)

    def is_spent(self, state: State) -> bool:
        """Return whether another round like the last would exceed ``max_epsilon``."""
        further = state._replace(rounds=np.vstack([state.rounds, state.rounds[-1:]]))
        return self.max_epsilon is not None and self.epsilon(further) > self.max_epsilon


def clipped(w: Vector, theta: Vector, bound: float) -> Vector:
    """Return theta + u of (1); ``w`` itself if its change is not longer than ``bound``."""
    change = w - theta
    return w if norm(change) <= bound else theta + clip(change, bound)


def _noise(state: State, purpose: str, round: Round, data: Vector) -> np.random.Generator:
    """Return a stream of the round, another one for other ``data``."""
    digest = hashlib.sha256(data.tobytes()).digest()
    return stream(state.seed, purpose, round.number, int.from_bytes(digest))
