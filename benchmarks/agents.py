"""What a request of an agent costs the process that trains: ``python -m benchmarks.agents``, with fakes for models.

So many agents wait at once, each with one request to the endpoint over the loopback; half of them are deferred over the
update. Agents are of this process, and so is their side of the request: a bare socket, OpenAI's client with the pool
that all share, one of its own with a TLS context that all share, or one of its own.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import anyio
import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import command
from oppo import Overcommit, grpo
from oppo.agents import Agents
from oppo.events import Prompt
from oppo.hf.tokenizer import HfTokenizer
from oppo.models import Capabilities
from oppo.testing import FakePolicy, FakeTrainer

TURNS: Final = 3  # requests of an agent

MESSAGE: Final = "Go on, and say why. " * 5
TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Ask: TypeAlias = Callable[[list[Any]], Any]


@asynccontextmanager
async def bare(url: str, key: str) -> AsyncIterator[Ask]:
    address, _, path = url.removeprefix("http://").partition("/")
    host, port = address.split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:

        async def ask(messages: list[Any]) -> Any:
            body = json.dumps({"messages": messages}).encode()
            head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n"
            await stream.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            text = b""
            while (ends := text.find(b"\r\n\r\n")) < 0:
                text += await stream.receive()
            length = int(text[:ends].lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            while len(text) < ends + 4 + length:
                text += await stream.receive()
            return json.loads(text[ends + 4 :])["choices"][0]["message"]

        yield ask


def asking(client: AsyncOpenAI) -> Ask:
    async def ask(messages: list[Any]) -> Any:
        reply = await client.chat.completions.create(model="policy", messages=messages)
        return reply.choices[0].message.model_dump(exclude_none=True)

    return ask


def clients() -> Mapping[str, Callable[[str, str], Any]]:
    context = ssl.create_default_context()
    client = AsyncOpenAI(base_url="http://agents", api_key="-", timeout=None)

    @asynccontextmanager
    async def shared(url: str, key: str) -> AsyncIterator[Ask]:
        yield asking(client.with_options(base_url=url, api_key=key))

    @asynccontextmanager
    async def own(url: str, key: str, **options: Any) -> AsyncIterator[Ask]:
        async with AsyncOpenAI(
            base_url=url, api_key=key, timeout=None, http_client=DefaultAsyncHttpxClient(**options)
        ) as made:
            yield asking(made)

    return {
        "a bare socket": bare,
        "one client": shared,
        "a client each, one TLS context": partial(own, verify=context),
        "a client each": own,
    }


def tokenizer() -> HfTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({each: at for at, each in enumerate(alphabet)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = TEMPLATE
    return HfTokenizer(made)


async def milliseconds(count: int, opened: Callable[[str, str], Any]) -> tuple[float, int]:
    """Return the CPU time of a request, and how many waited at once."""
    waiting, most, asked = 0, 0, 0

    async def run(row: Mapping[str, object], url: str, key: str) -> float:
        nonlocal waiting, most, asked
        del row
        messages: list[Any] = [{"role": "user", "content": MESSAGE}]
        async with opened(url, key) as ask:
            for _ in range(TURNS):
                waiting, asked = waiting + 1, asked + 1
                most = max(most, waiting)
                messages += [await ask(messages), {"role": "user", "content": MESSAGE}]
                waiting -= 1
        return 1.0

    agents = Agents(run, tokenizer())
    policy = FakePolicy(
        length=lambda prompt: 60 + 20 * (prompt.admission % 2),
        turns=lambda prompt: [20, 40],
        seconds=count / 4000,
        capabilities=Capabilities(turns=True, adds_while_decoding=True),
    )
    rows = [Prompt(at, at, np.array([0], np.int32), group=at) for at in range(count)]
    graph = grpo(
        policy=policy,
        reward=agents.reward,
        trainer=FakeTrainer(),
        admission=Overcommit(count // 4, count // 4),
        samples=2,
        environment=agents,
    )
    begun = time.process_time()
    async with graph.open(agents.prompts(rows)) as steps:
        async for _ in steps.steps(2):
            pass
    return (time.process_time() - begun) / asked * 1e3, most


def compare(*, counts: Sequence[int] = (100, 500, 2000)) -> None:
    """Print the CPU time of a request, the agent's side included, by the number of agents and their clients.

    Args:
        counts: of agents at once.
    """
    for count in counts:
        for name, opened in clients().items():
            if count > 1000 and name in {"one client", "a client each"}:
                continue  # its pool holds 1,000 requests; each costs what it costs
            took, most = anyio.run(milliseconds, count, opened)
            print(f"{count:5} agents, {most:5} waited at once, {name:30} {took:5.1f} ms of CPU time", flush=True)


if __name__ == "__main__":
    sys.exit(command(compare))
