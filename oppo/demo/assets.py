"""The models and prompts of a demo run, made once for each recipe and kept in a cache.

::

    <directory>/<digest>/
        actor/  reward/  critic/      models and tokenizer, as save_pretrained writes them
        prompts.jsonl  held_out.jsonl {"prompt": ..., "topic": ..., "adjective": ..., "noun": ..., "place": ...}
        facts.json                    measurements of models and texts
        COMPLETE                      written last: without it the directory is not used

The digest covers the recipe, the sources of the modules that carry it out, and the versions of their libraries.

The base policy is a small Llama, taught the review language by supervised training. Reviews are packed into rows
without a gap. Position ids restart at 0 with each review, so that transformers lets none attend to another. The loss
covers responses only. The reward model is the policy's backbone with a scalar head, trained on noisy preference pairs.
Its scores are centred and scaled afterwards, to mean 0 and standard deviation 1 over the base policy's responses: so a
KL coefficient keeps its meaning.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, TypeAlias, cast

import anyio
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from oppo.atomic_files import temporary
from oppo.data import read_prompts
from oppo.demo import language
from oppo.demo.language import Preferences, Review, held_out_prompts, sample_preferences, training_prompts
from oppo.evaluation import Answering, respond
from oppo.hf.devices import use_cores
from oppo.hf.model_files import quiet
from oppo.hf.servable import probe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.tokenizer import HfTokenizer
from oppo.models import Sampling
from oppo.placement import Thread

# `progress(sentence, fraction)`: the work in progress, and the fraction done
Progress: TypeAlias = Callable[[str, float], None]

WIDTH: Final = 256  # tokens in a packed row
END: Final = "<|end|>"  # ends a response; also the beginning-of-sequence token, as in GPT-2
PAD: Final = "<|pad|>"
IGNORED: Final = -100  # the label of a token without loss, by the convention of torch and transformers
# Fraction of the steps in which the learning rate rises; after that it falls as a cosine, to a twentieth
WARMUP: Final = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    vocabulary: int = 768
    hidden: int = 256
    intermediate: int = 1024
    layers: int = 2
    heads: int = 4
    positions: int = 512

    def config(self, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=self.positions,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    # A row: ``WIDTH`` packed tokens, or the preferences of one prompt
    steps: int
    rows: int
    learning_rate: float


def train_tokenizer(corpus: Iterable[str], *, vocabulary: int, longest: int) -> PreTrainedTokenizerFast:
    if vocabulary <= 258:
        raise ValueError(f"a byte-level vocabulary needs more than 258 tokens, not {vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )


def rate(step: int, budget: TrainingBudget) -> float:
    rise = max(1.0, WARMUP * budget.steps)
    if step < rise:
        return budget.learning_rate * (step + 1) / rise
    done = (step - rise) / max(1.0, budget.steps - rise)
    return budget.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def train_policy(
    tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    budget: TrainingBudget,
    *,
    seed: int,
    progress: Progress,
) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    rng = random.Random(f"policy {seed}")  # noqa: S311 - a corpus, not a secret
    examples = _packed(_documents(tokenizer, rng), WIDTH)
    smooth = 0.0
    model.train()
    for step in range(budget.steps):
        losses = [partial(_row_loss, model, next(examples), budget.rows) for _ in range(budget.rows)]
        loss = descend(optimizer, model, losses, rate(step, budget))
        smooth = loss if step == 0 else 0.95 * smooth + 0.05 * loss
        progress(f"teaching the policy to write reviews, loss {smooth:.2f}", (step + 1) / budget.steps)
    model.eval()
    return smooth


def descend(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    losses: Iterable[Callable[[], torch.Tensor]],
    learning_rate: float,
) -> float:
    # Two cores compute and differentiate a loss each. Of two losses the bits do not depend on which ends first.
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad()
    with ThreadPoolExecutor(2, initializer=use_cores, initargs=(1,)) as cores:
        total = sum(cores.map(_differentiated, losses))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def _differentiated(loss: Callable[[], torch.Tensor]) -> float:
    value = loss()
    value.backward()
    return value.item()


def _row_loss(model: PreTrainedModel, row: Row, of: int) -> torch.Tensor:
    tokens, positions, labels = (torch.tensor([column]) for column in row)  # [1, WIDTH]
    output = model(input_ids=tokens, position_ids=positions, labels=labels, use_cache=False)
    return cast("torch.Tensor", output.loss) / of


Document: TypeAlias = tuple[list[int], list[int]]  # tokens, and the labels of the same positions
Row: TypeAlias = tuple[list[int], list[int], list[int]]  # tokens, position ids and labels


def _documents(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[Document]:
    while True:
        asks = language.training_prompts(256, rng.getrandbits(32))
        prompts = tokenizer([ask.text for ask in asks])["input_ids"]
        reviews = tokenizer([language.review(ask.topic, rng) for ask in asks])["input_ids"]
        for prompt, response in zip(prompts, reviews, strict=True):
            response.append(tokenizer.eos_token_id)
            yield prompt + response, [IGNORED] * len(prompt) + response


def _packed(documents: Iterator[Document], width: int) -> Iterator[Row]:
    # The last document of a row is cut where the row ends.
    row: Row = ([], [], [])
    for tokens, labels in documents:
        for column, values in zip(row, (tokens, range(len(tokens)), [IGNORED, *labels[1:]]), strict=True):
            column.extend(values[: width - len(column)])
        if len(row[0]) == width:
            yield row
            row = ([], [], [])


def write(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    limit: int,
    seed: int,
) -> list[Review]:
    texts = HfTokenizer(tokenizer)
    asked = read_prompts([{"prompt": prompt} for prompt in prompts], texts)
    sampling = Sampling(max_new_tokens=limit, stop=(tokenizer.eos_token_id,), seed=seed)
    served = copy.deepcopy(model)  # it may attend in another way from now on
    probe(served)
    with Thread("writing", setup=lambda: use_cores(1)) as thread:
        policy = HfPolicy(served, sampling=sampling, place=thread)
        finished = anyio.run(respond, policy, asked, Answering(batch=len(asked)))
    written = []
    for each in finished:
        tokens = each.response.tokens.tolist()
        ended = tokens[-1] == tokenizer.eos_token_id
        words = str(tokenizer.decode(tokens[: len(tokens) - ended], skip_special_tokens=True))
        written.append(Review(words, ended))
    return written


PARTS: Final = 2  # micro-batches of a step, one for each core
RIDGE: Final = 0.1  # regularises the direction along which every final hidden state has the same component


def scalar_model(source: LlamaForCausalLM | LlamaForSequenceClassification) -> LlamaForSequenceClassification:
    settings = {key: value for key, value in source.config.to_dict().items() if key not in {"id2label", "label2id"}}
    config = LlamaConfig(**settings)
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(source.model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    model.eval()
    return model


def train_reward(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    budget: TrainingBudget,
    *,
    seed: int,
    progress: Progress,
) -> LlamaForSequenceClassification:
    # The loss is Bradley and Terry's (1952)
    model = scalar_model(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    rng = random.Random(f"reward {seed}")  # noqa: S311 - a corpus, not a secret
    smooth = 0.0
    model.train()
    for step in range(budget.steps):
        batch = sample_preferences(training_prompts(budget.rows, rng.getrandbits(32)), rng)
        losses = [partial(_loss, model, tokenizer, batch[k::PARTS]) for k in range(PARTS)]
        loss = descend(optimizer, model, losses, rate(step, budget))
        smooth = loss if step == 0 else 0.9 * smooth + 0.1 * loss
        progress(f"teaching the reward model what readers prefer, loss {smooth:.2f}", (step + 1) / budget.steps)
    model.eval()
    return model


@torch.no_grad()
def pair_accuracy(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, *, count: int, seed: int
) -> float:
    rng = random.Random(f"accuracy {seed}")  # noqa: S311 - a corpus, not a secret
    pairs = sample_preferences(held_out_prompts(count, seed), rng, texts=2)
    margins = [_margins(model, tokenizer, pairs[first : first + 64]) for first in range(0, count, 64)]
    return float((torch.cat(margins) > 0).sum()) / count


@torch.no_grad()
def normalise(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    texts: Sequence[Review],
) -> None:
    # The head has no bias to shift. With the last hidden states H of the texts, the ridge regression
    # v = (H'H + RIDGE)^-1 H'1 has Hv ~ 1, so adding a multiple of v to the head adds a constant to every score.
    states = _last_states(model, tokenizer, prompts, texts).double()
    weight = model.score.weight.double().squeeze(0)
    gram = states.T @ states
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    constant = torch.linalg.solve(gram + ridge, states.sum(0))
    constant /= (states @ constant).mean()
    weight = weight - (states @ weight).mean() * constant
    spread = (states @ weight).std(correction=0)
    if not spread > 0:
        raise ValueError(f"{len(texts)} texts all have the same score, so the reward model cannot be scaled")
    model.score.weight.copy_((weight / spread).unsqueeze(0))


def _loss(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, batch: Sequence[Preferences]
) -> torch.Tensor:
    return -functional.logsigmoid(_margins(model, tokenizer, batch)).mean() / PARTS


def _margins(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, batch: Sequence[Preferences]
) -> torch.Tensor:
    # The score of each pair's better text minus its worse one's, float32 [pairs].
    prompts = [each.ask.text for each in batch for _ in each.texts]
    texts = [text for each in batch for text in each.texts]
    scores = model.score(_last_states(model, tokenizer, prompts, texts)).squeeze(1)  # [texts]
    starts = accumulate((len(each.texts) for each in batch), initial=0)
    pairs = [
        (start + better, start + worse)
        for start, each in zip(starts, batch, strict=False)
        for better, worse in each.pairs
    ]
    where = torch.tensor(pairs)  # [pairs, 2]
    return cast("torch.Tensor", scores[where[:, 0]] - scores[where[:, 1]])


def _last_states(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    texts: Sequence[Review],
) -> torch.Tensor:
    # float32 [texts, hidden]. Texts are packed into rows as long as the longest; each has its own positions, so none
    # attends to another.
    prompt_ids, text_ids = tokenizer(list(prompts))["input_ids"], tokenizer([text.words for text in texts])["input_ids"]
    sequences = [
        prompt + response + [tokenizer.eos_token_id] * text.ended
        for prompt, response, text in zip(prompt_ids, text_ids, texts, strict=True)
    ]
    width = max(map(len, sequences))
    rows: list[list[int]] = [[]]
    positions: list[list[int]] = [[]]
    lasts: list[tuple[int, int]] = []
    for sequence in sequences:
        if len(rows[-1]) + len(sequence) > width:
            rows.append([])
            positions.append([])
        rows[-1] += sequence
        positions[-1] += range(len(sequence))
        lasts.append((len(rows) - 1, len(rows[-1]) - 1))
    for row, position in zip(rows, positions, strict=True):
        gap = width - len(row)
        row.extend([tokenizer.pad_token_id] * gap)
        position.extend(range(gap))
    states = model.model(
        input_ids=torch.tensor(rows), position_ids=torch.tensor(positions), use_cache=False
    ).last_hidden_state  # [rows, width, hidden]
    where = torch.tensor(lasts)  # [texts, 2]
    return cast("torch.Tensor", states[where[:, 0], where[:, 1]])


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


SOURCES: Final = ("language.toml", "language.py", "assets.py")


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
    rng = random.Random(f"corpus {recipe.seed}")  # noqa: S311 - a corpus, not a secret
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
