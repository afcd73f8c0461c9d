"""Laws of the data sets: which rows, which pixels, which scale, and where they come from."""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from scipy.optimize import linprog
from sklearn.datasets import load_digits
from tiny_data import cifar100, encoded

from fl_strategies.core.schedules import shown
from simulations import data, generated
from simulations.config import RunConfig
from simulations.experiment import prepare
from simulations.generated import BUILT_IN
from simulations.problems import laid_out

RNG = np.random.default_rng(7)
GREY = RNG.integers(0, 256, (12, 6, 5), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)
LABELS = [3, 1, 0, 2, 1, 3, 0, 0, 2, 1, 3, 2]


@pytest.fixture
def shared(real_datasets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the real data, where this machine has them, and nothing else."""
    forbid_the_hub(monkeypatch)


def forbid_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the Hub was asked")

    monkeypatch.setattr(datasets, "load_dataset", refuse)


def table(pixels: np.ndarray, column: str = "image", kind: str = "PNG") -> datasets.Dataset:
    features = datasets.Features(
        {column: datasets.Image(), "label": datasets.ClassLabel(num_classes=4)}
    )
    labels = LABELS[: len(pixels)]
    return datasets.Dataset.from_dict(
        {column: encoded(pixels, kind), "label": labels}, features=features
    )


def folder(path: Path, pixels: np.ndarray, column: str = "image", kind: str = "PNG") -> Path:
    """Write 8 training and 4 test images as the Hub would, the training ones in two files."""
    (path / "data").mkdir(parents=True)
    rows = table(pixels, column, kind)
    for name, first, end in (("train-0", 0, 5), ("train-1", 5, 8), ("test-0", 8, 12)):
        rows.select(range(first, end)).to_parquet(path / "data" / f"{name}.parquet")
    return path


@pytest.mark.slow
def test_mnist_is_mnist(shared: None) -> None:
    mnist = data.load("mnist")
    assert (mnist.x.shape, mnist.test_x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert mnist.inputs().dtype == np.float32
    assert mnist.y.dtype == np.int64
    assert mnist.num_classes == 10
    assert mnist.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(mnist.y).tolist() == counts
    # The published 0.1307 and 0.3081 are rounded at the fourth digit.
    assert abs(mnist.inputs().mean(dtype=np.float64)) < 0.00005 / 0.3081
    assert abs(mnist.inputs().std(dtype=np.float64) - 1) < 0.00005 / 0.3081
    assert mnist.owner is None


@pytest.mark.slow
def test_the_cifar10_subset_is_known_by_its_own_name_alone(shared: None) -> None:
    with pytest.raises(ValueError, match="'cifar10' is neither under FL_DATA"):
        data.load("cifar10")
    cifar = data.load("cifar10_subset")
    assert (cifar.x.shape, cifar.test_x.shape) == ((7000, 3, 32, 32), (1400, 3, 32, 32))
    assert np.bincount(cifar.y).tolist() == [700] * 10
    assert np.abs(cifar.inputs().mean((0, 2, 3))).max() < 0.05  # a subset: near the full set's only
    assert np.abs(cifar.inputs().std((0, 2, 3)) - 1).max() < 0.05


@pytest.mark.parametrize(("pixels", "column"), [(GREY, "image"), (COLOUR, "img")])
def test_a_folder_gives_back_its_pixels(
    pixels: np.ndarray, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_the_hub(monkeypatch)
    own = data.load(str(folder(tmp_path / "own", pixels, column)), normalise="none")
    expected = pixels.reshape(12, 6, 5, -1).transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(
        np.concatenate([own.inputs(), own.inputs(test=True)]), expected, rtol=1e-6
    )
    assert own.y.tolist() == LABELS[:8]
    assert own.test_y.tolist() == LABELS[8:]
    assert own.num_classes == 4
    images = torch.from_numpy(own.inputs())
    assert laid_out(images) is images  # no copy is made for convolutions


def test_a_set_without_published_scale_is_standardised_by_its_training_images(
    tmp_path: Path,
) -> None:
    path = str(folder(tmp_path / "own", COLOUR))
    raw, own = data.load(path, normalise="none"), data.load(path)
    np.testing.assert_allclose(own.inputs().mean((0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(own.inputs().std((0, 2, 3)), 1, atol=1e-6)
    slope = own.inputs(test=True).std((0, 2, 3)) / raw.inputs(test=True).std((0, 2, 3))
    np.testing.assert_allclose(slope, 1 / raw.inputs().std((0, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "normalise", "mean", "std"),
    [
        ("mnist", "own", [0.1307], [0.3081]),
        ("mnist", "authors", [0.1307], [0.3081]),
        ("fashion_mnist", "own", [0.2860], [0.3530]),
        ("fashion_mnist", "authors", [0.1307], [0.3081]),
        ("cifar10", "own", [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        ("cifar10", "authors", [0.5] * 3, [0.5] * 3),
        ("cifar100", "own", [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    ],
)
def test_normalisation_maps_mean_to_zero_and_mean_plus_std_to_one(
    name: str,
    normalise: str,
    mean: list[float],
    std: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FL_DATA", str(tmp_path))
    pixels = GREY if len(mean) == 1 else COLOUR
    folder(tmp_path / name, pixels)
    scaled = data.load(name, normalise=normalise)
    raw = pixels[:8].reshape(8, 6, 5, -1) / 255
    np.testing.assert_allclose(
        scaled.inputs().transpose(0, 2, 3, 1), (raw - mean) / std, rtol=1e-5, atol=1e-6
    )


def test_fl_data_comes_before_the_path_and_both_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    folder(here / "mnist", GREY)
    folder(there / "mnist", 255 - GREY)
    (tmp_path / "nowhere").mkdir()
    monkeypatch.chdir(here)
    asked = []

    def hub(path: str, split: str) -> datasets.Dataset:
        asked.append((path, split))
        return table(GREY[:4])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    monkeypatch.delenv("FL_DATA", raising=False)
    from_path = data.load("mnist", normalise="none").inputs()
    monkeypatch.setenv("FL_DATA", str(there))
    from_fl_data = data.load("mnist", normalise="none").inputs()
    assert not asked
    np.testing.assert_allclose(from_path, 1 - from_fl_data, atol=1e-6)
    monkeypatch.chdir(tmp_path / "nowhere")
    monkeypatch.delenv("FL_DATA")
    from_hub = data.load("mnist", normalise="none").inputs()
    assert asked == [("ylecun/mnist", "train"), ("ylecun/mnist", "test")]
    np.testing.assert_array_equal(from_hub, from_path[:4])


def test_cifar100_has_fine_classes_and_by_option_coarse_ones(tmp_path: Path) -> None:
    path = str(cifar100(tmp_path / "own"))
    fine, coarse = data.load(path), data.load(path, label="coarse_label")
    assert (fine.num_classes, coarse.num_classes) == (100, 20)
    assert set(zip(fine.y, coarse.y, strict=True)) == {(4, 0), (50, 0), (99, 19)}
    np.testing.assert_array_equal(fine.x, coarse.x)
    with pytest.raises(ValueError, match="one of colour, got img, fine_label, coarse_label"):
        data.load(path, label="colour")


def test_a_data_set_is_decoded_once(tmp_path: Path) -> None:
    path = str(folder(tmp_path / "own", GREY))
    assert data.load(path) is data.load(path, normalise="own")
    assert data.load("digits") is data.load("digits")
    assert data.load("synthetic", beta=1, seed=2) is data.load("synthetic", seed=2, beta=1)


def test_digits_are_all_of_scikit_learns_a_fifth_of_each_class_for_testing() -> None:
    digits = data.load("digits")
    pixels, labels = load_digits(return_X_y=True)
    rows = np.concatenate([digits.x, digits.test_x]).reshape(-1, 64) * 16
    both = np.column_stack([rows, np.concatenate([digits.y, digits.test_y])])
    expected = np.column_stack([pixels, labels])
    assert sorted(map(tuple, both)) == sorted(map(tuple, expected))
    assert np.abs(np.bincount(digits.test_y) - np.bincount(labels) / 5).max() < 1
    assert digits.x.shape == (1437, 1, 8, 8)
    assert digits.x.dtype == np.float32


def separable(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether a hyperplane separates the rows of a and b: is w.a >= 1, w.b <= -1 feasible?"""
    rows = np.concatenate([-np.insert(a, 0, 1, axis=1), np.insert(b, 0, 1, axis=1)])
    zero = np.zeros(rows.shape[1])
    return bool(linprog(zero, rows, -np.ones(len(rows)), bounds=(None, None)).success)


def test_a_synthetic_device_labels_by_a_linear_model() -> None:
    made = generated.synthetic(dtype="float64")
    assert made.owner is not None
    for device in range(4):
        mine = made.owner == device
        often = np.argsort(np.bincount(made.y[mine]))[-2:]
        first, second = (made.x[mine & (made.y == c)] for c in often)
        assert separable(first, second)
        both = np.random.default_rng(device).permutation(np.concatenate([first, second]))
        assert len(both) > 3 * 61
        assert not separable(*np.array_split(both, 2))  # so many rows rarely are by chance


def test_synthetic_features_vary_as_in_the_paper() -> None:
    made = data.load("synthetic")
    assert made.owner is not None
    centres = np.stack([made.x[made.owner == i].mean(axis=0) for i in range(30)])
    spread = np.mean((made.x - centres[made.owner]) ** 2, axis=0)
    expected = np.arange(1.0, 61) ** -1.2 * (1 - 30 / len(made.x))
    np.testing.assert_allclose(spread, expected, rtol=0.1)  # 6000 rows: 1.8 % a sigma


def test_beta_is_the_deviation_of_the_devices_means() -> None:
    made = data.load("synthetic", beta=10.0, clients=200)
    assert made.owner is not None
    means = [made.x[made.owner == i].mean() for i in range(200)]
    assert np.std(means) == pytest.approx(10, rel=0.2)  # 5 % a sigma


def test_alpha_shifts_all_classes_alike_and_so_changes_no_label() -> None:
    one, other = (generated.synthetic(alpha=a, dtype="float64") for a in (0.0, 5.0))
    assert np.array_equal(one.y, other.y)
    assert np.array_equal(one.x, other.x)


@pytest.mark.parametrize("sizes", ["power-law", "lognormal"])
def test_a_synthetic_device_keeps_a_fifth_for_testing(sizes: str) -> None:
    made = data.load("synthetic", sizes=sizes)
    assert made.owner is not None
    assert made.test_owner is not None
    train, test = np.bincount(made.owner), np.bincount(made.test_owner)
    assert (len(train), len(test)) == (30, 30)
    assert np.abs(test - (train + test) / 5).max() <= 0.5
    assert (train + test).min() >= 50
    assert (train + test).max() > 5 * (train + test).min()
    if sizes == "power-law":
        assert (train + test).sum() == 30 * 250


def test_each_party_of_fcube_has_two_octants_that_the_origin_mirrors() -> None:
    made = data.load("fcube", seed=3)
    assert made.x.shape == (4000, 3)
    assert made.test_x.shape == (1000, 3)
    assert np.abs(made.x).max() <= 1
    first_octants = set()
    for party in range(4):
        for x, y, owner in (
            (made.x, made.y, made.owner),
            (made.test_x, made.test_y, made.test_owner),
        ):
            assert owner is not None
            mine = owner == party
            assert mine.sum() == len(x) / 4
            assert np.bincount(y[mine]).tolist() == [mine.sum() / 2] * 2
            above, below = (np.unique(np.sign(x[mine & (y == c)]), axis=0) for c in (0, 1))
            assert len(above) == 1
            assert np.array_equal(above, -below)
            assert above[0, 0] == 1
            first_octants.add(tuple(above[0]))
    assert len(first_octants) == 4


def test_points_of_fcube_are_spread_evenly_over_their_octants() -> None:
    made = data.load("fcube", samples=10_000)
    assert made.owner is not None
    for party in range(4):
        edges = np.abs(made.x[made.owner == party])
        for coordinate in edges.T:
            counts = np.histogram(coordinate, bins=10, range=(0, 1))[0]
            assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)
        correlations = np.corrcoef(edges.T) - np.eye(3)
        assert np.abs(correlations).max() < 5 / np.sqrt(10_000)


