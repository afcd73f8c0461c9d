"""The problems of a run: its data set, each client's samples, the model and the loss."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import getfullargspec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from clients import Border, Problem
from fl_strategies.core.settings_text import parse_params
from fl_strategies.core.spelling import unknown_of
from simulations import data, figures, generated, models, partitions
from simulations.config import RunConfig
from simulations.drawn import AT_ONCE, Owners, Parts

CPU = torch.device("cpu")
Split = tuple[Sequence[tuple[np.ndarray, np.ndarray]], np.ndarray]
HANDED: dict[RunConfig, tuple[generated.Dataset, Split]] = {}
"""By run, the data and their split that another process has made (:mod:`.handed`)."""


def compute_repeatably(device: torch.device) -> None:
    """Make torch's results repeatable in this process; on a CPU they always are.

    An operator without a repeatable form on this device still runs; PyTorch's warning names it.
    """
    if device.type == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


@contextmanager
def kept_flags() -> Iterator[None]:
    """Undo changes made inside by :func:`compute_repeatably`, for a process that continues."""
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    try:
        yield
    finally:
        if torch.are_deterministic_algorithms_enabled() != strict:  # a call imports much
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic


def dataset(config: RunConfig) -> generated.Dataset:
    """Return the run's data set; further calls return the same object while ``FL_DATA`` stays."""
    if config in HANDED:
        return HANDED[config][0]
    return _dataset(config, os.environ.get("FL_DATA"))


@functools.lru_cache(maxsize=4)
def _dataset(config: RunConfig, root: str | None) -> generated.Dataset:
    name = config.dataset
    options = _options(
        config.dataset_params, f"data set {name!r}", data.load, partial(data.options_of, name)
    )
    if name in generated.GENERATED:
        options = {"clients": config.clients, "seed": config.seed} | options
    data_set = data.load(name, normalise=config.normalise, **options)
    if config.pooled:
        return _pooled(data_set)
    return data_set if config.partition == "natural" else _whole(data_set)


@functools.lru_cache(maxsize=4)
def _whole(data_set: generated.Dataset) -> generated.Dataset:
    """Return the data set with all its samples at hand."""
    if not isinstance(data_set.owner, Owners):
        return data_set
    names = ("x", "y", "test_x", "test_y", "owner", "test_owner")
    arrays: dict[str, Any] = {name: np.asarray(getattr(data_set, name)) for name in names}
    return replace(data_set, **arrays)


@functools.lru_cache(maxsize=4)
def _pooled(data_set: generated.Dataset) -> generated.Dataset:
    """Return the data set with its test samples after its training samples."""
    owner = None
    if data_set.owner is not None and data_set.test_owner is not None:
        owner = np.concatenate([data_set.owner, data_set.test_owner])
    x, y = (
        np.concatenate([data_set.x, data_set.test_x]),
        np.concatenate([data_set.y, data_set.test_y]),
    )
    return replace(data_set, x=x, y=y, owner=owner, test_owner=None)


