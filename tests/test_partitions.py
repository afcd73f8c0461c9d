"""Laws of partitions: which rows a client may get, how many, of which classes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_strategies.core.schedules import shown
from simulations import partitions
from simulations.figures import draw_partition
from simulations.partitioners import applied
from simulations.partitions import KINDS, describe, partition, power_law, train_test

# Crooked on purpose: unequal classes, in no order, sizes that nothing divides.
LABELS = np.random.default_rng(5).choice(7, 1433, p=np.arange(1, 8) / 28)
LABELS.setflags(write=False)
OWNER = np.random.default_rng(6).permutation(1433) % 20
TABLE: list[tuple[str, dict[str, Any]]] = [
    ("iid", {}),
    ("shards", {"shards_per_client": 3}),
    ("dirichlet", {"alpha": 0.3}),
    ("power-law", {"exponent": 1.2}),
    ("power-law", {"exponent": 1.2, "classes_per_client": 2}),
    ("diversity", {"labels_per_client": 7}),
    ("imbalanced", {}),
    ("natural", {"owner": OWNER}),
]
kinds = pytest.mark.parametrize(("kind", "options"), TABLE)


def same(parts: list[Any], others: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(parts, others, strict=True))


@kinds
def test_every_row_has_one_client_at_most(kind: str, options: dict[str, Any]) -> None:
    parts = partition(kind, LABELS, 20, seed=1, **options)
    rows = np.concatenate(parts)
    assert len(parts) == 20
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    # Only equal shards leave rows over, fewer than there are shards.
    left = len(LABELS) - len(np.unique(rows))
    assert len(np.unique(rows)) == len(rows)
    assert left == (len(LABELS) % 60 if kind == "shards" else 0)


@kinds
def test_the_seed_decides_the_partition(kind: str, options: dict[str, Any]) -> None:
    first, again, other = (partition(kind, LABELS, 20, seed=s, **options) for s in (1, 1, 2))
    assert same(first, again)
    assert same(first, other) == (kind == "natural")


@pytest.mark.parametrize(
    ("kind", "options"),
    [row for row in TABLE if row[0] not in ("imbalanced", "natural")],  # those fix the number
)
def test_one_client_can_hold_the_data(kind: str, options: dict[str, Any]) -> None:
    (part,) = partition(kind, LABELS, 1, seed=1, **options)
    assert len(part) == len(LABELS) - len(LABELS) % options.get("shards_per_client", 1)


@pytest.mark.parametrize(("clients", "labels"), [(100, 1), (100, 3), (100, 6), (30, 7), (7, 3)])
def test_clients_of_a_diversity_hold_so_many_labels_and_classes_go_round(
    clients: int, labels: int
) -> None:
    equal = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    counts = describe(
        partition("diversity", equal, clients, seed=3, labels_per_client=labels), equal
    )
    assert np.all((counts > 0).sum(axis=1) == labels)
    takers = (counts > 0).sum(axis=0)
    assert takers.max() - takers.min() <= 1
    for c in range(10):
        shares = counts[counts[:, c] > 0, c]
        assert shares.sum() == 600
        assert shares.max() - shares.min() <= 1
    if clients * labels % 10 == 0:
        assert np.ptp(counts.sum(axis=1)) <= labels


def test_a_diversity_of_more_labels_than_there_are_is_refused() -> None:
    for labels in (0, 8):
        with pytest.raises(
            ValueError, match=f"labels_per_client must be an integer from 1 to 7 .*, got {labels}"
        ):
            partition("diversity", LABELS, 20, seed=1, labels_per_client=labels)


def test_iid_sizes_differ_by_at_most_one() -> None:
    sizes = [len(part) for part in partition("iid", LABELS, 20, seed=1)]
    assert max(sizes) - min(sizes) == 1


def test_shards_within_a_class_give_a_client_as_many_classes_as_shards_at_most() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    counts = describe(partition("shards", labels, 30, seed=3), labels)
    assert np.all(counts.sum(axis=1) == 20)
    assert np.all((counts > 0).sum(axis=1) <= 2)
    assert np.all(counts % 10 == 0)  # whole shards of ten


def test_a_shard_across_a_boundary_adds_one_class() -> None:
    counts = describe(partition("shards", LABELS, 20, seed=3, shards_per_client=2), LABELS)
    classes = (counts > 0).sum(axis=1)
    assert classes.max() <= 4
    assert (classes > 2).sum() <= 6  # there are six boundaries between seven classes


@pytest.mark.slow
def test_dirichlet_shares_have_the_variance_of_their_distribution() -> None:
    clients, classes, alpha = 5, 200, 0.7
    labels = np.repeat(np.arange(classes), 500)
    counts = describe(partition("dirichlet", labels, clients, seed=1, alpha=alpha), labels)
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    assert np.var(counts / 500) == pytest.approx(variance, rel=0.2)  # 1000 shares: 5 % a sigma


def test_a_large_alpha_gives_every_client_the_common_mixture() -> None:
    counts = describe(partition("dirichlet", LABELS, 4, seed=1, alpha=1e7), LABELS)
    assert np.abs(counts - np.bincount(LABELS) / 4).max() <= 1.5  # a cut rounds at either end


def test_clients_that_draw_their_own_mixture_hold_equally_many_rows_of_their_own() -> None:
    for alpha in (1e-4, 0.3, 1e4):
        parts = partition("dirichlet", LABELS, 20, seed=1, alpha=alpha, rows_per_client=71)
        assert [len(part) for part in parts] == [71] * 20
        assert len(np.unique(np.concatenate(parts))) == 20 * 71


def test_a_clients_own_mixture_has_the_moments_of_a_dirichlet_distribution() -> None:
    """Of rows counted by a mixture that was drawn: as Dirichlet-multinomial counts have them."""
    clients, classes, rows = 400, 5, 50
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), clients * rows))
    mean = 1 / classes
    for alpha in (0.05, 0.4, 3.0):
        parts = partition("dirichlet", labels, clients, seed=2, alpha=alpha, rows_per_client=rows)
        share = describe(parts, labels) / rows
        total = classes * alpha
        variance = mean * (1 - mean) / rows * (rows + total) / (1 + total)
        assert share.mean(axis=0) == pytest.approx(mean, abs=4 * (variance / clients) ** 0.5)
        assert np.var(share) == pytest.approx(variance, rel=0.15)


def test_classes_that_run_out_leave_the_others_in_their_proportions() -> None:
    """Two clients share out a rare class; of the others each takes by its nearly even mixture."""
    labels = np.repeat([0, 1, 2], [6, 3000, 3000])
    parts = partition("dirichlet", labels, 2, seed=1, alpha=1e6, rows_per_client=1500)
    counts = describe(parts, labels)
    assert counts[:, 0].tolist() == [6, 0]
    assert np.abs(counts[:, 1] - counts[:, 2]).max() < 5 * 1500**0.5


def test_more_rows_than_there_are_are_refused() -> None:
    for rows in (0, 72):
        with pytest.raises(
            ValueError,
            match=rf"rows_per_client must be an integer from 1 to 71 \(1433 .*, got {rows}",
        ):
            partition("dirichlet", LABELS, 20, seed=1, rows_per_client=rows)


@pytest.mark.parametrize(
    ("total", "exponent", "smallest", "largest"),
    [  # FedBC, Table 5: MNIST (70,000) and CIFAR-10 (60,000) over 20 devices
        (70_000, 1.1, 1222, 7486),
        (70_000, 1.2, 374, 12057),
        (70_000, 1.3, 110, 16444),
        (70_000, 1.5, 10, 23410),
        (60_000, 1.1, 1047, 6433),
        (60_000, 1.2, 320, 10398),
        (60_000, 1.3, 94, 14032),
        (60_000, 1.5, 9, 20067),
    ],
)
def test_power_law_sizes_are_those_of_fedbc(
    total: int, exponent: float, smallest: int, largest: int
) -> None:
    sizes = power_law(total, 20, exponent)
    assert sizes.sum() == total
    assert sizes.max() == pytest.approx(largest, rel=0.02)
    assert sizes.min() == pytest.approx(smallest, abs=2, rel=0.01)


# FedBC, Table 4, CIFAR-10: how many of the 20 devices hold how many classes, by C and exponent.
TABLE_4 = {
    (1, 1.1): {3: 2, 2: 5, 1: 13},
    (1, 1.5): {6: 1, 3: 1, 2: 2, 1: 16},
    (2, 1.1): {5: 1, 4: 1, 3: 3, 2: 15},
    (2, 1.5): {6: 1, 4: 1, 3: 1, 2: 17},
    (3, 1.1): {5: 2, 4: 1, 3: 17},
    (3, 1.5): {9: 1, 4: 1, 3: 18},
}


@pytest.mark.parametrize(("wanted", "exponent"), TABLE_4)
def test_power_law_clients_hold_classes_as_in_fedbc(wanted: int, exponent: float) -> None:
    """Draws like the paper's: C classes on most devices, never fewer, more on the largest ones."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))
    sizes = power_law(60_000, 20, exponent)
    paper = np.repeat(*map(list, zip(*TABLE_4[wanted, exponent].items(), strict=True)))
    draws = []
    for seed in range(10):
        parts = partition(
            "power-law", labels, 20, seed=seed, exponent=exponent, classes_per_client=wanted
        )
        assert [len(part) for part in parts] == sizes.tolist()
        classes = (describe(parts, labels) > 0).sum(axis=1)
        assert classes.min() == np.median(classes) == wanted
        assert np.all(classes[:3] >= np.ceil(sizes[:3] / 6000))
        draws.append(np.sort(classes)[::-1])
    mean = np.mean(draws, axis=0)
    assert np.abs(mean - paper).max() <= (3 if exponent == 1.5 else 1.5)
    assert mean.sum() == pytest.approx(paper.sum(), rel=0.08)


