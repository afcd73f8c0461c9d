"""The client half of FedBCD and FedBCD-I; the rules are in ``fl_strategies.fedbcd`` and ``_i``."""

from __future__ import annotations

from torch import Tensor

from clients.base import Config, FederatedClient, Step, knob
from fl_strategies import fedbcd, fedbcd_i
from fl_strategies.subproblem import Solve


class _Device(FederatedClient):
    """A client that keeps a model of its own and reports K, what it counted in its last solve."""

    def own_model(self, state: fedbcd.State | fedbcd_i.State) -> Tensor:
        own: Tensor = state.x
        return own

    def work(self, config: Config) -> int:
        """Return K: mini-batch steps if the request counts these, else epochs."""
        last = self.infos[-1]
        return last.steps if self.training.updated(config).steps else last.epochs


class FedBCDClient(_Device):
    """Keeps its model and the iterate before it; uploads the model's change."""

    algorithm = "fedbcd"
    state_type = fedbcd.State

    def first_state(self, theta: Tensor, config: Config) -> fedbcd.State:
        return fedbcd.first_state(theta)

    def step(self, state: fedbcd.State, theta: Tensor, solve: Solve, config: Config) -> Step:
        new, upload = fedbcd.client_rule(state, theta, solve, gamma=knob(config, "gamma"))
        return Step(upload, new, {"work": self.work(config), "fresh": 1 - int(state.booked)})


class FedBCDAsyncClient(FedBCDClient):
    """As :class:`FedBCDClient`: a device does not see whether cloud servers wait for each other."""

    algorithm = "fedbcd-async"


class FedBCDIClient(_Device):
    """Trains on its own data for the rounds it was available in, is pulled, uploads its model."""

    algorithm = "fedbcd-i"
    state_type = fedbcd_i.State

    def first_state(self, theta: Tensor, config: Config) -> fedbcd_i.State:
        return fedbcd_i.first_state(theta)

    def step(self, state: fedbcd_i.State, theta: Tensor, solve: Solve, config: Config) -> Step:
        trained = fedbcd_i.train(state, solve, rounds=int(knob(config, "offline-rounds")))
        times = self.work(config)
        pulled = fedbcd_i.pull(
            trained,
            theta,
            gamma=knob(config, "gamma"),
            times=times,
            box=knob(config, "box") or None,
        )
        return Step(pulled.x, pulled, {"work": times})
