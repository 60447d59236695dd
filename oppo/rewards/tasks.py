"""Verifiable tasks: checkers of answers as the reward, and the prompts that reasoning-gym makes.

Each is an argument of settings by its name (:data:`CHECKERS`), and a reward function of a program. ``math`` needs the
extra ``math``, reasoning-gym's tasks need ``reasoning-gym``: ``pip install 'oppo[math]'``.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, SupportsFloat, TypeAlias

from annotated_types import Ge, Lt

from oppo.atomic_files import temporary
from oppo.declared import require_whole, validated
from oppo.errors import DataError, one_line, shown
from oppo.events import Drop
from oppo.libraries import require
from oppo.models import RewardFunction
from oppo.rewards.function import Message, text_of

Completion: TypeAlias = str | Sequence[Message]

LIBRARY: Final = "reasoning-gym"
"""The name of the library, and of its verifiers as a reward in settings."""

INSTRUCTION: Final = (
    "Answer the question. Put your final answer, and nothing else, between <answer> and </answer> tags."
)
"""The system message of the chat form of a prompt."""

APART: Final = 1_000_000
"""reasoning-gym makes entry i of seed s from s + i alone: seeds are that far apart, so that none repeats another's."""


def task_rows(task: str, *, size: int = 1000, seed: int = 0, **config: object) -> list[dict[str, object]]:
    """Return the prompts of a task and the columns that its verifier needs, the same for the same arguments.

    The columns of a row are ``prompt``, the question as text; ``chat``, the question as chat messages, with a request
    to put the answer between ``<answer>`` tags; ``question``, ``answer`` and ``metadata``, for :func:`verify`.

    Args:
        task: a dataset's name in reasoning-gym.
        size: how many, at most a million.
        seed: two seeds have no entry in common but by chance.
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
    completions: Sequence[Completion],
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


NUMBER: Final = r"-?[0-9.,]+"

TAIL: Final = 300
"""Characters at the end of a response in which GSM8K's strict rule looks for an answer."""


def gsm8k_strict(completions: Sequence[Completion], answer: Sequence[object]) -> list[float]:
    """Return 1 for each response whose last ``#### NUMBER`` is the answer, commas left out, character by character.

    Example:
        >>> gsm8k_strict(["#### 1,072", "it is 1072"], ["1072", "1072"])
        [1.0, 0.0]
    """
    return [
        float(_last(rf"#### ({NUMBER})", text[-TAIL:]) == str(right))
        for text, right in zip(map(text_of, completions), answer, strict=True)
    ]


def gsm8k_flexible(completions: Sequence[Completion], answer: Sequence[object]) -> list[float]:
    """Return 1 for each response whose last number is the answer, wherever it stands.

    Example:
        >>> gsm8k_flexible(["it is 1,072.", "#### 7"], ["1072", "1072"])
        [1.0, 0.0]
    """
    return [
        float(_last(rf"({NUMBER})", text).rstrip(".") == str(right))
        for text, right in zip(map(text_of, completions), answer, strict=True)
    ]


def _last(pattern: str, text: str) -> str:
    found = [each for each in re.findall(pattern, text) if re.search(r"\d", each)]
    return found[-1].replace(",", "") if found else ""


SECONDS: Final = 5
"""That math-verify has to parse an answer, and again to compare it."""

_DELIMITERS: Final = ("$", r"\(", r"\[", r"\boxed")


def math_equal(completions: Sequence[Completion], answer: Sequence[object]) -> list[float | Drop]:
    r"""Return 1 for each response whose answer equals the right one as a mathematical expression, by math-verify.

    Call it in a process (``process=True``): it stops there after :data:`SECONDS`, and such an answer is wrong. By
    signals it can do so in a main thread alone; in others nothing stops it.

    Args:
        completions: the answer is LaTeX, best in a ``\boxed``, or the last number.
        answer: a number or LaTeX. A rollout whose right answer cannot be parsed is dropped.
    """
    require("math", "the checker of mathematical answers", module="math_verify", error=DataError)
    from math_verify import parse, verify  # noqa: PLC0415 - an extra that takes a second to import

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each answer that takes too long
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    scores: list[float | Drop] = []
    for text, right in zip(map(text_of, completions), map(str, answer), strict=True):
        marked = any(each in right for each in _DELIMITERS)  # a bare 2x+1 would be read as the number 2
        gold = parse(right if marked else rf"\boxed{{{right}}}", parsing_timeout=seconds)
        if not gold:
            scores.append(Drop.because(f"its right answer {shown(right)} is no expression that math-verify parses"))
            continue
        said = parse(text, parsing_timeout=seconds)
        scores.append(float(verify(gold, said, float_rounding=6, timeout_seconds=seconds)))
    return scores


_BLOCK: Final = re.compile(
    r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)

