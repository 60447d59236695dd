"""An agent over three APIs, by the clients of their makers. Nothing here is of oppo."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

openai = AsyncOpenAI(base_url="http://localhost", api_key="of each agent", timeout=None)
anthropic = AsyncAnthropic(base_url="http://localhost", api_key="of each agent", timeout=None)

TOKENS, THINKING = 6, 3  # of a turn, and of its thinking


async def ask(api: str, chat: list[Any], base_url: str, api_key: str) -> str:
    """Return what the policy says, without what it thinks."""
    if api == "messages":
        client = anthropic.with_options(base_url=base_url.removesuffix("/v1"), api_key=api_key)
        thinking: Any = {"type": "enabled", "budget_tokens": THINKING}
        message = await client.messages.create(model="policy", messages=chat, max_tokens=TOKENS, thinking=thinking)
        return "".join(block.text for block in message.content if block.type == "text")
    to, budget = openai.with_options(base_url=base_url, api_key=api_key), {"thinking_token_budget": THINKING}
    if api == "responses":
        made = await to.responses.create(model="policy", input=chat, max_output_tokens=TOKENS, extra_body=budget)
        return made.output_text
    reply = await to.chat.completions.create(model="policy", messages=chat, max_tokens=TOKENS, extra_body=budget)
    return reply.choices[0].message.content or ""


async def repeat(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask for a digit, twice if the first answer is wrong, and return the reward: 1, a half or nothing."""
    asked = {"role": "user", "content": f"repeat {row['digit']}"}
    first = await ask(row["api"], [asked], base_url, api_key)
    if first == str(row["digit"]):
        return 1.0
    again = [asked, {"role": "assistant", "content": first}, asked]
    return 0.5 * (await ask(row["api"], again, base_url, api_key) == str(row["digit"]))
