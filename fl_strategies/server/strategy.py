"""The base of all strategies: what Flower calls, and a run of communication rounds.

An algorithm declares its hyperparameters and adds :meth:`FederatedStrategy.aggregate`, its server
rule; the module ``algorithm`` holds the other hooks. A round is

    select -> send -> [clients] -> read -> combine -> aggregate -> step
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fl_strategies.core.hyperparameters import Scalar, of_client
from fl_strategies.core.ledger import Ledger
from fl_strategies.core.log import log, serving
from fl_strategies.core.metric_names import SKIPPED
from fl_strategies.core.randomness import draw
from fl_strategies.core.records import CATCH_UP, Round
from fl_strategies.core.schedules import check, require
from fl_strategies.core.spelling import misspelt
from fl_strategies.messages.codes import DOWNLOAD
from fl_strategies.parts import STAGES
from fl_strategies.parts.buffered import Buffered
from fl_strategies.parts.pace import Pace
from fl_strategies.server import stages
from fl_strategies.server.algorithm import Algorithm, State
from fl_strategies.server.asked import Asked
from fl_strategies.server.checkpoints import Checkpoint, check_state
from fl_strategies.server.composition import (
    Caller,
    check_hosts,
    check_trained,
    check_wrapper,
    warn_of_unequal,
)
from fl_strategies.server.model import Model, decoded
from fl_strategies.server.nodes import Nodes
from fl_strategies.server.options import Options
from fl_strategies.server.phases import Phase, Phases, as_one_phase, works_of
from fl_strategies.server.reading import Reader, reply_of
from fl_strategies.server.round import next_model, shares
from fl_strategies.server.run import Patience, Result, Run
from fl_strategies.server.sending import Sender
from fl_strategies.server.settling import Roles, descriptions, settled
from fl_strategies.server.stages import CLOCK, PACE
from fl_strategies.server.timing import ends_after
from fl_strategies.server.waiting import send_and_receive
from fl_strategies.solvers.local import check_local, default_training
from fl_strategies.solvers.own_steps import check_only_fine_tuning

EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop: TypeAlias = Callable[[int, Result], bool]
OF_LAYOUT = ("layout", "frozen", "checksums", DOWNLOAD)
"""Names in a request that depend on the model's layout."""
FLOWERS = frozenset(inspect.signature(FlowerFedAvg).parameters)
"""The arguments that Flower's own strategies take."""


