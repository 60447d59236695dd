"""What a model sees of a prompt: the features of its image tokens, and where these are in space.

The tower reads the images of one prompt alone, once for all of its samples, so that no bit of their features depends on
other prompts. A pass over any piece of a sequence is given the features of the image tokens in it, in their order, and
puts them in place of these tokens' embeddings (``mm_encoder_outputs`` of transformers).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from oppo.errors import ModelError, ModelRefused, counted
from oppo.events import IntArray
from oppo.hf.model_parts import backbone, pads_of, takes
from oppo.hf.processor import Processor
from oppo.images import ImageRef

ENCODED: Final = "mm_encoder_outputs"
"""The argument of a forward pass for the outputs of towers, since transformers 5.18."""

KEPT_BYTES: Final = 256 * 2**20  # of features, of the prompts that were seen last

PROCESSOR: Final = "_oppo_processor"  # the attribute of a backbone with the processor of its images

WHOLE: Final = ("gemma3",)
"""Types of models in which the tokens of an image attend to all of it, so that none may be cut."""


def let_see(model: PreTrainedModel, processor: Processor) -> None:
    setattr(backbone(model), PROCESSOR, processor)


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    length: int  # of the prompt, in tokens
    pads: NDArray[np.int64]  # [k], the positions of its image tokens, ascending
    images: NDArray[np.int64]  # [k], the number of the image of each
    levels: Sequence[Tensor]  # features [k, D] of these tokens at the input, and at each layer that adds some
    places: NDArray[np.int64] | None  # [3, length], rotary positions; None: they are the positions
    kind: type[Any]  # the class of the tower's outputs
    joined: bool  # these are one tensor
    whole: bool  # an image must not be cut

    @property
    def offset(self) -> int:
        # How far rotary positions behind the prompt are from positions.
        return 0 if self.places is None else int(self.places.max()) + 1 - self.length

    def rotary(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rotary positions [3, n] of positions, int64 [n]."""
        if self.places is None:
            return np.broadcast_to(columns, (3, len(columns)))
        inside = self.places[:, np.minimum(columns, self.length - 1)]
        return np.where(columns < self.length, inside, columns + self.offset)

    def between(self, start: int, stop: int) -> list[Tensor]:
        """Return the features of the image tokens at positions ``start .. stop``, level by level."""
        first, last = np.searchsorted(self.pads, [start, stop])
        return [level[first:last] for level in self.levels]

    def count(self, start: int, stop: int) -> int:
        first, last = np.searchsorted(self.pads, [start, stop])
        return int(last - first)

    def cut(self, start: int, limit: int) -> int:
        """Return how many tokens to read from ``start`` on: ``limit``, or a multiple of it that cuts no image."""
        size = limit
        while self.whole and self._cuts(start + size):
            size += limit
        return size

    def _cuts(self, at: int) -> bool:
        before, behind = self.images[self.pads < at], self.images[self.pads >= at]
        return bool(len(before) and len(behind) and before[-1] == behind[0])

    def blocks(self, end: int) -> NDArray[np.int64]:
        """Return the number of the image at each position below ``end``, or -1."""
        found = np.full(max(end, self.length), -1)
        if self.whole:
            found[self.pads] = self.images
        return found[:end]


NONE: Final = np.zeros(0, np.int64)
BLIND: Final = Sight(0, NONE, NONE, (), None, object, joined=False, whole=False)  # what a prompt of text shows


def encoded(shown: Sequence[tuple[Sight, int, int]]) -> dict[str, object]:
    """Return the argument of a forward pass for the features of image tokens between two positions of each sight."""
    levels, sight = [sight.between(start, stop) for sight, start, stop in shown], shown[0][0]
    first, *deeper = [torch.cat(level) for level in zip(*levels, strict=True)]
    stacked = {"deepstack_features": [[each] for each in deeper]} if deeper else {}
    return {ENCODED: {"image": sight.kind(pooler_output=first[None] if sight.joined else [first], **stacked)}}


