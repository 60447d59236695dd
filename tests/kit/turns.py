"""A response that a test says turn by turn, in bytes, and that an environment or an agent answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from oppo.events import AnsweredTurn, Chunk, Drop, Finish, Prompt, Response, ToolTokens
from oppo.hf.chat import ChatFormat, ParsedTurn, chatting
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.tool_calls import ToolCall
from oppo.turns import Answer, Turn
from tests.hf import tiny
from tests.hf.spot_tokenizers import byte_tokenizer

TEMPLATE = (Path(__file__).parents[1] / "hf" / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
END = "<|im_end|>"


def byte_chat(tools: Sequence[Callable[..., object]]) -> ChatFormat:
    """Return the chat format of a tokenizer of bytes that shows these tools."""
    return ChatFormat(
        chatting(byte_tokenizer(special=(END, "<|im_start|>")), template=TEMPLATE, tools=tools), ("tool",)
    )


def talker(folder: Path) -> Path:
    """Save a tiny policy that is told of tools, and their template beside it; return the folder."""
    config = tiny.CONFIGS["llama"]()
    config.vocab_size, config.max_position_embeddings = 270, 2048
    tiny.of(config, seed=1).save_pretrained(folder / "actor")
    byte_tokenizer(special=("<|im_start|>", END, "</tool_call>")).save(folder / "actor")
    (folder / "qwen3.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Guesses:
    """A chat format of fakes: every turn calls ``guess`` with its number of tokens."""

    roles = frozenset({"tool"})
    tools: ClassVar[dict[str, dict[str, object]]] = {"guess": {}, "surrender": {}}

    def parse(self, turn: list[int]) -> ParsedTurn:
        return ParsedTurn("", tool_calls=(ToolCall("guess", {"number": len(turn)}),))

    def answer(self, turn: list[int], messages: object) -> list[int]:
        return [90_000, 90_001]


@dataclass
class Said:
    """A response; ``state`` goes through JSON from answer to answer, as through a checkpoint."""

    environment: Any
    prompt: Prompt
    tokenizer: HfTokenizer
    pieces: list[Chunk | ToolTokens] = field(default_factory=list)
    state: Any = None
    number: int = 0
    answered: list[AnsweredTurn] = field(default_factory=list)

    async def say(self, text: str, end: str = END) -> Answer | Drop | None:
        turn = Turn(self.prompt, self.number, self.write(text, end), self.state, self.said)
        answer: Answer | Drop | None = await self.environment.answer(turn)
        if isinstance(answer, Answer):
            self.answered.append(AnsweredTurn(self.length, answer.reward, answer.key, answer.said))
            self.pieces.append(ToolTokens(self.prompt.rollout, self.length, answer.tokens))
            self.state, self.number = json.loads(json.dumps(answer.state)), self.number + 1
        return answer

    def write(self, text: str, end: str = "") -> np.ndarray[Any, np.dtype[np.int32]]:
        """Write a turn, or a part of one, that is not answered yet; return its tokens."""
        said = np.array(self.tokenizer.encode_whole(text + end), np.int32)
        logprobs = np.linspace(-1 - self.length, -1, len(said), dtype=np.float32)
        self.pieces.append(Chunk(self.prompt.rollout, self.length, said, logprobs, np.zeros(len(said), np.int32)))
        return said

    @property
    def length(self) -> int:
        return sum(len(each.tokens) for each in self.pieces)

    async def said(self) -> list[Chunk]:
        return [each for each in self.pieces if isinstance(each, Chunk)]

    def finish(self, reason: Any = "eos") -> Finish:
        return Finish(self.prompt.rollout, Response.of(self.prompt, self.pieces), reason, self.answered)

    async def reward(self, reason: Any = "eos") -> float | Drop:
        found: Sequence[float | Drop] = await self.environment.reward.finish([self.finish(reason)])
        return found[0]

    def text(self) -> str:
        return self.tokenizer.decode_whole([token for each in self.pieces for token in each.tokens.tolist()])
