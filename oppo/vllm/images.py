"""Images on vLLM: its reader of images is given the policy's processor, and finds the tokens that are there.

Left alone it would read images by its own copy of the processor, with other pixels, and expand the place of an image in
a prompt once more. Pictures go to it under the digests of their files, by which it keeps their pixels, their features
and the KV cache: the samples of a group have them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from oppo.errors import ConfigError
from oppo.images import ImageRef, picture_of

ADVICE: Final = "set models.engine = 'transformers'"
KEPT: Final = 4  # pictures, decoded, of the images that were shown last: samples of a group follow one another


class Pictures:
    """Shows images to vLLM's ``AsyncLLM``: no prompt may show it any otherwise."""

    def __init__(self, model: str | Path) -> None:
        """Raise ``ConfigError`` where no reading of images by the model is known to be exact on vLLM."""
        from oppo.hf.processor import Processor  # noqa: PLC0415 - transformers takes seconds to import
        from oppo.hf.vision import WHOLE  # noqa: PLC0415 - likewise

        self._processor = Processor(model)
        kind = self._processor.config.model_type
        self._name = f"{Path(model).name} (model type {kind!r})"
        if kind in WHOLE:
            raise ConfigError(
                f"in {self._name} the tokens of an image attend to all of it, and vLLM has not been seen to have them "
                f"do so: {ADVICE}"
            )
        self._picture = lru_cache(KEPT)(picture_of)

    def begin(self, llm: Any) -> None:
        """Change how vLLM reads images; raise ``ConfigError`` where it reads none, or otherwise than transformers."""
        inner, reader = self._processor.inner, llm.renderer.mm_processor
        if reader is None:
            raise ConfigError(f"vLLM reads no images with {self._name}, and prompts show some: {ADVICE}")
        own = reader.info.get_hf_processor()
        if not isinstance(inner, type(own)):
            raise ConfigError(
                f"vLLM reads images for {self._name} by a {type(own).__name__}, and the trainer by transformers' "
                f"{type(inner).__name__}: {ADVICE}"
            )
        reader.info.get_hf_processor = lambda **named: inner
        # Nothing else of it leaves tokens as they are.
        reader._apply_prompt_updates = partial(_located, reader, self._processor.pad)  # noqa: SLF001

    def shown(self, images: Sequence[ImageRef]) -> dict[str, object]:
        """Return what a prompt of vLLM has beside its tokens; reads files."""
        return {
            "multi_modal_data": {"image": [self._picture(image) for image in images]},
            "multi_modal_uuids": {"image": [image.sha256 for image in images]},
        }


def _located(reader: Any, pad: int, tokens: list[int], updates: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
    # The tokens, and where those of each image are; vLLM knows from its pixels how many have features.
    found = {kind: each for kind, each in reader._find_mm_placeholders(tokens, updates).items() if each}  # noqa: SLF001
    features = sum(each.to_range().get_num_embeds() for kind in found.values() for each in kind)
    if features != tokens.count(pad):
        raise ValueError(f"{features} image tokens are where images of these sizes have them, of {tokens.count(pad)}")
    return tokens, found
