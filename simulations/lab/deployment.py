"""``make deployment``: a real federation on this machine, checked against the in-process engine.

    python -m simulations.lab.deployment [--supernodes 3] [--rounds 3] [--algorithm fedadmm]

Starts a SuperLink and SuperNodes on the loopback interface, with TLS and with authentication of the
SuperNodes by keys, all made for this run. No other machine can reach them: who reaches the port of
a SuperLink can run code on its machine (DEPLOYMENT.md, "Who reaches the port"). Then it runs the
Flower App of this repository on them through ``flwr run``; runs the same settings in-process; and
compares the two models. All started processes are stopped at the end, also on failure and on
Ctrl-C. DEPLOYMENT.md shows the same by hand.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_strategies import STRATEGIES
from fl_strategies.core.schedules import check
from simulations.config import RunConfig
from simulations.experiment import prepare, run_in_process
from simulations.lab.command_line import Command
from simulations.lab.superlink import LOOPBACK, ROOT, SuperLink, free_port, print_progress, running


class Federation(SuperLink):
    """A SuperLink in deployment mode with TLS, and SuperNodes that it knows by their keys.

    ``superlink.running`` makes it; certificates and keys lie in its temporary directory and are
    removed with it.
    """

    def open(self) -> None:
        """Make the certificates, start the SuperLink, and return when it is ready."""
        write_certificates(self.home)
        self._port = free_port()
        self.configure(self._port, f'root-certificates = "{self.home}/ca.pem"')
        self.wait_for(self.superlink(), self._port)

    def superlink(self) -> subprocess.Popen[str]:
        """Start the SuperLink. It remembers runs and nodes if each start has the same database."""
        command = ["flower-superlink", "--host", LOOPBACK, "--port", str(self._port)]
        command += ["--enable-supernode-auth", "--database", f"{self.home}/superlink.db"]
        command += ["--disable-runtime-dependency-installation"]
        return self.start(command + self._certificates())

    @property
    def address(self) -> str:
        """The SuperLink's address for SuperNodes."""
        return f"{LOOPBACK}:{self._port}"

    def register(self, name: str) -> int:
        """Make a key for SuperNode ``name``, register it, and return the node's id."""
        public = write_node_key(self.home / name)
        command = ["flwr", "supernode", "register", str(public), "--format", "json"]
        output = self.start(command, stdout=subprocess.PIPE).communicate()[0]
        try:
            return int(json.loads(output)["node-id"])
        except (ValueError, KeyError):
            raise RuntimeError(f"SuperNode {name} could not be registered:\n{output}") from None

    def supernode(
        self, name: str, partition: int, partitions: int, hosts: str = ""
    ) -> subprocess.Popen[str]:
        """Start the registered SuperNode ``name`` as client ``partition`` of ``partitions``.

        ``hosts`` names the clients that it hosts instead (``"0-49 77"``).
        """
        command = ["flower-supernode", "--superlink", self.address]
        command += ["--root-certificates", f"{self.home}/ca.pem"]
        command += ["--auth-supernode-private-key", str(self.home / name)]
        who = f'hosts="{hosts}"' if hosts else f"partition-id={partition}"
        command += ["--node-config", f"{who} num-partitions={partitions}"]
        # the port at which the SuperNode's own processes, which run the ClientApp, find it
        command += ["--host", LOOPBACK, "--port", str(free_port()), *self._certificates()]
        return self.start(command)

    def _certificates(self) -> list[str]:
        files = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}
        return [
            word
            for name, file in files.items()
            for word in (f"--ssl-{name}", f"{self.home}/{file}")
        ]


def write_certificates(folder: Path) -> None:
    """Write ``ca.pem``, and ``server.pem`` and ``server.key`` for the loopback address."""
    import trustme  # of `make .venv`: the other commands do without it

    authority = trustme.CA()
    server = authority.issue_cert("localhost", LOOPBACK)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    server.cert_chain_pems[0].write_to_path(folder / "server.pem")
    _write_private(folder / "server.key", server.private_key_pem.bytes())


def write_node_key(path: Path) -> Path:
    """Write a SuperNode's private key to ``path``; return the path of its public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    pem, ssh = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    _write_private(path, key.private_bytes(pem, ssh, serialization.NoEncryption()))
    public = path.with_name(path.name + ".pub")
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(encoding, form))
    return public


def _write_private(path: Path, secret: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(secret)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the federation and the comparison from the command line."""
    name = f"deployment-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    default = Path.home() / "fl-strategies-results" / name
    parser = Command("deployment", __doc__)
    parser.add_argument("--output", type=Path, default=default, help=f"default: {default}")
    parser.add_argument("--supernodes", type=int, default=3, help="SuperNodes, one client each (3)")
    parser.add_argument("--rounds", type=int, default=3, help="communication rounds (3)")
    known = ", ".join(sorted(STRATEGIES))
    parser.add_argument("--algorithm", default="fedadmm", help=f"fedadmm, or another of {known}")
    parser.add_argument("--quiet", action="store_true", help="print no line for each round")
    args = parser.read(arguments)
    folder: Path = args.output.expanduser().absolute()
    with parser.explained():
        check("supernodes", args.supernodes, low=1)
        models = compared(args.algorithm, args.supernodes, args.rounds, folder, quiet=args.quiet)
    for name, sha256 in models.items():
        print(f"{name:12} model {sha256}")
    if len(set(models.values())) > 1:
        raise SystemExit("the two models differ")
    print("equal to the bit; nothing is left running")
    print(f"results: {folder}")


def compared(
    algorithm: str, supernodes: int, rounds: int, folder: Path, *, quiet: bool = False
) -> dict[str, str]:
    """Return the SHA-256 of the federation's model and of the in-process engine's."""
    common = {"algorithm": algorithm, "clients": supernodes, "rounds": rounds}
    # all take part in round 1, however slowly they start
    config = RunConfig.parse(common | {"partition": "shards", "fraction": 1.0, "node-wait": 900.0})
    deployed, alone = (folder / name for name in ("deployment", "in-process"))
    there = replace(
        config, output=str(deployed), state_dir=str(deployed / "state") * config.stateful
    )
    prepare(there)
    with running(Federation) as link:
        link.open()
        for i in range(supernodes):
            link.register(f"node-{i}")
            link.supernode(f"node-{i}", i, supernodes)
        print(
            f"SuperLink and {supernodes} SuperNodes run; each message starts a process, "
            "so that a round takes some seconds",
            flush=True,
        )
        show = partial(print_progress, quiet=quiet)
        link.run(ROOT, there.to_run_config(), on_line=show)
    run_in_process(replace(config, output=str(alone)), quiet=quiet)
    return {path.name: _model(path) for path in (deployed, alone)}


def _model(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["model_sha256"])


if __name__ == "__main__":
    main()
