"""A chat format of fakes, for agents in whole graphs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import pytest

from oppo import Graph, grpo
from oppo.admission import Admission
from oppo.agents import Agents
from oppo.agents.requests import ChatRequests
from oppo.events import Prompt, StepReport
from oppo.hf.chat import ParsedTurn
from oppo.models import Policy, Trainer
from oppo.testing import run_virtual


class Numbers:
    """A chat format of fakes: a turn says how many tokens it has, and a message is as many as it says."""

    roles = frozenset({"user"})
    ends = frozenset({2})
    thinking = None

    @property
    def tokenizer(self) -> Numbers:
        return self

    def parse(self, turn: Sequence[int]) -> ParsedTurn:
        return ParsedTurn(f"{len(turn)}: {sum(turn)}")

    def so_far(self, tokens: Sequence[int], stops: Sequence[str], *, calls: bool, decode: object) -> tuple[str, str]:
        return "", f"{len(tokens)}"[:1]

    def answer(self, turn: Sequence[int], messages: Sequence[Mapping[str, object]]) -> list[int]:
        return [90_000 + len(turn), *range(int(str(messages[0]["content"])))]

    def decode_whole(self, tokens: Sequence[int]) -> str:
        return str(tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        return [1, int(str(messages[0]["content"])), 2]


def graph_of(
    agents: Agents, decoding: Policy, trainer: Trainer, admission: Admission, **others: Any
) -> Graph[StepReport]:
    given: dict[str, Any] = {"samples": 2, "reward": agents.reward, **others}
    return grpo(policy=decoding, trainer=trainer, admission=admission, environment=agents, **given)


Stepped = tuple[list[dict[str, float]], list[str]]


def stepped(graph: Graph[StepReport], prompts: Iterator[Prompt] | AsyncIterator[Prompt], steps: int) -> Stepped:
    """Run a graph; return the metrics of its steps and the reasons of its drops."""

    async def main() -> Stepped:
        async with graph.open(prompts) as run:
            reports = [report async for report in run.steps(steps)]
        return [{**each.metrics} for each in reports], [drop.reason for each in reports for drop in each.dropped]

    return run_virtual(main)


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def formats(self: ChatRequests, tools: object) -> Any:
        return Numbers(), Numbers()

    monkeypatch.setattr(ChatRequests, "format", formats)