@pytest.mark.parametrize(
    ("samples", "mean", "stdev"), [(60_000, 300, 171.03), (50_000, 250, 142.52)]
)
def test_imbalanced_groups_are_those_of_fedadmm(samples: int, mean: int, stdev: float) -> None:
    labels = np.repeat(np.arange(10), samples // 10)
    parts = partition("imbalanced", labels, 200, seed=4, shards=10_000)
    sizes = np.array([len(part) for part in parts])
    shard = samples // 10_000
    assert sizes.mean() == mean  # Table VI
    assert np.std(sizes, ddof=1) == pytest.approx(stdev, abs=0.01)
    assert np.array_equal(sizes[:198], shard * (np.arange(198) // 2 + 1))
    assert np.array_equal(sizes[198:], [50 * shard, 50 * shard])
    assert np.all(describe(parts, labels) % shard == 0)  # each shard is of one class
    assert same(parts, partition("imbalanced", labels, 200, seed=4))


def test_natural_clients_are_those_of_flower_datasets() -> None:
    from flwr_datasets.partitioner import NaturalIdPartitioner

    owner = np.random.default_rng(0).permutation(np.arange(200) % 13 * 7 + 3)
    labels = np.arange(200)
    expected = applied(NaturalIdPartitioner("label"), owner, 13, labels)
    found = partition("natural", labels, 13, seed=1, owner=owner)
    assert [rows.tolist() for rows in found] == [np.sort(rows).tolist() for rows in expected]


def test_natural_clients_hold_their_own_rows() -> None:
    for client, rows in enumerate(partition("natural", LABELS, 20, seed=1, owner=OWNER)):
        assert np.array_equal(rows, np.flatnonzero(client == OWNER))


def test_describe_counts_rows_by_client_and_class() -> None:
    parts = partition("dirichlet", LABELS, 20, seed=1, alpha=0.3)
    counts = describe(parts, LABELS)
    expected = [[sum(LABELS[row] == c for row in part) for c in range(7)] for part in parts]
    assert np.array_equal(counts, expected)


@pytest.mark.parametrize("clients", [1, 700])
def test_draw_writes_a_picture_of_bounded_size(clients: int, tmp_path: Path) -> None:
    path = tmp_path / "partition.png"
    draw_partition(describe(partition("iid", LABELS, clients, seed=1), LABELS), path)
    with Image.open(path) as image:
        assert image.width == 960
        assert 240 <= image.height <= 1440
    words = re.findall(r"<!-- (.*?) -->", path.with_suffix(".svg").read_text())
    assert ("Samples of each class at each client, 100 of 700 clients" in words) == (clients > 100)


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.99])
def test_train_and_test_are_a_partition_of_each_client(fraction: float) -> None:
    parts = [np.arange(5, 6), np.arange(10, 12), np.arange(100, 200, 2)]
    for rows, (train, test) in zip(parts, train_test(parts, fraction, 3), strict=True):
        assert np.array_equal(np.sort(np.concatenate([train, test])), rows)
        assert len(train) >= 1
        assert abs(len(test) - fraction * len(rows)) <= 1
        assert np.all(np.diff(train) > 0)
        assert np.all(np.diff(test) > 0)


def test_the_test_rows_of_a_client_depend_on_the_seed_alone() -> None:
    parts = partition("iid", LABELS, 20, seed=1)
    first, again, other = (train_test(parts, 0.2, seed)[0][1] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(first, train_test(parts[:1], 0.2, 1)[0][1])


@pytest.mark.parametrize(
    ("kind", "clients", "options", "message"),
    [
        ("round", 20, {}, "unknown partition 'round'.*; known: iid, shards, dirichlet"),
        ("iid", 20, {"alpha": 1}, "partition 'iid' has no option 'alpha'"),
        ("iid", 0, {}, "clients must be from 1 to 1433 .*, got 0"),
        ("iid", 1434, {}, "clients must be from 1 to 1433 .*, got 1434"),
        (
            "shards",
            20,
            {"shards_per_client": 0},
            "shards_per_client must be an integer from 1 to 71 .*, got 0",
        ),
        (
            "shards",
            717,
            {},
            r"shards_per_client must be .* 1 to 1 \(1433 samples over 717 .*, got 2",
        ),
        ("dirichlet", 20, {"alpha": 0}, "alpha must be > 0, got 0"),
        ("dirichlet", 20, {"alpha": float("nan")}, "alpha must be a finite number > 0, got nan"),
        ("dirichlet", 99, {"alpha": 0.001}, r"client \d+ is left without training samples"),
        ("power-law", 20, {"exponent": 0.9}, "exponent must be >= 1, got 0.9"),
        ("power-law", 99, {"exponent": 2}, r"client 1\d is left without training samples"),
        (
            "power-law",
            20,
            {"classes_per_client": 0},
            "classes_per_client must be .* 1 to 7 .*, got 0",
        ),
        ("imbalanced", 21, {}, "clients must be even .*, got 21"),
        ("imbalanced", 20, {"shards": 91}, "shards must be .* from 92 to 1433 .*, got 91"),
        (
            "imbalanced",
            20,
            {"shards": 1434},
            "shards must be an integer from 92 to 1433 .*, got 1434",
        ),
        ("imbalanced", 98, {}, r"98 clients 2354 shards or more, .* got 1433 samples"),
        ("natural", 20, {}, "partition 'natural' needs owner"),
        ("natural", 19, {"owner": OWNER}, "clients must be 20 .*, got 19"),
        ("natural", 20, {"owner": OWNER[1:]}, "owner must have 1433 entries .*, got 1432"),
    ],
)
def test_bad_input_is_refused_with_its_bound_and_value(
    kind: str, clients: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        partition(kind, LABELS, clients, seed=1, **options)


@pytest.mark.parametrize(
    ("kind", "option"), [(kind, option) for kind in KINDS for option in partitions.options_of(kind)]
)
def test_every_option_is_a_number_in_its_range(kind: str, option: str) -> None:
    whole = option not in ("alpha", "exponent")
    wrong = ["abc", True, {0: 1.0}, -1, 0, math.nan, math.inf, 10**400]
    for value in [*wrong, *([1.5, 10**6] if whole else [])]:
        kind_of = "an integer from" if whole else "(a finite number )?>=?"
        with pytest.raises(ValueError, match=f"^{option} must be {kind_of} .*, got ") as error:
            partition(kind, LABELS, 20, seed=1, **{option: value})
        assert str(error.value).endswith(shown(value))


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_that_leaves_nothing_to_train_on_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\)"):
        train_test([np.arange(3)], fraction, 1)


def of_flwr(name: str, clients: int = 20, **options: Any) -> list[Any]:
    return partition(name, LABELS, clients, seed=1, owner=OWNER, **options)


def test_partitioners_of_flwr_datasets_go_by_the_name_of_their_class() -> None:
    pairs = of_flwr("GroupedNaturalIdPartitioner", 10, group_size=2)
    assert [len(np.unique(OWNER[rows])) for rows in pairs] == [2] * 10
    two = of_flwr("PathologicalPartitioner", num_classes_per_partition=2)
    assert {len(np.unique(LABELS[rows])) for rows in two} == {2}
    mixed, other = (partition("DirichletPartitioner", LABELS, 9, seed=s, alpha=1.0) for s in (1, 2))
    assert not same(mixed, other)
    assert same(mixed, of_flwr("DirichletPartitioner", 9, alpha=1.0))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("IidPartitioner", (13,)),
        ("SizePartitioner", ([33, *[100] * 14],)),
        ("ShardPartitioner", (10, "label", 3)),
        ("DirichletPartitioner", (9, "label", 0.3)),
        ("PathologicalPartitioner", (20, "label", 2)),
        ("NaturalIdPartitioner", ("label",)),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of pyarrow, as datasets sorts
def test_clients_have_the_samples_that_a_partitioner_loads(name: str, options: Any) -> None:
    import datasets
    from flwr_datasets import partitioner

    rows = np.random.default_rng(7).permutation(len(LABELS))
    one, other = (getattr(partitioner, name)(*options) for _ in range(2))
    one.dataset = datasets.Dataset.from_dict({"row": rows, "label": LABELS[rows]})
    loaded = [one.load_partition(client)["row"] for client in range(one.num_partitions)]
    assert same(applied(other, LABELS, len(loaded), rows), [np.array(part) for part in loaded])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("DirichletPartitoner", {}, "no partitioner .*did you mean 'DirichletPartitioner'"),
        ("DirichletPartitioner", {}, "partition 'DirichletPartitioner' needs alpha"),
        ("DirichletPartitioner", {"alpa": 1.0}, "has no option 'alpa' .did you mean 'alpha'"),
        ("DirichletPartitioner", {"alpha": 1.0, "partition_by": "x"}, r"\['label', 'owner'\], got"),
        ("GroupedNaturalIdPartitioner", {"group_size": 3}, r"clients must be 7 .*, got 20"),
        ("VerticalEvenPartitioner", {}, "divides columns over clients"),
        ("GroupedNaturalIdPartitioner", {"group_size": 0}, "with group_size=0: ZeroDivisionError"),
        ("GroupedNaturalIdPartitioner", {"group_size": 2.5}, "must be an integer, got 2.5"),
        ("DirichletPartitioner", {"alpha": 1.0, "shuffle": "x"}, "must be true or false, got 'x'"),
        ("DirichletPartitioner", {"alpha": -1.0}, r"with alpha=-1.0: .*greater than zero"),
    ],
)
def test_a_partitioner_of_flwr_datasets_is_refused_with_the_reason(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        of_flwr(name, **options)


def test_natural_ids_need_samples_that_have_them() -> None:
    with pytest.raises(ValueError, match="needs the samples' client ids, and these samples have"):
        partition("GroupedNaturalIdPartitioner", LABELS, 20, seed=1, group_size=2)


def test_numbers_of_samples_are_drawn_from_a_range() -> None:
    sizes = [
        list(map(len, partition("dirichlet", LABELS, 14, seed=s, rows_per_client="50-99")))
        for s in (1, 1, 2)
    ]
    assert sizes[0] == sizes[1] != sizes[2]
    assert 50 <= min(sizes[0]) < max(sizes[0]) <= 99
    with pytest.raises(ValueError, match=r"rows_per_client must be .* from 1 to 71 .*, got 72"):
        partition("dirichlet", LABELS, 20, seed=1, rows_per_client="50-72")
    with pytest.raises(ValueError, match="rows_per_client must be a range, got '9-5'"):
        partition("dirichlet", LABELS, 20, seed=1, rows_per_client="9-5")
