"""``python -m benchmarks.vllm.offline DIRECTORY LENGTHS ROUNDS``: vLLM's offline ``LLM`` on a batch, tokens a second.

All requests are given to one call of ``LLM.generate``, which returns when the last has ended. ``LENGTHS`` is a JSON
list; the answer is one on standard output. Everything else goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.vllm.decoding import length_of, prompts_of
from benchmarks.vllm.models import ARGUMENTS
from oppo import observe
from oppo.vllm.arguments import ALWAYS, ON_CPU


def main(directory: str, lengths: str, rounds: str) -> None:
    """Print the speed of each round after the first."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - it logs to standard output when imported
    from vllm.platforms import current_platform  # noqa: PLC0415

    wanted: list[int] = json.loads(lengths)
    vocabulary = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = [prompt for prompt, _ in zip(prompts_of(wanted, vocabulary), wanted, strict=False)]
    llm = LLM(model=directory, **ALWAYS, **(ON_CPU if current_platform.is_cpu() else {}), **ARGUMENTS)
    speeds = []
    for _ in range(int(rounds) + 1):
        start = observe.now()
        made = llm.generate(
            [{"prompt_token_ids": prompt.tokens.tolist()} for prompt in prompts],
            [
                SamplingParams(
                    max_tokens=length_of(prompt), seed=prompt.admission, logprobs=0, ignore_eos=True, detokenize=False
                )
                for prompt in prompts
            ],
            use_tqdm=False,
        )
        speeds.append(sum(len(each.outputs[0].token_ids) for each in made) / (observe.now() - start))
    answers.write(json.dumps(speeds[1:]) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
