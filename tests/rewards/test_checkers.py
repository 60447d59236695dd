"""Checkers of answers as rewards: GSM8K's two rules, math-verify, and tests of code in processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from oppo import Drop, FunctionReward
from oppo.config.load import load_settings
from oppo.config.scorers import FunctionRewardSection
from oppo.rewards.tasks import CHECKERS, CodeChecker, gsm8k_flexible, gsm8k_strict, math_equal
from tests.rewards.test_trl import decode, finish


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so\n#### 72", 1, 1),
        ("#### 1,072", 0, 0),
        ("#### 7\nno: #### 72", 1, 1),
        ("the answer is 72", 0, 1),
        ("the answer is 72.", 0, 1),
        ("#### 72 or 73", 1, 0),
        ("#### 72." + " " * 290, 0, 1),
        ("#### 72" + " " * 300, 0, 1),
        ("####72", 0, 1),
        ("#### ,", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_two_rules_of_gsm8k(text: str, strict: int, flexible: int) -> None:
    said = [{"role": "assistant", "content": text}]
    assert gsm8k_strict([text, said], ["72", 72]) == [strict] * 2
    assert gsm8k_flexible([text, said], ["72", 72]) == [flexible] * 2


def test_commas_are_no_part_of_a_number() -> None:
    assert gsm8k_strict(["#### 1,072"], ["1072"]) == gsm8k_flexible(["1,072"], ["1072"]) == [1]


@pytest.mark.parametrize(
    ("right", "said", "score"),
    [
        ("72", "so it is 72.", 1),
        (r"\frac{1}{3}", r"\boxed{1/3}", 1),
        ("$0.333333$", r"is $\frac{1}{3}$", 1),
        ("2x+1", r"\boxed{1+2x}", 1),
        ("2x+1", r"\boxed{2}", 0),
        ("(1,2)", r"\boxed{(1, 2)}", 1),
        (1072, "1,072 dollars", 1),
        ("5", "no number", 0),
        ("5", "", 0),
    ],
)
def test_answers_are_equal_as_expressions(right: object, said: str, score: int) -> None:
    assert math_equal([said], [right]) == [score]


def test_a_right_answer_that_cannot_be_parsed_drops_its_rollout() -> None:
    (dropped, right) = math_equal(["3", "3"], ["$$", "3"])
    assert isinstance(dropped, Drop)
    assert "'$$' (str) is no expression" in dropped.reason
    assert right == 1.0


def test_math_is_checked_off_the_main_thread_too() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(math_equal([r"\boxed{4}", "5"], ["4", "4"])))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


def test_in_a_process_an_answer_that_takes_too_long_is_wrong() -> None:
    slow, right = finish(0, r"\boxed{9^{9^{9^{9}}}}", answer="3"), finish(1, r"\boxed{3}", answer="3")

    async def main() -> list[float | Drop]:
        async with FunctionReward(math_equal, decode, process=True, each=True, concurrency=2) as reward:
            return await reward.finish([slow, right])

    assert anyio.run(main) == [0.0, 1.0]


def block(*lines: str) -> str:
    return "\n".join(["Here:", "```python", *lines, "```", "Done."])


ADD = block("def add(a, b):", "    return a + b")
CHECKER = CodeChecker(seconds=1, megabytes=256)


def scores(text: str, *tests: object, checker: CodeChecker = CHECKER) -> tuple[float, float]:
    """Return the score, and the share of tests that passed."""
    logged: dict[str, float] = {}
    (score,) = checker([text], [list(tests)], lambda name, value: logged.update({name: float(value)}))
    return score, logged["code/tests_passed"]


def test_code_passes_if_all_tests_do() -> None:
    assert scores(ADD, "assert add(1, 2) == 3", "assert add(0, 0) == 0") == (1, 1)
    assert scores(ADD, "assert add(1, 2) == 3", "assert add(0, 0) == 1") == (0, 0.5)
    assert CHECKER([ADD], ["assert add(1, 2) == 3"]) == [1.0]
    assert scores("def add(a, b): return a + b", "pass") == (0, 0), "there is no block"
    assert scores(ADD + "\n" + block("oh no"), "pass") == (0, 0), "the last block counts"


def test_code_may_read_and_write_instead() -> None:
    doubled = block("import sys", "for line in sys.stdin:", "    print(2 * int(line), '')")
    assert scores(doubled, {"input": "1\n2\n", "output": "2\n4"}, {"input": "", "output": ""}) == (1, 1)
    assert scores(doubled, {"input": "1\n", "output": "3\n"}) == (0, 0)


@pytest.mark.parametrize(
    "lines",
    [
        ["import sys", "sys.exit(0)"],
        ["import os", "os._exit(0)"],
        ["while True: pass"],
        ["import time", "time.sleep(60)"],
        ["x = bytearray(1 << 30)"],
        ["open('big', 'wb').write(bytes(1 << 22))"],
        ["while True: print('x' * 10000)"],
        ["assert input()"],
        ["import os", "assert 'OPPO_TEST_SECRET' in os.environ"],
        ["\ud800"],
    ],
)
def test_code_has_limits(lines: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPO_TEST_SECRET", "x")
    begun = time.monotonic()
    assert scores(block(*lines), "pass") == (0, 0)
    assert time.monotonic() - begun < 30


def test_what_code_starts_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    start = ["import subprocess, sys", "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"]
    assert scores(block(*start, f"open({str(file)!r}, 'w').write(str(p.pid))"), "pass") == (1, 1)
    for _ in range(100):
        try:
            os.kill(int(file.read_text()), 0)
            state = Path(f"/proc/{file.read_text()}/stat").read_text().split()[2]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it goes on")


@pytest.mark.parametrize("tests", [[], 3, [{"input": "1"}]])
def test_what_is_no_test_is_named(tests: object) -> None:
    with pytest.raises(ValueError, match="column 'tests'"):
        CHECKER([ADD], [tests])


def test_checkers_have_what_their_settings_say() -> None:
    assert list(CHECKERS) == ["reasoning-gym", "math", "gsm8k", "code"]
    assert CHECKERS["math"].process
    assert [weight for weight, _ in CHECKERS["gsm8k"].functions.values()] == [1.0, 0.0]


def test_settings_name_a_checker_alone_or_in_a_table_whatever_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "math").mkdir()
    base = '[models]\npolicy = "actor"\n[data]\nprompts = "prompts.jsonl"\n'
    tables = '[[rewards]]\nsource = "math"\nname = "right"\n[[rewards]]\nsource = "./math"\nname = "model"\n'
    for text in ('rewards = ["math"]\n' + base, base + tables):
        (tmp_path / "config.toml").write_text(text)
        settings = load_settings(tmp_path / "config.toml")
        assert settings.rewards[0].source == "math"
        assert isinstance(settings.rewards[0], FunctionRewardSection)
        assert settings.changed({}).rewards == settings.rewards
    assert settings.rewards[1].source == str(tmp_path / "math")
    assert list(settings.reward_models) == [str(tmp_path / "math")]
