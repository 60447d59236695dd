"""TRL's PPOTrainer as a contestant: it trains when a line asks it to, and blocks on standard input in between.

Runs in the peer's own environment (requirements.txt), never in oppo's::

    .venv-peer/bin/python benchmarks/peer/trl_ppo.py WORKLOAD_DIR --rollout-batch R --minibatches M --threads T

What it reads and writes is told in service.py. A step's seconds are wall-clock seconds over the whole of it: rollout,
scores, epochs. Nothing of TRL is changed; what is chosen for it is said where it is chosen, and in
benchmarks/README.md.
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
from benchmarks.peer.service import InputEnded, Service
from benchmarks.peer.workload import Prompt, Spec, batches, read_prompts, read_spec

STEPS_WITHOUT_END = 10**9
"""TRL wants to know how long it trains; the ruler decides that while it runs."""


class Batches:
    """The workload's prompts in the file's order, left-padded as TRL's own collator does it."""

    def __init__(self, prompts: Sequence[Prompt], size: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self._batches = batches(prompts, size)
        self._collate = transformers.DataCollatorWithPadding(tokenizer)
        self.last: list[Prompt] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for taken in self._batches:
            self.last = taken
            yield self._collate([{"input_ids": list(prompt.tokens)} for prompt in taken])


class Trained:
    """The responses a step trains on, noted where TRL cuts them after their first EOS."""

    def __init__(self) -> None:
        self._cut = ppo_trainer.truncate_response
        self._parts: list[Tensor] = []
        ppo_trainer.truncate_response = self._note

    def _note(self, stop: int, pad: int, responses: Tensor) -> Tensor:
        kept: Tensor = self._cut(stop, pad, responses)
        self._parts.append(kept)
        return kept

    def take(self, pad: int) -> list[int]:
        """Return the length of each response since the last call: what is before the first padding is trained."""
        lengths = [int(n) for kept in self._parts for n in ((kept == pad).cumsum(1) == 0).sum(1)]
        self._parts.clear()
        return lengths


class Paced(TrainerCallback):
    """Lets the training loop go on for as many steps as the service is asked for."""

    def __init__(self, service: Service, taken: Batches, trained: Trained, pad: int) -> None:
        self._service = service
        self._taken = taken
        self._trained = trained
        self._pad = pad

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Wait for the first request."""
        self._service.wait()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Note the step; answer and wait when it is the last one asked for."""
        seconds = self._service.lap()
        self._service.done(seconds, self._trained.take(self._pad), self._taken.last)


class TokenIds(nn.Module):
    """A backbone whose last hidden state is the input itself: as good as free."""

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        """Return ``input_ids`` [B, T] as hidden states [B, T, 1]."""
        return SimpleNamespace(hidden_states=(input_ids.unsqueeze(-1),))


class Rule(nn.Module):
    """A reward function in the shape in which TRL takes a reward: a backbone, and a score of each position.

    The score of a response is the one at its last token: 1 if that is EOS, else 0. It costs one comparison of the
    padded batch, the least that TRL's interface lets a rule cost.
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
    """Return TRL's settings for this workload, with everything off that is neither rollout, scores nor update."""
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
    """Return the optimizer that TRL would choose, with a learning rate for each model and no decay; it is counted."""
    chosen, options = Trainer.get_optimizer_cls_and_kwargs(args, actor)
    optimizer = chosen(
        [{"params": actor.parameters()}, {"params": critic.parameters(), "lr": spec.critic_learning_rate}], **options
    )
    optimizer.register_step_post_hook(lambda *_: service.updated())
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def build(directory: Path, spec: Spec, args: PPOConfig, service: Service) -> PPOTrainer:
    """Return a trainer over the workload's checkpoints, about to take the file's first prompts."""
    # What says local_files_only is never looked for anywhere else.
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
    """Load, say that it is ready, then do as asked until the input ends."""
    parser = argparse.ArgumentParser(description="TRL's PPOTrainer as a contestant of the ladder")
    parser.add_argument("workload", type=Path, help="directory with actor/ reward/ critic/ prompts.jsonl spec.json")
    parser.add_argument("--rollout-batch", type=int, required=True, help="rows that generate and are scored at a time")
    parser.add_argument("--minibatches", type=int, required=True, help="forward and backward passes an epoch")
    parser.add_argument("--threads", type=int, required=True, help="intra-op threads")
    given = parser.parse_args()

    # From here on whatever prints to standard output prints to standard error; the answers have a file of their own.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers, tempfile.TemporaryDirectory() as output:
        os.dup2(2, 1)
        torch.set_num_threads(given.threads)
        spec = read_spec(given.workload)
        transformers.set_seed(spec.seed)
        service = Service(spec, sys.stdin, answers)
        trainer = build(given.workload, spec, settings(spec, given.rollout_batch, given.minibatches, output), service)
        # TRL collects garbage twice a step, and would look through everything that was loaded each time.
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
