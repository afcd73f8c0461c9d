"""Where a module's arrays meet messages: their roles, their layout, and how they are read and set.

The module itself stays as it is, wherever its tensors lie.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from clients.learning.arrays import copy_into, numpy_type, to_host, to_numpy
from clients.learning.sharing import Patterns, split
from fl_strategies.core.layout import Layout, few
from fl_strategies.core.log import log_once
from fl_strategies.core.oracle import Part
from fl_strategies.core.schedules import require
from fl_strategies.messages.description import Description, digest, type_and_shape


class Border:
    """The arrays of ``module`` by their roles, and as one vector [d].

    Parameters
    ----------
    module : torch.nn.Module
        It is not changed, except that ``train`` sets ``requires_grad``.
    train : str or sequence of str, optional
        Patterns (:data:`.sharing.Patterns`) of the parameters that are trained: "head" for all of
        the module ``head``, "*lora_*" for adapters. Their ``requires_grad`` is set accordingly; by
        default the parameters that require gradients are trained. All other parameters are frozen:
        they do not travel, and clients whose frozen arrays differ from the server's are refused.
    share : str or sequence of str, optional
        Patterns of the arrays, buffers included, that travel; by default all except the frozen
        ones. Trained parameters and buffers that do not travel are each client's own: the local
        solver trains these parameters too, and the client's state holds both, so that clients need
        a store. FedPer shares all but the head (``share="!head"``), FedBN all but batch
        normalisation (``share=all_but(module, nn.BatchNorm2d)``).
    head : str, optional
        Name of the submodule whose input is the model's features, for algorithms that use
        features; by default the ``nn.Linear`` that a forward pass runs last.

    A bfloat16 model travels and is stored as float32, which holds each of its numbers; received
    numbers are rounded to bfloat16. So clients with bfloat16 and float32 models may share a run, if
    no parameter is frozen.

    Attributes
    ----------
    names : list of str
        The arrays that travel, as in ``module.state_dict()``.
    buffers : tuple of str
        The arrays that travel and are not trained: running statistics and counters.
    kept : tuple of str
        The arrays, trained or not, that do not travel and are each client's own.
    shared, own, trained : list of torch.nn.Parameter
        The trained parameters that travel, in the order of the vector; those that do not travel;
        both.
    fixed : list of torch.nn.Parameter
        Of these, the ones that :meth:`only` leaves out of ``trained``.
    size : int
        d, the length of the vector.
    dtype : torch.dtype
        The type of the vector's numbers.
    heads : list of torch.nn.Module
        Of these submodules, the one that a forward pass runs last gets the features.
    layout : fl_strategies.core.layout.Layout
        Names, shapes and types of the arrays that travel; which names are one tied parameter;
        digests of the frozen arrays.
    layout_options : dict
        The strategy's arguments ``buffers``, ``ties`` and ``frozen``, for a run that asks no
        client to describe its model: ``FedADMM(**border.layout_options)``, begun with
        ``ArrayRecord(module.state_dict())``.

    Raises
    ------
    ValueError
        If no parameter is trained and shared, if a trained one is not of a floating-point type, if
        a pattern matches nothing, or if ``head`` is unknown.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        train: Patterns | None = None,
        share: Patterns | None = None,
        head: str | None = None,
    ) -> None:
        require(isinstance(module, nn.Module), "module", "a torch.nn.Module", module)
        if hasattr(module, "_orig_mod"):
            raise ValueError(
                "module must be the module itself, not what torch.compile returned, whose arrays"
                " have other names: module.compile() compiles it in place"
            )
        self.module = module
        modules = dict(module.named_modules())
        if head is not None and head not in modules:
            raise ValueError(f"head must be one of the model's modules {[*modules]}, got {head!r}")
        self.heads = [
            submodule
            for name, submodule in modules.items()
            if name == head or (head is None and isinstance(submodule, nn.Linear))
        ]
        roles = split(module, train, share)
        travelling = roles.travelling
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if not parameter.is_floating_point():
                raise ValueError(f"parameter {name!r} has type {parameter.dtype}, not a float")
        self.shared: list[Any] = [p for name, p in trained.items() if name in travelling]
        self.own: list[Any] = [p for name, p in trained.items() if name in roles.local]
        self.trained, self.fixed = self.shared + self.own, list[Any]()
        self._sizes = [p.numel() for p in self.shared]
        self._shapes = [p.shape for p in self.shared]
        self.size = sum(self._sizes)
        self.dtype = functools.reduce(torch.promote_types, [p.dtype for p in self.shared])
        tensors = module.state_dict(keep_vars=True)
        self._places = _places(module, tensors)
        self.names = [name for name in tensors if name in travelling]
        self.buffers, self.kept = roles.buffers, roles.kept
        self._first = {name: _first_value(module, name, tensors[name]) for name in self.kept}
        self._note_first()
        names_of: dict[int, tuple[str, ...]] = {}
        for name, tensor in tensors.items():
            names_of[id(tensor)] = (*names_of.get(id(tensor), ()), name)
        self.layout = Layout(
            {name: tuple(tensors[name].shape) for name in self.names},
            {name: numpy_type(tensors[name].dtype) for name in self.names},
            frozenset(self.buffers),
            tuple(group for parameter in self.shared if len(group := names_of[id(parameter)]) > 1),
            {name: digest(to_numpy(tensors[name])) for name in roles.frozen},
        )
        of = self.layout
        self._frozen = {name: tensors[name] for name in roles.frozen}
        self._versions = {name: tensor._version for name, tensor in self._frozen.items()}
        self.layout_options: dict[str, Any] = {
            "buffers": self.buffers,
            "ties": of.ties,
            "frozen": of.frozen,
        }

    @classmethod
    def of(cls, module: nn.Module | Border) -> Border:
        """Return ``module`` if it is a Border, else the one of all its arrays."""
        return module if isinstance(module, Border) else cls(module)

    def only(self, part: Part) -> Border:
        """Return this Border with one part of the ``trained`` parameters; the rest is ``fixed``."""
        if not self.own:
            log_once(
                "no array is a client's own: what the algorithm does with a head is left out;"
                ' Border(module, share="!head") names it'
            )
        other = copy.copy(self)
        other.own = self.own if part == "own" else []
        other.trained, other.fixed = self.shared, self.own
        if part == "own":
            other.trained, other.fixed = self.own, self.shared
        return other

    @property
    def moves(self) -> bool:
        """Whether the vector is trained."""
        return self.fixed is not self.shared

    @property
    def fixed_names(self) -> list[str]:
        """The names of ``fixed``."""
        held = {id(parameter) for parameter in self.fixed}
        return [name for name, p in self.module.named_parameters() if id(p) in held]

    @contextmanager
    def fixing(self) -> Iterator[None]:
        """Inside, the ``fixed`` parameters require and have no gradients."""
        for parameter in self.fixed:
            parameter.requires_grad_(False).grad = None
        try:
            yield
        finally:
            for parameter in self.fixed:
                parameter.requires_grad_(True)

    def check_whole(self) -> None:
        """Raise ``ValueError`` if the module no longer has the parameters that it began with."""
        now = {id(p) for part in self.module.modules() for p in part._parameters.values()}
        named = zip(self.layout.trainable, self.shared, strict=True)
        if replaced := [name for name, p in named if id(p) not in now]:
            raise ValueError(
                f"parameters {replaced} of the module were replaced by others, whose training would"
                " be lost: change a module before it is given away"
            )

    def check_frozen(self) -> None:
        """Raise ``ValueError`` if a frozen array changed, as :func:`check_unchanged`."""
        versions = {name: tensor._version for name, tensor in self._frozen.items()}
        touched = [name for name, version in versions.items() if version != self._versions[name]]
        check_unchanged(self.layout, {name: to_numpy(self._frozen[name]) for name in touched})
        self._versions = versions

    # ---- the module's tensors -----------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return all arrays of the module by name, as they lie in it now."""
        if self._places is None:
            return self.module.state_dict()
        return {name: held[key].detach() for name, (held, key) in self._places.items()}

    @property
    def device(self) -> torch.device:
        """The device of the first trained parameter."""
        device: torch.device = self.shared[0].device
        return device

    @property
    def like(self) -> Tensor:
        """An empty tensor of the vector's type, on its device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def vector(self) -> Tensor:
        """A copy of the trained parameters that travel, one after another: a vector [d]."""
        device = self.device
        return torch.cat([p.detach().reshape(-1).to(device) for p in self.shared])

    @property
    def gradient(self) -> Tensor:
        """The gradients of these parameters, a vector [d]; 0 where a parameter has none."""
        return torch.cat([g.reshape(-1).to(self.device) for g in self.gradients(self.shared)])

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the gradients of ``parameters``, dense; 0 for one that has none."""
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return [slope.to_dense() if slope.is_sparse else slope for slope in slopes]

    def clear_gradients(self) -> None:
        """Forget all gradients, before a backward pass."""
        for parameter in self.trained:
            parameter.grad = None

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Put ``vector`` [d] into the parameters."""
        torch._foreach_copy_(self.shared, self.views(vector))

    def views(self, vectors: Tensor) -> list[Tensor]:
        """Return the pieces of ``vectors``, [..., d], in the shapes of ``shared``."""
        lead = vectors.shape[:-1]
        pieces = vectors.split_with_sizes(self._sizes, -1)
        return [p.view((*lead, *shape)) for p, shape in zip(pieces, self._shapes, strict=True)]

    # ---- what there is to say of it -----------------------------------------------------------

    @property
    def at_home(self) -> list[str]:
        """Names of the arrays that do not travel: the frozen ones and the client's own."""
        return [*self.layout.frozen, *self.kept]

    @property
    def description(self) -> Description:
        """All arrays of the module and their roles: what the server asks a few clients for."""
        layout = self.layout
        kinds = {n: type_and_shape(layout.dtypes[n], shape) for n, shape in layout.shapes.items()}
        own = layout.ties, layout.frozen, self.kept, kinds
        return Description(tuple(self.tensors()), self.buffers, *own)

    @property
    def signature(self) -> str:
        """A digest of the layout and of what is each client's own."""
        tensors = self.tensors() if self.kept else {}
        own = [(name, tensors[name].shape) for name in self.kept]
        text = f"{self.layout.signature} {own}"
        return hashlib.sha256(text.encode()).hexdigest()[:16] if own else self.layout.signature

    @functools.cached_property
    def own_first(self) -> dict[str, str]:
        """Digests of the values with which the client's own arrays begin, by name."""
        return {name: digest(array) for name, array in self._first.items()}

    # ---- from and to messages -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the arrays that travel, as tensors on the CPU: for an ``ArrayRecord``.

        They are those of the module's ``state_dict``, with float32 for bfloat16, which NumPy lacks.
        """
        tensors = self.tensors()
        return {name: torch.from_numpy(to_numpy(tensors[name]).copy()) for name in self.names}

    def load(self, arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        """Copy ``arrays``, in the order of ``names``, into the model; return a copy of its vector.

        Raises ``ValueError`` as :meth:`take` does.
        """
        vector = self.take(arrays)
        self.write(vector)
        return vector

    def take(self, arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        """Return the vector [d] in ``arrays``, in the order of ``names``; buffers are loaded.

        Raises ``ValueError`` for a wrong number of arrays, a wrong shape, or tied arrays that
        differ.
        """
        if len(arrays) != len(self.names):
            raise ValueError(
                f"the client's model has {len(self.names)} arrays, {len(arrays)} were received"
            )
        received = dict(zip(self.names, arrays, strict=True))
        vector = self._vector(received)
        for other, first in self.layout.copies.items():
            if not np.array_equal(received[other], received[first], equal_nan=True):
                raise ValueError(
                    f"arrays {first!r} and {other!r} are one tied parameter of the client's model,"
                    " and two that differ were received"
                )
        self.put({name: received[name] for name in self.buffers})
        return vector

    def _vector(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Tensor:
        """Return the vector [d] in arrays by name; ``ValueError`` for a wrong shape."""
        for name, array in arrays.items():
            if self.layout.shapes[name] != array.shape:
                raise ValueError(
                    f"array {name!r} of the client's model has shape {self.layout.shapes[name]},"
                    f" {array.shape} was received"
                )
        flat = np.concatenate([arrays[name].reshape(-1) for name in self.layout.trainable])
        vector = torch.from_numpy(flat).to(self.device, self.dtype)
        if all(parameter.dtype == self.dtype for parameter in self.shared):
            return vector
        pairs = zip(self.views(vector), self.shared, strict=True)
        return torch.cat([view.to(p.dtype).reshape(-1) for view, p in pairs])  # each is rounded

    def put(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy arrays into the module, by name."""
        if arrays:
            tensors = self.tensors()
            copy_into([tensors[name] for name in arrays], [*arrays.values()])

    def read(self, data: bytes) -> Tensor:
        """Return the vector [d] that ``Layout.to_bytes`` wrote; ``ValueError`` for another size."""
        arrays = self.layout.from_bytes(data)
        return self._vector(dict(zip(self.layout.trainable, arrays, strict=True)))

    def load_kept(self, arrays: Mapping[str, npt.NDArray[Any]] | None) -> None:
        """Put a client's own arrays into the model; None stands for the module's first values."""
        values = self._first if arrays is None else arrays
        self.put({name: values[name] for name in self.kept})
        self._note_first()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, a client trains its own arrays in the module: another may be made of it next."""
        try:
            yield
        finally:
            self._note_first()

    def _note_first(self) -> None:
        """Note the first values of the client's own arrays, whose module now has a client's."""
        if self.kept:
            tensors = self.module.state_dict(keep_vars=True)
            _FIRST[self.module] = {
                name: (id(tensors[name]), tensors[name]._version, first)
                for name, first in self._first.items()
            }

    def kept_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the client's own arrays, by name."""
        return self.arrays_of(self.kept)

    def arrays_of(self, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the module's arrays of these names."""
        tensors = self.tensors() if names else {}
        arrays = to_host([tensors[name] for name in names])
        return {name: array.copy() for name, array in zip(names, arrays, strict=True)}

    def load_all(
        self, arrays: Sequence[npt.NDArray[Any]], extra_vectors: Sequence[str], algorithm: str
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the model's vector [d], and by name the ``extra_vectors``; load its buffers.

        An extra vector has an array for each trained parameter. Raises ``ValueError``, which names
        the ``algorithm``, for a wrong number of arrays.
        """
        self.check_whole()
        own, trained = len(self.names), self.layout.trainable
        expected = own + len(trained) * len(extra_vectors)
        if len(arrays) != expected:
            parts = ", ".join(("the model", *extra_vectors))
            raise ValueError(
                f"{algorithm} takes {expected} arrays for {parts}; {len(arrays)} were"
                f" received. The client's model does not train {list(self.buffers[:3])}, has"
                f" the tied parameters {list(self.layout.ties[:3])} and does not send"
                f" {self.at_home[:3]}: is the run of a model like the client's, begun with"
                " ArrayRecord(module.state_dict())?"
            )
        further = iter(arrays[own:])
        vectors = {
            vector: self._vector({name: next(further) for name in trained})
            for vector in extra_vectors
        }
        return self.take(arrays[:own]), vectors

    def all_arrays(self, vector: Tensor, further: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """Return the model's arrays, as :meth:`arrays` does, and those of ``further`` vectors."""
        vectors = itertools.chain.from_iterable(map(self.views, further))
        arrays = to_host([*self._travelling(vector), *vectors])
        untrained = {*self.buffers}
        own = [a.copy() if n in untrained else a for n, a in zip(self.names, arrays, strict=False)]
        return own + arrays[len(own) :]

    def arrays(self, vector: Tensor) -> list[npt.NDArray[Any]]:
        """Return the model's arrays: buffers as they are, the trained ones of ``vector`` [d].

        On a CPU those are the vector's memory.
        """
        return self.all_arrays(vector, ())

    def _travelling(self, vector: Tensor) -> list[Tensor]:
        pairs = zip(self.layout.trainable, self.views(vector), self.shared, strict=True)
        arrays = {name: view.to(parameter.dtype) for name, view, parameter in pairs}
        arrays |= {copy: arrays[first] for copy, first in self.layout.copies.items()}
        tensors = self.tensors() if self.buffers else {}
        return [arrays[name] if name in arrays else tensors[name] for name in self.names]


_FIRST: WeakKeyDictionary[nn.Module, dict[str, tuple[int, int, npt.NDArray[Any]]]]
_FIRST = WeakKeyDictionary()
"""By module and array of a client's own: the tensor, its version when a client left it, and its
first value."""


def _first_value(module: nn.Module, name: str, tensor: Tensor) -> npt.NDArray[Any]:
    """Return what an array is now, or was at first if clients alone have changed it since."""
    noted = _FIRST.get(module, {}).get(name)
    if noted is not None and noted[:2] == (id(tensor), tensor._version):
        return noted[2]
    return to_numpy(tensor).copy()


def check_unchanged(layout: Layout, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise ``ValueError`` if one of these frozen ``arrays`` is not what it was at first."""
    if changed := [name for name, array in arrays.items() if digest(array) != layout.frozen[name]]:
        raise ValueError(
            f"{few(changed)} changed, and arrays that require no gradients do not travel: let them"
            " require gradients when the client is made, or register them as buffers"
        )


def _places(
    module: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[dict[str, Any], str]] | None:
    """Return where the module holds the arrays of its state dict, None if it does not say it.

    A hook may give a state dict further arrays, or other names.
    """
    places: dict[str, tuple[dict[str, Any], str]] = {}
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return None
    for at, part in module.named_modules(remove_duplicate=False):
        for held in (part._parameters, part._buffers):
            places |= {f"{at}.{key}" if at else key: (held, key) for key in held}
    known = all(n in places and places[n][0][places[n][1]] is t for n, t in tensors.items())
    return {name: places[name] for name in tensors} if known else None
