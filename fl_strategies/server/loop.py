"""The loop of communication rounds: from ``start`` to its result, with callbacks and checkpoints.

open -> [resume] -> settle -> (train_round -> evaluate -> close_round) for each round
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from typing import TYPE_CHECKING, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from fl_strategies.core.log import log
from fl_strategies.core.schedules import require
from fl_strategies.parts import STAGES
from fl_strategies.server import stages
from fl_strategies.server.arguments import check_configs, check_start
from fl_strategies.server.run import check_state

if TYPE_CHECKING:
    from fl_strategies.server.algorithm import State
    from fl_strategies.server.checkpoints import Checkpoint
    from fl_strategies.server.run import Result
    from fl_strategies.server.strategy import FederatedStrategy

EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


def run_rounds(
    strategy: FederatedStrategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    timeout: float,
    configs: Mapping[str, ConfigRecord | None],
    evaluate_fn: EvaluateFn | None,
    *,
    resume: bool,
) -> Result:
    """Run the rounds of :meth:`.FederatedStrategy.start`, which says what the arguments are."""
    check_start(grid, initial_arrays, num_rounds, timeout, evaluate_fn)
    run = strategy.run
    if run.rounds_before and not resume:
        log(INFO, "continues the run of an earlier start; make a new strategy for a new run")
    strategy.caller = replace(strategy.caller, wrapped=False)
    strategy.open(initial_arrays, num_rounds)
    check_configs(
        configs,
        ours=[*strategy.request(1, 0)],
        declared=[d.sent for d in type(strategy).declarations.values() if d.sent],
        local=strategy.local,
    )
    train_config = configs["train_config"] or ConfigRecord()
    evaluate_config = configs["evaluate_config"] or ConfigRecord()
    try:
        last = run.take(strategy.checkpoints, resume=resume)
        strategy.settle(grid)
        check_state(f"{type(strategy).__name__}.first_state", strategy.state)
        stopped = _resume(strategy, last) if last else False
        run.num_rounds = strategy.communication_rounds(strategy.state, num_rounds)
        if run.round > run.num_rounds:
            raise ValueError(
                f"num_rounds must be >= {run.round}, the rounds done, got {num_rounds}"
            )
        arrays = run.result.arrays
        run.result.arrays = strategy.shown(arrays)
        log(INFO, run.beginning(strategy.algorithm))
        if run.round == 0:
            _evaluate(strategy, arrays, evaluate_fn)
        run.first = run.round + 1
        while run.round < run.num_rounds and not stopped:
            run.round += 1
            new = strategy.train_round(arrays, grid, timeout, train_config)
            arrays = arrays if new is None else new
            evaluated = strategy.configure_evaluate(run.round, arrays, evaluate_config, grid)
            replies = grid.send_and_receive(evaluated, timeout=timeout)
            if (metrics := strategy.aggregate_evaluate(run.round, replies)) is not None:
                run.result.evaluate_metrics_clientapp[run.number] = metrics
            _evaluate(strategy, arrays, evaluate_fn)
            stopped = close_round(strategy, arrays)
        if (skipped := run.result.skipped) and skipped == [*run.numbers]:
            log(WARNING, "every round was skipped (%d): the model is as it was", len(skipped))
        if stopped:
            by = "max_epsilon" if stages.is_spent(strategy, strategy.parts) else "a callback"
            log(INFO, "%s ended the run after round %d", by, run.number)
    finally:
        if strategy.checkpoints:
            strategy.checkpoints.release()
        run.close()
    return run.result


def close_round(strategy: FederatedStrategy, arrays: ArrayRecord) -> bool:
    """End the current round: callbacks, checkpoint; return whether the run ends.

    An exception of a callback is raised after all callbacks have seen the round and the checkpoint
    is written: a resumed run continues after this round.
    """
    run, checkpoints = strategy.run, strategy.checkpoints
    stopped, errors = run.tell(strategy.shown(arrays), strategy.callbacks)
    stopped |= stages.is_spent(strategy, strategy.parts)
    last = stopped or errors or run.number == run.last
    if checkpoints and (last or run.number % checkpoints.every == 0):
        kept = run.checkpoint(
            arrays,
            _settings(strategy),
            _states(strategy),
            strategy.ledger,
            strategy.nodes.known,
            stopped=stopped,
        )
        checkpoints.save(run.number, kept)
    if errors:
        raise errors[0]
    return stopped


def _evaluate(
    strategy: FederatedStrategy, arrays: ArrayRecord, evaluate_fn: EvaluateFn | None
) -> None:
    run = strategy.run
    metrics = evaluate_fn(run.number, strategy.shown(arrays)) if evaluate_fn else None
    if metrics is not None:
        wanted = "a MetricRecord, or None"
        require(isinstance(metrics, Mapping), "what evaluate_fn returns", wanted, metrics)
        run.result.evaluate_metrics_serverapp[run.number] = metrics


def _settings(strategy: FederatedStrategy) -> dict[str, str]:
    """Return what a checkpoint and the run that continues from it must have in common."""
    names = {"algorithm", "seed", *strategy.hyperparameters(), *STAGES, "fraction_train"}
    settings = {name: getattr(strategy, name) for name in sorted(names)}
    # its budget counts each round with the noise that it had
    settings["privacy"] = type(strategy.privacy).__name__
    settings |= {f"local {name!r}": value for name, value in strategy.local.items()}
    settings["model"] = strategy.opened_model.layout.signature
    texts = {n: value if isinstance(value, str) else repr(value) for n, value in settings.items()}
    # 1 and 1.0 are one; an object's address says nothing
    return {n: text.partition(" at 0x")[0].removesuffix(".0") for n, text in texts.items()}


def _states(strategy: FederatedStrategy) -> dict[str, State]:
    """Return the states that a checkpoint holds, by whose they are."""
    return {"algorithm": strategy.state, **strategy.parts}


def _resume(strategy: FederatedStrategy, last: Checkpoint) -> bool:
    """Continue from the ``last`` checkpoint; return whether the run ended there."""
    run = strategy.run
    states = run.resume(
        last, strategy.checkpoints, _settings(strategy), _states(strategy), strategy.ledger
    )
    strategy.state, strategy.parts = states.pop("algorithm"), states
    strategy.nodes.known |= run.known
    rows = {number: run.metrics(number) for number in run.numbers}
    for callback in strategy.callbacks:
        if recall := getattr(callback, "recall", None):
            recall(rows)
    return run.stopped
