"""The base of all clients: the work before an algorithm's rule and after it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
from flwr.app import Context
from flwr.client import NumPyClient
from torch import Tensor

from clients import checks
from clients.compressing import codec_of, compressed
from clients.evaluating import OtherArrays, fine_tuned, measured, named
from clients.keeping import Keeper, Kept, State
from clients.learning.local_problem import Evaluation, LocalProblem
from clients.learning.oracle import ClientOracle
from clients.learning.own import Asking, Budget, Missing, OwnOracle, OwnTraining, Work
from clients.learning.problem import Problem
from clients.learning.replay import kept_generators, seed_generators
from clients.learning.sam import climb_of
from clients.metrics import metrics_of
from clients.node.state import ContextStore, Store, client_id
from clients.request import (
    Arrays,
    Config,
    Received,
    RequestConfig,
    check_frozen,
    check_own_first,
    generator,
    round_of,
    warn_of_misspelt,
    weight_in_secret,
)
from fl_strategies import STRATEGIES
from fl_strategies.core.hyperparameters import check_request
from fl_strategies.core.oracle import Step
from fl_strategies.core.randomness import stream
from fl_strategies.core.records import CATCH_UP
from fl_strategies.core.schedules import check
from fl_strategies.messages.codes import CODEC, OF_CHANGES
from fl_strategies.messages.description import DESCRIBE, DESCRIPTION, OWN_FIRST
from fl_strategies.messages.heeding import CHECKSUMS, FINE_TUNE, STEP_LIMIT
from fl_strategies.messages.wire import checksum
from fl_strategies.solvers.local import LocalTraining, default_training

MAX_STEPS = 1_000_000
"""The most local steps that a client takes for one request, unless it is given another bound."""

Reply: TypeAlias = tuple[Arrays, int, dict[str, Any]]
"""What ``fit`` returns: arrays, number of samples, metrics."""
Streams: TypeAlias = Callable[[str], np.random.Generator]


class Start(NamedTuple):
    """The start of a request: what the client kept, its algorithm's state, its catch-up vector."""

    keeper: Keeper
    kept: Kept
    state: State
    catch_up: Tensor | float
    """As of :class:`.Received`."""
    theta: Tensor
    """The model [d] as received."""


