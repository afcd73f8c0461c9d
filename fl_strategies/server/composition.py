"""Which of Flower's wrappers, mods and workflows are allowed between a strategy and its clients.

A strategy says by ``averages`` what its server rule takes the mean of. Clipping and noise are right
for models, and wrong for changes that must add up; secure aggregation reveals only the mean. A
combination that is wrong is refused, with a reason, before any reply counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any, Literal, TypeAlias

import numpy as np

from fl_strategies.core.layout import Arrays, Layout, few
from fl_strategies.core.log import log
from fl_strategies.core.records import BadReply, Reply, Round
from fl_strategies.messages.wire import checksum

Averages: TypeAlias = Literal["models", "changes", ""]
KEY_CLIPPING_NORM = "clipping_norm"
"""Key by which Flower's wrappers tell clients the bound to clip to."""
UNEQUAL = 1.001
"""Weights whose ratio is above this are not equal."""


@dataclass(frozen=True)
class Caller:
    """Who calls a strategy's rounds, and what it does to their messages.

    ``wrapped``: a wrapper, not the strategy's own ``start``. ``masked``: secure aggregation masks
    the uploads. ``legacy``: a legacy server, whose wrappers tell their bound to clients only.
    """

    wrapped: bool = False
    masked: bool = False
    legacy: bool = False

    @property
    def exact(self) -> bool:
        """Whether one unusable reply makes all replies of the round unusable."""
        return self.wrapped or self.masked

    def fault(self, unusable: int) -> str:
        """Return why so many ``unusable`` replies have the round skipped, "" if they do not."""
        if not (unusable and self.exact):
            return ""
        return (
            f"{unusable} unusable replies cannot be taken out of a securely aggregated sum, nor the"
            " noise of a wrapper be made for fewer"
        )

    def intact(self, averages: Averages, wire: Layout) -> frozenset[str]:
        """Return the names of the arrays that must arrive as the client sent them."""
        if self.masked:
            return frozenset()
        return frozenset(wire.buffers if averages == "models" else wire.shapes)


def check_wrapper(strategy: str, averages: Averages, *, watched: bool) -> None:
    """Raise ``ValueError`` if a wrapper would make the results of ``strategy`` wrong.

    ``watched`` says that the strategy has callbacks or checkpoints.
    """
    if averages != "models":
        raise ValueError(
            f"{strategy} cannot be run by a wrapper: Flower's clip (reply - model) and add noise to"
            " the next model, which is right where replies are models and the next model is"
            f" their mean, as with FedAvg, FedProx, MOON; {strategy} has another rule. Call its own"
            " `start`, or, from a loop that does not change replies, first its `open`"
        )
    if watched:
        raise ValueError(
            f"a wrapper around {strategy} calls no callbacks and makes no checkpoints: give the"
            " wrapper's `start` an evaluate_fn"
        )


def check_trained(caller: Caller, layout: Layout, arrays: Collection[str]) -> None:
    """Raise ``ValueError`` if not all ``arrays`` are trained, and a wrapper or masks are there.

    Both treat a model as one list of trained arrays. ``arrays`` are all that the server holds.
    """
    if not caller.exact:
        return
    if buffers := layout.untrained:
        raise ValueError(
            f"buffers {buffers} do not work with secure aggregation, which treats all arrays as"
            " trained: use a model without, with GroupNorm instead of BatchNorm"
            if caller.masked
            else f"buffers {buffers} would be clipped and get noise as if trained (a variance"
            " might become negative): under a wrapper use a model without, with GroupNorm"
            " instead of BatchNorm"
        )
    if stay := [name for name in arrays if name not in layout.shapes] or [*layout.frozen]:
        by = "secure aggregation, which acts on" if caller.masked else "a wrapper, which clips"
        raise ValueError(
            f"arrays {few(stay)} are not shared by the clients, and do not work with {by} all"
            " arrays of the model: use a model whose arrays are all trained and shared"
        )


def check_hosts(strategy: str, caller: Caller, hosts: Collection[int]) -> None:
    """Raise ``ValueError`` if there is a wrapper and nodes host several clients."""
    if caller.wrapped and hosts:
        raise ValueError(
            f"a wrapper around {strategy} needs one client per message, whose update it"
            f" clips; nodes {sorted(hosts)[:3]} host several clients: give each a node of its"
            " own"
        )


def told_bound(config: Mapping[str, Any]) -> float:
    """Return the norm to which a wrapper tells clients to clip, infinite if it does not."""
    bound = config.get(KEY_CLIPPING_NORM)
    return float(bound) if isinstance(bound, int | float) else math.inf


def check_intact(
    arrays: Arrays, sent: str, strategy: str, intact: Collection[str], wire: Layout
) -> None:
    """Raise :class:`BadReply` if something changed an array that must be ``intact``.

    ``sent`` are the checksums of all arrays as the client sent them.
    """
    sums = dict(zip(wire.shapes, sent.split(), strict=False))
    changed = [n for n in arrays if n in intact and checksum(arrays[n]) != sums.get(n)]
    if changed:
        raise BadReply(
            f"arrays {changed[:3]} are not as the client sent them: a mod or"
            f" wrapper that clips, adds noise or aggregates securely is at work, and"
            f" {strategy} needs them as they are. Differential privacy"
            " goes with strategies that average models (FedAvg, FedProx, MOON) and models"
            " without buffers; secure aggregation with as_legacy(..., secure=...)",
        )


def check_clipped(reply: Reply, bound: float, round: Round) -> None:
    """Raise :class:`BadReply` unless the client clipped its update to the ``bound`` it was told."""
    if bound == math.inf:
        return
    layout = round.layout
    assert layout is not None
    norm = float(np.linalg.norm(layout.pack(reply.arrays) - round.received))
    rounding = max(np.finfo(layout.dtypes[name]).eps for name in layout.trainable)
    if norm > bound + 1e-3 * bound + rounding * float(np.linalg.norm(round.theta)):
        raise BadReply(
            f"its update has norm {norm:.6g}, above the clipping norm"
            f" {bound:.6g} which it was sent: its ClientApp needs fixedclipping_mod or"
            " adaptiveclipping_mod among its mods, as the wrapper has it",
        )


def warn_of_unequal(clients: Mapping[int, Mapping[str, float]], number: int) -> None:
    """Warn of unequal weights under a wrapper, whose noise assumes equal ones."""
    shares = [row["weight-share"] for row in clients.values()]
    if max(shares) > UNEQUAL * min(shares):
        log(
            WARNING,
            "round %d averages with weights from %.3g to %.3g, where a wrapper's noise counts on"
            ' equal ones: weights="uniform" gives these',
            number,
            min(shares),
            max(shares),
        )
