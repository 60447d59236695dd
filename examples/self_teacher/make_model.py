"""Makes a tiny model that can read, in seconds: it repeats the digit before a question mark, and knows no answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MARK, END = 10, 11


def right(completions: Sequence[str], answer: Sequence[int]) -> list[float]:
    """Return 1 for each completion that is the answer."""
    return [float(text == str(digit)) for text, digit in zip(completions, answer, strict=True)]


def main(folder: Path = Path(__file__).parent) -> None:
    """Write the model with its tokenizer, and as prompts ten digits, whose answers no text that it read had."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=12, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    shape.bos_token_id, shape.eos_token_id = None, END
    model = LlamaForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(200):
        digits, mark, end = torch.randint(10, (64, 2)), torch.full((64, 1), MARK), torch.full((64, 1), END)
        rows = torch.cat([digits, mark, digits[:, 1:], end], 1)
        model(rows, labels=rows.where(torch.arange(5) > 2, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokenizer = Tokenizer(models.BPE({character: token for token, character in enumerate("0123456789?.")}, []))
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=".").save_pretrained(folder / "model")  # noqa: S106 - no secret
    rows_of_data = [{"prompt": f"{digit}?", "digit": digit, "answer": (3 * digit + 1) % 10} for digit in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_data))


if __name__ == "__main__":
    main()
