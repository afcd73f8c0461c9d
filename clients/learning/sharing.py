"""Which of a module's arrays are trained, and which are shared.

Arrays are what ``module.state_dict()`` names: parameters and buffers (running statistics).

- *shared*: trained parameters that travel, which are the vector [d] of all rules; and buffers that
  travel.
- *local*: trained parameters and buffers that stay with their client. Local training changes them
  as it does the rest, and the client's state holds them.
- *frozen*: parameters that are not trained. They do not travel; a digest tells whether all clients
  have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import Tensor, nn

Patterns: TypeAlias = str | Sequence[str]
"""Patterns of array names: an array's name, a module's name (``"head"`` matches all names that
begin with "head."), or either with the shell's wildcards (``"*.lora_*"``). A pattern that begins
with "!" excludes what it matches. If all patterns exclude, all other arrays are meant."""


@dataclass(frozen=True)
class Roles:
    """Names of arrays, each in the module's order; of tied parameters all names."""

    shared: tuple[str, ...]
    local: tuple[str, ...]
    buffers: tuple[str, ...]
    local_buffers: tuple[str, ...]
    frozen: tuple[str, ...]

    @property
    def travelling(self) -> set[str]:
        """The arrays that are sent in requests and replies."""
        return {*self.shared, *self.buffers}

    @property
    def kept(self) -> tuple[str, ...]:
        """The arrays that are a client's own."""
        return self.local + self.local_buffers


def all_but(module: nn.Module, *excluded: type[nn.Module] | str) -> tuple[str, ...]:
    """Return the patterns of all arrays but those of submodules of these types or names.

    ``Border(net, share=all_but(net, nn.BatchNorm2d))`` shares all but batch normalisation.
    Raises ``ValueError`` for a type of which the module has none.

    Examples
    --------
    >>> all_but(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), nn.BatchNorm1d)
    ('!1',)
    """
    patterns: list[str] = []
    for one in excluded:
        if isinstance(one, str):
            patterns.append(f"!{one}")
            continue
        names = [f"!{name}" for name, part in module.named_modules() if isinstance(part, one)]
        if not names:
            raise ValueError(f"the model has no {one.__name__}")
        patterns += names
    return tuple(patterns)


def split(module: nn.Module, train: Patterns | None, share: Patterns | None) -> Roles:
    """Return the roles of the arrays of ``module``; ``train`` is set at its parameters.

    Without ``train``, the parameters that require gradients are trained. Without ``share``, all
    arrays are shared except the frozen ones.
    """
    tensors = module.state_dict(keep_vars=True)
    parameters = {n for n, _ in module.named_parameters(remove_duplicate=False)}
    if train is not None:
        chosen = matching(train, [n for n in tensors if n in parameters], "train")
        trained = {id(tensors[name]) for name in chosen}
        for parameter in module.parameters():
            if parameter.requires_grad != (id(parameter) in trained):
                parameter.requires_grad_(id(parameter) in trained)
    shared = set(tensors if share is None else matching(share, list(tensors), "share"))
    at = {id(tensors[name]) for name in shared}
    shared |= {name for name, tensor in tensors.items() if id(tensor) in at}  # tied names

    def those(which: Callable[[str, Tensor], bool]) -> tuple[str, ...]:
        return tuple(name for name, tensor in tensors.items() if which(name, tensor))

    roles = Roles(
        those(lambda n, t: n in parameters and t.requires_grad and n in shared),
        those(lambda n, t: n in parameters and t.requires_grad and n not in shared),
        those(lambda n, t: n not in parameters and n in shared),
        those(lambda n, t: n not in parameters and n not in shared),
        those(lambda n, t: n in parameters and not t.requires_grad),
    )
    if not roles.shared + roles.local:
        raise ValueError("the model has no trainable parameter")
    if not roles.shared:
        raise ValueError(f"the model shares no trainable parameter, of {_few(roles.local)}")
    return roles


def matching(patterns: Patterns, names: Sequence[str], what: str) -> list[str]:
    """Return the ``names`` that match; raise ``ValueError`` for a pattern that matches none."""
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if not listed:
        raise ValueError(f"{what} needs a pattern at least")

    def matches(pattern: str) -> set[str]:
        pattern = pattern.removeprefix("!")
        hits = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
        if not hits:
            raise ValueError(f"{what}: {pattern!r} matches none of the arrays {_few(names)}")
        return hits

    into = [matches(pattern) for pattern in listed if not pattern.startswith("!")]
    out = [matches(pattern) for pattern in listed if pattern.startswith("!")]
    chosen = set().union(*into) if into else set(names)
    return [name for name in names if name in chosen.difference(*out)]


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"{list(names[:6])}{more}"