@functools.lru_cache(maxsize=4)
def placed(
    data_set: generated.Dataset, test: bool, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of the training or test set, once per process, on ``device``."""
    inputs, labels = map(torch.as_tensor, data_set.samples(test=test))
    inputs = inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)
    return laid_out(inputs), labels.to(device)


def _options(
    text: str, whose: str, function: Callable[..., Any], known: Callable[[], Sequence[str]]
) -> dict[str, Any]:
    """Return the options in ``text``; those that the function gets by other keys are refused."""
    options, named = parse_params(text), getfullargspec(function)
    if wrong := sorted(options.keys() & {*named.args, *named.kwonlyargs}):
        raise ValueError(f"{whose} has no option {unknown_of(wrong, known())}")
    return options


def parts(config: RunConfig) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """Return each client's samples: (for training, for its own tests).

    Its own tests are on what ``validation`` holds out of its training samples, if it does.
    """
    return split(config)[0]


def validation_rows(config: RunConfig) -> np.ndarray:
    """Return the clients' samples that ``validation`` holds out to test the run."""
    return split(config)[1]


def split(config: RunConfig) -> Split:
    """Return each client's samples, and those that ``validation`` holds out."""
    if config in HANDED:
        return HANDED[config][1]
    return _parts(dataset(config), config.partition, config.partition_params, config.clients,
                  config.seed, config.local_test, config.validation)  # fmt: skip


@functools.lru_cache(maxsize=4)
def _parts(
    data_set: generated.Dataset,
    kind: str,
    params: str,
    clients: int,
    seed: int,
    local_test: float,
    validation: float,
) -> Split:
    if kind == "natural" and isinstance(data_set.owner, Owners) and local_test == validation == 0:
        return Parts(data_set.owner), np.empty(0, np.int64)
    known = partial(partitions.options_of, kind)
    options = _options(params, f"partition {kind!r}", partitions.partition, known)
    rows = partitions.partition(
        kind, np.asarray(data_set.y), clients, seed=seed, owner=data_set.owner, **options
    )
    pairs = partitions.train_test(rows, local_test, seed)
    if validation == 0.0:
        return pairs, np.empty(0, np.int64)
    pairs = partitions.train_test([train for train, _ in pairs], validation, seed)
    held_out = np.concatenate([held for _, held in pairs])
    if not len(held_out):
        raise ValueError(f"validation={validation} holds out nothing: clients have too few rows")
    return pairs, held_out


def draw_partition(config: RunConfig, path: Path) -> None:
    """Draw a figure: how many samples of each class each client trains on.

    Of a large population that is drawn it shows the first clients.
    """
    data_set, rows = dataset(config), parts(config)
    shown = AT_ONCE if isinstance(data_set.owner, Owners) else len(rows)
    shown_parts = [rows[client][0] for client in range(shown)]
    figures.draw_partition(partitions.describe(shown_parts, data_set.y), path)


def fresh_model(config: RunConfig, device: torch.device = CPU) -> Border:
    """Return the run's initial model on ``device``."""
    data_set, name = dataset(config), config.model
    module = models.build(
        name,
        data_set.x.shape[1:],
        data_set.num_classes,
        seed=config.seed,
        vocabulary=data_set.vocabulary,
        **_options(
            config.model_params, f"model {name!r}", models.build, partial(models.options_of, name)
        ),
    )
    module = module.to(device=device, dtype=getattr(torch, config.dtype))
    return Border(laid_out(module), share=_shared(module, config.share))


def _shared(module: torch.nn.Module, share: str) -> Sequence[str] | None:
    """Return the patterns that the key ``share`` means for the module."""
    if share != "body":
        return share.split() or None
    layers = [name for name, part in module.named_modules() if type(part) is torch.nn.Linear]
    if not layers:
        raise ValueError("share = body needs a model with a linear layer, its head")
    return [f"!{layers[-1]}"]


def laid_out(of: Any) -> Any:
    """Return images, or a module with its filters, channels-last: a CPU convolves so faster."""
    if isinstance(of, torch.nn.Module):
        return of.to(memory_format=torch.channels_last)
    image = of.dim() == 4
    return of.contiguous(memory_format=torch.channels_last if image else torch.contiguous_format)


@functools.lru_cache(maxsize=1)
def shared_model(config: RunConfig) -> Border:
    """Return the model that all clients of a process share: each client loads what it receives."""
    return fresh_model(config, config.torch_device)


@functools.lru_cache(maxsize=4)
def penalty(weight: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the term that is added to every client's loss, the same function for all."""

    def bent(w: torch.Tensor) -> torch.Tensor:
        return weight * (w**2 / (1 + w**2)).sum()

    return bent


def problem(config: RunConfig, which: str, rows: np.ndarray | None = None) -> Problem:
    """Return the problem of the ``"train"`` or ``"test"`` set, or of some ``rows`` of it.

    If training samples are held out for validation, they are the test set; for pooled data the test
    set is all that the clients hold out. Of a large population that is drawn, the test set is that
    of some clients, always the same ones.
    """
    data_set, test = dataset(config), which == "test"
    if test and rows is None and config.validation > 0.0:
        rows, test = validation_rows(config), False
    elif test and config.pooled:
        rows, test = np.concatenate([held_out for _, held_out in parts(config)]), False
    device, dtype = config.torch_device, getattr(torch, config.dtype)
    if isinstance(data_set.test_owner, Owners):
        rows = data_set.test_owner.sample() if rows is None else rows
        x, y = map(torch.from_numpy, data_set.samples(rows, test=test))
        rows = None
    else:
        x, y = placed(data_set, test, device, dtype)
    index = None if rows is None else torch.from_numpy(rows)
    autocast = getattr(torch, config.autocast) if config.autocast else None

    bent = penalty(config.penalty) if config.penalty > 0.0 else None
    return Problem(
        shared_model(config), cross_entropy, x, y, rows=index, penalty=bent, autocast=autocast
    )
