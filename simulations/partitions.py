"""How a data set's samples are spread over clients; shards and dirichlet by flwr-datasets.

A partition is a list with one array per client: the sorted int64 indices of that client's samples.
Every sample belongs to at most one client; only the seed decides which. Kinds:

iid         equal sizes, samples at random
shards      samples sorted by label and cut into equal shards, ``shards_per_client`` (2) for each
            client (McMahan et al. 2017; FedADMM's non-IID setting); the samples that equal shards
            leave over, fewer than there are shards, stay unused
dirichlet   each class is spread over the clients by a draw of Dirichlet(``alpha``, ..., ``alpha``)
            (0.5), which is repeated, up to ten times, while it leaves a client empty. With
            ``rows_per_client``, each client draws its mixture of classes from this distribution,
            and so many samples by it, while they last (Hsu et al. 2019; Delta-SGD);
            ``100-500`` is a number drawn from this range (its Table 3)
power-law   client k holds a share of the samples proportional to ``exponent``^-k (1.1), of
            ``classes_per_client`` classes if given (FedBC): :func:`power_law`
diversity   every client has samples of ``labels_per_client`` classes (3), drawn so that the numbers
            of clients per class differ by at most one; these clients share the class evenly
            (FedBCD). With few clients a class may have no client, and its samples stay unused
imbalanced  FedADMM, Table VI: clients in groups of two; each member of group j = 1, 2, ... gets j
            of ``shards`` label-sorted shards, and the last group shares the rest evenly. The
            default is (clients/2)^2 shards: the paper's 10,000 for its 200 clients
natural     by the client ids of the samples, ``owner`` (int64 [n])

Any other name is that of a class of flwr-datasets: :mod:`simulations.partitioners`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import getfullargspec
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_strategies.core.randomness import stream
from fl_strategies.core.schedules import check, shown
from fl_strategies.core.spelling import unknown, unknown_of
from simulations.drawn import Drawn, Owners
from simulations.partitioners import GIVEN, applied, flwr_partitioners, of_class, parameters

Rows: TypeAlias = NDArray[np.int64]
Draw: TypeAlias = np.random.Generator


def partition(
    kind: str,
    labels: NDArray[Any],
    clients: int,
    *,
    seed: int,
    owner: Rows | Owners | None = None,
    **options: Any,
) -> list[Rows]:
    """Return the indices of the samples of each of ``clients`` clients.

    Parameters
    ----------
    kind : one of the kinds of this module's table
    labels : integer array [n], the class of each sample
    clients : number of clients, from 1 to n
    seed : >= 0; the same seed gives the same partition (``natural`` draws nothing)
    owner : int64 [n], for ``natural``
    options : the options of the kind, see the table

    Raises
    ------
    ValueError
        For an unknown kind or option, a value out of its range, or a client without samples.
    """
    known = options_of(kind)
    if wrong := sorted(options.keys() - set(known)):
        raise ValueError(f"partition {kind!r} has no option {unknown_of(wrong, known)}")
    if not 1 <= clients <= len(labels):
        raise ValueError(f"clients must be from 1 to {len(labels)} (samples), got {clients}")
    make = KINDS.get(kind, partial(of_class, kind))
    if kind == "natural" or kind not in KINDS:
        make = partial(make, owner=owner)
    parts = make(np.asarray(labels), clients, stream(seed, "partition"), **options)
    for client, rows in enumerate(parts):
        if len(rows) == 0:
            raise ValueError(
                f"client {client} is left without training samples: partition {kind!r} of "
                f"{len(labels)} samples over {clients} clients, options {options}"
            )
    return [np.sort(rows) for rows in parts]


def options_of(kind: str) -> list[str]:
    """Return the names of the options of partition ``kind``."""
    if kind[:1].isupper():
        return [name for name in parameters(kind) if name not in GIVEN]
    if kind not in KINDS:
        raise ValueError(
            f"unknown partition {unknown([kind], KINDS)}; known: {', '.join(KINDS)}, and classes of"
            " flwr_datasets.partitioner"
        )
    return getfullargspec(KINDS[kind]).kwonlyargs if kind != "natural" else []


def power_law(total: int, clients: int, exponent: float) -> Rows:
    """Return sizes [clients] that sum to ``total``; size k is proportional to exponent^-k.

    This is the "power law exponent" of FedBC: the largest and smallest sizes of its Table 5 differ
    by a factor exponent^(clients - 1). Fractions are rounded so that the sum is ``total``.
    """
    check("exponent", exponent, low=1.0)
    share = float(exponent) ** -np.arange(clients)
    ends = np.rint(total * np.cumsum(share) / share.sum()).astype(np.int64)
    sizes: Rows = np.diff(ends, prepend=0)
    return sizes


def train_test(parts: Sequence[Rows], fraction: float, seed: int) -> list[tuple[Rows, Rows]]:
    """Split each client's samples at random into (train, test), both sorted.

    ``fraction`` in [0, 1) is the share held out for testing. A client keeps at least one sample for
    training, so a client with a single sample has an empty test set.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction must be in [0, 1), got {fraction}")
    if fraction == 0:
        return [(np.sort(rows), rows[:0]) for rows in parts]
    split = []
    for client, rows in enumerate(parts):
        mixed = stream(seed, "train-test", client).permutation(rows)
        held = min(round(fraction * len(rows)), len(rows) - 1)
        split.append((np.sort(mixed[held:]), np.sort(mixed[:held])))
    return split


