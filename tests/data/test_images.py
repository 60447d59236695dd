"""Images of rows: found wherever datasets have them, kept as files, and refused in one sentence."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from oppo.data.images import gathered, misnamed
from oppo.errors import DataError
from oppo.images import ImageFiles, ImageRef, described, picture_of
from tests.kit.seen import picture, png, uri


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(png(1))
    return ImageFiles(tmp_path / "images", tmp_path / "data")


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"prompt": "what is <image>?", "image": "a.png"}, ["what is ", "?"]),
        ({"prompt": "<image><image>", "images": ["a.png", png(2)]}, ["", "", ""]),
        ({"prompt": "<image>", "image": {"bytes": png(2), "path": None}, "images": [None]}, ["", ""]),
    ],
)
def test_a_text_has_its_images_at_placeholders(row: Mapping[str, Any], parts: list[str], files: ImageFiles) -> None:
    found, value, paths = gathered(row, "prompt", files, "row 1")
    assert value == parts
    assert len(paths) == len(parts) - 1
    kept = found["images"] if row.get("images", [None])[0] else [found["image"]]
    assert kept == list(map(str, paths))


@pytest.mark.parametrize(
    ("content", "images", "kinds"),
    [
        ("what?", ["a.png"], ["image", "text"]),
        ("is <image> as <image>?", ["a.png", png(2)], ["text", "image", "text", "image", "text"]),
        ([_text("is "), {"type": "image"}, _text("<image>?")], ["a.png"], ["text", "image", "text"]),
        ([{"type": "image", "image": png(2)}, _text("what?")], None, ["image", "text"]),
        ([{"type": "image", "path": "a.png"}], None, ["image"]),
        ([{"type": "image", "image": picture(3)}], None, ["image"]),
        ([{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image"}], ["a.png"], ["image"] * 2),
    ],
)
def test_messages_have_their_images_in_parts(
    content: object, images: Sequence[object] | None, kinds: list[str], files: ImageFiles
) -> None:
    row = {"prompt": [{"role": "system", "content": "see"}, {"role": "user", "content": content}], "images": images}
    found, messages, paths = gathered(row, "prompt", files, "row 1")
    parts = messages[1]["content"]  # type: ignore[index] # messages, not texts
    assert [part["type"] for part in parts] == kinds  # type: ignore[index]
    assert [part["image"] for part in parts if part["type"] == "image"] == list(map(str, paths))  # type: ignore[index]
    assert found["prompt"] == messages
    assert all(path.is_file() for path in paths)


def test_an_image_that_a_row_holds_is_written_once_under_its_digest(files: ImageFiles) -> None:
    paths = {
        files.file(each, "row 1")
        for each in (png(2), uri(2), {"base64": uri(2).split(",")[1]}, {"bytes": png(2)}, picture(2))
    }
    assert [*paths] == [files.directory / hashlib.sha256(png(2)).hexdigest()]
    before = next(iter(paths)).stat().st_mtime_ns
    files.file(png(2), "row 2")
    assert next(iter(paths)).stat().st_mtime_ns == before
    there = files.file("a.png", "row 1")
    assert there.parent.name == "data"
    spaced = there.with_name("a b.png")
    spaced.write_bytes(png(2))
    for uri_of in (there.as_uri(), f"file://localhost{there}", spaced.as_uri()):
        assert files.file(uri_of, "row 1") == (spaced if "%20" in uri_of else there)


def test_two_that_write_one_image_do_not_meet(files: ImageFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    write, both = Path.write_bytes, threading.Barrier(2, timeout=20)

    def beside(path: Path, data: bytes) -> int:
        written = write(path, data)
        both.wait()
        return written

    monkeypatch.setattr(Path, "write_bytes", beside)
    with ThreadPoolExecutor() as threads:
        (path,) = set(threads.map(lambda each: files.file(each, "row 1"), (png(2), png(2))))
    assert path.read_bytes() == png(2)
    assert [*files.directory.iterdir()] == [path]


@pytest.mark.parametrize(
    ("prompt", "image", "words"),
    [
        ("<image>", "https://a.b/c.png", "is a URL, and images are not fetched: save it, and give its path"),
        ("<image>", "file://c.png", "is a URL, and images are not fetched"),
        ("<image>", "b.png", r"there is no image file 'b.png' \(did you mean 'a.png'"),
        ("<image>", ".", "there is no image file '.'$"),
        ("<image>", f"a.{'b' * 3000}", r"is no path .* base64 begins with 'data:image/png;base64,'$"),
        ("<image>", f"a/{'b/' * 300}", r"there is no image file '.* base64 begins with 'data:image/png;base64,'$"),
        ("<image>", {"base64": "%%"}, "the data URI of an image is not in base64"),
        ("<image>", "data:image/png;base64,%%", "the data URI of an image is not in base64"),
        ("<image>", "data:image/png,abc", "the data URI of an image is not in base64"),
        ("<image>", 3, "expected an image as a path, bytes, a data URI or a picture of Pillow, got 3"),
        ("<image>", {"width": 3}, "an image is a table with bytes or a path"),
        ("a", "a.png", "has 0 places for 1 image in image: expected one"),
        ("<image> <image>", "a.png", "has 2 places for 1 image in"),
        ([{"role": "assistant", "content": "a"}], "a.png", "has 0 places for 1 image in"),
        ([{"role": "user", "content": [{"type": "image"}] * 2}], "a.png", "more than 1 place for 1 image in"),
        ([{"role": "user", "content": "<image>"}], None, "more than 0 places for 0 images in "),
        (3, "a.png", "expected text or a list of chat messages beside images"),
    ],
)
def test_what_is_no_image_or_has_no_place_is_refused(
    prompt: object, image: object, words: str, files: ImageFiles
) -> None:
    with pytest.raises(DataError, match=f"row 1.*{words}"):
        gathered({"prompt": prompt, "image": image}, "prompt", files, "row 1")


def test_a_picture_is_upright_and_without_transparency(tmp_path: Path) -> None:
    turned, exif = Image.new("RGB", (30, 20)), Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    Image.new("RGBA", (5, 7)).save(tmp_path / "clear.png")
    image, seen = described(tmp_path / "turned.jpg", "row 1")
    assert (image.width, image.height, seen.size) == (20, 30, (20, 30))
    assert described(tmp_path / "clear.png", "row 1")[1].mode == "RGB"


def test_a_file_that_cannot_be_decoded_or_has_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for data, why in (png(1)[:60], "OSError: image"), (b"", "0 bytes, b''..., in no"), (b"text", "4 bytes, b'text'"):
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"row 1: the image .*a\.png cannot be decoded: {why}.*; save it again"):
            described(path, "row 1")
    path.write_bytes(png(1))
    image = described(path, "row 1")[0]
    assert picture_of(image).size == (48, 32)
    path.write_bytes(png(2))
    with pytest.raises(DataError, match=r"a\.png changed since its prompt was read .* put the old file back"):
        picture_of(image)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.png cannot be read: No such file"):
        picture_of(ImageRef(image.sha256, image.path, 32, 48))


HELD = ("a.png", ["A.JPG", "b.webp"], "data:image/png;base64,aa", {"bytes": b"a", "path": None}, [{"bytes": b"a"}])


def test_a_placeholder_without_an_image_beside_one_under_another_name_is_refused() -> None:
    chat, text = [{"role": "user", "content": "<image> red?"}], "<image> red?"
    for held in (*HELD, picture(1)):
        for prompt in (chat, text):
            assert misnamed({"prompt": prompt, "img": held, "n": 1}, "prompt") == "img"
        assert not misnamed({"prompt": "red?", "img": held}, "prompt")
    for other in (None, "", [], 3, "red.txt", {"path": "a"}, ["a.png", 3], "a.png is red"):
        assert not misnamed({"prompt": text, "img": other}, "prompt")
