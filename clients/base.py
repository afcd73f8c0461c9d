"""The base of all clients: what happens before an algorithm's rule and after it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from flwr.client import NumPyClient
from flwr.common import log
from torch import Tensor

from clients.problem import Problem
from clients.replay import seed_generators
from clients.solvers import FULL_BATCH, Info, LocalTraining, default_training, solve
from clients.state import DamagedState, Fields, Owner, Store, fresh_nonce, peek, settle
from fl_strategies.randomness import stream
from fl_strategies.subproblem import Solve, Subproblem
from fl_strategies.wire import checksum

Config: TypeAlias = Mapping[str, Any]
Arrays: TypeAlias = list[npt.NDArray[Any]]
Look: TypeAlias = Callable[[Store, Owner, int | None], tuple[int, Fields | None]]
State: TypeAlias = Any
"""A named tuple of tensors and numbers: what an algorithm's client keeps for the next round."""


class Step(NamedTuple):
    """What an algorithm's rule made of a request."""

    upload: Tensor
    """The vector [d] to send."""
    state: State | None = None
    """What to keep."""
    scalars: Mapping[str, float] = {}
    """Numbers to send beside it."""
    infos: Sequence[Info] = ()
    """What local training came to, where it was not done by ``solve``."""
    beside: Mapping[str, Tensor] = {}
    """Further vectors [d] to send, one for each name of the client's ``beside``."""