class FederatedStrategy(Algorithm, FlowerFedAvg):  # type: ignore[misc]  # None for its default
    """Base of all strategies. Raises ``ValueError`` before anything is sent, for an argument
    outside its range, and ``TypeError`` for one that the strategy does not have.

    Attributes
    ----------
    state : record or None
        The state of the algorithm's server (:data:`.algorithm.State`) after the last round.
    ledger : fl_strategies.core.ledger.Ledger
        Which reply of each client was used last.
    run : fl_strategies.server.run.Run
        The run so far.
    nodes : fl_strategies.server.nodes.Nodes
        The clients that are connected, and those that ever were.
    model : fl_strategies.server.model.Model
        The global model, once a run was opened.
    """

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in Options.declarations if name in FLOWERS}
        # Flower warns of 0, which is no mistake
        FlowerFedAvg.__init__(self, **given | {"fraction_evaluate": 1.0})
        vars(self).update(given)
        self.buffers = self.buffers and tuple(self.buffers)
        self.ties = self.ties and tuple(tuple(group) for group in self.ties)
        self.local = dict(self.local or {})
        check_local(self.local)
        if not self.uses_local:
            check_only_fine_tuning(self.algorithm, self.local)
        self.callbacks = tuple(self.callbacks)
        self.lost_state = self.lost_state or ("warn" if self.accumulates_changes else "reset")
        kept_rounds = self.checkpoints.kept_rounds if self.checkpoints else None
        stages.check_parts(self)
        if not getattr(self, "algorithm", ""):
            says = "must say its name, by which clients know it"
            raise TypeError(f'{type(self).__name__} {says}: algorithm = "..."')
        if self.fold == "on" and not self.can_fold:
            told = f"for {self.described}, which needs each upload"
            raise ValueError(f'fold must be "auto" or "off" {told}, got "on"')
        self.state: State = None
        self.parts: stages.States = {}
        self.ledger = Ledger(self.lost_state, self.acknowledge, kept_rounds)
        self.nodes = Nodes(self.node_wait, self.shared_population)
        self.run = Run(self.algorithm, self.reports, Patience(self.max_unusable_rounds))
        self.sender = Sender(self, self.ledger, self.nodes)
        self.reader = Reader(self.ledger)
        self.phases = Phases()
        self.caller = Caller()
        self.model: Model | None = None

    # ---- a run --------------------------------------------------------------------------------

    @serving
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        should_stop: ShouldStop | None = None,
        *,
        resume: bool = False,
    ) -> Result:
        """Run ``num_rounds`` rounds, as Flower's ``Strategy.start``, with callbacks.

        A second call continues: clients keep their states, and rounds are counted on. After three
        rounds, the first of the second call is round 4 in the log, for callbacks, ``evaluate_fn``,
        schedules and random streams, and in the result, which holds the rounds of its call.

        ``should_stop(round, result)`` is called at the end of each round, with the result so far;
        where it returns true, the round is the last, and ``result.ended_by`` says so. It must not
        change the result. An exception is treated as that of a callback.

        ``result.skipped`` names the rounds after which the model was as before, because too few
        replies could be used; their metrics have ``skipped`` = 1.

        With ``resume`` the run continues from the last of ``checkpoints``, in a new process after
        the old one was killed, and reaches the result of an uninterrupted run. Without a checkpoint
        the run begins anew. ``num_rounds`` includes this call's earlier rounds. Clients must still
        have their states (``clients.DirectoryStore``). A callback with a method ``recall`` gets the
        metrics of the earlier rounds, by round. Callbacks see each round once; rounds after the
        last checkpoint, which a killed run lost, are run again. The run keeps its id, which
        clients' states carry: a new strategy without ``resume`` is another run.

        Raises ``ValueError`` for an argument of another kind or outside its range, for a model with
        arrays that cannot be trained, for a config that sets what the strategy itself sends, and
        for checkpoints of another run or in use.
        """
        _check_start(grid, initial_arrays, num_rounds, timeout, evaluate_fn, should_stop)
        run = self.run
        if run.rounds_before and not resume:
            log(INFO, "continues the run of an earlier start; make a new strategy for a new run")
        self.caller = replace(self.caller, wrapped=False)
        self.open(initial_arrays, num_rounds)
        self._check_config("train_config", train_config)
        self._check_config("evaluate_config", evaluate_config)
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        run.train_config = dict(train_config)
        try:
            arrays = self._first_model(grid, num_rounds, resume=resume)
            log(INFO, run.beginning(self.algorithm))
            if run.round == 0:
                self._test(arrays, evaluate_fn)
            run.first = run.round + 1
            while run.round < run.num_rounds and not run.result.ended_by:
                run.round += 1
                new = self.train_round(arrays, grid, timeout, train_config)
                arrays = arrays if new is None else new
                evaluated = self.configure_evaluate(run.round, arrays, evaluate_config, grid)
                if run.asked is None and evaluated:
                    evaluated = self._none("configure_evaluate", evaluated)
                replies = send_and_receive(grid, evaluated, timeout)
                if (metrics := self.aggregate_evaluate(run.round, replies)) is not None:
                    run.result.evaluate_metrics_clientapp[run.number] = metrics
                self._test(arrays, evaluate_fn)
                self.close_round(arrays, should_stop)
            run.say_how_it_ended([*self.callbacks, self.checkpoints])
        finally:
            if self.checkpoints:
                self.checkpoints.release()
            run.close()
        return run.result

    def _first_model(self, grid: Grid, num_rounds: int, *, resume: bool) -> ArrayRecord:
        """Return the model that trains next: the initial one, or the last checkpoint's."""
        run = self.run
        last = run.take(self.checkpoints, resume=resume)
        self.settle(grid)
        check_state(f"{type(self).__name__}.first_state", self.state)
        if last:
            self._resume(last)
        run.num_rounds = self.communication_rounds(self.state, num_rounds)
        if run.round > run.num_rounds:
            raise ValueError(
                f"num_rounds = {num_rounds} are {run.num_rounds} rounds with communication, and"
                f" {run.round} are done"
            )
        if num_rounds and not run.num_rounds:
            log(WARNING, "none of %d rounds communicates: the model stays as it is", num_rounds)
        arrays = run.result.arrays
        run.result.arrays = self.evaluated_model(arrays)
        return arrays

    def _resume(self, last: Checkpoint) -> None:
        """Continue from the ``last`` checkpoint."""
        run = self.run
        states = run.resume(last, self.checkpoints, self._settings, self._states, self.ledger)
        self.state, run.last_metrics = states.pop("algorithm"), states.pop("clients")
        self.parts = states
        self.nodes.known |= run.known
        rows = {number: run.metrics(number) for number in run.numbers}
        for callback in self.callbacks:
            if recall := getattr(callback, "recall", None):
                recall(rows)

    def _test(self, arrays: ArrayRecord, evaluate_fn: EvaluateFn | None) -> None:
        """Note what ``evaluate_fn`` says of the model."""
        if evaluate_fn is None:
            return
        number, wanted = self.run.number, "a MetricRecord, or None"
        self.result.arrays = self.evaluated_model(arrays)  # also if evaluate_fn raises
        metrics = evaluate_fn(number, self.result.arrays)
        if metrics is not None:
            require(isinstance(metrics, Mapping), "what evaluate_fn returns", wanted, metrics)
            self.result.evaluate_metrics_serverapp[number] = metrics

    def close_round(self, arrays: ArrayRecord, should_stop: ShouldStop | None = None) -> bool:
        """End the current round: callbacks, checkpoint; return whether the run ends.

        An exception of a callback is raised after all callbacks have seen the round and the
        checkpoint is written: a resumed run continues after this round.
        """
        run, checkpoints, number = self.run, self.checkpoints, self.run.number
        errors = run.tell(self.evaluated_model(arrays), self.callbacks, should_stop)
        if stages.is_spent(self, self.parts):
            run.result.ended_by = "max_epsilon"
        ends = bool(run.result.ended_by or errors)
        if checkpoints and (ends or number == run.last or number % checkpoints.every == 0):
            known, states = self.nodes.known, self._states
            kept = run.checkpoint(arrays, self._settings, states, self.ledger, known)
            checkpoints.save(number, kept)
        if errors:
            raise errors[0]
        return bool(run.result.ended_by)

    @property
    def _settings(self) -> dict[str, str]:
        """What a checkpoint and the run that continues from it must have in common."""
        names = {"algorithm", "seed", *self.hyperparameters(), *STAGES, "fraction_train"}
        names |= {"clipping_norm", "weighted_by_key"}
        settings = {name: getattr(self, name) for name in sorted(names)}
        # its budget counts each round with the noise that it had
        settings["privacy"] = type(self.privacy).__name__
        settings |= {f"local {name!r}": value for name, value in self.local.items()}
        given = self.run.train_config
        settings |= {f"train_config {name!r}": value for name, value in given.items()}
        settings["model"] = self.opened_model.layout.signature
        texts = {n: v if isinstance(v, str) else repr(v) for n, v in settings.items()}
        # 1 and 1.0 are one; an object's address says nothing
        return {n: text.partition(" at 0x")[0].removesuffix(".0") for n, text in texts.items()}

    @property
    def _states(self) -> dict[str, State]:
        """The states that a checkpoint holds, by whose they are."""
        return {"algorithm": self.state, "clients": self.run.last_metrics, **self.parts}

    def _check_config(self, name: str, config: ConfigRecord | None) -> None:
        """Raise ``ValueError`` for what is no config, or sets what the strategy itself sends.

        Settings of local training are checked together with ``local``. Misspellings are warned of.
        """
        wanted = "a ConfigRecord, or None"
        require(config is None or isinstance(config, Mapping), name, wanted, config)
        declared = {d.sent for d in self.declarations.values() if d.sent}
        known, given = default_training().settings, config or ConfigRecord()
        if clash := sorted({*self.request(1, 0), *declared, *OF_LAYOUT, CATCH_UP} & {*given}):
            raise ValueError(f"{name} must not set {clash}: the strategy does")
        spelt = {n.replace("_", "-"): value for n, value in given.items()}
        check_local({**self.local, **{n: value for n, value in spelt.items() if n in known}})
        if near := misspelt(given, {*known, *declared}):
            log(WARNING, "%s has %s", name, near)

    def open(self, initial_arrays: ArrayRecord, num_rounds: int) -> None:
        """Begin a run with the initial model, and forget the result of the last run."""
        self.run.open(initial_arrays, num_rounds)
        self.reader.forget()
        self.model = None

    def settle(self, grid: Grid) -> None:
        """Settle which arrays travel and which are trained; begin the algorithm's state."""
        arrays, run = self.result.arrays, self.run
        ask = functools.partial(descriptions, self.nodes, grid, self.clients_needed)
        layout = settled(self, decoded(arrays), run.roles, ask)
        check_trained(self.caller, layout, arrays)
        stages.check_layout(self, layout)
        self.model = Model.of(arrays, layout)
        round = self.make_round(run.number)
        self.state = self.begin(self._first(self.state), round, run.num_rounds)
        self.parts = stages.begin(self, self.parts, round.theta)
        run.roles = Roles.of(layout)

    def train_round(
        self, arrays: ArrayRecord, grid: Grid, timeout: float, config: ConfigRecord
    ) -> ArrayRecord | None:
        """Have clients train, and return the next global model; None if the round is skipped."""
        if not self.waits_for_all:
            self.load(arrays)
            return self.use(*self._overlapping(grid, timeout, config))[0]
        requests = self.configure_train(self.run.round, arrays, config, grid)
        if self.run.asked is None:
            requests = self._none("configure_train", requests)
        replies = send_and_receive(grid, requests, timeout)
        new, metrics = self.aggregate_train(self.run.round, replies)
        if metrics is not None:
            self.run.result.train_metrics_clientapp[self.run.number] = metrics
        return new

    def _none(self, hook: str, requests: Iterable[Message]) -> list[Message]:
        """Return no requests; ``ValueError`` for some, which the hook's ``super()`` did not make.

        Replies are read by what was asked.
        """
        if count := len([*requests]):
            raise ValueError(
                f"{type(self).__name__}.{hook} must return the requests of super().{hook}(...), or"
                f" none, got {count} others"
            )
        return []

    # ---- a round ------------------------------------------------------------------------------

    def ask(
        self, config: ConfigRecord, grid: Grid, size: int | None = None, asks: int = 0
    ) -> Asked:
        """Select clients of the round, and return the requests to them.

        ``size`` says how many if that is not the algorithm's to say, ``asks`` how often the round
        has asked before.
        """
        nodes = self.nodes.wait(grid, 0 if asks else self.clients_needed)
        check_hosts(type(self).__name__, self.caller, self.nodes.hosts)
        self.state = self.on_connect(self.state, self.nodes.known)
        round = replace(self.make_round(self.run.number, nodes), asks=asks)
        busy, samples = self.phases.at_work, self.nodes.samples
        round = stages.selected(self, self.state, self.parts, round, samples, busy, size)
        if not asks:
            self.check_enough(len(round.asked) + len(busy), "asked")
        return self.send(round, self.opened_model, config, nodes)

    def send(
        self, round: Round, model: Model, config: ConfigRecord, nodes: Mapping[int, int]
    ) -> Asked:
        """Return the requests to train ``model`` in ``round``."""
        return self.sender.send(
            self.state, round, model, config, nodes, MessageType.TRAIN, self.caller
        )

    def use(
        self, asked: Asked, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Return the next global model from the ``replies``, None if the round is skipped.

        Also returns the round's metrics.
        """
        run, read = self.run, self.reader.training(asked, replies)
        run.clients, run.faults = read.rows, read.faults
        run.devices |= read.devices
        run.last_metrics = run.last_metrics.after(asked.clients, read.rows, read.took)
        fault = self.caller.fault(len(read.faults))
        outcome = next_model(
            self, self.state, read.round, read.uploads, fault=fault, parts=self.parts
        )
        run.patience.settle(
            len(read.uploads),
            read.unusable,
            len(self.nodes.known),
            skipped=outcome.model is None,
        )
        metrics, number = read.metrics, asked.round.number
        if outcome.model is not None:
            self.ledger.record_used(read.uploads)
            weights = stages.weights_of(self, read.round, read.uploads)
            of = {u.client: weight for u, weight in zip(read.uploads, weights, strict=True)}
            run.clients, ends = shares(read.rows, of)
            metrics.update(ends)
            if self.caller.wrapped:
                warn_of_unequal(run.clients, number)
        else:
            metrics[SKIPPED] = 1
            why = outcome.skipped
            log(WARNING, "round %d is skipped: %s; model and state unchanged", number, why)
        self.state, (self.parts, clock) = outcome.state, stages.passed(outcome.parts, read.seconds)
        seconds = time.monotonic() - asked.started
        metrics.update({**read.hosts, **clock, **outcome.info, "seconds": seconds})
        run.result.train_metrics_clientapp[number] = metrics
        if outcome.model is None:
            return None, metrics
        return self.opened_model.record_with(outcome.model), metrics

    # ---- a round whose phases overlap with others' (``phases``) --------------------------------

    @property
    def waits_for_all(self) -> bool:
        """Whether a round waits for the replies of all that it asked."""
        pace = self.pace
        return not self.overlaps and (
            pace is None or (pace.order == "virtual" and not isinstance(pace, Buffered))
        )

    @property
    def by_arrival(self) -> bool:
        """Whether phases end when their replies have come, and not by the virtual clock."""
        return self.pace is not None and self.pace.order == "arrival"

    def check_hooks(self) -> None:
        """Raise ``ValueError`` for hooks of Flower's that only rounds which wait for all call."""
        for name in ("configure_train", "aggregate_train"):
            if not getattr(type(self), name).__module__.startswith("fl_strategies."):
                raise ValueError(
                    f"{self.described} does not call the {name} of {type(self).__name__}:"
                    " only a round that waits for all replies does"
                )

    def _overlapping(
        self, grid: Grid, timeout: float | None, config: ConfigRecord
    ) -> tuple[Asked, list[Message]]:
        """Return the round as one phase of the clients whose replies it uses, and the replies."""
        self.check_hooks()
        timeout = math.inf if timeout is None else timeout
        if self.run.round == self.run.first:
            self.phases = Phases.after(self.virtual_seconds(self.state) or 0.0)
        asked, ended, closing = self.open_phases(grid, timeout, config), list[int](), list[int]()
        lasts = None if self.by_arrival else self.phase_seconds
        for key in self.phases.as_they_end(grid, timeout, lasts):
            ended.append(key)
            if closing := self.first_ended(ended):
                break
            self.keep_up(ended, grid, config)
        return self.close_phases(asked, closing or ended)

    def open_phases(self, grid: Grid, timeout: float, config: ConfigRecord) -> Asked:
        """Open the phases with which the round begins; return what it asked first.

        Here and in the next four methods it is a pace's: a deadline by arrival, or a buffered one.
        """
        phases, pace = self.phases, self.pace
        assert isinstance(pace, Pace)
        if not isinstance(pace, Buffered):
            phases.take_late(grid, timeout, self.nodes.wait(grid, self.clients_needed))
            asked = self.ask(config, grid)
            phases.open |= works_of(asked, self.opened_model)
            wanted = stages.wanted_replies(self, asked.round, len(phases.busy))
            phases.begin(wanted, min(timeout, pace.seconds or math.inf))
            return asked
        if self.run.round == self.run.first:
            self._ask_again(grid, config)
        phases.begin(pace.size, timeout)
        asked = self._ask_for_places(pace, [], grid, config)
        self.keep_up([], grid, config)
        return asked

    def keep_up(self, ended: Sequence[int], grid: Grid, config: ConfigRecord) -> None:
        """Have others begin when the last of the phases that ``ended`` in this round has.

        Of a buffered pace so many that ``concurrency`` clients are at work.
        """
        phases, pace = self.phases, self.pace
        if not isinstance(pace, Buffered):
            return
        free = pace.concurrency - phases.working(ended)
        if phases.idle and len(phases.placeless) < free:
            self._ask_for_places(pace, ended, grid, config)
        for phase in phases.placeless[:free]:
            phase.since = phases.open[ended[-1]].end if ended else self._now

    def phase_seconds(self, client: int, phase: Phase) -> float:
        """Return the virtual seconds that a phase lasts, which has its replies."""
        answer = phase.answers.get(client)
        seconds, lost = ends_after(phase.asked, client, answer)
        reply = None if answer is None else reply_of(phase.asked, client, answer)
        phase.usable = int(reply is not None and not lost)
        return seconds

    def first_ended(self, ended: Sequence[int]) -> list[int]:
        """Return which phases close, of those that ``ended`` in this round; none if too few did."""
        return [*ended] if self.phases.usable(ended) >= self.phases.wanted else []

    def close_phases(self, asked: Asked, keys: Sequence[int]) -> tuple[Asked, list[Message]]:
        """Close the phases of these keys; return them as one of the round, and their replies.

        ``asked`` is what :meth:`open_phases` returned.
        """
        phases, closed = self.phases, self.phases.close(sorted(keys))
        if not isinstance(self.pace, Buffered):
            late = phases.close([*phases.open])  # a later reply belongs to no open phase
            clients = frozenset(client for phase in late for client in phase.asked.clients)
            replies = [reply for phase in closed for reply in phase.replies]
            return replace(asked, late=clients), replies
        self.parts = {**self.parts, PACE: stages.AtWork(phases.unfinished)}
        together, replies = as_one_phase(closed, asked)
        if self.clock is None:
            return together, replies
        now = self._now
        lasted = [(phase.since or 0.0) - now + (phase.took or 0.0) for phase in closed]
        seconds = max(0.0, *lasted) if lasted else self.clock.idle
        return replace(together, seconds=seconds), replies

    # ---- a buffered pace ----------------------------------------------------------------------

    @property
    def _now(self) -> float:
        """The virtual second in which the round began."""
        return float(self.parts[CLOCK].seconds) if CLOCK in self.parts else 0.0

    def _ask_for_places(
        self, pace: Buffered, ended: Sequence[int], grid: Grid, config: ConfigRecord
    ) -> Asked:
        """Ask idle clients for the places that are free, and open a phase of each.

        By the virtual clock also for those that will be before the buffer is full. Who takes the
        next place depends neither on when it is free nor on whose it was; so an engine trains
        these clients together.
        """
        phases, virtual = self.phases, not self.by_arrival
        later = pace.size - phases.usable(ended) - 1 if virtual else 0
        size = max(pace.concurrency - phases.working(ended) - len(phases.placeless) + later, 0)
        asked = self.ask(config, grid, size, phases.asks)
        works = works_of(asked, self.opened_model, None, alone=virtual)
        places = draw(asked.round.stream("places"), sorted(works)) if virtual else [*works]
        phases.open |= {key: works[key] for key in places}
        phases.asks, phases.idle = phases.asks + 1, len(asked.clients) == size
        return asked

    def _ask_again(self, grid: Grid, config: ConfigRecord) -> None:
        """Open the unfinished work of the clients that are connected."""
        unfinished = self.parts[PACE].unfinished
        nodes = self.nodes.wait(grid, self.clients_needed) if unfinished else {}
        for number, (since, arrays) in unfinished.items():
            opened = self.opened_model
            model = Model.of(opened.record_with(arrays), opened.layout)
            there = tuple(client for client in since if client in nodes)
            round = replace(self.make_round(number, nodes), theta=model.theta, asked=there)
            asked = self.send(round, model, config, nodes)
            works = works_of(asked, model, alone=not self.by_arrival)
            for client, phase in works.items():
                phase.since = since[client]
            self.phases.open |= works

    # ---- whether there are enough clients -----------------------------------------------------

    @property
    def clients_needed(self) -> int:
        """How many clients a round waits for.

        The first one after a resumption waits for ``min_replies``, if the run has had so many: some
        may be away, for as long as their nodes take to come back.
        """
        least, run = max(self.min_available_nodes, self.min_train_nodes), self.run
        if run.first == 1 or run.round != run.first:
            return least
        known = len(self.nodes.known)
        enough = bisect_left(range(known + 1), self.uploads_needed(), key=self.asked_of)
        return max(least, enough) if enough <= known else least

    def check_enough(self, clients: int, how: str) -> None:
        """Raise ``ValueError`` if a call's first round has too few clients for ``min_replies``.

        In later rounds clients may have left for a while: then the round is skipped. So it is if a
        part says that they are away.
        """
        if self.run.round == self.run.first and self.availability is None:
            self._check_replies(clients, how)

    def check_population(self, clients: int) -> None:
        """Raise ``ValueError`` if no run with so many clients, all connected, can succeed."""
        self.check_clients(clients)
        for name, declaration in self.declarations.items():
            if declaration.per_client:
                of_client(name, getattr(self, name), clients - 1)
        self._check_replies(self.asked_of(clients), f"that {self.algorithm} asks in a round")

    def _check_replies(self, clients: int, how: str) -> None:
        least, combine = self.uploads_needed(), self.combine
        if clients < least:
            of_part = combine is not None and combine.least == least
            needs = f"{combine!r} needs {least} uploads" if of_part else f"min_replies is {least}"
            raise ValueError(f"{needs}, and the number of clients {how} is {clients}")

    # ---- what Flower's wrappers and servers call ----------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to the clients selected for this round."""
        if server_round == 1 and not self.run.opened:
            self.run.close()
            self.open(arrays, 0)
            self.run.opened = False
            watched = bool(self.callbacks or self.checkpoints)
            averages = stages.mean_with_parts(self)
            check_wrapper(self.described, averages, watched=watched)
            self.caller = replace(self.caller, wrapped=True)
        if self.model is None:
            self.settle(grid)
        self.run.round = server_round
        self.load(arrays)
        self.run.asked = self.ask(config, grid)
        return self.run.asked.messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next global model and the round's metrics.

        The model is None if the round is skipped, both are if nobody was asked.
        """
        asked, self.run.asked = self.run.asked, None
        return (None, None) if asked is None else self.use(asked, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to the clients sampled to evaluate; none if the fraction is 0."""
        if self.fraction_evaluate == 0.0:
            return []
        least, busy = max(self.min_available_nodes, self.min_evaluate_nodes), self.phases.busy
        nodes = {c: n for c, n in self.nodes.wait(grid, least).items() if c not in busy}
        round = self.make_round(self.run.rounds_before + server_round, nodes)
        clients = self.sample("evaluate", round, self.fraction_evaluate, self.min_evaluate_nodes)
        self.run.asked = self.sender.send(
            self.state,
            replace(round, asked=tuple(clients)),
            replace(self.opened_model, record=self.evaluated_model(arrays)),
            config,
            nodes,
            MessageType.EVALUATE,
            self.caller,
        )
        return self.run.asked.messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the clients' evaluation: weighted means, and the variation between clients."""
        asked, self.run.asked = self.run.asked, None
        if asked is None or not asked.clients:
            return None
        read = self.reader.evaluation(asked, replies, self.run.clients)
        self.run.clients, self.run.faults = read.rows, read.faults
        self.result.evaluate_metrics_clientapp[asked.round.number] = read.metrics
        return read.metrics

    # ---- what a round is made of --------------------------------------------------------------

    @property
    def result(self) -> Result:
        """The record of the current or last call of ``start``."""
        return self.run.result

    @property
    def population(self) -> int:
        """Number m of clients that were ever connected, and at least ``num_clients``."""
        return max(len(self.nodes.known), self.num_clients)

    @property
    def opened_model(self) -> Model:
        """The global model of an opened run."""
        assert self.model is not None
        return self.model

    def evaluated_model(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model that is tested, evaluated and returned when ``arrays`` train next."""
        if self.model is None:
            return arrays
        return stages.evaluated_model(self, self.parts, arrays, self.model.layout)

    def load(self, arrays: ArrayRecord) -> None:
        """Make ``arrays`` the global model of the round."""
        self.model = Model.of(arrays, self.opened_model.layout)

    def _first(self, state: State) -> State:
        theta = np.zeros(0) if self.model is None else self.model.theta
        return self.first_state(theta) if state is None else state

    def make_round(self, number: int, nodes: Iterable[int] = ()) -> Round:
        """Return round ``number``, of the current model and the connected clients."""
        model = self.model
        return Round(
            number=number,
            theta=np.zeros(0) if model is None else model.theta,
            layout=None if model is None else model.layout,
            connected=tuple(sorted(nodes)),
            population=self.population,
            acked=self.ledger.acked,
            seed=self.seed,
            run=self.run.id,
            metrics=self.run.last_metrics,
        )

    def request(self, server_round: int, client: int) -> dict[str, Scalar]:
        """Return the config for ``client`` in ``server_round``."""
        state, round = self._first(self.state), self.make_round(server_round)
        return self.sender.request(state, round, client, self.caller)


def _check_start(
    grid: object,
    initial_arrays: object,
    num_rounds: int,
    timeout: float,
    evaluate_fn: object,
    should_stop: object,
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
    if should_stop is not None:
        require(callable(should_stop), "should_stop", "a function (round, result)", should_stop)
