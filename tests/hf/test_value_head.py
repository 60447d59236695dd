"""Where transformers has no sequence classifier of a model, one of ours is on its trunk: read, saved, loaded, sent."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaForSequenceClassification, PreTrainedModel

from oppo.errors import ConfigError, ModelRefused
from oppo.hf.introspection import backbone
from oppo.hf.loading import load_causal, load_scalar, outline
from oppo.hf.model_files import SCALAR, reward_kind
from oppo.hf.serve.scorers import RewardModel, ValueModel
from oppo.hf.shared_memory import SharedModel
from oppo.hf.weights import weights_digest
from oppo.placement import Thread
from oppo.placement.wire import pack_with_blocks, unpack
from tests.hf import tiny
from tests.hf.serve.test_scorers import expected_values
from tests.responses import responses, stream

CAUSAL = {**tiny.CONFIGS, **tiny.STATEFUL, **tiny.ONLY_WHOLE}
NAMES = ("cohere", "lfm2", "mamba", "qwen3-vl")
FURTHER = ("granite", "falcon-h1", "nemotron-h", "rwkv", "gemma3", "llava")


@pytest.fixture
def thread() -> Iterator[Thread]:
    with Thread("scorers", setup=lambda: torch.set_num_threads(1)) as thread:
        yield thread


def made(name: str) -> PreTrainedModel:
    return tiny.of(CAUSAL[name](), seed=1) if name in CAUSAL and name != "gemma3" else tiny.seeing(name, seed=1)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.deep) for name in FURTHER)])
def test_a_value_head_on_any_trunk_is_new_once_and_then_saved_with_it(
    name: str, tmp_path: Path, thread: Thread
) -> None:
    made(name).save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"has no score\.weight: .* a reward from an untrained head would be noise"):
        load_scalar(tmp_path / "policy")
    critic = load_scalar(tmp_path / "policy", new_head=True)
    assert not critic.get_parameter("score.weight").any()
    assert weights_digest(backbone(critic)) == weights_digest(backbone(load_causal(tmp_path / "policy")))
    assert outline(SCALAR, tmp_path / "policy").num_parameters() == critic.num_parameters()
    torch.nn.init.normal_(critic.get_parameter("score.weight"))
    critic.save_pretrained(tmp_path / "critic")
    assert reward_kind(tmp_path / "critic") == "scalar"
    again = load_scalar(tmp_path / "critic")
    crossed = cast("SharedModel[PreTrainedModel]", unpack(pack_with_blocks(SharedModel(again)))).load()
    for other in (again, copy.deepcopy(critic), crossed):
        assert type(other) is type(critic)
        assert weights_digest(other) == weights_digest(critic)
    texts = responses(3)
    values = anyio.run(stream, ValueModel(crossed, place=thread), texts, 3)
    scores = anyio.run(stream, RewardModel(again, place=thread), texts, 4)
    for response in texts:
        wanted = expected_values(critic, response)
        np.testing.assert_allclose(np.asarray(values[response.prompt.rollout]), wanted, rtol=1e-4, atol=1e-4)
        if response.tokens[-1]:  # else padding, behind the last score
            assert scores[response.prompt.rollout] == pytest.approx(wanted[-1], rel=1e-4, abs=1e-4)


def test_a_class_of_ours_is_called_as_transformers_would_and_stands_in_for_none_of_its_own(tmp_path: Path) -> None:
    SCALAR.made(tiny.STATEFUL["lfm2"]()).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Lfm2ForSequenceClassification"]
    assert type(SCALAR.made(tiny.CONFIGS["llama"]())) is LlamaForSequenceClassification


def test_a_trunk_inside_of_another_part_is_refused_by_name() -> None:
    with torch.device("meta"), pytest.raises(ModelRefused, match="Llama4ForConditionalGeneration holds its trunk ins"):
        SCALAR.made(AutoConfig.for_model("llama4"))
