"""FedBC: personalized models within a distance of the global model; lambda is pull and weight.

Each client keeps a personalized model within a squared distance gamma of the global model. The dual
variable lambda of this constraint pulls the client's model towards the global model, and is the
client's weight at the server. The problem is  min sum_i f_i(x_i)  such that
||x_i - z||^2 <= gamma_i. Round with the model z received, for each client i of S:

    x+ ~ argmin_x  f_i(x) + lambda ||x - z||^2,  started at z, or at x_i        (1)
    lambda+, gamma+ by the dual step of ``fl_strategies.proximity``             (2)
    z <- sum_{i in S} lambda+_i x+_i / sum_{i in S} lambda+_i                   (3)

x, lambda, gamma
        client's model [d], dual variable and allowed squared distance, kept by the client; a
        newcomer has x = z, lambda = gamma = 0. The server keeps z

Facts. With a fixed gamma the fixed points satisfy the KKT conditions of the problem: the gradients
of f_i at x_i sum to zero, lambda_i (||x_i - z||^2 - gamma_i) = 0; only as gamma -> 0 is z the
minimiser of the sum. With the heuristic gamma every lambda is 0 in the end, and FedBC is FedAvg
with uniform weights; if (1) starts at x_i, z is then the plain mean of the clients' own minimisers.
With the paper's small alpha a run ends long before that. Started at z, FedBC with lambda_min =
lambda_max = mu/2 is FedProx with uniform weights (the paper's text says mu, and its (1) has no
factor 1/2), and with lambda_min = lambda_max = 0 it is FedAvg.

What the proof needs. Where each f_i is L-smooth, Lemma B.1 and what follows eq. (42) need lambda >=
1 + L, and what follows (61) needs lambda_max < (1 + L)^2 / L. Without, with lambda_min = 0 and the
paper's start at x_i, lambda stays so small that local training does not feel it: x_i is what client
i would train alone, and z is a mean of models trained alone. Started at z, the default, clients
begin together whatever their lambda. With ``local_start="client"`` set ``lambda_min``, to 1 or
above.

FedBC-FineTune measures the personalized model after one gradient step: ``fine-tune`` in ``local``
(``clients.LocalTraining``) reports that in addition to the model as it is.

The paper starts (1) at x_i (``local_start="client"``, in ``FedBC.paper_rule``). Its authors'
published code starts at z, which is the default here, and its dual optimiser has momentum, which
moves the lambda of absent clients too (``dual_momentum=0.5``, in ``FedBC.authors_rule``). FedAvg
and FedProx have weights by samples in that code; if all lambda are 0, it divides 0 by 0.

Reference: Bedi, Fan, Koppel, Sahu, Sadler, Huang, Manocha, "FedBC: Calibrating Global and Local
Models via Federated Learning Beyond Consensus", 2022, Algorithms 1 and 2, appendix E.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Scalar, choice
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector
from fl_strategies.proximity import (
    FIRST,
    READS,
    Dual,
    ProximityStrategy,
    State,
    Turn,
    dual_step,
    first_state,
    idle_steps,
    uploaded,
)
from fl_strategies.server.algorithm import Card

Side: TypeAlias = Literal["client", "global"]


def client_rule(
    state: State,
    z: Vector,
    oracle: Oracle,
    *,
    dual: Dual,
    turn: Turn = FIRST,
    local_start: Side = "global",
) -> Step:
    """Return the client's next state, by (1) and (2); its x and lam are the upload."""
    state = idle_steps(state, dual, turn.clock - state.clock)
    start = state.x if local_start == "client" else z
    solved = oracle.solve(start, Subproblem(pull=2 * state.lam, centre=z))
    return uploaded(dual_step(state, solved.w, z, dual, turn), solved)


class FedBC(ProximityStrategy):
    """FedBC's server half; see the module's docstring for the rule."""

    algorithm = "fedbc"
    client_half = ClientHalf(client_rule, State, first_state, own="x", reads=READS)
    card = Card(
        "FedBC",
        "personalized models within a distance of the global model",
        when="personalized models and a global model are both needed",
        keeps="model, five numbers",
        paper="Bedi et al., 2022",
        arxiv="2206.10815",
    )
    paper_rule: ClassVar[Mapping[str, Any]] = {"local_start": "client", "dual_momentum": 0.0}
    paper_local: ClassVar[Mapping[str, Scalar]] = {"epochs": 5, "batch-size": 20, "momentum": 0.5}
    authors_rule: ClassVar[Mapping[str, Any]] = {"local_start": "global", "dual_momentum": 0.5}
    authors_local: ClassVar[Mapping[str, Scalar]] = paper_local
    local_start: Side = choice(
        default="global",
        choices=("client", "global"),
        about="Whether (1) starts from z or, as in the paper, from the client's own x.",
        sent="local-start",
    )

    @property
    def moves_received(self) -> bool:  # type: ignore[override]  # a constant of other rules
        return self.local_start == "global"
