"""The settings of a run: the keys of the run-config, checked, with defaults per data set."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch

from clients import LocalTraining, client_of
from clients.base import MAX_STEPS
from clients.stacking.choice import setting_of
from fl_strategies import STRATEGIES, FederatedStrategy
from fl_strategies.core.hyperparameters import Hyperparameter
from fl_strategies.core.schedules import DECAYS, check, one_of, shown
from fl_strategies.core.settings_text import format_params, parse_params
from fl_strategies.core.spelling import listed, unknown, unknown_of
from fl_strategies.parts import STAGES, Compression, Part, parse_part, parts_for
from fl_strategies.server.options import Options
from fl_strategies.solvers.local import idle
from fl_strategies.solvers.own_steps import not_for_fine_tuning
from simulations.models import MODELS, TEXT
from simulations.partitions import KINDS

Scalar: TypeAlias = str | int | float | bool

DEVICES = ("cpu", "cuda", "xpu", "mps")
"""The types of devices that a setting may name."""
DTYPES = ("float32", "float64", "bfloat16")
FLAG = ("true", "false")
UNSET = ("", -1)
"""Values of a key that is not set, as TOML has no word for it."""


def key(default: Scalar, about: str, *, words: Sequence[str] = (), **bounds: float) -> Any:
    """Return a dataclass field that is a key of the run-config, one of ``words`` or in ``bounds``.

    What has neither is checked by whom it is for: the strategy, local training, data or model.
    """
    kind = type(default) if words or bounds else object
    declared = Hyperparameter(default, about, kind, bounds, words=tuple(words))
    return field(default=default, metadata={"declared": declared})


def decayed(lr: float, text: str, rounds: int) -> dict[int, float]:
    """Return the schedule of the key ``lr-decay``; raise ``ValueError`` for another text."""
    kind, _, options = text.partition(" ")
    one_of("lr-decay", kind, [name.removesuffix("_decay") for name in DECAYS])
    ends = parse_params(options, "lr-decay")
    if ends.keys() != (set() if kind == "step" else {"to"}):
        raise ValueError(f"lr-decay: step has no option, others have one, to=0.001, got {text!r}")
    if ends:
        check("lr-decay: to", ends["to"], above=0.0)
    return DECAYS[f"{kind}_decay"](lr, *ends.values(), rounds)


def _names(where: str, names: Iterable[str]) -> str:
    return f"{', '.join(f'`{name}`' for name in names)}, see `{where}`"


def _parts(stage: str) -> str:
    return ", ".join(f"`{name}`" for name in parts_for(stage))


class Unused(ValueError):
    """Settings that an algorithm has no use for."""

    def __init__(self, message: str, names: list[str]) -> None:
        super().__init__(message)
        self.names = names


def rule_name(stage: str, part: Part) -> str:
    """Return how a rule's name has the part: ``adam``, and ``download=bfloat16``."""
    return part.name if stage == part.stage else f"{stage}={part.name}"


MEASURE = ("fine-tune", "fine-tune-lr", "fine-tune-epochs")
"""The local settings that say how models are measured."""


def keeps_state(algorithm: str, compression: str, share: str | None) -> bool:
    """Return whether clients of the algorithm keep a state if they compress and share so."""
    codec = parse_part(compression, "compression") if compression else None
    keeps_errors = isinstance(codec, Compression) and codec.feedback
    return keeps_errors or bool(share) or client_of(algorithm).state_type is not None


