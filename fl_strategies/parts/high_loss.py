"""High losses: clients are asked on whose data the model is worst, as far as the server knows.

    F_i  = last loss that client i reported                                      (1)
    A    = d of the connected clients, without replacement, by data share        (2)
    S    = the m clients of A with the largest F_i                               (3)

A    candidates; of ``HighLoss`` all connected clients, of ``PowerOfChoice`` those drawn by (2),
     client i first with probability n_i / n
d    ``candidates`` m, rounded down; with ``candidates=1`` losses do not matter
m    ``fraction_train`` of the connected clients, at least ``min_train_nodes``
n_i  samples of client i, as its host introduced it, n their sum; a client that was introduced
     without counts as the mean of the others

A client that was never asked comes first. One that did not answer its last request by a usable
reply, or answers without a loss, counts as the median of the others: neither a dead client nor a
silent one is asked in every round. Equal losses are told apart by the run's seed.

(1) is the ``train-loss`` of the client's last usable reply (else its ``train_loss`` or ``loss``),
which is stale: it is of the round in which the client was asked last. That is the paper's variant
rpow-d, without a message more. It takes the mean loss over all local steps, clients of this package
report that of the last epoch. For pow-d itself all d candidates would first evaluate the model.

(3) is biased: the run is drawn to the clients with high losses, the more the larger d is. It
changes no weight. The paper's mean is the plain one (``weights="uniform"``), since (2) has the
sizes already. What a client that lies about its loss can gain, SECURITY.md says.

Reference: Cho, Wang, Joshi, "Towards Understanding Biased Client Selection in Federated Learning",
AISTATS 2022 (arXiv:2010.01243), Section 4: pow-d and rpow-d.
"""

from __future__ import annotations

from collections.abc import Sequence
from logging import WARNING

import numpy as np
import numpy.typing as npt

from fl_strategies.core.hyperparameters import number
from fl_strategies.core.log import log
from fl_strategies.core.randomness import share
from fl_strategies.core.records import Round
from fl_strategies.parts.selection import Selection, sizes


def rated(
    loss: npt.NDArray[np.float64], missed: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return F_i of (3) for each client's last loss and missed requests [n].

    ``missed`` is NaN for a client that was never asked, ``loss`` for one that told none.
    """
    told = (missed == 0.0) & ~np.isnan(loss)
    middle = int(told.sum()) // 2
    usual = np.partition(loss[told], middle)[middle] if told.any() else 0.0
    return np.where(np.isnan(missed), np.inf, np.where(told, loss, usual))


def largest(
    values: npt.NDArray[np.float64], size: int, rng: np.random.Generator
) -> npt.NDArray[np.intp]:
    """Return the places of the ``size`` >= 1 largest values [n]; ``rng`` draws equal ones."""
    if size >= len(values):
        return np.arange(len(values))
    least = np.partition(values, -size)[-size]
    above, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
    return np.concatenate([above, rng.choice(equal, size - len(above), replace=False)])


class HighLoss(Selection):
    """(3) among all connected clients; see the module's docstring."""

    name = "high-loss"
    about = "those with the highest last losses"
    paper = "Cho, Wang, Joshi, AISTATS 2022"
    _said = False

    def select(self, round: Round, size: int) -> list[int]:
        rng = round.stream(self.name)
        clients = self.among(round, size, rng)
        ids = np.array(clients, np.uint64)
        loss, missed = round.metrics.column("loss", ids), round.metrics.column("missed", ids)
        if not self._said and (missed == 0.0).any() and np.isnan(loss[missed == 0.0]).all():
            self._said = True
            log(WARNING, "%s: no client reports train-loss, so all count alike", self.name)
        return [clients[place] for place in largest(rated(loss, missed), size, rng)]

    def among(self, round: Round, size: int, rng: np.random.Generator) -> Sequence[int]:
        """Return A, of which ``size`` clients are asked."""
        return round.connected


class PowerOfChoice(HighLoss):
    """(2) and (3); see the module's docstring."""

    name = "power-of-choice"
    about = "those with the highest last losses, of some that are drawn by numbers of samples"
    candidates: float = number(
        default=2.0,
        about="d / m, the number of candidates for each client asked.",
        low=1.0,
        high=1e9,
    )

    def among(self, round: Round, size: int, rng: np.random.Generator) -> Sequence[int]:
        p = sizes(round)
        d = min(max(share(self.candidates, size), size), int((p > 0.0).sum()))
        places = np.sort(rng.choice(len(p), d, replace=False, p=p / p.sum()))
        return [round.connected[place] for place in places]
