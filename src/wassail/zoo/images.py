"""Images in a folder, one sub-folder for each class, in torchvision's order and with
RobustBench's preprocessings.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from wassail.errors import InputError, reason_of
from wassail.writing import MAX_TEXT, read_small
from wassail.zoo.files import ALPHABETICAL, CLASS_NAMES, reading
from wassail.zoo.samples import ItemData
from wassail.zoo.weights import regular, sha256

# Torchvision's.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Those of the extensions: others start programs (PostScript).
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
PIXELS = 1 << 25  # of an image, packed or resized
# of a progressive JPEG, which has ten or so: each goes over all pixels, and takes 14 bytes of the
# file
SCANS = 100
_NAME = re.compile(
    r"(?P<bicubic>Bicubic(?=Res))?(?:Res(?P<resize>[1-9]\d*))?"
    r"(?:Crop(?P<crop>[1-9]\d*))?(?P<gray>Gray)?"
)
_WORDNET = re.compile(r"n\d{8}")
_IMAGENET = 1000


class Preprocessing:
    """What is done to an image before it becomes a sample, by RobustBench's names.

    "Res256Crop224": the shorter side to 256, then the middle 224 x 224; "Res224": to 224 x 224
    whatever the shape, as a crop does not follow; "Crop288": the middle, black where the image
    ends; "Bicubic" in front: bicubic in place of bilinear; "Gray" at the end: one channel. No name:
    the image as it is.
    """

    def __init__(self, name: str | None = None) -> None:
        match = _NAME.fullmatch(name or "")
        if match is None:
            raise InputError(
                f"unknown preprocessing {name!r}: known are ResN, CropN, ResNCropM and "
                "BicubicResNCropM, as in Res256Crop224, each perhaps with Gray behind it."
            )
        self.name = name
        self.gray = match["gray"] is not None
        self.bicubic = match["bicubic"] is not None
        self.resize, self.crop = (
            None if match[key] is None else int(match[key]) for key in ("resize", "crop")
        )

    @property
    def steps(self) -> list[str]:
        """In words, for the record."""
        return [] if not self.name else [self.name]

    def __call__(self, image: Any) -> Any:
        """A Pillow image -> bytes `(3, H, W)`, or `(1, H, W)` with "Gray"."""
        return self._apply(image.convert("L" if self.gray else "RGB"))

    def keep_mode(self, image: Any) -> Any:
        """The same, but images that are gray stay so."""
        return self._apply(image.convert("L" if self.gray or image.mode in ("1", "L") else "RGB"))

    def _apply(self, image: Any) -> Any:
        from PIL import Image

        if self.resize is not None:
            wide, high = image.size
            size = (self.resize, self.resize)
            # The shorter side; the longer one rounded down, as torchvision does.
            if self.crop is not None:
                short = min(wide, high)
                size = (int(self.resize * wide / short), int(self.resize * high / short))
            if size[0] * size[1] > PIXELS:
                raise InputError(
                    f"an image of {wide} x {high} would be resized to {size[0]} x {size[1]}: "
                    "leave it out."
                )
            image = image.resize(
                size, Image.Resampling.BICUBIC if self.bicubic else Image.Resampling.BILINEAR
            )
        if self.crop is not None:
            left, top = (_middle(side, self.crop) for side in image.size)
            image = image.crop((left, top, left + self.crop, top + self.crop))  # black outside
        pixels = np.array(image)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _middle(side: int, crop: int) -> int:
    """Where the middle part of a side begins; below zero where the part is longer. torchvision
    rounds the two cases so.
    """
    return round((side - crop) / 2) if side >= crop else -((crop - side) // 2)


class ImageFolder(ItemData):
    """Images below one folder for each class: classes and files sorted, as torchvision has
    them, or in a given order.
    """

    def __init__(
        self,
        name: str,
        n: int | None = None,
        ids: str | Path | None = None,
        preprocessing: str | None = None,
    ) -> None:
        change = Preprocessing(preprocessing)
        root = Path(name)
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        if not classes:
            raise InputError(
                f"{name!r} has no sub-folders: put the images of each class into a folder of its "
                "own."
            )
        files, labels = (
            _listed(Path(ids), root, classes) if ids is not None else _walked(root, classes)
        )
        if not files:
            raise InputError(
                f"{name!r} has no images ({', '.join(EXTENSIONS)}) in its sub-folders."
            )
        if ids is None or None in labels:
            _refuse_part_of_imagenet(name, classes)
        files = files[:n]
        labels = labels[:n]
        info = {
            "source": "folder",
            "preprocessing": change.steps,
            "order": "sorted" if ids is None else Path(ids).name,
            "files": {} if ids is None else {Path(ids).name: sha256(ids)},
            "sha256": _digest(root, files),
        }
        number = {folder: place for place, folder in enumerate(classes)}
        chosen = [
            number[file.split("/")[0]] if label is None else label
            for file, label in zip(files, labels)
        ]

        def item(place: int) -> tuple[Any, int]:
            path = root / files[place]
            regular(path, "an image")
            with reading(path):
                return change(open_image(path, str(path))), chosen[place]

        named = None if any(label is not None for label in labels) else tuple(classes)
        if named is not None:
            info[CLASS_NAMES] = ALPHABETICAL
        super().__init__(name, item, len(files), info, named, files)


def _walked(root: Path, classes: list[str]) -> tuple[list[str], list[int | None]]:
    """All images below the class folders, sorted by folder, then by name. Links are followed,
    but to no folder twice.
    """
    files = []
    seen: set[tuple[int, int]] = set()
    for folder in classes:
        found: list[tuple[str, list[str]]] = []
        open_folders = [str(root / folder)]
        while open_folders:
            place = open_folders.pop()
            about = os.stat(place)
            if (about.st_dev, about.st_ino) in seen:
                raise InputError(
                    f"links lead to {place!r} a second time: remove them, or images would be "
                    "counted twice."
                )
            seen.add((about.st_dev, about.st_ino))
            names = []
            for entry in os.scandir(place):
                if entry.is_dir():
                    open_folders.append(entry.path)
                elif entry.name.lower().endswith(EXTENSIONS):
                    names.append(entry.name)
            found.append((place, sorted(names)))
        for place, names in sorted(found):
            inside = Path(place).relative_to(root)
            files += [(inside / name).as_posix() for name in names]
    return files, [None] * len(files)


def _listed(ids: Path, root: Path, classes: list[str]) -> tuple[list[str], list[int | None]]:
    """The images that a file names, one a line: `folder/image`, perhaps with a label behind it."""
    try:
        text = read_small(ids, MAX_TEXT, "the ids").decode()
    except UnicodeDecodeError:
        raise InputError(f"cannot read the ids from {str(ids)!r}: it is no text.") from None
    lines = [line.strip() for line in text.splitlines()]
    files: list[str] = []
    labels: list[int | None] = []
    for line in filter(None, lines):
        words = line.rsplit(maxsplit=1)
        labelled = len(words) == 2 and words[1].isascii() and words[1].isdigit()
        file = PurePosixPath(words[0] if labelled else line)
        if file.is_absolute() or ".." in file.parts or len(file.parts) < 2 or "\\" in line:
            raise InputError(
                f"{line!r} in {str(ids)!r} does not name an image below the folder: write "
                "class/image."
            )
        if not labelled and file.parts[0] not in classes:
            raise InputError(
                f"{line!r} in {str(ids)!r} is in no class folder of {str(root)!r}: check the two "
                "belong together."
            )
        if not (root / file).is_file():
            raise InputError(
                f"{str(root / file)!r} is missing, but {str(ids)!r} names it: complete the folder."
            )
        files.append(file.as_posix())
        labels.append(int(words[1]) if labelled else None)
    if len({label is None for label in labels}) > 1:
        raise InputError(
            f"some lines of {str(ids)!r} have a label and some have none: give all of them one, "
            "or none."
        )
    return files, labels


def _refuse_part_of_imagenet(name: str, classes: list[str]) -> None:
    """ImageNet's class index is the place among all thousand folders: with fewer of them,
    labels would be silently wrong.
    """
    if len(classes) < _IMAGENET and all(_WORDNET.fullmatch(folder) for folder in classes):
        raise InputError(
            f"{name!r} has {len(classes)} of ImageNet's 1000 class folders, so a class's index "
            "cannot be told: make the other "
            "folders too (empty ones will do), or give ids with the label behind each image."
        )


def _digest(root: Path, files: list[str]) -> str:
    """SHA-256 of the names and contents of the images, in order."""
    found = hashlib.sha256()
    for file in files:
        regular(root / file, "an image")
        found.update(f"{file} {sha256(root / file)}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def open_image(file: Any, name: str) -> Any:
    """The Pillow image in a file, decoded; only the formats that are promised are tried.

    file: a path, or a file that is open; name: for the sentence when it fails.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError(
            f"reading {name!r} needs the package pillow: install it with pip install pillow."
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata, which is not used
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as image:
                wide, high = image.size
                if wide * high > PIXELS:
                    raise ValueError(
                        f"it would unpack to {wide} x {high} pixels, more than the {PIXELS} that "
                        "are taken"
                    )
                if image.format in ("JPEG", "MPO"):
                    _check_scans(image.fp)
                image.load()
                return image.copy()
    except Exception as error:
        # Pillow's decoders raise whatever a broken file makes them stumble over.
        reason = reason_of(error)
        raise InputError(f"cannot read the image {name!r}: {reason}.") from None


def _check_scans(file: Any) -> None:
    """Raise ValueError where a JPEG file goes over its pixels again and again."""
    place = file.tell()
    found = 0
    size = 0
    last = b""
    file.seek(0)
    while piece := file.read(1 << 20):
        found += (last + piece).count(b"\xff\xda")
        size = size + len(piece)
        last = piece[-1:]
    file.seek(place)
    if found > SCANS + (size >> 16):  # in its metadata the two bytes may be by chance
        raise ValueError(f"it has {found} scans, more than the {SCANS} that are taken")
