"""Data sets that need no network.

digits         scikit-learn's 1797 digits, [1, 8, 8], in [0, 1]
synthetic      FedBC's generator, [60]: :func:`synthetic`
fedpd-weak, fedpd-strong
               FedPD's, [20], labels at random or by a model per client: :func:`two_classes`
fcube          NIID-Bench's, [3], two octants of a cube per client: :func:`fcube`
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fl_strategies.core.log import log
from fl_strategies.core.randomness import stream
from fl_strategies.core.schedules import check, one_of, shown
from simulations.drawn import AT_ONCE, Drawn, Owners, Population, Samples
from simulations.images import Images, Scale, scaled
from simulations.partitions import power_law
from simulations.text import Symbols

WARN_BYTES = 10**9
"""The log warns of drawn data that take more memory than this while they are made."""

Floats: TypeAlias = NDArray[np.floating[Any]]
Ints: TypeAlias = NDArray[np.int64]
Inputs: TypeAlias = Floats | Symbols | Images | Drawn


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test data. All callers share them; nobody may write to them.

    Models get what :meth:`inputs` makes of ``x``.
    """

    name: str
    x: Inputs  # [n, ...], images as they came, integers of text, else floats
    y: Ints | Drawn  # [n], classes 0 ... num_classes - 1
    test_x: Inputs  # [n_test, ...]
    test_y: Ints | Drawn  # [n_test]
    num_classes: int
    owner: Ints | Owners | None = None  # [n], the natural client of each training sample
    test_owner: Ints | Owners | None = None  # [n_test]
    vocabulary: int | None = None  # of text: x are integers 0 ... vocabulary - 1
    scale: Scale | None = None  # of images

    def check(self) -> None:
        """Raise ``ValueError`` for images that make no array, as reading them would."""
        for part in (self.x, self.test_x):
            if isinstance(part, Images):
                part.check()

    def tests_of(self, row: int) -> Ints:
        """Return the test samples of the natural client of training sample ``row``."""
        assert self.owner is not None
        client = self.owner[row]
        if isinstance(self.test_owner, Owners):
            return self.test_owner.of(int(client))
        return np.flatnonzero(self.test_owner == client)

    def inputs(self, rows: Any = slice(None), *, test: bool = False) -> NDArray[Any]:
        """Return training or test samples as models take them: images in float32, to scale.

        Images [n, channels, height, width] lie channels-last. Made anew at each call.
        """
        return self.samples(rows, test=test)[0]

    def samples(
        self, rows: Any = slice(None), *, test: bool = False
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return training or test samples, as models take them, and their classes."""
        stored, classes = (self.test_x, self.test_y) if test else (self.x, self.y)
        x = stored[rows]
        return x if self.scale is None else scaled(x, self.scale), classes[rows]


def synthetic(
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    clients: int = 30,
    sizes: str = "auto",
    seed: int = 0,
    dtype: DTypeLike = np.float32,
) -> Dataset:
    """Return FedBC's synthetic(alpha, beta): 60 features, 10 classes, one owner per device.

    Device i draws u_i ~ N(0, alpha), W_i [60, 10] and b_i [10] ~ N(u_i, 1); B_i ~ N(0, beta),
    v_i [60] ~ N(B_i, 1), x ~ N(v_i, Sigma) with Sigma_jj = j^-1.2; y = argmax(x W_i + b_i).
    As in the generator of Li et al., which FedBC adapts, alpha and beta are standard deviations.
    The first 80 % of a device's samples are for training. alpha changes no label: u_i adds the same
    u_i (1 + sum_j x_j) to all ten scores, so only beta makes devices more or less heterogeneous.

    ``sizes``: ``"power-law"``, which the paper names without numbers: 50 samples, and a share,
    proportional to 1.1^-i, of 200 samples per device; ``"lognormal"``, the authors' code:
    50 + lognormal(4, 2); ``"uniform"``: 20 to 60; ``"auto"``: by the power law, uniform for more
    than 1,000 devices, of which the power law gives the first 9 % of all samples; ``"authors"``:
    sizes and samples that the authors' code draws for this seed, of at most 1,000 devices.

    References: Bedi et al., "FedBC: Calibrating Global and Local Models via Federated Learning
    Beyond Consensus", appendix E.1; Li et al., "FedProx", MLSys 2020.
    """
    check("alpha", alpha, low=0.0)
    check("beta", beta, low=0.0)
    _check_counts(clients=clients, seed=seed)
    one_of("sizes", sizes, ("auto", "power-law", "lognormal", "uniform", "authors"))
    if sizes == "authors":
        return _authors(alpha, beta, clients, seed, dtype)
    if sizes == "auto":
        sizes = "power-law" if clients <= AT_ONCE else "uniform"
    if sizes == "power-law":
        counts = 50 + power_law(200 * clients, clients, 1.1)
    elif sizes == "lognormal":
        extra = stream(seed, "synthetic-sizes").lognormal(4, 2, clients).astype(np.int64)
        counts = 50 + extra
    else:
        counts = stream(seed, "synthetic-sizes").integers(20, 60, clients, endpoint=True)

    def draw(i: int) -> Samples:
        rng = stream(seed, "synthetic", i)
        u, centre = rng.normal(0, alpha), rng.normal(0, beta)
        w, b = rng.normal(u, 1, (60, 10)), rng.normal(u, 1, 10)
        x = rng.normal(centre, 1, 60) + rng.normal(size=(counts[i], 60)) * np.arange(1, 61) ** -0.6
        return x.astype(dtype), np.argmax(x @ w + b, axis=1)

    train = np.rint(0.8 * counts).astype(np.int64)
    return _dataset("synthetic", Population(draw, counts, train, 60, dtype), 10)


def _authors(alpha: float, beta: float, clients: int, seed: int, dtype: DTypeLike) -> Dataset:
    """Return the arrays of the FedBC authors' code.

    One generator draws all devices in turn, and another one shuffles the samples of each.
    """
    if clients > AT_ONCE:
        raise ValueError(f'clients must be <= {AT_ONCE} with sizes="authors", got {shown(clients)}')
    rng, order = np.random.RandomState(seed), random.Random(seed)
    counts = 50 + rng.lognormal(4, 2, clients).astype(np.int64)
    shifts, centres = rng.normal(0, alpha, clients), rng.normal(0, beta, clients)
    means = [rng.normal(centre, 1, 60) for centre in centres]
    devices = []
    for u, mean, n in zip(shifts, means, counts, strict=True):
        w, b = rng.normal(u, 1, (60, 10)), rng.normal(u, 1, 10)
        x = mean + rng.standard_normal((n, 60)) * np.sqrt(np.arange(1, 61) ** -1.2)
        rows = [*range(n)]
        order.shuffle(rows)
        devices.append((x[rows].astype(dtype), np.argmax(x @ w + b, axis=1)[rows]))
    train = (0.8 * counts).astype(np.int64)
    return _dataset("synthetic", Population(devices.__getitem__, counts, train, 60, dtype), 10)


def two_classes(
    strong: bool,
    /,
    *,
    clients: int = 100,
    samples: int = 400,
    test_samples: int = 100,
    seed: int = 0,
) -> Dataset:
    """Return FedPD's data for logistic regression: 19 normal features and a constant 1, 2 classes.

    "Weakly non-IID": fair random labels. "Strongly non-IID": client i draws a model
    x_i [20] ~ U[-10, 10], and a label is 1 where <a, x_i> + N(0, 1) > 0. Each client has
    ``samples`` training samples. The paper has no test data; here each client has ``test_samples``
    of the same distribution.

    Reference: Zhang et al., "FedPD", IEEE Transactions on Signal Processing 2021, Section V.
    """
    _check_counts(clients=clients, samples=samples, test_samples=test_samples, seed=seed)
    n = samples + test_samples

    def draw(i: int) -> Samples:
        rng = stream(seed, "two-classes", i)
        a = np.column_stack([rng.normal(size=(n, 19)), np.ones(n)])
        score = a @ rng.uniform(-10, 10, 20) + rng.normal(size=n) if strong else rng.normal(size=n)
        return a.astype(np.float32), (score > 0).astype(np.int64)

    counts, train = np.full(clients, n), np.full(clients, samples)
    name = "fedpd-strong" if strong else "fedpd-weak"
    return _dataset(name, Population(draw, counts, train, 20, np.float32), 2)


def fcube(
    *, clients: int = 4, samples: int = 1000, test_samples: int = 250, seed: int = 0
) -> Dataset:
    """Return NIID-Bench's FCUBE: points of the cube [-1, 1]^3, labels 0 for x_1 > 0, 1 for x_1 < 0.

    Each client has two octants, which the origin mirrors into each other, and takes its samples
    from them in turn: labels are balanced, and clients differ in features alone. The octants with
    x_1 > 0 are those of the first four clients, client 4 has those of client 0, and so on.

    NIID-Bench has four parties with 1,000 training samples each, as here by default. It tests on
    1,000 points, anywhere in the cube; here a client has ``test_samples`` of its own octants, so
    that those of four clients are spread over the cube alike.

    Reference: Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos: An Experimental
    Study", ICDE 2022 (feature distribution skew), and its authors' code (utils.py).
    """
    _check_counts(clients=clients, samples=samples, test_samples=test_samples, seed=seed)
    n = samples + test_samples

    def draw(i: int) -> Samples:
        octant = np.array([1, -1 if i % 4 >= 2 else 1, -1 if i % 2 else 1])
        in_turn = 1 - 2 * (np.arange(n) % 2)
        x = stream(seed, "fcube", i).uniform(size=(n, 3)) * np.outer(in_turn, octant)
        return x.astype(np.float32), (x[:, 0] < 0).astype(np.int64)

    counts, train = np.full(clients, n), np.full(clients, samples)
    return _dataset("fcube", Population(draw, counts, train, 3, np.float32), 2)


def _dataset(name: str, population: Population, classes: int) -> Dataset:
    """Return the data of a population, warning of those that are drawn at once and are large."""
    clients, samples = len(population.counts), int(population.counts.sum())
    each = population.features * np.dtype(population.dtype).itemsize + 8 + 8  # classes, owners
    if clients <= AT_ONCE and 2 * samples * each > WARN_BYTES:  # twice while they are put together
        message = (
            "the data of %d clients of %r take %.1f GB of memory in each process that makes them"
        )
        log(WARNING, message, clients, name, 2 * samples * each / 1e9)
    (x, y, owner), (test_x, test_y, test_owner) = map(population.arrays, (False, True))
    return Dataset(name, x, y, test_x, test_y, classes, owner, test_owner)


def _check_counts(*, seed: int, **counts: int) -> None:
    check("seed", seed, low=0, integer=True)
    for name, count in counts.items():
        check(name, count, low=1, integer=True)


def digits() -> Dataset:
    """Return scikit-learn's digits, a fixed fifth of each class kept for testing."""
    from sklearn.datasets import load_digits  # here: it takes seconds, and other sets do without
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    x = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y = labels.astype(np.int64)
    x, test_x, y, test_y = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    return Dataset("digits", x, y, test_x, test_y, 10)


GENERATED: dict[str, Callable[..., Dataset]] = {
    "synthetic": synthetic,
    "fedpd-weak": partial(two_classes, False),
    "fedpd-strong": partial(two_classes, True),
    "fcube": fcube,
}
"""Data sets drawn from a seed, for a number of clients."""
BUILT_IN: dict[str, Callable[..., Dataset]] = {"digits": digits, **GENERATED}
