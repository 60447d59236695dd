"""The pytest plugin, in projects of its own: beside other plugins, with tests that fail, and with the fixtures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.forked import Program

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

VIRTUAL = """
import anyio, pytest
from hypothesis import given, strategies as st

@pytest.mark.virtual
async def test_an_hour_takes_no_time():
    await anyio.sleep(3600)
    assert anyio.current_time() == 3600

@pytest.mark.virtual
@pytest.mark.parametrize("seconds", [1, 2])
async def test_its_arguments_are_parameters_and_fixtures(seconds, tmp_path, recorder):
    await anyio.sleep(seconds)
    assert (anyio.current_time(), tmp_path.exists(), recorder.items) == (seconds, True, [])

@pytest.mark.virtual
class TestAll:
    async def test_of_a_class(self, request):
        await anyio.sleep(3600)
        assert self is request.instance

    def test_that_is_not_async(self):
        assert True

@pytest.mark.virtual
@given(st.integers(0, 9))
async def test_a_property(seconds):
    await anyio.sleep(seconds)
    assert anyio.current_time() == seconds
"""

IN_A_MODULE = """
import anyio, pytest
pytestmark = pytest.mark.virtual

async def test_of_the_module():
    await anyio.sleep(3600)
    assert anyio.current_time() == 3600
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run the tests of the project with the plugin, whether or not the package is installed; warnings are errors."""
    expected = (
        "ignore:The configuration option:pytest.PytestDeprecationWarning",  # pytest-asyncio wants a choice to be made
        "ignore:Module already imported:pytest.PytestAssertRewriteWarning",  # by the server that forks
    )
    ours = ["-p", "pytest_oppo", "-p", "no:cacheprovider", "--strict-markers", "-Werror"]
    ours += [part for each in expected for part in ("-W", each)]
    code = "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    with Program(code, [*ours, *arguments], folder=pytester.path) as program:
        out, said = program.communicate(timeout=120)
    return pytest.RunResult(program.returncode or 0, out.splitlines(), said.splitlines(), 0.0)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(["-p", "no:asyncio", "-p", "no:anyio"], id="alone"),
        pytest.param(["--asyncio-mode=strict"], id="asyncio", marks=pytest.mark.deep),
        pytest.param(["--asyncio-mode=auto"], id="asyncio auto", marks=pytest.mark.deep),
        pytest.param(["-p", "no:asyncio", "--anyio-mode=auto"], id="anyio auto", marks=pytest.mark.deep),
        pytest.param(["--asyncio-mode=auto", "--anyio-mode=auto", "-W", "ignore:AnyIO auto mode"], id="both auto"),
    ],
)
def test_virtual_tests_run_once_and_in_virtual_time_beside_any_other_plugin(
    pytester: pytest.Pytester, others: list[str]
) -> None:
    pytester.makepyfile(test_each=VIRTUAL, test_module=IN_A_MODULE)
    run(pytester, *others).assert_outcomes(passed=7)


def test_tests_of_other_plugins_stay_theirs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import asyncio, time, anyio, pytest

        @pytest.mark.asyncio
        async def test_of_asyncio():
            assert not hasattr(asyncio.get_running_loop(), "virtual")

        @pytest.mark.anyio
        async def test_of_anyio(anyio_backend_name):
            assert anyio_backend_name in {"asyncio", "trio"}

        @pytest.mark.virtual
        async def test_of_ours():
            assert asyncio.get_running_loop().virtual

        def test_of_none():
            assert True
        """
    )
    run(pytester).assert_outcomes(passed=5)


