"""Laws of data sets with natural clients: characters, who owns a row, which rows are for testing.

Mutants that these tests caught: the alphabet backwards, windows read down the columns, texts of
lengths that only differ one way, an empty text passing, a strange character passing; a quarter or a
rounded-up fifth held out, one too many, the first rows instead of the last, windows at random,
images by order, by an unseeded draw, training and test rows exchanged; the owners dropped kept
instead, drawn anew for each number, their rows kept in one split, bounds of ``owners`` off by one
or counting writers who only test, half an owner; classes counted after owners were dropped,
Shakespeare's classes or vocabulary forgotten; a missing split without clients passing, with clients
refused (in a folder, on the Hub); each option passing where it means nothing.
"""

from __future__ import annotations

import string
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from tiny_data import ROLES, TEXT, WRITERS, cifar100, femnist, pixels, shakespeare, windows, write

from simulations import data
from simulations.partitions import partition
from simulations.text import CHARACTERS, characters


def read(folder: Path, split: str, *columns: str) -> list[list[str]]:
    (file,) = (folder / "data").glob(f"{split}-*.parquet")
    table = pyarrow.parquet.read_table(file, columns=list(columns))
    return [table[column].to_pylist() for column in columns]


def written(x: np.ndarray) -> list[str]:
    return ["".join(CHARACTERS[i] for i in row) for row in x]


def images(x: np.ndarray) -> list[int]:
    """Return the number of each image in ``pixels(48, 28, 28)``."""
    known = {image.tobytes(): i for i, image in enumerate(pixels(48, 28, 28))}
    return [known[image.tobytes()] for image in np.asarray(x)[:, 0]]


def test_the_alphabet_of_shakespeare_is_leafs() -> None:
    assert list(CHARACTERS) == sorted(CHARACTERS)
    assert len(CHARACTERS) == 80
    letters = string.ascii_letters + string.digits
    assert set(CHARACTERS) == {*letters, *"\n !\"&'(),-.:;>?[]}"}


def test_characters_are_their_places_in_the_alphabet() -> None:
    assert characters(["}\n", "aZ"]).tolist() == [
        [CHARACTERS.find(c) for c in t] for t in ("}\n", "aZ")
    ]
    assert characters([CHARACTERS]).tolist() == [list(range(80))]
    assert characters([CHARACTERS]).dtype == np.uint8


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ab", "c$", "é "], r"\['\$', 'é'\] are not among LEAF's 80 characters"),
        (["ab", "c"], "equally long: 'ab' and 'c' are not"),
        (["ab", ""], "equally long: 'ab' and '' are not"),
    ],
)
def test_texts_that_have_no_numbers_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        characters(texts)


def test_windows_of_a_role_come_back_with_the_next_character(tmp_path: Path) -> None:
    found = data.load(str(shakespeare(tmp_path / "own")))
    assert (found.x.dtype, found.y.dtype) == (np.uint8, np.int64)
    assert (found.num_classes, found.vocabulary) == (80, 80)
    assert found.owner is not None
    assert found.test_owner is not None
    rows = [*zip(found.owner, written(found.x), found.y, strict=True)]
    tests = [*zip(found.test_owner, written(found.test_x), found.test_y, strict=True)]
    for role, n in enumerate((20, 10)):
        x, y = windows(3 * len(ROLES[role]), n)
        expected = [(role, *row) for row in zip(x, map(CHARACTERS.find, y), strict=True)]
        own, own_tests = ([r for r in part if r[0] == role] for part in (rows, tests))
        assert sorted(own + own_tests) == sorted(expected)
        assert len(own_tests) == n // 5


def test_the_last_windows_are_for_testing_and_what_they_ask_was_never_read(tmp_path: Path) -> None:
    x, y = windows(0, 23)
    columns = {"character_id": ["A"] * 23, "x": x, "y": y}
    found = data.load(str(write(tmp_path / "own", columns, None)))
    assert written(found.test_x) == x[-4:]
    read_last = len(found.x) - 1 + 80  # the place in TEXT of the last character in a training row
    asked_first = len(found.x) + 80
    assert TEXT[asked_first] == CHARACTERS[found.test_y[0]]
    assert asked_first > read_last


