"""What a reward or an environment is made of is open as long as the run, and its news reaches whoever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel
import pytest

from oppo.environments import FunctionEnvironment, TextTurn
from oppo.errors import ModelError
from oppo.events import Drop
from oppo.log import logger, routed
from oppo.models import Scorer
from oppo.rewards import FunctionReward, Rewards, Weighted, load_reward
from oppo.testing import Fault, FaultyScorer, Raise, run_virtual
from tests.pipelines import Pipeline, Setting
from tests.rewards.test_combined import finished


@dataclass
class Service:
    """An async reward function that must be open when it is called."""

    opened: int = 0
    life: list[str] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.opened += 1
        self.life.append("opened")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await anyio.lowlevel.checkpoint()
        self.opened -= 1
        self.life.append("closed")

    async def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        assert self.opened
        await anyio.sleep(0.01)
        self.life += ["called"] * (self.life[-1] != "called")
        return [1.0 for _ in prompts]


def played(reward: object) -> None:
    pipeline = Pipeline(Setting(steps=2, extra=1))
    pipeline.reward = reward  # type: ignore[assignment] # a reward may drop
    run_virtual(pipeline.run)


def test_a_function_is_open_as_long_as_the_run() -> None:
    service = Service()
    reward = FunctionReward(service, decode=str)
    for _ in range(2):
        played(reward)
    assert service.life == ["opened", "called", "closed"] * 2


def test_one_that_is_in_several_parts_is_opened_and_closed_by_each() -> None:
    service = Service()
    parts: dict[str, Weighted] = {"one": (1.0, service), "two": (1.0, Rewards({"it": (1.0, service)}, decode=str))}
    played(Rewards(parts, decode=str))
    assert [each for each in service.life if each != "called"] == ["opened"] * 2 + ["closed"] * 2
    assert (service.opened, service.life[2], service.life[-3]) == (0, "called", "called")


def test_a_function_is_left_when_the_run_fails_and_even_when_its_end_does() -> None:
    service = Service()

    class Opened(FaultyScorer[float | Drop]):
        async def __aenter__(self) -> Self:
            await service.__aenter__()
            return self

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
        ) -> None:
            await service.__aexit__(kind, error, tb)

    script = (Fault("judge", "forget", Raise(ModelError)), Fault("judge", "finish", Raise(ModelError)))
    with pytest.raises(ModelError):
        played(Opened("judge", FunctionReward(length, decode=str), script))
    assert service.life == ["opened", "closed"]


def length(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [float(len(each)) for each in completions]


def test_the_function_of_an_environment_is_open_as_long_as_the_run() -> None:
    class Tool(Service):
        async def __call__(self, turn: TextTurn) -> str:  # type: ignore[override] # of another kind of function
            assert self.opened == 1
            self.life += ["called"] * (self.life[-1] != "called")
            return "a"

    service = Tool()
    tool = FunctionEnvironment(service, str, lambda text: [7])
    pipeline = Pipeline(Setting(steps=2))
    pipeline.policy.turns = lambda prompt: (2,)
    pipeline.generate = replace(pipeline.generate, environment=tool)
    run_virtual(pipeline.run)
    assert service.life == ["opened", "called", "closed"]


def test_what_a_function_logs_goes_where_the_messages_of_the_run_go() -> None:
    def talkative(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        logger.info("scoring")
        return [1.0 for _ in prompts]

    async def both() -> None:
        reward = FunctionReward(talkative, decode=str)
        for number, said in enumerate((one, other), 1):
            with routed(said.append):
                await reward.finish(finished(number))

    one, other = list[str](), list[str]()
    anyio.run(both)  # in a thread of its own for each call
    assert (one, other) == (["scoring"], ["scoring"])


FILE = """
from tests.rewards.test_life import Service
from oppo.rewards import Rewards

judge = Service()
several = {"judge": (1.0, judge)}
scorer = Rewards(several, decode=str)
"""


@pytest.mark.parametrize("name", ["judge", "several", "scorer"])
def test_what_is_loaded_from_a_file_is_opened_for_each_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "judges.py").write_text(FILE)
    for _ in range(2):
        assert run_virtual(scored, load_reward(f"{tmp_path / 'judges.py'}:{name}", str)) == [1.0, 1.0]


async def scored(reward: Scorer[float | Drop]) -> list[float | Drop]:
    async with reward:  # type: ignore[attr-defined] # those that are loaded here are context managers
        return list(await reward.finish(finished(2)))
