"""Nim, which one policy learns by playing both sides: of some stones each takes one to three, and the last one wins."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

shared = AsyncOpenAI(base_url="http://localhost", api_key="of each agent", timeout=None)


async def play(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Play a game of two roles, and return what each has earned; an answer that is no move takes one stone."""
    client, stones = shared.with_options(base_url=base_url, api_key=api_key), row["stones"]
    player, other = row["first"], row["second"]
    seen: dict[str, list[Any]] = {player: [], other: []}
    while stones > 0:
        seen[player].append({"role": "user", "content": str(stones)})
        reply = await client.chat.completions.create(model=player, messages=seen[player], max_tokens=1)
        said = reply.choices[0].message.content or ""
        seen[player].append({"role": "assistant", "content": said})
        stones -= int(said) if said in {"2", "3"} else 1
        player, other = other, player
    return {other: 1.0, player: -1.0}
