"""MOON's client half; the rule is in ``fl_strategies.moon``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clients.base import FederatedClient
from clients.learning.cohort import CohortOracle
from clients.learning.contrasts import Contrasts, terms, warn_of_no_effect
from clients.learning.model import FlatModel
from clients.learning.objective import Objective
from clients.learning.oracle import ClientOracle
from clients.learning.problem import Problem
from clients.learning.replay import without_trace
from clients.learning.stack import Stack, Variant, obstacle
from clients.request import Config, Received, value_of
from fl_strategies import fedavg, moon
from fl_strategies.core.oracle import Step


class MOONClient(FederatedClient):
    """Keeps its model and running statistics; uploads its model.

    ``train-loss`` is the loss (3), which includes the contrastive term. Raises ``ValueError`` for a
    model without features (see ``clients.FlatModel``), and for a problem with a ``gradient`` of its
    own.
    """

    algorithm = "moon"
    only_solves = True
    state_type = moon.State

    def first_state(self, theta: Tensor, config: Config) -> moon.State:
        return moon.State(theta, statistics_of(self.problem.model))

    def contrast(self, state: moon.State, theta: Tensor, config: Config) -> Contrast:
        """Return (3), with the features of the two fixed models; the model stays as it was."""
        model = self.problem.model
        with without_trace([model.vector], model.module):
            model.vector.copy_(theta)
            z_global = frozen_features(self.problem)
            model.vector.copy_(state.w)
            buffers = statistics(model.module)
            pieces = state.statistics.split([buffer.numel() for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.view_as(buffer))
            z_previous = frozen_features(self.problem)
        q = moon.direction(z_global, z_previous, tau=value_of(config, "tau"))
        return Contrast(self.problem, q, mu=value_of(config, "mu"))

    def step(
        self,
        state: moon.State,
        received: Received,
        oracle: ClientOracle | CohortOracle,
        config: Config,
    ) -> Step:
        theta = received.theta
        if isinstance(oracle, CohortOracle):
            stack = contrasts(oracle.stack, state, theta, config)
            made = fedavg.client_rule(theta, oracle.on(stack))
        else:
            made = fedavg.client_rule(theta, oracle.on(self.contrast(state, theta, config)))
        kept = statistics_of(self.problem.model).expand(*theta.shape[:-1], -1)
        return made._replace(state=moon.State(made.upload, kept))

    def obstacle(self) -> str:
        return obstacle(self.problem, CONTRASTED)

    def stacked_bytes(self) -> int:
        """Return the bytes of q, and of the features of which it is made."""
        inputs, targets = (part[:1] for part in self.problem.whole)
        self.problem.model.module.eval()
        with torch.no_grad():
            _, z = self.problem.model.with_features(self.problem.forward, inputs, targets)
        return 3 * len(self.problem) * z.numel() * z.element_size()


class Contrast(Problem):
    """f + mu h of ``problem``, by (3), for a fixed q [n, p].

    Its targets are sample numbers, by which a mini-batch finds its labels and its rows of q.
    """

    def __init__(self, problem: Objective, q: Tensor, *, mu: float) -> None:
        if problem.own_gradient:
            raise ValueError(
                f"MOON needs the gradient of f + mu h, got {type(problem).__name__} with a"
                " gradient of f of its own, which would stay unused"
            )
        inputs, self.labels = problem.whole
        rows = torch.arange(len(problem), device=self.labels.device)
        super().__init__(problem.model, problem.loss, inputs, rows, penalty=problem.penalty)
        self.plain, self.q, self.mu = problem, q, mu

    @property
    def classifies(self) -> bool:
        return self.plain.classifies

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.plain.right(outputs, self.labels[targets])

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        labels = self.labels[targets]
        (loss, outputs), z = self.model.with_features(self.plain.forward, inputs, labels)
        if not z.requires_grad:
            warn_of_no_effect()
        return loss + self.mu * terms(z, self.q[targets]).mean(), outputs


@torch.no_grad()
def frozen_features(problem: Objective) -> Tensor:
    """Return the features [n, p] of all inputs in the current model, in evaluation mode."""
    problem.model.module.eval()
    found = [problem.model.with_features(problem.forward, x, y)[1] for x, y in problem.chunks()]
    return torch.cat(found)


def statistics(module: nn.Module) -> list[Tensor]:
    """Return the module's floating-point buffers."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


def statistics_of(model: FlatModel) -> Tensor:
    """Return the module's floating-point buffers as one vector [b]."""
    pieces = [buffer.reshape(-1).to(model.vector) for buffer in statistics(model.module)]
    return torch.cat([model.vector[:0], *pieces])


# ---- stacks of clients --------------------------------------------------------------------------


def contrasts(stack: Stack, state: moon.State, theta: Tensor, config: Config) -> Contrasts:
    """Return (3) for a stack; the state and ``theta`` [clients, d] have a row for each client."""
    made = Contrasts(stack, mu=value_of(config, "mu"))
    made.set_directions(state, theta, tau=value_of(config, "tau"))
    return made


TRIAL: Config = {"mu": 1.0, "tau": 1.0}


def _tried_alone(problem: Problem) -> Contrast:
    theta = problem.model.vector.clone()
    state = moon.State(theta.flip(0), statistics_of(problem.model))  # any other model
    return MOONClient(problem, client_id=0).contrast(state, theta, TRIAL)


def _tried_at_once(stack: Stack) -> Contrasts:
    theta, kept = stack.model.vector, statistics_of(stack.model)
    theta, w, kept = (v.expand(len(stack), -1) for v in (theta, theta.flip(0), kept))
    return contrasts(stack, moon.State(w, kept), theta, TRIAL)


CONTRASTED = Variant(_tried_alone, _tried_at_once)
