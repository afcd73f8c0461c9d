"""Which of Flower's wrappers, mods and masks are allowed between a strategy and its clients.

A strategy says by ``averages`` what its server rule takes the mean of. Clipping and noise are right
for models, and wrong for changes that must add up; masks reveal only the mean. A combination that
is wrong is refused, with a reason, before any reply counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.core.layout import Layout
from fl_strategies.core.records import BadReply, Reply, Upload
from fl_strategies.core.vectors import Vector
from fl_strategies.messages.wire import checksum

Averages: TypeAlias = Literal["models", "changes", ""]
KEY_CLIPPING_NORM = "clipping_norm"
"""Key by which Flower's wrappers tell clients the bound to clip to."""
UNEQUAL = 1.001
"""Weights whose ratio is above this are not equal."""


@dataclass
class Composition:
    """What is between a strategy and its clients in the current run.

    ``averages`` is the strategy's; ``wire`` describes what travels, ``layout`` the model only, and
    ``theta`` [d] is the global model of the round.
    """

    strategy: str
    averages: Averages
    wire: Layout | None = None
    layout: Layout | None = None
    theta: Vector = 0.0
    opened: bool = False
    """Whether the strategy's own ``start`` or ``open``, not a wrapper, began the run."""
    wrapped: bool = False
    """Whether a wrapper calls the rounds."""
    masked: bool = False
    """Whether secure aggregation masks the uploads."""
    legacy: bool = False
    """Whether a legacy server calls the rounds: its wrappers tell their bound to clients only."""
    bound: float = math.inf
    """The bound to which a wrapper tells the clients to clip their updates."""

    @property
    def exact(self) -> bool:
        """Whether one unusable reply makes all replies of the round unusable."""
        return self.wrapped or self.masked

    def wrap(self, buffers: Collection[str], *, watched: bool) -> None:
        """Note a wrapper; raise ``ValueError`` if it would make results wrong.

        ``watched`` says that the strategy has callbacks or checkpoints.
        """
        name = self.strategy
        if self.averages != "models":
            raise ValueError(
                f"{name} cannot be run by a wrapper: Flower's clip (reply - model) and add noise to"
                " the next model, which is right where replies are models and the next model is"
                f" their mean, as with FedAvg, FedProx, MOON; {name} has another rule. Call its own"
                " `start`, or, from a loop that does not change replies, first its `open`"
            )
        if buffers:
            raise ValueError(
                f"buffers {[*buffers]} would be clipped and get noise as if trained (a variance"
                " might become negative): under a wrapper use a model without, with GroupNorm"
                " instead of BatchNorm"
            )
        if watched:
            raise ValueError(
                f"a wrapper around {name} calls no callbacks and makes no checkpoints: give the"
                " wrapper's `start` an evaluate_fn"
            )
        self.wrapped = True

    def check_hosts(self, hosts: Collection[int]) -> None:
        """Raise ``ValueError`` if there is a wrapper and nodes host several clients."""
        if self.wrapped and hosts:
            raise ValueError(
                f"a wrapper around {self.strategy} needs one client per message, whose update it"
                f" clips; nodes {sorted(hosts)[:3]} host several clients: give each a node of its"
                " own"
            )

    def begin_round(self, config: ConfigRecord, theta: Vector) -> None:
        """Note the round's global model, and the bound that a wrapper tells clients."""
        self.theta = theta
        bound = config.get(KEY_CLIPPING_NORM)
        self.bound = float(bound) if isinstance(bound, int | float) else math.inf

    @property
    def intact(self) -> Collection[str]:
        """The names of the arrays that must arrive as the client sent them."""
        if self.masked or self.wire is None:
            return ()
        return self.wire.buffers if self.averages == "models" else self.wire.shapes.keys()

    def ask(self, client: int) -> dict[str, Any]:
        """Ask the client for a checksum of the arrays that it sends."""
        return {"checksums": True} if self.intact else {}

    def check(self, reply: Reply, upload: Upload) -> Upload:
        """Return ``upload``; raise :class:`BadReply` if something changed it that must not.

        Raises :class:`BadReply` too if a wrapper told clients to clip, and this client did not.
        """
        if sent := reply.words.get("checksums"):  # not asked for, or a foreign client, without it
            assert self.wire is not None
            intact, arrays = self.intact, reply.arrays
            found = dict(zip(self.wire.shapes, sent.split(), strict=False))
            changed = [n for n in arrays if n in intact and checksum(arrays[n]) != found.get(n)]
            if changed:
                raise BadReply(
                    f"arrays {changed[:3]} are not as the client sent them: a mod or"
                    f" wrapper that clips, adds noise or masks is at work, and"
                    f" {self.strategy} needs them as they are. Differential privacy"
                    " goes with strategies that average models (FedAvg, FedProx, MOON) and models"
                    " without buffers; secure aggregation with as_legacy(..., secure=...)",
                )
        self._check_clipped(reply)
        return upload

    def _check_clipped(self, reply: Reply) -> None:
        told = reply.numbers.get("clipping-norm") if self.legacy else None
        bound = min(self.bound, told if isinstance(told, int | float) else math.inf)
        if bound == math.inf:
            return
        assert self.layout is not None
        norm = float(np.linalg.norm(self.layout.pack(reply.arrays) - self.theta))
        rounding = max(np.finfo(self.layout.dtypes[name]).eps for name in self.layout.trainable)
        if norm > bound + 1e-3 * bound + rounding * float(np.linalg.norm(self.theta)):
            raise BadReply(
                f"its update has norm {norm:.6g}, above the clipping norm"
                f" {bound:.6g} which it was sent: its ClientApp needs fixedclipping_mod or"
                " adaptiveclipping_mod among its mods, as the wrapper has it",
            )

    def settle(self, used: Sequence[Upload]) -> None:
        """Nothing to keep."""

    def unequal(self, shares: Collection[float]) -> str:
        """Return a warning of unequal weights under a wrapper, whose noise assumes equal ones."""
        if not self.wrapped or max(shares) <= UNEQUAL * min(shares):
            return ""
        return (
            f"averages with weights from {min(shares):.3g} to {max(shares):.3g}, where a wrapper's"
            ' noise counts on equal ones: weights="uniform" gives these'
        )
