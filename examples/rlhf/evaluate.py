"""Compare the models of the three stages on held-out prompts: ``python -m examples.rlhf.evaluate``.

Each answers with its most likely tokens. TRL's reward model scores the answers, and so does the rule that its pairs
were made by, which nothing was trained on. ``results.json`` has all of it, with what TRL measured on held-out rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import oppo
from benchmarks.harness import processor
from examples.rlhf.samples import messages
from examples.smollm2.reward import judge
from oppo.evaluation import half_width
from oppo.hf import HfTokenizer, load_tokenizer

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, its scores by the rule and by the reward model, its length, and whether it ended by itself."""

    question: str
    text: str
    rule: float
    reward: float
    tokens: int
    ended: bool


def answers(config: Path, overrides: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Return the answers to the prompts by the policy of a settings file, or of a run's directory."""
    found = oppo.evaluate(config, overrides, eval_prompts=rows).answers
    file = config / "config.toml" if config.is_dir() else config
    tokenizer = HfTokenizer(load_tokenizer(oppo.load_settings(file, overrides).models.policy))
    made = []
    for each in found:
        ids, asked = each.finish.response.tokens.tolist(), messages(each.finish)
        text, ended = tokenizer.decode(ids), each.finish.reason == "eos"
        rule = judge(asked, text).score
        made.append(Answer(asked[-1]["content"], text, rule, each.score, len(ids), ended))
    return made


def wins(before: Sequence[Answer], after: Sequence[Answer], by: str) -> tuple[float, float]:
    """Return the share of prompts whose later answer scores higher, a tie as a half, and half of its 95% interval."""
    signs = [np.sign(getattr(b, by) - getattr(a, by)) for a, b in zip(before, after, strict=True)]
    won = [0.5 + 0.5 * float(each) for each in signs]
    return float(np.mean(won)), half_width(won)


def of_trl(folder: Path, metric: str) -> tuple[float, float]:
    """Return what TRL measured on its held-out rows before its first update and after its last."""
    newest = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda each: each.stat().st_mtime)
    found = [each[metric] for each in json.loads(newest.read_text(encoding="utf-8"))["log_history"] if metric in each]
    return found[0], found[-1]


def table(stages: Mapping[str, Sequence[Answer]]) -> Iterator[str]:
    yield "| model | rule | reward model | ended | tokens | wins by the rule | wins by the reward model |"
    yield "|---|---|---|---|---|---|---|"
    before: Sequence[Answer] | None = None
    for name, each in stages.items():
        means = [float(np.mean([getattr(answer, key) for answer in each])) for key in ("rule", "reward", "tokens")]
        ended = np.mean([answer.ended for answer in each])
        row = [name, f"{means[0]:.2f}", f"{means[1]:+.2f}", f"{ended:.0%}", f"{means[2]:.1f}"]
        for by in ("rule", "reward"):
            rate, width = (np.nan, np.nan) if before is None else wins(before, each, by)
            row.append("" if before is None else f"{rate:.0%} ± {width:.0%}")
        yield f"| {' | '.join(row)} |"
        before = each


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write the file; return 0, or 2 after printing what was wrong."""
    parser = argparse.ArgumentParser(description="Compare the models of the three stages on held-out prompts.")
    parser.add_argument("--folder", type=Path, default=HERE, help="with what the stages wrote (default: %(default)s)")
    parser.add_argument("--count", type=int, default=64, help="held-out prompts")
    options = parser.parse_args(arguments)
    folder, run = options.folder, options.folder / "runs" / "ppo"
    try:
        lines = (folder / "data" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines[: options.count]]
        file = run / "config.toml"
        stages = {
            "base": answers(file, ['models.adapter=""'], rows),
            "after fine-tuning": answers(file, [], rows),
            "after PPO": answers(run, [], rows),
        }
        trl = {
            "loss of the demonstrations": of_trl(folder / "sft", "eval_loss"),
            "accuracy of the reward model": of_trl(folder / "reward", "eval_accuracy"),
        }
    except (oppo.OppoError, OSError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    shown = list(table(stages))
    print(*shown, sep="\n")
    for name, (before, after) in trl.items():
        print(f"{name} on held-out rows, before and after: {before:.3f}, {after:.3f}")
    answered = {name: [asdict(answer) for answer in each] for name, each in stages.items()}
    document = {"processor": processor(), "table": shown, "trl": trl, "answers": answered}
    file = folder / "results.json"
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