@dataclass(frozen=True)
class RunConfig:
    """The keys of the run-config (kebab-case there), with their meanings.

    ``""`` for a text and -1 for a number stand for the default of the data set and algorithm
    (``simulations.defaults``).
    """

    algorithm: str = key("fedadmm", "one of `fl_strategies.STRATEGIES`")
    params: str = key("", "hyperparameters of the algorithm: `rho=0.01 eta=1:1.0;60:0.5`")
    selection: str = key("", f"part: one of {_parts('selection')}")
    download: str = key("", f"part: {_parts('download')}")
    compression: str = key("", f"part: one of {_parts('compression')}; as in `topk share=0.01`")
    privacy: str = key(
        "", f"part: one of {_parts('privacy')}; as in `gaussian clip=1 noise=1 delta=1e-5`"
    )
    combine: str = key("", f"part: one of {_parts('combine')}; as in `trimmed-mean share=0.2`")
    regularizer: str = key("", f"part: one of {_parts('regularizer')}; as in `l1 weight=0.01`")
    server_step: str = key("", f"part: one of {_parts('server_step')}; as in `adam lr=0.1`")
    clock: str = key("", f"part: one of {_parts('clock')}; as in `clock step=0.01 spread=0.5`")
    availability: str = key("", f"part: one of {_parts('availability')}; as in `markov on=8 off=4`")
    pace: str = key("", f"part: one of {_parts('pace')}; as in `buffered size=10 concurrency=50`")
    dataset: str = key(
        "digits", "name, folder, Hub name or `module:function`, see `simulations.data`"
    )
    dataset_params: str = key("", "options of the data set: `alpha=1 beta=1`")
    normalise: str = key("own", "image normalisation: `own`, `authors`, `none`")
    partition: str = key(
        "",
        f"{_names('simulations.partitions', KINDS)}; or a class of `flwr_datasets.partitioner`",
    )
    partition_params: str = key("", "options of the partition: `alpha=0.1`")
    model: str = key("", f"{_names('simulations.models', [*MODELS, *TEXT])}; or `module:function`")
    model_params: str = key("", "options of the model: `pretrained=false`")
    share: str = key(
        "",
        "patterns of the arrays that travel, with spaces between them: `!2`; the others are each"
        " client's own; `body`: all but the last linear layer; empty: all travel",
    )
    clients: int = key(100, "number of clients, on as many simulated SuperNodes or fewer", low=1)
    rounds: int = key(30, "number of rounds", low=1)
    fraction: float = key(-1.0, "share of the clients that train in a round", above=0, high=1)
    seed: int = key(1, "fixes the whole run", low=0, high=2**63 - 1)
    solver: str = key(
        "", "local solver: one of `clients.SOLVERS`, a class of torch.optim, or `module:function`"
    )
    lr: float = key(-1.0, "learning rate")
    lr_schedule: str = key("", "the rate within a round: `cosine warm-up=10`, `linear`, `step`")
    lr_decay: str = key(
        "",
        "`lr` over the rounds: `cosine to=0.001`, `linear`, `exponential`; `step`: a tenth from"
        " 50 % of the rounds on, a hundredth from 75 %",
    )
    solver_params: str = key("", "further options of the solver: `gamma=2 delta=0.1`")
    momentum: float = key(-1.0, "momentum of the solver")
    nesterov: bool = key(False, "Nesterov's momentum")
    weight_decay: float = key(0.0, "weight decay of the solver")
    max_grad_norm: float = key(0.0, "bound to which gradients are clipped; 0: none")
    extrapolation: float = key(0.0, "each step is taken at w + this * (w - previous w)")
    box: float = key(0.0, "each step ends with the projection onto [-box, box]^d; 0: none")
    sam: float = key(0.0, "radius of sharpness-aware minimisation; 0: off")
    sam_direction: str = key("local", "direction of `sam`: `local`, `global` (FedLESAM)")
    variance_reduction: str = key("off", "variance-reduced gradients: `off`, `svrg`, `sarah`")
    epochs: int = key(-1, "local epochs")
    random_epochs: str = key("", "`true`: draw the epochs from U{1..epochs}; `false`", words=FLAG)
    steps: int = key(0, "mini-batch steps instead of epochs")
    random_steps: bool = key(False, "draw the steps from U{1..steps} per client and round")
    step_limit: int = key(0, "most local steps of a round, whatever `epochs` says; 0: no limit")
    max_steps: int = key(MAX_STEPS, "most local steps that a client takes for one request", low=1)
    batch_size: int = key(-1, "mini-batch size; 0 is the full batch")
    penalty: float = key(-1.0, "weight of sum_j w_j^2/(1 + w_j^2), added to each loss", low=0)
    residual: float = key(
        -1.0, "stop at this squared norm of the subproblem's gradient; -1: not measured"
    )
    fraction_evaluate: float = key(
        0.0, "share of the clients that evaluate on own test data", low=0, high=1
    )
    local_test: float = key(
        0.0, "share of each client's samples held out to test on", low=0, below=1
    )
    pooled: bool = key(False, "merge training and test data; test on all that clients hold out")
    validation: float = key(
        0.0, "share of the training samples held out, on which all is tested", low=0, below=1
    )
    fine_tune: str = key("off", "also measure models after a step on `train` or `test-batch`")
    fine_tune_lr: float = key(-1.0, "learning rate of `fine-tune`'s step; -1 is `lr`")
    fine_tune_epochs: int = key(0, "epochs of `fine-tune` on `train`; 0: one step", low=0)
    gradient_norm: str = key(
        "", "`true`: report norm(grad f)^2, f the clients' mean loss", words=FLAG
    )
    evaluate_every: int = key(1, "rounds from one test to the next; the last is tested, too", low=1)
    target: float = key(
        -1.0, "test accuracy; the summary has the first round that reaches it", low=0, high=1
    )
    stop_at_target: bool = key(False, "end the run at `target`")
    min_replies: int = key(1, "a round with fewer usable replies is skipped")
    clipping_norm: float = key(0.0, "bound on the norm of an upload's change; 0: none", low=0.0)
    timeout: float = key(3600.0, "seconds that a round waits for replies", above=0.0)
    node_wait: float = key(
        60.0, "seconds without another client after which the first round begins", above=0.0
    )
    lost_state: str = key(
        "", "what to do with clients that lost their state: `reset`, `refuse` or `warn`"
    )
    lost_rounds: int = key(
        3, "a simulation ends after so many rounds in a row with lost clients; 0: never", low=0
    )
    stack: str = key("off", "clients of a host trained at once: `off`, `auto` or a number")
    clients_per_message: int = key(1000, "clients in one message to a host at most")
    fold: str = key("auto", "hosts send one mean of their clients' uploads: `auto`, `on`, `off`")
    fold_memory: int = key(
        250, "`fold`'s `auto` sends means above so many MB of uploads in a round"
    )
    state_memory: int = key(1000, "in-process: MB of states in memory; the rest in a file", low=0)
    state_dir: str = key("", "directory for clients' state; empty: Flower's `context.state`")
    checkpoint_every: int = key(0, "rounds from one checkpoint to the next; 0: none", low=0)
    checkpoint_keep: int = key(2, "checkpoints kept in addition to the most accurate one", low=1)
    resume: bool = key(False, "continue from the last checkpoint in `output`, if there is one")
    device: str = key("auto", "`auto`: `cuda` if there is one; `cpu`, `cuda`, `xpu`, `mps`")
    dtype: str = key("float32", "type of the model: `float32`, `float64`, `bfloat16`", words=DTYPES)
    autocast: str = key("", "lower precision of forward passes: `bfloat16`", words=("", "bfloat16"))
    output: str = key("", "results folder; empty: a new one under `~/fl-strategies-results`")

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> RunConfig:
        """Return the checked and completed config; unknown keys are refused with the known ones."""
        known = {f.name.replace("_", "-"): f for f in fields(cls)}
        if wrong := sorted(config.keys() - known.keys()):
            message = f"unknown run-config keys {unknown(wrong, known)}"
            raise ValueError(f"{message}; known: {listed(sorted(known))}")
        values = {known[name].name: cls.typed(name, value) for name, value in config.items()}
        try:
            return cls(**values).completed(values if len(values) < len(known) else ())
        except ValueError as error:  # maybe the algorithm's, of its own names
            texts = " ".join(value for value in config.values() if isinstance(value, str))
            for name, its_field in known.items():
                if its_field.name not in texts:  # what was given is told as it was given
                    error.args = (re.sub(rf"\b{its_field.name}\b", name, str(error)),)
            raise

    @classmethod
    def typed(cls, name: str, value: Any) -> Any:
        """Return a key's value in the key's type; raise ``ValueError`` for one of another type."""
        kind: type = type(getattr(cls, name.replace("-", "_")))
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{name} must be of type {kind.__name__}, got {shown(value)}")
        if kind in (int, float):
            check(name, value)  # type: ignore[arg-type]
        return kind(value)

    def completed(self, given: Collection[str] = ()) -> RunConfig:
        """Fill in the defaults of the data set and algorithm; return the checked config.

        They take the place of no key that was ``given``, nor of one that is not at its default:
        Flower gives an app all keys.
        """
        from simulations.defaults import defaults

        if self.algorithm not in STRATEGIES:
            hint = unknown([self.algorithm], STRATEGIES)
            raise ValueError(f"unknown algorithm {hint}; known: {listed(sorted(STRATEGIES))}")
        usual = defaults(self.algorithm, self.dataset, self.solver)
        of_all = {f.name: f.default for f in fields(self)}
        unset = {
            n: value
            for n, value in usual.items()
            if getattr(self, n) == of_all[n] and (n not in given or of_all[n] in UNSET)
        }
        full = replace(self, **unset)
        params = parse_params(usual.get("params", "")) | parse_params(self.params, "params")
        states = self.state_dir if self.stateful else ""  # others have none to put there
        texts: dict[str, Any] = {stage: str(part) for stage, part in self.parts.items()}
        full = replace(full, params=format_params(params), state_dir=states, **texts)
        full.check()
        return full

    def check(self) -> None:
        """Raise ``ValueError`` for settings that cannot run, before any work."""
        for setting in fields(self):
            setting.metadata["declared"].check(setting.name, getattr(self, setting.name))
        if self.resume and not (self.checkpoint_every and self.output):
            raise ValueError("resume needs checkpoint-every > 0, and output, where the run lies")
        if self.checkpoint_every and self.stateful and not self.state_dir:
            raise ValueError(
                f"checkpoint-every needs state-dir: clients of {self.algorithm} keep a state, which"
                " would not outlive the run elsewhere"
            )
        setting_of(self.stack)
        if self.local_test == 0.0 and (self.fraction_evaluate > 0.0 or self.pooled):
            needs = "fraction-evaluate > 0" if self.fraction_evaluate > 0.0 else "pooled"
            if self.pooled or self.partition != "natural":
                raise ValueError(f"{needs} needs local-test > 0: clients need test data")
        one_of("device", re.sub(r"(?<!auto):\d+$", "", self.device), ("auto", *DEVICES))
        for name in ("dataset_params", "partition_params", "model_params", "solver_params"):
            parse_params(getattr(self, name), name)
        if self.state_dir and not os.path.isabs(self.state_dir):
            raise ValueError(f"state-dir must be an absolute path, got {shown(self.state_dir)}")
        self._check_used()
        least = LocalTraining().updated(self.local()).most_steps(samples=1)
        if least > self.max_steps:
            raise ValueError(
                "max-steps must be >= the local steps of a request, which are"
                f" {least:,.0f} or more, got {self.max_steps:,}"
            )
        self.strategy().check_population(self.clients)

    @property
    def stateful(self) -> bool:
        """Whether clients of the algorithm keep a state."""
        return keeps_state(self.algorithm, self.compression, self.share)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts around the algorithm, by stage."""
        texts = {stage: getattr(self, stage) for stage in STAGES}
        return {stage: parse_part(text, stage) for stage, text in texts.items() if text}

    @property
    def rule(self) -> str:
        """The name of the algorithm with its parts: ``fedprox+adam``."""
        named = ((stage, part) for stage, part in self.parts.items())
        return "+".join([self.algorithm, *(rule_name(stage, part) for stage, part in named)])

    def to_run_config(self) -> dict[str, Scalar]:
        """Return the keys and values as ``flwr run`` takes them."""
        return {f.name.replace("_", "-"): getattr(self, f.name) for f in fields(self)}

    def local(self) -> dict[str, Any]:
        """Return the local settings that the algorithm uses, as strategies send them."""
        settings, unused = self._settings(), self.unused()
        return {name: value for name, value in settings.items() if name not in unused}

    def _settings(self) -> dict[str, Any]:
        names = [field.name for field in fields(LocalTraining) if field.name != "random_epochs"]
        settings = {name.replace("_", "-"): getattr(self, name) for name in names}
        for name in ("residual", "fine-tune-lr"):  # TOML has no word for what is not set
            if settings[name] == -1.0:
                del settings[name]
        return settings | {"random-epochs": self.random_epochs == "true"}

    def unused(self) -> dict[str, str]:
        """Return the local settings that the algorithm cannot use, each with the reason."""
        settings = self._settings()
        if not STRATEGIES[self.algorithm].uses_local:
            return dict.fromkeys(not_for_fine_tuning(settings), "its hyperparameters set its steps")
        if self.fine_tune == "off":
            return idle(settings) | dict.fromkeys(MEASURE[1:], "fine-tune is off")
        measure = MEASURE if self.fraction_evaluate == 0.0 else ()
        return idle(settings) | dict.fromkeys(measure, "fraction-evaluate is 0")

    def _check_used(self) -> None:
        """Raise ``ValueError`` for settings, not by default, that the algorithm cannot use."""
        from simulations.defaults import defaults

        usual = {key.name: key.default for key in fields(self)}
        usual |= defaults(self.algorithm, self.dataset)
        why = {name.replace("-", "_"): reason for name, reason in self.unused().items()}
        if "lr" in why:
            why["lr_decay"] = why["lr"]
        if useless := {
            name: value for name in why if (value := getattr(self, name)) != usual[name]
        }:
            reasons = "; ".join(dict.fromkeys(why[name] for name in useless))
            who = self.algorithm + f" with {shown(self.params)}" * bool(self.params)
            settings = ", ".join(f"{name!r}: {shown(value)}" for name, value in useless.items())
            message = f"{who} has no use for {{{settings}}}: {reasons}"
            raise Unused(message, [name.replace("_", "-") for name in useless])

    def strategy(self, **options: Any) -> FederatedStrategy:
        """Return the strategy, with ``options`` for its base."""
        local = self.local()
        params = parse_params(self.params)
        known = hyperparameters_of(self.algorithm)
        if wrong := sorted(params.keys() - set(known)):
            hint = unknown_of(wrong, known)
            raise ValueError(f"params: {self.algorithm} has no hyperparameter {hint}")
        parts = self.parts
        shared = {
            name: (getattr(self, name) or None) if declared.optional else getattr(self, name)
            for name, declared in Options.declarations.items()
            if name in vars(self) and name not in parts
        }
        strategy = STRATEGIES[self.algorithm](
            fraction_train=self.fraction,
            local=local,
            **params,
            **parts,  # type: ignore[arg-type]  # checked there
            **shared,  # type: ignore[arg-type]  # checked there
            **options,
        )
        if self.lr_decay:
            rounds = strategy.communication_rounds(strategy.state, self.rounds)  # of schedules
            decay = decayed(self.lr, self.lr_decay, max(rounds, 1))
            strategy.local = {**strategy.local, "lr": decay}
        return strategy

    @property
    def torch_device(self) -> torch.device:
        """The device of this process: the named one, or the CPU if the process lacks it."""
        device = torch.device("cuda" if self.device == "auto" else self.device)
        return device if _is_here(device) else torch.device("cpu")

    def gpus(self) -> int:
        """Return how many of this machine's GPUs, of a kind that Ray assigns, the run may use."""
        device = self.torch_device
        return torch.cuda.device_count() if device.type == "cuda" else 0

    def check_device(self) -> None:
        """Raise ``ValueError`` if this process, which computes on the device, cannot use it.

        A server without the device may still have clients that use it.
        """
        if self.device != "auto" and not _is_here(torch.device(self.device)):
            advice = (
                "; Flower's simulation shows clients a GPU where `client-resources-num-gpus` gives"
                " them a share of it"
            )
            raise ValueError(
                f"device is {shown(self.device)}, which this process ({socket.gethostname()}) does"
                f" not see{advice * self.device.startswith('cuda')}"
            )


def _is_here(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    module = getattr(torch, device.type)
    available = torch.backends.mps.is_available if device.type == "mps" else module.is_available
    return bool(available() and (device.index or 0) < module.device_count())


def hyperparameters_of(algorithm: str) -> list[str]:
    """Return the names of the algorithm's own hyperparameters."""
    return list(hyperparameter_defaults(algorithm))


def hyperparameter_defaults(algorithm: str) -> dict[str, Any]:
    """Return the algorithm's own hyperparameters, with their defaults."""
    return STRATEGIES[algorithm].hyperparameters()
