"""Compare a trained SmolLM2 with the one it came from, on prompts neither has been trained on.

Both answer every held-out prompt with the same sampling noise, so that what differs is the model and not the draw::

    python -m examples.smollm2.evaluate --after examples/smollm2/runs/courtesy/checkpoints/final/actor

It prints the mean scores, their paired difference with its interval, each part of the reward and a few answers,
and writes all of it to ``results.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
import numpy as np
import torch

from examples.smollm2.reward import HIGHEST, LOWEST, WEIGHTS, Parts, judge
from oppo.data import read_prompts
from oppo.errors import OppoError
from oppo.evaluation import Answering, Comparison, compare, respond
from oppo.events import Finish, FloatArray, Prompt
from oppo.hf.loading import load_causal, load_tokenizer
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.tokenizer import HfTokenizer
from oppo.models import Sampling
from oppo.placement import Thread

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: what was asked, its text and length in tokens, how it ended, what the reward says of it."""

    question: str
    text: str
    tokens: int
    ended: str
    parts: Parts


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's settings; the sampling defaults are those of ``config.toml``."""
    parser = argparse.ArgumentParser(description="Score two models on held-out prompts with the same sampling noise.")
    parser.add_argument("--before", default=str(HERE / "model"), help="model directory (default: %(default)s)")
    parser.add_argument("--after", required=True, help="directory of the trained actor")
    parser.add_argument("--prompts", type=Path, default=HERE / "held_out.jsonl")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=11, help="of the sampling noise; not the one trained with")
    parser.add_argument("--batch", type=int, default=16, help="prompts decoded side by side")
    parser.add_argument("--threads", type=int, default=2, help="cores to compute with")
    parser.add_argument("--samples", type=int, default=4, help="answers to print")
    return parser.parse_args(arguments)


async def answers(directory: str, options: argparse.Namespace) -> list[Answer]:
    """Return the answer of the model in ``directory`` to every prompt of the file, in its order."""
    tokenizer = HfTokenizer(load_tokenizer(directory))
    prompts = read_prompts(options.prompts, tokenizer)
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        stop=tokenizer.stop((), ()),
        seed=options.seed,
    )

    def told(done: int, total: int) -> None:
        if done and (done % options.batch == 0 or done == total):
            print(f"{directory}: {done} of {total} answered", flush=True, file=sys.stderr)

    with Thread("policy", setup=lambda: torch.set_num_threads(options.threads)) as thread:
        model = await thread.call("load", load_causal, directory)
        policy = HfPolicy(model, sampling=sampling, place=thread)
        finished = await respond(policy, prompts, Answering(batch=options.batch, progress=told))
    return [_answer(each, tokenizer) for each in finished]


def _answer(finished: Finish, tokenizer: HfTokenizer) -> Answer:
    tokens = finished.response.tokens.tolist()
    completion = tokenizer.decode(tokens)
    messages = _messages(finished.response.prompt)
    return Answer(str(messages[-1]["content"]), completion, len(tokens), finished.reason, judge(messages, completion))


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    value = prompt.columns["prompt"]
    if not isinstance(value, list):
        raise TypeError(f"expected chat messages in the column 'prompt', got {value!r}")
    return value


def report(options: argparse.Namespace, before: Sequence[Answer], after: Sequence[Answer]) -> Comparison:
    """Print the comparison and some answers, write ``results.json``, and return the comparison."""
    comparison = compare(_scores(before), _scores(after))
    low, high = comparison.gain - comparison.half_width, comparison.gain + comparison.half_width
    parts = {name: {"before": _part(before, name), "after": _part(after, name)} for name in (*WEIGHTS, "rude")}
    parts["tokens"] = {"before": _tokens(before), "after": _tokens(after)}
    print(f"{len(before)} held-out prompts, scores in [{LOWEST:g}, {HIGHEST:g}]")
    print(f"{'':10}  before   after")
    print(f"{'score':10}  {comparison.before:6.3f}  {comparison.after:6.3f}")
    for name, row in parts.items():
        print(f"{name:10}  {row['before']:6.2f}  {row['after']:6.2f}")
    print(f"paired difference {comparison.gain:+.3f}, 95% interval [{low:+.3f}, {high:+.3f}]")
    for old, new in list(zip(before, after, strict=True))[: options.samples]:
        print(f"\n> {old.question}")
        print(f"before ({old.parts.score:.2f}): {old.text}\nafter  ({new.parts.score:.2f}): {new.text}")
    document = {
        "settings": {name: str(value) for name, value in vars(options).items()},
        "comparison": asdict(comparison) | {"low": low, "high": high},
        "parts": parts,
        "answers": [
            {"question": old.question, "before": _plain(old), "after": _plain(new)}
            for old, new in zip(before, after, strict=True)
        ],
    }
    options.output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return comparison


def _scores(answered: Sequence[Answer]) -> FloatArray:
    return np.array([each.parts.score for each in answered], np.float32)


def _part(answered: Sequence[Answer], name: str) -> float:
    return float(np.mean([float(getattr(each.parts, name)) for each in answered]))


def _tokens(answered: Sequence[Answer]) -> float:
    return float(np.mean([each.tokens for each in answered]))


def _plain(answer: Answer) -> dict[str, object]:
    fields = asdict(answer)
    del fields["question"]
    return fields | {"score": answer.parts.score}


async def evaluate(options: argparse.Namespace) -> Comparison:
    """Answer with both models, one after the other, and report."""
    return report(options, await answers(options.before, options), await answers(options.after, options))


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; return 0, or 2 after printing what was wrong."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        anyio.run(evaluate, options)
    except OppoError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
