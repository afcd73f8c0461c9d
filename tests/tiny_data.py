"""Tiny data sets in the schemas of the Hub, a tokenizer and a DistilBERT: no network, no download.

Each function writes a folder and returns it. Features and orders are crooked: classes, clients and
lengths are uneven, and rows of different clients alternate.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from simulations.text import CHARACTERS

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in "abcdefghijk")]
WRITERS = ["f07", "f01", "f99"]
ROLES = ["HAMLET_OPHELIA", "A_MIDSUMMER_PUCK"]
TEXT = "so shaken as we are, so wan with care; find we a time for frighted peace to pant\n" * 2


def encoded(pixels: NDArray[np.uint8], kind: str = "PNG") -> list[dict[str, Any]]:
    """Return images [n, height, width] or [n, height, width, 3] as a Hub column holds them."""
    column = []
    for image in pixels:
        Image.fromarray(image).save(file := BytesIO(), kind)
        column.append({"bytes": file.getvalue(), "path": None})
    return column


def pixels(n: int, *shape: int) -> NDArray[np.uint8]:
    """Return images whose brightness tells i mod 3, plus noise."""
    noise = np.random.default_rng(n).integers(0, 50, (n, *shape))
    level = 90 * (np.arange(n) % 3).reshape(-1, *(1 for _ in shape))
    return (noise + level).astype(np.uint8)


def write(folder: Path, columns: dict[str, Any], train: int | None, **features: Any) -> Path:
    """Write rows below ``train`` as the training split and the others as tests; None: one split."""
    rows = datasets.Dataset.from_dict(columns)
    rows = rows.cast(datasets.Features(rows.features | features))
    (folder / "data").mkdir(parents=True)
    cut = len(rows) if train is None else train
    rows.select(range(cut)).to_parquet(folder / "data/train-00000-of-00001.parquet")
    if train is not None:
        rows.select(range(cut, len(rows))).to_parquet(folder / "data/test-00000-of-00001.parquet")
    return folder


def cifar100(folder: Path, n: int = 30, size: int = 16) -> Path:
    """Write images of three fine classes, 4, 50 and 99, in two coarse ones, 0 and 19."""
    images = encoded(pixels(n, size, size, 3))
    fine, coarse = (np.resize(labels, n) for labels in ([4, 50, 99], [0, 0, 19]))
    columns = {"img": images, "fine_label": fine, "coarse_label": coarse}
    return write(folder, columns, n * 2 // 3, img=datasets.Image())


def femnist(folder: Path, n: int = 48, *, train: int | None = None) -> Path:
    """Write characters of three writers, a half by the first, in one split as on the Hub."""
    images = encoded(pixels(n, 28, 28))
    writers = [WRITERS[0] if i % 2 else WRITERS[1 + i % 3 // 2] for i in range(n)]
    characters = np.resize([2, 61, 30], n)
    columns = {"image": images, "writer_id": writers, "character": characters}
    return write(folder, columns, train, image=datasets.Image())


def windows(start: int, n: int) -> tuple[list[str], list[str]]:
    """Return windows of 80 characters of ``TEXT`` and the character that follows each."""
    places = range(start, start + n)
    return [TEXT[i : i + 80] for i in places], [TEXT[i + 80] for i in places]


def shakespeare(folder: Path, n: int = 20) -> Path:
    """Write n windows of one role and half as many of another, in turn, in one split."""
    both = [(role, *row) for role, rows in zip(ROLES, (n, n // 2), strict=True)
            for row in zip(*windows(3 * len(role), rows), strict=True)]  # fmt: skip
    both = both[::2] + both[1::2]
    roles, x, y = zip(*both, strict=True)
    return write(folder, {"character_id": roles, "x": x, "y": y}, None)


def sentences(n: int) -> list[str]:
    """Return sentences of 1 to 7 words that tell i mod 3 by their first word."""
    return [" ".join(WORDS[5 + (i % 3 + k) % 11] for k in range(1 + i % 7)) for i in range(n)]


def ag_news(folder: Path, n: int = 30) -> Path:
    columns = {"text": sentences(n), "label": np.resize([0, 3, 1], n)}
    return write(folder, columns, n * 2 // 3)


def dbpedia(folder: Path, n: int = 30) -> Path:
    columns = {
        "label": np.resize([13, 0, 5], n),
        "title": [f"word{'abc'[i % 3]}" for i in range(n)],
        "content": sentences(n)[::-1],
    }
    return write(folder, columns, n * 2 // 3)


def tokenizer(folder: Path) -> Path:
    """Write a tokenizer of 16 whole words."""
    from transformers import BertTokenizer  # here: it takes seconds, and most tests do without

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def distilbert(folder: Path, *, positions: int = 32, dropout: float = 0.1) -> Path:
    """Write a DistilBERT of two layers of 8 units, with weights and, as the Hub's, no head."""
    from transformers import DistilBertConfig, DistilBertModel

    config = DistilBertConfig(
        vocab_size=len(WORDS),
        max_position_embeddings=positions,
        dim=8,
        hidden_dim=12,
        n_layers=2,
        n_heads=2,
        dropout=dropout,
        attention_dropout=dropout,
        seq_classif_dropout=dropout,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        DistilBertModel(config).save_pretrained(folder)
    return folder


assert set(TEXT) <= set(CHARACTERS)
