"""The base of all clients: the work before an algorithm's rule and after it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from flwr.client import NumPyClient
from torch import Tensor

from clients import checks
from clients.compressing import codec_of, compressed
from clients.evaluating import Rest, fine_tuned, measured, named
from clients.keeping import Keeper, Kept, State
from clients.learning.objective import Objective
from clients.learning.oracle import ClientOracle
from clients.learning.replay import kept_generators, seed_generators
from clients.metrics import metrics_of
from clients.node.state import DirectoryStore, Store
from clients.request import (
    Arrays,
    Config,
    Received,
    Told,
    check_frozen,
    generator,
    round_of,
    warn_of_misspelt,
    weight_in_secret,
)
from fl_strategies import STRATEGIES
from fl_strategies.core.hyperparameters import check_request
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.randomness import stream
from fl_strategies.core.records import CATCH_UP
from fl_strategies.core.schedules import check
from fl_strategies.core.spelling import hinted
from fl_strategies.messages.codes import CHANGES, CODEC
from fl_strategies.messages.description import DESCRIBE, DESCRIPTION
from fl_strategies.messages.wire import checksum
from fl_strategies.solvers.local import LocalTraining, default_training

MAX_STEPS = 1_000_000
"""The most local steps that a client takes for one request, unless it is given another bound."""

Reply: TypeAlias = tuple[Arrays, int, dict[str, Any]]
"""What ``fit`` returns: arrays, number of samples, metrics."""
Streams: TypeAlias = Callable[[str], np.random.Generator]


class Begun(NamedTuple):
    """The start of a request: what the client kept, its algorithm's state, its catch-up vector."""

    kept: Kept
    state: State
    catch_up: Tensor | float
    """As of :class:`.Received`."""
    theta: Tensor
    """The model [d] as received."""