class FederatedClient(NumPyClient):
    """One client's data and means; an algorithm adds :meth:`step`, and a state if it keeps one.

    Parameters
    ----------
    problem : Problem
        Model, loss and training examples.
    client_id : int >= 0
        The stable id (partition id, else node id) that the client's random streams derive from.
    test : Problem, optional
        The client's own test examples, on the same model; needed to evaluate.
    store : Store, optional
        Where state is kept; needed by algorithms whose clients keep any.
    training : LocalTraining, optional
        How to train where the server does not say.

    Raises
    ------
    ValueError
        If the received arrays do not fit the model, or the request or client lacks what is needed.
    StateError
        If the stored state is another algorithm's or model's. One that is damaged counts as lost.
    """

    algorithm: ClassVar[str]
    state_type: ClassVar[type | None] = None
    """The named tuple that the client keeps, if any."""
    beside: ClassVar[tuple[str, ...]] = ()
    """As the strategy's: names of the vectors [d] that travel beside the model. ``step`` finds
    those received in its ``config``, by name."""
    infos: list[Info]
    """What the solver did in this request, one for each time it was called."""

    def __init__(
        self,
        problem: Problem,
        *,
        client_id: int,
        test: Problem | None = None,
        store: Store | None = None,
        training: LocalTraining | None = None,
    ) -> None:
        self.problem, self.client_id, self.test = problem, client_id, test
        self.store, self.training = store, training or default_training()
        self.infos: list[Info] = []

    # ---- what an algorithm adds -------------------------------------------------------------

    def step(self, state: State, theta: Tensor, solve: Solve, config: Config) -> Step:
        """Apply the client rule to ``state`` (None if it keeps none) and the model received."""
        raise TypeError(f"{type(self).__name__} must define step")

    def first_state(self, theta: Tensor, config: Config) -> State:
        """Return the state of a newcomer."""
        return None

    def objective(self, state: State, theta: Tensor, config: Config) -> Problem:
        """Return the problem that ``solve`` works on in ``step``: by default f_i, the client's."""
        return self.problem

    def rounds(self, config: Config) -> Sequence[int]:
        """Return the numbers of the rounds that a request asks for: one, the server's.

        An algorithm may have its clients run several without contact: each then starts from the
        upload of the one before. Random streams derive from these numbers, and ``step`` finds its
        own as ``config["round"]``.
        """
        return [int(config.get("server-round", 0))]

    def own_model(self, state: State) -> Tensor | None:
        """Return the client's own model [d], if the algorithm keeps one."""
        return None

    @property
    def array_names(self) -> list[str]:
        """Names of the model's arrays, in the order in which the client expects and returns them.

        Those of the vectors ``beside`` follow in the same order, buffers left out.
        """
        return self.problem.model.names

    # ---- Flower's NumPyClient -----------------------------------------------------------------

    def get_properties(self, config: Config) -> dict[str, Any]:
        """Return the client's stable id, which a legacy server has no other way to learn."""
        return {"client-id": self.client_id}

    def get_parameters(self, config: Config) -> Arrays:
        """Return the model's arrays as they are, for a legacy server without an initial model."""
        return self.problem.model.arrays(self.problem.model.vector)

    def fit(self, parameters: Arrays, config: Config) -> tuple[Arrays, int, dict[str, Any]]:
        """Train; return the upload (arrays like those received), examples and metrics.

        Metrics: ``train-loss`` and ``train-accuracy`` over the last epoch's batches, ``steps``,
        ``epochs``, ``residual`` where it was measured, and the algorithm's own scalars.
        """
        theta, beside = self._loaded(parameters)
        server_round = int(config.get("server-round", 0))
        training = self.training.updated(config)
        infos: list[Info] = []
        self.infos = infos

        def solve_here(start: Any, subproblem: Subproblem) -> Any:
            w, info = solve(objective, start, subproblem, training, rng)
            infos.append(info)
            return w

        seed = int(config.get("seed", 0))
        state, nonce = self._settled(theta, config)
        cuda = [theta.device] if theta.is_cuda else []
        with torch.random.fork_rng(devices=cuda):
            for number in self.rounds(config):
                rng = np.random.default_rng()  # where no round is named, none is repeated
                if "server-round" in config:
                    rng = stream(seed, "local", number, self.client_id)
                # dropout masks and the like
                seed_generators(int(rng.integers(2**63)), theta.device)
                asked = {**config, **beside, "round": number}
                objective = self.objective(state, theta, asked)
                step = self.step(state, theta, solve_here, asked)
                state, theta = step.state, step.upload
                infos.extend(step.infos)
        metrics: dict[str, Any] = dict(step.scalars)
        if infos:
            last = infos[-1]
            metrics["train-loss"] = last.loss
            metrics["steps"] = sum(info.steps for info in infos)
            metrics["epochs"] = sum(info.epochs for info in infos)
            if self.problem.classifies:
                metrics["train-accuracy"] = last.accuracy
            if not math.isnan(last.residual):
                metrics["residual"] = last.residual
        if step.state is not None:
            assert self.store is not None
            fields = to_fields(step.state) | {"nonce": np.frombuffer(nonce.encode(), np.uint8)}
            self.store.save(self._owner(), server_round, fields)
            metrics["state-nonce"] = nonce
        arrays = self._arrays(step)
        if config.get("checksums"):
            metrics["checksums"] = " ".join(checksum(array) for array in arrays)
        # set by Flower's wrappers; a legacy server's strategy does not see it otherwise
        bound = config.get("clipping_norm", config.get("clipping-norm"))
        if bound is not None:
            metrics["clipping-norm"] = bound
        if "secure-range" in config:
            return arrays, self._in_secret(arrays, config), metrics
        return arrays, len(self.problem), metrics

    def _in_secret(self, arrays: Arrays, config: Config) -> int:
        """Return the weight in a masked sum; raise for what the masks would silently cut off."""
        largest = max(float(np.abs(array).max(initial=0.0)) for array in arrays)
        if not largest <= config["secure-range"]:
            raise ValueError(
                "the upload's entries must be at most the clipping_range of SecAggPlusWorkflow,"
                f" {config['secure-range']:g}, in size, got {largest:g}"
            )
        if config["secure-alike"]:
            return int(config["secure-max-weight"])  # the full weight is rounded least
        if len(self.problem) > config["secure-max-weight"]:
            raise ValueError(
                "the client's examples must be at most the max_weight of SecAggPlusWorkflow,"
                f" {config['secure-max-weight']:g}, got {len(self.problem)}"
            )
        return len(self.problem)

    def evaluate(self, parameters: Arrays, config: Config) -> tuple[float, int, dict[str, Any]]:
        """Measure the received model on the test examples, and the client's own if it has one.

        Metrics: ``eval-accuracy`` and, where there is an own model, ``own-loss``, ``own-accuracy``
        (a newcomer's is the received one). With ``fine-tune`` (:class:`LocalTraining`) also
        ``tuned-accuracy`` and ``own-tuned-accuracy``, of the two after one gradient step, and
        their losses. Buffers are the received model's in all cases.
        """
        if self.test is None:
            raise ValueError(
                f"client {self.client_id} has no test examples: give it some, or set"
                " fraction_evaluate to 0"
            )
        theta = self.test.model.load(parameters)
        result = self.test.evaluate()
        metrics: dict[str, Any] = {}
        if self.test.classifies:
            metrics["eval-accuracy"] = result.accuracy
        state = None
        if self.state_type is not None:
            fields = self._kept(config, peek)
            state = self._from_fields(fields, theta) if fields else self.first_state(theta, config)
        own = None if state is None else self.own_model(state)
        models = {} if own is None else {"own": own}
        if self.training.updated(config).fine_tune:
            models["tuned"] = self._fine_tuned(theta, parameters, config)
            if own is not None:
                models["own-tuned"] = self._fine_tuned(own, parameters, config)
        for name, w in models.items():
            self.test.model.load(parameters)
            self.test.model.vector.copy_(w)
            measured = self.test.evaluate()
            metrics[f"{name}-loss"] = measured.loss
            if self.test.classifies:
                metrics[f"{name}-accuracy"] = measured.accuracy
        return result.loss, len(self.test), metrics

    def _fine_tuned(self, w: Tensor, parameters: Arrays, config: Config) -> Tensor:
        """Return ``w`` after one gradient step, with the buffers of ``parameters``."""
        training = self.training.updated(config)
        assert self.test is not None
        problem = self.problem if training.fine_tune == "train" else self.test
        server_round = int(config.get("server-round", 0))
        rng = stream(int(config.get("seed", 0)), "fine-tune", server_round, self.client_id)
        batch_size = 0 if training.solver in FULL_BATCH else training.batch_size
        problem.model.load(parameters)
        problem.model.vector.copy_(w)
        problem.model.module.train()
        problem.model.attach_gradients()
        cuda = [w.device] if w.is_cuda else []
        with torch.random.fork_rng(devices=cuda):
            seed_generators(int(rng.integers(2**63)), w.device)
            problem.gradient(*next(problem.batches(rng, batch_size)))
        rate = training.lr if training.fine_tune_lr == -1.0 else training.fine_tune_lr
        return w - rate * problem.model.gradient

    def full_gradient(self, w: Tensor) -> Tensor:
        """Return grad f_i(w) over all training examples, as a new vector [d].

        Raises ``ValueError`` for a problem that has no full gradients (that streams its examples).
        """
        if not hasattr(self.problem, "full_gradient"):
            raise ValueError(
                f"{self.algorithm} asks client {self.client_id} for a full gradient, and its"
                f" {type(self.problem).__name__} has no full_gradient"
            )
        model = self.problem.model
        model.vector.copy_(w)
        model.module.train()
        model.attach_gradients()
        self.problem.full_gradient()
        return model.gradient.clone()

    # ---- arrays -------------------------------------------------------------------------------

    def _loaded(self, parameters: Arrays) -> tuple[Tensor, dict[str, Tensor]]:
        """Load the model; return its vector [d], and by name those that came beside it."""
        model = self.problem.model
        own, each = len(model.names), len(model.layout.trainable)
        expected = own + each * len(self.beside)
        if len(parameters) != expected:
            parts = ", ".join(("the model", *self.beside))
            raise ValueError(
                f"{self.algorithm} takes {expected} arrays for {parts};"
                f" {len(parameters)} were received"
            )
        further, beside = iter(parameters[own:]), {}
        for name in self.beside:
            received = zip(model.names, parameters[:own], strict=True)
            beside[name] = model.load(
                [array if n in model.buffers else next(further) for n, array in received]
            )
        return model.load(parameters[:own]), beside

    def _arrays(self, step: Step) -> Arrays:
        """Return the upload and what goes beside it as arrays, in the order received."""
        model = self.problem.model
        arrays = model.arrays(step.upload)
        for name in self.beside:
            whole = zip(model.names, model.arrays(step.beside[name]), strict=True)
            arrays += [array for n, array in whole if n not in model.buffers]
        return arrays

    # ---- state --------------------------------------------------------------------------------

    def _settled(self, theta: Tensor, config: Config) -> tuple[State, str]:
        if self.state_type is None:
            return None, ""
        kept = [int(number) for number in str(config.get("kept-rounds", "")).split()]
        fields = self._kept(config, functools.partial(settle, kept_rounds=kept))
        if fields is None:
            return self.first_state(theta, config), fresh_nonce()
        return self._from_fields(fields, theta), fields["nonce"].tobytes().decode()

    def _kept(self, config: Config, look: Look) -> Fields | None:
        """Return what ``look`` finds; a damaged state is a lost one, as the nonce will tell."""
        try:
            return look(self._need_store(), self._owner(), config.get("acked-round"))[1]
        except DamagedState as error:
            log(WARNING, "client %d begins anew: %s", self.client_id, error)
            return None

    def _from_fields(self, fields: Fields, theta: Tensor) -> State:
        assert self.state_type is not None
        values = {
            name: torch.from_numpy(fields[name]).to(theta)
            if fields[name].ndim
            else fields[name].item()
            for name in self.state_type._fields  # type: ignore[attr-defined]
        }
        return self.state_type(**values)

    def _need_store(self) -> Store:
        if self.store is None:
            raise ValueError(f"{self.algorithm} keeps state on its clients: give them a store")
        return self.store

    def _owner(self) -> Owner:
        return Owner(self.algorithm, self.problem.model.layout.signature)


def to_fields(state: State) -> dict[str, npt.NDArray[Any]]:
    """Return a state's tensors and numbers as named arrays."""
    return {
        name: value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        for name, value in state._asdict().items()
    }


def knob(config: Config, name: str) -> Any:
    """Return ``config[name]``; raise ``ValueError`` if the request lacks it."""
    if name not in config:
        raise ValueError(f"the request lacks {name!r}; it has {sorted(config)}")
    return config[name]
