"""Writes ``docs/models.md``, which models of transformers oppo takes: ``make models-table``, two minutes.

Each type is made tiny and random, and tried as a run would: models are probed in the same way when they are loaded. The
names of vLLM's models are asked of an interpreter that has it: ``python -m docs.make_models PYTHON``.
"""  # noqa: INP001 - a script beside its page

from __future__ import annotations

import copy
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from oppo.errors import ConfigError, ModelRefused, one_line
from oppo.hf.kv.reader import WholeRows
from oppo.hf.loading import load_scalar
from oppo.hf.lora import add_lora
from oppo.hf.memory import Load, longest_batch
from oppo.hf.model_files import CAUSAL
from oppo.hf.model_parts import FAILURES, only_whole
from oppo.hf.servable import probe
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.packing import pack

PAGE: Final = Path(__file__).with_name("models.md")

TYPES: Final[Mapping[str, str]] = dict(
    sorted({**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}.items())
)
"""The model types of the page, with the class of each: the whole one of a type that reads images too."""

MOST: Final = 30_000_000
"""Parameters of a model that is still tiny: others are not tried."""

TOLERANCE: Final = 1e-3
"""Largest difference that padding may make, in units of the largest output, at the median position."""

WIDTH: Final = 64

SIZES: Final[Mapping[str, object]] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "embedding_size", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "dim_ff", "dff", "ffn_hidden_size"), WIDTH),
    **dict.fromkeys(
        ("encoder_ffn_dim", "decoder_ffn_dim", "dim_feedforward", "lru_width", "intermediate_size_mlp"), WIDTH
    ),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "depth"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_query_groups"), 4
    ),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_kv_shared_layers"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "dim_head", "kv_channels", "linear_key_head_dim"), 16),
    **dict.fromkeys(("linear_value_head_dim", "linear_head_dim", "kv_lora_rank", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "zero_expert_num"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size", "router_hidden_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "mamba_ngroups"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "local_attention"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_chunk_size", "mamba_head_dim", "ssm_state_size"), 16),
    **dict.fromkeys(("chunk_size", "state_size", "block_size", "block_multiple_of", "o_lora_rank"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank", "time_step_rank", "adapter_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "patch_size", "laurel_rank"), 8),
    **dict.fromkeys(("mamba_n_groups", "mamba_expand", "n_groups", "expand", "n_mamba_heads", "o_groups"), 2),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    **dict.fromkeys(("index_n_heads", "index_head_dim", "q_lora_rank", "image_size", "attention_head_dim"), 32),
    "mamba_d_ssm": 128,
    "mamba_headdim": 64,
    "attention_hidden_size": 128,
    "v_head_dim": 12,
    "index_topk": 12,
    "hidden_size_per_layer_input": 16,
    "out_hidden_size": WIDTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 0,
    "is_decoder": True,
}
"""Sizes by the names that architectures have for them."""

OPTIONAL: Final = frozenset(
    {
        *("head_dim", "q_lora_rank", "sliding_window", "n_inner", "num_kv_shared_layers", "rotary_dim"),
        *("intermediate_size", "attention_chunk_size", "num_experts"),
    }
)
"""Sizes that are left at ``None`` where an architecture has that."""

_LATENT: Final = {"num_key_value_heads": 4}
# With few heads, or for padding, whose embedding is zero, scores of an indexer tie at 0, and the pick is any.
_INDEXED: Final = {**_LATENT, "pad_token_id": None}
_HEADS: Final = {"head_dim": 16}
_SECTIONS: Final = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
_SLIDING: Final = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LAYERS: Final = ["linear_attention", "full_attention"] * 2

OWN: Final[Mapping[str, Mapping[str, object]]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "axk1", "minicpm3"), _LATENT),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text"), _SECTIONS),
    **dict.fromkeys(("mistral4", "mistral_large4_text"), _LATENT),
    **dict.fromkeys(("deepseek_v32", "axk2", "glm_moe_dsa", "hy_v4"), _INDEXED),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _HEADS),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _SLIDING),
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v4": {"num_key_value_heads": 1, "pad_token_id": None},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]},
    "falcon": {"alibi": False, "num_key_value_heads": None},
    "glm4v_moe_text": {
        "rope_parameters": {**_SECTIONS["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "granitemoehybrid": {"layer_types": _LAYERS},
    "kimi_linear": {**_LATENT, "head_dim": None, "layer_types": _LAYERS},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {**_LATENT, "num_layers": 2, "num_hidden_layers": None, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp", "linear_attention"],
        "num_hidden_layers": None,
    },
    "qwen2_vl_vision": {"embed_dim": WIDTH},
    "qwen4_exp_text": {
        "head_dim": 16,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [],
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 97,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 6},
    "rwkv": {"attention_hidden_size": WIDTH},
    "zamba": {"num_key_value_heads": 4, "attn_layer_period": 3, "attn_layer_offset": 2, "num_hidden_layers": 6},
    "zamba2": {**_LATENT, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What an architecture needs besides; a size of ``None`` stays as it is by default."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a config of a model type with a few layers of a few numbers.

    Raises:
        Exception: of any kind, if the architecture does not take such sizes.
    """
    return _shrunk(CONFIG_MAPPING[model_type], OWN.get(model_type, {}))


def _shrunk(kind: type[PreTrainedConfig], own: Mapping[str, object]) -> PreTrainedConfig:
    usual, taken = kind(), inspect.signature(kind.__init__).parameters
    sizes = {**SIZES, **own}
    given: dict[str, Any] = {
        name: sizes[name]
        for name in sizes.keys() & taken.keys()
        if not (name in own and own[name] is None and name != "pad_token_id")
        and (name in own or name not in OPTIONAL or _has(usual, name))
    }
    given |= {name: None for name in ("layer_types", "mlp_layer_types") if name in taken and name not in given}
    for name in getattr(kind, "sub_configs", None) or {}:
        if isinstance(part := getattr(usual, name, None), PreTrainedConfig) and name not in given:
            given[name] = _shrunk(type(part), OWN.get(part.model_type, {})).to_dict()
    return kind(**given)


def _has(usual: PreTrainedConfig, name: str) -> bool:
    try:
        return getattr(usual, name, None) is not None
    except RuntimeError:  # it differs by layer
        return True


def tiny_model(model_type: str) -> PreTrainedModel:
    """Return a random model of a type, in evaluation mode, whose attention is peaked enough for a fault to show.

    Raises:
        Exception: of any kind, if there is no tiny one.
    """
    config = tiny_config(model_type)
    with torch.device("meta"):
        size = CAUSAL.made(config).num_parameters()
    if size > MOST:
        raise ConfigError(f"its smallest model has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = CAUSAL.made(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and 0 < float(weight.std()) < 0.05:
                weight.mul_(0.12 / weight.std())
    model.train(mode=False)
    return model


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a type.

    Attributes:
        reads: a kind of attention, ``whole``, ``refused`` or ``not tried``.
        why: it does not read in pieces; empty if it does.
        scores: whether there is a model of it with a score for each token.
        trains: whether actor and critic can be of it.
        adapters: whether they can have adapters.
    """

    model_type: str
    reads: str
    why: str = ""
    scores: bool = False
    trains: bool = False
    adapters: bool = False

    @property
    def taken(self) -> bool:
        """Whether it can be anything at all."""
        return self.reads not in {"refused", "not tried"}

    def cells(self) -> list[str]:
        """Return the row of the page, but for vLLM."""
        marks = [self.taken and self.reads != "whole", self.taken, self.scores, self.trains, self.adapters]
        words = ["?" if self.reads == "not tried" else "yes" if mark else "no" for mark in marks]
        return [f"`{self.model_type}`", *words, "" if self.reads == "segmented" else self.reads]


def tried(model_type: str) -> Verdict:
    """Return what becomes of a type."""
    try:
        model = tiny_model(model_type)
    except Exception as error:  # noqa: BLE001 - of any kind
        return Verdict(model_type, "not tried", f"no tiny model: {_brief(error)}")
    try:
        reads = probe(model)
    except ModelRefused as error:
        return Verdict(model_type, "refused", _brief(error))
    return Verdict(
        model_type,
        reads,
        _brief(only_whole(model) or ""),
        scores=_succeeds(lambda: _scalar(model)),
        trains=_succeeds(lambda: _trained(model)),
        adapters=_succeeds(lambda: _adapted(model)),
    )


def _scalar(model: PreTrainedModel) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        load_scalar(directory, new_head=True)


def _trained(model: PreTrainedModel) -> None:
    """Make a pass forward and back over padded rows, as the trainer does; padding may change nothing."""
    rows = [torch.arange(3, 40), torch.arange(50, 61)]
    beside = torch.cat(WholeRows(model).extend(range(2), rows))
    alone = torch.cat([WholeRows(model).extend([0], [row])[0] for row in rows])
    if not float(((beside - alone).abs().amax(-1) / alone.abs().amax(-1)).median()) < TOLERANCE:
        raise ModelRefused("padding changes outputs")
    batch = longest_batch(2, Load(2, 5, 12, 4), critic=False)
    tokens = np.arange(3, 20, dtype=np.int32)  # none is padding, whose embedding may be zero
    responses = [
        replace(each, prompt=replace(each.prompt, tokens=tokens[:5]), tokens=tokens[5:]) for each in batch.responses
    ]
    batch = replace(batch, responses=tuple(responses), tokens=np.tile(tokens[5:], len(responses)))
    part = pack(batch, [0, 1], model.device, frozenset({"logprobs"}))
    outputs, _ = ActorCritic(model)(part, lambda logits, at, again: {"logprobs": logits})
    outputs["logprobs"].square().sum().backward()
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    if not found or not all(bool(gradient.isfinite().all()) for gradient in found):
        raise ModelRefused("no gradient, or one that is not finite")


def _adapted(model: PreTrainedModel) -> None:
    adapted = copy.deepcopy(model)
    add_lora(adapted, 4, 8)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.1)
    probe(adapted)
    _trained(adapted)


def _succeeds(work: Callable[[], None]) -> bool:
    try:
        work()
    except (ModelRefused, ConfigError, ImportError, *FAILURES):
        return False
    return True


def _brief(error: object) -> str:
    """Return a reason without names and numbers of this try."""
    text = one_line(error) if isinstance(error, Exception) and not isinstance(error, ModelRefused) else str(error)
    text = text.rpartition("; nor can it read whole sequences: ")[2]
    for what, instead in (
        (r"^\w+ \(model type '[^']*'\) cannot be served( row by row)?( with attention '\w+')?: ", ""),
        (r"its output at position .*", "its output differs from that of its own one-shot pass"),
        (r": another last token changed.*", ""),
        (r"^\w+ has layers of kind (.*); those.*", r"its layers are of kind \1"),
        (r"Class validation error for validator '\w+': ", ""),
        (r"(\w+\.)+(\w+)", r"\2"),
    ):
        text = re.sub(what, instead, text)
    return text.replace("|", "/")[:150]


def engine_models(python: str) -> list[str]:
    """Return the version of vLLM in the environment of an interpreter, and the names of the classes of its own."""
    ask = "import vllm; print(vllm.__version__, *vllm.ModelRegistry.get_supported_archs())"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.splitlines()[-1].split()


PREFACE: Final = """\
# Models

Does oppo take my model? Look for the `model_type` of its `config.json`. All {count} types of transformers {version}
that generate text, from text or from images and text, are here, each tried as a tiny random model by
`make models-table`. A real model is checked in the same way when it is loaded; what is said then counts.

- **decodes**: it can be the policy on the engine transformers. `no`: take `models.engine = "vllm"`, if vLLM has it.
- **reference**: it can be the reference, and log-probs can be recomputed with it.
- **reward, critic**: it can be a critic, and a reward model if it has been trained as one. Where transformers has no
  sequence classification model of a type, oppo puts a layer, `score`, on its trunk, and saves both as one model.
- **trains**, **LoRA**: it can be trained, all of it or by adapters.
- **reads**: empty: in pieces, while a response grows. `padded`, `eager`: likewise, slower beside rows of other lengths.
  `whole`: each response when it has ended. [Why not](#why-not) has the reason, also where a type is not taken.
- **vLLM**: vLLM {engine} has a class of its name. It may serve others through transformers.

{taken} types are taken: {pieces} in pieces, {whole} whole. {refused} are refused, and {untried} have no tiny model to
try; their text model often has a type of its own. Encoders, such as BERT, are tried with `is_decoder = true`.

Of a vision-language model the language model is trained, its vision tower is kept as it is, and both are saved as one
checkpoint. It reads [images in prompts](runs.md#images).

| type | decodes | reference | reward, critic | trains | LoRA | reads | vLLM |
|---|---|---|---|---|---|---|---|
"""


def page(verdicts: Sequence[Verdict], engine: str, engine_classes: frozenset[str]) -> str:
    """Return the page."""
    reads = [each.reads for each in verdicts]
    whole, refused, untried = (reads.count(kind) for kind in ("whole", "refused", "not tried"))
    taken = sum(each.taken for each in verdicts)
    head = PREFACE.format(
        count=len(reads),
        version=transformers.__version__,
        engine=engine,
        taken=taken,
        pieces=taken - whole,
        whole=whole,
        refused=refused,
        untried=untried,
    )
    return head + "\n".join([*_rows(verdicts, engine_classes), "", *_reasons(verdicts)]) + "\n"


def _rows(verdicts: Sequence[Verdict], engine_classes: frozenset[str]) -> Iterator[str]:
    for each in verdicts:
        names = TYPES[each.model_type]
        served = not engine_classes.isdisjoint({names} if isinstance(names, str) else names)
        yield f"| {' | '.join([*each.cells(), 'yes' if served else 'no'])} |"


def _reasons(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "## Why not\n\n| reads | because | types |\n|---|---|---|"
    found: dict[tuple[str, str], list[str]] = {}
    for each in verdicts:
        if each.why:
            found.setdefault((each.reads, each.why), []).append(f"`{each.model_type}`")
    for (reads, why), types in sorted(found.items(), key=lambda item: ("refused" in item[0], item[0])):
        yield f"| {reads} | {why} | {' '.join(types)} |"


def main(python: str) -> None:
    """Write the page."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    verdicts = []
    for model_type in TYPES:
        verdicts.append(tried(model_type))
        sys.stderr.write(f"{verdicts[-1]}\n")
    version, *classes = engine_models(python)
    PAGE.write_text(page(verdicts, version, frozenset(classes)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
