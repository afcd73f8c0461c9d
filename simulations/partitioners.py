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

from fl_strategies.core.spelling import unknown

Rows: TypeAlias = NDArray[np.int64]
GIVEN = {"num_partitions", "seed"}
"""Parameters that follow from the run."""


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

    Raises ``ValueError`` if an option is missing, or it makes another number of partitions.
    """
    known = parameters(name)
    given: dict[str, Any] = {
        "num_partitions": clients,
        "seed": int(rng.integers(2**32)),
        "partition_by": "owner" if "Natural" in name else "label",
    }
    options = {key: value for key, value in given.items() if key in known} | options
    empty = inspect.Parameter.empty
    if missing := [key for key in known.keys() - options if known[key].default is empty]:
        raise ValueError(f"partition {name!r} needs {', '.join(sorted(missing))}")
    partitioner = getattr(flwr_partitioners(), name)(**options)
    columns = {} if owner is None else {"owner": np.asarray(owner)}
    if (column := options.get("partition_by", "label")) not in {"label", *columns}:
        raise ValueError(f"partition_by must be one of {['label', *columns]}, got {column!r}")
    return applied(partitioner, labels, clients, rng.permutation(len(labels)), columns)


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
            raise ValueError(f"clients must be {count} (partitions), got {clients}")
        parts = [partitioner.load_partition(client)[:] for client in range(clients)]
    return [part["row"].to_numpy() for part in parts]
