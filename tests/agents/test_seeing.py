"""Agents whose first messages show images: by every API the prompt that a row with the same messages has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import anyio
import anyio.from_thread
import openai
import pytest

from oppo.agents import Agents
from oppo.agents.requests import LONG, ChatRequests
from oppo.environments import EnvironmentFailure
from oppo.events import Drop
from oppo.hf.loading import load_tokenizer
from oppo.hf.processor import ImagePrompts, Processor
from oppo.hf.tokenizer import HfTokenizer
from oppo.images import ImageFiles
from oppo.models import SamplingSettings
from oppo.testing import FakePolicy, run_virtual
from oppo.turns import Answer
from tests.agents.speakers import APIS, Speaker, client_of
from tests.agents.test_agents import Rollout, rows
from tests.kit.seen import checkpoint, uri

Act = Callable[[Speaker, dict[str, object]], Any]
TEXT = [{"type": "text", "text": "red?"}]


def image(api: str, url: str) -> dict[str, Any]:
    if api == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        return {"type": "image", "source": source if url.startswith("data:") else {"type": "url", "url": url}}
    is_chat = api == "chat"
    return {"type": "image_url" if is_chat else "input_image", "image_url": {"url": url} if is_chat else url}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    checkpoint(folder, "qwen3_vl")
    return folder


@pytest.fixture(scope="module")
def reader(folder: Path) -> ImagePrompts:
    return ImagePrompts(Processor(folder / "qwen3_vl"), ImageFiles(folder / "images", folder))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HfTokenizer:
    return HfTokenizer(load_tokenizer(folder / "qwen3_vl"))


def tried(
    api: str,
    act: Act,
    then: Callable[[Rollout], Any],
    reader: ImagePrompts | None,
    tokenizer: HfTokenizer,
    *,
    roles: Any = None,
) -> Any:
    """Return what comes of a rollout of an agent that does this, where requests may show images."""

    async def run(row: dict[str, object], url: str, key: str) -> object:
        async with client_of(api, agents, url, key) as to:
            return await act(APIS[api](to), row)

    agents = Agents(run, tokenizer, SamplingSettings(max_new_tokens=1024), roles=roles)
    if reader is not None:
        agents.see(reader)

    async def main() -> Any:
        async with agents:
            rollout = Rollout(agents, await anext(agents.prompts(rows(5), max_prompt_tokens=2000)))
            rollout.tokenizer = tokenizer
            return await then(rollout)

    return run_virtual(main)


async def asking(to: Speaker, row: dict[str, object], *, content: Any, later: Any = "sure?") -> float:
    to.history.append({"role": "user", "content": content})
    await to.send()
    to.history.append({"role": "user", "content": later})
    await to.send()
    return 1.0


async def said(rollout: Rollout) -> object:
    assert isinstance(await rollout.say("yes"), Answer)
    assert await rollout.say("yes") is None
    return rollout.prompt, await rollout.reward(), [each.tokens.tolist() for each in rollout.pieces]


def test_by_every_api_the_prompt_is_that_of_a_row_with_these_messages(
    reader: ImagePrompts, tokenizer: HfTokenizer
) -> None:
    parts = [{"type": "image", "image": uri(1)}, *TEXT, {"type": "image", "image": uri(2)}]
    row = {"prompt": [{"role": "user", "content": parts}]}
    _, tokens, images = reader(row, "prompt", "row 1", lambda row, column: (row, tokenizer))
    found = []
    for api in APIS:
        content = [image(api, uri(1)), *TEXT, image(api, uri(2))]
        prompt, reward, pieces = tried(api, partial(asking, content=content), said, reader, tokenizer)
        assert (prompt.tokens.tolist(), prompt.images, reward) == (tokens, images, 1.0)
        found.append(pieces)
    assert found[0] == found[1] == found[2]


REFUSED: tuple[tuple[Callable[[str], dict[str, Any]], str], ...] = (
    (lambda api: {"content": [image(api, "https://a.de/b.png")]}, "shows an image as 'https://a.de/b.png': expected"),
    (lambda api: {"content": [image(api, "/etc/passwd")]}, "nothing is fetched, and no file is read"),
    (lambda api: {"content": [image(api, "data:image/png;base64,aGFsbG8=")]}, "cannot be decoded"),
    (lambda api: {"content": "red?", "later": [image(api, uri(1))]}, "an image follows an answer: images are read in"),
)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_what_is_not_shown_is_refused_by_name(
    api: str, given: Callable[[str], dict[str, Any]], words: str, reader: ImagePrompts, tokenizer: HfTokenizer
) -> None:
    async def act(to: Speaker, row: dict[str, object]) -> float:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
            await asking(to, row, **given(api))
        assert words in str(refused.value)
        to.history.pop()
        await to.ask("red?")
        return 1.0

    async def till_the_end(rollout: Rollout) -> object:
        while isinstance(await rollout.say("yes"), Answer):
            pass
        return await rollout.reward()

    assert tried(api, act, till_the_end, reader, tokenizer) == 1.0


def test_a_frozen_role_and_a_run_of_text_are_shown_none(reader: ImagePrompts, tokenizer: HfTokenizer) -> None:
    async def act(to: Speaker, row: dict[str, object]) -> dict[str, float]:
        to.fields = {"model": "one"}
        await to.ask("red?")
        to.history[:] = [{"role": "user", "content": [image("chat", uri(1))]}]
        to.fields = {"model": "two"}
        with pytest.raises(openai.BadRequestError, match="role 'two' is frozen, and what plays it is shown text only"):
            await to.send()
        return {"one": 1.0}

    roles = {"one": "policy", "two": FakePolicy()}
    assert tried("chat", act, lambda rollout: rollout.say("yes"), reader, tokenizer, roles=roles) is None
    with pytest.raises(EnvironmentFailure, match=r"reads text only \(data.images has agents show images\): leave"):
        tried("chat", partial(asking, content=[image("chat", uri(1))]), said, None, tokenizer)


def test_an_agent_that_shows_another_image_to_a_response_of_its_row_is_dropped(
    reader: ImagePrompts, tokenizer: HfTokenizer
) -> None:
    shown = iter((uri(1), uri(2)))

    async def act(to: Speaker, row: dict[str, object]) -> float:
        return await asking(to, row, content=[image("chat", next(shown))])

    async def second(rollout: Rollout) -> object:
        other = Rollout(rollout.agents, rollout.prompt.samples(2)[1])
        other.tokenizer = tokenizer
        return await other.say("yes")

    dropped = tried("chat", act, second, reader, tokenizer)
    assert isinstance(dropped, Drop)
    assert "began with other images than those of its row" in dropped.reason


def test_long_requests_and_those_with_images_are_read_one_at_a_time_while_the_loop_goes_on(
    reader: ImagePrompts, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, reading = threading.Lock(), list[str]()

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*given: Any) -> Any:
            alone = held.acquire(blocking=False)
            try:
                anyio.from_thread.run(anyio.sleep, 0.02)  # the loop is another thread, and has time for the others
                reading.append(name if alone else f"{name} beside another")
                return work(*given)
            finally:
                if alone:
                    held.release()

        return watch

    for name in ("content_of", "prompt"):
        monkeypatch.setattr(ChatRequests, name, watched(name, getattr(ChatRequests, name)))
    shown = [image("chat", uri(3)), {"type": "text", "text": "?" * LONG}]  # a body of a photograph's size
    contents = [iter(("red?" * LONG, "sure?" * LONG)), iter((shown, "sure?" * LONG)), iter((shown, "sure?" * LONG))]

    async def run(row: dict[str, Any], url: str, key: str) -> float:
        said = contents[row["gold"]]
        async with client_of("chat", agents, url, key) as to:
            return await asking(APIS["chat"](to), row, content=next(said), later=next(said))

    agents = Agents(run, tokenizer, SamplingSettings(max_new_tokens=10 * LONG))
    agents.see(reader)

    async def main() -> None:
        async with agents, anyio.create_task_group() as tasks:
            begun = agents.prompts(rows(0, 1, 2), max_prompt_tokens=10 * LONG)
            async for prompt in begun:
                rollout = Rollout(agents, prompt)
                rollout.tokenizer = tokenizer
                tasks.start_soon(said, rollout)

    anyio.run(main)
    # a request holds its earlier messages, and those of a conversation that goes on are not encoded again
    assert sorted(reading) == ["content_of"] * 9 + ["prompt"] * 3
