"""The head of a causal language model, float32 logits a chunk of tokens at a time; and a value head on its trunk.

In 16 bits a logit of 20 is off by up to 0.06, and the log-probs of one token would differ by as much between decoder,
reference and trainer, whose matrix products round differently. So hidden states and weights of 16 bits have logits in
float32 on a GPU, in which a product is summed up anyway. Scores and values, a number or a few of a token, are in
float32 everywhere.

Where transformers has no sequence classifier of a causal model, a class of ours (:func:`scored`) has its trunk, under
the same name, so that it takes the weights of the same checkpoint. It is called and saved as transformers would call
it, ``Lfm2ForSequenceClassification`` for example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, partial
from types import ModuleType
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from oppo.errors import ModelRefused
from oppo.events import Support
from oppo.hf.devices import CPU, full_precision, triton_kernels
from oppo.hf.model_parts import backbone
from oppo.losses import Input, SupportIndex, entropies, token_logprobs
from oppo.models import Sampling

AGREEMENT = 1e-4  # largest difference between logits of an actor and of its OwnHead, in units of the largest logit

LOGITS_BYTES: Final = 256 << 20  # the most that logits take in float32; more are computed a chunk of tokens at a time

UPDATE_SHARE: Final = 8
"""An update on a GPU has logits of a micro-batch's response tokens over this at a time, if ``LOGITS_BYTES`` hold fewer.

So chunks grow with the micro-batch, as that does with the memory of the card. A chunk moves 18 bytes of each weight, a
logit 34 (70 without Triton). Counted for 16,384 tokens, 151,936 columns and a width of 896: 189 GB and 506 launches in
chunks of 441 tokens, which ``LOGITS_BYTES`` hold; 135 GB and 242 in chunks of 1,024; 115 of 2,048; 105 of 4,096; 100 of
8,192. An update's peak of 36.9 GB grows by 1.1, 2.9, 7.1 and 15.8 GB; with a critic as large as the actor,
whose passes have more alive, it does not. No card has timed what that gains. Gradients of weights are sums over chunks
in float32: their last bits depend on the micro-batch.
"""

UPDATE_BYTES: Final = 1 << 30  # the most that logits take in such an update: 1,766 tokens of 151,936 columns

CPU_LOGITS_BYTES: Final = 32 << 20
"""The same on a CPU, where a chunk that stays in its caches is faster: an update takes 0.7 to 1.05 of the time."""

planned_device: Final = ContextVar[torch.device | None]("planned_device", default=None)
"""Where models will be whose memory is counted; ``None``: where they are."""

Measure: TypeAlias = Callable[[Tensor, slice, bool], Mapping[Input, Tensor]]
"""Numbers of tokens, [t] or [t, n] each, from their logits [t, V], and which of the T tokens these are.

