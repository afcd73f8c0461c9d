"""Run a Flower App on Flower's own simulation runtime, and leave nothing behind.

`flwr run .` starts a SuperLink on a fixed port, keeps it running afterwards, and returns 0 even if
the run failed. `flwr_run` submits the app in the same way, but to its own SuperLink: a free port,
its own Flower home in a temporary directory, the current Python environment. It passes on the run's
log line by line, raises if the run did not complete, and stops every process it started.

    SuperLink (keeps runs and logs)  <-  `flwr run` (builds the app, submits it, streams its log)
        ^
    SuperExec  ->  flwr-simulation (the ServerApp)  ->  Ray  ->  workers (the ClientApp)

All of them are in one process group, whose leader is a shell that waits for this process to end.
One SIGKILL stops the group: a finished run has nothing left to do, an interrupted run would only
wait for Ray, and a ServerApp writes its results round by round. If this process itself is killed,
the shell stops the group and removes the directory. POSIX only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil

Scalar = str | int | float | bool

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = "127.0.0.1"
STARTUP_SECONDS = 180.0  # more than a busy machine needs
STOP_SECONDS = 10.0
TAIL_LINES = 40
GUARD = """trap '' HUP INT TERM; read -r _
for process in /proc/[0-9]*; do
  [ "$process" = "/proc/$$" ] || ! grep -qa "FLWR_HOME=$0" "$process/environ" 2>/dev/null ||
    kill -s KILL "${process#/proc/}"
done
rm -rf "$0"; kill -s KILL 0"""
"""When this process has ended, ends all processes with its Flower home, then the group."""

_ROUND = re.compile(r" round \d+/\d+")
_TROUBLE = (" clients (", " left out: ", "no reply from ", " is skipped: ", ", known by node id")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def flwr_run(
    run_config: Mapping[str, Scalar],
    *,
    num_supernodes: int,
    gpus: float = 0.0,
    workers: int | None = None,
    on_line: Callable[[str], None] = print,
    env: Mapping[str, str] | None = None,
    app: str | os.PathLike[str] = ROOT,
) -> None:
    """Run the Flower App in `app` once, with `run_config` over the defaults in its pyproject.toml.

    Parameters
    ----------
    run_config
        Values for keys of `[tool.flwr.app.config]`; an unknown key fails the run.
    num_supernodes
        Simulated nodes; each gets its number as `partition-id` in `context.node_config`.
    gpus
        The share of one worker, which has a core; a GPU may be shared (0.5).
    workers
        How many workers Ray starts; by default as many as the cores (and GPUs) allow.
    on_line
        Gets each line of the run's log, without colour codes; an exception of it ends the run.
    env
        Environment variables for the apps, besides the current ones. (The apps also start in the
        current working directory, on a copy of their files.)

    Raises
    ------
    ValueError
        If `RAY_ADDRESS` names a Ray to join: the run starts its own, on this machine.
    RuntimeError
        If Flower did not start, or the run did not complete; the message ends with the last lines
        of the log.
    """
    check_one_machine(env)
    nodes: dict[str, Scalar] = {
        "num-supernodes": num_supernodes,
        "client-resources-num-cpus": 1,
        "client-resources-num-gpus": float(gpus),
    }
    if workers is not None:
        nodes["init-args-num-cpus"] = workers
    with running(SuperLink, env) as link:
        link.open()
        link.run(app, run_config, federation=nodes, on_line=on_line)


def gpu_share(workers: int, gpus: int) -> float:
    """Return the share of a GPU that each of `workers` requests from Ray, so that all are used.

    Ray fills one GPU before it begins the next: shares of 1/workers would all lie on the first.
    With the returned share no GPU has more than ceil(workers / gpus) workers; if there are more
    GPUs than workers, each worker has a whole one. The share is rounded down to Ray's unit, so that
    the workers fit.
    """
    per_gpu = max(1, -(-workers // max(gpus, 1)))
    return 10_000 // per_gpu / 10_000


def check_one_machine(env: Mapping[str, str] | None = None) -> None:
    """Raise `ValueError` if `RAY_ADDRESS` is set: `flwr_run` starts a Ray on this machine only."""
    if address := {**os.environ, **(env or {})}.get("RAY_ADDRESS"):
        raise ValueError(
            f"RAY_ADDRESS is {address!r}, but this command starts a Ray of its own on this machine,"
            " whose cores and GPUs it counts: unset RAY_ADDRESS; to run on that Ray, `flwr run .`"
            " (simulations/README.md, Several machines)"
        )


def print_progress(line: str, *, quiet: bool = False) -> None:
    """Print a line of a run's log if it reports an error or, unless `quiet`, the progress."""
    progress = not quiet and (_ROUND.search(line) or line.startswith("results:"))
    if progress or any(text in line for text in _TROUBLE):
        print(line, flush=True)


