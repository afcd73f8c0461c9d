"""Which nodes run the clients, and where the clients' states are.

- If there are as many nodes as clients, each node is one client.
- If a simulation has fewer nodes, these share the population: any of them runs any client. States
  are in ``state-dir``, else in a directory on this machine that is removed with the run.
- In a deployment a node hosts the clients that its node-config lists (``hosts="0-49 77"``).
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from clients.node.in_process import InProcessGrid
from fl_strategies.core.files import write_atomically
from fl_strategies.server.nodes import Nodes
from simulations.config import RunConfig

SHARED = ".shared"
"""A file that the server puts into the state directory, so that a Ray worker can recognise it."""
HOW_TO_KEEP = "state-dir=DIR (--state-dir DIR) keeps them, for clients.personalized_models"
"""What to do about personalized models that would go with their run."""
NODES_SECONDS = 30.0
"""How long a run waits for its nodes."""


def hosted(config: RunConfig, context: Context) -> int | list[int] | None:
    """Return the clients that the node hosts: ids from its node-config, the population, or None."""
    if listed := str(context.node_config.get("hosts", "")):
        return ids_of(listed)
    nodes = int(context.node_config.get("num-partitions", config.clients))
    return config.clients if nodes < config.clients else None


def ids_of(text: str) -> list[int]:
    """Return the ids in ``text``; raise ``ValueError`` for a text that is no list of ids.

    Examples
    --------
    >>> ids_of("0-3 7")
    [0, 1, 2, 3, 7]
    """
    ids: list[int] = []
    for word in text.split():
        first, _, last = word.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f'hosts must list ids and ranges ("0-49 77"), got {text!r}')
        ids += range(int(first), int(last or first) + 1)
    return ids


def on_a_ray_worker() -> bool:
    """Return whether this process is a Ray worker; Ray's workers may be on several machines."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


# ---- states -------------------------------------------------------------------------------------


def state_folder(config: RunConfig) -> Path | None:
    """Return the folder of clients' states that the user names, if any."""
    return Path(config.state_dir) / config.algorithm if config.state_dir else None


def temporary_folder(run_id: int) -> Path:
    """Return the folder for states on this machine if the user names none.

    Its name derives from Flower's id of the run, a random number.
    """
    return Path(tempfile.gettempdir()) / f"fl-strategies-{os.getuid()}-{run_id:x}"


def worker_states(config: RunConfig, context: Context) -> Path | None:
    """Return the folder of states for a client's process; None if states are in its context.

    Raises ``ValueError`` if it is not the server's folder.
    """
    states = state_folder(config)
    if not config.stateful or not on_a_ray_worker():
        return states
    if states is None and hosted(config, context) == config.clients:
        states = temporary_folder(context.run_id) / config.algorithm
    if states and not (states / SHARED).exists():
        which = f"state-dir {config.state_dir}" if config.state_dir else f"{states}, for states,"
        raise ValueError(
            f"{which} is another folder on {socket.gethostname()} than on the server's machine: any"
            " worker may be asked for any client, so all machines must share a state-dir (a network"
            " file system)"
        )
    return states


@contextmanager
def shared_states(config: RunConfig, grid: Grid, *, shared: bool) -> Iterator[None]:
    """Mark the folder of states for workers, and remove it at the end if it is temporary."""
    states, own = state_folder(config), None
    if config.stateful and shared and states is None and not isinstance(grid, InProcessGrid):
        own = temporary_folder(grid.run.run_id)
        own.mkdir(mode=0o700)
        states = own / config.algorithm
        states.mkdir(mode=0o700)
    if states is not None:
        write_atomically(states / SHARED, b"", private=True)
    try:
        yield
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
        elif states is not None:
            (states / SHARED).unlink(missing_ok=True)


# ---- nodes --------------------------------------------------------------------------------------


def is_simulated(grid: Grid) -> bool:
    """Return whether all nodes belong to this run only."""
    return isinstance(grid, InProcessGrid) or hasattr(grid, "pull_interval")


def shared_population(config: RunConfig, grid: Grid, *, resumes: bool = False) -> int:
    """Return the number of clients that the nodes share; 0 if each client has its own node.

    Raises ``ValueError`` unless all clients are connected, or will be soon. In a deployment a run
    that ``resumes`` has had them all: then some may be away, as in any round.
    """
    if resumes and not is_simulated(grid):
        return 0
    directory, what, most = Nodes(config.timeout), "clients", 0
    deadline = time.monotonic() + NODES_SECONDS
    while True:
        nodes = list(grid.get_node_ids())
        count = len(nodes)
        if is_simulated(grid):
            what = "nodes"
            if 0 < count < config.clients and _offers_any(nodes[0], grid, config.timeout):
                return config.clients
        elif count < config.clients:
            count = len(directory.connected(grid))
            if count > most:  # each query starts a process, which may take long
                most, deadline = count, time.monotonic() + NODES_SECONDS
        if count >= config.clients or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if count != config.clients:
        raise ValueError(
            f"clients={config.clients}, but {count} {what} are connected: flwr run . --stream"
            ' --federation-config "num-supernodes=2 client-resources-num-cpus=1", with as many'
            " nodes as workers; in a deployment a SuperNode is one client, or hosts those of its"
            ' --node-config hosts="0-49"'
        )
    return 0


def _offers_any(node: int, grid: Grid, timeout: float) -> bool:
    """Return whether a simulated node is a host; a host may have to prepare its data first.

    Raises ``ValueError`` if its data cannot be prepared.
    """
    query = Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
    for reply in grid.send_and_receive([query], timeout=timeout):
        if reply.has_error():
            raise ValueError(f"clients' data cannot be made: {reply.error.reason}")
        return "any-of" in reply.content.config_records.get("client", {})
    return False
