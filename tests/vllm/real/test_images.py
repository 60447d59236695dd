"""Prompts with images on the real engine: it has the trainer's tokens and pixels, and samples by its log-probs.

Most families need torchvision where vLLM is: Idefics 3 does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForImageTextToText, PreTrainedModel

from oppo.errors import ModelError
from oppo.events import Chunk, Prompt
from oppo.hf.loading import load_tokenizer
from oppo.hf.model_parts import takes
from oppo.hf.processor import ImagePrompts, Processor
from oppo.hf.tokenizer import HfTokenizer
from oppo.images import ImageFiles
from oppo.models import Sampling, Weights
from oppo.run.train import train
from oppo.vllm import VllmEngine, VllmPolicy
from tests.kit.seen import checkpoint, picture, uri
from tests.kit.workplace import read_lines
from tests.vllm.real.rollouts import logprobs_of, read, tokens_of, whole

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

FAMILIES = ("idefics3", *(("qwen2_5_vl", "qwen3_vl") if find_spec("torchvision") else ()))
SMALL = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**27}


@dataclass
class Bench:
    path: Path
    engine: VllmEngine

    def __post_init__(self) -> None:
        self.processor = Processor(self.path)
        self.reader = ImagePrompts(self.processor, ImageFiles(self.path, self.path.parent))
        self.tokenizer = HfTokenizer(load_tokenizer(self.path))

    def prompt(self, number: int, *images: str) -> Prompt:
        row = {"prompt": [{"role": "user", "content": "<image>".join(["a", *"bcd"[: len(images)]])}], "images": images}
        ids, seen = (
            self.reader(row, "prompt", "row 1", lambda row, column: (row, self.tokenizer))[1:]
            if images
            else ([4, 99, 98, 97], ())
        )
        return Prompt(number, number, np.array(ids, np.int32), images=seen)

    def policy(self, limit: Callable[[Prompt], int] | None = None) -> VllmPolicy:
        sampling = Sampling(max_new_tokens=40, seed=3, barred=(self.processor.pad,))
        return VllmPolicy(self.engine, sampling=sampling, limit=limit)

    def model(self, version: int = 0) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32).eval()
        with torch.random.fork_rng():
            torch.manual_seed(version)
            for weight in model.get_decoder().parameters() if version else ():
                weight.data += 0.05 * torch.randn_like(weight)
        return model

    async def logprobs(self, model: PreTrainedModel, prompt: Prompt, tokens: Sequence[int]) -> NDArray[Any]:
        return await anyio.to_thread.run_sync(self._logprobs, model, prompt, tokens)

    @torch.no_grad()
    def _logprobs(self, model: PreTrainedModel, prompt: Prompt, tokens: Sequence[int]) -> NDArray[Any]:
        """Return what transformers' own pass over the whole sequence says, from the pixels of its images."""
        ids = torch.tensor([[*prompt.tokens.tolist(), *tokens]])
        given: dict[str, Any] = {**self.processor.pixels(prompt.images)} if prompt.images else {}
        kinds = (ids == self.processor.pad).int()
        given |= {each: kinds for each in ("mm_token_type_ids", "token_type_ids") if given and takes(model, each)}
        logits = model(input_ids=ids, use_cache=False, **given).logits[0, len(prompt.tokens) - 1 : -1].float()
        logits[:, self.processor.pad] -= 100
        found: NDArray[Any] = logits.log_softmax(-1)[range(len(tokens)), list(tokens)].numpy()
        return found


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("images")
    path = checkpoint(folder, request.param, wide=True)
    for number, (width, height) in enumerate(((48, 32), (40, 64), (48, 32))):
        picture(number, width, height).save(folder / f"{number}.png")
    with VllmEngine.start(path, arguments=SMALL, cores=1, log=folder / "vllm.log", images=True) as engine:
        yield Bench(path, engine)


