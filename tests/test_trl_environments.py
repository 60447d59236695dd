"""TRL's tool loop and its contract of environments beside ours: a scripted policy says the same tokens to both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oppo.environments import EnvironmentClass, tools_of
from oppo.events import AnsweredTurn, Chunk, Finish, Prompt, Response, ToolTokens
from oppo.hf import HfTokenizer
from oppo.hf.chat import ChatFormat, chatting
from oppo.testing import run_virtual
from oppo.turns import Answer, Turn
from tests.hf.spot_tokenizers import byte_level
from tests.kit.turns import END, TEMPLATE, call

pytestmark = pytest.mark.gym

ROW = {"prompt": [{"role": "user", "content": "Add up."}], "start": 40}


class Sums:
    """A sum that grows by calls; its tools stand in the order in which TRL shows them, by name."""

    def reset(self, start: int, **row: object) -> str:
        """Begin."""
        self.total = start
        return f" Begin with {start}."

    def add(self, number: int) -> int:
        """Add a number.

        Args:
            number: the number.
        """
        self.total += number
        return self.total

    def fail(self) -> str:
        """Fail."""
        raise ValueError("no luck")

    async def later(self, number: int) -> int:
        """Add a number, later.

        Args:
            number: the number.
        """
        return self.add(number)

    def show(self, kind: str) -> object:
        """Return something.

        Args:
            kind: what.
        """
        self.total += 1
        shown = {"text": "as it is", "none": None, "true": True, "float": 0.5, "long": "word " * 400}
        return {"total": self.total} if kind == "object" else shown[kind]

    def get_reward(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class Played:
    """What came of a response: of the prompt, and of what the policy and the tools said."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    mask: Sequence[int]
    messages: Sequence[Mapping[str, object]]
    reward: float


def tokenizer() -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="<pad>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def turns_of(script: Sequence[str]) -> Iterator[list[int]]:
    inner = tokenizer()
    for text in script:
        yield inner.encode(text, add_special_tokens=False)


def plain(message: Mapping[str, Any]) -> Mapping[str, object]:
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    kept = {name: message[name] for name in ("role", "content", "name") if message.get(name) is not None}
    return kept | ({"calls": [(each["name"], each["arguments"]) for each in calls]} if calls else {})


def by_trl(script: Sequence[str], room: int, max_turns: int | None, folder: Path) -> Played:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    shapes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    inner = tokenizer()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(inner), max_position_embeddings=4096, **shapes))
    chosen = GRPOConfig(
        str(folder),
        use_cpu=True,
        report_to="none",
        bf16=False,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=room,
        max_tool_calling_iterations=max_turns,
    )
    told: dict[str, Any] = {}

    def watching(completions: list[Any], **others: object) -> list[float]:
        told["messages"] = completions[0]
        return [0.0] * len(completions)

    trainer = GRPOTrainer(
        model, [watching], chosen, Dataset.from_list([ROW]), processing_class=inner, environment_factory=Sums
    )
    script_of = [turns_of(script) for _ in range(2)]

    def say(prompts: Sequence[object], *others: object, **more: object) -> tuple[list[list[int]], None]:
        return [next(each)[:room] for each, _ in zip(script_of, prompts, strict=False)], None

    def scored(score: Any, *given: Any) -> Any:
        found = score(*given)
        told["reward"] = float(found[0][1])
        return found

    trainer._generate_single_turn = say
    trainer._calculate_rewards = partial(scored, trainer._calculate_rewards)
    made = trainer._generate_and_score_completions([dict(ROW), dict(ROW)])
    count = int(made["completion_mask"][0].sum())
    return Played(
        made["prompt_ids"][0][made["prompt_mask"][0].bool()].tolist(),
        made["completion_ids"][0][:count].tolist(),
        made["tool_mask"][0][:count].tolist(),
        [plain(each) for each in told["messages"]],
        told["reward"],
    )


