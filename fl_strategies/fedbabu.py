"""FedBABU: only the body of a network is trained; each client fits a head after the run.

A model's vector is (theta, h): the arrays that travel, the body, and those that are each client's
own, its head. The head stays at its first values h, so that all bodies are trained towards one
head. Round with theta, for each client i of S:

    w_i   ~ argmin_w f_i(w, h), started at theta; the head is fixed             (1)
    theta <- sum_i p_i w_i / sum_i p_i                                          (2)

and after the run, for each client i:

    w_i, h_i  ~ argmin_{w, h} f_i(w, h), started at theta, h                    (3)

h       the head's first values: those of the initial model; a client whose module begins with
        others is refused
p_i     weight of client i: its number of samples, or 1 ("uniform")

Which arrays are the head is said once, where a client's model is made: ``Border(net,
share="!head")``, as for FedPer and FedRep. Without such arrays FedBABU is FedAvg.

(3) is ``fine-tune`` in ``local``: evaluation then also measures, as ``tuned-accuracy``, the model
after ``fine-tune-epochs`` on the client's training samples. It changes no state, so that it may be
measured after any round. Body and head are both tuned, as in the authors' code, by plain gradient
steps; there for five epochs with momentum 0.9. In (1) their code has a learning rate of 0 for the
head, which is the same.

Reference: Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image
Classification", ICLR 2022, Algorithm 1 and Section 5.2.
"""

from __future__ import annotations

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector
from fl_strategies.fedavg import Averaging
from fl_strategies.server.algorithm import Card


def client_rule(theta: Vector, oracle: Oracle) -> Step:
    """Return the client's upload w, by (1)."""
    solved = oracle.only("shared").solve(theta, Subproblem())
    return Step(solved.w, solved=solved)


class FedBABU(Averaging):
    """FedBABU's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "fedbabu"
    client_half = ClientHalf(client_rule)
    fixes_own = True
    card = Card(
        "FedBABU",
        "trains the body towards a fixed head",
        when="clients fine-tune after the run",
        keeps="nothing",
        paper="Oh, Kim, Yun, ICLR 2022",
        arxiv="2106.06042",
    )
