"""Models that see: a sequence read in pieces is one pass of transformers from pixels, whatever the family."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelError, ModelRefused
from oppo.events import Batch, Prompt, Response
from oppo.hf.kv.reader import Incremental
from oppo.hf.loading import _freeze_beside_text
from oppo.hf.serve.sampling import draw
from oppo.hf.serve.scorers import ReferenceWorker, RewardWorker, ScorerInput, ValueWorker
from oppo.hf.train.actor_critic import ActorCritic, value_model_on
from oppo.hf.train.packing import pack
from oppo.hf.train.trainer import HfTrainer
from oppo.losses import Input, token_logprobs
from oppo.models import Sampling
from oppo.placement import Thread
from tests.hf import tiny
from tests.hf.seeing import FAMILIES, PAD, TOLERANCE, from_pixels, ids_of, of_words, responses_of, seeing, showing
from tests.hf.train.test_trainer import batch_of
from tests.kit.responses import chunk


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("piece", [0, 1, 5])
def test_pieces_are_one_pass_from_pixels(name: str, piece: int) -> None:
    model, rows = seeing(name, dtype=torch.float64), responses_of(name)
    reader, ids, found = Incremental(model), [*map(ids_of, rows)], [list[Tensor]() for _ in rows]
    for row, response in enumerate(rows[:3]):
        reader.show(row, response.prompt.tokens, response.prompt.images)
    while left := [row for row, each in enumerate(ids) if reader.length(row) < len(each)]:
        pieces = [ids[row][reader.length(row) :][: _size(reader, row, rows[row], piece)] for row in left]
        if max(map(len, pieces)) == 1 and piece == 1:
            outputs = [*reader.step(left, torch.cat(pieces))[:, None]]
        else:
            outputs = reader.extend(left, pieces)
        for row, output in zip(left, outputs, strict=True):
            found[row].append(output)
    for response, outputs, each in zip(rows, found, ids, strict=True):
        assert _apart(torch.cat(outputs), from_pixels(model, response.prompt, each)) < TOLERANCE.get(name, 1e-12)
    assert _apart(torch.cat(found[0]), from_pixels(model, showing(name, ["d"], number=1), ids[0])) > 1e-3
    assert reader.eyes is not None
    assert reader.eyes.looks == 2  # a group is one look


def _size(reader: Incremental, row: int, response: Response, piece: int) -> int:
    at = reader.length(row)
    if piece == 5:
        return reader.cut(row, at, 5)
    return len(response.prompt.tokens) if at == 0 else piece or 3


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_beside_one_with_images_keep_their_bits_and_have_no_image_token(name: str) -> None:
    reader, shown = Incremental(seeing(name)), responses_of(name)[0]
    texts, images = list[Tensor](), list[Tensor]()
    for row in (3, 4):
        pieces = torch.from_numpy(of_words(40)).long().split(7)
        texts.append(torch.cat([reader.extend([row], [piece])[0] for piece in pieces]))
        reader.forget([7])
        reader.show(7, shown.prompt.tokens, shown.prompt.images)
        images += reader.extend([7], [ids_of(shown)])
    assert torch.equal(*texts)
    assert torch.equal(*images)
    assert reader.eyes is not None
    assert reader.eyes.looks == 1  # what is kept is shown again
    for row in (4, 7):
        with pytest.raises(ModelError, match=f"row {row} has 1 image token among"):
            reader.extend([row], [torch.tensor([4, PAD])])


def _batch(rows: list[Response]) -> Batch:
    floats = [np.zeros(len(row), np.float32) for row in rows]
    tokens, estimates = [row.tokens for row in rows], [(each, each) for each in floats]
    made = batch_of(
        [row.prompt.tokens for row in rows], tokens, floats, scores=[0.0] * 4, values=floats, estimates=estimates
    )
    return replace(made, responses=tuple(rows))


def _alone(model: PreTrainedModel, row: Response) -> Tensor:
    ids, first = ids_of(row), len(row.prompt.tokens)
    logits = from_pixels(model, row.prompt, ids)
    return token_logprobs(logits[first - 1 : -1], ids[first:], 1.0)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_a_gradient_is_that_of_each_row_alone_from_its_pixels(name: str, packed: bool) -> None:
    actor, rows = seeing(name, dtype=torch.float64), responses_of(name)
    _freeze_beside_text(actor)
    models = ActorCritic(actor)
    models.prepare()
    if packed and not models.packs(64, images=True):
        assert name in ("gemma3", "qwen3_5")
        return
    part = pack(_batch(rows), range(len(rows)), torch.device("cpu"), packed=packed)

    def measure(logits: Tensor, at: slice, again: bool) -> dict[Input, Tensor]:
        del again
        return {"logprobs": token_logprobs(logits, part.tokens[at], 1.0)}

    found = models(part, measure)[0]["logprobs"]
    alone = torch.cat([_alone(actor, row) for row in rows])
    weights = [weight for weight in actor.parameters() if weight.requires_grad]
    ours, theirs = (torch.autograd.grad(each.square().sum(), weights) for each in (found, alone))
    limit = TOLERANCE.get(name, 1e-6)  # log-probs are in float32
    assert torch.allclose(found, alone, atol=limit)
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) <= limit * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llava"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_scorers_see_and_look_once_for_a_group(name: str, deterministic: bool) -> None:
    rows, model = responses_of(name), seeing(name)
    worker = ReferenceWorker(model, deterministic, Sampling())
    for piece in range(0, 40, 4):
        events = [
            row.prompt if piece == 0 else row.chunk().part(piece - 4, piece) for row in rows if piece < len(row) + 4
        ]
        worker.extend(ScorerInput(events))
    found = worker.finish({row.prompt.rollout: len(row) for row in rows})
    for row, logprobs in zip(rows, found, strict=True):
        with torch.no_grad():
            assert np.allclose(logprobs, _alone(model, row).numpy(), atol=1e-4)
    assert isinstance(worker.reader._reader, Incremental)
    looked = worker.reader._reader.eyes
    assert looked is not None
    assert looked.looks == 2


def test_a_critic_and_a_reward_model_see() -> None:
    rows, actor = responses_of("qwen2_5_vl"), seeing("qwen2_5_vl")
    critic = value_model_on(actor)
    with torch.no_grad():
        critic.get_submodule("score").weight.normal_()  # type: ignore[operator] # a tensor
    for kind in (ValueWorker, RewardWorker):
        outputs = []
        for names in (["a"], ["d"]):
            shown = showing("qwen2_5_vl", names, number=1)
            worker = kind(critic, True)
            worker.extend(ScorerInput([Prompt(0, 0, shown.tokens, images=shown.images), rows[0].chunk()]))
            outputs.append(np.atleast_1d(worker.finish({0: len(rows[0])})[0]))
        assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


def test_ids_that_are_barred_are_never_drawn_and_leave_the_support() -> None:
    logits = torch.zeros(3, 8)
    logits[:, 5] = 9.0
    for sampling in (Sampling(barred=(5,), temperature=0), Sampling(barred=(5, 90)), Sampling(barred=(5,), top_k=3)):
        ids, logprobs, support = draw(logits, torch.zeros(3, 8), sampling).read_back()
        assert 5 not in ids
        assert support.holds(ids).all()
        assert not support.holds(np.full(3, 5, np.int32)).any()
        assert np.allclose(logprobs, -np.log(3 if sampling.top_k else 7), atol=1e-6)
    early = Sampling(barred=(5,), stop=(2,), min_new_tokens=4)
    assert draw(logits, torch.zeros(3, 8), early, [1]).read_back()[2].counts.tolist() == [-1, -2, -1]
    assert draw(logits, torch.zeros(3, 8), Sampling()).read_back()[2].empty


async def test_a_sampled_image_token_is_an_error_of_the_update() -> None:
    rows, actor = responses_of("llava"), seeing("llava")
    rows[0] = Response.empty(rows[0].prompt).then(chunk(0, 0, np.array([3, PAD], np.int32)))
    _freeze_beside_text(actor)
    with Thread("training") as place:
        trainer = HfTrainer(actor, sampling=Sampling(), place=place)
        with pytest.raises(ModelError, match=r"rollouts \[0\] have tokens in their responses that stand for images"):
            await trainer.update(_batch(rows))


def test_a_tower_that_would_be_trained_is_refused() -> None:
    models = ActorCritic(seeing("llava"))
    part = pack(_batch(responses_of("llava")), range(4), torch.device("cpu"))
    with pytest.raises(ModelRefused, match="requires a gradient, and what reads images is frozen"):
        models(part, None)
    with pytest.raises(ModelRefused, match="it has no image tokens, or no tower"):
        ActorCritic(tiny.causal())(part, None)
