"""What a run is made of: the keys of the run-config, checked, with defaults per data set."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch

from clients import CLIENTS, LocalTraining
from fl_strategies import STRATEGIES, FederatedStrategy, step_decay
from fl_strategies.params import format_params, parse_params
from fl_strategies.schedules import check
from fl_strategies.strategy import Options

Scalar: TypeAlias = str | int | float | bool


def key(default: Scalar, about: str) -> Any:
    """Return a dataclass field that is a key of the run-config."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class RunConfig:
    """The keys of the run-config (kebab-case there), with what each means.

    ``""`` for a text and -1 for a number stand for the default of the data set and algorithm
    (``simulations.defaults``).
    """

    algorithm: str = key("fedadmm", "one of `fl_strategies.STRATEGIES`")
    params: str = key("", "knobs of the algorithm: `rho=0.01 eta=0:1.0;60:0.5`")
    dataset: str = key("digits", "short name, folder or Hub name, see `simulations.data`")
    dataset_params: str = key("", "options of the data set: `alpha=1 beta=1`")
    normalise: str = key("own", "image normalisation: `own`, `authors`, `none`")
    partition: str = key("", "see `simulations.partitions`")
    partition_params: str = key("", "options of the partition: `alpha=0.1`")
    model: str = key("", "see `simulations.models`")
    model_params: str = key("", "options of the model: `pretrained=false`")
    clients: int = key(100, "number of clients; equals the simulated SuperNodes")
    rounds: int = key(30, "number of rounds")
    fraction: float = key(-1.0, "share of the clients that train in a round, in (0, 1]")
    seed: int = key(1, "fixes the whole run")
    solver: str = key("", "local solver: one of `clients.SOLVERS` or a class of torch.optim")
    lr: float = key(-1.0, "learning rate")
    lr_decay: bool = key(False, "a tenth of `lr` from 50 % of the rounds on, a hundredth from 75 %")
    solver_params: str = key("", "further options of the solver: `gamma=2 delta=0.1`")
    momentum: float = key(-1.0, "momentum of the solver")
    nesterov: bool = key(False, "Nesterov's momentum")
    weight_decay: float = key(0.0, "weight decay of the solver")
    extrapolation: float = key(0.0, "each step is taken at w + this * (w - previous w)")
    box: float = key(0.0, "each step ends with the projection onto [-box, box]^d; 0: none")
    epochs: int = key(-1, "local epochs")
    random_epochs: str = key("", "`true`: draw the epochs from U{1..epochs}; `false`")
    steps: int = key(0, "mini-batch steps instead of epochs")
    random_steps: bool = key(False, "draw the steps from U{1..steps} per client and round")
    batch_size: int = key(-1, "mini-batch size; 0 is the full batch")
    penalty: float = key(-1.0, "weight of sum_j w_j^2/(1 + w_j^2), added to every client's loss")
    residual: float = key(-1.0, "stop at this squared norm of the subproblem's gradient")
    fraction_evaluate: float = key(0.0, "share of the clients that evaluate on data of their own")
    local_test: float = key(0.0, "share of each client's data held out for that")
    pooled: bool = key(False, "merge training and test data; test on all that clients hold out")
    validation: float = key(0.0, "share of each client's data to test the run on, not the test set")
    fine_tune: str = key("", "measure models after a step on `train` or `test-batch` as well")
    fine_tune_lr: float = key(-1.0, "rate of that step; -1 is `lr`")
    gradient_norm: str = key("", "`true`: report the squared norm of grad f, f the clients' mean")
    evaluate_every: int = key(1, "rounds from one test to the next; the last is always tested")
    target: float = key(-1.0, "test accuracy whose first round is reported")
    stop_at_target: bool = key(False, "end the run there")
    min_replies: int = key(1, "usable replies below which a round is void")
    clipping_norm: float = key(0.0, "bound on the norm of an upload's change; 0: none")
    timeout: float = key(3600.0, "seconds that a round waits for replies")
    lost_state: str = key("reset", "clients without their booked state: `reset refuse warn`")
    state_dir: str = key("", "directory for clients' state; empty: Flower's `context.state`")
    checkpoint_every: int = key(0, "rounds from one checkpoint to the next; 0: none are made")
    checkpoint_keep: int = key(2, "checkpoints kept beside the best by test accuracy")
    resume: bool = key(False, "go on from the last checkpoint in `output`, if there is one")
    device: str = key("auto", "`auto` (a GPU where there is one), `cpu`, `cuda`")
    dtype: str = key("float32", "type of the model: `float32`, `float64`")
    autocast: str = key("", "lower precision of forward passes: `bfloat16`")
    output: str = key("", "results folder; empty: a new one under `~/fl-strategies-results`")

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> RunConfig:
        """Return the checked and completed config; unknown keys are refused with the known ones."""
        known = {f.name.replace("_", "-"): f for f in fields(cls)}
        if unknown := sorted(config.keys() - known.keys()):
            raise ValueError(f"unknown run-config keys {unknown}; known: {sorted(known)}")
        values: dict[str, Any] = {}
        for name, value in config.items():
            kind: type = type(getattr(cls, known[name].name))
            accepted = (int, float) if kind is float else kind
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
            values[known[name].name] = kind(value)
        return cls(**values).completed()

    def completed(self) -> RunConfig:
        """Return this config with the defaults of its data set and algorithm filled in, checked."""
        from simulations.defaults import defaults

        if self.algorithm not in STRATEGIES:
            raise ValueError(f"unknown algorithm {self.algorithm!r}; known: {sorted(STRATEGIES)}")
        found = defaults(self.algorithm, self.dataset, self.solver)
        unset = {
            name: value
            for name, value in found.items()
            if getattr(self, name) == {f.name: f.default for f in fields(self)}[name]
        }
        full = replace(self, **unset)
        params = parse_params(found.get("params", "")) | parse_params(self.params)
        full = replace(full, params=format_params(params))
        full.check()
        return full

    def check(self) -> None:
        """Raise ``ValueError`` for anything that could not run, before any work."""
        check("clients", self.clients, low=1)
        check("rounds", self.rounds, low=1)
        check("fraction", self.fraction, above=0.0, high=1.0)
        check("fraction_evaluate", self.fraction_evaluate, low=0.0, high=1.0)
        check("evaluate_every", self.evaluate_every, low=1)
        check("seed", self.seed, low=0)
        check("checkpoint_every", self.checkpoint_every, low=0)
        check("checkpoint_keep", self.checkpoint_keep, low=1)
        if self.resume and not (self.checkpoint_every and self.output):
            raise ValueError("resume needs checkpoint-every > 0, and output, where the run lies")
        stateful = CLIENTS[self.algorithm].state_type is not None
        if self.checkpoint_every and stateful and not self.state_dir:
            raise ValueError(
                f"checkpoint-every needs state-dir: clients of {self.algorithm} keep a state, which"
                " would not outlive the run elsewhere"
            )
        check("timeout", self.timeout, above=0.0)
        check("target", self.target, low=0.0, high=1.0)
        check("penalty", self.penalty, low=0.0)
        check("local_test", self.local_test, low=0.0)
        check("validation", self.validation, low=0.0)
        if self.validation >= 1.0:
            raise ValueError(f"validation must be < 1, got {self.validation}")
        if self.local_test == 0.0 and (self.fraction_evaluate > 0.0 or self.pooled):
            needs = "fraction-evaluate > 0" if self.fraction_evaluate > 0.0 else "pooled"
            if self.pooled or self.partition != "natural":
                raise ValueError(f"{needs} needs local-test > 0: clients need test data")
        for name, value, known in (
            ("dtype", self.dtype, ("float32", "float64")),
            ("autocast", self.autocast, ("", "bfloat16")),
            ("random-epochs", self.random_epochs, ("true", "false")),
            ("gradient-norm", self.gradient_norm, ("true", "false")),
            ("device", self.device, ("auto", "cpu", "cuda")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {list(known)}, got {value!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch sees no GPU")
        if self.state_dir and not os.path.isabs(self.state_dir):
            raise ValueError(f"state-dir must be an absolute path, got {self.state_dir!r}")
        LocalTraining().updated(self.local())
        self.strategy().check_clients(self.clients)

    def to_run_config(self) -> dict[str, Scalar]:
        """Return the keys and values as ``flwr run`` takes them."""
        return {f.name.replace("_", "-"): getattr(self, f.name) for f in fields(self)}

    def local(self) -> dict[str, Any]:
        """Return how clients train, as strategies send it."""
        names = [field.name for field in fields(LocalTraining) if field.name != "random_epochs"]
        found = {name.replace("_", "-"): getattr(self, name) for name in names}
        return found | {"random-epochs": self.random_epochs == "true"}

    def strategy(self, **options: Any) -> FederatedStrategy:
        """Return the strategy, with ``options`` for its base."""
        local = self.local()
        params = parse_params(self.params)
        known = knobs(self.algorithm)
        if unknown := sorted(params.keys() - set(known)):
            raise ValueError(f"{self.algorithm} has no knob {unknown}; it has {known}")
        strategy = STRATEGIES[self.algorithm](
            fraction_train=self.fraction,
            fraction_evaluate=self.fraction_evaluate,
            seed=self.seed,
            min_replies=self.min_replies,
            clipping_norm=self.clipping_norm or None,
            lost_state=self.lost_state,  # type: ignore[arg-type]  # checked there
            local=local,
            **params,
            **options,
        )
        if self.lr_decay:
            exchanges = strategy.exchanges_in(self.rounds)  # in which schedules are read
            strategy.local["lr"] = step_decay(self.lr, max(exchanges, 1))
        return strategy

    @property
    def torch_device(self) -> torch.device:
        """The device to compute on."""
        gpu = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        return torch.device("cuda" if gpu else "cpu")


def knobs(algorithm: str) -> list[str]:
    """Return the names of the algorithm's own knobs."""
    return list(knob_defaults(algorithm))


def knob_defaults(algorithm: str) -> dict[str, Any]:
    """Return the algorithm's own knobs, with their defaults."""
    strategy = STRATEGIES[algorithm]
    bases = strategy.__mro__[: strategy.__mro__.index(FederatedStrategy)]
    found: dict[str, Any] = {}
    for base in bases:
        for name, parameter in inspect.signature(base).parameters.items():
            if name not in (*Options.__annotations__, "options"):
                found.setdefault(name, parameter.default)
    return found