With ``True`` they are for a backward pass: those without gradient may be left out.
"""


WIDE: Final = frozenset({"cuda"})
"""Devices that multiply 16 bits to float32 as fast as to 16. A CPU takes up to 1.5 times as long for a decode step."""


SCORE_HEADS: Final = ("score", "classifier")

NARROW: Final = 64  # the most numbers of a token that are computed in float32 on every device: scores, not logits


def widen_head(model: PreTrainedModel) -> None:
    heads: list[object] = [model.get_output_embeddings(), *(getattr(model, each, None) for each in SCORE_HEADS)]
    for head in heads:
        if type(head) is nn.Linear and head.weight.dtype.itemsize == 2 and not isinstance(head.forward, partial):
            head.forward = partial(_wide, head)  # type: ignore[method-assign] # deep copies of it read their own weights


def _wide(head: nn.Linear, /, hidden: Tensor) -> Tensor:
    if head.out_features <= NARROW:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)
    if head.weight.device.type not in WIDE:
        return nn.functional.linear(hidden, head.weight, head.bias)
    logits: Tensor = _Wide.apply(hidden, head.weight)  # type: ignore[no-untyped-call] # torch's
    return logits if head.bias is None else logits + head.bias.float()


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _product(hidden.flatten(0, -2), weight).view(*hidden.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        of_weight = grad.flatten(0, -2).t() @ hidden.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad @ weight if ctx.needs_input_grad[0] else None, of_weight


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return found


class OwnHead:
    """The head of a causal language model: logits as a function of the trunk's hidden states."""

    # The model's own forward pass over a trunk that returns its input, so that scaling and softcapping are in it.

    def __init__(self, model: PreTrainedModel) -> None:
        widen_head(model)
        shell = copy.copy(model)
        trunk = backbone(model)
        shell._modules = {  # noqa: SLF001 - the model keeps its own
            name: _Identity(trunk) if child is trunk else child for name, child in model.named_children()
        }
        self._shell = shell

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._shell(inputs_embeds=hidden, use_cache=False).logits
        return logits

    def chunk(self, updated: int = 0) -> int:
        device = planned_device.get() or self._shell.device
        token = 4 * int(self._shell.config.get_text_config().vocab_size)
        if device.type == "cpu":
            return max(1, min(LOGITS_BYTES, CPU_LOGITS_BYTES) // token)
        return max(1, LOGITS_BYTES // token, min(UPDATE_BYTES // token, -(-updated // UPDATE_SHARE)))

    def measured(self, hidden: Tensor, measure: Measure) -> Mapping[Input, Tensor]:
        # The logits of one chunk are alive at a time, and are computed again in the backward pass. Gradients of weights
        # are added up over chunks in float32.
        size = self.chunk(len(hidden) if torch.is_grad_enabled() else 0)
        chunks = [slice(at, min(at + size, len(hidden))) for at in range(0, len(hidden), size)]

        def of_chunk(hidden: Tensor, at: slice, again: bool) -> Mapping[Input, Tensor]:
            return measure(self(hidden[None]).squeeze(0), at, again)  # a selected row has a gradient of all

        if len(chunks) == 1:
            return of_chunk(hidden, chunks[0], False)
        names, weights = list[Input](), [weight for weight in self._shell.parameters() if weight.requires_grad]
        found = _InChunks.apply(of_chunk, chunks, names, hidden, *weights)  # type: ignore[no-untyped-call] # torch's
        return dict(zip(names, found, strict=True))


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, measured: Measure, chunks: Sequence[slice], names: list[Input], hidden: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        parts = [measured(hidden[at], at, False) for at in chunks]
        names.extend(parts[0])
        ctx.save_for_backward(hidden)
        ctx.measured, ctx.chunks, ctx.names, ctx.weights = measured, chunks, names, weights
        return tuple(torch.cat([part[name] for part in parts]) for name in names)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[object, ...]:
        (hidden,) = ctx.saved_tensors
        of, of_hidden = dict(zip(ctx.names, grads, strict=True)), torch.empty_like(hidden)
        of_weights = [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.weights]
        for at in ctx.chunks:
            with torch.enable_grad():
                part = hidden[at].detach().requires_grad_()
                outputs = ctx.measured(part, at, True)
            given = [of[name][at] for name in outputs]
            of_part, *found = torch.autograd.grad(list(outputs.values()), (part, *ctx.weights), given)
            of_hidden[at] = of_part
            for sums, each in zip(of_weights, found, strict=True):
                sums.add_(each)
        return None, None, None, of_hidden, *of_weights  # autograd rounds them to the dtype of the weights


def token_measures(
    logits: Tensor, tokens: Tensor, support: Support, sampling: Sampling, *, entropy: bool = False, learnt: bool = False
) -> Mapping[Input, Tensor]:
    """Return log-probs and, with ``entropy``, entropies of tokens [T] with logits [T, V]: float32 [T], nats."""
    # By kernels of Triton on a GPU, but where ids are listed that may be drawn (top_k, top_p). Only entropies that are
    # learnt have a gradient.
    kernels = None if (support.counts > 0).any() else kernels_on(logits.device)
    measured: Callable[..., Mapping[Input, Tensor]]
    measured = _by_operations if kernels is None else partial(_by_kernels, kernels)
    return measured(logits, tokens, support, sampling, entropy=entropy, learnt=learnt)


def _by_operations(
    logits: Tensor, tokens: Tensor, support: Support, sampling: Sampling, *, entropy: bool, learnt: bool
) -> Mapping[Input, Tensor]:
    logits, index = logits[..., sampling.ids], SupportIndex.of(support, logits.device)
    found: dict[Input, Tensor] = {"logprobs": token_logprobs(logits, tokens, sampling.temperature, index)}
    if entropy:
        found["entropies"] = entropies(logits if learnt else logits.detach(), sampling.temperature, index)
    return found


def _by_kernels(
    kernels: ModuleType,
    logits: Tensor,
    tokens: Tensor,
    support: Support,
    sampling: Sampling,
    *,
    entropy: bool,
    learnt: bool,
) -> Mapping[Input, Tensor]:
    barred, vocabulary = None, logits.shape[-1]
    if not support.empty:
        ends = np.cumsum(np.abs(support.counts)) + len(tokens) + 1
        listed = np.concatenate(([len(tokens) + 1], ends, support.ids), dtype=np.int32)
        barred = torch.from_numpy(listed).to(logits.device)
    logprobs, surprises = kernels.measured(
        *(logits, tokens),
        vocabulary=min(sampling.vocabulary or vocabulary, vocabulary),
        temperature=sampling.temperature,
        barred=barred,
    )
    found: dict[Input, Tensor] = {"logprobs": logprobs}
    if entropy:
        found["entropies"] = surprises if learnt else surprises.detach()
    return found


@cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """Return :mod:`oppo.hf.kernels` if they run on this device, and give what a CPU gives but for rounding."""
    if device.type != "cuda":
        return None
    work = "log-probs of tokens are computed"
    return triton_kernels("oppo.hf.kernels", device, partial(_agree, device), work)


@torch.inference_mode(mode=False)
@torch.enable_grad()
def _agree(device: torch.device, kernels: ModuleType) -> bool:
    given = torch.randn(4, 9000, generator=torch.Generator().manual_seed(0)) * 4
    support = Support(np.array([7, 8500], np.int32), np.array([0, -2, 0, 0], np.int32))

    def found(on: torch.device, measured: Callable[..., Mapping[Input, Tensor]]) -> list[Tensor]:
        logits, tokens, slopes = (
            given.to(on, copy=True).requires_grad_(),
            torch.arange(4).to(on),
            torch.arange(8.0).to(on),
        )
        outputs = measured(logits, tokens, support, Sampling(temperature=0.7), entropy=True, learnt=True)
        slope = torch.autograd.grad([*outputs.values()], logits, [*slopes.view(2, 4)])
        return [each.detach().cpu() for each in (*outputs.values(), *slope)]

    pairs = zip(found(CPU, _by_operations), found(device, partial(_by_kernels, kernels)), strict=True)
    return all(torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4) for ours, theirs in pairs)


def separable_head(model: PreTrainedModel) -> OwnHead | None:
    """Return the head of ``model``, which reads four tokens; ``None`` if it cannot run apart from its trunk."""
    try:
        require_own_head(model)
    except ModelRefused:
        return None
    return OwnHead(model)


@torch.no_grad()
@full_precision()
def require_own_head(model: PreTrainedModel) -> None:
    if model.device.type == "meta":  # without weights there are no logits to compare
        return
    ids = torch.arange(4, device=model.device)[None]
    mask = torch.ones_like(ids)
    try:
        apart = OwnHead(model)(backbone(model)(ids, attention_mask=mask, use_cache=False).last_hidden_state).float()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(
            f"the head of {type(model).__name__} cannot run apart from its trunk, so no critic can share the trunk: "
            f"set models.shared_trunk = false ({error!r})"
        ) from error
    expected = model(ids, attention_mask=mask, use_cache=False).logits.float()
    difference = float((apart - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not difference <= AGREEMENT:
        raise ModelRefused(
            f"the head of {type(model).__name__}, run on the hidden states of its trunk, differs from the model's own "
            f"logits by {difference:.1e} of the largest; at most {AGREEMENT:.0e} is allowed: set "
            "models.shared_trunk = false"
        )


class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):
    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Identity(nn.Module):
    """A trunk whose hidden states are its input embeddings; all else about it is as ``trunk`` has it."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self._trunk = (trunk,)  # no module of its own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_trunk"][0], name)

    @property
    def decoder(self) -> nn.Module:
        # The trunk of OPT, one level below the model's base model.
        return self

    def forward(self, *ids: object, inputs_embeds: Tensor, **options: object) -> _HiddenStates:
        del ids, options
        return _HiddenStates(last_hidden_state=inputs_embeds)


_ENDINGS: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForImageTextToText")


_scored: Final[dict[Any, type[PreTrainedModel]]] = {}


def scored(causal: type[PreTrainedModel]) -> type[PreTrainedModel]:
    if causal not in _scored:
        base = next(each for each in causal.__mro__[1:] if each.__name__.endswith("PreTrainedModel"))
        name = causal.__name__
        for ending in _ENDINGS:
            name = name.removesuffix(ending)
        attributes = {"_causal": causal, "config_class": causal.config_class, "__module__": __name__}
        made = type(f"{name}ForSequenceClassification", (_Scored, base), attributes)
        _scored[causal] = cast("type[PreTrainedModel]", made)
        if (names := get_checkpoint_conversion_mapping(causal.__name__)) is not None:  # of its weights in files
            register_checkpoint_conversion_mapping(made.__name__, names, overwrite=True)
    return _scored[causal]


def _unfilled(causal: type[PreTrainedModel]) -> PreTrainedModel:
    kind = scored(causal)
    return kind.__new__(kind)


class _Scored(GenericForSequenceClassification, PreTrainedModel):
    _causal: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        super(GenericForSequenceClassification, self).__init__(config)
        whole = self._causal(config)
        trunk = backbone(whole)
        parts = {name: child is trunk for name, child in whole.named_children()}
        if not any(parts.values()):
            raise ModelRefused(f"{type(whole).__name__} holds its trunk inside of another part: expected it as a part")
        self.base_model_prefix = next(name for name, is_trunk in parts.items() if is_trunk)
        self.left_out = tuple(f"{name}." for name, is_trunk in parts.items() if not is_trunk)
        self.num_labels = int(config.num_labels or 0)
        setattr(self, self.base_model_prefix, trunk)
        self.score = nn.Linear(whole.get_output_embeddings().weight.shape[1], self.num_labels, bias=False)
        self.post_init()  # type: ignore[no-untyped-call] # transformers'

    def __reduce__(self) -> tuple[object, ...]:  # another process makes the class, which no module has
        return _unfilled, (self._causal,), self.__dict__

    @classmethod
    def is_custom_code(cls) -> bool:
        # As the causal model: transformers sets the buffers of its own models, and converts their old checkpoints.
        return bool(cls._causal.is_custom_code())

    @classmethod
    def from_config(cls, config: PreTrainedConfig, *, trust_remote_code: bool = False, **options: Any) -> Any:
        del trust_remote_code
        return cls._from_config(config, **options)  # type: ignore[no-untyped-call] # transformers'

    @classmethod
    def from_pretrained(cls, path: Any, *given: Any, config: Any = None, **options: Any) -> Any:  # type: ignore[override] # as Auto classes take it
        chosen = {name: options.pop(name) for name in ("num_labels", "trust_remote_code") if name in options}
        config = config or AutoConfig.from_pretrained(path, **chosen)
        return super().from_pretrained(path, *given, config=config, **options)
