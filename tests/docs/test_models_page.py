"""``docs/models.md`` has every model of transformers that generates text, and says what becomes of it."""

from __future__ import annotations

import pytest
import transformers

from docs.make_models import PAGE, TYPES, tried
from tests.hf import tiny

TEXT = PAGE.read_text(encoding="utf-8")

ROWS = {
    cells[0].strip("`"): cells
    for line in TEXT.splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}

USED = """
llama qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text mistral ministral3 mixtral gemma gemma2
gemma3_text gemma3n_text gemma4_text phi phi3 phimoe gpt2 gpt_neo gpt_neox gptj gpt_bigcode gpt_oss opt bloom falcon
falcon_h1 mamba mamba2 jamba deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm glm4 glm4_moe glm_moe_dsa olmo olmo2
olmo3 olmoe smollm3 granite granitemoe granitemoehybrid cohere cohere2 starcoder2 stablelm nemotron nemotron_h bamba
lfm2 llama4_text kimi_linear minimax minimax_m2 ernie4_5 exaone4 qwen2_5_vl qwen3_vl gemma3 llava
""".split()  # noqa: SIM905 - a page of them is easier read as words
"""Sixty types that people train, as far as their architectures differ."""

pytestmark = pytest.mark.skipif(
    f"transformers {transformers.__version__}" not in " ".join(TEXT.split()),
    reason="the page is that of another transformers",
)


def test_every_model_of_transformers_that_generates_text_is_on_the_page() -> None:
    assert list(ROWS) == list(TYPES), "run: make models-table"


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "qwen3_moe", "stablelm", "gptj", "deepseek_v3", "glm_moe_dsa", "lfm2", "gemma4_text"),
        *("mamba", "jamba", "xlm-roberta", "musicgen", "qwen3_vl", "paligemma"),
    ],
)
def test_the_page_says_what_becomes_of_a_model(model_type: str) -> None:
    verdict = tiny.apart(tried)(model_type)
    assert ROWS[model_type][:-1] == verdict.cells(), "run: make models-table"
    assert not verdict.why or f"| {verdict.reads} | {verdict.why} |" in TEXT


def test_of_the_models_that_people_train_all_are_taken_and_nearly_all_decode() -> None:
    rows = [ROWS[model_type] for model_type in USED]
    assert len(rows) >= 60
    assert all(trains == reference == "yes" for _, _, reference, _, trains, *_ in rows)
    elsewhere = [row for row in rows if row[1] == "no"]
    assert len(elsewhere) <= 6, "those that continue no sequence"
    assert len([row for row in elsewhere if row[-1] == "no"]) <= 2, "vLLM has the others"
