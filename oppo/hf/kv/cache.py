"""A transformers ``Cache`` whose layers write to, and read from, slabs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from oppo.hf.kv.segmented_attention import Segments
from oppo.hf.kv.slabs import KVRegion, Slab


class KVView(NamedTuple):
    """The keys and values of consecutive rows of a forward pass: a region of a slab."""

    slab: Slab
    region: KVRegion


class SlabLayer(CacheLayerMixin):
    """The keys and values of one attention layer.

    Attributes:
        views: of the forward pass in progress, in the order of the batch. Several are returned as
            :class:`~oppo.hf.kv.segmented_attention.Segments`.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self.is_initialized = True
        self.views: Sequence[KVView] = ()
        self._number = number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a slab allocates its tensors at the first write."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values; return those the queries attend to, masked columns included."""
        del args, kwargs
        if len(self.views) == 1:
            slab, region = self.views[0]
            return slab.store(self._number, key_states, value_states, region)
        sizes = [region.rows for _, region in self.views]
        written = zip(self.views, key_states.split_with_sizes(sizes), value_states.split_with_sizes(sizes), strict=True)
        stored = [slab.store(self._number, keys, values, region) for (slab, region), keys, values in written]
        keys, values = zip(*stored, strict=True)
        return cast("Tensor", Segments(keys)), cast("Tensor", Segments(values))  # models only pass them on

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of key columns and the position of the first."""
        del query_length
        return max(region.end for _, region in self.views), 0

    def get_seq_length(self) -> int:
        """Return 0: rows differ in length, so callers pass positions and masks explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Return the longest sequence that the slabs can hold."""
        return max(slab.longest for slab, _ in self.views)

    get_max_cache_shape = get_max_length
    """Its name in transformers before 5.13."""


class SlabCache(Cache):
    """A transformers cache that works on other views of slabs in each forward pass."""

    def __init__(self, layers: int) -> None:
        self._slab_layers = [SlabLayer(number) for number in range(layers)]
        super().__init__(layers=[*self._slab_layers])

    def at(self, views: Sequence[KVView]) -> SlabCache:
        """Return this cache, whose layers now work on ``views``."""
        for layer in self._slab_layers:
            layer.views = views
        return self