def by_us(script: Sequence[str], room: int, max_turns: int | None) -> Played:
    shows = chatting(HfTokenizer(tokenizer()), tools=tools_of(Sums))
    game = EnvironmentClass(Sums, ChatFormat(shows, ("tool",)), max_turns=max_turns)

    async def main() -> Played:
        columns: dict[str, Any] = game.begun(ROW)
        prompt = Prompt(0, 0, np.array(shows.encode_chat(columns["prompt"]), np.int32), columns=columns)
        pieces: list[Chunk | ToolTokens] = []
        answers: list[AnsweredTurn] = []
        state, length = None, 0
        for number, turn in enumerate(turns_of(script)):
            said = np.array(turn[: room - length], np.int32)
            zeros = np.zeros(len(said), np.float32)
            pieces.append(Chunk(0, length, said, zeros, zeros.astype(np.int32)))
            length += len(said)
            answer = await game.answer(Turn(prompt, number, said, state)) if len(said) == len(turn) else None
            if not isinstance(answer, Answer):
                break
            state = answer.state
            if length + len(answer.tokens) >= room:  # as decodes do
                game.forget(prompt, state)
                break
            pieces.append(ToolTokens(0, length, answer.tokens))
            length += len(answer.tokens)
            answers.append(AnsweredTurn(length, said=answer.said))
        response = Response.of(prompt, pieces)
        finish = Finish(0, response, "stop", answers)
        (reward,) = await game.reward.finish([finish])
        messages = [plain(each) for each in game.chat.conversation(finish)]
        assert isinstance(reward, float)
        return Played(
            prompt.tokens.tolist(), response.tokens.tolist(), response.sampled.astype(int).tolist(), messages, reward
        )

    return run_virtual(main)


DONE = f"It is done.{END}"
ADDS = call("add", number=2)

SAME: Mapping[str, tuple[Sequence[str], int, int | None]] = {
    "no call": ([DONE], 500, None),
    "one call": ([ADDS + END, DONE], 500, None),
    "text before a call": ([f"I add two. {ADDS}{END}", DONE], 500, None),
    "reasoning before a call": ([f"<think>\nHm.\n</think>\n\n{ADDS}{END}", DONE], 500, None),
    "two calls": ([f"{ADDS}\n{call('add', number=3)}{END}", DONE], 500, None),
    "two turns of calls": ([ADDS + END, call("add", number=3) + END, DONE], 500, None),
    "text is read as it is": ([call("show", kind="text") + END, DONE], 500, None),
    "a number": ([call("show", kind="float") + END, DONE], 500, None),
    "an answer without room, which was given": ([call("show", kind="long") + END, DONE], 300, None),
    "cut": (["A long text. " * 40 + END], 100, None),
    "cut after an answer": ([ADDS + END, "Done. " * 100 + END], 200, None),
    "calls beyond the limit": ([call("add", number=number) + END for number in (2, 3, 4)], 900, 2),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_tokens_give_the_same_messages_mask_and_reward(name: str, tmp_path: Path) -> None:
    script, room, max_turns = SAME[name]
    assert by_us(script, room, max_turns) == by_trl(script, room, max_turns, tmp_path)


DIFFERENT: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "an object is JSON": (call("show", kind="object"), ["{'total': 41}"], ['{"total": 41}']),
    "so is None": (call("show", kind="none"), ["None"], ["null"]),
    "and true": (call("show", kind="true"), ["True"], ["true"]),
    "an error": (call("fail"), ["{'error': 'no luck'}"], ["Error: ValueError: no luck"]),
    "a tool that is not there": (
        call("divide", number=1),
        ["{'error': 'Tool divide not found.'}"],
        ["Error: there is no tool 'divide'; the tools are add, fail, later, show"],
    ),
    "calls are made and answered in their order": (
        f"{call('later', number=2)}\n{call('add', number=3)}",
        ["43", "45"],
        ["42", "45"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_tools_say_differs_as_the_page_for_trl_says(name: str, tmp_path: Path) -> None:
    calls, theirs, ours = DIFFERENT[name]
    found = by_trl([calls + END, DONE], 500, None, tmp_path), by_us([calls + END, DONE], 500, None)
    tools = [[each["content"] for each in one.messages if each["role"] == "tool"] for one in found]
    assert tools == [theirs, ours]
    policy = [[each for each in one.messages if each["role"] == "assistant"] for one in found]
    assert policy[0] == policy[1]
    assert found[0].reward == found[1].reward


def test_a_call_that_cannot_be_read_is_answered_where_it_ends_theirs(tmp_path: Path) -> None:
    script = [f'<tool_call>\n{{"name": "add", "arg\n</tool_call>{END}', DONE]
    theirs, ours = by_trl(script, 500, None, tmp_path), by_us(script, 500, None)
    assert len(theirs.messages) == 1
    assert "Error: the call cannot be read" in str(ours.messages[1]["content"])
    assert ours.tokens[: len(theirs.tokens)] == theirs.tokens


def test_an_answer_that_leaves_no_token_to_the_policy_finds_no_room_where_theirs_is_read(tmp_path: Path) -> None:
    whole = by_us([ADDS + END, DONE], 500, None)
    room = len(whole.mask) - len(next(turns_of([DONE])))
    theirs, ours = by_trl([ADDS + END, DONE], room, None, tmp_path), by_us([ADDS + END, DONE], room, None)
    assert theirs.tokens == whole.tokens[:room]
    assert ours.tokens == whole.tokens[: len(next(turns_of([ADDS + END])))]
    assert theirs.reward == ours.reward == 42
