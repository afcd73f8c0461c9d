"""Images of a data set: read and decoded when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

Scale: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation per channel of pixels in [0, 1]."""
PIXELS: Scale = ((0.0,), (1.0,))


class Images:
    """Images [n, channels, height, width] of a column of files, to NumPy an array of bytes.

    They are read and decoded each time: a server with 60,000 images to train on needs their labels.

    Parameters
    ----------
    name : str
        What errors call the data set.
    read : callable
        Returns the column.

    Raises
    ------
    ValueError
        When images of several sizes are read.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, name: str, read: Callable[[], pa.ChunkedArray]) -> None:
        self._name, self._read, self._checked = name, read, False
        files = read()
        first = _open(files[0])
        self._mode = "L" if first.mode in ("1", "L") else "RGB"
        self.shape = (len(files), len(self._mode), first.height, first.width)

    def check(self) -> None:
        """Raise ``ValueError`` for images of several sizes, without decoding them.

        The headers are read once: 70,000 of them take 1.5 seconds.
        """
        if not self._checked:
            for i, file in enumerate(self._read()):
                self._opened(i, file)
        self._checked = True

    def _opened(self, i: int, file: pa.Scalar) -> Image.Image:
        image, size = _open(file), (self.shape[3], self.shape[2])
        if image.size != size:
            raise ValueError(f"data set {self._name!r}: image 0 is {size}, image {i} {image.size}")
        return image

    @property
    def size(self) -> int:
        """How many numbers they are."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> NDArray[np.uint8]:
        """Return the images of these rows, which lie channels-last."""
        files = self._read()[rows]
        numbers = range(len(self))[rows]
        _, channels, height, width = self.shape
        pixels = np.empty((len(files), height, width, channels), np.uint8)
        for i, (number, file) in enumerate(zip(numbers, files, strict=True)):
            image = self._opened(number, file)
            pixels[i].flat = np.asarray(
                image if image.mode == self._mode else image.convert(self._mode)
            ).flat
        del files
        pa.default_memory_pool().release_unused()
        return pixels.transpose(0, 3, 1, 2)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


def scaled(pixels: NDArray[Any], scale: Scale) -> NDArray[np.float32]:
    """Return bytes of images [n, channels, height, width] as float32 of that mean and deviation."""
    x = pixels.astype(np.float32)
    x /= 255
    mean, deviation = (np.asarray(value, np.float32)[:, None, None] for value in scale)
    x -= mean
    x /= deviation
    return x


def measured(x: NDArray[np.float32]) -> Scale:
    """Return the scale by which images are of mean 0 and standard deviation 1."""
    axes = (0, 2, 3)
    return x.mean(axes, dtype=np.float64).tolist(), x.std(axes, dtype=np.float64).tolist()


def _open(file: pa.Scalar) -> Image.Image:
    stored = file.as_py()
    return Image.open(BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"])
