"""The seam between slabs and transformers: a ``Cache`` whose layers write into, and read from, a slab."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from oppo.hf.slabs import Site, Slab


@dataclass(slots=True)
class Aim:
    """What the forward pass in progress works on; all layers of a cache share one."""

    slab: Slab
    site: Site


class SlabLayer(CacheLayerMixin):
    """One attention layer's view of whatever the cache is aimed at."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, number: int, aim: Aim) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self.is_initialized = True
        self._number = number
        self._aim = aim

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a slab makes its tensors when it is first written."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values; return all that the queries attend to, masked columns included."""
        del args, kwargs
        return self._aim.slab.store(self._number, key_states, value_states, self._aim.site)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of key columns and the first one's position."""
        del query_length
        return self._aim.site.end, 0

    def get_seq_length(self) -> int:
        """Return 0: rows differ in length, so positions and masks are always given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Return the longest sequence that the slab can hold."""
        return self._aim.slab.longest


class SlabCache(Cache):
    """A transformers cache that is aimed at a place in a slab before each forward pass."""

    def __init__(self, layers: int, aim: Aim) -> None:
        self._aim = aim
        super().__init__(layers=[SlabLayer(number, aim) for number in range(layers)])

    def at(self, slab: Slab, site: Site) -> SlabCache:
        """Return this cache, aimed at ``site`` of ``slab``."""
        self._aim.slab, self._aim.site = slab, site
        return self
