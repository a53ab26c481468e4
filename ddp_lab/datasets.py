"""Real data without a network: scikit-learn's handwritten digits, always split the same way.

    train, test = digits(train=True), digits(train=False)
    for images, labels in make_loader(train, batch_size=64, seed=0):
        ...

Nothing in this module communicates: every rank gets the same samples in the same order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

CLASSES = 10
SIDE = 8  # pixels, as the set is stored
TRAIN_SAMPLES = 1440  # 2 to 6 ranks divide it evenly; 2 and 4 don't divide the other 357


class Digits(TensorDataset):
    """Images and labels as two tensors; `dataset[i]` and `dataset[i:j]` give (images, labels).

    images: (samples, channels, side, side); labels: (samples,), int64, 0 to 9.
    """

    def __init__(self, images: Tensor, labels: Tensor, name: str = "digits") -> None:
        super().__init__(images, labels)
        self.images, self.labels, self.name = images, labels, name

    def __repr__(self) -> str:
        samples, channels, height, width = self.images.shape
        dtype = str(self.images.dtype).removeprefix("torch.")
        return f"{self.name}: {samples:,} images of {channels}x{height}x{width}, {dtype}"


def digits(
    train: bool = True,
    *,
    size: int = SIDE,
    channels: int = 1,
    normalize: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Digits:
    """The 1,440 training images or the 357 test images, with values from 0 to 1.

    size: side in pixels; 32 suits torchvision's ResNets (bilinear upscaling). channels: copies of
    the grey value, 3 for those ResNets. normalize: subtract the training pixels' mean, divide by
    their standard deviation. Every call returns tensors of its own: changing one changes no other.
    Raises ValueError for a size under 8, no channel, or a dtype that is not floating point, and
    TypeError when train is not a bool: digits("test") would be the training images.
    Source: sklearn.datasets.load_digits, the test part of UCI's "Optical Recognition of Handwritten
    Digits". It is shuffled before the split, so writers of training images wrote test images too.
    """
    _check(train, size, channels, dtype)
    pixels, labels = _split(train)
    images = torch.tensor(pixels, dtype=dtype).unsqueeze(1)  # (samples, 1, 8, 8)
    if size != SIDE:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    if normalize:
        training = _split(True)[0]
        images = (images - float(training.mean())) / float(training.std())
    images = images.repeat(1, channels, 1, 1)  # (samples, channels, size, size)
    return Digits(images, torch.tensor(labels), f"digits, {'train' if train else 'test'}")


def make_loader(
    dataset: Dataset[Any], batch_size: int = 64, *, seed: int | None = None, drop_last: bool = False
) -> DataLoader[Any]:
    """Batches in the dataset's order, or shuffled afresh each epoch when there is a seed.

    The loader draws from a generator of its own, never from torch's global one, so neither disturbs
    the other. A second pass over the same loader goes on with that generator, so its order differs;
    a new loader with the same seed starts again. Raises ValueError for a batch_size under 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    shuffle, generator = seed is not None, torch.Generator().manual_seed(seed or 0)
    return DataLoader(dataset, batch_size, shuffle, drop_last=drop_last, generator=generator)


def _check(train: object, size: int, channels: int, dtype: torch.dtype) -> None:
    if not isinstance(train, bool):
        raise TypeError(f"train must be True or False, not {train!r}")
    if size < SIDE:
        raise ValueError(f"size must be at least {SIDE} pixels, not {size}")
    if channels < 1:
        raise ValueError(f"channels must be at least 1, not {channels}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type such as torch.float32, not {dtype}")


def _split(train: bool) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    pixels, labels = _load()
    rows = slice(TRAIN_SAMPLES) if train else slice(TRAIN_SAMPLES, None)
    return pixels[rows], labels[rows]


@cache
def _load() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """All pixels, (1797, 8, 8) from 0 to 1, and labels, (1797,), in a fixed shuffled order."""
    from sklearn.datasets import load_digits  # here, because it takes most of a second

    data = load_digits()
    # RandomState and not torch's randperm: NumPy froze its stream, so the split never changes.
    order = np.random.RandomState(0).permutation(len(data.target))
    return data.images[order] / 16.0, data.target[order].astype(np.int64)
