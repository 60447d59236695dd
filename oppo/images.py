"""Images that prompts show: files, named by their digests. Pixels are read where a model looks at them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote
from uuid import uuid4

from oppo.atomic_files import content, make
from oppo.errors import DataError, did_you_mean_path, one_line, shortened, shown
from oppo.libraries import require

MOST_BYTES: Final = 2**28  # of an image file


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image of a prompt."""

    sha256: str  # digest of the file, hexadecimal
    path: str  # of the file, absolute
    height: int  # in pixels, turned upright
    width: int
    start: int = 0  # position in the prompt of the first token that stands for the image
    tokens: int = 0  # how many tokens of the prompt have its features; text of the processor may lie between them


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The images of rows as files: a path stays where it is, and everything else is written once."""

    directory: Path  # where images are written that a row holds itself, each under its digest
    folder: Path  # that relative paths begin in, if there is such a file; otherwise in the working directory

    def file(self, value: object, place: str) -> Path:
        """Return the file of an image, given as a path, a data URI, bytes, a picture, or a table with one of these."""
        if isinstance(value, Mapping):
            if isinstance(text := value.get("base64"), str):
                return self._named(text if text.startswith("data:") else f"data:;base64,{text}", place)
            given = (value.get(name) for name in ("bytes", "path", "image", "url"))
            value = next((each for each in given if each is not None), value)
            if isinstance(value, Mapping):
                raise DataError(f"{place}: an image is a table with bytes or a path, got {shown(value)}")
        if isinstance(value, str | Path):
            return self._named(str(value), place)
        if isinstance(value, bytes | bytearray):
            return self._written(bytes(value))
        if hasattr(value, "save") and hasattr(value, "size"):
            buffer = BytesIO()
            value.save(buffer, format="PNG")
            return self._written(buffer.getvalue())
        raise DataError(
            f"{place}: expected an image as a path, bytes, a data URI or a picture of Pillow, got {shown(value)}"
        )

    def _named(self, name: str, place: str) -> Path:
        if name.startswith("data:"):
            head, _, text = name.partition(",")
            try:
                return self._written(base64.b64decode(text if head.endswith(";base64") else "-", validate=True))
            except binascii.Error as error:
                raise DataError(f"{place}: the data URI of an image is not in base64: {error}") from error
        if local := re.match(r"file://(localhost)?(?=/)", name, re.IGNORECASE):
            name = unquote(name[local.end() :])
        if re.match(r"[a-z][a-z0-9+.-]+://", name, re.IGNORECASE):
            raise DataError(f"{place}: {name!r} is a URL, and images are not fetched: save it, and give its path")
        coded = "; base64 begins with 'data:image/png;base64,'" if len(name) > 200 else ""
        try:
            path = next((each for each in (self.folder / name, Path(name).expanduser()) if each.is_file()), None)
        except (OSError, RuntimeError, ValueError) as error:  # too long, a circle of links, an unknown user, a NUL
            why = f"is no path that can be followed: {shortened(str(error), 99)}"
            raise DataError(f"{place}: {shortened(name, 99)!r} {why}{coded}") from error
        if path is None:
            near = did_you_mean_path(self.folder / name)
            raise DataError(f"{place}: there is no image file {shortened(name, 200)!r}{near}{coded}")
        return path.resolve()

    def _written(self, data: bytes) -> Path:
        path = self.directory / hashlib.sha256(data).hexdigest()
        if not path.is_file() or path.stat().st_size != len(data):
            make(self.directory)
            aside = path.with_name(f".{path.name}.{uuid4().hex}.partial")  # another may write the same
            try:
                aside.write_bytes(data)
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
        return path.resolve()


def described(path: Path, place: str) -> tuple[ImageRef, Any]:
    """Return an image file, whose tokens are still unknown, and its picture in RGB, upright."""
    data = _read(path, place)
    picture = _decoded(data, f"{place}: the image {path}")
    width, height = picture.size
    return ImageRef(hashlib.sha256(data).hexdigest(), str(path), height, width), picture


def picture_of(image: ImageRef) -> Any:
    data = _read(Path(image.path), "a prompt")
    if (now := hashlib.sha256(data).hexdigest()) != image.sha256:
        raise DataError(
            f"the image {image.path} changed since its prompt was read (its SHA-256 was {image.sha256[:12]}... and is "
            f"{now[:12]}...): put the old file back, or start a new run"
        )
    return _decoded(data, f"the image {image.path}")


def _read(path: Path, place: str) -> bytes:
    try:
        return content(path, linked=True, most=MOST_BYTES)
    except OSError as error:
        raise DataError(f"{place}: the image {path} cannot be read: {error.strerror or error}") from error


def _decoded(data: bytes, what: str) -> Any:
    if "PIL" not in sys.modules:  # once, since it parses what oppo requires
        require("vision", "an image in a prompt", module="PIL", error=DataError)
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 - an extra

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(BytesIO(data)) as image:
                image.load()
                return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # any kind, from decoders of dozens of formats
        unknown = isinstance(error, UnidentifiedImageError)  # whose message is the address of a buffer
        why = f"{len(data)} bytes, {data[:8]!r}..., in no format that Pillow reads" if unknown else one_line(error)
        raise DataError(f"{what} cannot be decoded: {why}; save it again, or leave the row out") from error
