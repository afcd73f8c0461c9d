"""The base of all strategies: what Flower calls, and a run of communication rounds.

An algorithm declares its hyperparameters and adds :meth:`FederatedStrategy.aggregate`, its server
rule; the module ``algorithm`` holds the other hooks. A round is

    select -> send -> [clients] -> read -> combine -> aggregate -> step
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from logging import WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fl_strategies.core.hyperparameters import Scalar
from fl_strategies.core.ledger import Ledger
from fl_strategies.core.log import log
from fl_strategies.core.metric_names import SKIPPED
from fl_strategies.core.reasons import in_one_log
from fl_strategies.core.records import Round
from fl_strategies.core.spelling import hinted
from fl_strategies.server import stages
from fl_strategies.server.algorithm import Algorithm, State
from fl_strategies.server.asked import Asked
from fl_strategies.server.composition import (
    Caller,
    check_hosts,
    check_trained,
    check_wrapper,
    told_bound,
    warn_of_unequal,
)
from fl_strategies.server.declared import check_built
from fl_strategies.server.enough import check_enough, clients_needed
from fl_strategies.server.loop import EvaluateFn, run_rounds
from fl_strategies.server.model import Model, decoded
from fl_strategies.server.nodes import Nodes
from fl_strategies.server.options import Options
from fl_strategies.server.pacing import asked_and_replies, waits_for_all
from fl_strategies.server.patience import Patience
from fl_strategies.server.phases import Phases
from fl_strategies.server.reading import Reader
from fl_strategies.server.round import next_model, shares
from fl_strategies.server.run import Result, Run
from fl_strategies.server.sending import Sender
from fl_strategies.server.settling import Roles, described, settled
from fl_strategies.server.timing import passed
from fl_strategies.solvers.local import check_local
from fl_strategies.solvers.own_steps import check_only_fine_tuning


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
        flowers = inspect.signature(FlowerFedAvg).parameters
        given = {name: getattr(self, name) for name in Options.declarations if name in flowers}
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
        check_built(self)
        self.min_replies = stages.min_replies(self)
        self.state: State = None
        self.parts: stages.States = {}
        self.ledger = Ledger(self.lost_state, self.acknowledge, kept_rounds)
        self.nodes = Nodes(self.node_wait, self.shared_population)
        self.run = Run(self.algorithm, self.reports, Patience(self.max_unusable_rounds))
        self.sender = Sender(self, self.ledger, self.nodes)
        self.reader = Reader(self, self.ledger)
        self.phases = Phases()
        self.caller = Caller()
        self.model: Model | None = None

    # ---- a run --------------------------------------------------------------------------------

    @hinted
    @in_one_log
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
        configs = {"train_config": train_config, "evaluate_config": evaluate_config}
        return run_rounds(
            self, grid, initial_arrays, num_rounds, timeout, configs, evaluate_fn, resume=resume
        )

    def open(self, initial_arrays: ArrayRecord, num_rounds: int) -> None:
        """Begin a run with the initial model, and forget the result of the last run."""
        self.run.open(initial_arrays, num_rounds)
        self.reader.forget()
        self.model = None

    def settle(self, grid: Grid) -> None:
        """Settle which arrays travel and which are trained; begin the algorithm's state."""
        arrays, run = self.result.arrays, self.run
        ask = functools.partial(described, self.nodes, grid, clients_needed(self))
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
        if not waits_for_all(self):
            self.load(arrays)
            return self.use(*asked_and_replies(self, grid, timeout, config))[0]
        requests = self.configure_train(self.run.round, arrays, config, grid)
        replies = grid.send_and_receive(requests, timeout=timeout)
        return self.aggregate_train(self.run.round, replies)[0]

    # ---- a round ------------------------------------------------------------------------------

    def ask(self, config: ConfigRecord, grid: Grid) -> Asked:
        """Select the clients of the round, and return the requests to them."""
        nodes = self.nodes.wait(grid, clients_needed(self))
        check_hosts(type(self).__name__, self.caller, self.nodes.hosts)
        self.state = self.on_connect(self.state, self.nodes.known)
        round = self.make_round(self.run.number, nodes)
        busy, samples = self.phases.at_work, self.nodes.samples
        round = stages.selected(self, self.state, self.parts, round, samples, busy)
        check_enough(self, len(round.asked) + len(busy), "asked")
        return self.send(round, self.opened_model, config, nodes)

    def send(
        self, round: Round, model: Model, config: ConfigRecord, nodes: Mapping[int, int]
    ) -> Asked:
        """Return the requests to train ``model`` in ``round``."""
        asked = self.sender.send(
            self.state, round, model, config, nodes, MessageType.TRAIN, self.caller
        )
        return replace(asked, bound=told_bound(config))

    def use(
        self, asked: Asked, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Return the next global model from the ``replies``, None if the round is skipped.

        Also returns the round's metrics.
        """
        run, hosts = self.run, self.nodes.hosts
        read = self.reader.training(self.state, asked, replies, self.caller, hosts)
        run.clients, run.faults = read.rows, read.faults
        run.devices |= read.devices
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
            run.clients, ends = shares(self, read)
            metrics.update(ends)
            if self.caller.wrapped:
                warn_of_unequal(run.clients, number)
        else:
            metrics[SKIPPED] = 1
            why = outcome.skipped
            log(WARNING, "round %d is skipped: %s; model and state unchanged", number, why)
        self.state, (self.parts, clock) = outcome.state, passed(outcome.parts, read.seconds)
        seconds = time.monotonic() - asked.started
        metrics.update({**read.hosts, **clock, **outcome.info, "seconds": seconds})
        self.result.train_metrics_clientapp[number] = metrics
        if outcome.model is None:
            return None, metrics
        return self.opened_model.record_with(outcome.model), metrics

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
            averages = stages.mean_of(self)
            check_wrapper(stages.described(self), averages, watched=watched)
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
        """Return the next global model and the round's metrics; None if the round is skipped."""
        return self.use(self.run.asked, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to the clients sampled to evaluate; none if the fraction is 0."""
        if self.fraction_evaluate == 0.0:
            self.run.asked = Asked(Round())
            return []
        least, busy = max(self.min_available_nodes, self.min_evaluate_nodes), self.phases.busy
        nodes = {c: n for c, n in self.nodes.wait(grid, least).items() if c not in busy}
        round = self.make_round(self.run.rounds_before + server_round, nodes)
        clients = self.sample("evaluate", round, self.fraction_evaluate, self.min_evaluate_nodes)
        self.run.asked = self.sender.send(
            self.state,
            replace(round, asked=tuple(clients)),
            replace(self.opened_model, record=self.shown(arrays)),
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
        if not self.run.asked.clients:
            return None
        read = self.reader.evaluation(self.run.asked, replies, self.run.clients)
        self.run.clients, self.run.faults = read.rows, read.faults
        self.result.evaluate_metrics_clientapp[self.run.asked.round.number] = read.metrics
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

    def shown(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model that is tested, evaluated and returned when ``arrays`` train next."""
        if self.model is None:
            return arrays
        return stages.shown(self, self.parts, arrays, self.model.layout)

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
        )

    def request(self, server_round: int, client: int) -> dict[str, Scalar]:
        """Return the config for ``client`` in ``server_round``."""
        state, round = self._first(self.state), self.make_round(server_round)
        return self.sender.request(state, round, client, self.caller)
