"""A loss over tensors as a function of the model's vector."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clients.learning.model import FlatModel
from clients.learning.objective import Loss, Measure, Objective, Penalty
from clients.learning.passes import TESTED, Batch
from clients.learning.samples import (
    all_samples,
    as_targets,
    as_tensor,
    check_one_input,
    check_targets,
)
from fl_strategies.core.layout import few
from fl_strategies.core.log import log_once
from fl_strategies.core.schedules import require
from fl_strategies.core.spelling import hinted
from fl_strategies.solvers.local import LocalTraining

BLOCK = 1 << 20
"""Bytes of inputs that a CPU gathers at a time: about what its cache holds."""
AHEAD = 1 << 16
"""Sample numbers that are drawn at a time, if they belong to several draws."""

INDICES = (torch.int64, torch.int32)
"""The types of ``rows``."""


@hinted
class Problem(Objective):
    """f(w) = mean loss of a model with parameters w on ``inputs`` [n, ...], ``targets`` [n, ...].

    Parameters
    ----------
    model, loss, penalty, autocast, metrics
        As of :class:`.Objective`.
    inputs, targets : Tensor, or array or list of numbers
        Moved to the model's device; floating-point numbers get the model's type. Integer inputs
        (characters, tokens) are stored in their own type and reach the module as int64, which
        embeddings need. Images [n, channels, height, width] are stored channels-last, which makes
        convolutions faster. Integer targets are classes, and stored as int64. Those of several
        heads are one tensor, [n, heads], which the loss takes apart.

        Without ``targets``, ``inputs`` are all data: a Dataset or DataLoader, of which one pass is
        taken, or a tuple or mapping of arrays. The last item of a tuple is the targets. The
        local settings' ``batch-size`` holds; a line of the log says if a DataLoader has another.
    rows : Tensor or array of integers, optional
        Indices of the client's samples; by default all. So many clients may share the data, if
        these are tensors of the types above: each mini-batch is gathered from them.
    target : str, optional
        Key of the targets, where data are mappings; by default the only one of ``label``,
        ``labels``, ``target``, ``targets`` and ``y`` that there is.

    Raises
    ------
    ValueError
        For an argument of another kind, if there is no sample, if the numbers of inputs and targets
        differ, if ``rows`` are not indices of samples, or if data do not say which of them are
        inputs and targets.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        inputs: Any,
        targets: Any = None,
        *,
        rows: Any = None,
        target: str | None = None,
        penalty: Penalty | None = None,
        autocast: torch.dtype | None = None,
        metrics: Measure | None = None,
    ) -> None:
        check_made_of(model, loss)
        self.loader_batch_size = inputs.batch_size if isinstance(inputs, DataLoader) else None
        if targets is None:
            inputs, targets = all_samples(inputs, target, model.module)
        elif hasattr(targets, "__len__"):
            check_one_input(inputs, targets)
            check_targets(targets, inputs)
        inputs, targets = as_tensor("inputs", inputs), as_targets(targets, loss, model.vector)
        if rows is not None:
            rows = _indices(rows, len(inputs))
        if len(inputs) == 0 or len(inputs) != len(targets) or (rows is not None and not len(rows)):
            chosen = "" if rows is None else f" with {len(rows)} rows"
            if len(inputs) == len(targets):
                chosen += ": of a client without test samples, test=None"
            raise ValueError(
                f"a problem needs as many inputs as targets and at least one,"
                f" got {len(inputs)} and {len(targets)}{chosen}"
            )
        super().__init__(model, loss, penalty=penalty, autocast=autocast, metrics=metrics)
        device = model.vector.device
        dtype = model.vector.dtype if inputs.is_floating_point() else inputs.dtype
        self.inputs = laid_out(inputs.to(device=device, dtype=dtype))
        self.targets: Tensor = targets
        self.rows: Tensor | None = None if rows is None else rows.to(device)

    def __len__(self) -> int:
        return len(self.inputs if self.rows is None else self.rows)

    @property
    def classifies(self) -> bool:
        return not self.targets.is_floating_point()

    @property
    def whole(self) -> Batch:
        if self.rows is None:
            return self.inputs, self.targets
        return self._gathered(self.rows)

    def batches(self, rng: np.random.Generator, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        if batch_size == 0 or batch_size >= len(self):
            yield self.whole
            return
        order = torch.from_numpy(rng.permutation(len(self))).to(self.inputs.device)
        if self.rows is not None:
            order = self.rows[order]
        for block in torch.split(order, self._at_once(batch_size)):
            inputs, targets = self._gathered(block)
            for start in range(0, len(block), batch_size):
                yield inputs[start : start + batch_size], targets[start : start + batch_size]

    def draws(self, rng: np.random.Generator, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        for block in self.drawn(rng, samples):
            drawn = torch.from_numpy(block).to(self.inputs.device)
            yield from map(self._gathered, drawn if self.rows is None else self.rows[drawn])

    def drawn(self, rng: np.random.Generator, samples: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield, without end, sample numbers [draws, samples] for several :meth:`draws` at once."""
        shape = max(1, min(64, AHEAD // samples)), samples
        for _ in itertools.count():
            yield rng.integers(len(self), size=shape)

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.rows is not None:
            yield from map(self._gathered, torch.split(self.rows, TESTED))
            return
        yield from zip(
            torch.split(self.inputs, TESTED), torch.split(self.targets, TESTED), strict=True
        )

    def most_steps(self, training: LocalTraining) -> float:
        own, used = self.loader_batch_size, training.batch_size
        if own is not None and own != used and not training.full_batch:
            log_once(
                f"mini-batches have local['batch-size'] = {used} samples: the DataLoader's"
                f" batch_size = {own} is not used"
            )
        return super().most_steps(training)

    def _at_once(self, batch_size: int) -> int:
        """Return how many samples to gather at a time: whole batches; on a GPU all batches."""
        if self.inputs.device.type != "cpu":
            return len(self)
        each = self.inputs[0].numel() * self.inputs.element_size() * batch_size
        return batch_size * max(1, BLOCK // max(each, 1))

    def _gathered(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return gathered(self.inputs, rows), self.targets.index_select(0, rows)


def check_made_of(model: object, loss: object) -> None:
    """Raise ``ValueError`` unless an objective can be made of ``model`` and ``loss``."""
    require(isinstance(model, FlatModel), "model", "a FlatModel: FlatModel(module)", model)
    if isinstance(loss, type):
        raise ValueError(f"loss must be a function, got a class: {loss.__name__}() makes one")
    require(callable(loss), "loss", "a function loss(outputs, targets)", loss)
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if own := [name for name, parameter in parameters if parameter.requires_grad]:
        raise ValueError(
            f"loss has parameters that no client would train, {few(own)}: make them part of the"
            " module, or freeze them by loss.requires_grad_(False)"
        )


def _indices(rows: Any, samples: int) -> Tensor:
    """Return ``rows`` as a tensor; raise ``ValueError`` unless they are indices of samples."""
    wanted = "integers, the indices of samples (of a mask: mask.nonzero().flatten())"
    indices = as_tensor("rows", rows)
    require(indices.dim() == 1 and indices.dtype in INDICES, "rows", wanted, rows)
    for extreme in indices.aminmax() if len(indices) else ():
        require(0 <= int(extreme) < samples, "rows", f">= 0 and < {samples}", int(extreme))
    return indices


def gathered(inputs: Tensor, rows: Tensor) -> Tensor:
    """Return these rows of a problem's ``inputs``; images stay channels-last."""
    if inputs.dim() == 4 and inputs.shape[1] > 1:
        return inputs.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return inputs.index_select(0, rows)


def laid_out(inputs: Tensor) -> Tensor:
    """Return ``inputs`` in the layout that a problem stores: images channels-last."""
    image = inputs.dim() == 4
    return inputs.contiguous(
        memory_format=torch.channels_last if image else torch.contiguous_format
    )