class FederatedClient(NumPyClient):
    """One client's data, model and store; an algorithm adds :meth:`step`, and perhaps a state.

    For an algorithm whose strategy declares a ``client_half``, ``clients.derived`` adds both.

    Parameters
    ----------
    problem : Problem or OwnTraining
        Model, loss and training samples; or a model and a training loop of one's own.
    client_id : int >= 0, optional
        The stable id, from which the client's random streams derive. ``client_app`` gives a client
        without one that of its context (partition id, else node id).
    test : Problem, optional
        The client's own test samples, on the same model; needed to evaluate, unless the problem
        has an evaluation of its own.
    store : Store, optional
        Where state is kept, if the algorithm's clients keep state; by default, in ``client_app``,
        the context's (:class:`.ContextStore`).
    training : LocalTraining, optional
        How to train, where the server does not say it.
    max_steps : int >= 1 (default 1,000,000)
        The most local steps (:meth:`most_steps`) that one request may ask for, by ``steps``,
        ``epochs``, ``algorithm-rounds`` and the like. A request for more is refused before training
        begins.

    Raises
    ------
    ValueError
        For an argument of another kind. If the received arrays do not fit the model, if the request
        or the client lacks something, or if the request asks for more than ``max_steps``.
    StateError
        If the stored state belongs to another algorithm, model, run or client. A damaged state
        counts as lost.
    """

    algorithm: ClassVar[str]
    state_type: ClassVar[type[NamedTuple] | None] = None
    """The named tuple that the client keeps, if any."""
    extra_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors [d] that travel with the model; the strategy's are the same."""
    stacks: ClassVar[bool] = False
    """Of a class of your own: :meth:`step` takes vectors [clients, d], too (``core/stacks.py``)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        checks.check_class(cls, newcomers=cls.first_state is not FederatedClient.first_state)

    def __init__(
        self,
        problem: LocalProblem,
        *,
        client_id: int | None = None,
        test: Problem | None = None,
        store: Store | None = None,
        training: LocalTraining | None = None,
        max_steps: int = MAX_STEPS,
    ) -> None:
        check("max_steps", max_steps, low=1, integer=True)
        checks.check_data(problem, test, training)
        if client_id is not None:
            checks.check_id(client_id, store)
        self.problem, self._id = problem, None if client_id is None else int(client_id)
        self.test = None if test is None else test.with_roles_of(problem.model)
        self.store, self.training = store, training or default_training()
        self.max_steps = max_steps

    @property
    def client_id(self) -> int:
        """The stable id; ``ValueError`` if neither the user nor a context gave one."""
        if self._id is None:
            raise ValueError(
                "client_id must be given, as in client_id=0, to a client that client_app does not"
                " make"
            )
        return self._id

    def in_context(self, context: Context) -> Self:
        """Return the client with the id and the store of ``context``, where it has none."""
        if self._id is not None and self.store is not None:
            return self
        settled = copy.copy(self)
        settled._id = client_id(context) if self._id is None else self._id
        settled.store = ContextStore(context) if self.store is None else self.store
        checks.check_id(settled._id, settled.store)
        return settled

    # ---- what an algorithm adds -------------------------------------------------------------

    def step(self, state: State, received: Received, oracle: Any, config: Config) -> Step:
        """Call the client rule and return its step.

        ``state`` is what the client keeps, or None. ``oracle`` (:class:`.ClientOracle`) gives
        access to the client's loss. ``config`` is the request's, with the number of the ``round``.
        """
        raise TypeError(f"{type(self).__name__} must define step")

    def first_state(self, theta: Tensor, config: Config) -> State:
        """Return the state of a newcomer."""
        return None

    def rounds(self, config: Config) -> Sequence[int]:
        """Return the numbers of the rounds that a request asks for: here one, the server's.

        An algorithm may have its clients run several rounds without contact: each round then starts
        from the upload of the one before. Random streams derive from these numbers, and ``step``
        finds the number of its round in ``config["round"]``.
        """
        return [round_of(config)]

    def most_steps(self, config: Config) -> float:
        """Return the most local steps, each one gradient on a mini-batch, that a request allows."""
        return self._most_steps(config, self.settings(config))

    def _most_steps(self, config: Config, training: LocalTraining) -> float:
        steps = self.problem.most_steps(training)
        strategy = STRATEGIES.get(self.algorithm)
        return strategy.most_steps(config, steps, len(self.problem)) if strategy else steps

    def settings(self, config: Config) -> LocalTraining:
        """Return how to train: the client's settings with those of a request."""
        return self.problem.settings(self.training, config)

    @staticmethod
    def personalized_model(state: State) -> Tensor | None:
        """Return the personalized model [d], if the algorithm keeps one."""
        return None

    @property
    def array_names(self) -> list[str]:
        """Names of the model's arrays, in the order in which the client expects and returns them.

        The arrays of ``extra_vectors`` follow in the same order, one per trained parameter.
        """
        return self.problem.model.names

    # ---- Flower's NumPyClient -----------------------------------------------------------------

    def get_properties(self, config: Config) -> dict[str, Any]:
        """Return the client's stable id; a legacy server learns it only in this way.

        A config with ``describe`` also asks for a description of the model.
        """
        described = {DESCRIPTION: self.problem.model.description.to_text()}
        return {"client-id": self.client_id, **(described if config.get(DESCRIBE) else {})}

    def get_parameters(self, config: Config) -> Arrays:
        """Return the model's current arrays, for a legacy server without an initial model."""
        model = self.problem.model
        return model.arrays(model.vector)

    def fit(self, parameters: Arrays, config: Config) -> Reply:
        """Train; return the upload (arrays like those received), number of samples, and metrics.

        Metrics: ``train-loss`` and ``train-accuracy`` over the last epoch's mini-batches,
        ``steps``, ``epochs``, ``residual`` if it was measured, and the algorithm's own numbers.
        ``device`` is the kind of device that the client computed on.
        """
        with self.problem.model.lent():
            return self._fitted(parameters, config)

    def _fitted(self, parameters: Arrays, config: Config) -> Reply:
        training = self.check(config)
        received = self.received(parameters)
        begun = self.begun(received, config, training)
        received = received._replace(catch_up=begun.catch_up)
        if isinstance(self.problem, OwnTraining):
            self._check_asked(self.problem, begun.state, received, config)
        oracle_in = functools.partial(self._oracle, training, begun, Budget(self.max_steps))
        with kept_generators([received.theta], everywhere=self.problem.fetches):
            steps = self.steps_made(begun.state, received, config, oracle_in)
        if isinstance(self.problem, OwnTraining):
            checks.check_reported(self.algorithm, steps)
        return self.finished(begun, steps, config)

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, dict[str, Any]]:
        """Measure the received model on the test samples, and the personalized model if any.

        Metrics: ``eval-accuracy``; with a personalized model also ``own-loss`` and ``own-accuracy``
        (a newcomer's personalized model is the received one, and is not measured again). With
        ``fine-tune`` (:class:`LocalTraining`) also ``tuned-accuracy`` and ``own-tuned-accuracy``,
        of the two models after one gradient step, and their losses. Buffers are always the received
        model's.
        """
        with self.problem.model.lent():
            return self._evaluated(parameters, config)

    def _evaluated(self, parameters: Arrays, config: Config) -> tuple[float, int, dict[str, Any]]:
        test: Evaluation | None = self.test
        if test is None:
            test = self.problem.evaluation(config)
        if test is None:
            raise ValueError(
                "the client has no test samples, and is left out of the mean: give it some by"
                " test=..., or, if no client has any, set the strategy's fraction_evaluate to 0"
            )
        theta = test.model.take(parameters)
        training = self.settings(config)
        kept = self.keeper(config, training).peeked(config, theta)
        rest = OtherArrays(parameters, kept.arrays)
        draws = functools.partial(generator, config, "evaluate", round_of(config), self.client_id)
        result = measured(test, rest, theta, draws())
        state = self._state(kept, theta, config)
        own = None
        if state is not None and self.problem.evaluate_own:
            own = self.personalized_model(state)
        models = {} if own is None else {"own": (rest, own)}
        if training.fine_tune != "off" and isinstance(self.problem, Problem) and self.test:
            seed = int(config.get("seed", 0))
            on = self.problem if training.fine_tune == "train" else self.test
            before = {"tuned": theta} | {f"{name}-tuned": w for name, (_, w) in models.items()}
            for name, w in before.items():
                rng = stream(seed, "fine-tune", round_of(config), self.client_id)
                models[name] = fine_tuned(on, rest, w, training, rng)
        results = {
            name: result if w is theta else measured(test, which, w, draws())
            for name, (which, w) in models.items()
        }
        metrics = named(results | {"eval": result})
        del metrics["eval-loss"]  # which Flower's record names itself
        told = {FINE_TUNE: training.fine_tune} if FINE_TUNE in config else {}
        return result.loss, len(test), {**metrics, **told}

    # ---- a request ------------------------------------------------------------------------------

    def check(self, config: Config) -> LocalTraining:
        """Return how a request has the client train.

        Raises ``ValueError`` for a request of another algorithm, or for too much work.
        """
        asked_for = config.get("algorithm", self.algorithm)
        if asked_for != self.algorithm:
            raise ValueError(
                f"the request asks for {asked_for!r}, and {type(self).__name__} runs"
                f" {self.algorithm!r}: AnyAlgorithmClient runs what a request names"
            )
        check_frozen(self.problem.model.layout, str(config.get("frozen", "")))
        if OWN_FIRST in config:
            check_own_first(self.problem.model.own_first, str(config[OWN_FIRST]))
        if "run-id" not in config:  # our strategies tell their user themselves
            warn_of_misspelt(frozenset(config))
        if (strategy := STRATEGIES.get(self.algorithm)) is not None:
            check_request(strategy.declarations, config)
            checks.check_halves(self, strategy)
            if not strategy.uses_local:
                checks.check_no_training(self.algorithm, self.training, config)
        training = self.settings(config)
        if not (work := self._most_steps(config, training)) <= self.max_steps:
            raise ValueError(
                f"the request asks for up to {work:,} local steps, and the client takes at most"
                f" {self.max_steps:,} (its max_steps)"
            )
        return training

    def received(self, parameters: Arrays) -> Received:
        """Return the vectors that a request brought; put its buffers into the model."""
        load = self.problem.model.load_all
        return Received(*load(parameters, self.extra_vectors, self.algorithm))

    def begun(self, received: Received, config: Config, training: LocalTraining) -> Start:
        """Return the start of a request; load the client's own arrays into the model."""
        keeper = self.keeper(config, training)
        kept = keeper.settled(config, received.theta)
        self.problem.model.load_kept(kept.arrays)
        data = config.get(CATCH_UP)
        catch_up = self.problem.model.read(data) if data else 0.0
        state = self._state(kept, received.theta, config)
        return Start(keeper, kept, state, catch_up, received.theta)

    def steps_made(
        self,
        state: State,
        received: Received,
        config: Config,
        oracle_in: Callable[[int, Config], Any],
    ) -> list[Step]:
        """Return the step of each round that a request asks for.

        ``oracle_in(number, config)`` returns the oracle of the round ``number``.
        """
        made = []
        for number in self.rounds(config):
            oracle = oracle_in(number, config)
            step = self.step(state, received, oracle, RequestConfig(config, round=number))
            state, received = step.state, received._replace(theta=step.upload, catch_up=0.0)
            made.append(step)
        return made

    def finished(self, begun: Start, steps: Sequence[Step], config: Config) -> Reply:
        """Keep the result of a request's ``steps``; return what :meth:`fit` returns."""
        model, nonce = self.problem.model, begun.kept.nonce
        last = steps[-1]
        model.check_frozen()
        checks.check_step(self, begun.state, last, config)
        vectors = [last.extra_vectors[name] for name in self.extra_vectors]
        metrics, left_out = metrics_of(self.algorithm, model, steps, config), None
        metrics = {**checks.checked_scalars(self, last.scalars, metrics), **metrics}
        if codec := codec_of(config):
            start = 0.0 if config[CODEC].startswith(OF_CHANGES) else begun.theta
            rng = self.streams(round_of(config), config)[2](CODEC)
            changes, before = [last.upload - start, *vectors], begun.kept.left_out
            arrays, left_out = compressed(codec, model, changes, before, rng)
            metrics[CODEC] = config[CODEC]
        else:
            arrays = model.all_arrays(last.upload, vectors)
        kept = Kept(last.state, nonce, model.kept_arrays(), left_out, begun.theta)
        begun.keeper.save(config, kept)
        if nonce:
            metrics["state-nonce"] = nonce
        if STEP_LIMIT in config:
            metrics[STEP_LIMIT] = str(config[STEP_LIMIT])
        if config.get(CHECKSUMS):
            metrics[CHECKSUMS] = " ".join(checksum(array) for array in arrays)
        samples = len(self.problem)
        if "secure-range" in config:
            samples = weight_in_secret(arrays, samples, config)
        return arrays, samples, metrics

    def streams(self, number: int, config: Config) -> tuple[np.random.Generator, int, Streams]:
        """Return the sources of the client's random numbers in a round.

        They are the generator of its mini-batches, the seed of torch's generators (dropout masks
        and the like), and a function that returns its generator of a purpose.
        """
        streams = functools.partial(generator, config, number=number, client=self.client_id)
        rng = streams("local")
        return rng, int(rng.integers(2**63)), streams

    def _oracle(
        self, training: LocalTraining, begun: Start, budget: Budget, number: int, config: Config
    ) -> Any:
        rng, seed, streams = self.streams(number, config)
        asked_by = f"{self.algorithm} asks its clients"
        if isinstance(self.problem, OwnTraining):
            return OwnOracle(self.problem, Work(config, rng, budget, asked_by))
        assert isinstance(self.problem, Problem)
        seed_generators(seed, self.problem.model.device)
        climb = None
        if training.climbs_globally:
            climb = climb_of(begun.kept.received, begun.theta, training.sam)
        return ClientOracle(self.problem, training, rng, streams, climb=climb, asked_by=asked_by)

    def _check_asked(
        self, problem: OwnTraining, state: State, received: Received, config: Config
    ) -> None:
        """Raise ``ValueError`` if the rule or the request asks for what a loop does not give."""
        number = self.rounds(config)[0]
        try:
            self.step(state, received, Asking(), RequestConfig(config, round=number))
        except Missing as error:
            raise ValueError(
                f"{self.algorithm} asks its clients {error}: give the client a Problem"
            ) from None
        problem.check_settings(config)

    def _state(self, kept: Kept, theta: Tensor, config: Config) -> State:
        """Return the algorithm's state; if there is none, a newcomer's."""
        if self.state_type is None or kept.state is not None:
            return kept.state
        state = self.first_state(theta, RequestConfig(config))
        checks.check_first(self, state)
        return state

    def keeper(self, config: Config, training: LocalTraining) -> Keeper:
        """Return what reads and writes the client's state, by a request and how it trains."""
        model, codec = self.problem.model, codec_of(config)
        return Keeper(
            self.store,
            self.client_id,
            self.algorithm,
            self.state_type,
            model.signature,
            model.kept,
            compresses=codec is not None and codec.feedback,
            remembers=training.climbs_globally,
        )