class SuperLink:
    """A local SuperLink in simulation mode with its SuperExec; made by `running`.

    Attributes
    ----------
    home
        Its Flower home: configuration, installed app bundles, log; removed at the end.
    env
        The environment in which `flwr` commands address this SuperLink.
    group
        The process group of all started processes.
    processes
        All started processes, in their order.
    """

    def __init__(self, home: Path, env: Mapping[str, str]) -> None:
        self.home = home
        self.env = dict(env)
        self._log = home / "superlink.log"
        guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, str(home)],
            stdin=subprocess.PIPE,  # closes when this process ends, however it ends
            text=True,
            process_group=0,
        )
        self.group = guard.pid
        self.processes = [guard]

    def open(self) -> None:
        """Start SuperLink and SuperExec, and return when they are ready."""
        port = free_port()
        self.configure(port, "insecure = true")
        command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "process"]
        link = self.start([*command, "--host", LOOPBACK, "--port", str(port)])
        self.wait_for(link, port)
        api = f"{LOOPBACK}:{port}"
        self.start(["flower-superexec", "--insecure", "--runtime-api-address", api])

    def configure(self, port: int, security: str) -> None:
        """Tell `flwr` commands where the SuperLink is and how to trust it."""
        address = f"{LOOPBACK}:{port}"
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "own"\nown = {{ address = "{address}", {security} }}\n'
        )

    def wait_for(self, link: subprocess.Popen[str], port: int) -> None:
        """Return when the SuperLink accepts connections; raise `RuntimeError` if it never does."""
        deadline = time.monotonic() + STARTUP_SECONDS
        while not _accepts(port):
            if link.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("no SuperLink came up:\n" + "\n".join(self.complaints()))
            time.sleep(0.05)

    def run(
        self,
        app: str | os.PathLike[str],
        run_config: Mapping[str, Scalar],
        *,
        federation: Mapping[str, Scalar] | None = None,
        on_line: Callable[[str], None] = print,
    ) -> None:
        """Run the Flower App in `app` as `flwr_run` does; raise `RuntimeError` if it fails."""
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        command = _command(self.home, app, run_config, federation or {})
        client = self.start(command, stdout=subprocess.PIPE)
        assert client.stdout is not None
        for line in client.stdout:
            text = _COLOUR.sub("", line.rstrip("\r\n"))
            tail.append(text)
            on_line(text)
        client.wait()
        status = self.status()
        if status == "finished:completed":
            return
        # a run that was refused has no log: the SuperLink knows why
        lines = [] if status.startswith("finished") else self.complaints()
        raise RuntimeError("\n".join([f"the Flower run ended as {status!r}:", *lines, *tail]))

    def start(self, command: list[str], stdout: int | None = None) -> subprocess.Popen[str]:
        """Start `command` in the process group; its output goes to the log or to `stdout`."""
        with self._log.open("a") as log:
            process = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                process_group=self.group,
            )
        self.processes.append(process)
        return process

    def status(self) -> str:
        """The last run's status in Flower's words (`finished:completed`), or `not started`."""
        command = ["flwr", "ls", "--limit", "1", "--format", "json"]
        listing = self.start(command, stdout=subprocess.PIPE).communicate()[0]
        with suppress(ValueError, KeyError, IndexError):
            return str(json.loads(listing)["runs"][0]["status"])
        return "not started"

    def complaints(self) -> list[str]:
        """The last lines of SuperLink and SuperExec, without purely informative ones."""
        text = _COLOUR.sub("", self._log.read_text(encoding="utf-8", errors="replace"))
        return [line for line in text.splitlines() if "INFO" not in line][-TAIL_LINES:]

    def close(self) -> None:
        """Kill all started processes, and return when all have ended."""
        with suppress(ProcessLookupError, PermissionError):  # macOS refuses to signal zombies
            os.killpg(self.group, signal.SIGKILL)
        # a SuperLink's and a SuperNode's own processes have groups of their own
        for process in with_home(self.home):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and (_group_lives(self.group) or with_home(self.home)):
            time.sleep(0.02)


Link = TypeVar("Link", bound=SuperLink)


@contextmanager
def running(kind: type[Link], env: Mapping[str, str] | None = None) -> Iterator[Link]:
    """Yield a `SuperLink` to open; it is closed at the end, and on SIGTERM or Ctrl-C."""
    directory = tempfile.TemporaryDirectory(
        prefix="flwr-", dir=_short_directory(), ignore_cleanup_errors=True
    )
    with directory as home, _sigterm_raises():
        link = kind(Path(home), _environment(home, env or {}))
        try:
            yield link
        finally:
            link.close()


def _command(
    home: Path,
    app: str | os.PathLike[str],
    run_config: Mapping[str, Scalar],
    federation: Mapping[str, Scalar],
) -> list[str]:
    """`flwr run`; the run configuration goes through a file, where strings may hold anything."""
    overrides = home / "run-config.toml"
    overrides.write_text(
        "".join(f"{key} = {_toml(value)}\n" for key, value in run_config.items()), encoding="utf-8"
    )
    command = ["flwr", "run", str(Path(app).resolve()), "--stream"]
    command += ["--run-config", str(overrides)]
    if federation:
        text = " ".join(f"{key}={_toml(value)}" for key, value in federation.items())
        command += ["--federation-config", text]
    return command


def _environment(home: str, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of all processes started here; `extra` overrides."""
    env = dict(os.environ)
    env.pop("RAY_ADDRESS", None)  # would join another Ray
    scripts = sysconfig.get_path("scripts")  # `.venv/bin/python -m ...` does not put it on PATH
    env |= {
        "PATH": os.pathsep.join([scripts, env.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        "FLWR_HOME": home,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        "RAY_TMPDIR": home,
        "RAY_raylet_start_wait_time_s": "300",  # 30 are too few on a machine that is busy
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_COLOR_PREFIX": "0",
    }
    return env | dict(extra)


def _short_directory() -> str | None:
    """Return a short path: Ray's sockets lie in it, and their paths have at most 100 characters."""
    return "/tmp" if os.access("/tmp", os.W_OK) else None


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit`, so that `finally` clauses run; needs the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
        return True
    return False


def _toml(value: Scalar) -> str:
    """`value` as TOML: as JSON, except floats (`inf` and `nan` are TOML, `Infinity` is not)."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def with_home(home: Path) -> list[psutil.Process]:
    """The processes with this Flower home in their environment."""
    return [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("FLWR_HOME") == str(home)  # None: somebody else's
    ]


def _group_lives(group: int) -> bool:
    """Whether a process of the group still runs; a zombie nobody waits for does not count."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError, PermissionError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False
