"""The head of a language model: its logits apart from the trunk, in float32, in chunks, and on all sides the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from functools import partial

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.events import Finish, FloatArray, Prompt, Response
from oppo.hf.head import OwnHead, require_own_head, widen_head
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ReferenceLogprobs
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.packing import pack
from oppo.hf.train.trainer import HfTrainerCore
from oppo.losses import ClippedLoss, Input
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.placement.trainer import TrainerCounts
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.test_routers import batch_of
from tests.hf.train.test_actor_critic import Twisted

SAMPLING = Sampling(max_new_tokens=120, seed=1)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a CPU do what a GPU does in one kernel."""
    monkeypatch.setattr("oppo.hf.head.WIDE", {"cpu"})
    monkeypatch.setattr("oppo.hf.head._product", lambda rows, weight: rows.float() @ weight.float().t())


def half(name: str = "llama") -> PreTrainedModel:
    """Return a model in 16 bits whose logits are as large as those of a trained one."""
    model = tiny.causal(name, seed=1, dtype=torch.bfloat16)
    model.train(mode=False)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.get_parameter("weight").mul_(8 / OwnHead(model)(states(model)).std())
    return model


def states(model: PreTrainedModel) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 64, tiny.HIDDEN, generator=generator).to(model.dtype)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_the_head_alone_says_what_the_model_says(name: str) -> None:
    model, ids = tiny.causal(name, seed=1).train(mode=False), torch.arange(3, 23).reshape(2, 10)
    whole = torch.ones_like(ids)
    with torch.no_grad():
        hidden = model.base_model(ids, attention_mask=whole, use_cache=False).last_hidden_state
        assert torch.equal(OwnHead(model)(hidden), model(ids, attention_mask=whole, use_cache=False).logits)


def test_gradients_of_short_weights_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OwnHead(tiny.causal(seed=1, dtype=torch.bfloat16))
    hidden = torch.randn(64, tiny.HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr("oppo.hf.head.LOGITS_BYTES", 4 * tiny.VOCABULARY)
    (weight,) = (weight for weight in head._shell.parameters() if weight.shape == (tiny.VOCABULARY, tiny.HIDDEN))

    def measure(logits: Tensor, at: slice, again: bool) -> dict[Input, Tensor]:
        del at, again
        return {"logprobs": logits.float().logsumexp(-1)}

    head.measured(hidden, measure)["logprobs"].sum().backward()
    each = []
    for one in hidden:
        (found,) = torch.autograd.grad(head(one[None, None])[0].float().logsumexp(-1).sum(), weight)
        each.append(found.float())
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.stack(each).sum(0).bfloat16())


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_16_bits_have_logits_in_float32_and_copies_read_their_own_weights(name: str) -> None:
    model = half(name)
    head, hidden = model.get_output_embeddings(), states(model)
    weight, bias = head.get_parameter("weight"), getattr(head, "bias", None)
    expected = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    narrow = torch.nn.functional.linear(hidden, weight, bias)
    for each in (head, copy.deepcopy(model).get_output_embeddings(), pickle.loads(pickle.dumps(head))):
        logits = each(hidden)
        assert logits.dtype == torch.float32
        assert (logits - expected).abs().max() < 1e-3 * (narrow - expected).abs().max()
    copied = copy.deepcopy(model).get_output_embeddings()
    with torch.no_grad():
        copied.get_parameter("weight").zero_()
    assert copied(hidden).std() < head(hidden).std()


@pytest.mark.usefixtures("wide")
def test_their_gradients_are_those_of_a_product_in_16_bits() -> None:
    model = half()
    head, hidden = model.get_output_embeddings(), states(model).requires_grad_()
    weight = head.get_parameter("weight")
    into = torch.randn(1, 64, tiny.VOCABULARY, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(head(hidden), (hidden, weight), into)
    expected = torch.autograd.grad(torch.nn.functional.linear(hidden, weight), (hidden, weight), into.bfloat16())
    assert [each.dtype for each in found] == [torch.bfloat16] * 2
    torch.testing.assert_close(found, expected)


def test_a_head_of_32_bits_stays_as_it_is() -> None:
    model = tiny.causal(seed=1)
    widen_head(model)
    assert "forward" not in vars(model.get_output_embeddings())


async def logprobs_of(model: PreTrainedModel) -> Mapping[str, FloatArray]:
    """Return the log-probs of the same tokens by the decoder, by a reference and by the trainer."""
    prompts = [Prompt(n, n, np.arange(5 + 7 * n, 8 + 9 * n, dtype=np.int32)) for n in range(6)]
    with Thread("models", setup=partial(torch.set_num_threads, 1)) as thread:
        policy = HfPolicy(model, sampling=SAMPLING, place=thread)
        reference = ReferenceLogprobs(model, sampling=SAMPLING, place=thread)
        responses = {prompt.rollout: Response.empty(prompt) for prompt in prompts}
        decodes = await policy.open(prompts)
        async with policy.decoding(decodes, lambda _: False):
            for decode in decodes:
                rollout = decode.prompt.rollout
                responses[rollout] = responses[rollout].then((await decode.read(100)).chunk(rollout, 0))
        batch = batch_of(list(responses.values()))
        await reference.extend([event for each in batch.responses for event in (each.prompt, each.chunk())])
        finished = [Finish(each.prompt.rollout, each, "length") for each in batch.responses]
        read = np.concatenate(await reference.finish(finished))

    def trained() -> FloatArray:
        settings = TrainerSettings()
        core = HfTrainerCore(ActorCritic(model), SAMPLING, settings, ClippedLoss(), TrainerCounts.new())
        found: FloatArray = core.outputs(pack(batch, range(len(batch)), model.device))["logprobs"].detach().numpy()
        return found

    return {"decoder": batch.logprobs, "reference": read, "trainer": await anyio.to_thread.run_sync(trained)}


@pytest.mark.usefixtures("wide")
async def test_decoder_reference_and_trainer_agree_better_than_logits_of_16_bits_let_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apart(found: Mapping[str, FloatArray], other: str) -> float:
        difference = found["decoder"].astype(np.float64) - found[other]
        return float((np.exp(difference) - 1 - difference).mean())  # k3, nats

    at_once = await logprobs_of(tiny.apart(half)())
    monkeypatch.setattr("oppo.hf.head.LOGITS_BYTES", 4 * tiny.VOCABULARY * 5)
    in_chunks = await logprobs_of(tiny.apart(half)())
    monkeypatch.setattr("oppo.hf.head.WIDE", set())
    narrow = await logprobs_of(tiny.apart(half)())
    for one in ("reference", "trainer"):
        np.testing.assert_allclose(in_chunks[one], at_once[one], atol=1e-5)
        assert apart(at_once, one) < 0.8 * apart(narrow, one)


def test_a_head_that_cannot_be_told_from_its_trunk_is_refused() -> None:
    twisted = Twisted(tiny.causal("cohere", seed=1).train(mode=False))
    with pytest.raises(ModelRefused, match=r"the head of Twisted.*set models\.shared_trunk = false"):
        require_own_head(twisted)
