"""A training loop of one's own, and the algorithms that can be run around it.

An algorithm meets training in three places: its start is written into the module, its terms are
added at each optimizer step (``clients.learning.terms``), and the module's arrays are read at the
end. Between them PyTorch runs as its user wrote it.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from clients.learning.border import Border
from clients.learning.local_problem import LocalProblem, Metrics
from clients.learning.problem import evaluating, into_training
from clients.learning.replay import kept_generators, seed_everywhere
from clients.learning.terms import Ahead, Terms
from fl_strategies.core.layout import few
from fl_strategies.core.log import log_once
from fl_strategies.core.oracle import Idle, Part, Solved, Solver
from fl_strategies.core.records import NOTHING
from fl_strategies.core.schedules import check, require, shown
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.local import LocalTraining, default_training

COUNT = "num-examples"
"""The key, in what ``evaluate`` returns, of the number of test samples."""
HONOURED = ("lr", "epochs", "steps", "batch-size", "momentum", "nesterov", "weight-decay")
"""Local settings that reach the training loop in its config, to be used there."""
AHEAD = ("extrapolation", "box")
"""Local settings that FedBCD's rules need, and no other."""
REFUSED = sorted(default_training().settings.keys() - {*HONOURED, *AHEAD})
"""Local settings that only our own loop has."""
MISSES = {
    "steps": "the number of its steps",
    "rate": "its learning rate",
    "solve_on_next": "several steps on one mini-batch",
    "gradient": "gradients on mini-batches",
    "hessian_product": "second derivatives",
    "difference": "differences of gradients",
    "full_gradient": "a gradient on all samples",
    "loss": "the loss on all training samples",
    "until": "a test on all samples that ends its work",
    "on": "training on another loss",
}
"""What a rule may ask of an oracle that a training loop of one's own does not give."""