def test_the_seed_decides_the_points_of_fcube_and_party_4_has_the_octants_of_party_0() -> None:
    first, same, other = (generated.fcube(seed=seed) for seed in (1, 1, 2))
    for field in ("x", "y", "owner", "test_x", "test_y", "test_owner"):
        assert np.array_equal(getattr(first, field), getattr(same, field))
    assert not np.array_equal(first.x, other.x)
    assert not np.array_equal(np.abs(first.x[:1000]), np.abs(first.x[1000:2000]))
    more = generated.fcube(clients=8, seed=1)
    assert np.array_equal(more.x[:4000], first.x)
    assert np.array_equal(np.sign(more.x[4000:]), np.sign(first.x))


AUTHORS = {
    1: ("0f014a358d53a149", "9259dc545cdd2387", "b74ddcbb85af0fd1", "01874d1d07c1a9d8"),
    2: ("268bb47da85bf716", "becc792c3e05f765", "e089f5fdb4e2322e", "f4091e36503f7f85"),
    3: ("f425f6a98c037e7a", "ff28897f4a4efea6", "53471e2d31d036a7", "e25a4a49a72b1d5c"),
}
"""sha256 of x, y, test_x and test_y of the FedBC authors' own program, by its seed."""


@pytest.mark.parametrize("seed", AUTHORS)
def test_synthetic_data_of_the_authors_are_theirs_to_the_bit(seed: int) -> None:
    made = data.load("synthetic", sizes="authors", seed=seed)
    arrays = (made.x, made.y, made.test_x, made.test_y)
    found = [hashlib.sha256(np.ascontiguousarray(array)).hexdigest()[:16] for array in arrays]
    assert found == [*AUTHORS[seed]]
    sizes = np.bincount(np.asarray(made.owner)) + np.bincount(np.asarray(made.test_owner))
    if seed == 1:
        assert sizes[:8].tolist() == [1456, 66, 68, 56, 358, 50, 1839, 61]


