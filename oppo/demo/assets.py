"""The models and prompts of a demo run, made once for each recipe and kept in a cache.

::

    <directory>/<digest>/
        actor/  reward/  critic/      models and tokenizer, as save_pretrained writes them
        prompts.jsonl  held_out.jsonl {"prompt": ..., "topic": ..., "adjective": ..., "noun": ..., "place": ...}
        facts.json                    measurements of models and texts
        COMPLETE                      written last: without it the directory is not used

The digest covers the recipe, the sources of the modules that carry it out, and the versions of their libraries.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import tokenizers
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from oppo.demo import language
from oppo.demo.models import (
    Progress,
    Shape,
    TrainingBudget,
    normalise,
    pair_accuracy,
    scalar_model,
    train_policy,
    train_reward,
    train_tokenizer,
    write,
)
from oppo.durable import temporary
from oppo.hf.devices import use_cores
from oppo.hf.model_files import quiet

COMPLETE: Final = "COMPLETE"  # the file that is written last; a directory without it is not used


def made_once(target: Path, build: Callable[[Path], None]) -> Path:
    # Of two processes that build it at once, both return a complete directory.
    if (target / COMPLETE).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary("building", target.parent) as aside:
        built = aside / target.name
        built.mkdir()
        build(built)
        (built / COMPLETE).write_text(target.name + "\n", encoding="utf-8")
        _install(built, target)
    return target


def _install(built: Path, target: Path) -> None:
    # A complete ``target`` stays; an incomplete one is deleted.
    if target.exists() and not (target / COMPLETE).exists():
        shutil.rmtree(target)
    try:
        built.rename(target)
    except OSError:
        if not (target / COMPLETE).exists():
            raise


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """Seed torch, give it one thread and hide transformers' progress bars while the context is open."""
    before, bars = torch.get_num_threads(), transformers_logging.is_progress_bar_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        use_cores(1)
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            use_cores(before)
            if bars:
                transformers_logging.enable_progress_bar()


SOURCES: Final = ("language.toml", "language.py", "models.py", "assets.py")


