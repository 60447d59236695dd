"""Reference and teacher on the real engine, beside those on transformers; `make test-vllm` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from oppo.errors import ConfigError
from oppo.hf.serve.scorers import ReferenceLogprobs, TeacherLogprobs
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.returns import TopLogprobs
from oppo.testing import check_scorer
from oppo.vllm import VllmEngine, VllmLogprobs
from oppo.vllm.scorers import LOGPROBS, LogprobServer
from tests.kit.responses import VOCABULARY as SAMPLED, answered, finishes, responses, stream
from tests.kit.workplace import tokenizer
from tests.vllm import scenario
from tests.vllm.real.conftest import VOCABULARY, scoring_server, tiny_actor

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 1e-4
BLOCK = 32


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_actor(7)


@pytest.fixture(scope="module")
def saved(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reference")
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(saved: Path) -> Iterator[VllmEngine]:
    arguments = {**LOGPROBS, "dtype": "float32", "block_size": BLOCK}
    with VllmEngine.start(saved, arguments=arguments, cores=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def padding(model: LlamaForCausalLM) -> float:
    """The likeliest id beyond :data:`SAMPLED` behind two zeros, times their number."""
    with torch.no_grad():
        probabilities = model(torch.zeros(1, 2, dtype=torch.long)).logits[0, -1].softmax(-1)
    return float(probabilities[SAMPLED:].max()) * (VOCABULARY - SAMPLED)


def assert_close(got: object, want: object) -> None:
    if isinstance(want, TopLogprobs):
        assert isinstance(got, TopLogprobs)
        assert_close(got.tokens, want.tokens)
        assert_close(got.top[:, :-1], want.top[:, :-1])
        assert_close(np.exp(got.top[:, -1]), np.exp(want.top[:, -1]))
        assert (got.ids == want.ids).mean() > 0.99
    else:
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=TOLERANCE)


async def test_it_does_what_the_fake_does(engine: VllmEngine) -> None:
    await scenario.reading(engine, BLOCK)


async def test_the_contract_is_kept(engine: VllmEngine) -> None:
    async def make() -> VllmLogprobs:
        return VllmLogprobs(engine, sampling=Sampling(max_new_tokens=128))

    def close(one: object, other: object) -> bool:
        return bool(np.allclose(np.asarray(one), np.asarray(other), rtol=0, atol=TOLERANCE))

    await check_scorer(make, finishes([each for each in responses(8) if len(each) >= 4]), close)


@pytest.mark.parametrize("top_k", [0, 5], ids=["reference", "teacher"])
@pytest.mark.parametrize("sampled", [(1.0, 0), (0.7, SAMPLED), (0.0, 0)])
async def test_streamed_log_probs_are_those_of_transformers(
    sampled: tuple[float, int], top_k: int, model: LlamaForCausalLM, engine: VllmEngine, thread: Thread
) -> None:
    sampling = Sampling(max_new_tokens=128, temperature=sampled[0], vocabulary=sampled[1])
    await engine.call_workers("oppo_temper", 1.0, VOCABULARY)
    library = (
        TeacherLogprobs(model, sampling=sampling, place=thread, top_k=top_k)
        if top_k
        else ReferenceLogprobs(model, sampling=sampling, place=thread)
    )
    made = responses(8)
    scorer = VllmLogprobs(engine, sampling=sampling, top_k=top_k)
    values = await stream(scorer, made, seed=3)
    await library.extend([event for each in made for event in (each.prompt, each.chunk())])
    for each, want in zip(made, await library.finish(finishes(made)), strict=True):
        assert_close(values[each.prompt.rollout], want)


async def test_a_token_of_each_block_is_read_twice_and_no_other(engine: VllmEngine) -> None:
    reference = VllmLogprobs(engine, sampling=Sampling(max_new_tokens=400))
    tokens = np.random.default_rng(5).integers(3, SAMPLED, 320).tolist()
    made = answered(0, tokens[:20], tokens[20:])
    await reference.extend([made.prompt])
    for start in range(0, 300, 16):
        await reference.extend([made.chunk(start, start + 16)])
    await reference.finish(finishes([made]))
    requests = (len(tokens) - 1) // BLOCK
    assert (reference.tokens.computed, reference.tokens.again) == (320 + requests, requests)


async def test_a_server_gives_the_log_probs_of_transformers(
    model: LlamaForCausalLM, saved: Path, padding: float, tmp_path: Path, thread: Thread
) -> None:
    sampling, made = Sampling(max_new_tokens=128), responses(8)
    with scoring_server(saved, tmp_path, "--no-enable-chunked-prefill") as url:
        with pytest.raises(ConfigError, match="cannot leave the others out") as refused:
            LogprobServer(url, saved, vocabulary=SAMPLED)
        assert float(str(refused.value).rpartition(" ")[2]) == pytest.approx(min(1.0, padding), rel=0.1)
        for top_k in (0, 5):
            library = (
                TeacherLogprobs(model, sampling=sampling, place=thread, top_k=top_k)
                if top_k
                else ReferenceLogprobs(model, sampling=sampling, place=thread)
            )
            await library.extend([event for each in made for event in (each.prompt, each.chunk())])
            async with VllmLogprobs(LogprobServer(url, saved, top_k=top_k), sampling=sampling, top_k=top_k) as scorer:
                values = await stream(scorer, made, seed=3)
            for each, want in zip(made, await library.finish(finishes(made)), strict=True):
                assert_close(values[each.prompt.rollout], want)
