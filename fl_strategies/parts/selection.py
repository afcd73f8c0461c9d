"""Selection: which of the connected clients are asked to train in a round.

    uniform        |S| of the connected clients, each alike; without a part it is this          (1)
    by size        |S| draws with replacement, client i with probability n_i / n                (2)
    probabilities  |S| of the connected clients without replacement, by given weights           (3)

|S|   ``fraction_train`` of the connected clients, at least ``min_train_nodes``
n_i   samples of client i, as its host introduced it (``clients.Hosted``); n their sum. A client
      that was introduced without counts as the mean of the others

By (2) a client that is drawn k times trains once, and its model has weight k in place of the rule's
weight. So the mean model is unbiased: its expectation is sum_i n_i w_i / n, the mean of a round of
all clients. Uniform draws with weights n_i / sum_S n have another one. The number of clients that
train is |S| or less.

(3) changes who is asked and no weight: what is asked more often counts more. It works with
any algorithm that does not choose itself. So does a function of the round
(``fl_strategies.Round``), which returns clients of ``round.connected``:
``selection=lambda round: round.connected[:3]``. ``round.metrics`` holds the last loss, accuracy and
seconds of each client that was ever asked; parts that read it are in ``high_loss.py``.

Reference: Li, Huang, Yang, Wang, Zhang, "On the Convergence of FedAvg on Non-IID Data", ICLR 2020,
scheme I.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING
from numbers import Integral
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fl_strategies.core.hyperparameters import option
from fl_strategies.core.log import log
from fl_strategies.core.randomness import draw
from fl_strategies.core.reasons import named
from fl_strategies.core.records import Round
from fl_strategies.parts.part import MEAN_OF_MODELS, Need, Part

LEAVES_CHOICE = Need(
    lambda rule: not rule.chooses_clients,
    "{rule} itself says which clients are asked",
    "FedAvg or another algorithm that asks a share of the clients",
)
LEAST = 1e-9
"""The least weight but 0, and one over the largest."""


def sizes(round: Round) -> npt.NDArray[np.float64]:
    """Return n_i of each connected client [n]; all are 1 if none has a number above 0."""
    told = [round.samples.get(client, np.nan) for client in round.connected]
    numbers = np.array(told, np.float64)
    if not np.nansum(numbers):
        return np.ones(len(numbers))
    return np.where(np.isnan(numbers), np.nanmean(numbers), numbers)


class Selection(Part):
    """Base of the parts that select clients."""

    stage = "selection"
    paper = "Li et al., ICLR 2020"
    needs: ClassVar[tuple[Need, ...]] = (LEAVES_CHOICE,)
    counts: ClassVar[bool] = False
    """Whether a client that is drawn k times has weight k in the mean."""

    def select(self, round: Round, size: int) -> list[int]:
        """Return the ``size`` clients that are drawn, of ``round.connected``."""
        raise NotImplementedError


class Uniform(Selection):
    """(1); see the module's docstring."""

    name = "uniform"
    about = "each client alike, as without a part"

    def select(self, round: Round, size: int) -> list[int]:
        return draw(round.stream("sample"), round.connected, size)


class BySize(Selection):
    """(2); see the module's docstring."""

    name = "by-size"
    about = "by numbers of samples, with replacement"
    needs = (LEAVES_CHOICE, MEAN_OF_MODELS)
    counts = True
    _said = False

    def select(self, round: Round, size: int) -> list[int]:
        unknown = [client for client in round.connected if client not in round.samples]
        how = "client_app(client_fn, hosts=Hosted(clients, samples)) tells"
        if not any(round.samples.get(client) for client in round.connected):
            if not round.acked:  # later all who tell may be away
                raise ValueError(
                    "selection=BySize() needs clients' numbers of samples, and"
                    f" {len(round.connected)} of {len(round.connected)} clients were introduced"
                    f" without one above 0: {how}"
                )
        elif unknown and not self._said:
            self._said = True
            told = "by-size: %s introduced without a number of samples, and counts as the mean: %s"
            log(WARNING, told, named(unknown), how)
        p = sizes(round)
        rng = round.stream("by-size")
        return [round.connected[place] for place in rng.choice(len(p), size, p=p / p.sum())]


class Probabilities(Selection):
    """(3); see the module's docstring."""

    name = "probabilities"
    about = "by given weights"
    p: Mapping[int, float] = option(
        default={},
        type_name=f"mapping of clients (int) to 0, or numbers >= {LEAST:g} and <= {1.0 / LEAST:g}",
        accepts=lambda p: (
            isinstance(p, Mapping)
            and all(isinstance(client, Integral) for client in p)
            and all(isinstance(w, int | float) for w in p.values())
            and all(w == 0.0 or LEAST <= w <= 1.0 / LEAST for w in p.values())
        ),
        about="Weight of each client, 1 for others; in a run-config `p=0:0.5;3:2`. 0 is never.",
    )

    def select(self, round: Round, size: int) -> list[int]:
        weights = np.array([self.p.get(client, 1.0) for client in round.connected], np.float64)
        if not (possible := int((weights > 0.0).sum())):
            return []
        rng = round.stream("probabilities")
        places = rng.choice(
            len(weights), min(size, possible), replace=False, p=weights / weights.sum()
        )
        return [round.connected[place] for place in places]
