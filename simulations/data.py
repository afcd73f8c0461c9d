"""Data sets as arrays, indexed per client.

digits, synthetic, fedpd-weak, fedpd-strong, fcube
               see :mod:`simulations.generated`; they need no network
mnist          ylecun/mnist, [1, 28, 28]
fashion_mnist  zalando-datasets/fashion_mnist, [1, 28, 28]
cifar10        uoft-cs/cifar10, [3, 32, 32]
cifar100       uoft-cs/cifar100, [3, 32, 32], the 100 fine classes; ``label=coarse_label``: the 20
femnist        flwrlabs/femnist, [1, 28, 28], 62 characters, owned by their writers
shakespeare    flwrlabs/shakespeare, 80 characters [80] and the next one, owned by their roles
ag_news, dbpedia
               fancyzhx/ag_news, fancyzhx/dbpedia_14: tokens of a text, or of title and content
any other      a folder or Hub name with the columns below; for example ``mnist_writers``, digits of
               100 writers in FEMNIST's schema

Inputs are in the column ``image`` or ``img`` (images), ``x`` (characters, the next one in ``y``),
``text``, or ``title`` and ``content``; classes 0, 1, ... in ``label``, ``fine_label`` or
``character``; natural clients, if any, in ``writer_id`` or ``character_id``. Splits are ``train``
and ``test``. If there is no ``test`` but there are natural clients (FEMNIST, Shakespeare on the
Hub), a fifth of each client's samples, rounded down and always the same, is for testing: images
drawn at random; for characters the last samples in the file's order (so no training sample holds a
character that is to be predicted in a test). Options (``dataset-params``) for data that have these
columns:

label          the column of the classes
owners         keep so many natural clients, drawn once: those of ``owners=10`` are among those of
               ``owners=20``. Test samples of clients that do not train stay
tokenizer      folder or Hub name of a tokenizer of ``transformers`` (DistilBERT's). Its token for
               padding must be the one of the model's configuration
tokens         the length of a text in tokens (128): longer texts are cut, shorter texts padded

Characters and tokens are kept as the smallest integers that hold them (37 MB for 466,014 windows of
80 characters), and reach a model as int64, one mini-batch at a time.

A name is looked up in the folder that the environment variable ``FL_DATA`` names, then as a path,
then on the Hugging Face Hub. Folders hold parquet files named by split, as on the Hub
(``data/train-00000-of-00001.parquet``); they are read without network and without a copy on disk.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import getfullargspec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from fl_strategies.core.randomness import stream
from fl_strategies.core.schedules import require, shown
from fl_strategies.core.spelling import unknown, unknown_of
from simulations import hub, text
from simulations.generated import BUILT_IN, Dataset, Inputs, Ints
from simulations.images import PIXELS, Images, Scale, measured, scaled
from simulations.own import own
from simulations.partitions import check_count

HUB = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "femnist": "flwrlabs/femnist",
    "shakespeare": "flwrlabs/shakespeare",
    "ag_news": "fancyzhx/ag_news",
    "dbpedia": "fancyzhx/dbpedia_14",
}
INPUTS = (("image",), ("img",), ("x",), ("text",), ("title", "content"))
CLASSES = ("label", "fine_label", "character", "y")
NATURAL = ("writer_id", "character_id")
"""Column names; the first one that exists counts."""
NORMALISE = ("own", "authors", "none")
COMPUTED: dict[str, Scale] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
AUTHORS: dict[str, Scale] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.5,) * 3, (0.5,) * 3),
}

Given: TypeAlias = tuple[tuple[str, type, Any], ...]
"""Options as a cache tells them apart: True is no 1."""


def load(name: str, *, normalise: str = "own", **options: Any) -> Dataset:
    """Return data set ``name``; further calls return the same object.

    Parameters
    ----------
    name : a short name of this module's table, a folder, a name on the Hub, or "module:function"
        of your own, which returns a :class:`Dataset`; its keyword-only arguments are the options
    normalise : for images: ``"own"``, the data set's published mean and standard deviation per
        channel (if none are published, those of the training images); ``"authors"``, those of
        FedADMM's code; ``"none"``, pixels in [0, 1]. Digits, synthetic data and text stay as they
        are
    options : for generated sets see their functions; for others see this module's table

    Raises
    ------
    ValueError
        For an unknown name, normalisation or option; for a data set without the columns or splits
        above; for text without ``transformers``.
    """
    if normalise not in NORMALISE:
        hint = unknown([normalise], NORMALISE)
        raise ValueError(f"unknown normalise {hint}; known: {', '.join(NORMALISE)}")
    if normalise == "authors" and name not in AUTHORS:
        raise ValueError(f"normalise='authors' is for {', '.join(AUTHORS)} only, got {name!r}")
    key_values = tuple((key, type(options[key]), options[key]) for key in sorted(options))
    if (function := _function(name)) is None:
        return _stored(name, _find(name), normalise, key_values)
    _check_names(name, options, options_of(name))
    return _made(function, name, key_values)


def options_of(name: str) -> list[str]:
    """Return the names of the options of data set ``name``, which is read if it is stored."""
    if (function := _function(name)) is not None:
        return [key for key in getfullargspec(function).kwonlyargs if key != "dtype"]
    return _fitting(_table(name, _find(name), "train").column_names)


def _fitting(columns: Sequence[str]) -> list[str]:
    """Return the names of the options for data with these columns."""
    owners = ["owners"] if set(NATURAL) & set(columns) else []
    words = ["tokenizer", "tokens"] if _inputs(columns)[0] in ("text", "title") else []
    return ["label", *owners, *words]


def _inputs(columns: Sequence[str]) -> tuple[str, ...]:
    return next((names for names in INPUTS if set(names) <= set(columns)), ("",))


def _check_names(name: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    if wrong := sorted(options.keys() - set(known)):
        raise ValueError(f"data set {name!r} has no option {unknown_of(wrong, known)}")


def _function(name: str) -> Callable[..., Dataset] | None:
    return BUILT_IN.get(name) or own(name)


@cache
def _made(function: Callable[..., Dataset], name: str, options: Given) -> Dataset:
    keywords_alone = not getfullargspec(function).args
    require(keywords_alone, name, "a function of keyword-only arguments", function)
    made = function(**{key: value for key, _, value in options})
    wanted = "a function that returns a simulations.generated.Dataset"
    require(isinstance(made, Dataset), name, wanted, made)
    return made


def _find(name: str) -> Path | None:
    """Return the folder of ``name``, or None if it can only be on the Hub."""
    root = os.environ.get("FL_DATA")
    folders = [Path(root).expanduser() / name] if root else []
    folders.append(Path(name).expanduser())
    for folder in folders:
        if folder.is_dir():
            return folder.resolve()
    if name in HUB or name.count("/") == 1:
        return None
    raise ValueError(_unknown(name))


@cache
def _stored(name: str, folder: Path | None, normalise: str, options: Given) -> Dataset:
    data_set = _read(name, folder, normalise, **{key: value for key, _, value in options})
    pa.default_memory_pool().release_unused()  # the tables
    return data_set


def _read(
    name: str,
    folder: Path | None,
    normalise: str,
    /,
    *,
    label: str | None = None,
    owners: int | None = None,
    tokenizer: str | None = None,
    tokens: int | None = None,
    **others: Any,
) -> Dataset:
    train = _table(name, folder, "train")
    inputs = _inputs(train.column_names)
    labels = label
    if label is None:
        labels = next((c for c in CLASSES if c in train.column_names), None)
    if inputs == ("",) or labels not in train.column_names:
        raise ValueError(
            f"data set {name!r} needs columns 'image' or 'img', 'x', 'text', or 'title' and "
            f"'content', and one of {', '.join(CLASSES) if label is None else label}, "
            f"got {', '.join(train.column_names)}"
        )
    whose = next((c for c in NATURAL if c in train.column_names), None)
    named = {"owners": owners, "tokenizer": tokenizer, "tokens": tokens}
    others |= {option: value for option, value in named.items() if value is not None}
    _check_names(name, others, _fitting(train.column_names))
    tables, (owner, test_owner) = _splits(name, folder, train, whose, inputs == ("x",), owners)
    y, test_y = (_classes(name, table[labels]) for table in tables)
    classes = int(max(_classes(name, train[labels]).max(), test_y.max())) + 1
    vocabulary = None
    scale: Scale | None = None
    x: Inputs
    test_x: Inputs
    if inputs[0] in ("image", "img"):
        reads = [partial(_column, inputs[0], i, name, folder, whose, owners) for i in (0, 1)]
        if folder is None:  # the Hub's are mapped into memory, and asking for them takes seconds
            reads = [partial(operator.getitem, table, inputs[0]) for table in tables]
        x, test_x = (Images(name, read) for read in reads)
        scale = _scale(name, normalise, x, test_x)
    elif inputs == ("x",):
        x, test_x = (text.characters(table["x"].to_pylist()) for table in tables)
        classes = vocabulary = len(text.CHARACTERS)
    else:
        columns = [[table[column].to_pylist() for column in inputs] for table in tables]
        source = text.DISTILBERT if tokenizer is None else tokenizer
        length = 128 if tokens is None else tokens
        (x, vocabulary), (test_x, _) = (text.tokens(both, source, length) for both in columns)
    return Dataset(name, x, y, test_x, test_y, classes, owner, test_owner, vocabulary, scale)


def _column(
    column: str, split: int, name: str, folder: Path | None, whose: str | None, owners: int | None
) -> Any:
    """Return a column of training (0) or test samples (1)."""
    train = _table(name, folder, "train")
    return _splits(name, folder, train, whose, False, owners)[0][split][column]


def _splits(
    name: str, folder: Path | None, train: Any, whose: str | None, last: bool, owners: int | None
) -> tuple[tuple[Any, Any], tuple[Ints | None, Ints | None]]:
    """Return the tables of training and test samples, and the natural client of each row."""
    try:
        test = _table(name, folder, "test")
    except _NoSplit:
        if whose is None:
            raise
        held = _held_out(_codes(train[whose]), last)
        train, test = train.filter(pa.array(~held)), train.filter(pa.array(held))
    if whose is None:
        return (train, test), (None, None)
    both = _codes(pa.chunked_array([*train[whose].chunks, *test[whose].chunks]))
    owner, test_owner = np.split(both, [len(train)])  # in the order of the training samples
    if owners is not None:
        present = int(owner.max()) + 1
        check_count("owners", owners, 1, present, "natural clients")
        others = stream(0, "owners").permutation(present)[owners:]
        kept, test_kept = (~np.isin(codes, others) for codes in (owner, test_owner))
        train, test = train.filter(pa.array(kept)), test.filter(pa.array(test_kept))
        owner, test_owner = owner[kept], test_owner[test_kept]
    return (train, test), (owner, test_owner)


def _parts(path: Path) -> list[Path]:
    """Return the files of a folder of Parquet files, or the one file that ``path`` is."""
    return sorted(path.glob("*.parquet")) if path.is_dir() else [path]


def _arrow(file: Path) -> Any:
    """Return a Parquet file's table; Arrow's ``read_table`` would import pandas, 47 MB.

    It is read in its row groups: Arrow reads no more than 2 GB of images at once.
    """
    with pyarrow.parquet.ParquetFile(file) as opened:
        groups = [opened.read_row_group(i) for i in range(opened.num_row_groups)]
        return pa.concat_tables(groups) if groups else opened.read()


def _codes(column: Any) -> Ints:
    """Return each entry's value as a number; values are numbered in order of appearance."""
    codes: Ints = column.combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    return codes


