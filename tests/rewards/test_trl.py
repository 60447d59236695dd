"""Reward functions as TRL calls them: what they are given, what they log, and TRL's own, which run unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oppo import Drop, Overcommit, grpo
from oppo.errors import RewardError
from oppo.events import Finish, Prompt
from oppo.report.run_dir import RunDirectory
from oppo.rewards import FunctionReward, RewardInputs, Rewards, TrainerState, load_function, text_of
from oppo.testing import FakePolicy, FakeTrainer, run_virtual
from tests.kit.responses import ended
from tests.kit.virtual import virtually

CHAT = [{"role": "user", "content": "2+2?"}]


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


def finish(rollout: int, text: str, prompt: object = CHAT, version: int = 0, **columns: object) -> Finish:
    return ended(rollout, [*text.encode()], {"prompt": prompt, **columns}, version=version)


def scored(function: Callable[..., object], *finished: Finish, **options: Any) -> list[float | Drop]:
    return run_virtual(FunctionReward(function, decode, **options).finish, finished)


def accuracy(
    completions: list[list[dict[str, str]]],
    solution: list[str],
    log_extra: Callable[[str, list[str]], None] | None = None,
    **kwargs: object,
) -> list[float | None]:
    contents = [completion[0]["content"] for completion in completions]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("answer", [content[-1:] for content in contents])
    return [None if not gold else float(said[-1:] == gold) for said, gold in zip(contents, solution, strict=True)]


def think_format(completions: list[list[dict[str, str]]], **kwargs: object) -> list[float]:
    """Of the shape of ``trl.rewards.think_format_reward``."""
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content, re.DOTALL | re.MULTILINE) else 0.0 for content in contents]


class Overlong:
    """Of the shape of what ``trl.rewards.get_soft_overlong_punishment`` returns."""

    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: object) -> list[float]:
        return [-float(len(ids) > 3) for ids in completion_ids]


def test_functions_of_trls_shapes_run_unchanged() -> None:
    two = finish(0, "<think>\n</think>4", solution="4"), finish(1, "5", solution="4")
    assert scored(accuracy, *two) == [1.0, 0.0]
    assert scored(think_format, *two) == [1.0, 0.0]
    assert scored(Overlong(), *two) == [-1.0, 0.0]
    assert isinstance(scored(accuracy, finish(0, "4", solution=""), optional=True)[0], Drop)


def test_trls_own_run_unchanged() -> None:
    trl = pytest.importorskip("trl.rewards")
    two = finish(0, "<think>\n</think>4"), finish(1, "5")
    assert scored(trl.think_format_reward, *two) == [1.0, 0.0]
    assert scored(trl.get_soft_overlong_punishment(10, 5), *two) == [-1.0, 0.0]
    assert scored(trl.get_repetition_penalty_reward(1), finish(0, "aab")) == [pytest.approx(-1 / 3)]


def test_a_function_is_given_what_it_names_and_no_more() -> None:
    seen: dict[str, object] = {}

    def reward(
        prompts: object, completions: object, completion_ids: object, trainer_state: object, gold: object
    ) -> list[float]:
        seen.update(locals())
        return [0.0, 0.0]

    scored(
        reward,
        finish(0, "a", version=3, gold=1, other=2),
        finish(1, "b", "2+2", version=5, gold=2),
        inputs=RewardInputs(max_steps=9),
    )
    del seen["seen"]
    assert seen == {
        "prompts": [CHAT, "2+2"],
        "completions": [[{"role": "assistant", "content": "a"}], "b"],
        "completion_ids": [[97], [98]],
        "trainer_state": TrainerState(5, 9),
        "gold": [1, 2],
    }


def test_a_function_with_keywords_is_given_everything() -> None:
    def reward(**given: Any) -> list[float]:
        assert sorted(given) == [
            *("completion_ids", "completions", "gold", "log_extra", "log_metric", "prompts", "trainer_state")
        ]
        assert given["gold"] == [1, None]
        return [float(given["trainer_state"].global_step)] * 2

    assert scored(reward, finish(0, "a", version=4, gold=1), finish(1, "b")) == [4.0, 4.0]


def test_a_column_with_the_name_of_an_argument_that_is_asked_for_is_refused() -> None:
    def reward(completions: object, trainer_state: object) -> list[float]:
        raise AssertionError

    with pytest.raises(RewardError, match="column 'trainer_state' bears the name"):
        scored(reward, finish(0, "a", trainer_state=1))
    assert scored(lambda completions: [1.0], finish(0, "a", trainer_state=1)) == [1.0]


async def logging(completions: Sequence[object], log_metric: Any, log_extra: Any) -> list[float]:
    log_metric("share", float(len(completions)))
    log_extra("odd", [np.float32(0.5), object] if len(completions) == 2 else [1])
    return [float("nan") if text_of(each) == "bad" else 1.0 for each in completions]  # type: ignore[arg-type]


@virtually
async def test_what_is_logged_is_a_mean_over_completions_and_a_note_of_each() -> None:
    reward = FunctionReward(logging, decode, on_failure="drop")
    await reward.finish([finish(0, "a"), finish(1, "b")])
    await reward.finish([finish(2, "c")])
    assert reward.capabilities.samples() == {"share": [2.0, 2.0, 1.0]}
    assert reward.capabilities.samples() == {}
    assert reward.capabilities.extras() == {0: {"odd": 0.5}, 1: {"odd": "<class 'object'>"}, 2: {"odd": 1}}
    assert reward.capabilities.extras() == {}


def test_what_a_call_that_failed_has_logged_is_left_out() -> None:
    reward = FunctionReward(logging, decode, on_failure="drop")
    good, bad = run_virtual(reward.finish, [finish(0, "a"), finish(1, "bad")])
    assert good == 1.0
    assert isinstance(bad, Drop)
    assert reward.capabilities.samples() == {"share": [1.0]}
    assert reward.capabilities.extras() == {0: {"odd": 1}}


@pytest.mark.parametrize(
    ("logs", "words"),
    [
        (lambda extra, metric: extra("x", [1, 2]), r"log_extra\('x', values\) .* for each of 1 completions; got 2"),
        (lambda extra, metric: metric("x", float("nan")), "nan .* is no finite number"),
        (
            lambda extra, metric: metric("objective/kl", 1.0),
            r"log_metric\('objective/kl', value\) would replace a metric of the run.* such as 'own/objective/kl'",
        ),
        (lambda extra, metric: metric("queue/a->b/peak", 1.0), r"a metric of the run, 'queue/\{channel\}/peak'"),
        (lambda extra, metric: metric(3, 1.0), r"log_metric\(name, value\) takes a text as the name; got 3"),
    ],
)
def test_what_cannot_be_logged_is_a_failure_of_the_function(logs: Any, words: str) -> None:
    def reward(completions: object, log_extra: object, log_metric: object) -> list[float]:
        logs(log_extra, log_metric)
        return [1.0]

    with pytest.raises(RewardError, match=words):
        scored(reward, finish(0, "a"))


def test_functions_in_processes_log_too(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def f(completions, trainer_state, log_extra, log_metric):\n"
        "    log_metric('steps', trainer_state.max_steps)\n    log_extra('said', completions)\n    return [1.0]\n"
    )
    assert load_function(f"{file}:f") is not None

    async def main() -> None:
        async with FunctionReward(f"{file}:f", decode, process=True, inputs=RewardInputs(max_steps=7)) as reward:
            assert await reward.finish([finish(3, "a", "?")]) == [1.0]
            assert reward.capabilities.samples() == {"steps": [7.0]}
            assert reward.capabilities.extras() == {3: {"said": "a"}}

    import anyio

    anyio.run(main)


def test_a_run_writes_metrics_and_samples_with_what_was_logged(tmp_path: Path) -> None:
    def length(completions: Sequence[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_metric("characters", np.mean([len(each) for each in completions]))
        log_extra("length", [len(each) for each in completions])
        return [float(len(each)) for each in completions]

    def noted(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], log_extra: Any) -> list[float]:
        log_extra("secret", ["https://me:pw@host/x"] * len(completions))
        return [0.0] * len(completions)

    def text(tokens: Sequence[int]) -> str:
        return "x" * len(tokens)

    graph = grpo(
        policy=FakePolicy(length=lambda prompt: 2 + prompt.rollout),
        reward=Rewards({"length": (1.0, length), "noted": (1.0, noted)}, text),
        trainer=FakeTrainer(),
        admission=Overcommit(batch=1),
        samples=2,
    )
    prompts = [Prompt(at, at, np.array([1], np.int32), group=at) for at in range(3)]

    async def main() -> list[float]:
        with RunDirectory(tmp_path / "run", decode=text, threaded=False) as directory:
            async with graph.open(prompts, observers=[directory]) as run:
                return [report.metrics["characters"] async for report in run.steps(2)]

    assert run_virtual(main) == [2.5, 4.5]
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [each["extra"] for each in lines] == [
        {"length": length, "secret": "https://***@host/x"} for length in (2, 3, 4, 5)
    ]