def test_the_authors_program_draws_at_most_a_thousand_devices() -> None:
    with pytest.raises(ValueError, match='clients must be <= 1000 with sizes="authors", got 1001'):
        data.load("synthetic", sizes="authors", clients=1001)


@pytest.mark.parametrize("name", generated.GENERATED)
def test_the_log_tells_the_memory_of_large_drawn_data_before_they_are_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []

    def log(level: int, text: str, clients: int, drawn: str, gigabytes: float) -> None:
        assert (clients, drawn) == (60, name)
        assert tracemalloc.get_traced_memory()[1] < 1e6
        told.append(gigabytes * 1e9)

    monkeypatch.setattr(generated, "log", log)
    generated.GENERATED[name](clients=60)
    assert told == []
    monkeypatch.setattr(generated, "WARN_BYTES", 0)
    tracemalloc.start()
    try:
        generated.GENERATED[name](clients=60)
        measured = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert told == [pytest.approx(measured, rel=0.2)]


def test_the_seed_decides_the_synthetic_data_and_the_type_only_rounds_them() -> None:
    first, other, double = (
        data.load("synthetic", seed=1),
        data.load("synthetic", seed=2),
        generated.synthetic(seed=1, dtype="float64"),
    )
    assert first.x.dtype == np.float32
    assert double.x.dtype == np.float64
    assert np.array_equal(first.x, double.x.astype(np.float32))
    assert np.array_equal(first.y, double.y)
    assert not np.array_equal(first.x, other.x)
    assert np.array_equal(generated.synthetic(seed=1).x, first.x)