def _held_out(owner: Ints, last: bool) -> NDArray[np.bool_]:
    """Return which samples are for testing: a fifth of each owner's, the last ones or drawn."""
    order = np.arange(len(owner)) if last else stream(0, "held-out").permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]  # the rows of each owner together
    counts = np.bincount(owner)
    after = np.repeat(np.cumsum(counts), counts) - np.arange(len(owner))  # 1 for the last
    held = np.zeros(len(owner), bool)
    held[order] = after <= np.repeat(counts // 5, counts)
    return held


class _NoSplit(ValueError):
    """The data set exists, but lacks this split."""


def _table(name: str, folder: Path | None, split: str) -> Any:
    """Return the Arrow table of a split, images still encoded."""
    if folder is not None:
        pattern = f"{split}*.parquet"
        paths = sorted(folder.glob(pattern)) or sorted(folder.glob(f"*/{pattern}"))
        files = [part for one in paths for part in _parts(one)]
        if not files:
            raise _NoSplit(f"data set {name!r}: no {pattern} in {folder} or a folder in it")
        return pa.concat_tables([_arrow(file) for file in files])
    import datasets  # here: it takes seconds, and folders do without

    try:
        with hub.asked_briefly():
            return datasets.load_dataset(HUB.get(name, name), split=split).with_format("arrow")[:]
    except OSError as error:  # not there, no network
        raise ValueError(_unknown(name, error)) from error
    except ValueError as error:
        raise _NoSplit(_unknown(name, error)) from error


def _classes(name: str, column: Any) -> Ints:
    """Return the classes of a column: its integers, or the numbers of its characters."""
    if len(column) > 0 and isinstance(label := column[0].as_py(), str):
        if len(label) != 1:
            said = f"labels must be numbers of classes, got texts such as {shown(label)}"
            raise ValueError(f"data set {name!r}: {said}; class_encode_column numbers them")
        return text.characters(column.to_pylist())[:, 0].astype(np.int64)
    if len(column) == 0 or column.null_count:
        raise ValueError(f"data set {name!r}: a split is empty or lacks labels")
    try:
        numbers = column.cast(pa.int64()).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        said = f"labels must be whole numbers, got {column.type} such as {column[0]}"
        raise ValueError(f"data set {name!r}: {said}") from None
    y: Ints = np.from_dlpack(numbers).astype(np.int64)  # to_numpy would import pandas
    if y.min() < 0:
        raise ValueError(f"data set {name!r}: a split has labels < 0 (no label)")
    return y


def _scale(name: str, normalise: str, x: Images, test_x: Images) -> Scale:
    """Return mean and deviation by which images are scaled, as ``normalise`` says."""
    if x.shape[1:] != test_x.shape[1:]:
        raise ValueError(
            f"data set {name!r} trains on {x.shape[1:]} and tests on {test_x.shape[1:]}"
        )
    if normalise == "none":
        return PIXELS
    published = AUTHORS if normalise == "authors" else COMPUTED
    return published[name] if name in published else measured(scaled(x[:], PIXELS))


def _unknown(name: str, why: object = "") -> str:
    """Return why a data set was not found, and how to provide it."""
    root = os.environ.get("FL_DATA")
    there = "unset" if root is None else root if Path(root).is_dir() else f"{root}, no folder"
    hint = unknown([name], [*BUILT_IN, *HUB])
    message = (
        f"data set {hint} is neither under FL_DATA ({there}),"
        " nor a folder, nor found on the Hub" + (f": {why}" if why else "")
    )
    if name not in HUB:
        known = ", ".join([*BUILT_IN, *HUB])
        return f"{message}; known: {known}, any folder, and owner/name on the Hub"
    return (
        f"{message}; set the environment variable FL_DATA to the folder in which {name}/ has "
        "train*.parquet and test*.parquet; a SuperLink or SuperNode keeps the FL_DATA with which "
        "it was started, so restart it"
    )
