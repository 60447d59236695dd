"""``oppo doctor``'s figures for models of today's sizes, and the layouts that it proposes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oppo.cli import DONE, UNUSABLE, main
from oppo.config.load import load_settings
from oppo.run.deployment import Deployment
from oppo.run.doctor import UPDATE, Layout, examine
from oppo.run.memory import Known, crowded, expected, too_large
from oppo.run.memory_fit import advice
from oppo.simulate.profile import Hardware
from tests.kit.known import deep

COUNTED = Path(__file__).parents[1] / "golden" / "memory.json"
"""Figures of whole models, layer by layer, as they were counted before a few layers stood for all."""

LLAMA: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 1,
}
MIXTURE: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
GEMMA: dict[str, Any] = {"head_dim": 256, "sliding_window": 1024}


def shape(kind: str, sizes: Sequence[int], *, tied: bool = False, **more: object) -> dict[str, object]:
    hidden, inner, layers, heads, shared, vocabulary = sizes
    return {
        **LLAMA,
        **more,
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": {"Gemma3": "gemma3_text"}.get(kind, kind.lower()),
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
    }


SHAPES = {
    "qwen-0.5b": shape("Qwen2", (896, 4864, 24, 14, 2, 151_936), tied=True),
    "qwen-1.5b": shape("Qwen2", (1536, 8960, 28, 12, 2, 151_936), tied=True),
    "qwen-7b": shape("Qwen2", (3584, 18944, 28, 28, 4, 152_064)),
    "llama-8b": shape("Llama", (4096, 14336, 32, 32, 8, 128_256)),
    "llama-70b": shape("Llama", (8192, 28672, 80, 64, 8, 128_256)),
    "mixtral": shape("Mixtral", (4096, 14336, 32, 32, 8, 32_000), **MIXTURE),
    "gemma3": shape("Gemma3", (2560, 10240, 34, 8, 4, 262_208), tied=True, **GEMMA),
}


def written(folder: Path, name: str, config: dict[str, object]) -> None:
    """Write a policy of that name, without weights, and a reward model ``NAME-rm``."""
    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    spelling = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    tokens = PreTrainedTokenizerFast(tokenizer_object=spelling, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    scalar = {"architectures": [str(config["architectures"])[2:-2].replace("CausalLM", "SequenceClassification")]}
    for role, heads in (("", {}), ("-rm", {**scalar, "num_labels": 1})):
        tokens.save_pretrained(folder / f"{name}{role}")
        (folder / f"{name}{role}" / "config.json").write_text(json.dumps({**config, **heads}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sizes")
    for name, config in SHAPES.items():
        written(place, name, config)
    (place / "prompts.jsonl").write_text("".join(f'{{"prompt": "{"word " * 50}"}}\n' for _ in range(8)))
    (place / "reward.py").write_text("def none(prompts, completions):\n    return [0.0 for _ in completions]\n")
    head = 'models.policy = "qwen-7b"\nrewards = [{ source = "qwen-7b-rm" }]\ndata.prompts = "prompts.jsonl"\n'
    (place / "config.toml").write_text(head + 'models.dtype = "bfloat16"\nstep.batch = 64\n')
    return place


def deployed(folder: Path, assume: str, *overrides: str) -> Deployment:
    return Deployment.of(load_settings(folder / "config.toml", overrides), Hardware.assumed(assume))


SETTINGS = json.loads(COUNTED.read_text(encoding="utf-8"))
QUICK = ("7b ppo ck", "0.5b lora", "70b lora nf4 grpo", "mixtral grpo")


@pytest.mark.adapters
@pytest.mark.parametrize("name", [*QUICK, *deep(*(name for name in SETTINGS if name not in QUICK))])
def test_figures_are_those_of_all_layers(folder: Path, name: str) -> None:
    """But for references: they were counted with the logits of all tokens at once, of which a run has a chunk."""
    overrides, counted = SETTINGS[name]
    deployment = deployed(folder, "8xH100", "sampling.max_new_tokens=1024", *overrides)
    found = {need.model: need.bytes for need in expected(deployment, deployment.load(250))}
    assert found.keys() == counted.keys()
    for model, (weights, optimizer, gradients, keys_values, activations) in counted.items():
        each = found[model]
        assert each.weights == pytest.approx(weights, rel=0.001)
        assert (each.optimizer, each.gradients) == (optimizer, gradients)
        if model in {"reference", "proximal"}:
            assert 0.85 * keys_values < each.keys_values <= keys_values
            assert each.activations <= 1.01 * activations
        else:
            assert each.total == pytest.approx(weights + optimizer + gradients + keys_values + activations, rel=0.05)


def test_a_model_that_several_are_made_of_is_counted_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = 'rewards=[{source = "qwen-7b-rm"}, {source = "qwen-7b-rm"}]'
    assert main(["doctor", str(folder / "config.toml"), "--assume", "8xH100", "--set", tables]) == UNUSABLE
    said = capsys.readouterr().err
    assert len(re.findall("counting the memory of the (?:reward|critic|qwen)", said)) <= 1, said


def test_responses_that_no_prompt_fits_before_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = ["--set", "sampling.max_new_tokens=32768"]
    assert main(["doctor", str(folder / "config.toml"), "--assume", "8xH100", *long]) == UNUSABLE
    said = " ".join(capsys.readouterr().err.split())
    assert "sampling.max_new_tokens = 32768 leaves no room for a prompt in the 32768 positions of the policy" in said


@pytest.mark.parametrize("error", [RuntimeError("no kernel\n for meta"), AttributeError("layers"), ValueError("x")])
def test_a_count_that_fails_says_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("oppo.run.memory.Trained.under", fails)
    assert main(["doctor", str(folder / "config.toml"), "--assume", "8xH100"]) == UNUSABLE
    said = capsys.readouterr().err
    assert "the memory of the trainer could not be counted: its passes failed" in " ".join(said.split())
    assert type(error).__name__ in said
    assert "oppo doctor --trial" in said
    assert "Traceback" not in said


def merged(folder: Path, assume: str, layout: Layout, *overrides: str) -> Deployment:
    """The run with the layout's settings, as its text has them."""
    section, given = "", list[str]()
    for line in layout.toml.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        else:
            key, _, value = line.partition(" = ")
            given.append(f"{section}.{key}={value}")
    return deployed(folder, assume, *overrides, *given)


