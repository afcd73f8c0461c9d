"""MOON's loss (``clients.moon.contrast``) for a stack of clients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from clients.learning.objective import Objective
from clients.learning.problem import Problem
from clients.moon import contrast, statistics_of, terms, warn_of_no_effect
from clients.stacking.means import of_each
from clients.stacking.stack import NONE, Stack
from fl_strategies import moon


class Contrasts(Stack):
    """f_i + mu h_i of a stack's clients, by (3).

    :meth:`set_directions` sets the q of all their samples. A sample's place says where its row of q
    is. The places of a client follow those of the client before it. Mini-batches hold places.
    ``mu`` is a number or a column.
    """

    def __init__(self, stack: Stack, *, mu: Any) -> None:
        vars(self).update(vars(stack))  # the same samples, which are not copied
        like, ends = self.model.vector, np.cumsum(self.sizes)
        starts = ends - self.sizes
        if self._rows is None:
            rows = np.repeat(self._starts - starts, self.sizes) + np.arange(ends[-1])
            self._row_at = torch.from_numpy(rows).to(like.device)
        else:
            self._row_at = self._rows
        self._rows, self._starts = None, starts
        if isinstance(mu, Tensor):
            owners = np.repeat(np.arange(len(self)), self.sizes)
            mu = mu.to(like)[torch.from_numpy(owners).to(like.device), 0]
        self._mu, self._q = mu, like.new_empty(len(self._row_at), 0)

    @torch.no_grad()
    def set_directions(self, state: moon.State, theta: Tensor, *, tau: Any) -> None:
        """Set q, by (5). The state and ``theta`` hold a row for each client."""
        self.model.module.eval()
        # clients of similar sizes together: then less than half of a piece is padding
        levels = np.frexp(self.sizes)[1]
        for who in [np.flatnonzero(levels == level) for level in np.unique(levels)]:
            at = torch.from_numpy(who).to(theta.device)
            w, statistics = (vectors[at] for vectors in state)
            fixed = [
                (self.model.views(theta[at]), NONE),
                (self.model.views(w), self._buffers_of(statistics)),
            ]
            each_tau = tau[at] if isinstance(tau, Tensor) else tau
            for batches, _ in self.whole(who):
                inputs, _ = self._gathered(self._row_at.take(batches.samples))
                z = [self._featured(values, inputs, buffers)[1] for values, buffers in fixed]
                q = moon.direction(*z, tau=each_tau).to(theta)
                if not self._q.shape[1]:
                    self._q = q.new_empty(len(self._q), q.shape[-1])
                self._q[batches.samples] = q  # padding repeats a client's last sample

    def _buffers_of(self, statistics: Tensor) -> dict[str, Tensor]:
        """Return the clients' floating-point buffers [k, ...] of their ``statistics`` [k, b]."""
        buffers = self.model.module.named_buffers()
        named = {name: buffer for name, buffer in buffers if buffer.is_floating_point()}
        pieces = torch.split(statistics, [buffer.numel() for buffer in named.values()], 1)
        return {
            name: piece.to(buffer.dtype).view(-1, *buffer.shape)
            for (name, buffer), piece in zip(named.items(), pieces, strict=True)
        }

    def _of_samples(
        self, leaves: Sequence[Tensor], samples: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = self._gathered(self._row_at.take(samples))
        outputs, z = self._featured(leaves, inputs)
        if not z.requires_grad:
            warn_of_no_effect()
        outputs = outputs.flatten(0, 1)
        losses = of_each(self._loss, outputs, targets).view(samples.shape)
        q = self._q.index_select(0, samples.reshape(-1)).view(*samples.shape, -1)
        mu = self._mu.take(samples) if isinstance(self._mu, Tensor) else self._mu
        return losses + mu * terms(z, q), outputs, targets

    @functools.cached_property
    def _featured(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Outputs [k, b, ...] and features [k, b, p] for parameters [k, ...], inputs [k, b, ...].

        Buffers [k, ...] by name may take the place of the module's.
        """
        model = self.model
        chained = self._chained(model.heads) if model.heads else None

        def one(values: Sequence[Tensor], inputs: Tensor, buffers: Mapping[str, Tensor]) -> Any:
            def forward(x: Tensor, _: Tensor) -> Any:
                return self._called(values, x, buffers)

            return model.with_features(forward, inputs, inputs)

        def featured(
            values: Sequence[Tensor], inputs: Tensor, buffers: Mapping[str, Tensor] = NONE
        ) -> tuple[Tensor, Tensor]:
            results: tuple[Tensor, Tensor] = (
                chained(values, inputs) if chained else vmap(one)(values, inputs, dict(buffers))
            )
            return results

        return featured


def contrasts(stack: Stack, state: moon.State, theta: Tensor, *, mu: Any, tau: Any) -> Contrasts:
    """Return (3) for a stack; the state and ``theta`` [clients, d] have a row for each client."""
    made = Contrasts(stack, mu=mu)
    made.set_directions(state, theta, tau=tau)
    return made


def bytes_of(problem: Objective) -> int:
    """Return the bytes of q, and of the features of which it is made."""
    inputs, targets = (part[:1] for part in problem.whole)
    problem.model.module.eval()
    with torch.no_grad():
        _, z = problem.model.with_features(problem.forward, inputs, targets)
    return 3 * len(problem) * z.numel() * z.element_size()


def alone_in_trial(problem: Problem) -> Objective:
    """Return the loss of one client, whose two fixed models differ."""
    theta = problem.model.vector.clone()
    state = moon.State(theta.flip(0), statistics_of(problem.model))  # any other model
    return contrast(problem, state, theta, mu=1.0, tau=1.0)


def stacked_in_trial(stack: Stack) -> Stack:
    """Return the loss of :func:`alone_in_trial` for a stack."""
    theta, kept = stack.model.vector, statistics_of(stack.model)
    theta, w, kept = (v.expand(len(stack), -1) for v in (theta, theta.flip(0), kept))
    return contrasts(stack, moon.State(w, kept), theta, mu=1.0, tau=1.0)