@dataclass(frozen=True, slots=True)
class AssetRecipe:
    seed: int = 0
    shape: Shape = field(default_factory=Shape)
    policy: TrainingBudget = field(default_factory=lambda: TrainingBudget(steps=240, rows=2, learning_rate=2.5e-3))
    reward: TrainingBudget = field(default_factory=lambda: TrainingBudget(steps=50, rows=8, learning_rate=8e-4))
    limit: int = 256  # most tokens of a sampled response
    corpus: int = 3000  # texts that the tokenizer is trained on
    samples: int = 128  # responses of the base policy that the reward model is normalised on
    pairs: int = 512  # held-out preference pairs that the reward model is evaluated on
    # prompts, held_out: prompts for PPO and for its evaluation
    prompts: int = 2000
    held_out: int = 256

    @classmethod
    def small(cls, seed: int) -> AssetRecipe:
        return cls(
            seed=seed,
            shape=Shape(vocabulary=512, hidden=64, intermediate=128, heads=2),
            policy=TrainingBudget(steps=150, rows=2, learning_rate=1e-2),
            reward=TrainingBudget(steps=40, rows=4, learning_rate=4e-3),
            limit=64,
            corpus=500,
            samples=64,
            pairs=128,
            prompts=64,
            held_out=64,
        )

    def digest(self) -> str:
        versions = [library.__version__ for library in (torch, transformers, tokenizers)]
        digest = hashlib.sha256(json.dumps([asdict(self), versions], sort_keys=True).encode())
        for name in SOURCES:
            digest.update(Path(__file__).with_name(name).read_bytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Facts:
    parameters: Mapping[str, int]  # by model
    vocabulary: int
    pair_accuracy: float  # fraction of held-out pairs, labelled with noise, that the reward model orders as labelled
    language_tokens: Mapping[str, float]  # `p50` and `p99` of the lengths of the language's reviews
    capped: float  # fraction of the base policy's responses that the limit cut off


@dataclass(frozen=True, slots=True)
class Assets:
    directory: Path
    facts: Facts

    @property
    def actor(self) -> Path:
        return self.directory / "actor"

    @property
    def reward(self) -> Path:
        return self.directory / "reward"

    @property
    def critic(self) -> Path:
        return self.directory / "critic"

    @property
    def prompts(self) -> Path:
        return self.directory / "prompts.jsonl"

    @property
    def held_out(self) -> Path:
        return self.directory / "held_out.jsonl"


def cache_directory() -> Path:
    if own := os.environ.get("OPPO_CACHE"):
        return Path(own) / "demo"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oppo" / "demo"


def make_assets(directory: Path, *, seed: int = 0, small: bool = False, progress: Progress = lambda *_: None) -> Assets:
    recipe = AssetRecipe.small(seed) if small else AssetRecipe(seed=seed)
    target = directory / recipe.digest()

    def build(built: Path) -> None:
        with alone(seed):
            _build(built, recipe, progress)

    made_once(target, build)
    progress("the models are ready", 1.0)
    return Assets(target, Facts(**json.loads((target / "facts.json").read_text(encoding="utf-8"))))


def _part(progress: Progress, start: float, end: float) -> Progress:
    return lambda words, done: progress(words, start + done * (end - start))


def _build(directory: Path, recipe: AssetRecipe, progress: Progress) -> None:
    progress("learning a vocabulary", 0.0)
    rng = Random(f"corpus {recipe.seed}")  # noqa: S311 - a corpus, not a secret
    read = language.training_prompts(recipe.corpus, recipe.seed)
    reviews = [language.review(ask.topic, rng) for ask in read]
    corpus = [ask.text + review for ask, review in zip(read, reviews, strict=True)]
    tokenizer = train_tokenizer(corpus, vocabulary=recipe.shape.vocabulary, longest=recipe.shape.positions)
    actor = LlamaForCausalLM(recipe.shape.config(tokenizer))
    train_policy(tokenizer, actor, recipe.policy, seed=recipe.seed, progress=_part(progress, 0.02, 0.65))
    reward = train_reward(actor, tokenizer, recipe.reward, seed=recipe.seed, progress=_part(progress, 0.65, 0.92))
    prompts = [ask.text for ask in language.training_prompts(recipe.samples, recipe.seed + 1)]
    progress("reading what the untrained policy writes", 0.92)
    written = write(actor, tokenizer, prompts, limit=recipe.limit, seed=recipe.seed)
    normalise(reward, tokenizer, prompts, written)
    critic = scalar_model(reward)
    models: dict[str, PreTrainedModel] = {"actor": actor, "reward": reward, "critic": critic}
    lengths = [len(tokenizer.encode(text)) + 1 for text in reviews]
    facts = Facts(
        parameters={name: model.num_parameters() for name, model in models.items()},
        vocabulary=len(tokenizer),
        pair_accuracy=pair_accuracy(reward, tokenizer, count=recipe.pairs, seed=recipe.seed),
        language_tokens={f"p{part}": float(np.percentile(lengths, part)) for part in (50, 99)},
        capped=sum(not text.ended for text in written) / len(written),
    )
    for name, model in models.items():
        with quiet():
            model.save_pretrained(directory / name)
            tokenizer.save_pretrained(directory / name)
    _write_prompts(directory / "prompts.jsonl", language.training_prompts(recipe.prompts, recipe.seed + 2))
    _write_prompts(directory / "held_out.jsonl", language.held_out_prompts(recipe.held_out, recipe.seed + 2))
    (directory / "facts.json").write_text(json.dumps(asdict(facts), indent=2) + "\n", encoding="utf-8")


def _write_prompts(path: Path, asks: Iterable[language.Ask]) -> None:
    rows = [{"prompt": ask.text, **{key: value for key, value in asdict(ask).items() if key != "text"}} for ask in asks]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
