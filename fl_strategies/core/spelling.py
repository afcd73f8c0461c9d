"""Names that are not known, each with the known name that may be meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from fl_strategies.core.schedules import shown

Made = TypeVar("Made", bound=Callable[..., Any])

OTHER_WORDS = {
    # settings of ``local`` under the names that others give them
    "learning-rate": "lr",
    "local-lr": "lr",
    "client-lr": "lr",
    "client-learning-rate": "lr",
    "qffl-learning-rate": "lr",
    "step-size": "lr",
    "local-epochs": "epochs",
    "client-epochs": "epochs",
    "num-epochs": "epochs",
    "local-steps": "steps",
    "num-steps": "steps",
    "local-batch-size": "batch-size",
    "train-batch-size": "batch-size",
    "batchsize": "batch-size",
    "optimizer": "solver",
    "optimiser": "solver",
    "wd": "weight-decay",
    "l2": "weight-decay",
    # arguments of Flower's legacy strategies, and of its ``Strategy.start``
    "fraction-fit": "fraction_train",
    "min-fit-clients": "min_train_nodes",
    "min-evaluate-clients": "min_evaluate_nodes",
    "min-available-clients": "min_available_nodes",
    "fit-metrics-aggregation-fn": "train_metrics_aggr_fn",
    "evaluate-metrics-aggregation-fn": "evaluate_metrics_aggr_fn",
    "accept-failures": "min_replies",
    "min-completion-rate-fit": "min_replies",
    "min-completion-rate-evaluate": "min_replies",
    "q-param": "q",
    "evaluate-fn": "start(evaluate_fn=...)",
    "evaluate-function": "start(evaluate_fn=...)",
    "initial-parameters": "start(initial_arrays=...)",
    "initial-arrays": "start(initial_arrays=...)",
    "on-fit-config-fn": "start(train_config=...), or a schedule in local={...}",
    "train-config": "start(train_config=...)",
    "on-evaluate-config-fn": "start(evaluate_config=...)",
    "evaluate-config": "start(evaluate_config=...)",
    "num-rounds": "start(num_rounds=...)",
    "timeout": "start(timeout=...)",
    "grid": "start(grid=...)",
    "inplace": "nothing in its place",
}
"""Names that others give to what has another name here, in kebab-case; a text with a space or
parenthesis is what to use instead of an argument."""


MOST = 3
"""The most unknown names that a message shows."""


def meant(name: object, known: Iterable[str], cutoff: float = 1.0) -> str:
    """Return the known name that ``name`` is: by its spelling, by another word for it, or similar.

    Similar are names whose ratio of :mod:`difflib` is at least ``cutoff``; "" if there is none.

    Examples
    --------
    >>> meant("Learning_Rate", ["lr"]), meant("batch_size", ["batch-size"]), meant("lrr", ["lr"])
    ('lr', 'batch-size', '')
    """
    spelt = {_kebab(word): word for word in known}
    text = _kebab(name)
    word = _kebab(OTHER_WORDS.get(text, text))
    near = [word] if word in spelt else difflib.get_close_matches(word, spelt, 1, cutoff)
    return spelt[near[0]] if near and spelt[near[0]] != name else ""


def unknown(names: Iterable[object], known: Iterable[str], use: Mapping[str, str] = {}) -> str:
    """Return ``names`` as text, each with the known name that may be meant.

    ``use`` says, by name, what to use instead of one for which there is no known name.

    Examples
    --------
    >>> unknown(["roh", "x", "lr"], ["rho", "eta"], {"lr": "local={'lr': 0.1}"})
    "'roh' (did you mean 'rho'?), 'x', 'lr' (use local={'lr': 0.1})"
    """
    known, names = [*known], [*names]
    texts = [shown(name) + _hint(name, known, use) for name in names[:MOST]]
    more = [f"and {len(names) - MOST} more"] if len(names) > MOST else []
    return ", ".join(texts + more)


def listed(names: Iterable[object]) -> str:
    """Return ``names`` as the text of a list, which is cut off if it is long.

    Examples
    --------
    >>> listed(["rho", "eta"]), listed(range(1000))[-19:]
    ("['rho', 'eta']", ' ... (1000 in all)]')
    """
    names, items = [*names], ""
    for place, name in enumerate(names):
        text = f", {shown(name)}" if place else shown(name)
        if len(items) + len(text) > 170:
            return f"[{items}, ... ({len(names)} in all)]"
        items += text
    return f"[{items}]"


def _hint(name: object, known: Sequence[str], use: Mapping[str, str]) -> str:
    other = OTHER_WORDS.get(_kebab(name), "")
    instead = use.get(name if isinstance(name, str) else "", other if {*other} & {*" ("} else "")
    if instead:
        return f" (use {instead})"
    near = "" if name in known else meant(name, known, 0.5)
    return f" (did you mean {near!r}?)" if near else ""


def misspelt(names: Iterable[str], known: Iterable[str]) -> str:
    """Return those of ``names`` that are almost ``known``, each with the known name.

    Examples
    --------
    >>> misspelt(["batch_size", "lr", "hospital", "local-epochs"], ["lr", "batch-size", "epochs"])
    "'batch_size' (did you mean 'batch-size'?), 'local-epochs' (did you mean 'epochs'?)"
    """
    known = sorted(known)
    pairs = [(name, meant(name, known, 0.85)) for name in sorted({*names} - {*known})]
    return ", ".join(f"{shown(name)} (did you mean {near!r}?)" for name, near in pairs if near)


def unknown_of(names: Iterable[object], known: Sequence[str]) -> str:
    """Return :func:`unknown`, and what is known.

    Examples
    --------
    >>> unknown_of(["x"], [])
    "'x'; it has none"
    """
    return f"{unknown(names, known)}; it has {listed(known) if known else 'none'}"


def hinted(made: Made) -> Made:
    """Have a function, or a class when it is called, answer an unknown argument with its own names.

    Examples
    --------
    >>> hinted(lambda num_rounds: None)(rounds=5)
    Traceback (most recent call last):
    TypeError: <lambda> has no argument 'rounds' (did you mean 'num_rounds'?); it has ['num_rounds']
    """
    if isinstance(made, type):
        made.__init__ = hinted(made.__init__)  # type: ignore[misc]
        return made
    known = [name for name in inspect.signature(made).parameters if name != "self"]

    @functools.wraps(made)
    def checked(*args: Any, **named: Any) -> Any:
        if wrong := [name for name in named if name not in known]:
            called = type(args[0]).__name__ if made.__name__ == "__init__" else made.__name__
            raise TypeError(f"{called} has no argument {unknown_of(wrong, known)}")
        return made(*args, **named)

    return cast(Made, checked)


def _kebab(name: object) -> str:
    text = name[:100] if isinstance(name, str) else shown(name)
    return text.lower().replace("_", "-")
