"""FedBCD, async-cloud: each cloud server has its own model, and the first few to finish mix.

Devices do as in ``fedbcd``, with their cloud server's z_n instead of z. By the protocol of
``fl_strategies.bcd.async_cloud`` B cloud servers are ready in round t. K_z times they take

    w_n = sum_m a_nm z_m                                        over ready m    (1)
    z_n <- w_n - eta_z sum_{i in Q_n} gamma_i (w_n - x_i)                       (2)

a_nm    1/B, or the weights of ``mixing``, a doubly stochastic matrix that may change from round to
        round; the paper's a_nm^(t,k) may also change between the K_z steps of a round
Q_n     ALL devices of cloud server n. With ``reduce="mean"`` the sum of (2) is divided by the sum
        of its gamma_i

B = V = 1 is sync-cloud FedBCD. With B = V > 1 the cloud servers' models still differ, as (2) pulls
each to its own devices.

The sums of (2) are kept as in sync-cloud, which also says what happens to devices that are new or
lost their state.

Reference: Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, Algorithm 1, eq. 6 and Section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl_strategies.bcd import fedbcd
from fl_strategies.bcd.async_cloud import AsyncCloudStrategy, AsyncState
from fl_strategies.bcd.fedbcd import Sum, SummingStrategy
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.vectors import Vector
from fl_strategies.server.algorithm import Card, Next


@dataclass(frozen=True)
class ServerState(AsyncState, fedbcd.ServerState):
    """What the server keeps: the cloud servers' models and sums, and what is under way."""


class FedBCDAsync(AsyncCloudStrategy, SummingStrategy):  # type: ignore[misc]  # as their base
    """Async-cloud FedBCD's server half; see the module's docstring for the rule."""

    algorithm = "fedbcd-async"
    runs = "fedbcd"
    card = Card(
        "FedBCD, async-cloud",
        "FedBCD with several cloud servers; the first to finish mix their models",
        when="several cloud servers share the clients, and some are slow",
        keeps="model, last iterate",
        paper="Wu et al., AAAI 2021",
        arxiv="2012.13900",
    )

    def first_state(self, theta: Vector) -> ServerState:
        nothing, clocks = (Sum(),) * self.servers, (0.0,) * self.servers
        return ServerState({}, theta, sums=nothing, clocks=clocks)

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        state = self.with_uploads(state, uploads)
        return self.stepped(state, round, uploads, state.sums)