@pytest.mark.adapters
@pytest.mark.timeout(600)
@given(
    hidden=st.sampled_from([512, 1024, 2048, 4096, 8192]),
    layers=st.integers(2, 80),
    vocabulary=st.sampled_from([8_000, 32_000, 152_000]),
    assume=st.sampled_from(["1x24GB", "1xH100", "2x24GB", "4xL4", "8xH100", "2x8xA100-40GB"]),
    algorithm=st.sampled_from(["ppo", "grpo"]),
    judged=st.booleans(),
)
@hypothesis_settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_proposed_fits(
    folder: Path, *, hidden: int, layers: int, vocabulary: int, assume: str, algorithm: str, judged: bool
) -> None:
    written(folder, "drawn", shape("Llama", (hidden, 3 * hidden, layers, 8, 2, vocabulary)))
    reward = "drawn-rm" if judged else "reward.py:none"
    overrides = ("models.policy=drawn", f"rewards.0.source={reward}", f"step.algorithm={algorithm}")
    found = examine(deployed(folder, assume, *overrides))
    assert found.layouts or found.faults
    known: Known = {}
    for layout in found.layouts:
        again = merged(folder, assume, layout, *overrides)
        needs = expected(again, again.load(found.load.prompt), known)
        assert not crowded(needs, again.assumed), layout
        assert len({need.device for need in needs if not need.remote}) + layout.idle >= Hardware.assumed(assume).gpus
        assert (layout.step > 0) is bool(layout.seconds)


@pytest.mark.adapters
def test_a_consumer_s_card_gets_its_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("rewards.0.source=reward.py:none", "step.algorithm=grpo", "step.batch=8", "sampling.max_new_tokens=1024")
    rules = [part for each in chosen for part in ("--set", each)]
    assert main(["doctor", str(folder / "config.toml"), "--assume", "1x24GB", *rules]) == UNUSABLE, "as it is"
    said = capsys.readouterr().out
    recipe = said.partition("# all on one GPU\n")[2]
    assert "lora_rank = 16\nquantization = 'nf4'" in recipe
    (layout,) = examine(deployed(folder, "1x24GB", *rules[1::2])).layouts
    again = merged(folder, "1x24GB", layout, *rules[1::2])
    weights = {need.model: need.bytes.weights for need in expected(again, again.load(250))}
    assert weights["policy"] == pytest.approx(5.7e9, rel=0.02)
    assert weights["reference"] == 0, "its base is the policy's"