def test_devices_of_uniform_sizes_have_20_to_60_samples() -> None:
    found = generated.synthetic(clients=200, sizes="uniform", seed=1)
    assert found.owner is not None
    assert found.test_owner is not None
    sizes = np.bincount(found.owner) + np.bincount(found.test_owner)
    assert (sizes.min(), sizes.max()) == (20, 60)
    assert abs(sizes.mean() - 40) < 3 * 12 / np.sqrt(200)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in BUILT_IN for option in data.options_of(name)]
)
def test_every_option_of_a_built_in_set_is_checked(name: str, option: str) -> None:
    whole = option in ("clients", "samples", "test_samples", "seed")
    for value in ["abc", True, -1, math.nan, math.inf, 10**400, *([1.5] if whole else [])]:
        with pytest.raises(ValueError, match=f"^{option} must be ") as error:
            data.load(name, **{option: value})
        assert str(error.value).endswith(shown(value))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nist", {}, r"data set 'nist' \(did you mean 'mnist'\?\) is neither .* known: digits, "),
        ("nist", {}, "known: .* cifar100, femnist, shakespeare, ag_news, dbpedia, any folder"),
        ("someone/nist", {}, "data set 'someone/nist' .*: the Hub was asked"),
        ("mnist", {}, "data set 'mnist' .*: the Hub was asked"),
        ("digits", {"normalise": "l2"}, "unknown normalise 'l2'.*; known: own, authors, none"),
        ("digits", {"normalise": "authors"}, "is for mnist, fashion_mnist, cifar10 only"),
        ("digits", {"alpha": 1}, "data set 'digits' has no option 'alpha'"),
        ("synthetic", {"gamma": 1}, r"has no option 'gamma'.*; it has \['alpha', 'beta'"),
        ("synthetic", {"dtype": 3}, "has no option 'dtype'"),
        ("synthetic", {"beta": -1}, "beta must be >= 0, got -1"),
        ("synthetic", {"clients": 0}, "clients must be an integer >= 1, got 0"),
        ("synthetic", {"sizes": "equal"}, r"sizes must be one of \['auto', .*, got 'equal'"),
    ],
)
def test_bad_input_is_refused_with_what_is_known(
    name: str,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid_the_hub(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FL_DATA", raising=False)
    with pytest.raises(ValueError, match=message):
        data.load(name, **options)


def test_a_folder_that_is_no_data_set_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no train\*.parquet in"):
        data.load(str(tmp_path))
    with pytest.raises(ValueError, match=r"needs columns 'image' or 'img', .* got picture, label"):
        data.load(str(folder(tmp_path / "odd", GREY, "picture")))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (-1, "has labels < 0"),
        (None, "lacks labels"),
        (2, None),
        (7.0, None),
        (True, None),
        (0.5, "labels must be whole numbers, got double such as"),
        ("cat", "must be numbers of classes, got texts such as 'cat'; class_encode_column"),
    ],
)
def test_labels_must_be_there(label: Any, message: str | None, tmp_path: Path) -> None:
    first = label if isinstance(label, str) else False if label is True else 0
    made = datasets.Dataset.from_dict({"image": encoded(GREY[:2]), "label": [first, label]})
    made = made.cast_column("image", datasets.Image())
    for split in ("train", "test"):
        made.to_parquet(tmp_path / f"{split}.parquet")
    if message is None:
        assert data.load(str(tmp_path)).y.tolist() == [0, label]
        return
    with pytest.raises(ValueError, match=message):
        data.load(str(tmp_path))


