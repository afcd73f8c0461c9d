"""A client in its process: its data, its model, and the ClientApp that runs it."""

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
from flwr.app import Context
from torch.nn.functional import cross_entropy

from clients import (
    CLIENTS,
    AnyAlgorithmClient,
    ContextStore,
    DirectoryStore,
    FlatModel,
    Hosted,
    Problem,
    client_app,
    client_id,
)
from clients.cohort import MEMORY
from clients.learning.choice import Setting, setting_of
from clients.learning.problem import laid_out
from clients.learning.room import Room, check_room, client_bytes
from fl_strategies.core.near import unknown_of
from fl_strategies.core.params import parse_params
from simulations import data, generated, models, partitions
from simulations.config import RunConfig
from simulations.population import hosted, worker_states

CPU = torch.device("cpu")


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
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic


def dataset(config: RunConfig) -> generated.Dataset:
    """Return the run's data set (``data.load`` caches it)."""
    name = config.dataset
    options = _options(
        config.dataset_params, f"data set {name!r}", data.load, partial(data.options_of, name)
    )
    if name in generated.GENERATED:
        options = {"clients": config.clients, "seed": config.seed} | options
    found = data.load(name, normalise=config.normalise, **options)
    return _pooled(found) if config.pooled else found


@functools.lru_cache(maxsize=4)
def _pooled(found: generated.Dataset) -> generated.Dataset:
    """Return the data set with its test samples after its training samples."""
    owner = None
    if found.owner is not None and found.test_owner is not None:
        owner = np.concatenate([found.owner, found.test_owner])
    x, y = np.concatenate([found.x, found.test_x]), np.concatenate([found.y, found.test_y])
    return replace(found, x=x, y=y, owner=owner, test_owner=None)


