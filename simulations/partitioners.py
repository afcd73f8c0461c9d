"""flwr-datasets' partitioners: one by the name of its class, or one that is made already.

``--partition PathologicalPartitioner --partition-params num_classes_per_partition=2`` takes a class
of ``flwr_datasets.partitioner``; its parameters are the options. ``num_partitions`` is the number
of clients, the seed follows from the run's. A partitioner sees the columns ``label`` and, if the
samples have client ids, ``owner``: ``partition_by`` is ``owner`` for natural ids, else ``label``.
"""

from __future__ import annotations

import inspect
import warnings
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_strategies.core.reasons import of_exception
from fl_strategies.core.schedules import shown
from fl_strategies.core.spelling import unknown

Rows: TypeAlias = NDArray[np.int64]
GIVEN = {"num_partitions", "seed"}
"""Parameters that follow from the run."""


class OtherNumber(ValueError):
    """A partitioner makes another number of partitions than there are clients."""


def flwr_partitioners() -> Any:
    """Return ``flwr_datasets.partitioner``, whose import takes seconds (seaborn, pandas)."""
    return import_module("flwr_datasets.partitioner")


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a partitioner's class; raise ``ValueError`` for another name."""
    module = flwr_partitioners()
    classes = [one for one in module.__all__ if one != "Partitioner"]
    if name not in classes:
        raise ValueError(f"flwr-datasets has no partitioner {unknown([name], classes)}")
    if name.startswith("Vertical"):
        raise ValueError(f"{name} divides columns over clients: a client needs whole samples")
    return dict(inspect.signature(getattr(module, name)).parameters)


def of_class(
    name: str,
    labels: NDArray[Any],
    clients: int,
    rng: np.random.Generator,
    *,
    owner: Rows | None = None,
    **options: Any,
) -> list[Rows]:
    """Return the indices of each client's samples, as the partitioner of class ``name`` has them.

    Raises ``ValueError`` if an option is missing or refused, or the number of partitions differs.
    """
    known = parameters(name)
    given: dict[str, Any] = {
        "num_partitions": clients,
        "seed": int(rng.integers(2**32)),
        "partition_by": "owner" if "Natural" in name else "label",
    }
    typed, options = options, {k: v for k, v in given.items() if k in known} | options
    empty = inspect.Parameter.empty
    if missing := [key for key in known.keys() - options if known[key].default is empty]:
        raise ValueError(f"partition {name!r} needs {', '.join(sorted(missing))}")
    columns = {} if owner is None else {"owner": np.asarray(owner)}
    if (column := options.get("partition_by", "label")) not in {"label", *columns}:
        if column == "owner":
            raise ValueError(f"{name} needs the samples' client ids, and these samples have none")
        raise ValueError(f"partition_by must be one of {['label', *columns]}, got {column!r}")
    for key, value in options.items():
        _check_type(key, value, known[key].annotation)
    try:
        partitioner = getattr(flwr_partitioners(), name)(**options)
        return applied(partitioner, labels, clients, rng.permutation(len(labels)), columns)
    except OtherNumber:
        raise
    except Exception as error:
        told = " ".join(f"{key}={shown(value)}" for key, value in typed.items())
        raise ValueError(f"partition {name!r} with {told}: {of_exception(error)}") from error


def _check_type(name: str, value: Any, annotation: Any) -> None:
    """Raise ``ValueError`` for a value of another type than a partitioner's number or flag."""
    whole, flag = ("an integer", (int,)), ("true or false", (bool,))
    wanted = {int: whole, int | None: whole, bool: flag, float: ("a number", (int, float))}
    noun, kinds = wanted.get(annotation, ("", ()))
    if noun and (not isinstance(value, kinds) or (isinstance(value, bool) and noun != flag[0])):
        raise ValueError(f"{name} must be {noun}, got {shown(value)}")


def applied(
    partitioner: Any,
    labels: NDArray[Any],
    clients: int,
    rows: Rows,
    columns: dict[str, NDArray[Any]] | None = None,
) -> list[Rows]:
    """Let ``partitioner`` divide ``rows``, in this order; return the indices of each client's."""
    import datasets  # flwr-datasets has imported it by now

    columns = {"label": labels, **(columns or {})}
    partitioner.dataset = datasets.Dataset.from_dict(
        {"row": rows} | {name: column[rows] for name, column in columns.items()}
    ).with_format("arrow")
    with warnings.catch_warnings():  # datasets 4 sorts by an argument that pyarrow 25 deprecated
        warnings.simplefilter("ignore", FutureWarning)
        if (count := partitioner.num_partitions) != clients:
            raise OtherNumber(f"clients must be {count} (partitions), got {clients}")
        partitioner.load_partition(0)  # it divides the samples now, and may have sorted them
        if type(partitioner).__module__.startswith("flwr_datasets.") and (
            chosen := getattr(partitioner, "_partition_id_to_indices", None)
        ):  # a `Dataset` of each client takes 2 ms
            order = partitioner.dataset[:]["row"].to_numpy()
            return [order[np.asarray(chosen[client], np.int64)] for client in range(clients)]
        parts = [partitioner.load_partition(client)[:] for client in range(clients)]
    return [part["row"].to_numpy() for part in parts]
