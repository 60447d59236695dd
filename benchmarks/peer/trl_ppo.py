"""TRL's PPOTrainer as a contestant: it trains on requests from standard input, and blocks in between.

Runs in the peer's own environment (requirements-trl.txt), never in oppo's::

    .venv-trl/bin/python benchmarks/peer/trl_ppo.py WORKLOAD_DIR --rollout-batch R --minibatches M --threads T

service.py documents its input and output. A step's seconds are wall-clock seconds of rollout, scores and epochs. TRL is
unchanged; its settings are explained where they are chosen, and in benchmarks/README.md.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a checkout: nothing is installed in the peer's environment
from benchmarks.peer.program import STEPS_WITHOUT_END, load, main, optimizers, tokenizer_of
from benchmarks.peer.service import Prompt, Service, Spec, batches, read_prompts


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


def build(given: Namespace, spec: Spec, output: str, service: Service) -> PPOTrainer:
    directory, args = given.workload, settings(spec, given.rollout_batch, given.minibatches, output)
    tokenizer = tokenizer_of(directory, spec)
    actor, reference = (load(AutoModelForCausalLM, directory / "actor", given, spec) for _ in range(2))
    critic = load(AutoModelForSequenceClassification, directory / "critic", given, spec)
    reward: nn.Module = Rule(spec.eos)
    if spec.reward == "model":
        reward = load(AutoModelForSequenceClassification, directory / "reward", given, spec)
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
        optimizers=optimizers(args, service, actor, critic, spec.critic_learning_rate),
        callbacks=[Paced(service, taken, Trained(), spec.pad)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.dataloader = taken  # TRL's own would shuffle
    # TRL sets this to the micro-batches of a whole epoch and would then step once an epoch, whatever num_mini_batches.
    trainer.accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps // spec.minibatches
    return trainer


if __name__ == "__main__":
    main("TRL's PPOTrainer as a contestant of the ladder", build, {})
