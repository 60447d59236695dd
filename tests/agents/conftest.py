"""A chat format of fakes, for agents in whole graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from oppo.agents.requests import ChatRequests
from oppo.hf.chat import ParsedTurn


class Numbers:
    """A chat format of fakes: a turn says how many tokens it has, and a message is as many as it says."""

    roles = frozenset({"user"})
    ends = frozenset({2})

    def parse(self, turn: Sequence[int]) -> ParsedTurn:
        return ParsedTurn(f"{len(turn)}: {sum(turn)}")

    def answer(self, turn: Sequence[int], messages: Sequence[Mapping[str, object]]) -> list[int]:
        return [90_000 + len(turn), *range(int(str(messages[0]["content"])))]

    def decode_whole(self, tokens: Sequence[int]) -> str:
        return str(tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        return [1, int(str(messages[0]["content"])), 2]


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def formats(self: ChatRequests, tools: object) -> Any:
        return Numbers(), Numbers()

    monkeypatch.setattr(ChatRequests, "format", formats)
