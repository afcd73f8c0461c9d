"""Samples in the forms in which people have them, as inputs and targets.

These forms are tensors, NumPy arrays and lists; tuples and mappings of them; Datasets, those of
Hugging Face too; and DataLoaders.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from clients.learning.mistakes import of_numbers
from clients.learning.passes import TESTED, Inputs
from fl_strategies.core.log import log_once
from fl_strategies.core.schedules import require

T = TypeVar("T")

TARGETS = ("label", "labels", "target", "targets", "y")
"""Keys of a mapping that may be its targets."""

AUTOENCODER = "an autoencoder has its inputs as targets, too"


def as_tensor(name: str, value: Any) -> Tensor:
    """Return numbers [n, ...] as a tensor: a tensor as it is, else an array or nested lists.

    Raises ``ValueError``, which calls the value ``name``, for anything else.
    """
    tensor = value if isinstance(value, Tensor) else _from_array(name, value)
    require(tensor.dim() > 0, name, "numbers of several samples", value)
    return tensor


def _from_array(name: str, value: Any) -> Tensor:
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        shapes = {tuple(one.shape) for one in value}
        require(len(shapes) == 1, name, "tensors of one shape", f"shapes {sorted(shapes)[:3]}")
        return torch.stack([*value])
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        raise ValueError(f"{name} must have one shape in all samples") from None
    require(array.dtype.kind in "biuf", name, "a Tensor, or an array of numbers", value)
    wide = array.dtype.kind == "u" and array.itemsize > 1  # which PyTorch hardly has
    dtype = np.dtype(np.int64) if wide else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, dtype, ["C", "W"]))


def as_targets(targets: Any, loss: object, like: Tensor) -> Tensor:
    """Return targets [n, ...] on the device of ``like``, in the type that ``loss`` needs.

    Classes become int64. Floating-point targets, and whole numbers that a loss of PyTorch's
    compares with outputs, get the type of ``like``.
    """
    tensor = as_tensor("targets", targets)
    numbers = tensor.is_floating_point() or of_numbers(loss)
    return tensor.to(like.device, like.dtype if numbers else torch.int64)


def parted(batch: Any, target: str | None, module: nn.Module) -> tuple[Any, Any]:
    """Return inputs and targets of ``batch``: a mapping, or a tuple or list that ends with targets.

    In a mapping, ``target`` is the key of the targets; None stands for the only one of
    :data:`TARGETS` that there is. The rest are the inputs, by name where the module takes all of
    them by name; else the only tensor among them. Raises ``ValueError`` where this leaves a choice.
    """
    if not isinstance(batch, Mapping):
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            alone = " of one" if isinstance(batch, tuple | list) else ""
            raise ValueError(
                "a batch must be a mapping, or a tuple or list of inputs and targets, got"
                f" {type(batch).__name__}{alone}: {AUTOENCODER}"
            )
        *inputs, targets = batch
        check_targets(targets, inputs[0])
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets
    name = _key_of_targets(batch, target)
    rest = {key: value for key, value in batch.items() if key != name}
    check_targets(batch[name], next(iter(rest.values()), None))
    return _inputs(rest, module, name), batch[name]


def check_targets(targets: Any, inputs: Any) -> None:
    """Raise ``ValueError`` if ``targets`` are several tensors, each of all samples."""
    if hasattr(inputs, "__len__") and several(targets, len(inputs)):
        raise ValueError(
            f"targets must be one tensor [samples, ...], got {len(targets)}: make one of them, such"
            " as torch.stack([y1, y2], 1), which the loss takes apart"
        )


def check_one_input(inputs: Any, targets: Any) -> None:
    """Raise ``ValueError`` if ``inputs`` are several tensors, each of all samples."""
    if isinstance(inputs, Mapping) or several(inputs, len(targets)):
        raise ValueError("a Problem holds one tensor of inputs: a StreamedProblem passes several")


def several(value: Any, samples: int) -> bool:
    """Return whether ``value`` holds other tensors than one for each of the samples."""
    tensors = isinstance(value, tuple | list) and bool(value)
    return tensors and isinstance(value[0], Tensor | np.ndarray) and len(value) != samples


def _key_of_targets(batch: Mapping[str, Any], target: str | None) -> str:
    if target is not None:
        if target not in batch:
            raise ValueError(f"a batch has no targets {target!r}, but {sorted(batch)}")
        return target
    names = [name for name in TARGETS if name in batch]
    if len(names) != 1:
        which = f"several that may be targets, {names}" if names else "none of these names"
        raise ValueError(
            f"a batch has {sorted(batch)}, {which}: name the targets by target=..."
            + ("" if names else f" (without it: one of {', '.join(TARGETS)})")
        )
    return names[0]


def _inputs(rest: dict[str, Any], module: nn.Module, target: str) -> Inputs:
    """Return the inputs for the module: ``rest``, to be passed by name, or one value of it."""
    parameters = _parameters(module)
    if rest and parameters.keys() >= rest.keys():
        return rest
    tensors = [key for key, value in rest.items() if isinstance(value, Tensor | np.ndarray)]
    if len(tensors) == 1:
        return rest[tensors[0]]
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return rest
    if not tensors:
        kinds = {key: type(value).__name__ for key, value in rest.items()}
        raise ValueError(
            f"a batch has no tensor in addition to its targets {target!r}, but {kinds}: its samples"
            " must be tensors (a Hugging Face Dataset makes them by with_format('torch'))"
        )
    raise ValueError(
        f"a batch has the inputs {sorted(tensors)}, and {type(module).__name__}.forward takes"
        f" {[*parameters]}: leave out what it does not take (of a Hugging Face Dataset:"
        f" select_columns([..., {target!r}])), or name its arguments as the inputs are named"
    )


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a compiled module
        return {}


def formatted(data: Any) -> Any:
    """Return ``data``; a Hugging Face Dataset that has no format yet, with that of tensors."""
    made = getattr(data, "format", None)
    plain = isinstance(made, Mapping) and "type" in made and made["type"] is None
    return data.with_format("torch") if plain and hasattr(data, "with_format") else data


def items(data: Any, indices: Sequence[int]) -> list[Any]:
    """Return these items of a map-style Dataset, at once where it offers that, as a DataLoader."""
    at_once = getattr(data, "__getitems__", None)
    return list(at_once(indices)) if callable(at_once) else [data[i] for i in indices]


def fetching(action: Callable[[], T]) -> T:
    """Return ``action()``, which fetches samples; what torch cannot put together is named."""
    try:
        return action()
    except TypeError as error:
        _, collated, kind = str(error).partition("default_collate: batch must contain")
        if not collated:
            raise
        raise ValueError(
            f"samples must be tensors, arrays or numbers,{kind.partition(';')[2]}: a transform"
            " makes them (of images: torchvision.transforms.ToTensor())"
        ) from error


def all_samples(data: Any, target: str | None, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all samples, each as one tensor.

    ``data`` are a tuple (inputs, targets) or a mapping of arrays, a Dataset, or a DataLoader, of
    which one pass is taken. What fetching draws from global generators is the same each time, and
    leaves no trace.
    """
    first = data[0] if isinstance(data, list) and data else data
    if isinstance(first, Tensor | np.ndarray):
        raise ValueError(
            f"targets must be given with inputs that are a {type(data).__name__}: {AUTOENCODER}"
        )
    if isinstance(data, Mapping):
        batches: list[Any] = [_with_tensors(data)]
    elif isinstance(data, tuple):
        batches = [data]
    elif isinstance(data, DataLoader) or hasattr(data, "__getitem__"):
        loader: DataLoader[Any] = (
            data if isinstance(data, DataLoader) else DataLoader(formatted(data), TESTED)
        )
        batches = fetching(lambda: of_loader(0, loader).during(lambda: [*loader]))
        if drawn := drawn_by(loader):
            log_once(
                f"a Problem reads its samples once, and what {' and '.join(drawn)} draws is the"
                " same in all rounds: a StreamedProblem reads them anew in each epoch"
            )
    else:
        raise ValueError(
            "data must be a Dataset with a length, a DataLoader, or inputs with targets, got a"
            f" {type(data).__name__}"
        )
    parts = [parted(batch, target, module) for batch in batches]
    inputs, targets = [], []
    for x, y in parts:
        (value,) = x.values() if isinstance(x, Mapping) and len(x) == 1 else (x,)
        check_one_input({} if isinstance(value, tuple) else value, y)
        inputs.append(value)
        targets.append(y)
    return _joined("inputs", inputs), _joined("targets", targets)


