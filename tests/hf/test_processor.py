"""The tokens that stand for images are the processor's own; and a message that spells one has text."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from time import sleep
from typing import Any, cast

import pytest

from oppo.data.prompts import read_prompts
from oppo.data.rows import Row
from oppo.errors import ConfigError, DataError
from oppo.hf.loading import load_tokenizer
from oppo.hf.processor import ImagePrompts, Processor
from oppo.hf.tokenizer import HfTokenizer
from oppo.images import ImageFiles, ImageRef, picture_of
from tests.kit.seen import PROCESSORS, checkpoint, picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processors")
    for name in PROCESSORS:
        checkpoint(folder, name)
    for number, (width, height) in enumerate(((48, 32), (40, 64), (16, 16))):
        picture(number, width, height).save(folder / f"{number}.png")
    return folder


Read = Callable[[dict[str, Any]], tuple[Any, list[int], tuple[ImageRef, ...]]]


def _reader(folder: Path, name: str, other: str = "") -> tuple[ImagePrompts, HfTokenizer, Read]:
    tokenizer = HfTokenizer(load_tokenizer(folder / (other or name)))
    reader = ImagePrompts(Processor(folder / name), ImageFiles(folder / "images", folder))
    return reader, tokenizer, lambda row: reader(row, "prompt", "row 1", lambda row, column: (row, tokenizer))


def _asked(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("images", [["0.png"], ["1.png", "2.png"], ["2.png", "0.png", "1.png"]])
def test_the_ids_are_those_of_the_processor(name: str, images: list[str], folder: Path) -> None:
    reader, tokenizer, read = _reader(folder, name)
    row = {"prompt": _asked("a<image>" * len(images) + "b"), "images": images}
    written, ids, seen = read(row)
    inner = reader.processor.inner
    text = tokenizer.rendered(written["prompt"], answered=False).text
    theirs = inner(text=[text], images=[picture_of(image) for image in seen], add_special_tokens=False)
    assert ids == [*theirs["input_ids"][0]]
    pads = [at for at, token in enumerate(ids) if token == reader.processor.pad]
    assert [pads[sum(each.tokens for each in seen[:n])] for n in range(len(seen))] == [each.start for each in seen]
    assert len(pads) == sum(image.tokens for image in seen)
    text_too = {"prompt": "a<image>" * len(images), "images": images}
    assert read(text_too)[1][0] == tokenizer.around[0][0]


@pytest.mark.parametrize("name", PROCESSORS)
def test_an_image_token_that_a_message_spells_is_text(name: str, folder: Path) -> None:
    *_, read = _reader(folder, name)
    plain = read({"prompt": _asked("<image>b"), "images": ["0.png"]})
    spelt = read({"prompt": _asked("<image>b<|pad|><|begin|>"), "images": ["0.png"]})
    assert [image.tokens for image in plain[2]] == [image.tokens for image in spelt[2]]
    assert len(spelt[1]) == len(plain[1]) + len("<|pad|><|begin|>")


def test_a_row_with_images_may_have_its_prompt_from_an_environment_alone(folder: Path) -> None:
    def begin(row: Row, column: str) -> tuple[Row, HfTokenizer]:
        assert [row["images"], row["n"]] == [[str(folder / "0.png")], 7]
        message, *others = cast("list[dict[str, Any]]", row[column])
        return {**row, column: [{**message, "content": [*message["content"], said]}, *others]}, tokenizer

    reader, tokenizer, _ = _reader(folder, "llava")
    said = {"type": "text", "text": "red?"}
    row: dict[str, object] = {"images": ["0.png"], "n": 7}
    read = partial(read_prompts, tokenizer=tokenizer, images=ImagePrompts(reader.processor, ImageFiles(folder, folder)))
    (prompt,) = read([row], begin=begin)
    (asked,) = read([{"prompt": _asked("red?"), **row}])
    assert prompt.tokens.tolist() == asked.tokens.tolist()
    assert prompt.images == asked.images
    assert prompt.columns["prompt"] == asked.columns["prompt"]
    for without in (None, lambda row, column: (row, tokenizer)):
        with pytest.raises(
            DataError, match=r"row 1: no column 'prompt'; the columns there are images, n: name one as column$"
        ):
            read([row], begin=without)


def test_several_threads_may_read_prompts(folder: Path) -> None:
    rows = [{"prompt": _asked(f"{n}<image>"), "images": [f"{n % 3}.png"]} for n in range(40)]
    expected = [*map(_reader(folder, "qwen3_vl")[2], rows)]
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(_reader(folder, "qwen3_vl")[2], rows)] == expected


class _Lent:
    """A processor, or its tokenizer, whose state is lent to one thread at a time, as that of a fast tokenizer."""

    def __init__(self, inner: Any, state: Lock) -> None:
        self._inner, self._state = inner, state

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return _Lent(found, self._state) if name == "tokenizer" else found

    def __call__(self, *values: Any, **named: Any) -> Any:
        if not self._state.acquire(blocking=False):
            raise RuntimeError("Already borrowed")
        try:
            sleep(0.002)
            return self._inner(*values, **named)
        finally:
            self._state.release()


def test_threads_take_turns_with_a_processor_that_they_share(folder: Path) -> None:
    reader, _, read = _reader(folder, "qwen3_vl")
    processor, row = reader.processor, {"prompt": _asked("a<image>"), "images": ["0.png"]}
    _, _, (image,) = read(row)
    processor.__dict__["inner"] = _Lent(processor.inner, Lock())

    def compared() -> object:
        reader._checked = False
        return read(row)

    uses: list[Callable[[], object]] = [
        compared,
        processor.trial,
        partial(processor.pixels, [image]),
        partial(processor.expansion, picture_of(image), "an image"),
    ]
    with ThreadPoolExecutor(8) as pool:
        for made in [pool.submit(use) for use in uses * 8]:
            made.result()


def test_what_the_processor_cannot_do_is_named(folder: Path) -> None:
    picture(1, width=3000, height=10).save(folder / "narrow.png")
    *_, llava = _reader(folder, "llava", "gemma3")
    _, changed, other = _reader(folder, "llava")
    changed.inner.add_tokens(["zz"])
    for read, image, error, words in (
        (
            _reader(folder, "qwen2_5_vl")[2],
            "narrow.png",
            DataError,
            "row 1, .*narrow.png: .* no image of 3000 x 10 pixels",
        ),
        (llava, "0.png", DataError, "has 0 places for 1 image of the prompt"),
        (other, "0.png", ConfigError, r"makes \d+ tokens of this prompt, and the tokenizer \d+ .* differ at \d+"),
    ):
        with pytest.raises(error, match=words):
            read({"prompt": _asked("<image> zz"), "images": [image]})


def test_processors_are_told_apart_by_what_makes_pixels(folder: Path) -> None:
    digests = {Processor(folder / name).digest for name in PROCESSORS}
    assert len(digests) == len(PROCESSORS)
    assert Processor(folder / "llava").digest == Processor(folder / "llava").digest
