"""Clock: the virtual seconds that a round would last on devices and links of different speeds.

    t_i = 2 latency + down / D_i + k_i s_i + up / U_i                           (1)
    s_i = step exp(spread z_i + jitter z_ti)                                    (2)
    T   = max t_i over the clients that the server waits for                    (3)

t_i       seconds from the request to client i's reply in round t
k_i       local steps that client i reports, at most those that its request allows (as many as
          local training by default takes, where ``local`` says nothing); one that reports none
          takes these, and one without a reply takes none
s_i       seconds per local step: lognormal over clients (z_i) and rounds (z_ti), with median step;
          a client that a mapping ``step`` does not name has the mean of the others
D_i, U_i  links of client i: ``download`` and ``upload`` times exp(link_spread z'_i)
down, up  bytes of the numbers in request and reply, as they travel
device    with ``per_device`` = n > 1, clients j n to j n + n - 1 share device j: those of them that
          are asked work one after another and reply together, and each t_i is the sum of theirs
dropout   probability that client i leaves during its work, at a time that is uniform in [0, t_i];
          its reply is lost, and the server waits for it until then

Nothing is stored: z_i, z'_i, z_ti follow from seed, client and round. Clients compute as fast as
they can. Each round reports ``virtual-seconds``, from the beginning of the run.

Reference: Lai et al., "FedScale: Benchmarking Model and System Performance of Federated Learning at
Scale", ICML 2022, whose traces of devices have such speeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from logging import WARNING
from numbers import Integral

from fl_strategies.core.hyperparameters import number, option
from fl_strategies.core.log import log
from fl_strategies.core.randomness import stream
from fl_strategies.core.reasons import brief
from fl_strategies.parts.device_files import speeds
from fl_strategies.parts.virtual_clock import LONGEST, VirtualClock

MBIT = 125_000.0
"""Bytes of a megabit."""
WIDEST = 10.0
"""The largest spread of a logarithm: a factor of 22,000 where a draw is one deviation off."""
SLOWEST = 1e-6
"""The fewest Mbit per second, about a bit."""


def are_seconds(step: object) -> bool:
    """Return whether ``step`` is a number of seconds, or a mapping to one or more."""
    numbers = [*step.values()] if isinstance(step, Mapping) else [step]
    right = (isinstance(one, int | float) and 0.0 <= one <= LONGEST for one in numbers)
    named = not isinstance(step, Mapping) or all(isinstance(client, Integral) for client in step)
    return bool(numbers) and all(right) and named


class Clock(VirtualClock):
    """(1)-(3); see the module's docstring."""

    name = "clock"
    about = "speeds of devices and links, and lost work"
    paper = "Lai et al., ICML 2022"
    step: float | Mapping[int, float] | str = option(
        default=0.0,
        type_name=f"float >= 0 and <= {LONGEST:g}, mapping of clients to it, or a file",
        accepts=lambda step: isinstance(step, str) or are_seconds(step),
        about="Seconds per local step: a number; one for each client; or a file whose lines have"
        " the seconds, and after commas perhaps download and upload, of a device: client i is"
        " device i modulo their number.",
    )
    spread: float = number(default=0.0, about="Of ln s_i over clients.", low=0.0, high=WIDEST)
    jitter: float = number(default=0.0, about="Of ln s_i over rounds.", low=0.0, high=WIDEST)
    download: float | None = number(default=None, about="Mbit per second; no limit.", low=SLOWEST)
    upload: float | None = number(default=None, about="Mbit per second; no limit.", low=SLOWEST)
    link_spread: float = number(
        default=0.0, about="Of the logarithms of D_i and U_i.", low=0.0, high=WIDEST
    )
    latency: float = number(
        default=0.0, about="Seconds of one message on its way.", low=0.0, high=LONGEST
    )
    dropout: float = number(default=0.0, about="Probability of lost work.", low=0.0, below=1.0)
    per_device: int = number(
        default=1, about="Clients of a device, by id: a host's.", integer=True, low=1
    )

    _said = False

    def __post_init__(self) -> None:
        self.loses = self.dropout > 0.0
        self.links = bool(self.download or self.upload or isinstance(self.step, str))
        self.shared = self.per_device > 1

    def open(self) -> None:
        if isinstance(self.step, str):
            self._device(0)

    def begins(self, seed: int, server_round: int, client: int) -> float:
        return self.latency

    def seconds(
        self, seed: int, server_round: int, client: int, work: float, down: int = 0, up: int = 0
    ) -> float:
        fast, wide = stream(seed, "speed", client).normal(size=2)
        now = stream(seed, "jitter", server_round, client).normal() if self.jitter else 0.0
        step, download, upload = self._device(client)
        each = step * math.exp(self.spread * fast + self.jitter * now)
        sent = (down / download + up / upload) / (MBIT * math.exp(self.link_spread * wide))
        return 2 * self.latency + work * each + sent

    def drops_out(self, seed: int, server_round: int, client: int) -> float | None:
        coin, share = stream(seed, "dropout", server_round, client).random(2)
        return float(share) if coin < self.dropout else None

    def together(self, ends: Mapping[int, float]) -> dict[int, float]:
        sums: dict[int, float] = {}
        for client, seconds in sorted(ends.items()):
            device = client // self.per_device
            sums[device] = sums.get(device, 0.0) + seconds
        return {client: sums[client // self.per_device] for client in ends}

    def _device(self, client: int) -> tuple[float, float, float]:
        """Return its seconds per step, and Mbit per second down and up, before any spread."""
        step, links = self.step, [self.download or math.inf, self.upload or math.inf]
        if isinstance(step, str):
            devices = speeds("clock step", step, LONGEST, SLOWEST)
            step, *given = devices[client % len(devices)]
            links[: len(given)] = given
        elif isinstance(step, Mapping):
            if client not in step and not self._said:
                self._said = True
                told = "clock: step has no seconds of client %s, which has the mean of the others"
                log(WARNING, told, brief(client))
            step = step.get(client, sum(step.values()) / len(step))
        return step, links[0], links[1]
