"""Nim, which one policy learns by playing both sides: of some stones each takes one to three, and the last one wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

shared = AsyncOpenAI(base_url="http://localhost", api_key="of each agent", timeout=None)


async def play(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Play a game of two roles, and return what each has earned; an answer that is no move takes one stone."""
    client, stones = shared.with_options(base_url=base_url, api_key=api_key), row["stones"]
    player, other = row["first"], row["second"]
    seen: dict[str, list[Any]] = {player: [], other: []}
    while stones > 0:
        seen[player].append({"role": "user", "content": str(stones)})
        reply = await client.chat.completions.create(model=player, messages=seen[player], max_tokens=1)
        said = reply.choices[0].message.content or ""
        seen[player].append({"role": "assistant", "content": said})
        stones -= int(said) if said in {"2", "3"} else 1
        player, other = other, player
    return {other: 1.0, player: -1.0}


def main(folder: Path = Path(__file__).parent) -> None:
    """Write a model that knows nothing, with its tokenizer, games of two players, and games against it as it is."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=12, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    shape.bos_token_id, shape.eos_token_id = None, 11
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tokens = Tokenizer(models.BPE({character: token for token, character in enumerate("0123456789?.")}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=".")  # noqa: S106 - no secret
    tokenizer.chat_template = (
        "{% for each in messages %}{{ each.content }}{{ '.' if each.role == 'assistant' else '?' }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder / "model")
    pairs = {"games": [("first", "second")], "held_out": [("first", "initial"), ("initial", "second")]}
    for name, seats in pairs.items():
        rows = [{"stones": 4 + n, "first": one, "second": two} for n in range(6) for one, two in seats]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
