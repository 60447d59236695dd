"""Writes ``ppo.json`` and ``ppo_trained.safetensors``: what TRL's PPO and torchrl make of fixed inputs.

Made with TRL 1.12.0 (the last release with ``trl.experimental.ppo``), torchrl 0.14.1, torch 2.13.0 (CPU),
transformers 5.23.0, accelerate 1.15.0, datasets and numpy 2.4.6, in an environment of their own; none of TRL, torchrl
and datasets is a dependency of this package, its tests included. To make them again::

    pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 datasets trl==1.12.0 torchrl==0.14.1 structlog
    python -m tests.golden.make_ppo

What is whose:

- ``gae``: torchrl's ``generalized_advantage_estimate``, called.
- ``whiten``: TRL's ``masked_whiten``, called.
- ``loss``, ``kl``: the arithmetic lies inside of ``PPOTrainer.train``; those source lines are cut out of the installed
  file between two markers and executed on fixed inputs, with their gradients.
- ``update``: one whole update by a real ``PPOTrainer`` (prompts padded on the left, three epochs, one minibatch).
- ``early``: the arrays of another, whose responses end in EOS at lengths of their own; what it trained is not kept.
  Only ``batch_generation`` is replaced, so that the responses are the fixed ones; per-row arrays are read from the
  frame of ``train`` when it whitens the advantages; metrics are what it logs; the trained weights are all written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", ACCELERATE_USE_CPU="true")

import numpy as np
import torch
import trl.experimental.ppo.ppo_trainer as peer
from datasets import Dataset
from safetensors.torch import save_file
from torchrl.objectives.value.functional import generalized_advantage_estimate
from trl.experimental.ppo import PPOConfig, PPOTrainer

from oppo.events import IntArray
from tests.golden import fixed
from tests.golden.recording import listed, source, tokenizer

HERE = Path(__file__).parent
MASKED_WHITEN = peer.masked_whiten
CAPTURED = ("logprobs", "ref_logprobs", "values", "scores", "kl", "rewards", "returns", "padding_mask")


def main() -> None:
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 - the peer shuffles with it; the order of rows moves last bits only
    golden: dict[str, Any] = {"gae": gae(), "whiten": whiten(), "loss": loss(), "kl": kl()}
    golden["update"], trained = update(fixed.responses())
    golden["early"], _ = update(fixed.early(), stop_token="eos")
    del golden["update"]["padding_mask"], golden["early"]["metrics"], golden["early"]["grad_norms"]
    save_file(trained, HERE / "ppo_trained.safetensors")
    (HERE / "ppo.json").write_text(json.dumps(golden, indent=1) + "\n")


def gae() -> list[dict[str, Any]]:
    cases = []
    for seed, (length, gamma, lam) in enumerate(
        [(1, 1.0, 0.95), (5, 0.99, 0.9), (40, 1.0, 0.95), (17, 0.9, 0.0), (9, 1.0, 1.0)]
    ):
        rewards, values = fixed.numbers(10 + seed, length), fixed.numbers(20 + seed, length)
        column = [
            torch.from_numpy(x).reshape(1, length, 1) for x in (values, np.append(values[1:], np.float32(0)), rewards)
        ]
        done = torch.zeros(1, length, 1, dtype=torch.bool)
        done[:, -1] = True
        advantages, returns = generalized_advantage_estimate(gamma, lam, *column, done)
        cases.append(
            {"rewards": listed(rewards), "values": listed(values), "gamma": gamma, "lam": lam}
            | {"advantages": listed(advantages.flatten()), "returns": listed(returns.flatten())}
        )
    return cases


def whiten() -> list[dict[str, Any]]:
    x = torch.from_numpy(2.0 + 3.0 * fixed.numbers(30, 64))
    mask = torch.from_numpy(fixed.numbers(31, 64) > -0.5)
    return [
        {
            "x": listed(x),
            "mask": listed(mask),
            "shift_mean": shift,
            "whitened": listed(peer.masked_whiten(x, mask, shift)),
        }
        for shift in (True, False)
    ]


def loss() -> dict[str, Any]:
    rows, width, vocabulary = 6, 9, 12
    shape = (rows, width)
    setting = fixed.Setting()
    lengths = torch.tensor([9, 4, 7, 1, 9, 6])
    padding = torch.arange(width) >= lengths.unsqueeze(1)
    drawn = {name: torch.from_numpy(fixed.numbers(40 + k, *shape)) for k, name in enumerate("abcdef")}
    new = (-2 + 0.5 * drawn["a"]).requires_grad_()
    old = -2 + 0.5 * drawn["b"]
    values = drawn["c"].clone().requires_grad_()
    inputs = {"old_logprobs": old, "old_values": drawn["d"], "advantages": drawn["e"], "returns": drawn["f"]}
    logits = torch.from_numpy(3 * fixed.numbers(50, rows, width, vocabulary))
    frame: dict[str, Any] = {
        "torch": torch, "masked_mean": peer.masked_mean, "INVALID_LOGPROB": peer.INVALID_LOGPROB, "logits": logits,
        "args": PPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", cliprange=setting.clip,
                          cliprange_value=setting.value_clip, vf_coef=setting.value_coefficient),
        "padding_mask": padding, "padding_mask_p1": padding, "micro_batch_inds": slice(None),
        "new_logprobs": torch.masked_fill(new, padding, peer.INVALID_LOGPROB),
        "mb_logprobs": torch.masked_fill(old, padding, peer.INVALID_LOGPROB),
        "vpred": torch.masked_fill(values, padding, 0), "mb_values": torch.masked_fill(drawn["d"], padding, 0),
        "mb_advantage": torch.masked_fill(drawn["e"], padding, 0), "mb_return": drawn["f"],
    }  # fmt: skip
    exec(source(PPOTrainer.train, "vpredclipped =", "loss = pg_loss"), frame)  # the peer's own lines
    frame["loss"].backward()
    exec(source(PPOTrainer.train, "pg_clipfrac = masked_mean", "approxkl ="), frame)  # the peer's own lines
    names = ("pg_loss", "vf_loss", "loss", "pg_clipfrac", "vf_clipfrac", "approxkl")
    chosen = torch.from_numpy(np.abs(fixed.numbers(51, *shape) * 1e4).astype(np.int64) % vocabulary)
    return {
        "mask": listed(~padding), "logprobs": listed(new), "values": listed(values),
        **{name: listed(x) for name, x in inputs.items()},
        **{name: frame[name].item() for name in names}, "ratio_mean": frame["ratio"].mean().item(),
        "logprobs_grad": listed(new.grad), "values_grad": listed(values.grad),
        "logits": listed(logits), "tokens": listed(chosen), "token_entropy": listed(frame["entropy"]),
        "token_logprobs": listed(peer.selective_log_softmax(logits, chosen)),
    }  # fmt: skip


def kl() -> list[dict[str, Any]]:
    logprobs, reference = (torch.from_numpy(-2 + fixed.numbers(seed, 30)) for seed in (60, 61))
    cases = []
    for estimator in ("k1", "k3"):
        args = PPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", kl_estimator=estimator)
        frame = {"logprobs": logprobs, "ref_logprobs": reference, "args": args}
        exec(source(PPOTrainer.train, "logr =", "kl ="), frame)  # the peer's own lines
        cases.append(
            {
                "estimator": estimator,
                "logprobs": listed(logprobs),
                "reference": listed(reference),
                "kl": listed(frame["kl"]),
            }
        )
    return cases


def update(
    responses: Sequence[IntArray], stop_token: Literal["eos"] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    setting, rows = fixed.Setting(), len(fixed.PROMPT)
    answers = {tuple(p.tolist()): r for p, r in zip(fixed.prompts(), responses, strict=True)}
    order: list[int] = []

    def generation(
        model: Any, queries: torch.Tensor, _size: int, pad: int, _config: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        read = [tuple(t for t in row if t != pad) for row in queries.tolist()]
        order.extend(list(answers).index(prompt) for prompt in read)
        both = torch.cat((queries, torch.tensor(np.stack([answers[p] for p in read]), dtype=torch.long)), 1)
        logits = peer.forward(model, both, pad).logits[:, queries.shape[1] - 1 : -1]
        return both, logits / (setting.temperature + 1e-7)

    captured: dict[str, Any] = {}

    def whitened(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        scope = sys._getframe(1).f_locals
        result: torch.Tensor = MASKED_WHITEN(values, mask, shift_mean)
        unsort = np.argsort(order)
        captured.update({name: listed(scope[name][unsort]) for name in CAPTURED})
        captured.update(advantages=listed(values[unsort]), whitened=listed(result[unsort]))
        return result

    peer.batch_generation, peer.masked_whiten = generation, whitened
    args = PPOConfig(
        output_dir="/tmp/golden_output", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, num_sample_generations=0, per_device_train_batch_size=rows,
        gradient_accumulation_steps=1, num_mini_batches=1, num_ppo_epochs=setting.epochs, total_episodes=rows,
        response_length=fixed.RESPONSE, local_rollout_forward_batch_size=rows, learning_rate=setting.learning_rate,
        lr_scheduler_type="constant", adam_epsilon=setting.eps, temperature=setting.temperature, gamma=setting.gamma,
        lam=setting.lam, kl_coef=setting.kl, cliprange=setting.clip, cliprange_value=setting.value_clip,
        vf_coef=setting.value_coefficient, missing_eos_penalty=None, stop_token=stop_token,
    )  # fmt: skip
    actor, critic = fixed.causal(1), fixed.scalar(2)
    trainer = PPOTrainer(
        args=args, processing_class=tokenizer(), model=actor, ref_model=fixed.causal(3), reward_model=fixed.scalar(4),
        value_model=critic, train_dataset=Dataset.from_dict({"input_ids": [p.tolist() for p in fixed.prompts()]}),
    )  # fmt: skip
    metrics: dict[str, float] = {}
    trainer.log = metrics.update
    norms: list[list[float]] = []
    backward = trainer.accelerator.backward

    def norm(model: torch.nn.Module) -> float:
        return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    def measured(total: torch.Tensor) -> None:
        backward(total)
        norms.append([norm(actor), norm(critic)])

    trainer.accelerator.backward = measured
    trainer.train()
    tensors = {f"actor.{k}": v.contiguous() for k, v in actor.state_dict().items()}
    tensors |= {f"critic.{k}": v.contiguous() for k, v in critic.state_dict().items()}
    named = {k: v for k, v in metrics.items() if "/" in k}
    return captured | {"metrics": named, "grad_norms": norms}, tensors


if __name__ == "__main__":
    main()
