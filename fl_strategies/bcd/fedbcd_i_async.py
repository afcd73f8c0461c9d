"""FedBCD-I, async-cloud: devices also train offline, and no cloud server waits for slow others.

Devices do as in ``fedbcd_i``, with their cloud server's z_n instead of z. By the protocol of
``fl_strategies.bcd.async_cloud`` B cloud servers are ready in round t. K_z times they take

    w_n = sum_m a_nm z_m                                         over ready m   (1)
    z_n <- w_n - eta_z sum_{i active in Q_n} gamma_i (w_n - x_i)                (2)

a_nm    1/B, or the weights of ``mixing``, a doubly stochastic matrix that may change from round to
        round; the paper's a_nm^(t,k) may also change between the K_z steps of a round
Q_n     devices of cloud server n; the active ones are those that it asked before this mix. With
        ``reduce="mean"`` the sum of (2) is divided by the sum of its gamma_i; without a usable
        reply w_n is the next z_n

A round of offline training is a round t of the run, whichever cloud servers mix in it: Algorithm 2
has available devices of all cloud servers in each t, and in Section 3.1 one that does not mix in t
has no active devices. So the devices of a slow cloud server train offline while others mix, at
most ``offline_rounds``. Each round draws anew which devices are available. A device that was asked
is in contact, and trains no more, until its cloud server mixes; if its reply is lost, it counts as
available without contact in the round in which it was asked.

B = V = 1 is sync-cloud FedBCD-I. The paper omits the details of this protocol (end of its Section
3.2): these follow its async-cloud protocol for FedBCD.

Reference: Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, Algorithm 2, Sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fl_strategies.bcd import fedbcd_i
from fl_strategies.bcd.async_cloud import AsyncCloudStrategy, AsyncState
from fl_strategies.bcd.fedbcd_i import FedBCDI
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.vectors import Vector
from fl_strategies.server.algorithm import Card, Next


@dataclass(frozen=True)
class ServerState(AsyncState, fedbcd_i.ServerState):
    """What the server keeps: the cloud servers' models, offline rounds, and what is under way."""


class FedBCDIAsync(AsyncCloudStrategy, FedBCDI):  # type: ignore[misc]  # as their base
    """Async-cloud FedBCD-I's server half; see the module's docstring for the rule."""

    algorithm = "fedbcd-i-async"
    runs = "fedbcd-i"
    card = Card(
        "FedBCD-I, async-cloud",
        "FedBCD-I with several cloud servers; the first to finish mix their models",
        when="clients can compute while they are offline, and some cloud servers are slow",
        keeps="model, last iterate",
        paper="Wu et al., AAAI 2021",
        arxiv="2012.13900",
    )

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState({}, theta, clocks=(0.0,) * self.servers)

    def aggregate(self, state: Any, round: Round, uploads: Sequence[Upload]) -> Next:
        clouds = [
            [upload for upload in uploads if state.cloud_of[upload.client] == n]
            for n in range(self.servers)
        ]
        sums = [self.active_sum(active) for active in clouds]
        state = self.counted(state, round, uploads, at_work=state.at_work)
        return self.stepped(state, round, uploads, sums)
