"""Many SuperNode-like clients in one process, for ``python -m simulations.lab.benchmark load``.

    python -m simulations.lab.load CLIENTS SUPERLINK FOLDER READY

Each client is a thread with its own registered key, connection, heartbeats and polls, which are
those of Flower's SuperNode. A SuperNode starts a process for each message; here the threads call
this repository's ClientApp directly, one client after the other, because 200 SuperNodes and their
processes need more memory than one machine has. If a connection fails, a thread tries again; a
SuperNode would end and be started again. FOLDER holds ``ca.pem``; the file READY appears when all
are connected. This module uses Flower's internals, which may change: it works with flwr 1.40 and
1.41.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supernode.fleet_http_connection import http_request_response
from typer.testing import CliRunner

from simulations.client_app import app
from simulations.config import Scalar
from simulations.lab.command_line import Command
from simulations.lab.deployment import write_node_key

T = TypeVar("T")

POLL_SECONDS = 3.0
"""How often a SuperNode asks for messages."""


def register(key: Path) -> None:
    """Make a SuperNode's key and register it, as ``flwr supernode register`` does."""
    from flwr.cli.app import app as flwr_command  # whose import alone warns, of typer's changes

    result = CliRunner().invoke(flwr_command, ["supernode", "register", str(write_node_key(key))])
    if result.exit_code:
        raise RuntimeError(f"{key.name} could not be registered:\n{result.output}")


def patient(call: Callable[..., T]) -> Callable[..., T]:
    """Return ``call``, repeated until there is a connection."""

    def called(*arguments: object) -> T:
        while True:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return call(*arguments)
            time.sleep(POLL_SECONDS)

    return called


def serve(
    client: int,
    clients: int,
    address: str,
    folder: Path,
    connected: threading.Semaphore,
    turn: threading.Lock,
) -> None:
    """Act as the SuperNode of ``client`` until the process ends; a failure ends the process."""
    key = load_ssh_private_key((folder / f"node-{client}").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    pair = key, key.public_key()
    contexts: dict[int, Context] = {}
    with http_request_response(address, False, str(folder / "ca.pem"), pair) as connection:
        node, receive, send, get_run, _, pull_object, push_object, confirm = connection
        pull_object, push_object = patient(pull_object), patient(push_object)
        connected.release()
        while True:
            if (message := patient(receive)()) is None:
                time.sleep(POLL_SECONDS)
                continue
            run, tree = message[0].metadata.run_id, message[1]
            names = list({part.object_id for part in iterate_object_tree(tree)})
            objects = pull_objects(names, partial(pull_object, run))
            patient(confirm)(run, tree.object_id)
            request = cast(Message, inflate_object_from_contents(tree.object_id, objects))
            request.metadata.__dict__["_message_id"] = tree.object_id
            if run not in contexts:
                config: dict[str, Scalar] = {"partition-id": client, "num-partitions": clients}
                settings = dict(patient(get_run)(run).override_config)
                contexts[run] = Context(run, node, config, RecordDict(), settings)
            with turn:
                started = time.monotonic()
                reply = app(request, contexts[run])
                seconds = time.monotonic() - started
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = patient(send)(reply, get_object_tree(reply), seconds)
            parts = get_all_nested_objects(reply)
            for name in wanted:
                push_object(run, session, name, parts[name].deflate())
    os._exit(1)  # the connection's exit logs what went wrong


def main() -> None:
    """Register all clients, connect them, and serve until the process is killed."""
    parser = Command("load", __doc__)
    parser.add_argument("clients", type=int, help="how many")
    parser.add_argument("superlink", help="its address, HOST:PORT")
    parser.add_argument("folder", type=Path, help="where ca.pem is, and keys are written")
    parser.add_argument("ready", type=Path, help="the file that appears")
    args = parser.read()
    if args.clients < 1:
        parser.error(f"clients must be >= 1, got {args.clients}")
    connected, turn = threading.Semaphore(0), threading.Lock()
    threads = []
    for client in range(args.clients):
        with parser.explained():
            register(args.folder / f"node-{client}")
        arguments = (client, args.clients, args.superlink, args.folder, connected, turn)
        threads.append(threading.Thread(target=serve, args=arguments))
        threads[-1].start()
        connected.acquire()
    args.ready.touch()
    threads[0].join()  # thread pools work only until the main thread ends


if __name__ == "__main__":
    main()
