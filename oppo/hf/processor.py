"""The image processor of a checkpoint: which tokens stand for an image, and the pixels that its tower reads."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from oppo.data.images import gathered
from oppo.data.prompts import Begin, checked_messages
from oppo.data.rows import Row
from oppo.errors import ConfigError, DataError, counted, one_line, shown
from oppo.events import IntArray
from oppo.hf.model_files import located, processor_files, quiet
from oppo.hf.model_parts import pads_of
from oppo.hf.tokenizer import HfTokenizer, Rendered
from oppo.images import ImageFiles, ImageRef, described, picture_of
from oppo.libraries import require

OF_TEXT: Final = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""What a processor returns of its text; everything else is of its images."""

TRIAL: Final = ImageRef("", "", height=64, width=96)


class Processor:
    """transformers' processor of a checkpoint, for images alone: the backend of Pillow, and none for videos.

    It is loaded at its first use, and pickled as its name.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._lock = Lock()  # threads that serve one model share it, and tokenizers lend their state to one at a time

    def __reduce__(self) -> tuple[type[Processor], tuple[str]]:
        return type(self), (self.path,)

    @cached_property
    def config(self) -> Any:
        try:
            return AutoConfig.from_pretrained(located(self.path, weights=False))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the configuration of {self.path} cannot be read: {one_line(error)}") from error

    @cached_property
    def inner(self) -> Any:
        require("vision", f"reading images with {self.path}", module="PIL")
        config, directory = self.config, located(self.path, weights=False)
        if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or not processor_files(directory):
            raise ConfigError(
                f"{self.path} reads text only: prompts with images need a tower and an image processor beside it"
            )
        try:
            with quiet():
                kind = _without_videos(PROCESSOR_MAPPING[type(config)])
                parts = {
                    "image_processor": AutoImageProcessor.from_pretrained(directory, backend="pil"),
                    "tokenizer": AutoTokenizer.from_pretrained(directory),
                }
                given, _ = kind.get_processor_dict(directory)
                return kind.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], given)
        except Exception as error:  # any kind: files and libraries of a dozen families
            raise ConfigError(
                f"the image processor of {self.path} cannot be used ({one_line(error)}): expected the files that "
                "save_pretrained() of transformers writes of a processor, without code of its own"
            ) from error

    @cached_property
    def pad(self) -> int:
        """The id of the tokens that the features of an image replace."""
        return pads_of(self.config)[0]

    @cached_property
    def digest(self) -> str:
        made = {"kind": type(self.inner).__name__, **self.inner.image_processor.to_dict()}
        return hashlib.sha256(json.dumps(made, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def placeholder(self) -> str:
        return str(self.inner.image_token)

    def pixels(self, images: Sequence[ImageRef]) -> dict[str, Tensor]:
        """Return the tensors of some images, float32 and int64, by the names that the model's tower has for them."""
        found = self._processed([*map(_picture, images)], " and ".join(image.path for image in images))
        return {name: torch.as_tensor(value) for name, value in found.items() if name not in OF_TEXT}

    def expansion(self, picture: Any, name: str) -> str:
        found = self._processed([picture], name, return_text_replacement_offsets=True)
        return str(found["text_replacement_offsets"][0][0]["replacement"])

    def prompt_ids(self, text: str, pictures: Sequence[Any]) -> list[int]:
        """Return the tokens of a prompt whose text has a place for each picture."""
        inner = self.inner
        with self._lock:
            made = inner(images=[*pictures], text=[text], add_special_tokens=False)
        return [int(token) for token in made["input_ids"][0]]

    def trial(self) -> tuple[IntArray, tuple[ImageRef, ...]]:
        """Return the tokens of a short prompt, and its image, of noise, which no file has."""
        text = f"a{self.expansion(_picture(TRIAL), 'a trial')}b"
        with self._lock:
            ids = np.array(self.inner.tokenizer(text)["input_ids"], np.int32)
        pads = np.flatnonzero(ids == self.pad)
        return ids, (replace(TRIAL, start=int(pads[0]), tokens=len(pads)),)

    def _processed(self, pictures: Sequence[Any], name: str, **options: object) -> Mapping[str, Any]:
        text = [self.placeholder * len(pictures)]
        given, inner = options or {"return_tensors": "pt"}, self.inner
        try:
            with self._lock:
                made: Mapping[str, Any] = inner(images=[*pictures], text=text, **given)
        except Exception as error:  # any kind: an image may be too large, too small, or too narrow
            sizes = ", ".join(f"{picture.size[0]} x {picture.size[1]}" for picture in pictures)
            raise DataError(
                f"{name}: the image processor of {self.path} takes no image of {sizes} pixels: {one_line(error)}"
            ) from error
        return made


def _picture(image: ImageRef) -> Any:
    if image.path:
        return picture_of(image)
    from PIL import Image  # noqa: PLC0415 - an extra

    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (image.height, image.width, 3), np.uint8))