@functools.lru_cache(maxsize=4)
def placed(
    found: generated.Dataset, test: bool, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of the training or test set, once per process, on ``device``."""
    inputs = torch.as_tensor(found.inputs(test=test))
    inputs = inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)
    return laid_out(inputs), torch.as_tensor(found.test_y if test else found.y).to(device)


def _options(
    text: str, whose: str, function: Callable[..., Any], known: Callable[[], Sequence[str]]
) -> dict[str, Any]:
    """Return the options in ``text``; those that the function gets by other keys are refused."""
    options, named = parse_params(text), getfullargspec(function)
    if wrong := sorted(options.keys() & {*named.args, *named.kwonlyargs}):
        raise ValueError(f"{whose} has no option {unknown_of(wrong, known())}")
    return options


def parts(config: RunConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each client's samples: (for training, for its own tests).

    Its own tests are on what ``validation`` holds out of its training samples, if it does.
    """
    return _split(config)[0]


def validation_rows(config: RunConfig) -> np.ndarray:
    """Return the clients' samples that ``validation`` holds out to test the run."""
    return _split(config)[1]


def _split(config: RunConfig) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    return _parts(dataset(config), config.partition, config.partition_params, config.clients,
                  config.seed, config.local_test, config.validation)  # fmt: skip


@functools.lru_cache(maxsize=4)
def _parts(
    found: generated.Dataset,
    kind: str,
    params: str,
    clients: int,
    seed: int,
    local_test: float,
    validation: float,
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    known = partial(partitions.options_of, kind)
    options = _options(params, f"partition {kind!r}", partitions.partition, known)
    rows = partitions.partition(kind, found.y, clients, seed=seed, owner=found.owner, **options)
    split = partitions.train_test(rows, local_test, seed)
    if validation == 0.0:
        return split, np.empty(0, np.int64)
    split = partitions.train_test([train for train, _ in split], validation, seed)
    held_out = np.concatenate([held for _, held in split])
    if not len(held_out):
        raise ValueError(f"validation={validation} holds out nothing: clients have too few rows")
    return split, held_out


def draw_partition(config: RunConfig, path: Path) -> None:
    """Draw a figure: how many samples of each class each client trains on."""
    partitions.draw([train for train, _ in parts(config)], dataset(config).y, path)


def fresh_model(config: RunConfig, device: torch.device = CPU) -> FlatModel:
    """Return the run's initial model on ``device``."""
    found, name = dataset(config), config.model
    module = models.build(
        name,
        found.x.shape[1:],
        found.num_classes,
        seed=config.seed,
        vocabulary=found.vocabulary,
        **_options(
            config.model_params, f"model {name!r}", models.build, partial(models.options_of, name)
        ),
    )
    return FlatModel(module, device=device, dtype=getattr(torch, config.dtype))


@functools.lru_cache(maxsize=1)
def worker_model(config: RunConfig) -> FlatModel:
    """Return the model that all clients of a process share: each client loads what it receives."""
    return fresh_model(config, config.torch_device)


@functools.lru_cache(maxsize=1)
def check_memory(config: RunConfig) -> None:
    """Raise ``ValueError`` if a GPU lacks the memory for the run's data, model and clients.

    The check allocates nothing. It cannot know what other processes will need.
    """
    device = config.torch_device
    if device.type != "cuda":
        return
    found, model = dataset(config), fresh_model(config)
    x, y = found.inputs(slice(1)), found.y[:1]
    first = Problem(model, cross_entropy, torch.as_tensor(x), torch.as_tensor(y))
    samples = max(len(rows) for rows, _ in parts(config))
    vectors, batch = client_bytes(first, min(samples, config.batch_size or samples))
    d, size = model.vector.numel(), model.vector.element_size()
    numbers = found.x.size + found.test_x.size
    each = size if first.inputs.is_floating_point() else x.itemsize
    clients = max(1, round(config.fraction * config.clients))
    at_once = 0
    if config.cohort != "off":
        beside = samples * CLIENTS[config.algorithm](first, client_id=0).stacked_bytes()
        at_once = min(clients * (vectors + batch + beside), MEMORY)
    room = Room(numbers * each, 2 * d * size, vectors, batch, at_once)
    check_room(room, device, torch.cuda.mem_get_info(device)[0])


@functools.lru_cache(maxsize=4)
def penalty(weight: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the term that is added to every client's loss, the same function for all."""

    def bent(w: torch.Tensor) -> torch.Tensor:
        return weight * (w**2 / (1 + w**2)).sum()

    return bent


def problem(config: RunConfig, which: str, rows: np.ndarray | None = None) -> Problem:
    """Return the problem of the ``"train"`` or ``"test"`` set, or of some ``rows`` of it.

    If training samples are held out for validation, they are the test set; for pooled data the test
    set is all that the clients hold out.
    """
    found, test = dataset(config), which == "test"
    if test and rows is None and config.validation > 0.0:
        rows, test = validation_rows(config), False
    elif test and config.pooled:
        rows, test = np.concatenate([held_out for _, held_out in parts(config)]), False
    device, dtype = config.torch_device, getattr(torch, config.dtype)
    x, y = placed(found, test, device, dtype)
    index = None if rows is None else torch.from_numpy(rows)
    autocast = getattr(torch, config.autocast) if config.autocast else None

    bent = penalty(config.penalty) if config.penalty > 0.0 else None
    return Problem(
        worker_model(config), cross_entropy, x, y, rows=index, penalty=bent, autocast=autocast
    )


def client_fn(context: Context) -> AnyAlgorithmClient:
    """Return the client of this node, by its run-config."""
    torch.set_num_threads(1)
    config = parsed(tuple(sorted(context.run_config.items())))
    me = client_id(context)
    if me >= config.clients:
        raise ValueError(
            f"this node is client {me}, but the run has clients={config.clients}: start at most as"
            " many SuperNodes as clients"
        )
    compute_repeatably(config.torch_device)
    check_memory(config)
    train, held_out = parts(config)[me]
    states = worker_states(config, context)
    durable = bool(config.state_dir)  # else the folder goes with its run
    store = DirectoryStore(states, me, durable=durable) if states else ContextStore(context)
    test = problem(config, "train", held_out) if len(held_out) else None
    found = dataset(config)
    untouched = config.local_test == config.validation == 0.0
    if config.partition == "natural" and untouched and found.test_owner is not None:
        assert found.owner is not None
        own = np.flatnonzero(found.test_owner == found.owner[train[0]])
        test = problem(config, "test", own) if len(own) else None
    return AnyAlgorithmClient(
        problem(config, "train", train),
        client_id=me,
        test=test,
        store=store,
        max_steps=config.max_steps,
    )


@functools.lru_cache(maxsize=8)
def parsed(items: tuple[tuple[str, Any], ...]) -> RunConfig:
    """Return the run-config, parsed once per process, after a check of the device."""
    config = RunConfig.parse(dict(items))
    config.check_device()
    return config


def hosts(context: Context) -> Hosted | None:
    """Return the clients that the node hosts, by its run-config and node-config."""
    config = parsed(tuple(sorted(context.run_config.items())))
    clients = hosted(config, context)
    if clients is None:
        return None
    sizes = _sizes(config)
    if isinstance(clients, int):
        return Hosted(clients, sizes)
    return Hosted(clients, [sizes[client] for client in clients if client < len(sizes)])


@functools.lru_cache(maxsize=4)
def _sizes(config: RunConfig) -> list[int]:
    """Return each client's number of training samples."""
    return [len(train) for train, _ in parts(config)]


def cohort(context: Context) -> Setting:
    """Return how many clients are trained at once, by the run-config."""
    return setting_of(parsed(tuple(sorted(context.run_config.items()))).cohort)


app = client_app(client_fn, hosts=hosts, cohort=cohort)
