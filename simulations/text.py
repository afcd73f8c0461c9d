"""Text as arrays of small integers: characters in LEAF's numbering, or the tokens of a tokenizer.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018; Sanh et al., "DistilBERT", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_strategies.core.schedules import check, require, shown
from simulations.hub import asked_briefly

Symbols: TypeAlias = NDArray[np.integer[Any]]

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters of Shakespeare; a character's position is its number."""
DISTILBERT = "distilbert/distilbert-base-uncased"
"""The default source of the DistilBERT classifier's tokenizer and model."""
CHUNK = 10_000
"""Texts that a tokenizer gets at once: its lists need many times the memory of the array."""


def transformers() -> Any:
    """Return the package ``transformers``; a ``ValueError`` names the extra if it is missing."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"this data set or model needs transformers, which the extra 'text' installs"
            f" (pip install transformers): {error}"
        ) from error


def characters(texts: Sequence[str]) -> Symbols:
    """Return the numbers of the characters of ``texts``, all equally long: uint8 [n, length].

    Raises ``ValueError`` for texts of different lengths, and characters that are not LEAF's.
    """
    if not isinstance(texts[0], str):
        raise ValueError(f"characters must be texts, got {shown(texts[0])}")
    whole, length = "".join(texts), len(texts[0])
    odd = next((text for text in texts if len(text) != length), None)
    if odd is not None:
        raise ValueError(f"texts must be equally long: {texts[0]!r} and {odd!r} are not")
    if unknown := sorted(set(whole) - set(CHARACTERS)):
        raise ValueError(f"{unknown} are not among LEAF's 80 characters")
    number = np.zeros(128, np.uint8)
    number[np.frombuffer(CHARACTERS.encode(), np.uint8)] = np.arange(len(CHARACTERS))
    return number[np.frombuffer(whole.encode(), np.uint8)].reshape(len(texts), length)


def tokens(texts: Sequence[Sequence[str]], tokenizer: str, length: int) -> tuple[Symbols, int]:
    """Return the tokens of ``texts``, [n, length], and the size of the vocabulary.

    Parameters
    ----------
    texts : n texts, or two such lists, the halves of n pairs
    tokenizer : folder or Hub name of a tokenizer of ``transformers``
    length : texts are cut or padded to so many tokens, markers included

    The array has the smallest possible type of uint8, int16 and int32.

    Raises
    ------
    ValueError
        If the tokenizer does not exist or cannot pad, if the length is below 8, or without
        ``transformers``.
    """
    check("tokens", length, low=8, integer=True)
    require(isinstance(tokenizer, str), "tokenizer", "a text", tokenizer)
    auto = transformers().AutoTokenizer
    try:
        with asked_briefly():
            loaded = auto.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {tokenizer!r} is neither a folder with one nor found on the Hub: {error}"
        ) from error
    array = np.empty((len(texts[0]), length), smallest_type(len(loaded)))
    for start in range(0, len(array), CHUNK):
        chunk = [column[start : start + CHUNK] for column in texts]
        array[start : start + CHUNK] = loaded(
            *chunk, padding="max_length", truncation=True, max_length=length, return_tensors="np"
        )["input_ids"]
    return array, len(loaded)


def smallest_type(count: int) -> type[np.integer[Any]]:
    return np.uint8 if count <= 2**8 else np.int16 if count <= 2**15 else np.int32
