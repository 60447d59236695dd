"""A workload as files, made once and kept, for every contestant, ours and the peer's alike.

::

    <cache>/<workload>-<digest>/
        actor/  reward/  critic/   models and tokenizer as save_pretrained writes them; reference = actor.
                                   Of large ones but the actor the configuration only: each contestant draws the same
                                   weights from the seed
        prompts.jsonl              {"tokens": [ids], "length": tokens of the response}, used in this order
        spec.json                  the rest: batch, epochs, limits, rates, and statistics of the lengths
        COMPLETE                   written last

The prompt announces the length of the response, in a language that the actor's weights spell::

    prompt    f7 f21 f3 5          a few fillers, then a number
    response  4 3 2 1 <eos>        counts down from it: as many tokens as the number

The length depends on the prompt alone, so every schedule, seed and program decodes, scores and trains the same tokens.
The next token depends only on the one before it, so that embedding and head suffice (:func:`counting`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import torch
import transformers
from pydantic import TypeAdapter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.ladder.workloads import LISTED, BenchWorkload, Lengths, Shape
from oppo.demo.assets import Progress, alone, cache_directory as demos, made_once
from oppo.errors import ConfigError
from oppo.events import Prompt
from oppo.hf.model_files import quiet

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


SHARP: Final = 64.0  # logit of the next token; those of others are near 0
FAINT: Final = 1e-3  # factor of what the layers add to the embedding of a token


def vocabulary_of(workload: BenchWorkload) -> int:
    return workload.models.vocabulary or language_of(workload).vocabulary


def counting(workload: BenchWorkload) -> PreTrainedModel:
    """Return an actor that counts down; the rest of its weights is drawn from torch's global generator.

    Its layers add next to nothing, and the head's row of a token is the embedding of the token before it. The cost of a
    forward pass does not depend on the weights.
    """
    language, model = language_of(workload), untrained(workload, "actor")
    numbers = torch.arange(language.number(1), language.vocabulary)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(FAINT)
        embedding = model.get_input_embeddings().get_parameter("weight").normal_()
        head = model.get_output_embeddings().get_parameter("weight").zero_()
        head[numbers - 1] = SHARP / workload.models.actor.hidden * embedding[numbers]
        head[EOS] = head[language.number(0)]
        head[language.number(0)] = 0
    return model


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Statistics of lengths in tokens, as announced by all prompts."""

    median: float
    p95: float
    mean: float
    capped: float  # fraction at the cap


@dataclass(frozen=True, slots=True)
class Facts:
    """Measurements of a workload; parameters by model."""

    announced: LengthStatistics
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
        columns = {name: value for name, value in row.items() if name != "tokens"}
        prompts.append(Prompt(number, number, tokens, group=number, columns=columns))
    return prompts


def statistics(lengths: Sequence[int], cap: int) -> LengthStatistics:
    return LengthStatistics(
        median=float(np.median(lengths)),
        p95=float(np.percentile(lengths, 95)),
        mean=float(np.mean(lengths)),
        capped=float(np.mean([length >= cap for length in lengths])),
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
    for role in workload.roles:
        progress(f"making the {role}", 0.0)
        made = _model(role, workload, cache)
        parameters[role] = int((made / "parameters").read_text(encoding="utf-8"))
        shutil.copytree(made / "model", directory / role, copy_function=os.link)
    lengths = [int(str(prompt.columns["length"])) for prompt in read_prompts(directory)]
    write_spec(directory, workload, Facts(statistics(lengths, workload.lengths.cap), parameters))


def write_spec(directory: Path, workload: BenchWorkload, facts: Facts) -> None:
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
        "dtype": workload.models.dtype,
        "measured": asdict(facts),
        "recipe": asdict(workload),
    }
    if workload.samples:  # sweeps of the others stay theirs
        spec["samples"] = workload.samples
    if workload.teacher:
        spec["distill_top_k"] = LISTED
    (directory / "spec.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")


def _model(role: str, workload: BenchWorkload, cache: Path) -> Path:
    """Return the directory of a model in ``cache``, made first if it is missing; workloads may share it."""
    large, positions = workload.models.vocabulary > 0, workload.positions

    def build(directory: Path) -> None:
        if role != "actor" and large:
            model = drawn(workload, role, "meta")
            model.config.save_pretrained(directory / "model")
        else:
            quick = "cuda" if large and torch.cuda.is_available() else "cpu"
            with alone(workload.seed), quiet(), torch.device(quick):
                model = counting(workload) if role == "actor" else untrained(workload, role)
                model.save_pretrained(directory / "model")
        language_of(workload).tokenizer(positions).save_pretrained(directory / "model")
        (directory / "parameters").write_text(f"{model.num_parameters()}\n", encoding="utf-8")

    models, shape = workload.models, asdict(workload.shape(role))
    recipe = [role, shape, models.vocabulary, models.dtype, workload.lengths.cap, positions, workload.seed]
    return made_once(cache / f"{role}-{_digest(recipe)}", build)


def untrained(workload: BenchWorkload, role: str) -> PreTrainedModel:
    """Return a model of random weights from torch's global generator; those but actor and teacher have a score."""
    sizes = workload.shape(role), vocabulary_of(workload), workload.positions
    dtype = getattr(torch, workload.models.dtype)
    model: PreTrainedModel
    if role in {"actor", "teacher"}:
        model = AutoModelForCausalLM.from_config(config_of(*sizes), dtype=dtype)
    else:
        model = AutoModelForSequenceClassification.from_config(scalar_config(*sizes), dtype=dtype)
    model.train(mode=False)
    return model


def drawn(workload: BenchWorkload, role: str, device: torch.device | str) -> PreTrainedModel:
    """Return a model that is not saved, on a device: the same for all contestants there."""
    with alone(workload.seed), torch.device(device):
        return untrained(workload, role)