def drawn_by(loader: DataLoader[Any]) -> list[str]:
    """Return what would give other samples in another pass over ``loader``."""
    sampler: Any = loader.sampler
    data: Any = loader.dataset
    drawn = ["drop_last"] * loader.drop_last
    if type(sampler) not in (SequentialSampler, RandomSampler):
        if hasattr(sampler, "__len__"):
            drawn.append(f"the {type(sampler).__name__}")
    elif type(loader.batch_sampler) is BatchSampler and len(sampler):  # its indices are 0, 1, ...
        pair = fetching(lambda: Randomness(0).during(lambda: (data[0], data[0])))
        one, two = ([x for x in tree_leaves(item) if isinstance(x, Tensor)] for item in pair)
        if not all(map(torch.equal, one, two)):
            drawn.append("the Dataset")
    return drawn


def _with_tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers as tensors, the others as they are."""
    values = dict(arrays)
    for name, value in arrays.items():
        if hasattr(value, "column_names"):
            raise ValueError(
                f"data must be one Dataset, got those of {[*arrays]}: choose data[{name!r}]"
            )
        with contextlib.suppress(ValueError):
            values[name] = as_tensor(name, value)
    return values


def _joined(name: str, parts: Sequence[Any]) -> Tensor:
    """Return what all batches hold as one tensor."""
    if not parts:
        return torch.zeros(0)
    tensors = [as_tensor(name, part) for part in parts]
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(
            f"{name} must have one shape in all samples, got {sorted(shapes)[:3]}: a"
            " StreamedProblem takes batches of any shape"
        )
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class Randomness:
    """States of the generators that fetching draws from, seeded by ``seed``.

    These are the generators of torch on the CPU, NumPy, Python, and ``generators`` of torch.
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        self.generators = [torch.default_generator, *generators]
        outside = self._states()
        for generator in self.generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - it is what others' transforms draw from
        self._inside = self._states()
        self._restore(outside)

    def during(self, action: Callable[[], T]) -> T:
        """Return ``action()``, which draws from these states; each call continues from the last."""
        outside = self._states()
        self._restore(self._inside)
        try:
            return action()
        finally:
            self._inside = self._states()
            self._restore(outside)

    def _states(self) -> tuple[Any, ...]:
        of_torch = [generator.get_state() for generator in self.generators]
        return of_torch, random.getstate(), np.random.get_state()  # noqa: NPY002

    def _restore(self, states: tuple[Any, ...]) -> None:
        for generator, state in zip(self.generators, states[0], strict=True):
            generator.set_state(state)
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def of_loader(seed: int, loader: DataLoader[Any]) -> Randomness:
    """Return the generators that ``loader`` draws from, its own too, seeded by ``seed``."""
    own = (loader.generator, getattr(getattr(loader, "sampler", None), "generator", None))
    return Randomness(seed, [generator for generator in own if generator is not None])
