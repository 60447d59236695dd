"""Whatever a user's function does is its failure, in words of bounded length that say where it arose."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from oppo.environments import EnvironmentFailure
from oppo.environments.classes import CalledReset
from oppo.errors import ConfigError, RewardError, worded
from oppo.events import Drop, Finish
from oppo.models import Shared
from oppo.rewards import FunctionReward, load_function as load_reward_function
from oppo.testing.virtual_time import run_virtual
from oppo.user_code import UserFunction, load_function, load_object, spec_of
from tests.kit.responses import ended
from tests.kit.virtual import virtually
from tests.rewards.test_function import TWO, decode, module


class UnspeakableError(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise OSError("no words")


class UnspeakableBaseError(Exception):
    """Cannot even be printed, and what it raises instead is no Exception."""

    def __str__(self) -> str:
        raise OwnError("no words")


class Unfloatable:
    """Says that it is a number, and is none."""

    def __float__(self) -> float:
        raise KeyError("gold")

    def __repr__(self) -> str:
        raise OSError("no words")


def replaced(finished: Finish, columns: dict[str, object]) -> Finish:
    return ended(finished.rollout, finished.response.tokens.tolist(), columns)


def raising(error: BaseException) -> Callable[..., object]:
    def reward(prompts: list[str], completions: list[str]) -> object:
        raise error

    return reward


def returning(make: Callable[[], object]) -> Callable[..., object]:
    def reward(prompts: list[str], completions: list[str]) -> object:
        return make()

    return reward


def late() -> Iterator[float]:
    yield 1.0
    raise ValueError("in the second")


def endless() -> Iterator[float]:
    while True:
        yield 1.0


async def hedged(prompts: list[str], completions: list[str]) -> list[float]:
    """Ask twice, as against a slow service, and give one of the two up."""
    task = asyncio.ensure_future(asyncio.sleep(10))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task)
    return [0.0 for _ in completions]


async def impatient(prompts: list[str], completions: list[str]) -> list[float]:
    sys.exit(0)


async def interrupting(prompts: list[str], completions: list[str]) -> list[float]:
    raise KeyboardInterrupt


async def suicidal(prompts: list[str], completions: list[str]) -> list[float]:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(10)
    return [0.0 for _ in completions]


async def suicidal_at_its_end(prompts: list[str], completions: list[str]) -> list[float]:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return [0.0 for _ in completions]


async def ungraded(prompts: list[str], completions: list[str]) -> list[float]:
    pytest.fail("the grader gives up")


class OwnError(BaseException):
    """Of somebody who derived it from BaseException."""


class Hostile:
    """Raises what is no Exception when it is looked at."""

    @property
    def dtype(self) -> object:
        raise OwnError("do not look")


MISBEHAVIOUR = [
    pytest.param(raising(GeneratorExit()), "raised GeneratorExit at ", id="generator exit"),
    pytest.param(raising(OwnError("mine")), "raised OwnError: mine at ", id="own base exception"),
    pytest.param(raising(KeyboardInterrupt()), "raised KeyboardInterrupt at ", id="keyboard interrupt in a thread"),
    pytest.param(interrupting, "raised KeyboardInterrupt at ", id="keyboard interrupt on the loop"),
    pytest.param(lambda prompts, completions: pytest.fail("no"), "raised Failed: no at ", id="pytest.fail"),
    pytest.param(ungraded, "raised Failed: the grader gives up at ", id="pytest.fail on the loop"),
    pytest.param(suicidal, "raised CancelledError at ", id="cancels its own task"),
    pytest.param(suicidal_at_its_end, "raised CancelledError", id="cancels its own task at its end"),
    pytest.param(returning(lambda: [Hostile(), 0]), "raised OwnError: do not look at ", id="hostile result"),
    pytest.param(returning(lambda: [Drop.because(None), 0]), "the reason of a Drop is a text; got None", id="drop"),  # type: ignore[arg-type] # that is the fault
    pytest.param(raising(SystemExit(0)), "raised SystemExit: 0 at ", id="exit"),
    pytest.param(impatient, "raised SystemExit: 0 at ", id="exit on the loop"),
    pytest.param(hedged, "raised CancelledError at ", id="cancelled"),
    pytest.param(raising(UnspeakableError()), "UnspeakableError: (OSError in its __str__) at ", id="unspeakable"),
    pytest.param(raising(UnspeakableBaseError()), "Error: (OwnError in its __str__) at ", id="unspeakable base"),
    pytest.param(raising(ValueError("x" * 3_000_000)), "x... (3000000 characters) at ", id="three megabytes"),
    pytest.param(raising(ValueError("\ud800")), "raised ValueError: \\ud800 at ", id="lone surrogate"),
    pytest.param(
        raising(ExceptionGroup("tasks", [KeyError("gold"), OSError()])), "raised KeyError: 'gold', and 1 ", id="group"
    ),
    pytest.param(returning(late), "raised ValueError: in the second at ", id="late"),
    pytest.param(returning(endless), "must return 2 numbers, one for each completion, in a list; got ", id="endless"),
    pytest.param(returning(lambda: [10**400, 0]), "for rollout 3 it returned 1000", id="too large"),
    pytest.param(returning(lambda: [10**5000, 0]), "returned (ValueError in its __repr__) (int)", id="far too large"),
    pytest.param(returning(lambda: [Unfloatable(), 0]), "it returned (OSError in its __repr__) (Unf", id="no float"),
    pytest.param(returning(lambda: [1 + 2j, 0]), "it returned (1+2j) (complex)", id="complex"),
    pytest.param(returning(lambda: np.array([1, 2], np.complex64)), "it returned np.complex64(1", id="complex array"),
    pytest.param(returning(lambda: {1.0, 2.0}), "in a list; got {1.0, 2.0} (set)", id="set"),
    pytest.param(returning({1.0: 1, 2.0: 2}.keys), "got dict_keys([1.0, 2.0]) (dict_keys)", id="keys"),
]  # fmt: skip
"""Misbehaviour of a function, and the error that it becomes."""


@pytest.mark.parametrize(("function", "message"), MISBEHAVIOUR)
async def test_whatever_a_function_does_is_its_failure_which_can_be_dropped_and_tried_again(
    function: Callable[..., object], message: str, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RewardError) as caught:
        await FunctionReward(function, decode).finish(TWO)
    told = str(caught.value)
    assert message in told
    assert len(told) < 3000
    assert told.encode("utf-8")
    dropped = await FunctionReward(function, decode, on_failure="drop").finish(TWO)
    assert [type(each) for each in dropped] == [Drop, Drop]
    monkeypatch.setattr("oppo.rewards.function.PAUSES", (0.0,))
    with pytest.raises(RewardError):
        await FunctionReward(function, decode, on_failure="retry").finish(TWO)
    assert len(messages) == 1
    assert message in messages[0]
    assert messages[0].endswith("; attempt 2 of 2 follows in 0 s")


async def test_the_place_of_an_error_is_a_line_of_the_users_file(tmp_path: Path) -> None:
    source = "import json\ndef f(prompts, completions):\n    return json.loads('{')\n"
    spec = f"{module(tmp_path, source)}:f"
    with pytest.raises(
        RewardError, match=rf"'f' raised JSONDecodeError: .* at {tmp_path}/mine.py:3 in f \(rollouts 3, 8\)"
    ) as caught:
        await FunctionReward(spec, decode).finish(TWO)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("text", ["import sys\nsys.exit(0)\n", "raise __import__('asyncio').CancelledError\n"])
def test_a_file_that_ends_the_program_when_it_is_loaded_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        RewardError, match=r"mine.py cannot be run: (SystemExit: 0|CancelledError) at .*mine.py:\d in <m"
    ):
        load_reward_function(f"{module(tmp_path, text)}:f")


def source(folder: Path, text: str, name: str = "mine.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    text = "from dataclasses import dataclass\n@dataclass\nclass Kind:\n    of: str = {!r}\n"
    one, other = (source(tmp_path / name, text.format(name)) for name in ("a", "b"))
    first, second = (load_function(f"{file}:Kind", ConfigError) for file in (one, other))
    assert (vars(first())["of"], vars(second())["of"]) == ("a", "b")
    assert pickle.loads(pickle.dumps(first())) == first()
    assert pickle.loads(pickle.dumps(second())) == second()


@pytest.mark.parametrize("neighbour", ["neighbour.py", "neighbour/__init__.py"])
async def test_a_file_imports_its_neighbours_when_it_is_run_and_when_it_is_called_in_any_process(
    tmp_path: Path, neighbour: str
) -> None:
    text = "from neighbour import N\ndef f(prompts, completions):\n    from {0} import late\n    return late(N)\n"
    for number, name in enumerate(("alpha", "beta")):
        source(tmp_path / name, text.format(f"late_{name}"))
        source((tmp_path / name / neighbour).parent, f"N = {number}\n", Path(neighbour).name)
        source(tmp_path / name, "", "__main__.py")  # is no neighbour: the program's stays
        source(tmp_path / name, "def late(number): return [number, number]\n", f"late_{name}.py")
    with contextlib.ExitStack() as stack:
        rewards = {
            (name, process): stack.enter_context(
                FunctionReward(f"{tmp_path / name / 'mine.py'}:f", decode, process=process)
            )
            for process in (False, True)
            for name in ("alpha", "beta")
        }
        for (name, _), reward in rewards.items():
            assert await reward.finish(TWO) == [float(name == "beta")] * 2
    assert "__main__" in sys.modules


def test_a_file_is_run_once_however_many_of_its_names_are_loaded(tmp_path: Path) -> None:
    file = source(tmp_path, "seen = []\ndef note(what): seen.append(what)\ndef notes(): return list(seen)\n")
    (tmp_path / "link.py").symlink_to(file)
    load_function(f"{file}:note", ConfigError)("heard")
    assert load_function(f"{tmp_path / 'link.py'}:notes", ConfigError)() == ["heard"]
    assert list(tmp_path.glob("__pycache__")) == []


def test_a_file_that_has_changed_is_run_again(tmp_path: Path) -> None:
    for number in range(3):
        file = source(tmp_path, f"def number(): return {number}\n")
        assert load_function(f"{file}:number", ConfigError)() == number


def test_a_function_of_a_file_has_a_name_that_finds_it_again(tmp_path: Path) -> None:
    file = source(tmp_path, "def f(): ...\ng = lambda: 0\nparts = {'f': f, 'g': g}\n")
    parts = load_object(f"{file}:parts", ConfigError)
    assert isinstance(parts, dict)
    assert load_object(spec_of(parts["f"]), ConfigError) is parts["f"]
    assert [spec_of(each) for each in (parts["g"], print, 7)] == ["", "", ""]


async def test_what_a_function_does_to_its_columns_stays_with_it() -> None:
    column = {"tests": [1, 2]}

    def reward(prompts: list[object], completions: list[str], answer: list[dict[str, list[int]]]) -> list[float]:
        return [float(each["tests"].pop()) for each in answer]

    finished = [replaced(each, {"answer": column}) for each in TWO]
    assert await FunctionReward(reward, decode).finish(finished) == [2.0, 2.0]
    assert column == {"tests": [1, 2]}


def test_what_is_asked_for_alone_is_asked_for_at_once() -> None:
    async def reward(prompts: list[str], completions: list[str]) -> list[float]:
        await anyio.sleep(5)
        return [float("nan") for _ in completions]

    async def seconds() -> float:
        dropped = await FunctionReward(reward, decode, on_failure="drop").finish(TWO)
        assert [type(each) for each in dropped] == [Drop, Drop]
        return anyio.current_time()

    assert run_virtual(seconds) == 10.0, "one wait for all together, and one for each alone"


async def holding_out(prompts: list[str], completions: list[str]) -> list[float]:
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(3600)


async def late_answer(prompts: list[str], completions: list[str]) -> list[float]:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        return [1.0 for _ in completions]
    raise AssertionError


@pytest.mark.parametrize("function", [holding_out, late_answer])
async def test_an_async_function_that_catches_its_cancellation_has_failed_at_its_timeout(
    function: Callable[..., object],
) -> None:
    for calls in range(2):
        with pytest.raises(RewardError, match=rf"reward function '{function.__name__}' took longer than 0.05 s"):
            await FunctionReward(function, decode, timeout=0.05).finish(TWO)
        dropped = await FunctionReward(function, decode, timeout=0.05, on_failure="drop").finish(TWO)
        assert [type(each) for each in dropped] == [Drop, Drop], calls
    gc.collect()  # which would not end either if it found what was dropped


async def test_an_async_function_that_blocks_the_loop_has_failed() -> None:
    async def blocking(prompts: list[str], completions: list[str]) -> list[float]:
        time.sleep(0.05)  # noqa: ASYNC251 - that is the fault
        return [1.0 for _ in completions]

    words = (
        r"'blocking' took longer than 0\.01 s, and the event loop was blocked: let what blocks it await what takes long"
    )
    with pytest.raises(RewardError, match=words):
        await FunctionReward(blocking, decode, timeout=0.01).finish(TWO)


async def test_an_async_function_is_not_called_once_its_run_is_cancelled() -> None:
    called = list[int]()

    async def begin() -> str:
        called.append(1)
        return "begun"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(CalledReset(UserFunction.of(begin, None, EnvironmentFailure)).answer, {}, "here")
        tasks.cancel_scope.cancel()
    assert called == []


async def test_a_function_may_give_up_waiting_as_often_as_it_likes() -> None:
    async def polling(prompts: list[str], completions: list[str]) -> list[float]:
        for _ in range(150):
            with anyio.move_on_after(0.0001):
                await anyio.sleep(60)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0001):
                    await asyncio.sleep(60)
        return [1.0 for _ in completions]

    assert await FunctionReward(polling, decode, timeout=60.0).finish(TWO) == [1.0, 1.0]


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def reward(prompts: list[str], completions: list[str]) -> list[float]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 0)
        await anyio.sleep(3600)
        return [1.0 for _ in completions]

    with anyio.move_on_after(0.01) as scope:
        await FunctionReward(reward, decode, timeout=60.0, on_failure="drop").finish(TWO)
    assert scope.cancelled_caught
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


def test_a_function_that_waits_to_be_called_again_is_at_work() -> None:
    async def reward(prompts: list[str], completions: list[str]) -> list[float]:
        raise ConnectionError("the judge is away")

    async def main() -> str:
        judge = FunctionReward(reward, decode, on_failure="retry")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(judge.finish, TWO)
            await anyio.sleep(20)
            at_work = judge.capabilities.at_work()
            tasks.cancel_scope.cancel()
        assert not judge.capabilities.at_work()
        return at_work

    assert run_virtual(main) == "reward function 'reward', which failed and is called again after 25 s"


def wait_for(mark: Path) -> None:
    while not mark.exists():
        threading.Event().wait(0.02)


APART = """
import os, re
def pid(prompts, completions): return [float(os.getpid())] * len(completions)
def gone(prompts, completions): os._exit(0)
def leaving(prompts, completions): raise SystemExit(0)
def wrong(prompts, completions): return [completions[0]["x"]]
def locked(prompts, completions):
    open(prompts[0], "w").close()
    re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter lock for years
