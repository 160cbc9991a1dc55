"""Images to learn from, for any framework: a folder of them, or scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

#: Of ImageNet's pixels, by channel, as torchvision's weights expect them.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
#: One in so many images is kept aside, where there is no folder `val`.
ASIDE = 5


class Images:
    """What the training script needs to know of a data set, besides its items.

    An item is (image [3, size, size] float32, label), of NumPy.
    """

    classes: list[str]

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        raise NotImplementedError


class Digits(Images):
    """The 1,797 digits of 8x8 pixels that scikit-learn ships, made larger; 1,437 to train on."""

    def __init__(self, size: int, *, train: bool) -> None:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        chosen = aside(len(bunch.target)) != train
        self.classes = [str(name) for name in bunch.target_names]
        pixels = bunch.images[chosen]
        self._pixels = (pixels - pixels.mean()) / pixels.std()
        self._labels = bunch.target[chosen].astype(np.int64)
        self._between = between(8, size)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = self._between @ self._pixels[index] @ self._between.T
        return np.repeat(image.astype(np.float32)[None], 3, axis=0), self._labels[index]


class Folder(Images):
    """A folder with a subfolder for each class, as torchvision's ImageFolder has it.

    Where it has folders `train` and `val` (as ImageNet has), these; else every fifth file is kept
    aside. Training images are cropped and flipped at random, the others cut from the middle.

    Raises:
        SystemExit: there is no image, or Pillow is not installed.
    """

    def __init__(self, folder: Path, size: int, *, train: bool) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise SystemExit("--data FOLDER reads images with Pillow: pip install pillow") from None
        self._open: Any = Image.open
        split = (folder / "train").is_dir() and (folder / "val").is_dir()
        root = folder / ("train" if train else "val") if split else folder
        if not root.is_dir():
            raise SystemExit(f"--data: {root} is no folder")
        self.classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
        files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not split:
            chosen = aside(len(files)) != train
            files = [file for file, taken in zip(files, chosen, strict=True) if taken]
        if not files:
            raise SystemExit(f"--data: {root} has no images in subfolders, one for each class")
        self._files, self._size, self._train = files, size, train

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, label = self._files[index]
        with self._open(path) as opened:
            image = opened.convert("RGB")
        box = random_box(image.size) if self._train else middle_box(image.size)
        pixels = np.asarray(image.resize((self._size, self._size), box=box), np.float32) / 255
        scaled = (pixels - np.array(MEAN, np.float32)) / np.array(DEVIATION, np.float32)
        if self._train and np.random.rand() < 0.5:
            scaled = scaled[:, ::-1]
        return np.ascontiguousarray(scaled.transpose(2, 0, 1)), np.int64(label)


class Filled(Images):
    """A data set made longer, to a multiple of `parts`, by images of the label -1.

    Each part of it gets equally many, and each image is in one part.
    """

    def __init__(self, images: Images, parts: int) -> None:
        self.classes = images.classes
        self._images, self._length = images, -(-len(images) // parts) * parts

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index < len(self._images):
            return self._images[index]
        return self._images[0][0], np.int64(-1)


def open_images(data: str, size: int, *, train: bool) -> Images:
    """Open the data set that the command line names: `digits`, or a folder."""
    if data == "digits":
        return Digits(size, train=train)
    return Folder(Path(data), size, train=train)


def aside(count: int) -> Any:
    """Mark, as a bool array [count], one in `ASIDE` of a fixed shuffled order."""
    order = np.random.RandomState(0).permutation(count)
    marks = np.zeros(count, bool)
    marks[order[: count // ASIDE]] = True
    return marks


def between(few: int, many: int) -> Any:
    """Return a matrix [many, few] that draws out a row of pixels, linearly between middles."""
    places = np.clip((np.arange(many) + 0.5) * few / many - 0.5, 0, few - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(few)))


def random_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Choose a part of an image of `size`: 8 to 100 % of its area, 3:4 to 4:3, inside."""
    width, height = size
    for _ in range(10):
        share, shape, x, y = np.random.rand(4)
        area = width * height * (0.08 + 0.92 * share)
        ratio = (3 / 4) ** (1 - 2 * shape)
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            left, top = x * (width - w), y * (height - h)
            return left, top, left + w, top + h
    return middle_box(size)


def middle_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The middle of an image of `size`: a square of seven eighths of its shorter side."""
    width, height = size
    side = min(size) * 0.875
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
