"""What the programs of TRL's trainers share: arguments, models, optimizer, and the answers to the ladder.

Like them it runs in the peer's own environment, never in oppo's. service.py documents input and output.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import transformers
import trl
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from benchmarks.peer.service import InputEnded, Service, Spec, read_spec

STEPS_WITHOUT_END = 10**9  # TRL requires a number of steps, which the ladder decides while it runs


class Trains(Protocol):
    """A trainer that asks the service for its next step, until :class:`InputEnded`."""

    def train(self) -> object:
        """Train."""


# From the arguments, the workload, a folder for output and the service to a trainer
Build = Callable[[Namespace, Spec, str, Service], Trains]


def main(about: str, build: Build, options: Mapping[str, Sequence[str]]) -> None:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("workload", type=Path, help="directory with actor/ reward/ prompts.jsonl spec.json")
    parser.add_argument("--rollout-batch", type=int, required=True, help="rows that generate and are scored at a time")
    parser.add_argument("--minibatches", type=int, required=True, help="forward and backward passes an epoch")
    parser.add_argument("--threads", type=int, required=True, help="intra-op threads")
    parser.add_argument("--device", default="cpu", help="of the models")
    parser.add_argument("--keep", type=Path, help="folder of the weights after each step, by steps made")
    for name, values in options.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    given = parser.parse_args()

    # From here on standard output goes to standard error; the answers have a file of their own.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers, tempfile.TemporaryDirectory() as output:
        os.dup2(2, 1)
        torch.set_num_threads(given.threads)
        spec = read_spec(given.workload)
        transformers.set_seed(spec.seed)
        service = Service(spec, sys.stdin, answers)
        trainer = build(given, spec, output, service)
        # TRL's PPO collects garbage twice a step, and would scan all loaded objects each time.
        gc.freeze()
        versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
        cell = {name: value for name, value in vars(given).items() if name not in {"workload", "keep"}}
        service.ready(
            {
                **cell,
                "versions": versions | {"python": platform.python_version()},
                "threads": torch.get_num_threads(),
            }
        )
        try:
            trainer.train()
        except InputEnded:
            return


def tokenizer_of(directory: Path, spec: Spec) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory / "actor", padding_side="left", local_files_only=True
    )
    tokenizer.pad_token_id, tokenizer.eos_token_id = spec.pad, spec.eos
    return tokenizer


def load(
    kind: type[AutoModelForCausalLM | AutoModelForSequenceClassification], directory: Path, given: Namespace, spec: Spec
) -> PreTrainedModel:
    """Return a model of the workload; one of which there is a configuration only has random weights."""
    model: PreTrainedModel
    chosen = {"dtype": getattr(torch, spec.dtype), "attn_implementation": getattr(given, "attention", "sdpa")}
    if (directory / "model.safetensors").exists():
        model = kind.from_pretrained(directory, local_files_only=True, **chosen)
        return model
    with torch.device(given.device):
        model = kind.from_config(AutoConfig.from_pretrained(directory), **chosen)  # type: ignore[no-untyped-call]
    model.train(mode=False)
    return model


def optimizers(
    args: TrainingArguments, service: Service, actor: PreTrainedModel, critic: nn.Module | None, critic_rate: float
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return TRL's default optimizer, counted, with a constant learning rate for each model and no decay."""
    chosen, options = Trainer.get_optimizer_cls_and_kwargs(args, actor)
    groups: list[dict[str, object]] = [{"params": actor.parameters()}]
    groups += [] if critic is None else [{"params": critic.parameters(), "lr": critic_rate}]
    optimizer = chosen(groups, **options)
    optimizer.register_step_post_hook(lambda *_: service.updated())
    return optimizer, LambdaLR(optimizer, lambda _: 1.0)
