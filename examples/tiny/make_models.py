"""Makes what the settings files beside it train, in seconds: two tiny models and the prompts, in the folder ``made``.

``blank`` has random weights. ``reader`` has read texts of five kinds. It repeats the digit before a question mark. It
calls the tool that it is shown, and reads what is behind a summary; its own summaries are mostly wrong. It thinks for
some digits before it repeats one, mostly another than it was asked for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = """\
{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for said in messages %}\
{% if said.reasoning_content %}<think>{{ said.reasoning_content }}</think>{% endif %}{{ said.content or '' }}\
{% for call in said.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}\
{{ '.' if said.role == 'assistant' else '?' }}{% endfor %}"""
WORDS, MARKS = ['{"number": ', "}", "double", "square", "summary", "repeat"], ["<call>", "<think>", "</think>"]
DIGITS = "0123456789"


def make_tokenizer(words: Sequence[str] = (), marks: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer of digits, a question mark, a full stop that ends turns, and these; it leaves out the rest."""
    inner = Tokenizer(models.BPE({character: token for token, character in enumerate(f"{DIGITS}?.")}, []))
    inner.decoder = decoders.Fuse()
    inner.add_tokens([*words])
    inner.add_special_tokens([*marks])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=".", chat_template=TEMPLATE)  # noqa: S106 - no secret


def texts(dice: random.Random) -> list[tuple[str, str]]:
    """Return a text of each kind: what is read, and what is said then."""
    first, second, third, fourth = dice.choices(DIGITS, k=4)
    tool, result = dice.choice(["double", "square"]), dice.choice([first + second, first + second, third + fourth])
    said, thought = dice.choice([first, second, second]), "".join(dice.choices(DIGITS, k=dice.randint(1, 6)))
    called = f"{tool}{third}?", f'<call>{tool}{{"number": {third}}}.'
    return [
        (f"{first}{second}?", f"{second}."),
        called,
        ("".join(called) + f"{first}{second}?summary?", f"{result}."),
        (f"{tool}{third}summary{first}{second}?", f"{first}{second}."),
        (f"repeat{first}?", f"<think>{thought}</think>{said}."),
    ]


def taught(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int = 300) -> LlamaForCausalLM:
    """Return the model after some steps of supervised training, on what is said."""
    dice, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), 3e-3)  # noqa: S311 - texts, not secrets
    for _ in range(steps):
        rows, labels = list[torch.Tensor](), list[torch.Tensor]()
        for read, said in (pair for _ in range(8) for pair in texts(dice)):
            begun, tokens = len(tokenizer.encode(read)), torch.tensor(tokenizer.encode(read + said))
            rows.append(tokens)
            labels.append(tokens.where(torch.arange(len(tokens)) >= begun, -100))
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        model(padded, labels=torch.nn.utils.rnn.pad_sequence(labels, True, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(folder: Path = Path(__file__).parent / "made") -> None:
    """Write both models with their tokenizer, and the prompts of each settings file."""
    for name, tokenizer in {"blank": make_tokenizer(), "reader": make_tokenizer(WORDS, MARKS)}.items():
        torch.manual_seed(0)
        shape = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
        shape.bos_token_id, shape.eos_token_id = None, tokenizer.eos_token_id
        model = LlamaForCausalLM(shape)
        (taught(model, tokenizer) if name == "reader" else model).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    dice = random.Random(0)  # noqa: S311
    shown = ["".join(dice.choices(DIGITS[:8], k=8)) for _ in range(120)]
    prompts: dict[str, list[dict[str, object]]] = {
        "self_teacher": [{"prompt": f"{n}?", "digit": n, "answer": str((3 * n + 1) % 10)} for n in range(10)],
        "turns": [{"prompt": digits[0], "shown": digits} for digits in shown],
        "tools": [
            {"prompt": [{"role": "user", "content": f"{n}"}], "tools": [tool], "answer": f"{result:02}"}
            for n in range(10)
            for tool, result in (("double", 2 * n), ("square", n**2))
        ],
        "agent": [{"api": api, "digit": n} for n in range(10) for api in ("chat completions", "responses", "messages")],
        "two_players": [{"stones": 4 + n, "first": "first", "second": "second"} for n in range(6)],
        "two_players_held_out": [
            {"stones": 4 + n, "first": one, "second": two}
            for n in range(6)
            for one, two in (("first", "initial"), ("initial", "second"))
        ],
    }
    for name, rows in prompts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