async def waiting(prompts, completions): ...
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "reward function 'gone' was lost: the process of 'gone' ended with exit code 0 (rollouts 3, 8)"),
        ("leaving", "reward function 'leaving' raised SystemExit: 0 at "),
        ("wrong", "mine.py:6 in wrong (rollouts 3, 8)"),
    ],
)
async def test_a_function_in_a_process_of_its_own_may_do_the_same(tmp_path: Path, name: str, message: str) -> None:
    with FunctionReward(f"{module(tmp_path, APART)}:{name}", decode, process=True) as reward:
        for _ in range(2):
            with pytest.raises(RewardError) as caught:
                await reward.finish(TWO)
            assert message in str(caught.value)


SLOW_TO_START = "import time\ntime.sleep(2.5)\n" + APART


async def test_the_timeout_of_a_call_in_a_process_leaves_its_start_out(tmp_path: Path) -> None:
    spec = f"{module(tmp_path, SLOW_TO_START)}:pid"
    with FunctionReward(spec, decode, process=True, timeout=2.0) as reward:
        assert len(await reward.finish(TWO)) == 2


async def test_a_process_that_does_not_start_has_failed_at_a_limit_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oppo.user_code.START_SECONDS", 0.2)
    spec, words = f"{module(tmp_path, SLOW_TO_START)}:pid", r"'pid' had no process that started within 0\.2 s"
    with FunctionReward(spec, decode, process=True) as reward, pytest.raises(RewardError, match=words):
        await reward.finish(TWO)


