"""The base of all strategies: a run of communication rounds, with callbacks and checkpoints.

An algorithm declares its hyperparameters and adds :meth:`FederatedStrategy.aggregate`, its server
rule. The module ``algorithm`` holds the other hooks, ``round`` the steps between Flower and the
rule. This package, ``fl_strategies.messages`` and the legacy adapter use Flower.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from logging import INFO, WARNING
from typing import ParamSpec, TypeAlias, cast

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    MetricRecord,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fl_strategies.core.hyperparameters import Scalar
from fl_strategies.core.local import default_training
from fl_strategies.core.log import log, quiet_log
from fl_strategies.core.near import misspelt
from fl_strategies.core.reasons import said_once
from fl_strategies.core.records import MISSED
from fl_strategies.core.schedules import check, require
from fl_strategies.server.round import Round
from fl_strategies.server.run import Result, restored

P = ParamSpec("P")
EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


def _in_one_log(start: Callable[P, Result]) -> Callable[P, Result]:
    """Have ``start`` tell each error once, and no rounds if the strategy is ``quiet``."""

    @functools.wraps(start)
    def started(*args: P.args, **kwargs: P.kwargs) -> Result:
        strategy = cast(FederatedStrategy, args[0])
        with said_once(), quiet_log(strategy.quiet):
            return start(*args, **kwargs)

    return started


class FederatedStrategy(Round):
    """Base of all strategies. Raises ``ValueError`` before anything is sent, for an argument
    outside its range, and ``TypeError`` for one that the strategy does not have.
    """

    @_in_one_log
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        resume: bool = False,
    ) -> Result:
        """Run ``num_rounds`` rounds, as Flower's ``Strategy.start``, with callbacks.

        A second call continues: clients keep their states, and rounds are counted on. After three
        rounds, the first of the second call is round 4 in the log, for callbacks, ``evaluate_fn``,
        schedules and random streams, and in the result, which holds the rounds of its call.

        ``result.skipped`` names the rounds after which the model was as before, because too few
        replies could be used; their metrics have ``skipped`` = 1.

        With ``resume`` the run continues from the last of ``checkpoints``, in a new process after
        the old one was killed, and reaches the result of an uninterrupted run. Without a checkpoint
        the run begins anew. ``num_rounds`` includes the earlier rounds. Clients must still have
        their states (``clients.DirectoryStore``). A callback with a method ``recall`` gets the
        metrics of the earlier rounds, by round. Callbacks see each round once; rounds after the
        last checkpoint, which a killed run lost, are run again. The run keeps its id, which
        clients' states carry: a new strategy without ``resume`` is another run.

        Raises ``ValueError`` for an argument of another kind or outside its range, for a model with
        arrays that cannot be trained, for a config that sets what the strategy itself sends, and
        for checkpoints of another run or in use.
        """
        _check_start(grid, initial_arrays, num_rounds, timeout, evaluate_fn)
        run = self.run
        if run.rounds_before and not resume:
            log(INFO, "continues the run of an earlier start; make a new strategy for a new run")
        self.open(initial_arrays, num_rounds)
        declared = {d.sent for d in type(self).declarations.values() if d.sent}
        ours = self.request(1, 0).keys() | declared | {MISSED}
        for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
            if clash := sorted(ours & set(config or ())):
                raise ValueError(f"{name} must not set {clash}: the strategy does")
            if near := misspelt(config or (), default_training().settings.keys() | declared):
                log(WARNING, "%s has %s", name, near)
        try:
            stopped = self._take_checkpoints(resume=resume)
            run.num_rounds = self.exchanges_in(num_rounds)
            arrays = run.result.arrays
            said = f"{self.algorithm}: {run.num_rounds} rounds, from round {run.number + 1}"
            log(INFO, "%s; run %s", said, run.id)
            if run.round == 0:
                self._evaluate(arrays, evaluate_fn)
            run.first = run.round + 1
            while run.round < run.num_rounds and not stopped:
                run.round += 1
                new = self.train_round(
                    run.round, arrays, grid, timeout, train_config or ConfigRecord()
                )
                arrays = arrays if new is None else new
                asked = self.configure_evaluate(
                    run.round, arrays, evaluate_config or ConfigRecord(), grid
                )
                self.aggregate_evaluate(run.round, grid.send_and_receive(asked, timeout=timeout))
                self._evaluate(arrays, evaluate_fn)
                stopped = self.close_round(arrays)
            if (skipped := run.result.skipped) and skipped == [*run.numbers]:
                log(WARNING, "every round was skipped (%d): the model is as it was", len(skipped))
            if stopped:
                log(INFO, "a callback ended the run after round %d", run.number)
        finally:
            if self.checkpoints:
                self.checkpoints.release()
            run.close()
            self.composition.opened = False
        return run.result

    def train_round(
        self,
        server_round: int,
        arrays: ArrayRecord,
        grid: Grid,
        timeout: float,
        config: ConfigRecord,
    ) -> ArrayRecord | None:
        """Have clients train, and return the next global model; None if the round is skipped."""
        requests = self.configure_train(server_round, arrays, config, grid)
        replies = grid.send_and_receive(requests, timeout=timeout)
        return self.aggregate_train(server_round, replies)[0]

    def _evaluate(self, arrays: ArrayRecord, evaluate_fn: EvaluateFn | None) -> None:
        metrics = evaluate_fn(self.run.number, arrays) if evaluate_fn else None
        if metrics is not None:
            self.result.evaluate_metrics_serverapp[self.run.number] = metrics

    def close_round(self, arrays: ArrayRecord) -> bool:
        """End the current round: callbacks, checkpoint; return whether a callback ends the run.

        An exception of a callback is raised after all callbacks have seen the round and the
        checkpoint is written: a resumed run continues after this round.
        """
        stopped, errors = self.run.tell(arrays, self.callbacks)
        last = stopped or errors or self.run.number == self.run.last
        if self.checkpoints and (last or self.run.number % self.checkpoints.every == 0):
            found = self.run.checkpoint(
                self._named,
                self.state,
                self.ledger,
                self.nodes.known,
                stopped=stopped,
            )
            self.checkpoints.save(self.run.number, found)
        if errors:
            raise errors[0]
        return stopped

    @property
    def _named(self) -> dict[str, Scalar]:
        """What a checkpoint and the run that continues from it must have in common."""
        assert self.layout is not None
        model = self.layout.signature
        return {"algorithm": self.algorithm, "seed": self.seed, "model": model}

    def _take_checkpoints(self, *, resume: bool) -> bool:
        """Lock the checkpoints; with ``resume`` restore the last; return whether the run ended."""
        if self.checkpoints is None:
            if resume:
                raise ValueError("resume needs checkpoints: give the strategy some")
            return False
        before = self.checkpoints.take()
        found = self.checkpoints.last() if resume else None
        if found is None:
            # killed before its first, clients may have states of it
            if resume and before.rpartition("-")[0] == self.algorithm:
                self.run.id = before
            self.run.claim(self.checkpoints, before)
            return False
        where, saved = self.checkpoints.directory, found.run
        if other := {n: saved[n] for n, ours in self._named.items() if saved[n] != ours}:
            raise ValueError(
                f"{where} is of a run with {other}, not { {n: self._named[n] for n in other} }"
            )
        self.state = restored(self.state, found.state, where)
        self.ledger.restore(found.ledger)
        self.run.restore(saved, found.model)
        self.nodes.known |= set(saved["clients"])
        self.checkpoints.sign(self.run.id)
        rows = {number: self.run.metrics(number) for number in self.run.numbers}
        for callback in self.callbacks:
            if recall := getattr(callback, "recall", None):
                recall(rows)
        return bool(saved["stopped"])


def _check_start(
    grid: object, initial_arrays: object, num_rounds: int, timeout: float, evaluate_fn: object
) -> None:
    """Raise ``ValueError`` for an argument of ``start`` of another kind or outside its range."""
    if isinstance(grid, ClientApp):
        raise ValueError("grid must be a Grid, got a ClientApp: InProcessGrid(app, ...) makes one")
    require(hasattr(grid, "send_and_receive"), "grid", "a Grid", grid)
    wanted = "an ArrayRecord: ArrayRecord(module.state_dict())"
    require(isinstance(initial_arrays, ArrayRecord), "initial_arrays", wanted, initial_arrays)
    check("num_rounds", num_rounds, low=1, integer=True)
    if timeout not in (None, math.inf):  # both mean: no limit
        check("timeout", timeout, low=0.0)
    if evaluate_fn is not None:
        require(callable(evaluate_fn), "evaluate_fn", "a function (round, arrays)", evaluate_fn)
