"""A workload as files, made once and kept, for every contestant, ours and the peer's alike.

::

    <cache>/<workload>-<digest>/
        actor/  reward/  critic/   models and tokenizer as save_pretrained writes them; reference = actor
        prompts.jsonl              {"tokens": [ids], "length": tokens of the response}, used in this order
        spec.json                  the rest: batch, epochs, limits, rates, and statistics of the lengths
        COMPLETE                   written last

The prompt announces the length of the response, in a language that the actor is taught::

    prompt    f7 f21 f3 5          a few fillers, then a number
    response  4 3 2 1 <eos>        counts down from it: as many tokens as the number

The length depends on the prompt alone, so every schedule, seed and program decodes, scores and trains the same tokens.
The next token depends only on the one before it, which a small model learns in a minute. Where lengths are scripted
there are no models: each contestant draws the same weights from the seed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

import anyio
import numpy as np
import tokenizers
import torch
import transformers
from pydantic import TypeAdapter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.ladder.workloads import LISTED, BenchWorkload, Lengths, Shape
from oppo.demo.assets import alone, cache_directory as demos, made_once
from oppo.demo.models import IGNORED, Progress, TrainingBudget, descend, rate
from oppo.errors import ConfigError, ModelError
from oppo.evaluation import Answering, respond
from oppo.events import Prompt
from oppo.hf.devices import use_cores
from oppo.hf.loading import load_causal
from oppo.hf.model_files import quiet
from oppo.hf.serve.policy import HfPolicy
from oppo.models import Sampling
from oppo.placement import Thread

PAD: Final = 0
EOS: Final = 1
FILLERS: Final = 32
BEYOND: Final = 32  # numbers above the cap that a prompt can announce


@dataclass(frozen=True, slots=True)
class Countdown:
    """The language of the numbers 1 to ``numbers``.

    Example:
        >>> language = Countdown(9)
        >>> words = language.words()
        >>> [words[token] for token in language.response(5)]
        ['4', '3', '2', '1', '<eos>']
    """

    numbers: int

    @property
    def vocabulary(self) -> int:
        """How many tokens there are: padding, end, fillers, numbers."""
        return 2 + FILLERS + self.numbers

    def words(self) -> list[str]:
        fillers = [f"f{each}" for each in range(FILLERS)]
        return ["<pad>", "<eos>", *fillers, *(str(number) for number in range(1, self.numbers + 1))]

    def number(self, value: int) -> int:
        """Return the id of a number, 1 or more."""
        return 1 + FILLERS + value

    def response(self, announced: int) -> list[int]:
        """Return the response to a prompt that ends in ``announced``: as many tokens."""
        return [*(self.number(value) for value in range(announced - 1, 0, -1)), EOS]

    def tokenizer(self, longest: int) -> PreTrainedTokenizerFast:
        """Return a tokenizer of words between blanks, for models that read ``longest`` tokens."""
        words = self.words()
        tokens = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, words[PAD]))
        tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokens,
            pad_token=words[PAD],
            eos_token=words[EOS],
            padding_side="left",
            model_max_length=longest,
            clean_up_tokenization_spaces=False,
        )


def language_of(workload: BenchWorkload) -> Countdown:
    return Countdown(workload.lengths.cap + BEYOND)


def announced(lengths: Lengths, count: int, seed: int) -> list[int]:
    """Return the announced length of each of ``count`` prompts; above the cap the response is cut off."""
    rng = np.random.default_rng((seed, 1))
    drawn = np.exp(rng.normal(np.log(lengths.median), lengths.sigma, count))
    above = lengths.cap + BEYOND // 2  # the largest numbers are rare in lessons: they follow no other number
    longest = lengths.cap - 1 if lengths.over else above
    wanted = np.clip(np.rint(drawn), lengths.shortest, longest).astype(int)
    if lengths.over:
        for first in range(0, count, lengths.over):
            place = first + int(rng.integers(lengths.over))
            if place < count:
                wanted[place] = above
    return [int(length) for length in wanted]


def write_prompts(path: Path, workload: BenchWorkload) -> None:
    """Write the workload's prompts as JSON lines: token ids, and the length of the response."""
    language, lengths = language_of(workload), workload.lengths
    rng = np.random.default_rng((workload.seed, 2))
    low, high = workload.prompt_tokens
    lines = []
    for number in announced(lengths, workload.prompts, workload.seed):
        fillers = rng.integers(2, 2 + FILLERS, int(rng.integers(low, high + 1)) - 1).tolist()
        tokens = [*fillers, language.number(number)]
        lines.append(json.dumps({"tokens": tokens, "length": min(number, lengths.cap)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def lessons(language: Countdown, longest: int, rng: np.random.Generator) -> Iterator[Sequence[int]]:
    """Yield prompts with their responses, endlessly; all numbers are equally likely."""
    while True:
        fillers = rng.integers(2, 2 + FILLERS, int(rng.integers(1, 8))).tolist()
        number = int(rng.integers(1, language.numbers + 1))
        yield [*fillers, language.number(number), *language.response(number)][:longest]


TOKENS: Final = 512  # tokens of an optimizer step, for every width of its rows
WIDTHS: Final = (16, 64, 256)  # widths of the rows, in turn: the next token must not depend on the position
RATE: Final = 6e-3
SHARPER: Final = 3.0  # factor of the taught actor's final norm: likely tokens become almost certain
AS_ANNOUNCED: Final = 0.99  # least fraction of responses of the announced length


def config_of(shape: Shape, vocabulary: int, positions: int) -> LlamaConfig:
    return LlamaConfig(**_sizes(shape, vocabulary, positions))


def scalar_config(shape: Shape, vocabulary: int, positions: int) -> PreTrainedConfig:
    sizes = {**_sizes(shape, vocabulary, positions), "num_labels": 1}
    if shape.architecture != "llama":
        size = shape.hidden // shape.heads
        sizes |= {"linear_num_key_heads": shape.heads, "linear_num_value_heads": shape.heads, "head_dim": size}
        sizes |= {"linear_key_head_dim": size, "linear_value_head_dim": size}
        sizes["intermediate_size"] -= shape.hidden // 3  # its layers' gates have as many parameters
    return AutoConfig.for_model(shape.architecture, **sizes)


def _sizes(shape: Shape, vocabulary: int, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def scalar_model(shape: Shape, vocabulary: int, positions: int) -> PreTrainedModel:
    """Return a sequence-classification model with one label and random weights from torch's global generator."""
    config = scalar_config(shape, vocabulary, positions)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    return model


def taught(language: Countdown, shape: Shape, *, steps: int, positions: int, progress: Progress) -> PreTrainedModel:
    """Return an actor that counts down; its initial weights are drawn from torch's global generator.

    Every block begins as the identity, so training begins with which token follows which, and that suffices. The cost
    of a forward pass does not depend on the weights.
    """
    model = LlamaForCausalLM(config_of(shape, language.vocabulary, positions))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    rng = np.random.default_rng(torch.initial_seed() % 2**32)
    budget = TrainingBudget(steps=steps, rows=0, learning_rate=RATE)
    model.train()
    for step in range(steps):
        width = min(WIDTHS[step % len(WIDTHS)], positions)
        tokens, labels = _packed(language, TOKENS // width, width, rng)
        descended = descend(optimizer, model, [partial(_loss, model, tokens, labels)], rate(step, budget))
        progress(f"teaching the actor to count down, loss {descended:.4f}", (step + 1) / steps)
    model.train(mode=False)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(SHARPER)
    return model


def _loss(model: PreTrainedModel, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", model(input_ids=tokens, labels=labels, use_cache=False).loss)


def _packed(language: Countdown, rows: int, width: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, int64 [rows, width]: lessons end to end, without loss on prompts."""
    stream: list[int] = []
    for lesson in lessons(language, width, rng):
        stream += lesson
        if len(stream) >= rows * width:
            break
    tokens = torch.tensor(stream[: rows * width]).view(rows, width)
    after_filler = torch.nn.functional.pad((tokens < 2 + FILLERS) & (tokens != EOS), (1, 0))[:, :-1]
    after_end = torch.nn.functional.pad(tokens == EOS, (1, 0))[:, :-1]
    unlearned = (tokens >= 2) & (tokens < 2 + FILLERS) | after_filler | after_end
    return tokens, tokens.masked_fill(unlearned, IGNORED)


def lengths_written(actor: PreTrainedModel, prompts: Sequence[Prompt], *, cap: int, seed: int) -> list[int]:
    """Return the lengths of the actor's responses to ``prompts``, sampled at temperature 1 and cut off at ``cap``."""
    sampling = Sampling(max_new_tokens=cap, stop=(EOS,), seed=seed)

    with Thread("teacher", setup=lambda: use_cores(1)) as thread:
        policy = HfPolicy(actor, sampling=sampling, place=thread)
        finished = anyio.run(respond, policy, prompts, Answering(batch=len(prompts)))
    return [len(event.response) for event in finished]


EXAMINED: Final = 256  # responses of the taught actor that are compared with the announced lengths


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Statistics of lengths in tokens: those announced by all prompts, or of the actor's responses to some."""

    median: float
    p95: float
    mean: float
    capped: float  # fraction at the cap
    as_announced: float  # fraction equal to the announced length


@dataclass(frozen=True, slots=True)
class Facts:
    """Measurements of a workload; parameters by model."""

    announced: LengthStatistics
    written: LengthStatistics | None
    parameters: dict[str, int]


@dataclass(frozen=True, slots=True)
class Files:
    """A workload and the directory that holds it."""

    directory: Path
    workload: BenchWorkload
    facts: Facts

    def model(self, name: str) -> Path:
        return self.directory / name

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prompts in the order of the file, again and again, numbered from 0."""
        prompts = read_prompts(self.directory)
        for number in count():
            prompt = prompts[number % len(prompts)]
            yield Prompt(number, number, prompt.tokens, group=number, columns=prompt.columns)


def cache_directory() -> Path:
    return demos().with_name("bench")


def files_of(workload: BenchWorkload, cache: Path, progress: Progress = lambda *_: None) -> Files:
    """Return the files of a workload from ``cache``, where they are made first if they are missing."""

    def build(directory: Path) -> None:
        _build(directory, workload, cache, progress)

    target = made_once(cache / f"{workload.name}-{_digest(asdict(workload))}", build)
    return open_files(target, workload)


def open_files(directory: Path, workload: BenchWorkload) -> Files:
    measured = json.loads((directory / "spec.json").read_text(encoding="utf-8"))["measured"]
    return Files(directory, workload, TypeAdapter(Facts).validate_python(measured))


def workload_in(directory: Path) -> BenchWorkload:
    try:
        recipe = json.loads((directory / "spec.json").read_text(encoding="utf-8"))["recipe"]
        return TypeAdapter(BenchWorkload).validate_python(recipe)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory} holds no workload of the ladder: {error}") from error


def read_prompts(directory: Path) -> list[Prompt]:
    """Return the prompts of a workload's directory; column ``length`` is that of the response."""
    prompts = []
    for number, line in enumerate((directory / "prompts.jsonl").read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        tokens = np.asarray(row["tokens"], np.int32)
        prompts.append(Prompt(number, number, tokens, group=number, columns={"length": row["length"]}))
    return prompts


def statistics(lengths: list[int], wanted: list[int], cap: int) -> LengthStatistics:
    """Return the statistics of lengths; ``wanted`` are the announced ones, at most ``cap``."""
    return LengthStatistics(
        median=float(np.median(lengths)),
        p95=float(np.percentile(lengths, 95)),
        mean=float(np.mean(lengths)),
        capped=float(np.mean([length >= cap for length in lengths])),
        as_announced=float(np.mean([length == want for length, want in zip(lengths, wanted, strict=True)])),
    )


def _digest(recipe: object) -> str:
    """Return 12 hexadecimal digits that change with the recipe, the code that follows it, and its libraries."""
    versions = [library.__version__ for library in (torch, transformers, tokenizers)]
    digest = hashlib.sha256(json.dumps([recipe, versions], sort_keys=True).encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:12]


def _build(directory: Path, workload: BenchWorkload, cache: Path, progress: Progress) -> None:
    parameters: dict[str, int] = {}
    write_prompts(directory / "prompts.jsonl", workload)
    if not workload.models.scripted:
        for role in workload.roles:
            made = _model(role, workload, cache, progress)
            parameters[role] = int((made / "parameters").read_text(encoding="utf-8"))
            shutil.copytree(made / "model", directory / role)
    facts = Facts(*_examine(directory, workload, progress), parameters)
    spec = {
        "workload": workload.name,
        "batch": workload.batch,
        "epochs": workload.epochs,
        "minibatches": workload.minibatches,
        "max_new_tokens": workload.lengths.cap,
        "learning_rate": workload.learning_rate,
        "critic_learning_rate": workload.learning_rate,
        "temperature": workload.temperature,
        "eos": EOS,
        "pad": PAD,
        "seed": workload.seed,
        "kl": workload.kl,
        "gamma": workload.gamma,
        "lam": workload.lam,
        "reward": workload.reward,
        "lengths": "scripted" if workload.models.scripted else "trained",
        "measured": asdict(facts),
        "recipe": asdict(workload),
    }
    if workload.samples:  # sweeps of the others stay theirs
        spec["samples"] = workload.samples
    if workload.teacher:
        spec["distill_top_k"] = LISTED
    (directory / "spec.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")


def _model(role: str, workload: BenchWorkload, cache: Path, progress: Progress) -> Path:
    """Return the directory of a model in ``cache``, made first if it is missing; workloads may share it."""
    shape, language, positions = workload.shape(role), language_of(workload), workload.positions
    lessons = workload.models.taught if role == "actor" else 0

    def build(directory: Path) -> None:
        with alone(workload.seed):
            if lessons:
                model = taught(language, shape, steps=lessons, positions=positions, progress=progress)
            elif role == "teacher":
                model = LlamaForCausalLM(config_of(shape, language.vocabulary, positions))
            else:
                model = scalar_model(shape, language.vocabulary, positions)
        with quiet():
            model.save_pretrained(directory / "model")
            language.tokenizer(positions).save_pretrained(directory / "model")
        (directory / "parameters").write_text(f"{model.num_parameters()}\n", encoding="utf-8")

    recipe = [role, asdict(shape), lessons, workload.lengths.cap, positions, workload.seed]
    return made_once(cache / f"{role}-{_digest(recipe)}", build)


def _examine(
    directory: Path, workload: BenchWorkload, progress: Progress
) -> tuple[LengthStatistics, LengthStatistics | None]:
    """Return the statistics of the announced lengths and of the actor's responses; ``None`` for scripted ones."""
    prompts, cap = read_prompts(directory), workload.lengths.cap
    wanted = [int(str(prompt.columns["length"])) for prompt in prompts]
    announced = statistics(wanted, wanted, cap)
    if workload.models.scripted:
        return announced, None
    progress("examining the actor", 0.0)
    actor = load_causal(directory / "actor")
    lengths = lengths_written(actor, prompts[:EXAMINED], cap=cap, seed=workload.seed)
    written = statistics(lengths, wanted[:EXAMINED], cap)
    if written.as_announced < AS_ANNOUNCED:
        raise ModelError(
            f"only {written.as_announced:.1%} of the actor's responses are as long as announced, and a comparison asks "
            f"for {AS_ANNOUNCED:.0%}: raise models.taught of workload {workload.name!r} in "
            "benchmarks/ladder/workloads.toml"
        )
    return announced, written
