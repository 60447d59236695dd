"""Verifiable tasks: the prompts that reasoning-gym makes, and its verifiers as the reward.

It needs the extra ``reasoning-gym``: ``pip install 'oppo[reasoning-gym]'``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from oppo.declared import require_whole
from oppo.errors import DataError, one_line
from oppo.libraries import require
from oppo.rewards.function import Message, text_of

LIBRARY: Final = "reasoning-gym"
"""Its name, and in settings that of its verifiers as a reward."""

INSTRUCTION: Final = (
    "Answer the question. Put your final answer, and nothing else, between <answer> and </answer> tags."
)
"""The system message of the chat form of a prompt."""

APART: Final = 1_000_000
"""reasoning-gym makes entry i of seed s from s + i alone: seeds are that far apart, so that none repeats another's."""


def task_rows(task: str, *, size: int = 1000, seed: int = 0, **config: object) -> list[dict[str, object]]:
    """Return the prompts of a task with what its verifier needs, the same for the same arguments.

    The columns of a row are ``prompt``, the question as text; ``chat``, the question as chat messages, with a request
    to put the answer between ``<answer>`` tags; ``question``, ``answer`` and ``metadata``, for :func:`verify`.

    Args:
        task: a dataset's name in reasoning-gym.
        size: how many, at most a million.
        seed: of what is random in them; two seeds have no entry in common but by chance.
        config: fields of the dataset's config, such as ``max_digits=2``.

    Raises:
        DataError: reasoning-gym is not installed, it has no such task, or the task refuses its config.
    """
    require_whole("size", size, 1, error=DataError)
    require_whole("seed", seed, 0, error=DataError)
    if size > APART:
        raise DataError(f"a task gives at most {APART} prompts for a seed, not {size}: take several seeds")
    library = _library()
    name = f"{LIBRARY}:{task}"
    known: list[str] = sorted(library.factory.DATASETS)
    if task not in known:
        near = difflib.get_close_matches(task, known, n=3, cutoff=0.4)
        hint = f"near it are {', '.join(near)}" if near else f"there are {len(known)}, from {known[0]} to {known[-1]}"
        raise DataError(f"there is no task {name}; {hint}")
    try:
        dataset = library.create_dataset(task, size=size, seed=APART * seed, **config)
        entries = [dataset[number] for number in range(size)]
    except Exception as error:  # any kind: a task checks its config by assertions, and is a program of its own
        raise DataError(f"{name} with {dict(config)}: {one_line(error)}") from error
    return [_row(entry) for entry in entries]


def verify(
    prompts: Sequence[object],
    completions: Sequence[str | Sequence[Message]],
    question: Sequence[str],
    answer: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
) -> list[float]:
    """Return the score of each completion, 0 to 1, by the verifier of its task: a reward function.

    The answer is the text of the last ``<answer>`` tags, or the whole completion where there are none.
    """
    del prompts
    extract = _library().utils.extract_answer
    scores = []
    for completion, asked, right, facts in zip(map(text_of, completions), question, answer, metadata, strict=True):
        found = extract(completion)
        entry = {"question": asked, "answer": right, "metadata": facts}
        scores.append(float(_verifier(facts["source_dataset"])(completion.strip() if found is None else found, entry)))
    return scores


@cache
def _verifier(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    score: Callable[[str, Mapping[str, Any]], float] = _library().get_score_answer_fn(task)
    return score


def _row(entry: Mapping[str, Any]) -> dict[str, object]:
    question = str(entry["question"])
    chat = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    return {
        "prompt": question,
        "chat": chat,
        "question": question,
        "answer": entry["answer"],
        "metadata": entry["metadata"],
    }


def _library() -> Any:
    require(LIBRARY, "a task", module="reasoning_gym", error=DataError)
    import reasoning_gym  # noqa: PLC0415 - an extra that takes seconds to import
    import reasoning_gym.factory  # noqa: PLC0415
    import reasoning_gym.utils  # noqa: PLC0415

    return reasoning_gym
