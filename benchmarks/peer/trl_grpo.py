"""TRL's GRPOTrainer as a contestant: it trains on requests from standard input, and blocks in between.

Runs in the peer's own environment (requirements-trl-grpo.txt), never in oppo's::

    .venv-trl-grpo/bin/python benchmarks/peer/trl_grpo.py WORKLOAD_DIR --rollout-batch R --minibatches M --threads T

service.py documents its input and output. A step's seconds are wall-clock seconds of rollout, scores and update. TRL is
unchanged; its settings are explained where they are chosen, and in benchmarks/README.md.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerState,
)
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a checkout: nothing is installed in the peer's environment
from benchmarks.peer.program import STEPS_WITHOUT_END, load, main, optimizers, tokenizer_of
from benchmarks.peer.reviews import judged
from benchmarks.peer.service import Prompt, Service, Spec, batches, read_prompts

OPTIONS = {
    "attention": ("sdpa", "eager"),
    "cache": ("dynamic", "static"),
    "generation": ("generate", "continuous"),
}


class Watched(GRPOTrainer):
    """TRL's trainer; it counts the tokens that reach the loss, and times rollouts and scores."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.spent: dict[str, float] = defaultdict(float)
        self._trained: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def _generate(self, prompts: list[str]) -> Any:
        begin = time.monotonic()
        generated = super()._generate(prompts)
        self.spent["decode"] += time.monotonic() - begin
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        begin, before = time.monotonic(), self.spent["decode"]
        scored = super()._generate_and_score_completions(inputs)
        self.spent["score"] += time.monotonic() - begin - (self.spent["decode"] - before)
        return scored

    def compute_loss(self, model: nn.Module, inputs: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        for ids, given, made in zip(
            inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_mask"], strict=True
        ):
            self._trained[tuple(ids[given.bool()].tolist())].append(int(made.sum()))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def lengths(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the tokens that the step has trained of each response to ``prompts``, and forget the step."""
        trained, self._trained = self._trained, defaultdict(list)
        wanted = Counter(prompt.tokens for prompt in prompts)
        if wanted != Counter({tokens: len(made) for tokens, made in trained.items()}):
            raise RuntimeError(f"trained {sum(map(len, trained.values()))} rows, other ones than the step's {wanted}")
        return [trained[prompt.tokens].pop() for prompt in prompts]


class Paced(TrainerCallback):
    """Lets the training loop make the requested steps."""

    def __init__(self, service: Service, prompts: Sequence[Prompt], spec: Spec, keep: Path | None) -> None:
        self._service, self._keep = service, keep
        self._batches = batches(prompts, spec.batch // spec.samples)
        self._samples = spec.samples
        self.trainer: Watched | None = None

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._service.wait()

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Record the step; answer and wait after the last one of a request."""
        del args, control
        seconds = self._service.lap()
        assert self.trainer is not None
        spent, self.trainer.spent = self.trainer.spent, defaultdict(float)
        phases = {**spent, "update": seconds - spent["decode"] - spent["score"]}
        if self._keep is not None:
            kept: Any = self.trainer.model
            kept.save_pretrained(self._keep / f"{state.global_step}")
        taken = [prompt for prompt in next(self._batches) for _ in range(self._samples)]
        self._service.done(seconds, self.trainer.lengths(taken), taken, phases)


def settings(spec: Spec, given: Namespace, output: str) -> GRPOConfig:
    """Return TRL's settings for this workload, without anything but rollout, scores and update."""
    rows = spec.batch // given.minibatches
    if spec.batch % given.minibatches or spec.batch % given.rollout_batch or given.rollout_batch % rows:
        raise ValueError(
            f"--rollout-batch {given.rollout_batch} must divide the batch of {spec.batch}, and be a multiple of the "
            f"{rows} rows of a pass, which --minibatches {given.minibatches} cuts it into"
        )
    if spec.samples < 2 or (spec.epochs, spec.minibatches) != (1, 1):
        raise ValueError(
            "a workload of this program has two samples or more and one optimizer step for each batch, "
            f"not {spec.samples} and {spec.epochs} x {spec.minibatches}"
        )
    return GRPOConfig(
        output_dir=output,
        use_cpu=given.device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        max_steps=STEPS_WITHOUT_END,
        num_generations=spec.samples,
        generation_batch_size=given.rollout_batch,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=given.minibatches,
        max_completion_length=spec.max_new_tokens,
        temperature=spec.temperature,
        cache_implementation=None if given.cache == "dynamic" else given.cache,
        use_transformers_continuous_batching=given.generation == "continuous",
        loss_type="grpo",  # a mean over responses, as of oppo.algorithms.group.GRPO
        beta=spec.kl,
        learning_rate=spec.learning_rate,
        adam_epsilon=1e-5,  # as in oppo.TrainerSettings; betas, decay and the bound on gradients are the same
        shuffle_dataset=False,
        seed=spec.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def texts(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, end: str) -> list[str]:
    """Return prompts as text, which TRL tokenizes, alone and with a completion right behind it."""
    written = [f"{tokenizer.decode(list(prompt.tokens))}{end}" for prompt in prompts]
    if tokenizer(written)["input_ids"] != [list(prompt.tokens) for prompt in prompts]:
        raise ValueError("the text of a prompt has other tokens than the prompt")
    return written


def rewarded(completions: Sequence[str], length: Sequence[int], **_: object) -> list[float]:
    """Return 1 for each completion of the announced length, else 0; its end is no word."""
    return [float(len(text.split()) in {wanted - 1, wanted}) for text, wanted in zip(completions, length, strict=True)]


def build(given: Namespace, spec: Spec, output: str, service: Service) -> Watched:
    directory, args = given.workload, settings(spec, given, output)
    tokenizer = tokenizer_of(directory, spec)
    actor = load(AutoModelForCausalLM, directory / "actor", given, spec)
    prompts = read_prompts(directory)
    prompts = prompts[: len(prompts) // (spec.batch // spec.samples) * (spec.batch // spec.samples)]  # whole steps
    pace = Paced(service, prompts, spec, given.keep)

    def reviewed(completion_ids: Sequence[list[int]], topic: Sequence[str], **_: object) -> list[float]:
        return judged((), [str(tokenizer.decode(ids)) for ids in completion_ids], topic)

    reward: Any = {"rule": rewarded, "reviews": reviewed}.get(spec.reward)
    trainer = Watched(
        args=args,
        model=actor,
        reward_funcs=reward or load(AutoModelForSequenceClassification, directory / "reward", given, spec),
        processing_class=tokenizer,
        reward_processing_classes=None if reward else tokenizer,
        train_dataset=Dataset.from_dict(
            {
                "prompt": texts(prompts, tokenizer, "" if spec.reward == "reviews" else " "),
                "length": [prompt.length for prompt in prompts],
                "topic": [prompt.topic for prompt in prompts],
            }
        ),
        optimizers=optimizers(args, service, actor, None, 0.0),
        callbacks=[pace],
    )
    trainer.remove_callback(PrinterCallback)
    pace.trainer = trainer
    return trainer


if __name__ == "__main__":
    main("TRL's GRPOTrainer as a contestant of the ladder", build, OPTIONS)