class OwnTraining(LocalProblem):
    """A module and a training loop, where a client of this package takes a ``Problem``.

    Parameters
    ----------
    module : torch.nn.Module or Border
        The loop trains this module in place. A :class:`.Border` says which arrays are trained and
        travel, where that is not all of them.
    train : callable
        ``train(module, config)`` trains the module. It returns None, a number (reported as
        ``train-loss``), or numbers by name, which are reported; ``epochs`` among them counts as the
        work done. ``config`` is the request's, a new dict for each call, with a ``seed`` of the
        run, the round and the client; torch's, NumPy's and random's generators are seeded by it,
        and restored afterwards. ``lr``, ``epochs`` and the like of ``local`` are in it, for the
        loop to use. The optimizer steps the module's own parameters, wrapped or not
        (``torch.compile``, ``DataParallel``); a copy's steps would not get the algorithm's terms.
        What the loop keeps for the next round (an optimizer, a scaler) is not undone when a reply
        is lost. An algorithm that trains the model in parts calls the loop once for each; the
        parameters of the others do not require gradients then.
    num_samples : int >= 1
        The number of training samples, which is the client's weight.
    evaluate : callable, optional
        ``evaluate(module, config)`` returns the loss on the client's test samples, or numbers by
        name with ``loss`` among them; ``num-examples``, by default ``num_samples``, weights them.
        The generators are seeded and restored as for ``train``.
    evaluate_own : bool (default True)
        Whether evaluation also measures the personalized model, of algorithms that have one. Then
        a client that has a state evaluates twice.

    Raises
    ------
    ValueError
        For an argument of another kind; for a request that such a loop cannot serve, before
        training.
    """

    def __init__(
        self,
        module: nn.Module | Border,
        train: Callable[[Any, dict[str, Any]], Any],
        num_samples: int,
        *,
        evaluate: Callable[[Any, dict[str, Any]], Any] | None = None,
        evaluate_own: bool = True,
    ) -> None:
        require(callable(train), "train", "a function of the module and a config", train)
        usable = evaluate is None or callable(evaluate)
        require(usable, "evaluate", "a function of the module and a config", evaluate)
        check("num_samples", num_samples, low=1, integer=True)
        self.model = module if isinstance(module, Border) else Border(module)
        self.train, self._samples, self.evaluate = train, int(num_samples), evaluate
        self.evaluate_own = evaluate_own

    def __len__(self) -> int:
        return self._samples

    def most_steps(self, training: LocalTraining) -> float:
        return 0.0  # steps are counted as they are taken

    def settings(self, training: LocalTraining, config: Mapping[str, Any]) -> LocalTraining:
        return training  # which says nothing of the loop

    def check_settings(self, config: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for a request's settings that only our own loop has."""
        usual = default_training().settings
        given = [n for n in REFUSED if n in config and (config[n] != usual[n] or n == "solver")]
        if given:
            texts = ", ".join(f"{name} = {shown(config[name])}" for name in given)
            raise ValueError(
                f"a training loop of one's own does not use {texts}: what local training does is"
                " written in the loop (step-limit is of Deadline(cut=True))"
            )
        if honoured := [name for name in HONOURED if name in config]:
            log_once(f"{honoured} are in the config of the training loop, which is to use them")

    def run(self, terms: Terms, model: Border, config: dict[str, Any], *, aside: bool) -> Any:
        """Train the module; return what the loop returns. ``aside``: only arrays are wanted.

        ``model`` is the problem's, or one with a part of its trained parameters.
        """
        with model.fixing():
            terms.attach([p if model.moves else None for p in model.shared])
            into_training(model.module)
            model.module.zero_grad(set_to_none=True)
            result = self.train(model.module, config)
        model.check_whole()
        if moved := [model.layout.trainable[i] for i in terms.moved_apart(model.shared)]:
            raise ValueError(
                f"the training loop changed {few(moved)}, and no optimizer stepped these: they miss"
                " the algorithm's terms"
            )
        return result

    def evaluation(self, config: Mapping[str, Any]) -> OwnEvaluation | None:
        return None if self.evaluate is None else OwnEvaluation(self, config)


class OwnEvaluation:
    """The user's evaluation of the module as it is, in place of a Problem's."""

    fetches = True

    def __init__(self, problem: OwnTraining, config: Mapping[str, Any]) -> None:
        self.model, self._problem, self._config = problem.model, problem, config
        self._samples = len(problem)

    def __len__(self) -> int:
        return self._samples

    def evaluate(self) -> Metrics:
        """Return the loss and further numbers on the client's test samples."""
        assert self._problem.evaluate is not None
        with evaluating(self.model.module):
            result = self._problem.evaluate(self.model.module, dict(self._config))
        reported = numbers_in(result, "evaluate", "loss")
        if "loss" not in reported:
            raise ValueError(f"evaluate must return a number 'loss', got {sorted(reported)}")
        self._samples = int(reported.pop(COUNT, self._samples))
        return Metrics(reported.pop("loss"), math.nan, reported)


class Budget:
    """The optimizer steps that may still be taken for a request."""

    def __init__(self, most: float) -> None:
        self.left = most


class Work(NamedTuple):
    """What an oracle of a training loop needs to know of a request."""

    config: Mapping[str, Any]
    rng: np.random.Generator
    """The generator of the loop's seeds."""
    budget: Budget
    asked_by: str


class Missing(ValueError):
    """A rule asks for what a training loop of one's own does not give."""


class Needing:
    """An oracle without gradients and the like: what a rule misses raises :class:`Missing`."""

    counts_steps = False
    """As :attr:`.Oracle.counts_steps`: a loop that counts epochs reports them."""

    def __getattr__(self, name: str) -> Any:
        raise self.missing(name) if name in MISSES else AttributeError(name)

    def missing(self, name: str) -> Missing:
        """Return the error for what a rule misses."""
        return Missing(f"for {MISSES[name]}, which a training loop of one's own does not give")


class OwnOracle(Needing):
    """The oracle (``fl_strategies.core.oracle``) of a client that trains by a loop of its own."""

    def __init__(self, problem: OwnTraining, work: Work) -> None:
        self.problem, self._model, self._work = problem, problem.model, work

    def only(self, part: Part, *, epochs: int = 0) -> Solver:
        """As :meth:`.Oracle.only`; the loop finds ``epochs`` in its config."""
        other = copy.copy(self)
        other._model = self.problem.model.only(part)
        if not other._model.trained:
            return Idle()
        if epochs:
            others = {name: v for name, v in self._work.config.items() if name != "steps"}
            other._work = self._work._replace(config=others | {"epochs": epochs})
        return other

    def solve(
        self,
        start: Tensor,
        subproblem: Subproblem,
        *,
        previous: Tensor | None = None,
        rates: bool = False,
        until: None = None,
    ) -> Solved:
        """As :meth:`.Oracle.solve`."""
        return self._solved(start, subproblem, previous=previous, rates=rates)

    def solve_aside(self, start: Tensor, subproblem: Subproblem) -> Solved:
        """As :meth:`.Oracle.solve_aside`."""
        model = self.problem.model
        others = model.arrays_of([*model.buffers, *model.kept])
        solved = self._solved(start, subproblem, aside=True)
        model.put(others)
        return solved

    def _solved(
        self,
        start: Tensor,
        subproblem: Subproblem,
        *,
        previous: Tensor | None = None,
        rates: bool = False,
        aside: bool = False,
    ) -> Solved:
        model, work = self._model, self._work
        ahead = self._ahead(previous)
        terms = Terms(
            subproblem,
            start,
            model.views,
            asked_by=work.asked_by,
            rates=rates,
            most=work.budget.left,
            ahead=ahead,
        )
        model.write(start if ahead is None else ahead.of(start))
        fixed = model.arrays_of(model.fixed_names)
        seed = int(work.rng.integers(2**32))
        with terms.active(), kept_generators(model.shared[:1], everywhere=True):
            seed_everywhere(seed)
            result = self.problem.run(terms, model, {**work.config, "seed": seed}, aside=aside)
        work.budget.left -= terms.taken
        after = model.arrays_of(model.fixed_names)
        if moved := [
            n for n, a in fixed.items() if not np.array_equal(a, after[n], equal_nan=True)
        ]:
            raise ValueError(
                f"{work.asked_by} to train a part of the model, and the training loop changed"
                f" {few(moved)}, which do not require gradients meanwhile (an app calls attach)"
            )
        terms.check_seen()
        reported = numbers_in(result, "train", "train-loss")
        w, before = model.vector, None
        if ahead is not None:
            w, before = terms.iterates
            model.write(w)
        weight, A = terms.weights() if rates else (math.nan, math.nan)
        epochs, loss = reported.pop("epochs", None), reported.pop("train-loss", math.nan)
        steps = terms.steps if model.moves else terms.taken  # other arrays have no terms
        solved = Solved(w, before, steps, epochs, loss, weight=weight, rates=A)
        return solved._replace(metrics=reported)

    def _ahead(self, previous: Tensor | None) -> Ahead | None:
        """Return how steps go ahead, as the rules that continue from a ``previous`` iterate ask."""
        extrapolation, box = (float(self._work.config.get(name, 0.0)) for name in AHEAD)
        if previous is not None:
            return Ahead(previous, extrapolation, box)
        if extrapolation or box:
            raise ValueError(
                "a training loop of one's own does not use extrapolation ="
                f" {extrapolation:g} or box = {box:g}: write them into the loop"
            )
        return None


class Asking(Needing):
    """An oracle that trains nothing: it finds out what a rule asks for."""

    def solve(
        self,
        start: Tensor,
        subproblem: Subproblem,
        *,
        previous: Tensor | None = None,
        rates: bool = False,
        until: float | None = None,
    ) -> Solved:
        """Return the start."""
        if until is not None:
            raise self.missing("until")
        return Solved(start, previous, 1, 1, weight=1.0, rates=1.0)

    def solve_aside(self, start: Tensor, subproblem: Subproblem) -> Solved:
        """Return the start."""
        return self.solve(start, subproblem)

    def only(self, part: Part, *, epochs: int = 0) -> Solver:
        """Return itself."""
        return self


def numbers_in(result: Any, function: str, alone: str) -> dict[str, Any]:
    """Return what a user's ``function`` returned as numbers by name, one number as ``alone``."""
    named: Mapping[Any, Any] = NOTHING if result is None else {alone: result}
    if isinstance(result, Mapping):
        named = result
    found = {}
    for name, value in named.items():
        value = value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value
        if not isinstance(name, str) or not isinstance(value, numbers.Real):
            raise TypeError(
                f"{function} must return None, a number or numbers by name, got"
                f" {type(result).__name__}"
                + (f" with {name!r}: {shown(value)}" * (named is result))
            )
        found[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
    return found
