"""The backend on CUDA: the same contracts, with the tolerances that a device's kernels leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oppo.events import Prompt, StepReport
from oppo.hf import DeviceThread, HfTrainer, probe
from oppo.hf.head import kernels_on, widen_head
from oppo.hf.kv.reader import Incremental
from oppo.hf.serve.sampling import Drawing, draw
from oppo.hf.weights import weights_digest
from oppo.losses import SupportIndex, token_logprobs
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.stories import graph_of, gumbel
from tests.kit.workplace import furnish, records, run

pytestmark = pytest.mark.gpu


def on_gpu(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.nn.Module.to(model, device="cuda", dtype=dtype)
    model.train(mode=False)
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2", "neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_pass_the_probe_on_the_device(name: str, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    probe(on_gpu(tiny.causal(name, seed=1), dtype))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_streamed_logits_equal_one_forward_pass(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = on_gpu(tiny.causal(name, seed=1))
    tokens = torch.arange(5, 77, device="cuda") % tiny.VOCABULARY
    reader = Incremental(model)
    parts = [reader.extend([0], [part])[0] for part in tokens.split(7)]
    with torch.inference_mode():
        whole = model(tokens[None]).logits[0]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "qwen2-moe"])
def test_decode_steps_launched_as_graphs_give_what_single_kernels_give(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = on_gpu(tiny.causal(name, seed=1))
    graphs, kernels = Incremental(model), Incremental(model)
    kernels._graphs = None
    prompts = [torch.arange(5, 9 + 7 * row) % tiny.VOCABULARY for row in range(11)]
    for reader in (graphs, kernels):
        reader.extend(range(11), prompts)
    for step in range(60):
        rows = list(range(min(11, 4 + step // 8)))[step // 20 :]
        tokens = torch.tensor([(row + step) % tiny.VOCABULARY for row in rows], device="cuda")
        if step % 20 == 0 and step:
            for reader in (graphs, kernels):
                reader.forget([step // 20 - 1])
        got, expected = (reader.step(rows, tokens) for reader in (graphs, kernels))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert graphs._graphs is not None
    assert graphs._graphs.replayed > 20 or name == "qwen2-moe"  # whose experts the host may loop over


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_products_in_float32(dtype: torch.dtype) -> None:
    head = on_gpu(tiny.causal("llama", seed=1), dtype).get_output_embeddings()
    model = on_gpu(tiny.causal("llama", seed=1), dtype)
    widen_head(model)
    hidden = torch.randn(9, tiny.HIDDEN, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    logits = model.get_output_embeddings()(hidden)
    assert logits.dtype == torch.float32
    expected = hidden.double() @ head.get_parameter("weight").double().t()
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    logits.square().sum().backward()
    gradient = model.get_output_embeddings().get_parameter("weight").grad
    assert gradient is not None
    torch.testing.assert_close(gradient.double(), 2 * expected.t() @ hidden.double(), rtol=0.05, atol=0.05)


def test_the_noise_of_a_token_is_that_of_the_cpu() -> None:
    admission, sample, position = torch.tensor([0, 1, 7]), torch.tensor([0, 0, 2]), torch.tensor([5, 6, 900])
    here = gumbel(3, admission, sample, position, 512)
    there = gumbel(3, admission.cuda(), sample.cuda(), position.cuda(), 512)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-5)


def test_kernels_of_triton_run_and_agree_with_a_cpu() -> None:
    device = torch.device("cuda", 0)
    assert Drawing(Sampling(), device)._kernels is kernels_on(device) is not None


@pytest.mark.parametrize("sampling", [Sampling(top_k=20), Sampling(top_p=0.9), Sampling(stop=(3, 7))])
def test_what_truncated_sampling_keeps_is_what_the_trainer_normalises_over(sampling: Sampling) -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)).cuda() * 3
    places = torch.arange(64, device="cuda")
    noise = gumbel(0, places, places, places, 5000)
    drawn = draw(logits, noise, sampling, range(0, 64, 2))
    tokens, _, support = drawn.read_back()
    assert support.holds(tokens).all()
    again = token_logprobs(logits, drawn.tokens, support=SupportIndex.of(support, logits.device))
    torch.testing.assert_close(again, drawn.logprobs, rtol=0, atol=1e-5)


async def train(kind: Callable[[str], Thread]) -> tuple[list[StepReport], bool]:
    actor, reference = on_gpu(tiny.causal("llama", seed=1)), on_gpu(tiny.causal("llama", seed=1))
    critic, reward = on_gpu(tiny.scalar("llama", seed=2)), on_gpu(tiny.scalar("llama", seed=2))
    before = weights_digest(actor)
    sampling = Sampling(max_new_tokens=32, stop=tuple(range(2, 8)), seed=1)
    prompts = [Prompt(n, n, np.arange(5 + n, 9 + n, dtype=np.int32)) for n in range(24)]
    with kind("actor") as acting, kind("scorers") as scoring, kind("trainer") as training:
        settings = TrainerSettings(learning_rate=1e-3)
        graph = graph_of(
            actor,
            critic,
            trainer=HfTrainer(actor, critic, sampling=sampling, place=training, settings=settings),
            acting=acting,
            scoring=scoring,
            sampling=sampling,
            batch=8,
            chunk=8,
            reference=reference,
            reward=reward,
            deterministic=False,
        )
        async with graph.open(prompts) as run:
            reports = [report async for report in run.steps(3)]
    return reports, weights_digest(actor) != before


@pytest.mark.parametrize("kind", [Thread, partial(DeviceThread, device="cuda")], ids=["one stream", "own streams"])
def test_a_streamed_run_trains_on_the_device(kind: Callable[[str], Thread]) -> None:
    reports, changed = anyio.run(train, kind)
    assert len(reports) == 3
    assert changed
    assert all(np.isfinite(value) for report in reports for value in report.metrics.values())
    assert abs(reports[0].metrics["val/ratio"] - 1) < 0.5


@pytest.mark.parametrize(
    "options",
    [(), ("models.dtype=bfloat16", "models.shared_trunk=true"), ("run.scorers=process",)],
    ids=["plain", "half", "process"],
)
@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_oppo_train_runs_on_the_device_from_end_to_end(tmp_path: Path, device: str, options: tuple[str, ...]) -> None:
    folder = furnish(tmp_path)
    code, _, said = run(
        folder, f"models.device={device}", "run.name=gpu", "run.steps=3", "run.checkpoint_every=2", *options
    )
    assert code == 0, said
    lines = records(folder, "gpu", "metrics.jsonl")
    assert len(lines) == 3
    assert all(np.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert (folder / "runs" / "gpu" / "checkpoints" / "final" / "actor" / "model.safetensors").is_file()
    assert (folder / "runs" / "gpu" / "checkpoints" / "step-000002").is_dir()