# Limits are set in the process itself: a function between fork and exec may deadlock in a program with threads.
_LIMITED: Final = """
import resource, runpy, signal, sys
file, seconds, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, size), (resource.RLIMIT_FSIZE, 1 << 20)):
    try:
        resource.setrlimit(kind, (limit, limit))
    except (ValueError, OSError):
        pass
signal.alarm(4 * seconds)
sys.argv = [file]
runpy.run_path(file, run_name="__main__")
"""


@dataclass(frozen=True)
@validated()
class CodeChecker:
    r"""Runs tests against the Python in a response: 1 if all pass, else 0.

    The code is the last block between lines of three backticks; without one the score is 0. Each test runs in a process
    of its own, in an empty folder, without this program's input and environment variables, within limits of time,
    memory and output. **That is no sandbox**: the code may read and write what the user may, and use the network. Run
    it in a container without secrets.

    The metric ``code/tests_passed`` is the mean share of passed tests.

    Args:
        seconds: of CPU time for a test; four times as many by the clock.
        megabytes: of memory, on Linux.

    Example:
        >>> CodeChecker(seconds=5)(["```python\ndef f(): return 2\n```"], ["assert f() == 2"])
        [1.0]
    """

    seconds: Annotated[int, Ge(1), Lt(2**29)] = 10
    megabytes: Annotated[int, Ge(64), Lt(2**40)] = 1024

    @property
    def __name__(self) -> str:
        return "code"

    def __call__(
        self,
        completions: Sequence[Completion],
        tests: Sequence[object],
        log_metric: Callable[[str, SupportsFloat], None] | None = None,
    ) -> list[float]:
        """Return the scores.

        Args:
            completions: with the code.
            tests: of each completion: Python that fails by an exception, ``{"input": ..., "output": ...}``, the text of
                standard input and the expected output, or a list of these.
            log_metric: logs the share of tests that passed.
        """
        scores = []
        for text, given in zip(map(text_of, completions), tests, strict=True):
            todo = given if isinstance(given, list | tuple) else [given]
            if not todo:
                raise ValueError("expected at least one test in the column 'tests', got none")
            blocks = _BLOCK.findall(text)
            passed = [bool(blocks) and self._passes(blocks[-1], _test(test)) for test in todo]
            if log_metric is not None:
                log_metric("code/tests_passed", sum(passed) / len(passed))
            scores.append(float(all(passed)))
        return scores

    def _passes(self, code: str, test: str | tuple[str, str]) -> bool:
        nonce = secrets.token_hex(16)  # a program that exits with success before the last test does not write it
        if isinstance(test, str):
            source, stdin, expected = f"{code}\n{test}\nprint('\\n{nonce}')\n", "", None
        else:
            source, (stdin, expected) = code, test
        with temporary("code") as folder:
            ended, said = self._run(source, stdin, folder)
        if not ended:
            return False
        return said.rstrip().endswith(nonce) if expected is None else _lines(said) == _lines(expected)

    def _run(self, source: str, stdin: str, folder: Path) -> tuple[bool, str]:
        file, read, written = (folder / name for name in ("main.py", "input", "output"))
        file.write_text(source, encoding="utf-8", errors="replace")
        read.write_text(stdin, encoding="utf-8", errors="replace")
        limits = [str(self.seconds), str(self.megabytes << 20)]
        with read.open("rb") as given, written.open("wb") as said:
            child = subprocess.Popen(  # noqa: S603 - running code is its purpose
                [sys.executable, "-I", "-c", _LIMITED, str(file), *limits],
                stdin=given,
                stdout=said,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": str(folder), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                code = child.wait(4 * self.seconds + SECONDS)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                with suppress(ProcessLookupError):  # its child processes, too
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return code == 0, written.read_text(encoding="utf-8", errors="replace")


def _test(test: object) -> str | tuple[str, str]:
    if isinstance(test, str):
        return test
    if isinstance(test, Mapping) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
        return test["input"], test["output"]
    raise ValueError(
        "a test in the column 'tests' is Python as text, or {'input': text, 'output': text}, or a list of these; got "
        f"{shown(test)}"
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@dataclass(frozen=True, slots=True)
class Checker:
    """A checker as settings name it.

    Attributes:
        functions: weight and reward function by name; one without a name is the reward.
        extra: that it needs; empty: none.
        module: of the extra.
        process: whether it must be called in processes.
        each: whether it is called for each rollout alone, and several calls overlap.
        timeout: seconds of a call; ``None``: no limit.
    """

    functions: Mapping[str, tuple[float, RewardFunction]]
    extra: str = ""
    module: str = ""
    process: bool = False
    each: bool = False
    timeout: float | None = None


CHECKERS: Final[Mapping[str, Checker]] = {
    LIBRARY: Checker({"": (1.0, verify)}, LIBRARY, "reasoning_gym"),
    "math": Checker({"": (1.0, math_equal)}, "math", "math_verify", process=True, each=True, timeout=60.0),
    "gsm8k": Checker({"strict": (1.0, gsm8k_strict), "flexible": (0.0, gsm8k_flexible)}),
    "code": Checker({"": (1.0, CodeChecker())}, each=True),
}
"""Sources of rewards that are no file and no model, by name."""
