"""Wrong wires, each an error of the type checker on its own line."""

from __future__ import annotations

from oppo.graph import GraphBuilder, Receiver, Sender


class Words:
    async def run(self, numbers: Receiver[int], *, out: Sender[str]) -> None: ...


class Pairs:
    async def run(self, words: Receiver[str], numbers: Receiver[int], *, out: Sender[bytes]) -> None: ...


class NotAsync:
    def run(self, numbers: Receiver[int], *, out: Sender[str]) -> None: ...


class NoOut:
    async def run(self, numbers: Receiver[int]) -> None: ...


g = GraphBuilder[int]("wrong")
words = g.add("words", Words(), g.prompts)
g.add("pairs", Pairs(), words, g.prompts)

g.add("swapped", Pairs(), g.prompts, words)  # E
g.add("skipped", Words(), words)  # E
g.add("too_few", Pairs(), words)  # E
g.add("too_many", Words(), g.prompts, words)  # E
g.add("no_stream", Words(), "prompts")  # E
g.add("a_class", Words, g.prompts)  # E
g.add("not_async", NotAsync(), g.prompts)  # E
g.add("no_out", NoOut(), g.prompts)  # E
g.build("words")  # E
