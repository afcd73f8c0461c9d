"""What is known of each client that was ever asked: its last loss, accuracy and seconds.

They are numbers of a client's last usable training reply, and the client's own word, but for
seconds of a virtual clock. They stand in arrays, 40 bytes a client, so that a million clients take
40 MB, and a round changes the rows of its own clients alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

REPORTED = {
    "loss": ("train-loss", "train_loss", "loss"),
    "accuracy": ("train-accuracy", "train_accuracy", "accuracy"),
    "seconds": ("client-seconds",),
}
"""The metrics of which each number is the first that a client reports; it reports ``seconds``."""


class Numbers(NamedTuple):
    """A client's numbers, NaN for what it did not report.

    ``seconds`` are virtual ones, from request to reply, if there is a clock; else those that the
    client reports. ``missed`` counts the requests since its last usable reply, or since the first.
    """

    loss: float = math.nan
    accuracy: float = math.nan
    seconds: float = math.nan
    missed: int = 0


Name: TypeAlias = Literal["loss", "accuracy", "seconds", "missed"]
Clients: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class LastMetrics:
    """The :class:`Numbers` of clients, ascending by client, one row each.

    ``client in metrics`` says whether the client was ever asked, ``metrics[client]`` are its
    numbers, and ``metrics.column("loss", clients)`` are those of many.
    """

    clients: Clients = field(default_factory=lambda: np.empty(0, np.uint64))
    numbers: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 4)))

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients.tolist())

    def __contains__(self, client: int) -> bool:
        return bool(self._places(np.array([client], np.uint64))[1][0])

    def __getitem__(self, client: int) -> Numbers:
        (place,), (known,) = self._places(np.array([client], np.uint64))
        if not known:
            raise KeyError(client)
        loss, accuracy, seconds, missed = self.numbers[place].tolist()
        return Numbers(loss, accuracy, seconds, int(missed))

    def column(self, name: Name, clients: Sequence[int] | Clients) -> npt.NDArray[np.float64]:
        """Return one number of each of ``clients`` [n]; NaN for a client that was never asked."""
        places, known = self._places(np.asarray(clients, np.uint64))
        column = np.full(len(places), math.nan)
        column[known] = self.numbers[places[known], Numbers._fields.index(name)]
        return column

    def after(
        self,
        asked: Collection[int],
        rows: Mapping[int, Mapping[str, float]],
        seconds: Mapping[int, float],
    ) -> LastMetrics:
        """Return what is known after a phase in which these clients were ``asked``.

        ``rows`` are the metrics of those whose replies are usable, ``seconds`` those of a clock.
        """
        ids = np.array(sorted(asked), np.uint64)
        places, known = self._places(ids)
        clients = np.insert(self.clients, places[~known], ids[~known])
        numbers = np.insert(self.numbers, places[~known], Numbers(), axis=0)
        for place, client in zip(np.searchsorted(clients, ids), ids.tolist(), strict=True):
            if client not in rows:
                numbers[place, -1] += 1
                continue
            told = {"client-seconds": seconds[client]} if client in seconds else {}
            row = {**rows[client], **told}
            first = (next((n for n in names if n in row), "") for names in REPORTED.values())
            numbers[place] = [*(row.get(name, math.nan) for name in first), 0]
        return LastMetrics(clients, numbers)

    def _places(self, ids: Clients) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return the row of each client, or where it would stand, and whether it has one."""
        places = np.searchsorted(self.clients, ids)
        known = np.zeros(len(ids), bool)
        inside = places < len(self.clients)
        known[inside] = self.clients[places[inside]] == ids[inside]
        return places, known