class Eyes:
    """The tower of one model, which keeps the sights of the last prompts; ``looks``: how often it was passed."""

    def __init__(self, model: PreTrainedModel, *, frozen: bool = False) -> None:
        # frozen: refuse a tower that is trained, since features are kept
        self._processor = pixels_of(model)
        if frozen and (trained := _trained_beside_text(model)):
            raise ModelRefused(
                f"{trained[0]} of {type(model).__name__} requires a gradient, and what reads images is frozen: call "
                "requires_grad_(False) on it"
            )
        self.looks = 0
        self._model = model
        self._trunk: Any = backbone(model)
        self.pad = pads_of(model.config)[0]
        self._kept: OrderedDict[object, Sight] = OrderedDict()

    @torch.no_grad()
    def sight(self, tokens: IntArray, images: tuple[ImageRef, ...]) -> Sight:
        if not images:
            return BLIND
        key = len(tokens), images
        if key not in self._kept:
            self._kept[key] = self._look(tokens, images)
            while len(self._kept) > 1 and self._bytes() > KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _bytes(self) -> int:
        return sum(level.nbytes for sight in self._kept.values() for level in sight.levels)

    def _look(self, tokens: IntArray, images: tuple[ImageRef, ...]) -> Sight:
        self.looks += 1
        given = self._processor.pixels(images)
        out = self._trunk.get_image_features(**taken_by(self._model, given), return_dict=True)
        named = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        levels = [(each if isinstance(each, Tensor) else torch.cat([*each])).flatten(0, -2) for each in named]
        pads = np.flatnonzero(np.asarray(tokens) == self.pad)
        if {len(pads)} != {len(level) for level in levels}:
            raise ModelError(
                f"a prompt has {counted(len(pads), 'image token')} for {counted(len(images), 'image')}, and the tower "
                f"of {type(self._model).__name__} {len(levels[0])} features: its processor is that of another model"
            )
        places = None
        if hasattr(self._trunk, "get_rope_index"):
            ids = torch.as_tensor(np.asarray(tokens, np.int64))[None]
            kinds, grids = (ids == self.pad).int(), {name: each for name, each in given.items() if "grid" in name}
            places = self._trunk.get_rope_index(ids, mm_token_type_ids=kinds, **grids)[0][:, 0].numpy()
        owner = np.repeat(np.arange(len(images)), [image.tokens for image in images])
        joined, whole = isinstance(out.pooler_output, Tensor), self._model.config.model_type in WHOLE
        return Sight(len(tokens), pads, owner, levels, places, type(out), joined, whole)


def taken_by(model: PreTrainedModel, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in given.items()
    }


def _trained_beside_text(model: PreTrainedModel) -> list[str]:
    read: tuple[nn.Module, ...] = (model.get_decoder(), model.get_input_embeddings())
    text = {id(weight) for part in read for weight in part.parameters()}
    return [name for name, each in backbone(model).named_parameters() if each.requires_grad and id(each) not in text]


def pixels_of(model: PreTrainedModel) -> Processor:
    trunk, name = backbone(model), f"{type(model).__name__} (model type {model.config.model_type!r})"
    if not pads_of(model.config) or not hasattr(trunk, "get_image_features"):
        raise ModelRefused(f"{name} cannot be shown images: it has no image tokens, or no tower that reads images")
    if not takes(trunk, ENCODED):
        raise ModelRefused(
            f"{name} cannot be shown images: its forward pass takes no {ENCODED} (transformers has it since 5.18)"
        )
    processor: Processor | None = getattr(trunk, PROCESSOR, None)
    if processor is None:
        raise ModelRefused(f"{name} cannot be shown images: there is no image processor beside its weights")
    return processor


class Seen(NamedTuple):
    """What a pass is given of images: ``blocks`` as of :class:`oppo.hf.kv.attention.Masks`."""

    arguments: Mapping[str, object]
    blocks: Tensor | None = None


UNSEEN: Final = Seen({})


def seen_in_pieces(
    sights: Sequence[Sight], starts: Sequence[int], sizes: Sequence[int], end: int, device: torch.device
) -> Seen:
    # For a pass over ``sizes`` tokens of rows from ``starts`` on, padded on the left, and keys below ``end``.
    rows = [(sight, at, at + size) for sight, at, size in zip(sights, starts, sizes, strict=True)]
    shown = [row for row in rows if row[0].count(row[1], row[2])]
    blocks: Tensor | None = None
    given = encoded(shown) if shown else {}
    if any(sight.places is not None for sight in sights):
        turned = [sight.rotary(np.arange(start, stop)) for sight, start, stop in rows]
        places = [np.pad(each, ((0, 0), (max(sizes) - each.shape[1], 0))) for each in turned]
        given["position_ids"] = torch.from_numpy(np.stack(places, 1)).to(device)
    if any(sight.whole for sight, _, _ in shown):
        blocks = torch.from_numpy(np.stack([sight.blocks(end) for sight in sights])).to(device)
    return Seen(given, blocks)


def shown_to(
    sights: Sequence[Sight], lengths: Sequence[int], device: torch.device, *, packed: bool
) -> dict[str, object]:
    # For a pass over whole rows, padded on the right or packed.
    seen, width = [sight for sight in sights if sight is not BLIND], max(lengths)
    found = encoded([(sight, 0, sight.length) for sight in seen])
    if any(sight.places is not None for sight in seen):
        rows = zip(sights, lengths, strict=True)
        turned = [sight.rotary(np.arange(length if packed else width)) for sight, length in rows]
        places = np.concatenate(turned, 1)[:, None] if packed else np.stack(turned, 1)
        found["position_ids"] = torch.from_numpy(places).to(device)
    if any(sight.whole for sight in seen):
        kinds = np.stack([sight.blocks(width) for sight in sights]) >= 0
        found["token_type_ids"] = torch.from_numpy(kinds.astype(np.int64)).to(device)
    return found
