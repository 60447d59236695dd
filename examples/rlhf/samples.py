"""Sample the base model, and make demonstrations and preference pairs of its answers by the rule of examples/smollm2.

::

    python -m examples.rlhf.samples         # writes examples/rlhf/data/

The rule stands in place of a person, as in Gao et al. 2022, "Scaling Laws for Reward Model Overoptimization": of four
answers to a prompt the best is the demonstration, and the better of two is preferred. No training sees the rule itself.
The files are TRL's formats: prompt and completion; prompt, chosen and rejected; chat messages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import anyio
import torch

from examples.smollm2.reward import judge
from oppo.data import read_prompts
from oppo.errors import OppoError
from oppo.evaluation import Answering, respond
from oppo.events import Finish
from oppo.hf.loading import load_causal, load_tokenizer
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.tokenizer import HfTokenizer
from oppo.models import Sampling
from oppo.placement import Thread

HERE = Path(__file__).parent
BASE = HERE.parent / "smollm2"
SYSTEM = {"role": "system", "content": "Answer in one short sentence."}
SAMPLES = 4
MAX_NEW_TOKENS = 40
Answers: TypeAlias = Sequence[tuple[float, Finish, str]]
Row: TypeAlias = Mapping[str, object]


async def answered(base: Path, prompts: Path, count: int, seed: int) -> list[Answers]:
    """Return each prompt's answers, best first: the score by the rule, what was sampled, and its text."""
    tokenizer = HfTokenizer(load_tokenizer(base))
    asked = read_prompts(prompts, tokenizer)[:count]
    stop = tokenizer.stop((), ())
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, temperature=0.7, stop=stop, seed=seed)
    with Thread("policy", setup=lambda: torch.set_num_threads(1)) as thread:
        policy = HfPolicy(await thread.call("load", load_causal, base), sampling=sampling, place=thread)
        finished = await respond(policy, asked, Answering(samples=SAMPLES, batch=16))
    made = list[Answers]()
    for _, group in groupby(finished, key=lambda each: each.response.prompt.admission):
        rows = [(each, tokenizer.decode(each.response.tokens.tolist())) for each in group]
        scored = [(judge(messages(each), text).score, each, text) for each, text in rows]
        made.append(sorted(scored, key=lambda row: -row[0]))
    return made


def messages(finished: Finish) -> list[dict[str, str]]:
    found = finished.response.prompt.columns["prompt"]
    if not isinstance(found, list):
        raise TypeError(f"expected chat messages in the column 'prompt', got {found!r}")
    return found


def demonstrations(answers: Iterable[Answers]) -> Iterator[Row]:
    """Yield the best answer to each prompt, if it ended by itself."""
    for (_, best, text), *_ in answers:
        if best.reason == "eos":
            yield {"prompt": messages(best), "completion": [said(text)]}


def pairs(answers: Iterable[Answers]) -> Iterator[Row]:
    """Yield the best and the worst answer to each prompt, and the two between, unless they score the same."""
    for ranked in answers:
        for (high, better, chosen), (low, _, rejected) in zip(ranked[:2], ranked[:1:-1], strict=True):
            if high > low:
                yield {"prompt": messages(better), "chosen": [said(chosen)], "rejected": [said(rejected)]}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(rows: Sequence[Row], file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows in {file}", flush=True)
    return file


def main(arguments: Sequence[str] | None = None) -> int:
    """Write prompts, demonstrations and pairs; return 0, or 2 after printing what was wrong."""
    parser = argparse.ArgumentParser(description="Make demonstrations and preference pairs of sampled answers.")
    parser.add_argument("--base", type=Path, default=BASE / "model", help="model directory (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=HERE / "data")
    parser.add_argument("--prompts", type=int, default=64, help="sampled of training; half as many held out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    for split, source, count in (("train", "prompts", options.prompts), ("test", "held_out", options.prompts // 2)):
        rows = [json.loads(line) for line in (BASE / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()]
        file = write([{"prompt": [SYSTEM, *row["prompt"]]} for row in rows], options.output / f"{source}.jsonl")
        try:
            answers = anyio.run(answered, options.base, file, count, options.seed)
        except OppoError as error:
            print(f"samples: {error}", file=sys.stderr)
            return 2
        write(list(demonstrations(answers)), options.output / "sft" / f"{split}.jsonl")
        write(list(pairs(answers)), options.output / "pairs" / f"{split}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
