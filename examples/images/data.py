"""Small gray images in ten classes, from files that are already on the machine.

Fashion-MNIST, 70,000 photographs of clothes, comes with Debian's package dataset-fashion-mnist.
scikit-learn contains 1,797 handwritten digits of 8 x 8 pixels, few and easy: enough for a test. Or
pass a folder with the four IDX files of any data set in the format of MNIST.
"""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian installs it
FILES = {"train": "train-{}-ubyte", "test": "t10k-{}-ubyte"}  # the names that MNIST uses

Batch = tuple[np.ndarray, np.ndarray]  # f32[n, height, width, 1] from 0 to 1, and int32[n] classes


@dataclasses.dataclass(frozen=True)
class Images:
    """Two sets of images, uint8[n, height, width], with their classes, uint8[n]."""

    name: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Return random images, not augmented: a function of (seed, step) alone."""
        rng = np.random.default_rng([seed, step])
        return _batch(self.train, rng.integers(len(self.train[0]), size=batch_size))

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all test images in order; the last batch may be smaller."""
        for start in range(0, len(self.test[0]), batch_size):
            yield _batch(self.test, slice(start, start + batch_size))


def _batch(images_and_classes: tuple[np.ndarray, np.ndarray], chosen: np.ndarray | slice) -> Batch:
    images, classes = (array[chosen] for array in images_and_classes)
    return images[..., None].astype(np.float32) / 255, classes.astype(np.int32)


def load(path: str | None) -> Images:
    """Load the folder at `path`, else Fashion-MNIST, else scikit-learn's digits."""
    if path is not None:
        return read_folder(Path(path), path)
    if FASHION_MNIST.is_dir():
        return read_folder(FASHION_MNIST, "Fashion-MNIST")
    return digits()


def digits() -> Images:
    """Load scikit-learn's digits; every sixth is a test image."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"no images on this machine: there is neither {FASHION_MNIST} nor scikit-learn "
            f"({missing}). Type "
            "apt-get install dataset-fashion-mnist  or  pip install 'jfp8[examples]'  or give a "
            "folder of IDX files with --data"
        ) from None
    images, classes = load_digits(return_X_y=True)
    images = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    classes = classes.astype(np.uint8)
    test = np.arange(len(classes)) % 6 == 0
    name = "scikit-learn's digits"
    return Images(name, (images[~test], classes[~test]), (images[test], classes[test]))


def read_folder(folder: Path, name: str) -> Images:
    """Read the four files of MNIST or a similar data set, each plain or gzipped."""
    sets = {}
    for key, pattern in FILES.items():
        images, classes = (
            read_idx(_find(folder, pattern.format(kind))) for kind in ("images-idx3", "labels-idx1")
        )
        if images.ndim != 3 or classes.shape != images.shape[:1] or not len(images):
            raise ValueError(
                f"{folder}: the {key} set has images of shape {images.shape} and labels of shape "
                f"{classes.shape}, but must have (n, height, width) and (n,)"
            )
        if classes.max() > 9:
            raise ValueError(
                f"{folder}: the {key} set has the label {classes.max()}, but the model knows the "
                "classes 0 to 9: pass MNIST, Fashion-MNIST, KMNIST or a similar data set"
            )
        sets[key] = images, classes
    return Images(name, sets["train"], sets["test"])


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    wanted = ", ".join(p.format(k) for p in FILES.values() for k in ("images-idx3", "labels-idx1"))
    raise ValueError(
        f"--data {folder} has no file {name}: pass a folder with {wanted}, each plain or as .gz"
    )


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes: two zeros, 8 for uint8, the rank, sizes in 4 bytes, the numbers."""
    content = path.read_bytes()
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        if content[:3] != b"\0\0\x08":
            raise ValueError
        rank = content[3]
        shape = np.frombuffer(content, ">u4", rank, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
    except Exception as error:  # gzip alone raises three types for invalid files
        raise ValueError(
            f"{path} is not an IDX file of bytes, plain or gzipped: it should hold two zeros, "
            "an 8, the number of dimensions, the size of each as a big-endian int32, and as many "
            "bytes as these sizes require"
        ) from error