async def test_it_reads_what_the_trainer_reads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, outputs = list[list[int]](), bench.engine.llm.output_processor
    add = outputs.add_request

    def note(request: Any, *more: Any) -> None:
        seen.append(request.prompt_token_ids)
        add(request, *more)

    monkeypatch.setattr(outputs, "add_request", note)
    one, two, other = bench.prompt(0, "0.png"), bench.prompt(1, "0.png", "1.png"), bench.prompt(2, "2.png")
    assert one.tokens.tolist() == other.tokens.tolist()  # nothing but the image tells them apart
    prompts = [one, two, other, bench.prompt(3), replace(one, rollout=4, admission=4)]
    models = [bench.model(version) for version in range(2)]
    policy = bench.policy(lambda prompt: 40 if prompt.rollout else 5)
    await policy.load(Weights(0, models[0].state_dict()))
    decodes = await policy.open(prompts)
    pieces: list[list[Chunk]] = [[] for _ in decodes]
    for cuts in (True, False):  # the first step ends with the shortest rollout, and new weights read the others again
        live = [decode for decode in decodes if not decode.ended]
        async with policy.decoding(live, lambda ended: cuts), anyio.create_task_group() as readers:  # noqa: B023
            for decode in live:
                readers.start_soon(read, decode, pieces[decode.prompt.rollout])
        await policy.load(Weights(1, models[1].state_dict()))
    for prompt, each in zip(prompts, pieces, strict=True):
        tokens, versions = tokens_of(each), np.concatenate([piece.versions for piece in each])
        wanted = np.where(versions == 0, *[await bench.logprobs(model, prompt, tokens) for model in models])
        np.testing.assert_allclose(logprobs_of(each), wanted, rtol=0, atol=1e-3)
        assert {*versions.tolist()} == ({0, 1} if prompt.rollout else {0})
        assert bench.processor.pad not in tokens
    mistaken, tokens = replace(other, images=one.images), tokens_of(pieces[2])
    seen_as = [await bench.logprobs(models[0], each, tokens) for each in (other, mistaken)]
    assert np.abs(seen_as[0] - seen_as[1]).max() > 0.1
    for ids in seen:
        assert any(ids[: len(each.tokens)] == each.tokens.tolist() for each in prompts)


async def test_images_that_are_not_those_of_the_prompt_are_refused(bench: Bench) -> None:
    right = bench.prompt(0, "0.png")
    for wrong in (replace(right, images=bench.prompt(0, "1.png").images * 2), replace(right, images=right.images * 2)):
        with pytest.raises(ModelError, match=r"vLLM cannot be shown .*\.png, .*\.png: "):
            await whole(bench.policy(), [wrong])
    ((first, *_), *_) = await whole(bench.policy(), [right])  # the engine lives
    assert len(first.tokens)


SETTINGS = """
run = { steps = 2, panel = "off", cores = 1, trace = 0, checkpoint_every = 0 }
models = { engine = "vllm", device = "cpu", dtype = "float32" }
vllm = { kv_cache_memory_bytes = 134217728 }
data.prompts = "prompts.jsonl"
sampling = { max_new_tokens = 12, stop = ["<|im_end|>", 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140] }
step = { batch = 2, chunk = 3, overcommit = 1, algorithm = "grpo" }
algorithm.samples = 2
trainer = { learning_rate = 1e-3 }
rewards = ["code.py:total"]
"""


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_whole_run_trains_on_images(family: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, family, wide=True)
    rows = [{"prompt": [{"role": "user", "content": f"{n}<image>?"}], "images": [uri(n)]} for n in range(3)]
    rows.append({"prompt": [{"role": "user", "content": "no image?"}]})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "code.py").write_text(
        "def total(completion_ids):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    (tmp_path / "config.toml").write_text(SETTINGS)
    given = [f"models.policy={family}", f"run.directory={tmp_path / 'runs'}"]
    run = await anyio.to_thread.run_sync(train, tmp_path / "config.toml", given)
    metrics = read_lines(run.path / "metrics.jsonl")
    assert len(metrics) == 2
    assert all(abs(line["mismatch/kl_current"]) < 1e-6 for line in metrics)
