"""Models as recipes: what crosses to another machine in place of a model, which is loaded and probed there.

::

    ModelRecipe     ──path, dtype, device ...──>  load()          never code, never weights
    ResidentRecipe  ──the same, and a key──────>  load()          the model that has been loaded there under the key

A directory must be found under its path on each machine that loads it: on a file system that they share, or as a copy.
A hub name is fetched there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Final, Literal, TypeAlias, TypeVar
from uuid import uuid4
from weakref import WeakValueDictionary

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from oppo.errors import ConfigError
from oppo.hf.devices import device_of
from oppo.hf.introspection import longest, reach, vocabulary
from oppo.hf.kv.attention import Choice
from oppo.hf.loading import load_causal, load_process, load_scalar, require_supported
from oppo.hf.lora import Quantization, add_lora, load_lora
from oppo.hf.model_files import located, require_adapter
from oppo.hf.shared_memory import SharedModel, Source
from oppo.log import routed

T = TypeVar("T")

ModelKind: TypeAlias = Literal["causal", "scalar", "process"]

LOADERS: Final[dict[ModelKind, Callable[..., PreTrainedModel]]] = {
    "causal": load_causal,
    "scalar": load_scalar,
    "process": load_process,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """How a model is loaded, wherever that is done; the arguments are those of :func:`oppo.hf.load_causal`.

    Attributes:
        kind: ``causal`` (a policy, a reference), ``scalar`` (a reward model, a critic) or ``process``.
        device: by name; ``auto`` is the first CUDA device of the process that loads it, or the CPU without one.
        lora_rank: of adapters that are added (:func:`oppo.hf.lora.add_lora`); 0: none.
        adapter: directory or hub name of one that is loaded and trained instead; empty: none.
    """

    path: str
    kind: ModelKind = "causal"
    dtype: str = "float32"
    device: str = "auto"
    attention: Choice = "auto"
    trust_remote_code: bool = False
    allow_pickle: bool = False
    ignore_unused: bool = False
    quantization: Quantization = "none"
    new_head: bool = False
    lora_rank: int = 0
    lora_alpha: int = 32
    lora_seed: int = 0
    lora_experts: bool = False
    lora: Mapping[str, object] = field(default_factory=dict, hash=False)
    adapter: str = ""

    def load(self) -> PreTrainedModel:
        load = LOADERS[self.kind]
        if self.new_head:
            load = partial(load, new_head=True)
        with routed():  # each place that loads it would say the same
            model = load(
                self.path,
                dtype=self.dtype,
                device=device_of(self.device),
                trust_remote_code=self.trust_remote_code,
                allow_pickle=self.allow_pickle,
                ignore_unused=self.ignore_unused,
                attention=self.attention,
                quantization=self.quantization,
            )
        require_supported(model.dtype, model.device)
        if self.lora_rank:
            rank, alpha, seed, experts = self.lora_rank, self.lora_alpha, self.lora_seed, self.lora_experts
            add_lora(model, rank, alpha, seed=seed, experts=experts, more=self.lora)
        if self.adapter:
            load_lora(model, located(self.adapter, weights=True))
        return model

    def config(self) -> PreTrainedConfig:
        # Of an adapter its base's.
        with routed():
            directory = located(self.path, weights=False, trust_remote_code=self.trust_remote_code)
            if (adapter := require_adapter(directory, allow_pickle=self.allow_pickle)) is not None:
                directory = located(adapter.base, weights=False, trust_remote_code=self.trust_remote_code)
        try:
            found: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the model at {self.path!r} has no configuration that can be read: {error}") from error
        return found

    def positions(self) -> int:
        return reach(self.config())

    def vocabulary(self) -> int:
        return int(self.config().get_text_config().vocab_size)


Loadable: TypeAlias = PreTrainedModel | ModelRecipe
"""A model, or how it is loaded where it lives."""


_resident: Final[WeakValueDictionary[str, PreTrainedModel]] = WeakValueDictionary()
"""The models of this process that were loaded by a :class:`ResidentRecipe` and are in use, by key."""

_loading: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRecipe(ModelRecipe):
    """The recipe of one model in each process: all that load it there by this recipe have the same."""

    key: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def of(cls, model: Loadable) -> Loadable:
        if isinstance(model, PreTrainedModel | ResidentRecipe):
            return model
        return cls(**{each.name: getattr(model, each.name) for each in fields(model)})

    def load(self) -> PreTrainedModel:
        with _loading:
            model = _resident.get(self.key)
            if model is None:
                model = _resident[self.key] = ModelRecipe.load(self)
        return model


def name_of(model: Loadable) -> str:
    if isinstance(model, ModelRecipe):
        return str(next(iter(model.config().architectures or []), model.path))
    return type(model).__name__


def positions_of(model: Loadable) -> int:
    return model.positions() if isinstance(model, ModelRecipe) else longest(model)


def vocabulary_of(model: Loadable) -> int:
    return model.vocabulary() if isinstance(model, ModelRecipe) else vocabulary(model)


def source_of(model: Loadable) -> Source[PreTrainedModel]:
    return model if isinstance(model, ModelRecipe) else SharedModel(model)


def worker_maker(kind: Callable[..., T], model: Loadable, *args: object) -> Callable[[], T]:
    """Return what makes ``kind(model, *args)`` in any process."""
    return partial(_worker, kind, source_of(model), *args)


def _worker(kind: Callable[..., T], source: Source[PreTrainedModel], *args: object) -> T:
    return kind(source.load(), *args)
