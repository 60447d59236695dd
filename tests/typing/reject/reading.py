"""Wrong uses of receivers, senders and results, each an error of the type checker on its own line."""

from __future__ import annotations

from oppo.graph import Graph, Receiver, Run, Sender, join


def key(item: int | str) -> int:
    return len(str(item))


def want_words(words: Receiver[str], rows: list[tuple[str, int]], graph: Graph[str], result: str | None) -> None: ...


async def read(numbers: Receiver[int], words: Receiver[str], out: Sender[int]) -> None:
    await out.send("a word")  # E
    await numbers.send(1)  # E
    async for number, word in join(numbers, words, key=key):
        number.upper()  # E
        word.bit_length()  # E
    join(numbers, key=key)  # E
    join(numbers, words)  # E


async def run(numbers: Receiver[int], words: Receiver[str], graph: Graph[int], opened: Run[int]) -> None:
    want_words(numbers, [], Graph[str](graph.topology), "")  # E
    want_words(words, [], graph, "")  # E
    want_words(words, [], Graph[str](graph.topology), await opened.step())  # E
    async for step in opened.steps("three"):  # E
        step.upper()  # E
    graph.replace(relay=7)  # E