@hinted
class FederatedClient(NumPyClient):
    """One client's data, model and store; an algorithm adds :meth:`step`, and perhaps a state.

    Parameters
    ----------
    problem : Objective
        Model, loss and training samples.
    client_id : int >= 0
        The stable id (partition id, else node id); the client's random streams derive from it.
    test : Objective, optional
        The client's own test samples, on the same model; needed to evaluate.
    store : Store, optional
        Where state is kept; needed if the algorithm's clients keep state.
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
        problem: Objective,
        *,
        client_id: int,
        test: Objective | None = None,
        store: Store | None = None,
        training: LocalTraining | None = None,
        max_steps: int = MAX_STEPS,
    ) -> None:
        check("max_steps", max_steps, low=1, integer=True)
        check("client_id", client_id, low=0, integer=True)
        checks.check_kinds(problem, test, store, training)
        if isinstance(store, DirectoryStore) and store.client_id != client_id:
            raise ValueError(f"store is of client {store.client_id}, client_id is {client_id}")
        self.problem, self.client_id, self.test = problem, int(client_id), test
        self.store, self.training = store, training or default_training()
        self.max_steps = max_steps

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
        """Return the most local steps, each one gradient on a mini-batch, that a round may take."""
        return self.problem.most_steps(self.training.updated(config))

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
        return self.problem.model.arrays(self.problem.model.vector)

    def fit(self, parameters: Arrays, config: Config) -> Reply:
        """Train; return the upload (arrays like those received), number of samples, and metrics.

        Metrics: ``train-loss`` and ``train-accuracy`` over the last epoch's mini-batches,
        ``steps``, ``epochs``, ``residual`` if it was measured, and the algorithm's own numbers.
        ``device`` is the kind of device that the client computed on.
        """
        self.check(config)
        received = self.received(parameters)
        begun = self.begun(received, config)
        with kept_generators([received.theta]):
            received = received._replace(catch_up=begun.catch_up)
            steps = self.steps_made(begun.state, received, config, self._oracle)
        return self.finished(begun, steps, config)

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, dict[str, Any]]:
        """Measure the received model on the test samples, and the personalized model if any.

        Metrics: ``eval-accuracy``; with a personalized model also ``own-loss`` and ``own-accuracy``
        (a newcomer's personalized model is the received one). With ``fine-tune``
        (:class:`LocalTraining`) also ``tuned-accuracy`` and ``own-tuned-accuracy``, of the two
        models after one gradient step, and their losses. Buffers are always the received model's.
        """
        if self.test is None:
            raise ValueError(
                "the client has no test samples, and is left out of the mean: give it some by"
                " test=..., or, if no client has any, set the strategy's fraction_evaluate to 0"
            )
        theta = self.test.model.load(parameters)
        kept = self.keeper(config).peeked(config, theta)
        rest = Rest(parameters, kept.arrays)
        result = measured(self.test, rest, theta)
        state = self._state(kept, theta, config)
        own = None if state is None else self.personalized_model(state)
        models = {} if own is None else {"own": (rest, own)}
        training = self.training.updated(config)
        if training.fine_tune != "off":
            seed = int(config.get("seed", 0))
            on = self.problem if training.fine_tune == "train" else self.test
            before = {"tuned": theta} | {f"{name}-tuned": w for name, (_, w) in models.items()}
            for name, w in before.items():
                rng = stream(seed, "fine-tune", round_of(config), self.client_id)
                models[name] = fine_tuned(on, rest, w, training, rng)
        results = {name: measured(self.test, *model) for name, model in models.items()}
        metrics = named(results | {"eval": result})
        del metrics["eval-loss"]  # which Flower's record names itself
        return result.loss, len(self.test), metrics

    # ---- a request ------------------------------------------------------------------------------

    def check(self, config: Config) -> None:
        """Raise ``ValueError`` for a request of another algorithm, or for too much work."""
        asked_for = config.get("algorithm", self.algorithm)
        if asked_for != self.algorithm:
            raise ValueError(
                f"the request asks for {asked_for!r}, and {type(self).__name__} runs"
                f" {self.algorithm!r}: AnyAlgorithmClient runs what a request names"
            )
        check_frozen(self.problem.model.layout, str(config.get("frozen", "")))
        if "run-id" not in config:  # our strategies tell their user themselves
            warn_of_misspelt(frozenset(config))
        if (strategy := STRATEGIES.get(self.algorithm)) is not None:
            check_request(strategy.declarations, config)
            checks.check_halves(self, strategy)
        if not (work := len(self.rounds(config)) * self.most_steps(config)) <= self.max_steps:
            raise ValueError(
                f"the request asks for up to {work:,} local steps, and the client takes at most"
                f" {self.max_steps:,} (its max_steps)"
            )

    def received(self, parameters: Arrays) -> Received:
        """Put the arrays of a request into the model; return its vectors."""
        load = self.problem.model.load_all
        return Received(*load(parameters, self.extra_vectors, self.algorithm))

    def begun(self, received: Received, config: Config) -> Begun:
        """Return the start of a request; load the client's own arrays into the model."""
        kept = self.keeper(config).settled(config, received.theta)
        self.problem.model.load_kept(kept.arrays)
        data = config.get(CATCH_UP)
        catch_up = self.problem.model.read(data) if data else 0.0
        return Begun(kept, self._state(kept, received.theta, config), catch_up, received.theta)

    def steps_made(
        self,
        state: State,
        received: Received,
        config: Config,
        oracle_in: Callable[[int, Config], Oracle],
    ) -> list[Step]:
        """Return the step of each round that a request asks for.

        ``oracle_in(number, config)`` returns the oracle of the round ``number``.
        """
        made = []
        for number in self.rounds(config):
            oracle = oracle_in(number, config)
            step = self.step(state, received, oracle, Told(config, round=number))
            checks.check_returned(self, step)
            state, received = step.state, received._replace(theta=step.upload, catch_up=0.0)
            made.append(step)
        return made

    def finished(self, begun: Begun, steps: Sequence[Step], config: Config) -> Reply:
        """Keep the result of a request's ``steps``; return what :meth:`fit` returns."""
        model, nonce = self.problem.model, begun.kept.nonce
        last = steps[-1]
        checks.check_step(self, begun.state, last, self.training.updated(config).rate)
        vectors = [last.extra_vectors[name] for name in self.extra_vectors]
        metrics, left_out = metrics_of(self.algorithm, model, steps, config), None
        metrics = {**checks.checked_scalars(self, last.scalars, metrics), **metrics}
        if codec := codec_of(config):
            start = 0.0 if config.get(CHANGES) else begun.theta
            rng = self.streams(round_of(config), config)[2](CODEC)
            changes, before = [last.upload - start, *vectors], begun.kept.left_out
            arrays, left_out = compressed(codec, model, changes, before, rng)
            metrics[CODEC] = str(codec)
        else:
            arrays = model.all_arrays(last.upload, vectors)
        kept = Kept(last.state, nonce, model.kept_arrays(), left_out)
        self.keeper(config).save(config, kept)
        if nonce:
            metrics["state-nonce"] = nonce
        if config.get("checksums"):
            metrics["checksums"] = " ".join(checksum(array) for array in arrays)
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

    def _oracle(self, number: int, config: Config) -> ClientOracle:
        rng, seed, streams = self.streams(number, config)
        seed_generators(seed, self.problem.model.vector.device)
        return ClientOracle(
            self.problem,
            self.training.updated(config),
            rng,
            streams,
            asked_by=f"{self.algorithm} asks client {self.client_id}",
        )

    def _state(self, kept: Kept, theta: Tensor, config: Config) -> State:
        """Return the algorithm's state; if there is none, a newcomer's."""
        if self.state_type is None or kept.state is not None:
            return kept.state
        state = self.first_state(theta, Told(config))
        checks.check_first(self, state)
        return state

    def keeper(self, config: Config) -> Keeper:
        """Return what reads and writes the client's state, by a request."""
        model, codec = self.problem.model, codec_of(config)
        return Keeper(
            self.store,
            self.client_id,
            self.algorithm,
            self.state_type,
            model.signature,
            model.kept,
            compresses=codec is not None and codec.feedback,
        )
