"""The seam between slabs and transformers: a ``Cache`` whose layers write into, and read from, slabs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from oppo.hf.kv.segmented_attention import Segments
from oppo.hf.kv.slabs import KVRegion, Slab


class KVView(NamedTuple):
    """Where consecutive rows of a forward pass have their keys and values."""

    slab: Slab
    region: KVRegion


@dataclass(slots=True)
class ActiveViews:
    """What the forward pass in progress works on; all layers of a cache share one.

    Attributes:
        views: in the order of the batch. More than one are read as :class:`~oppo.hf.kv.segmented_attention.Segments`.
    """

    views: Sequence[KVView] = ()


class SlabLayer(CacheLayerMixin):
    """One attention layer's view of whatever the cache is aimed at."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, number: int, active: ActiveViews) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self.is_initialized = True
        self._number = number
        self._active = active

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a slab makes its tensors when it is first written."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values; return all that the queries attend to, masked columns included."""
        del args, kwargs
        if len(self._active.views) == 1:
            slab, region = self._active.views[0]
            return slab.store(self._number, key_states, value_states, region)
        sizes = [region.rows for _, region in self._active.views]
        news = zip(key_states.split_with_sizes(sizes), value_states.split_with_sizes(sizes), strict=True)
        stored = [
            slab.store(self._number, *new, region) for (slab, region), new in zip(self._active.views, news, strict=True)
        ]
        keys, values = zip(*stored, strict=True)
        return cast("Tensor", Segments(keys)), cast("Tensor", Segments(values))  # models only hand them on

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of key columns and the first one's position."""
        del query_length
        return max(region.end for _, region in self._active.views), 0

    def get_seq_length(self) -> int:
        """Return 0: rows differ in length, so positions and masks are always given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Return the longest sequence that the slab can hold."""
        return max(slab.longest for slab, _ in self._active.views)

    get_max_cache_shape = get_max_length
    """What transformers calls it before 5.13."""


class SlabCache(Cache):
    """A transformers cache that is aimed at views in slabs before each forward pass."""

    def __init__(self, layers: int) -> None:
        self._active = ActiveViews()
        super().__init__(layers=[SlabLayer(number, self._active) for number in range(layers)])

    def at(self, views: Sequence[KVView]) -> SlabCache:
        """Return this cache, aimed at ``views``."""
        self._active.views = views
        return self
