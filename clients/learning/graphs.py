"""A local step as one CUDA graph. Experimental: it has not run on a GPU yet.

A GPU finishes a step of a small model before the host has launched the step's operators one by one.
A CUDA graph holds these launches, which the host then starts at once. It reads and writes fixed
memory: the model's vector, its gradient and buffers lie where they are; mini-batches, the slope and
centre of a subproblem, and the velocity are copied to where the graph reads them.

A step that CUDA cannot capture, such as one that looks at a value on the host, ends the solve with
an error. A graph repeats operators, not Python code: a module whose forward pass depends on
anything else than tensors and torch's generators (a counter, Python's ``random``) must not be
captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from clients.learning.choice import say_once
from clients.learning.objective import Objective
from clients.learning.problem import Problem
from clients.learning.streamed import StreamedProblem
from fl_strategies.core.local import LocalTraining
from fl_strategies.core.reasons import of_exception
from fl_strategies.core.subproblem import Subproblem

Take: TypeAlias = Callable[[Any, Tensor], tuple[Tensor, ...]]
"""Takes a step on a mini-batch; returns the loss and the outputs before it, detached."""

WARM = 3
"""Steps before the one that is captured: libraries initialise themselves in them."""
KEPT = 8
"""Graphs of a model at most; each holds the memory of a mini-batch's pass."""


class Moving(Protocol):
    """An optimizer with a momentum, whose first step makes the velocity (``solvers.Descent``)."""

    momentum: float
    velocity: Tensor | None


class StepGraph:
    """Takes the steps of similar solves, from a graph once one is captured.

    They are steps of ``optimizer`` on ``subproblem``, into which :meth:`begin` copies the slope and
    centre of another solve. Mini-batches have ``batch_size`` samples; steps on other batches, and
    on batches of more than one tensor, are not captured.
    """

    def __init__(self, optimizer: Moving, subproblem: Subproblem, batch_size: int) -> None:
        self.optimizer, self.batch_size = optimizer, batch_size
        self.subproblem = Subproblem(
            *(part.clone() if isinstance(part, Tensor) else part for part in subproblem)
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: list[Tensor] = []
        self._found: tuple[Tensor, ...] = ()
        self._velocity: Tensor | None = None
        self._warm = 0

    def begin(self, subproblem: Subproblem) -> None:
        """Begin a solve."""
        self.optimizer.velocity = None
        for kept, given in zip(self.subproblem, subproblem, strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(given)

    def take(self, step: Take, x: Any, y: Tensor) -> tuple[Tensor, ...]:
        """Do what ``step(x, y)`` does; return what it returns."""
        if self.optimizer.momentum and self.optimizer.velocity is None:
            found = step(x, y)
            self._keep_velocity()
            return found
        if not self._placed(x, y):
            return step(x, y)
        if self._warm < WARM:
            self._warm += 1
            return self._aside(step)
        if self._graph is None:
            self._graph = self._captured(step)
        self._graph.replay()
        return _copied(self._found)

    def _keep_velocity(self) -> None:
        """Move the velocity, which a solve's first step has made, to where the graph has it."""
        made = self.optimizer.velocity
        if self._velocity is None:
            self._velocity = made
        elif made is not None:
            self._velocity.copy_(made)
        self.optimizer.velocity = self._velocity

    def _placed(self, x: Any, y: Tensor) -> bool:
        """Copy a mini-batch to where the graph reads it; return False if it does not fit there."""
        if not isinstance(x, Tensor) or len(y) != self.batch_size:
            return False
        self._batch = self._batch or [torch.empty_like(x), torch.empty_like(y)]
        pairs = [*zip(self._batch, (x, y), strict=True)]
        if any(_layout(mine) != _layout(given) for mine, given in pairs):
            return False
        for mine, given in pairs:
            mine.copy_(given)
        return True

    def _aside(self, step: Take) -> tuple[Tensor, ...]:
        """Take a step on another stream, as a capture does."""
        here = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            found = step(*self._batch)
        here.wait_stream(aside)
        return _copied(found)

    def _captured(self, step: Take) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._found = step(*self._batch)
        except Exception as error:
            said = "a local step cannot be a CUDA graph; train without cuda_graph"
            raise RuntimeError(f"{said}: {of_exception(error)}") from error
        return graph


def graph_of(
    problem: Objective, optimizer: Moving, subproblem: Subproblem, training: LocalTraining
) -> StepGraph | None:
    """Return what takes the steps of a solve; None if the model's steps are not captured.

    Nor are those on the full batch, and of losses of one client's own.
    """
    graphs = problem.model.graphs
    size = 0 if training.full_batch else training.batch_size
    if graphs is None:
        return None
    if not size or type(problem) not in (Problem, StreamedProblem):
        of = "the full batch" if not size else f"a {type(problem).__name__}"
        say_once(f"cuda_graph: steps on {of} are not captured")
        return None
    kinds = (Tensor if isinstance(part, Tensor) else part for part in subproblem)
    key = (type(problem), problem.loss, problem.penalty, problem.autocast, training, *kinds)
    graphs[key] = graph = graphs.pop(key, None) or StepGraph(optimizer, subproblem, size)
    if len(graphs) > KEPT:
        del graphs[next(iter(graphs))]  # the one that was used longest ago
    graph.begin(subproblem)
    return graph


def _copied(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.clone() for tensor in found)


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.stride()