def describe(parts: Sequence[Rows], labels: NDArray[Any] | Drawn) -> Rows:
    """Return how many samples of each class each client holds, [clients, classes]."""
    theirs = [labels[rows] for rows in parts]
    classes = 1 + max(int(np.max(one)) for one in theirs)
    return np.stack([np.bincount(one, minlength=classes) for one in theirs])


def _iid(labels: NDArray[Any], clients: int, rng: Draw) -> list[Rows]:
    return np.array_split(rng.permutation(len(labels)), clients)


def _shards(
    labels: NDArray[Any], clients: int, rng: Draw, *, shards_per_client: int = 2
) -> list[Rows]:
    _check_share("shards_per_client", shards_per_client, labels, clients)
    partitioner = flwr_partitioners().ShardPartitioner(
        clients,
        "label",
        num_shards_per_partition=shards_per_client,
        shuffle=False,
        seed=int(rng.integers(2**32)),
    )
    return applied(partitioner, labels, clients, rng.permutation(len(labels)))


def _dirichlet(
    labels: NDArray[Any],
    clients: int,
    rng: Draw,
    *,
    alpha: float = 0.5,
    rows_per_client: int | str | None = None,
) -> list[Rows]:
    check("alpha", alpha, above=0.0)
    if rows_per_client is not None:
        low, high = _ends(rows_per_client)
        for end in (low, high):
            _check_share("rows_per_client", end, labels, clients)
        if low > high:
            raise ValueError(f"rows_per_client must be a range, got {rows_per_client!r}")
        sizes = [low] * clients if low == high else rng.integers(low, high + 1, clients).tolist()
        return _mixtures(labels, rng, alpha, sizes)
    for _ in range(10):  # flwr-datasets would warn at every draw that leaves a client empty
        partitioner = flwr_partitioners().DirichletPartitioner(
            clients,
            "label",
            alpha=float(alpha),
            min_partition_size=0,
            shuffle=False,
            seed=int(rng.integers(2**32)),
        )
        parts = applied(partitioner, labels, clients, rng.permutation(len(labels)))
        if min(map(len, parts)) > 0:
            break
    return parts


def _ends(count: Any) -> tuple[Any, Any]:
    """Return the ends of a range, ``"100-500"``; of a number, twice itself."""
    low, dash, high = count.partition("-") if isinstance(count, str) else ("", "", "")
    return (int(low), int(high)) if dash and (low + high).isdecimal() else (count, count)


def _mixtures(labels: NDArray[Any], rng: Draw, alpha: float, sizes: Sequence[int]) -> list[Rows]:
    """Give client i ``sizes[i]`` samples, by a mixture of classes that it draws.

    When a class runs out, the others keep their proportions. Mixtures are kept as logarithms: with
    a small alpha most shares are too small for a double, and the flwr-datasets partitioner of this
    kind then divides 0 by 0.
    """
    pools = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    size = (len(sizes), len(pools))
    # Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha); its shares are Dirichlet(alpha)
    logs = np.log(rng.standard_gamma(alpha + 1, size)) + np.log1p(-rng.random(size)) / alpha
    parts = []
    for log, left in zip(logs, sizes, strict=True):
        taken: list[Rows] = []
        while left:
            stock = np.array([len(pool) for pool in pools])
            log = np.where(stock > 0, log, -np.inf)
            share = np.exp(log - log.max())
            counts = np.minimum(rng.multinomial(left, share / share.sum()), stock)
            taken += [pool[:count] for pool, count in zip(pools, counts, strict=True)]
            pools = [pool[count:] for pool, count in zip(pools, counts, strict=True)]
            left -= int(counts.sum())
        parts.append(np.concatenate(taken))
    return parts


