"""The ClientApp of this Flower App: a client of each node, or of each client that a node hosts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from flwr.app import Context
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    DirectoryStore,
    Hosted,
    Problem,
    client_app,
    client_id,
)
from clients.learning.memory import client_bytes
from clients.stacking.choice import Setting, setting_of
from clients.stacking.fit import MEMORY
from simulations.config import RunConfig
from simulations.population import hosted, worker_states
from simulations.problems import compute_repeatably, dataset, fresh_model, parts, problem


@functools.lru_cache(maxsize=1)
def check_memory(config: RunConfig) -> None:
    """Raise ``ValueError`` if a GPU lacks the memory for the run's data, model and clients.

    The check allocates nothing. It cannot know what other processes will need.
    """
    device = config.torch_device
    if device.type != "cuda":
        return
    data_set, model = dataset(config), fresh_model(config)
    x, y = data_set.inputs(slice(1)), data_set.y[:1]
    first = Problem(model, cross_entropy, torch.as_tensor(x), torch.as_tensor(y))
    samples = max(len(rows) for rows, _ in parts(config))
    vectors, batch = client_bytes(first, min(samples, config.batch_size or samples))
    d, size = model.size, model.dtype.itemsize
    numbers = data_set.x.size + data_set.test_x.size
    bytes_each = size if first.tensors.inputs.is_floating_point() else x.itemsize
    needed = {"data": numbers * bytes_each, "parameters": 2 * d * size}  # with their gradients
    clients = max(1, round(config.fraction * config.clients))
    stack = 0
    if config.stack != "off":
        stack = min(clients * (vectors + batch), MEMORY["cuda"])
    one = {"state": vectors, "batch": batch}
    needed |= one if stack <= vectors + batch else {"stack": stack}
    total, free = sum(needed.values()), torch.cuda.mem_get_info(device)[0]
    if total > free:
        sizes = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in needed.items() if size)
        raise ValueError(
            f"clients need some {total / 1e6:,.1f} MB on {device}, where {free / 1e6:,.1f} are free"
            f" (MB: {sizes}): take a smaller model, batch-size or stack, or fewer workers a GPU"
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
    data_set = dataset(config)
    untouched = config.local_test == config.validation == 0.0
    if config.partition == "natural" and untouched and data_set.test_owner is not None:
        own = data_set.tests_of(train[0])
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


def stack(context: Context) -> Setting:
    """Return how many clients are trained at once, by the run-config."""
    return setting_of(parsed(tuple(sorted(context.run_config.items()))).stack)


app = client_app(client_fn, hosts=hosts, stack=stack)
