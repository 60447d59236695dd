"""TRL's PPOTrainer as a contestant: it trains on requests from standard input, and blocks in between.

Runs in the peer's own environment (requirements.txt), never in oppo's::

    .venv-peer/bin/python benchmarks/peer/trl_ppo.py WORKLOAD_DIR --rollout-batch R --minibatches M --threads T

service.py documents its input and output. A step's seconds are wall-clock seconds of rollout, scores and epochs. TRL is
unchanged; its settings are explained where they are chosen, and in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
import trl
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a checkout: nothing is installed in the peer's environment
from benchmarks.peer.service import InputEnded, Prompt, Service, Spec, batches, read_prompts, read_spec

STEPS_WITHOUT_END = 10**9
"""TRL requires a number of steps, which the ruler decides while it runs."""


class Batches:
    """The workload's prompts in the file's order, left-padded as by TRL's own collator."""

    def __init__(self, prompts: Sequence[Prompt], size: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self._batches = batches(prompts, size)
        self._collate = transformers.DataCollatorWithPadding(tokenizer)
        self.last: list[Prompt] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for taken in self._batches:
            self.last = taken
            yield self._collate([{"input_ids": list(prompt.tokens)} for prompt in taken])


class Trained:
    """The lengths of trained responses, recorded where TRL cuts them after their first EOS."""

    def __init__(self) -> None:
        self._cut = ppo_trainer.truncate_response
        self._parts: list[Tensor] = []
        ppo_trainer.truncate_response = self._record

    def _record(self, stop: int, pad: int, responses: Tensor) -> Tensor:
        kept: Tensor = self._cut(stop, pad, responses)
        self._parts.append(kept)
        return kept

    def take(self, pad: int) -> list[int]:
        """Return the length of each response since the last call: the tokens before the first padding are trained."""
        lengths = [int(n) for kept in self._parts for n in ((kept == pad).cumsum(1) == 0).sum(1)]
        self._parts.clear()
        return lengths


class Paced(TrainerCallback):
    """Lets the training loop make the requested steps."""

    def __init__(self, service: Service, taken: Batches, trained: Trained, pad: int) -> None:
        self._service = service
        self._taken = taken
        self._trained = trained
        self._pad = pad

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Wait for the first request."""
        self._service.wait()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Record the step; answer and wait after the last one of a request."""
        seconds = self._service.lap()
        self._service.done(seconds, self._trained.take(self._pad), self._taken.last)


class TokenIds(nn.Module):
    """A backbone whose last hidden state is its input, at almost no cost."""

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        """Return ``input_ids`` [B, T] as hidden states [B, T, 1]."""
        return SimpleNamespace(hidden_states=(input_ids.unsqueeze(-1),))


class Rule(nn.Module):
    """A reward function behind TRL's interface for rewards: a backbone, and a score of each position.

    The score of a response is that of its last token: 1 for EOS, else 0. It costs one comparison of the padded batch,
    the least that the interface allows.
    """

    base_model_prefix = "backbone"

    def __init__(self, eos: int) -> None:
        super().__init__()
        self.backbone = TokenIds()
        self._eos = eos

    def score(self, hidden: Tensor) -> Tensor:
        """Return float32 [B, T, 1] for token ids [B, T, 1]."""
        return (hidden == self._eos).float()


def settings(spec: Spec, rollout_batch: int, minibatches: int, output: str) -> PPOConfig:
    """Return TRL's settings for this workload, without anything but rollout, scores and update."""
    if minibatches % spec.minibatches or spec.batch % minibatches:
        raise ValueError(
            f"--minibatches {minibatches} must be a multiple of the {spec.minibatches} optimizer steps an epoch "
            f"and divide the batch of {spec.batch}"
        )
    return PPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=spec.batch // minibatches,
        gradient_accumulation_steps=minibatches,
        num_mini_batches=spec.minibatches,
        num_ppo_epochs=spec.epochs,
        total_episodes=spec.batch * STEPS_WITHOUT_END,
        local_rollout_forward_batch_size=rollout_batch,
        response_length=spec.max_new_tokens,
        stop_token_id=spec.eos,
        temperature=spec.temperature,
        learning_rate=spec.learning_rate,
        kl_coef=spec.kl,
        gamma=spec.gamma,
        lam=spec.lam,
        seed=spec.seed,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def optimizers(
    args: PPOConfig, spec: Spec, actor: PreTrainedModel, critic: nn.Module, service: Service
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return TRL's default optimizer, counted, with a learning rate for each model and no decay."""
    chosen, options = Trainer.get_optimizer_cls_and_kwargs(args, actor)
    optimizer = chosen(
        [{"params": actor.parameters()}, {"params": critic.parameters(), "lr": spec.critic_learning_rate}], **options
    )
    optimizer.register_step_post_hook(lambda *_: service.updated())
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def build(directory: Path, spec: Spec, args: PPOConfig, service: Service) -> PPOTrainer:
    """Return a trainer over the workload's checkpoints and prompts."""
    tokenizer = AutoTokenizer.from_pretrained(directory / "actor", padding_side="left", local_files_only=True)
    tokenizer.pad_token_id, tokenizer.eos_token_id = spec.pad, spec.eos

    def load(kind: type[AutoModelForCausalLM | AutoModelForSequenceClassification], name: str) -> PreTrainedModel:
        model: PreTrainedModel = kind.from_pretrained(directory / name, dtype=torch.float32, local_files_only=True)
        return model

    actor, reference = load(AutoModelForCausalLM, "actor"), load(AutoModelForCausalLM, "actor")
    critic = load(AutoModelForSequenceClassification, "critic")
    reward = Rule(spec.eos) if spec.reward == "rule" else load(AutoModelForSequenceClassification, "reward")
    actor.generation_config.pad_token_id = spec.pad

    prompts = read_prompts(directory)
    taken = Batches(prompts, spec.batch, tokenizer)
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=actor,
        ref_model=reference,
        reward_model=reward,
        value_model=critic,
        train_dataset=[{"input_ids": list(prompt.tokens)} for prompt in prompts],
        optimizers=optimizers(args, spec, actor, critic, service),
        callbacks=[Paced(service, taken, Trained(), spec.pad)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.dataloader = taken  # TRL's own would shuffle
    # TRL sets this to the micro-batches of a whole epoch and would then step once an epoch, whatever num_mini_batches.
    trainer.accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps // spec.minibatches
    return trainer


def main() -> None:
    """Load, answer that it is ready, then serve requests until the input ends."""
    parser = argparse.ArgumentParser(description="TRL's PPOTrainer as a contestant of the ladder")
    parser.add_argument("workload", type=Path, help="directory with actor/ reward/ critic/ prompts.jsonl spec.json")
    parser.add_argument("--rollout-batch", type=int, required=True, help="rows that generate and are scored at a time")
    parser.add_argument("--minibatches", type=int, required=True, help="forward and backward passes an epoch")
    parser.add_argument("--threads", type=int, required=True, help="intra-op threads")
    given = parser.parse_args()

    # From here on standard output goes to standard error; the answers have a file of their own.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers, tempfile.TemporaryDirectory() as output:
        os.dup2(2, 1)
        torch.set_num_threads(given.threads)
        spec = read_spec(given.workload)
        transformers.set_seed(spec.seed)
        service = Service(spec, sys.stdin, answers)
        trainer = build(given.workload, spec, settings(spec, given.rollout_batch, given.minibatches, output), service)
        # TRL collects garbage twice a step, and would scan all loaded objects each time.
        gc.freeze()
        versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
        service.ready(
            {
                "versions": versions | {"python": platform.python_version()},
                "threads": torch.get_num_threads(),
                "rollout_batch": given.rollout_batch,
                "minibatches": given.minibatches,
            }
        )
        try:
            trainer.train()
        except InputEnded:
            return


if __name__ == "__main__":
    main()