def _power_law(
    labels: NDArray[Any],
    clients: int,
    rng: Draw,
    *,
    exponent: float = 1.1,
    classes_per_client: int | None = None,
) -> list[Rows]:
    sizes = power_law(len(labels), clients, exponent)
    classes = np.unique(labels)
    if classes_per_client is not None:
        check_count("classes_per_client", classes_per_client, 1, len(classes), "classes")
    rows = rng.permutation(len(labels))
    if classes_per_client is None or min(sizes) == 0:  # `partition` names who has none
        return np.split(rows, np.cumsum(sizes)[:-1])
    pools = [rows[labels[rows] == c] for c in classes]
    smallest_first = [_take(pools, size, classes_per_client, rng) for size in sizes[::-1].tolist()]
    return smallest_first[::-1]


def _take(pools: list[Rows], size: int, classes: int, rng: Draw) -> Rows:
    """Move ``size`` samples out of ``pools``: equal shares of ``classes`` classes, at random.

    When a class runs out, further classes replace it, so that a client may hold more classes:
    mostly the largest clients, which choose last ("to preserve the power law", FedBC). These
    partitions are draws like those of its Table 4: {1x6, 1x4, 1x3, 17x2} and so on.
    """
    even = -(-size // classes)
    taken: list[Rows] = []
    for _ in range(2):  # again: a large client may need more than even shares of all the classes
        for pool in rng.permutation(len(pools)).tolist():
            count = min(even, size, len(pools[pool]))
            taken.append(pools[pool][:count])
            pools[pool] = pools[pool][count:]
            size -= count
        even = size
    return np.concatenate(taken)


def _diversity(
    labels: NDArray[Any], clients: int, rng: Draw, *, labels_per_client: int = 3
) -> list[Rows]:
    classes = np.unique(labels)
    check_count("labels_per_client", labels_per_client, 1, len(classes), "classes")
    takers: list[list[int]] = [[] for _ in classes]
    for client in range(clients):  # the classes with the fewest takers so far, ties at random
        taken = np.array([len(taker) for taker in takers])
        for c in np.lexsort((rng.random(len(classes)), taken))[:labels_per_client]:
            takers[c].append(client)
    parts: list[list[Rows]] = [[] for _ in range(clients)]
    for c, taker in zip(classes, takers, strict=True):
        if taker:
            rows = rng.permutation(np.flatnonzero(labels == c))
            for client, share in zip(taker, np.array_split(rows, len(taker)), strict=True):
                parts[client].append(share)
    return [np.concatenate(part) for part in parts]


def _imbalanced(
    labels: NDArray[Any], clients: int, rng: Draw, *, shards: int | None = None
) -> list[Rows]:
    groups, odd = divmod(clients, 2)
    if odd:
        raise ValueError(f"clients must be even (groups of two), got {clients}")
    least = groups * (groups - 1) + 2
    if least > len(labels):
        raise ValueError(
            f"partition 'imbalanced' gives {clients} clients {least} shards or more, each with a"
            f" sample, got {len(labels)} samples"
        )
    shards = max(2, groups**2) if shards is None else shards
    check_count("shards", shards, least, len(labels), f"{clients} clients, {len(labels)} samples")
    rest = shards - groups * (groups - 1)
    counts = [k // 2 + 1 for k in range(clients - 2)] + [rest - rest // 2, rest // 2]
    rows = rng.permutation(len(labels))
    pieces = np.array_split(rows[np.argsort(labels[rows], kind="stable")], shards)
    mixed = np.split(rng.permutation(shards), np.cumsum(counts)[:-1])
    return [np.concatenate([pieces[s] for s in client]) for client in mixed]


def _natural(
    labels: NDArray[Any], clients: int, rng: Draw, *, owner: Rows | Owners | None = None
) -> list[Rows]:
    if owner is None:
        raise ValueError("partition 'natural' needs owner, the natural client of each sample")
    owner = np.asarray(owner)
    if len(owner) != len(labels):
        raise ValueError(f"owner must have {len(labels)} entries (samples), got {len(owner)}")
    if (owners := len(np.unique(owner))) != clients:
        raise ValueError(f"clients must be {owners} (natural clients), got {clients}")
    # what flwr-datasets' NaturalIdPartitioner comes to, which reads all samples for each client
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(owner[order])) + 1)


def _check_share(name: str, value: int, labels: NDArray[Any], clients: int) -> None:
    most = len(labels) // clients
    check_count(name, value, 1, most, f"{len(labels)} samples over {clients} clients")


def check_count(name: str, value: int, low: int, high: int, why: str) -> None:
    """Raise ``ValueError``, which tells why, unless ``value`` is an integer of this range."""
    try:
        check(name, value, low=low, high=high, integer=True)
    except ValueError:
        message = f"{name} must be an integer from {low} to {high} ({why}), got {shown(value)}"
        raise ValueError(message) from None


KINDS: dict[str, Callable[..., list[Rows]]] = {
    "iid": _iid,
    "shards": _shards,
    "dirichlet": _dirichlet,
    "power-law": _power_law,
    "diversity": _diversity,
    "imbalanced": _imbalanced,
    "natural": _natural,
}