def test_a_fifth_of_each_writers_images_is_for_testing_always_the_same(tmp_path: Path) -> None:
    found = data.load(str(femnist(tmp_path / "one")), normalise="none")
    again = data.load(str(femnist(tmp_path / "two")), normalise="none")
    np.testing.assert_array_equal(found.test_x, again.test_x)
    train, test = images(found.x), images(found.test_x)
    assert sorted(train + test) == list(range(48))
    assert train == sorted(train)  # the file's order
    assert found.owner is not None
    assert found.test_owner is not None
    names = [WRITERS[0] if i % 2 else WRITERS[1 + i % 3 // 2] for i in range(48)]
    owners = {}
    for i, owner in zip(train + test, [*found.owner, *found.test_owner], strict=True):
        owners.setdefault(owner, set()).add(names[i])
    assert sorted(map(sorted, owners.values())) == [[name] for name in sorted(WRITERS)]
    assert (
        np.bincount(found.test_owner).tolist()
        == ((np.bincount(found.owner) + np.bincount(found.test_owner)) // 5).tolist()
    )
    odd = [i for i in range(48) if i % 2]
    assert [i for i in test if i % 2] != odd[-len([i for i in test if i % 2]) :]
    assert found.y.tolist() == [[2, 61, 30][i % 3] for i in train]
    assert (found.num_classes, found.vocabulary) == (62, None)


def test_a_test_split_that_is_there_is_used(tmp_path: Path) -> None:
    found = data.load(str(femnist(tmp_path / "own", train=40)), normalise="none")
    assert (images(found.x), images(found.test_x)) == (list(range(40)), list(range(40, 48)))
    assert found.owner is not None
    assert found.test_owner is not None
    both = [*found.owner, *found.test_owner]
    assert [both[i] == both[1] for i in range(48)] == [i % 2 == 1 for i in range(48)]


@pytest.mark.parametrize("train", [None, 40])
def test_fewer_owners_are_some_of_more_with_the_rows_they_had(
    train: int | None, tmp_path: Path
) -> None:
    path = str(femnist(tmp_path / "own", train=train))
    sets = [data.load(path, normalise="none", **o) for o in ({"owners": 1}, {"owners": 2}, {})]
    kept = []
    for found in sets:
        assert found.owner is not None
        assert found.test_owner is not None
        assert found.num_classes == 62
        kept.append(set(found.owner))
        whole = sets[-1]
        for rows, owner, all_rows, all_owner in (
            (found.x, found.owner, whole.x, whole.owner),
            (found.test_x, found.test_owner, whole.test_x, whole.test_owner),
        ):
            assert images(rows) == images(np.asarray(all_rows)[np.isin(all_owner, list(kept[-1]))])
            assert set(owner) <= kept[-1]
    assert list(map(len, kept)) == [1, 2, 3]
    assert kept[0] < kept[1] < kept[2]


def test_owners_are_drawn_once_for_all_numbers(tmp_path: Path) -> None:
    x, y = windows(0, 80)
    columns = {"character_id": [f"role {7 * i % 8}" for i in range(80)], "x": x, "y": y}
    path = str(write(tmp_path / "own", columns, None))
    kept = [set(data.load(path, owners=k).owner) for k in range(1, 9)]
    assert list(map(len, kept)) == list(range(1, 9))
    assert all(few < more for few, more in pairwise(kept))
    assert [max(few) for few in kept] != list(range(8))  # not just the first in the file


def test_test_rows_of_writers_who_do_not_train_stay(tmp_path: Path) -> None:
    images = femnist(tmp_path / "a", 12)
    table = pyarrow.parquet.read_table(images / "data/train-00000-of-00001.parquet")
    writers = ["a", "b"] * 4 + ["c"] * 4
    table = table.set_column(1, "writer_id", [writers])
    pyarrow.parquet.write_table(table[:8], tmp_path / "train.parquet")
    pyarrow.parquet.write_table(table[8:], tmp_path / "test.parquet")
    found = data.load(str(tmp_path), owners=1)
    assert (len(found.x), len(found.test_x)) == (4, 4)
    assert not set(found.owner) & set(found.test_owner)


def test_a_set_on_the_hub_without_a_test_split_is_split_by_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = data.load(str(femnist(tmp_path / "own")))
    one = datasets.load_dataset("parquet", data_dir=str(tmp_path / "own/data"), split="train")

    def hub(path: str, split: str) -> datasets.Dataset:
        if split != "train":
            raise ValueError(f"Unknown split {split!r}. Should be one of ['train'].")
        return one if path == "flwrlabs/femnist" else one.remove_columns("writer_id")

    monkeypatch.setattr(datasets, "load_dataset", hub)
    monkeypatch.delenv("FL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    found = data.load("femnist")
    np.testing.assert_array_equal(found.x, local.x)
    np.testing.assert_array_equal(found.test_owner, local.test_owner)
    with pytest.raises(ValueError, match=r"'some/one' .* Unknown split 'test'"):
        data.load("some/one")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"owners": 0}, r"owners must be an integer from 1 to 3 \(natural clients\), got 0"),
        ({"owners": 4}, r"owners must be an integer from 1 to 3 \(natural clients\), got 4"),
        ({"owners": 1.5}, "owners must be an integer from 1 to 3 .*, got 1.5"),
        ({"tokens": 9}, r"no option 'tokens'; it has \['label', 'owners'\]$"),
        ({"tokenizer": "x"}, "no option 'tokenizer'"),
        ({"foo": 1}, r"no option 'foo'; it has \['label', 'owners'\]$"),
        ({"label": "writer"}, "one of writer, got image, writer_id, character"),
        ({"label": 0}, "one of 0, got image, writer_id, character"),
        ({"owners": True}, "owners must be .*, got True"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        data.load(str(femnist(tmp_path / "own")), **options)


def test_owners_need_natural_clients_and_so_does_a_missing_test_split(tmp_path: Path) -> None:
    path = cifar100(tmp_path / "own")
    with pytest.raises(ValueError, match=r"no option 'owners'; it has \['label'\]$"):
        data.load(str(path), owners=2)
    (path / "data/test-00000-of-00001.parquet").unlink()
    with pytest.raises(ValueError, match=r"no test\*.parquet in"):
        data.load(str(path))


@pytest.mark.slow
def test_the_writers_of_mnist_are_the_clients_of_its_natural_partition(
    real_datasets: Path,
) -> None:
    folder = real_datasets / "mnist_writers"
    found = data.load(str(folder))
    ((writers,), (tests,)) = (read(folder, split, "writer_id") for split in ("train", "test"))
    assert (found.x.shape, found.test_x.shape) == ((11_339, 1, 28, 28), (2_006, 1, 28, 28))
    assert found.num_classes == 10
    assert found.owner is not None
    parts = partition("natural", found.y, 100, seed=1, owner=found.owner)
    held = [{writers[row] for row in part} for part in parts]
    assert all(len(own) == 1 for own in held)
    assert set().union(*held) == set(writers)
    assert sum(map(len, parts)) == 11_339
    assert not set(found.owner) & set(found.test_owner)  # other writers
    assert len(set(found.test_owner)) == len(set(tests)) == 55


@pytest.mark.slow
def test_the_roles_of_shakespeare_are_138_clients_in_a_byte_a_character(
    real_datasets: Path,
) -> None:
    folder = real_datasets / "shakespeare"
    found = data.load(str(folder))
    roles, x, y = read(folder, "train", "character_id", "x", "y")
    assert (found.x.shape, found.test_x.shape) == ((466_014, 80), (114_486, 80))
    assert found.x.nbytes == 466_014 * 80
    rows = np.random.default_rng(0).integers(0, len(x), 50)
    assert written(found.x[rows]) == [x[row] for row in rows]
    assert [CHARACTERS[c] for c in found.y[rows]] == [y[row] for row in rows]
    assert len(set(found.owner)) == len(set(found.test_owner)) == len(set(roles)) == 138
    assert len({*zip(roles, found.owner.tolist(), strict=True)}) == 138
