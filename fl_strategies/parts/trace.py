"""Trace: a file says when each device is there.

    client i is there at second v  <=>  from <= v mod period < to               (1)

for one of the intervals of its device. A line of the file is a device's: its intervals in virtual
seconds, "0-3600 7200-10800". An empty line is a device that is never there. Client i has the line i
modulo their number. Without ``period`` (0) a device is away after its last interval.

v  virtual seconds at the beginning of the round; without a clock a round lasts one second

Reference: traces of phones are used so by Yang et al., "Characterizing Impacts of Heterogeneity in
Federated Learning upon Large-Scale Smartphone Data", WWW 2021.
"""

from __future__ import annotations

from fl_strategies.core.hyperparameters import number, option
from fl_strategies.parts.availability import Availability
from fl_strategies.parts.device_files import intervals


class Trace(Availability):
    """(1); see the module's docstring."""

    name = "trace"
    about = "as a file says, of real or invented devices"
    paper = "Yang et al., WWW 2021"
    file: str = option(
        default="",
        type_name="str",
        accepts=lambda file: isinstance(file, str),
        about="Path of the trace, read by the ServerApp; without one, all are always there.",
    )
    period: float = number(default=0.0, about="Seconds after which it repeats; 0: never.", low=0.0)

    def is_there(self, seed: int, server_round: int, now: float, client: int) -> bool:
        if not self.file:
            return True
        devices = intervals("trace file", self.file)
        at = now % self.period if self.period else now
        return any(begin <= at < end for begin, end in devices[client % len(devices)])
