"""Writes ``groups.json``: what TRL makes of fixed responses that are compared with one another.

Made with TRL 1.16.0, torch 2.13.0 (CPU), transformers 5.23.0, accelerate 1.15.0, datasets 5.2.0 and numpy 2.4.6, in an
environment of their own; neither TRL nor datasets is a dependency of this package, its tests included. To make them
again::

    pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 trl==1.16.0 structlog
    python -m tests.golden.make_groups

Two prompts have four responses each, of lengths of their own. What is whose:

- ``grpo``: the loss of a real ``GRPOTrainer`` for each ``loss_type`` that an algorithm here has, with the ratio of
  tokens and with that of sequences, without and with a KL; ``_compute_loss`` is called, and only the log-probs that it
  asks a model for are fixed ones.
- ``rloo``: the loss of a real ``RLOOTrainer`` likewise.
- ``advantages``, ``dpo``: the arithmetic lies inside of methods that generate too; those source lines are cut out of
  the installed file between two markers and executed on fixed inputs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", ACCELERATE_USE_CPU="true")

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer
from trl.trainer.utils import nanstd

from tests.golden import fixed
from tests.golden.recording import listed, source, tokenizer

HERE = Path(__file__).parent
SAMPLES, WIDTH, CAP = 4, 9, 12
LENGTHS = torch.tensor([9, 4, 7, 1, 9, 6, 2, 8])
ROWS = len(LENGTHS)
MASK = torch.arange(WIDTH) < LENGTHS.unsqueeze(1)
BETA = 0.04
CLIP = {"token": (0.2, 0.28), "sequence": (0.03, 0.05)}  # how far a ratio may fall and rise, by its level

NEW = -2 + 0.5 * torch.from_numpy(fixed.numbers(70, ROWS, WIDTH))
OLD = NEW + 0.3 * torch.from_numpy(fixed.numbers(71, ROWS, WIDTH))
REFERENCE = NEW + 0.5 * torch.from_numpy(fixed.numbers(72, ROWS, WIDTH))
SCORES = torch.from_numpy(fixed.numbers(73, ROWS))


def main() -> None:
    torch.set_num_threads(1)
    golden = {
        "samples": SAMPLES, "cap": CAP, "beta": BETA, "clip": CLIP, "lengths": listed(LENGTHS),
        "logprobs": listed(NEW), "old_logprobs": listed(OLD), "reference": listed(REFERENCE), "scores": listed(SCORES),
        "advantages": advantages(), "grpo": grpo(), "rloo": rloo(), "dpo": dpo(),
    }  # fmt: skip
    (HERE / "groups.json").write_text(json.dumps(golden, indent=1) + "\n")


def advantages() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for scale in ("group", "none"):
        frame: dict[str, Any] = {
            "torch": torch, "nanstd": nanstd, "rewards": SCORES, "num_generations": SAMPLES,
            "self": SimpleNamespace(scale_rewards=scale),
        }  # fmt: skip
        lines = source(GRPOTrainer._generate_and_score_completions, "mean_grouped_rewards =", "advantages = advantages")
        exec(lines, frame)  # the peer's own lines
        made[scale] = listed(frame["advantages"])
    for beta in (0.0, BETA):
        frame = {
            "torch": torch, "rewards": SCORES, "num_generations": SAMPLES, "nanstd": nanstd, "gather": lambda x: x,
            "old_per_token_logps": OLD, "ref_per_token_logps": REFERENCE, "completion_mask": MASK,
            "self": SimpleNamespace(beta=beta),
        }  # fmt: skip
        method = RLOOTrainer._generate_and_score_completions
        exec(source(method, "per_token_kl =", "rewards = rewards - self.beta"), frame)  # the peer's own lines
        exec(source(method, "grouped_rewards =", "advantages = rewards - baselines"), frame)  # the peer's own lines
        made["leave_one_out" if not beta else "leave_one_out_kl"] = listed(frame["advantages"])
    return made


def inputs() -> dict[str, Tensor]:
    ids = torch.ones(ROWS, WIDTH, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": MASK.long(),
        "num_items_in_batch": MASK.sum(), "ref_per_token_logps": REFERENCE,
    }  # fmt: skip


def trained(kind: Any, config: Any, given: dict[str, Tensor]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:  # where the trainer loads its reference model from, if it wants one
        fixed.causal(1).save_pretrained(folder)
        trainer = kind(
            model=folder, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            train_dataset=Dataset.from_dict({"prompt": ["w1 w2"] * ROWS}), processing_class=tokenizer(),
        )  # fmt: skip
    logprobs = NEW.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros(ROWS, WIDTH), None)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, {**inputs(), **given})
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    clipped = metrics["clip_ratio/region_mean"]
    return {"loss": loss.item(), "clipped": clipped, "kl": metrics.get("kl"), "gradient": listed(logprobs.grad)}


COMMON: dict[str, Any] = {
    "output_dir": "/tmp/golden_output", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    "report_to": "none", "disable_tqdm": True, "num_generations": SAMPLES, "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_completion_length": CAP,
}  # fmt: skip


def grpo() -> list[dict[str, Any]]:
    """Return the losses of GRPO and its kin, whose advantages are GRPO's."""
    made = []
    centred = torch.tensor(advantages()["group"])
    for kind in ("grpo", "dr_grpo", "dapo", "luspo"):
        for level in ("token", "sequence") if kind != "luspo" else ("sequence",):
            for beta in (0.0, BETA):
                low, high = CLIP[level]
                config = GRPOConfig(
                    **COMMON, loss_type=kind, importance_sampling_level=level, beta=beta, epsilon=low,
                    epsilon_high=high, use_bias_correction_kl=False,
                )  # fmt: skip
                case = trained(GRPOTrainer, config, {"advantages": centred, "old_per_token_logps": OLD})
                made.append({"loss_type": kind, "level": level, "beta": beta, **case})
    return made


def rloo() -> list[dict[str, Any]]:
    """Return the losses of RLOO: of responses that the current weights wrote, and of others."""
    left_out = torch.tensor(advantages()["leave_one_out"])
    low, high = CLIP["token"]
    config = RLOOConfig(**COMMON, beta=0.0, epsilon=low, epsilon_high=high)
    made = []
    for name, old in (("current", NEW), ("old", OLD)):
        given = {"advantages": left_out, "old_logps": (old * MASK).sum(1)}
        made.append({"written_by": name, **trained(RLOOTrainer, config, given)})
    return made


def dpo() -> dict[str, Any]:
    """Return the loss of online DPO on four pairs: a response to each prompt, then another to each."""
    pairs = ROWS // 2
    logprobs = NEW.clone().requires_grad_()
    frame: dict[str, Any] = {
        "torch": torch, "F": torch.nn.functional, "rewards": SCORES, "batch_size": pairs, "device": "cpu",
        "logprobs": logprobs, "ref_logprobs": REFERENCE, "completion_mask": MASK,
        "self": SimpleNamespace(beta=BETA, args=SimpleNamespace(loss_type="sigmoid")),
    }  # fmt: skip
    exec(source(OnlineDPOTrainer.training_step, "first_half, second_half", "loss = losses.mean()"), frame)  # the peer's
    frame["loss"].backward()
    margins = BETA * frame["logits"]
    return {"loss": frame["loss"].item(), "margins": listed(margins), "gradient": listed(logprobs.grad)}


if __name__ == "__main__":
    main()