async def test_a_file_that_cannot_be_run_in_a_process_is_named(tmp_path: Path) -> None:
    file = module(tmp_path, APART)
    with FunctionReward(f"{file}:pid", decode, process=True, on_failure="drop") as reward:
        module(tmp_path, "raise KeyError('gold')")
        for _ in range(2):
            with pytest.raises(RewardError, match=r"mine\.py cannot be run: KeyError: 'gold' at "):
                await reward.finish(TWO)


async def test_a_process_goes_on_from_call_to_call_and_ends_with_its_reward(tmp_path: Path) -> None:
    with FunctionReward(f"{module(tmp_path, APART)}:pid", decode, process=True) as reward:
        first, again, *_ = [*await reward.finish(TWO), *await reward.finish(TWO)]
        assert first == again
        assert isinstance(first, float)
        os.kill(int(first), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)


async def test_a_function_that_holds_the_interpreter_lock_can_be_given_up_in_a_process(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    locked = FunctionReward(f"{module(tmp_path, APART)}:locked", decode, process=True)
    finished = [replaced(each, {"prompt": str(mark)}) for each in TWO]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(locked.finish, finished)
        await anyio.to_thread.run_sync(wait_for, mark)
        tasks.cancel_scope.cancel()
    assert not locked.capabilities.at_work()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("waiting", "'waiting' is async, and a process of its own is for sync ones"),
        (lambda prompts, completions: [], "'<lambda>': this cannot go to another process: "),
    ],
)
def test_what_cannot_be_called_in_a_process_is_refused(
    tmp_path: Path, function: str | Callable[..., Sequence[float]], message: str
) -> None:
    spec = f"{module(tmp_path, APART)}:{function}" if isinstance(function, str) else function
    with pytest.raises(RewardError) as caught:
        FunctionReward(spec, decode, process=True)
    assert message in str(caught.value)


def test_an_error_without_words_is_its_name() -> None:
    assert worded(TimeoutError()) == "TimeoutError"
    assert worded(TimeoutError("after 3 s")) == "TimeoutError: after 3 s"


class Opened(Shared):
    opens = closes = 0

    async def _open(self, stack: AsyncExitStack) -> None:
        await anyio.sleep(0.01)
        self.opens += 1
        stack.callback(self._close)

    def _close(self) -> None:
        self.closes += 1


@virtually
async def test_what_several_users_enter_at_once_is_opened_once_and_closed_by_the_last() -> None:
    shared = Opened()

    async def use(seconds: float) -> None:
        async with shared:
            await anyio.sleep(seconds)
            assert (shared.opens, shared.closes) == (1, 0)

    async with anyio.create_task_group() as tasks:
        for seconds in (0.1, 0.5, 0.2):
            tasks.start_soon(use, seconds)
    assert (shared.opens, shared.closes) == (1, 1)