def test_labels_may_be_categories_and_a_split_a_folder_of_files_of_row_groups(
    tmp_path: Path,
) -> None:
    labels = pa.array([3, 1, 3, 0]).dictionary_encode()
    table = pa.table({"image": encoded(GREY[:4]), "label": labels})
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").mkdir()
        for number in (0, 1):
            part = tmp_path / f"{split}.parquet/part-{number}.parquet"
            pa.parquet.write_table(table, part, row_group_size=3)
    found = data.load(str(tmp_path))
    assert found.y.tolist() == [3, 1, 3, 0] * 2
    assert found.inputs().shape == (8, 1, 6, 5)


def test_images_of_several_sizes_are_refused_before_the_run_and_by_whoever_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"image": encoded(GREY[:3]) + encoded(GREY[3:4, :5]), "label": LABELS[:4]}
    made = datasets.Dataset.from_dict(
        rows,
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    (tmp_path / "mnist").mkdir()
    for split in ("train", "test"):
        made.to_parquet(tmp_path / "mnist" / f"{split}.parquet")
    monkeypatch.setenv("FL_DATA", str(tmp_path))
    found = data.load("mnist")
    config = RunConfig.parse({"dataset": "mnist", "clients": 2, "model": "logistic"})
    reads = (found.check, found.inputs, lambda: found.inputs(slice(2, 4)), lambda: prepare(config))
    for read in reads:
        with pytest.raises(ValueError, match=r"image 0 is \(5, 6\), image 3 \(5, 5\)"):
            read()
    assert found.inputs(slice(3)).shape == (3, 1, 6, 5)
