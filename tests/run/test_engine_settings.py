"""``models.engine`` and ``[vllm]`` in a settings file: what follows from them, and what is refused by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from oppo.algorithms.base import ClippedAlgorithm
from oppo.config.load import load, resolve
from oppo.config.settings import Settings
from oppo.errors import ConfigError
from oppo.run.checkpoint import fingerprints, require_same

MINIMAL = 'models.policy = "actor"\nrewards = [{ source = "reward.py:score" }]\ndata.prompts = "prompts.jsonl"\n'
ON_VLLM = 'models.engine = "vllm"\n'


def loaded(folder: Path, text: str = "", *overrides: str) -> Settings:
    path = folder / "config.toml"
    path.write_text(MINIMAL + text)
    return load(path, overrides)


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text, *overrides)
    return str(caught.value)


def correction(settings: Settings) -> str:
    assert isinstance(settings.algorithm, ClippedAlgorithm)
    return settings.algorithm.is_correction


def test_arguments_of_vllm_are_kept_as_they_are_and_written_again(tmp_path: Path) -> None:
    text = (
        f"{ON_VLLM}[vllm]\nmax_num_seqs = 8\nenforce_eager = true\ncompilation_config = {{ mode = 0, sizes = [1] }}\n"
    )
    settings = loaded(tmp_path, text, "vllm.max_num_seqs=16", "vllm.quantization=fp8")
    assert settings.vllm == {
        "max_num_seqs": 16,
        "enforce_eager": True,
        "compilation_config": {"mode": 0, "sizes": [1]},
        "quantization": "fp8",
    }
    assert resolve(tomllib.loads(settings.toml()), Path("/elsewhere")) == settings
    assert settings.changed({"vllm": {"max_num_seqs": 2}}).vllm == {**settings.vllm, "max_num_seqs": 2}
    assert "vllm.quantization" in fingerprints(settings)


def test_without_arguments_there_is_no_such_table(tmp_path: Path) -> None:
    settings = loaded(tmp_path, ON_VLLM)
    assert "[vllm]" not in settings.toml()
    assert settings.changed({"vllm": {"max_num_seqs": 2}}).vllm == {"max_num_seqs": 2}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo", "dr_grpo"])
def test_tokens_of_vllm_are_weighted_unless_the_file_says_how(tmp_path: Path, algorithm: str) -> None:
    chosen = f"step.algorithm={algorithm}"
    assert correction(loaded(tmp_path, "", chosen)) == "none"
    settings = loaded(tmp_path, ON_VLLM, chosen)
    assert correction(settings) == "truncated"
    assert settings.algorithm.corrects
    assert correction(loaded(tmp_path, ON_VLLM, chosen, "algorithm.is_correction=mask")) == "mask"
    assert correction(loaded(tmp_path, ON_VLLM, chosen, "algorithm.is_correction=none")) == "none"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "run.deterministic=true",
            "run.deterministic makes every bit independent of timing, and vLLM chooses its batches by time",
        ),
        ("run.policy=process", "run.policy = 'process' places an actor of transformers, and vLLM has processes"),
        ("sampling.top_p=0.9", "sampling.top_p = 0.9 draws from the most likely tokens, and vLLM does not say which"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_the_way_out(tmp_path: Path, override: str, message: str) -> None:
    said = refused(tmp_path, ON_VLLM, override)
    assert said.startswith(message)
    assert said.endswith("set models.engine = 'transformers'")
    loaded(tmp_path, "", override)


def test_top_p_that_top_k_bounds_is_reported_by_vllm(tmp_path: Path) -> None:
    assert loaded(tmp_path, ON_VLLM, "sampling.top_p=0.9", "sampling.top_k=20").sampling.top_p == 0.9


@pytest.mark.parametrize(
    ("installed", "gpu", "chosen", "why"),
    [
        (True, True, "run.name=it", ""),
        (False, True, "run.name=it", "since vLLM is not installed"),
        (True, False, "run.name=it", "since the policy is on a CPU"),
        (True, True, "models.device=cpu", "since the policy is on a CPU"),
        (True, True, "sampling.top_p=0.9", "since sampling.top_p = 0.9 draws from the most likely"),
    ],
)
def test_vllm_decodes_by_itself_on_a_gpu_where_it_is_installed_and_can(
    request: pytest.FixtureRequest, installed: bool, gpu: bool, chosen: str, why: str
) -> None:
    patch, folder, messages = (request.getfixturevalue(each) for each in ("monkeypatch", "tmp_path", "messages"))
    patch.setattr("oppo.config.load.is_installed", lambda module: installed)
    patch.setattr("torch.cuda.is_available", lambda: gpu)
    patch.setattr("torch.cuda.device_count", lambda: 1)
    settings = loaded(folder, "[vllm]\nmax_num_seqs = 8\n", "models.engine=auto", chosen)
    assert settings.models.engine == ("transformers" if why else "vllm")
    assert correction(settings) == ("none" if why else "truncated")
    assert dict(settings.vllm) == ({} if why else {"max_num_seqs": 8})
    assert f"models.engine = 'auto': {'transformers' if why else 'vLLM'} decodes" in messages[-1]
    assert why in messages[-1]


def test_the_table_of_another_engine_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, "[vllm]\nmax_num_seqs = 8\n") == (
        "[vllm] holds max_num_seqs, which only vLLM reads, and models.engine = 'transformers': set models.engine = "
        "'vllm', or leave [vllm] out"
    )


def test_faults_around_the_table_are_errors(tmp_path: Path) -> None:
    assert refused(tmp_path, "", "models.engine=vlm") == (
        "models.engine: expected 'auto', 'transformers' or 'vllm', got 'vlm' (did you mean 'vllm'?)"
    )
    assert "unknown section 'vlm' (did you mean 'vllm'?)" in refused(tmp_path, "[vlm]\nseed = 1\n")
    assert refused(tmp_path, f"{ON_VLLM}vllm = 3\n") == "[vllm]: expected a section, got 3"


def test_a_secret_within_the_table_is_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, f'{ON_VLLM}[vllm]\noverrides = {{ hub = ["https://me:canary@hub.example"] }}\n')
    assert said.startswith("vllm.overrides.hub holds a secret")
    assert "canary" not in said


@pytest.mark.parametrize("key", ["api_key", "password", "hf_token", "token2", "client_secret"])
def test_a_secret_is_known_by_the_name_of_its_setting_too(tmp_path: Path, key: str) -> None:
    said = refused(tmp_path, f'{ON_VLLM}[vllm]\noverrides = [{{ {key} = "canary" }}]\n')
    assert said.startswith(f"vllm.overrides.{key} holds a secret, got ***")
    assert "canary" not in said
    loaded(tmp_path, f"{ON_VLLM}[vllm]\nmax_num_batched_tokens = 64\noverrides = {{ {key} = false, b = '' }}\n")


def test_a_run_goes_on_with_other_arguments_and_never_with_another_engine(tmp_path: Path) -> None:
    before = fingerprints(loaded(tmp_path, f"{ON_VLLM}[vllm]\nmax_num_seqs = 8\n"))
    for text in (ON_VLLM, f"{ON_VLLM}[vllm]\nmax_num_seqs = 4\nblock_size = 32\n"):
        require_same(before, loaded(tmp_path, text))
    with pytest.raises(ConfigError, match=r"models\.engine cannot change when a run is resumed"):
        require_same(before, loaded(tmp_path, "algorithm.is_correction = 'truncated'\n"))
    with pytest.raises(ConfigError, match=r"step\.batch cannot change.*, and what \[vllm\] holds$"):
        require_same(before, loaded(tmp_path, ON_VLLM, "step.batch=3"))
