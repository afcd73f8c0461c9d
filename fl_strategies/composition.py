"""Flower's wrappers, mods and masks between a strategy and its clients: which may be there.

A strategy says by ``averages`` what its server rule takes the mean of. Clipping and noise are right
around models, and wrong around changes that must add up; masks leave nothing but the mean. What
does not go together is refused with a reason, before a reply of it counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fl_strategies.layout import Arrays, Layout
from fl_strategies.replies import only, word_of
from fl_strategies.subproblem import Vector
from fl_strategies.wire import BadReply, checksum

if TYPE_CHECKING:
    from fl_strategies.strategy import FederatedStrategy

Averages: TypeAlias = Literal["models", "changes", ""]
KEY_CLIPPING_NORM = "clipping_norm"
"""Under which Flower's wrappers tell clients the bound to clip to."""
UNEQUAL = 1.001
"""Ratio of weights above which they are not equal."""


@dataclass
class Composition:
    """What is between a strategy and its clients in the present run."""

    opened: bool = False
    """Whether the strategy's own ``start`` or ``open`` began the run, and no wrapper."""
    wrapped: bool = False
    """Whether a wrapper calls the rounds."""
    masked: bool = False
    """Whether secure aggregation masks the uploads."""
    bound: float = math.inf
    """To which a wrapper tells the clients to clip their updates."""
    misfits: dict[int, str] = field(default_factory=dict)
    """By client, what was wrong with its reply in the present round."""

    @property
    def exact(self) -> bool:
        """Whether a reply that cannot be used spoils those that can."""
        return self.wrapped or self.masked

    def wrap(self, strategy: FederatedStrategy) -> None:
        """Take note of a wrapper; raise ``ValueError`` where it would do harm."""
        name, buffers = type(strategy).__name__, list(strategy.buffers)
        if strategy.averages != "models":
            raise ValueError(
                f"{name} cannot be run by a wrapper: Flower's clip (reply - model) and add noise to"
                " the next model, which is right where replies are models and the next model is"
                f" their mean, as with FedAvg, FedProx, MOON; {name} has another rule. Call its own"
                " `start`, or, from a loop that leaves replies as they are, first its `open`"
            )
        if buffers:
            raise ValueError(
                f"buffers {buffers} would be clipped and get noise as if trained (a variance might"
                " become negative): under a wrapper use a model without, GroupNorm for BatchNorm"
            )
        if strategy.callbacks or strategy.checkpoints:
            raise ValueError(
                f"a wrapper around {name} calls no callbacks and makes no checkpoints: give the"
                " wrapper's `start` an evaluate_fn"
            )
        self.wrapped = True

    def begin_round(self, config: ConfigRecord) -> None:
        """Take note of the bound that a wrapper tells the clients in this round."""
        bound = config.get(KEY_CLIPPING_NORM)
        self.bound = float(bound) if isinstance(bound, int | float) else math.inf

    def intact(self, strategy: FederatedStrategy, wire: Layout) -> Collection[str]:
        """Return the names of the arrays that must come as the client sent them."""
        if self.masked:
            return ()
        return wire.buffers if strategy.averages == "models" else wire.shapes.keys()

    def check(
        self,
        strategy: FederatedStrategy,
        client: int,
        content: RecordDict,
        arrays: Arrays,
        wire: Layout,
    ) -> None:
        """Raise :class:`BadReply` if something changed what must come as the client sent it."""
        if not (sent := word_of(content, "checksums")):
            return  # not asked for, or a client of another make
        intact = self.intact(strategy, wire)
        found = dict(zip(wire.shapes, sent.split(), strict=False))
        changed = [n for n in arrays if n in intact and checksum(arrays[n]) != found.get(n)]
        if changed:
            self._misfit(
                client,
                f"arrays {changed[:3]} of client {client}'s reply are not as it sent them: a mod or"
                f" wrapper that clips, adds noise or masks is at work, and"
                f" {type(strategy).__name__} needs them as they are. Differential privacy"
                " goes with strategies that average models (FedAvg, FedProx, MOON) and models"
                " without buffers; secure aggregation with as_legacy(..., secure=...)",
            )

    def check_clipped(
        self, client: int, content: RecordDict, arrays: Arrays, layout: Layout, theta: Vector
    ) -> None:
        """Raise :class:`BadReply` if a wrapper told clients to clip and this one did not."""
        told = only(content.metric_records).get("clipping-norm")
        bound = min(self.bound, told if isinstance(told, int | float) else math.inf)
        if bound == math.inf:
            return
        norm = float(np.linalg.norm(layout.pack(arrays) - theta))
        rounding = max(np.finfo(layout.dtypes[name]).eps for name in layout.trainable)
        if norm > bound + 1e-3 * bound + rounding * float(np.linalg.norm(theta)):
            self._misfit(
                client,
                f"client {client}'s update has norm {norm:.6g}, above the clipping norm"
                f" {bound:.6g} which it was sent: its ClientApp needs fixedclipping_mod or"
                " adaptiveclipping_mod among its mods, as the wrapper has it",
            )

    def settle(self, asked: Collection[int], begun: bool) -> None:
        """End a round's checks; raise ``ValueError`` if nobody fits and none did before."""
        misfits, self.misfits = self.misfits, {}
        if asked and not begun and misfits.keys() >= set(asked):
            raise ValueError(next(iter(misfits.values())))

    def unequal(self, shares: Collection[float]) -> str:
        """Return what to say of weights under a wrapper, whose noise counts on equal ones."""
        if not self.wrapped or max(shares) <= UNEQUAL * min(shares):
            return ""
        return (
            f"averages with weights from {min(shares):.3g} to {max(shares):.3g}, where a wrapper's"
            ' noise counts on equal ones: weights="uniform" gives these'
        )

    def _misfit(self, client: int, reason: str) -> None:
        self.misfits[client] = reason
        raise BadReply(reason)