def _without_videos(kind: Any) -> Any:
    # Their processors need torchvision.
    def check(self: object, name: str, argument: object) -> object:
        return None if argument is None else kind.check_argument_for_proper_class(self, name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


@dataclass(slots=True)
class ImagePrompts:
    """Reads the prompts of rows with images, for :class:`oppo.data.prompts.Encoding`."""

    # The ids are those of the processor, which is asked once whether they are. Here a special token that a message
    # spells stays text.

    processor: Processor
    files: ImageFiles
    _expansions: dict[tuple[int, int], str] = field(default_factory=dict)
    _checked: bool = False

    def __call__(self, row: Row, column: str, place: str, begin: Begin) -> tuple[Row, list[int], tuple[ImageRef, ...]]:
        """Return the row, begun, with paths in place of images, the ids of its prompt, and the images."""
        row, value, paths = gathered(row, column, self.files, place)
        asked = row[column]
        row, given = begin(row, column)
        tokenizer = cast("HfTokenizer", given)
        begun: Any = row[column]
        value = [*value[:-1], f"{value[-1]}{begun[len(asked) :]}"] if isinstance(asked, str) else begun
        seen = [described(path, place) for path in paths]
        expansions = [self._expansion(image, picture, place) for image, picture in seen]
        before, rendered = self._rendered(value, tokenizer, place)
        ids = [*before, *tokenizer.encode_rendered(self._expanded(rendered, expansions, place))]
        if not self._checked and not rendered.data:
            self._compare(rendered.text, ids[len(before) :], [picture for _, picture in seen], place)
            self._checked = True
        counts = [tokenizer.encode_whole(text).count(self.processor.pad) for text in expansions]
        return row, ids, self._located(ids, [image for image, _ in seen], counts, place)

    def _rendered(self, value: Sequence[Any], tokenizer: HfTokenizer, place: str) -> tuple[Sequence[int], Rendered]:
        if isinstance(value[0], str):
            return tokenizer.around[0], Rendered(self.processor.placeholder.join(value), special=False)
        messages = checked_messages(value, tokenizer, place, images=True)
        try:
            return (), tokenizer.rendered(messages, answered=False)
        except Exception as error:  # any kind: a template is a program
            raise DataError(f"{place}: the chat template cannot read {shown(value)}: {one_line(error)}") from error

    def _expansion(self, image: ImageRef, picture: Any, place: str) -> str:
        size = image.height, image.width
        if size not in self._expansions:
            self._expansions[size] = self.processor.expansion(picture, f"{place}, {image.path}")
        return self._expansions[size]

    def _expanded(self, rendered: Rendered, expansions: Sequence[str], place: str) -> Rendered:
        text, data = rendered.text, rendered.data
        places = [
            found.span()
            for found in re.finditer(re.escape(self.processor.placeholder), text)
            if not any(start < found.end() and found.start() < stop for start, stop in data)
        ]
        if len(places) != len(expansions):
            raise DataError(
                f"{place}: the chat template of the policy's tokenizer has {counted(len(places), 'place')} for "
                f"{counted(len(expansions), 'image')} of the prompt: expected one for each, "
                f"{self.processor.placeholder!r}"
            )
        parts, end = list[str](), 0
        for (start, stop), expansion in zip(places, expansions, strict=True):
            parts += [text[end:start], expansion]
            end = stop

        def moved(at: int) -> int:
            pairs = zip(places, expansions, strict=True)
            return at + sum(len(each) - (stop - start) for (start, stop), each in pairs if stop <= at)

        return replace(rendered, text="".join([*parts, text[end:]]), data=[(moved(a), moved(b)) for a, b in data])

    def _compare(self, text: str, ids: Sequence[int], pictures: Sequence[Any], place: str) -> None:
        theirs = self.processor.prompt_ids(text, pictures)
        if theirs != [*ids]:
            at = next((at for at, pair in enumerate(zip(ids, theirs, strict=False)) if pair[0] != pair[1]), -1)
            raise ConfigError(
                f"{place}: the processor of {self.processor.path} makes {len(theirs)} tokens of this prompt, and the "
                f"tokenizer {len(ids)} of the same text, which differ at {at}: its tokenizer is not that of the policy"
            )

    def _located(
        self, ids: Sequence[int], images: Sequence[ImageRef], counts: Sequence[int], place: str
    ) -> tuple[ImageRef, ...]:
        pads = [at for at, token in enumerate(ids) if token == self.processor.pad]
        if len(pads) != sum(counts) or not all(counts):
            raise DataError(
                f"{place}: the prompt has {counted(len(pads), 'image token')}, and its images stand for {sum(counts)}"
            )
        starts = [pads[sum(counts[:number])] for number in range(len(images))]
        rows = zip(images, starts, counts, strict=True)
        return tuple(replace(image, start=start, tokens=count) for image, start, count in rows)
