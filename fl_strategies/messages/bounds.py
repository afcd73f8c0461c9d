"""The bound on how far one upload moves the model (``clipping_norm``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_strategies.core.clipping import clip, norm
from fl_strategies.core.layout import Arrays, Layout
from fl_strategies.core.records import BadReply, Upload
from fl_strategies.core.vectors import Vector


@dataclass
class NormBound:
    """Scales uploads down to ``bound``, and rejects uploads that must not be scaled.

    ``reference(upload)`` is the point, [d] or 0, from which a change is measured.
    ``accumulates_changes`` says that the client adds its change to its state, too: it could not add
    a scaled one.
    """

    bound: float
    reference: Callable[[Upload], Vector | float]
    accumulates_changes: bool
    model: Arrays

    def check(self, upload: Upload) -> Upload:
        """Return ``upload``, scaled if it is beyond the bound, else unchanged to the bit.

        Raises :class:`BadReply` for an upload beyond the bound that must not be scaled.
        """
        change = upload.vector - self.reference(upload)
        parts = dict(upload.extra_vectors)
        if self.accumulates_changes:
            parts["update"] = change
        for name, vector in parts.items():
            if not (size := norm(np.asarray(vector))) <= self.bound:
                raise BadReply(
                    f"the norm of its {name} is {size:g}, at most {self.bound:g}"
                    " (clipping_norm) is taken"
                )
        if not self.accumulates_changes and norm(change) > self.bound:
            upload = upload._replace(vector=self.reference(upload) + clip(change, self.bound))
        return upload._replace(buffers=self._clipped(upload.buffers))

    def _clipped(self, buffers: Arrays) -> Arrays:
        before = {
            name: self.model[name]
            for name, array in buffers.items()
            if np.issubdtype(array.dtype, np.floating)
        }
        if not before:
            return buffers
        layout = Layout.of(before)
        start = layout.pack(before)
        change = layout.pack(buffers) - start
        if norm(change) <= self.bound:
            return buffers
        return {**buffers, **layout.unpack(start + clip(change, self.bound), {})}
