"""Buffered pace: asynchronous training. A server step uses the first few replies of those at work.

``concurrency`` clients are at work. Round t begins with the model theta_t, waits for K = ``size``
replies, and ends with a server step. A client that ends is replaced at once by an idle one, which
gets the newest model: theta_t, or theta_{t+1} in the place of the round's last. It may itself end
in round t, and counts. If clients run short, a round has fewer replies. Where a rule averages
models, the model w_i of a client that was asked in round t - a counts as

    v_i = theta_t + s(a) (w_i - theta_{t-a})                                    (1)
    v_i = theta_t + mixing s(a) (w_i - theta_t)    with ``mixing``              (2)
    s(a) = 1                                       staleness "constant"         (3)
    s(a) = (1 + a)^-p                              "polynomial"                 (4)
    s(a) = 1 if a <= b, else 1 / (p (a - b) + 1)   "hinge"                      (5)

a     age of the reply: server steps since its client was asked, 0 for one with the newest model;
      at age 0, (1) is v_i = w_i to the bit
p, b  ``power`` and ``grace``

FedBuff is (1) and (4) around FedAvg with equal weights and ``server_step=Momentum(lr=lr, beta=0)``,
FedAsync is (2) with size 1:

    theta <- theta + lr (1/K) sum_i s(a_i) (w_i - theta_{t-a_i})                (6)
    theta <- (1 - mixing s(a)) theta + mixing s(a) w_i                          (7)

FedAsync's workers add (rho/2) ||w - theta||^2 to their loss, a pull to the model received: that is
``FedProx(mu=rho)``, and FedAvg is rho = 0. Deviation from its Algorithm 1, whose step to x_t counts
t - tau from the received x_tau: a reply to the newest model has age 1 there and 0 here, so that
t - tau = a + 1. So their weight by (4) is (2 + a)^-p, and theirs by (5) is ours with b - 1 for b.

Where the model is a sum of changes, a late one is added whole, as its client has it in its state:
in asynchronous FedADMM (``eta="fraction"``) theta = theta^0 + D/m, whatever the ages.

idle   a client that is not at work, and of which no reply waits for the step: its state counts from
       a reply once that is used. So a round asks a client once at most
asked  drawn by the round's streams (``Round.stream``), in the order in which they get a place: by
       the virtual clock all that the round needs at once, and others if replies were lost
order  "virtual": a reply ends by the clock, and a seed fixes the run. "arrival": by the real
       arrival of replies, without a clock; after the ``timeout`` of ``start`` a round does with
       those that are there
lost   a reply that never comes or cannot be used frees its place, and counts for nothing

Buffers are averaged as they come. ``concurrency`` takes the place of ``fraction_train``.

Reference: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022;
(2)-(5) as in Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", 2019.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fl_strategies.core.hyperparameters import choice, number
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import shown
from fl_strategies.parts.pace import Pace
from fl_strategies.parts.part import Need

TAKES_LATE = Need(
    lambda rule: rule.averages == "models" or rule.takes_late_changes,
    "{rule} neither averages models nor adds up all changes, and its formula is of this round's",
    'FedAvg or another algorithm that averages models, or FedADMM with eta="fraction"',
)
ASKS_A_SHARE = Need(
    lambda rule: not rule.chooses_clients,
    "{rule} says itself who is asked, clients at work among them",
    'FedAvg, FedADMM with eta="fraction" or another algorithm that asks some of the clients',
)


class Buffered(Pace):
    """(1)-(7); see the module's docstring."""

    name = "buffered"
    about = "asynchronous training: the first replies are used, the others go on and come late"
    paper = "Nguyen et al., AISTATS 2022"
    needs = (*Pace.needs, ASKS_A_SHARE, TAKES_LATE)
    size: int = number(default=10, about="Replies of a server step.", integer=True, low=1)
    concurrency: int = number(default=50, about="Clients at work.", integer=True, low=1)
    staleness: Literal["constant", "polynomial", "hinge"] = choice(
        default="polynomial", choices=("constant", "polynomial", "hinge"), about="s: (3), (4), (5)."
    )
    power: float | None = number(
        default=None, about="p; by default 0.5 in (4) and 10 in (5).", above=0.0
    )
    grace: int | None = number(
        default=None, about="b; by default 4, in (5) alone.", integer=True, low=0
    )
    mixing: float | None = number(
        default=None,
        about="Share of a reply of age 0, by (2); by default (1).",
        above=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        if self.size > self.concurrency:
            most, size = shown(self.concurrency), shown(self.size)
            raise ValueError(f"size must be <= concurrency={most}, got {size}")
        if self.power is not None and self.staleness == "constant":
            raise ValueError('power needs staleness "polynomial" or "hinge", got "constant"')
        if self.grace is not None and self.staleness != "hinge":
            raise ValueError(f'grace needs staleness "hinge", got "{self.staleness}"')

    def weight(self, age: int) -> float:
        """Return s of an age, by (3)-(5)."""
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return float((1.0 + age) ** -(self.power or 0.5))
        late = age - (4 if self.grace is None else self.grace)
        return 1.0 if late <= 0 else 1.0 / ((self.power or 10.0) * late + 1.0)

    def aged(self, round: Round, upload: Upload) -> Upload:
        """Return the uploaded model as v_i, by (1) or (2)."""
        age, theta = round.number - upload.round, round.received
        weight = self.weight(age) * (self.mixing or 1.0)
        if weight == 1.0 and (age == 0 or self.mixing):
            return upload
        begun = theta if self.mixing else round.received_by(upload)
        return upload._replace(vector=theta + weight * (np.asarray(upload.vector) - begun))
