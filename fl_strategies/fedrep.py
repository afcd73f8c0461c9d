"""FedRep: clients share the body of a network; each first fits its own head, then trains the body.

A model's vector is (theta, h): the arrays that travel, the body, and those that are each client's
own, its head. Round with theta, for each client i of S:

    h_i   ~ argmin_h f_i(theta, h), started at h_i; the body is fixed           (1)
    w_i   ~ argmin_w f_i(w, h_i), started at theta; the head is fixed           (2)
    theta <- sum_i p_i w_i / sum_i p_i                                          (3)

h_i     client i's head, kept by the client; a newcomer has the values that its module begins with
p_i     weight of client i: its number of samples, or 1 ("uniform")
head_epochs  passes over the samples in (1); (2) is solved as ``local`` says

Which arrays are a client's own is said once, where its model is made: ``Border(net,
share="!head")``. The same clients run FedPer (Arivazhagan et al. 2019), which is FedAvg: both parts
train at once, and nothing else differs. Without arrays of its own a client takes no step in (1),
and FedRep is FedAvg. What is measured on clients is the received body with the client's own head;
the server's model has the head of the initial model.

The paper's (1) takes tau_h gradient steps and its (2) one (Algorithm 1); its networks have ten
epochs of (1) and one or five of (2). Running statistics follow both parts, as in the authors' code.
There (1) and (2) share one optimizer, whose momentum of the body outlives a round's end no more
than ours; here each part begins with none. Its last round trains the head of every client for ten
epochs; here the head of a client is of the round in which it trained last.

Reference: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for
Personalized Federated Learning", ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Schedule, count_of, number
from fl_strategies.core.oracle import Oracle, Step, both
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector
from fl_strategies.fedavg import Averaging
from fl_strategies.server.algorithm import Card
from fl_strategies.solvers.local import default_training


def client_rule(theta: Vector, oracle: Oracle, *, head_epochs: int) -> Step:
    """Return the client's upload w, by (1) and (2)."""
    head = oracle.only("own", epochs=head_epochs).solve(theta, Subproblem())
    body = oracle.only("shared").solve(theta, Subproblem())
    steps, epochs = head.steps + body.steps, both(head.epochs, body.epochs)
    return Step(body.w, solved=body._replace(steps=steps, epochs=epochs))


class FedRep(Averaging):
    """FedRep's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "fedrep"
    client_half = ClientHalf(client_rule)
    card = Card(
        "FedRep",
        "a common body, and a head for each client",
        when="one body can serve clients whose labels differ",
        keeps="its head",
        paper="Collins, Hassani, Mokhtari, Shakkottai, ICML 2021",
        arxiv="2102.07078",
    )
    head_epochs: Schedule = number(
        default=10,
        about="Epochs of (1); the authors' by default.",
        integer=True,
        low=1,
        scheduled=True,
        sent="head-epochs",
    )

    @classmethod
    def most_steps(cls, config: Mapping[str, Any], local: float, samples: int) -> float:
        batches = default_training().updated(config).batches(samples)
        return local + count_of(config, "head-epochs") * batches
