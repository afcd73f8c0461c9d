"""MOON: FedAvg whose clients keep their features near the global model's.

Local training on non-IID data changes the features that a client's model computes. A contrastive
term counteracts this: the features z of an input must be more similar to those of the received
model than to those of the client's own previous model. For each client i of S, theta received:

    sim(a, b) = <a, b> / (||a|| ||b||)                                          (1)
    h_i(w)    = mean over x of -log( e^{sim(z, z_glob)/tau}
                    / (e^{sim(z, z_glob)/tau} + e^{sim(z, z_prev)/tau}) )       (2)
    w_i       ~ argmin_w f_i(w) + mu h_i(w), started at theta                   (3)
    theta     <- sum_i p_i w_i / sum_i p_i                                      (4)

z       features of the input x in the model w [p], in the mode in which it trains
z_glob  those in the model received, z_prev those in the client's previous model; both are fixed in
        a round and taken in evaluation mode (no dropout, running statistics), once per round
mu      weight of the term, >= 0; mu = 0 is FedAvg
tau     temperature, > 0
p_i     weight of client i: its number of training samples, or 1 ("uniform")

The features of a model are what its last linear layer gets, unless its ``clients.Border`` names
another module by ``head``. Both fixed models enter (2) by their difference alone,

    q = (z_prev/||z_prev|| - z_glob/||z_glob||) / tau                           (5)
    -log(...) of (2) = log(1 + e^s),  s = <z/||z||, q>                          (6)

so one vector per sample is kept while training. For a z of length 0, sim = 0.

A client keeps w_i of its last participation that the server used, with its running statistics, as
``State``. A newcomer's previous model is the one it receives: then q = 0, (2) is log 2 whatever w,
and its first round is FedAvg's. So is every round of a single client, and of a model whose features
do not depend on its parameters (one linear layer: they are the input).

Deviations. The paper puts a projection head of two layers into the model and compares its outputs;
here it is the model's own features; to have the projection, build it into the module. In
the authors' published code the term is 0 for all clients in the first round (FedAvg's as well), and
a client that is first asked later moves away from the random model with which it was made.

Reference: Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

from fl_strategies.core.hyperparameters import Schedule, number
from fl_strategies.core.vectors import Vector
from fl_strategies.fedavg import Averaging
from fl_strategies.server.algorithm import Card


class State(NamedTuple):
    """What a client keeps: its previous model w [d], and that model's running statistics [b]."""

    w: Vector
    statistics: Vector


def unit(z: Vector) -> Vector:
    """Return features [n, p] at length 1; those of length 0 stay."""
    square = (z * z).sum(-1)[..., None]
    return z / (square + (square == 0.0)) ** 0.5


def direction(z_global: Vector, z_previous: Vector, *, tau: float) -> Vector:
    """Return q [n, p] of features [n, p], by (5)."""
    return (unit(z_previous) - unit(z_global)) / tau


def excess(z: Vector, q: Vector) -> Vector:
    """Return s [n] of (6): by how much z looks more like z_prev than like z_glob, over tau."""
    return (unit(z) * q).sum(-1)


class MOON(Averaging):
    """MOON's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "moon"
    card = Card(
        "MOON",
        "a contrastive term keeps local features near the global model's",
        when="deep models of images are trained on non-IID data",
        keeps="model",
        paper="Li, He, Song, CVPR 2021",
        arxiv="2103.16257",
    )
    mu: Schedule = number(
        default=1.0,
        about="Weight of the contrastive term; the authors' by default.",
        low=0.0,
        scheduled=True,
        sent="mu",
    )
    tau: Schedule = number(
        default=0.5,
        about="Temperature; the paper's by default.",
        above=0.0,
        scheduled=True,
        sent="tau",
    )
