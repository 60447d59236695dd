"""Files of whole runs: tiny models that share a tokenizer of bytes, chat prompts, rewards, tools and agents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from tests.hf import tiny
from tests.hf.spot_tokenizers import byte_tokenizer
from tests.kit.seen import NAMED, equipped, uri

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ part.text or '<|begin|><|pad|><|end_of_image|>' }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A short chat template with tools, called as Qwen's call them, and with images."""

SPECIAL = ("<|im_start|>", "<|im_end|>", "</tool_call>", *dict.fromkeys(NAMED.values()))

CODE = '''
def total(completion_ids):
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def short(completion_ids):
    return [1 / (1 + len(ids)) for ids in completion_ids]


def answer(turn):
    from oppo.environments import TextAnswer

    said = len(turn.text)
    return TextAnswer(" ok " if turn.number < 1 else "", reward=said % 3 / 3, key=str(said % 2))


def add(left: int, right: int = 1) -> int:
    """Add two numbers.

    Args:
        left: the first.
        right: the second.
    """
    return left + right


class Game:
    def reset(self, **columns):
        self.guesses, self.earned = 0, 0.0

    def add(self, left: int) -> str:
        """Guess a number.

        Args:
            left: the guess.
        """
        self.guesses += 1
        self.earned = left % 3 / 3
        return "higher"

    def get_turn_reward(self) -> float:
        return self.earned

    def get_turn_state(self) -> int:
        return self.guesses


def asked(row, kind="image_url"):
    url = row.get("image") or next(iter(row.get("images") or ()), None)
    if url is None:
        return list(row["prompt"])
    image = {"type": kind, "image_url": {"url": url} if kind == "image_url" else url}
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}]


async def agent(row, base_url, api_key):
    import openai

    from oppo.rewards import ByTurn

    messages, tokens = asked(row, "input_image"), 0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(2):
            try:
                limited = {"max_output_tokens": 6 + turn, "stream": True}
                async for event in await client.responses.create(model="policy", input=messages, **limited):
                    reply = getattr(event, "response", None)
            except openai.BadRequestError:  # no room is left
                break
            tokens += reply.usage.output_tokens
            messages.append({"role": "assistant", "content": reply.output_text})
            messages.append({"role": "user", "content": "and?"})
    return ByTurn({0: tokens % 5 / 5, -1: tokens % 7 / 7})


async def chief(row, base_url, api_key):
    import asyncio

    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            return reply.usage.completion_tokens

        tokens = await ask(asked(row))
        parts = [[{"role": "user", "content": f"part {part} of {row['number']}"}] for part in range(2)]
        tokens += sum(await asyncio.gather(*(ask(part) for part in parts)))
    return tokens % 7 / 7


async def duel(row, base_url, api_key):
    import anthropic
    import openai

    url, said, tokens = base_url.removesuffix("/v1"), asked(row), {"one": 0, "two": 0}
    async with (
        openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as one,
        anthropic.AsyncAnthropic(base_url=url, api_key=api_key) as two,
    ):
        for turn in range(2):
            try:
                reply = await one.chat.completions.create(model="one", messages=said, max_tokens=9)
            except openai.BadRequestError:  # no room is left
                break
            content = reply.choices[0].message.content
            messages = [{"role": "user", "content": f"{turn} of {row['number']}: {len(content)}"}]
            answer = await two.messages.create(model="two", messages=messages, max_tokens=5 + turn)
            tokens["one"] += reply.usage.completion_tokens
            tokens["two"] += answer.usage.output_tokens
            said += [{"role": "assistant", "content": content}]
            said += [{"role": "user", "content": f"{answer.usage.output_tokens} {answer.content[0].text[:2]!r}"}]
    return {"one": tokens["one"] % 7 / 7, "two": -tokens["two"] / 7}
'''

IMAGES = {"image": "<|pad|>", "video": "<|video|>", "vision_start": "<|begin|>", "vision_end": "<|end_of_image|>"}
"""The special tokens of a model that reads images, by their names in its config."""


def _config(make: Callable[[], PreTrainedConfig], **sizes: object) -> PreTrainedConfig:
    config = make()
    for name, value in {"max_position_embeddings": 2048, **sizes}.items():
        setattr(config.get_text_config(), name, value)
    return config


MODELS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _config(tiny.CONFIGS["llama"]),
    "teacher": lambda: _config(tiny.CONFIGS["llama"], num_hidden_layers=3),
    "tied": lambda: _config(tiny.CONFIGS["llama"], tie_word_embeddings=True),
    "mixture": lambda: _config(tiny.MIXTURES["mixtral"]),
    "hybrid": lambda: _config(tiny.STATEFUL["lfm2"]),
    "sliding": lambda: _config(tiny.CONFIGS["gemma2"], tie_word_embeddings=False),  # else it says one token only
    "vision": lambda: _config(tiny.VISION["qwen3-vl"]),
    "seeing-teacher": lambda: _config(tiny.VISION["qwen3-vl"], num_hidden_layers=3),
}


def _shown(numbers: Iterable[int]) -> Iterator[dict[str, object]]:
    """Yield rows of text, of an image in a column, of two at placeholders, and of one in a message."""
    for n in numbers:
        image, text = {"type": "image", "image": uri(n % 5)}, f"{n} + 1?"
        content: object = (text, text, f"<image>{text}<image>", [image, {"type": "text", "text": text}])[n % 4]
        columns = ({}, {"image": uri(n % 5)}, {"images": [uri(n % 5), uri(n % 3)]}, {})[n % 4]
        yield {"prompt": [{"role": "user", "content": content}], "number": n, **columns}


def furnish(folder: Path) -> Path:
    """Fill a folder with models, prompts and user code, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(TEMPLATE, special=SPECIAL)
    number: Callable[[str], Any] = tokenizer.inner.convert_tokens_to_ids
    ids = {f"{name}_token_id": number(token) for name, token in IMAGES.items()}
    for seed, (name, make) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        config = make()
        config.get_text_config().vocab_size = 256 + 4 + len(SPECIAL) + 5 * (name == "tied")
        for key, value in (ids if hasattr(config, "vision_config") else {}).items():
            setattr(config, key, value)
        tiny.of(config, seed=seed).save_pretrained(folder / name)
        tokenizer.save(folder / name)
    text = _config(tiny.CONFIGS["llama"], vocab_size=256 + 4 + len(SPECIAL), num_labels=1)
    seeing = AutoConfig.from_pretrained(folder / "vision", num_labels=1)
    for name, config in (("reward", text), ("seeing-reward", seeing)):
        tiny.scalar_of(config).save_pretrained(folder / name)
        tokenizer.save(folder / name)
    for name in ("vision", "seeing-teacher", "seeing-reward"):
        equipped(folder / name, "qwen3_vl")
    for name, first, count in (("prompts", 0, 40), ("held_out", 100, 5)):
        numbers = range(first, first + count)
        rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "number": n} for n in numbers]
        for kind, found in (("", rows), ("shown_", _shown(numbers))):
            (folder / f"{kind}{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (folder / "code.py").write_text(CODE)
    return folder