def test_a_virtual_test_that_is_fetched_anew_stays_one(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(item):
            item._obj = None
        """
    )
    pytester.makepyfile(IN_A_MODULE)
    run(pytester, "--asyncio-mode=auto").assert_outcomes(passed=1)


def test_a_deadlock_fails_the_test_with_its_table(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import oppo
        from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, Fault, FaultyScorer, Hang, fake_scalar, prompts

        @pytest.mark.virtual
        async def test_of_a_judge_that_hangs(recorder):
            judge = FaultyScorer("judge", FakeScorer(fake_scalar), (Fault("judge", "finish", Hang(), call=1),))
            graph = oppo.grpo(policy=FakePolicy(), reward=judge, trainer=FakeTrainer(), admission=oppo.Overcommit(2))
            async with graph.open(prompts(9), observers=[recorder]) as run:
                await run.step()
        """
    )
    ran = run(pytester)
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["*DeadlockError: every task waits*", "*call 1 of finish() of 'judge' hangs*"])
    assert "pytest_oppo.py" not in str(ran.stdout), "the traceback is that of the test"


def test_a_run_that_is_not_valid_is_an_error_of_the_test_that_passed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import numpy as np
        from oppo import Chunk

        def test_of_a_stage_that_loses_a_token(recorder):
            for start in (0, 3):
                nothing = np.zeros(2, np.int32)
                recorder.on_item(0, "generate", Chunk(7, start, nothing, nothing.astype(np.float32), nothing), 0.0)
        """
    )
    ran = run(pytester)
    ran.assert_outcomes(passed=1, errors=1)
    ran.stdout.fnmatch_lines(["*rollout 7, step 1: a Chunk begins at 3, and 2 tokens have come"])


def test_the_fixtures_answer_for_the_run_of_the_recorder(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import oppo
        from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, check_trainer, fake_scalar, prompts

        async def stepped(observer, chunks):
            reward = FakeScorer(fake_scalar, per_token=0.1)
            policy = FakePolicy(lambda prompt: 20, 1.0)
            models = {"policy": policy, "reward": reward, "trainer": FakeTrainer()}
            graph = oppo.grpo(**models, admission=oppo.Overcommit(1), chunks=chunks, samples=2)
            async with graph.open(prompts(9), observers=[observer]) as run:
                await run.step()

        @pytest.mark.virtual
        async def test_of_one_run(recorder, overlap, hidden_fraction, story):
            await stepped(recorder, oppo.admission.chunking.Fixed(5))
            assert overlap("generate", "reward") == pytest.approx(2 * 18 * 0.1)
            assert hidden_fraction() == pytest.approx(1 - 5 / 23)
            assert [each.event for each in story(1)][-3:] == ["scored", "batched", "trained"]

        @pytest.mark.virtual
        async def test_of_two_runs(new_recorder):
            whole, streamed = new_recorder(), new_recorder()
            await stepped(whole, oppo.admission.chunking.WholeRollout())
            await stepped(streamed, oppo.admission.chunking.Fixed(5))
            assert whole.hidden_fraction() < streamed.hidden_fraction()

        @pytest.mark.virtual
        async def test_of_a_trainer(fake_batch):
            async def make():
                return FakeTrainer()
            await check_trainer(make, fake_batch([3, 5], critic=False), [FakePolicy()])
        """
    )
    run(pytester).assert_outcomes(passed=3)


def test_it_costs_a_session_that_does_not_use_it_no_import_of_oppo(pytester: pytest.Pytester) -> None:
    probe = "import sys, pytest_oppo; assert not {'oppo', 'numpy', 'anyio'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True)


def test_the_marker_and_the_fixtures_are_listed_with_what_they_are(pytester: pytest.Pytester) -> None:
    listed = run(pytester, "--markers")
    listed.stdout.fnmatch_lines(["@pytest.mark.virtual: run an async test in virtual time: *"])
    fixtures = str(run(pytester, "--fixtures").stdout)
    for name in ("recorder", "new_recorder", "overlap", "hidden_fraction", "story", "fake_batch"):
        assert re.search(rf"^{name} .*\n    Return ", fixtures, re.MULTILINE), name


def test_the_tests_that_the_page_shows_pass_and_the_first_has_twelve_lines(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    shown = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def test_" in block]
    assert len([line for line in shown[0].splitlines() if line.strip()]) == 12
    pytester.makepyfile(**{f"test_{number}": block for number, block in enumerate(shown)})
    run(pytester).assert_outcomes(passed=len(shown))