@pytest.mark.adapters
def test_what_was_set_is_not_advised_and_each_row_is_explained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = ("step.lookahead=1", "algorithm.is_correction=truncated")
    overrides = [part for each in late for part in ("--set", each)]
    assert main(["doctor", str(folder / "config.toml"), "--assume", "1xL4", *overrides]) == UNUSABLE
    said = capsys.readouterr().out
    assert "models.dtype" not in said.partition("layouts that fit")[0]
    assert "takes 0.0" not in said
    table, _, rest = said.partition("\n\n")[2].partition("\n\n")
    for row in table.splitlines()[2:]:
        assert f"\n{row.split()[0]}: " in f"\n{rest}", row
    engine = ["--set", "models.engine=vllm"]
    assert main(["doctor", str(folder / "config.toml"), "--assume", "8xH100", *engine]) == UNUSABLE
    assert "takes 0.0" not in capsys.readouterr().out


def test_layouts_are_of_a_run_that_places_nothing_itself(folder: Path) -> None:
    small = ("models.policy=qwen-0.5b", "rewards.0.source=qwen-0.5b-rm")
    placed = examine(deployed(folder, "8xH100", *small, "placement.policy=cuda:1"))
    assert not placed.layouts
    assert not placed.faults


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("assume", "chosen", "said"),
    [
        ("1x300GB", (), "models.shared_trunk = true.* would fit.*rewards.0.reading = 'whole'"),
        ("1x100GB", (), "trainer.gradient_checkpointing = 1, models.lora_rank = 16, .*shared_trunk = true.* would fit"),
        ("1x24GB", ("placement.policy=cuda:0",), "the trainer alone needs 319.5 GB on cuda:0: several devices in"),
        ("1xL4", ("step.lookahead=1", "algorithm.is_correction=truncated"), "not even trainer"),
    ],
)
def test_advice_names_what_would_fit_and_what_is_too_large(
    folder: Path, assume: str, chosen: Sequence[str], said: str
) -> None:
    deployment, known = deployed(folder, assume, *chosen), dict[Any, Any]()
    load = deployment.load(250)
    needs = expected(deployment, load, known)
    assert crowded(needs, deployment.assumed)
    found = [*too_large(needs, deployment.assumed), advice(deployment, load, known)]
    assert re.search(said, "\n".join(found)), found


def test_two_machines_are_proposed_a_cluster(folder: Path) -> None:
    found = examine(deployed(folder, "2x8xH100", "step.algorithm=grpo", "step.batch=8"))
    (layout,) = (each for each in found.layouts if "cluster" in each.changes.get("placement", {}))
    again = merged(folder, "2x8xH100", layout, "step.algorithm=grpo", "step.batch=8")
    needs = expected(again, again.load(250))
    assert not crowded(needs, again.assumed)
    assert sum(need.remote for need in needs) > 1


@pytest.mark.parametrize("truncated", ["sampling.top_k=20", "sampling.top_p=0.9"])
def test_an_update_over_ids_that_are_listed_is_counted_without_kernels_of_triton(folder: Path, truncated: str) -> None:
    small = ("models.policy=qwen-0.5b", "rewards.0.source=qwen-0.5b-rm")
    plain, listed = (examine(deployed(folder, "1xH100", *small, *more)).layouts for more in ((), (truncated,)))
    assert 1.1 < listed[0].seconds[UPDATE] / plain[0].seconds[UPDATE] < 70 / 34


def test_a_run_that_fits_ends_with_0(folder: Path) -> None:
    small = ["--set", "models.policy=qwen-0.5b", "--set", "rewards.0.source=qwen-0.5b-rm"]
    assert main(["doctor", str(folder / "config.toml"), "--assume", "1xH100", *small]) == DONE
