"""A generative judge as the reward: any service with the chat API of OpenAI grades each response from 0 to 10.

A reward with ``source = "examples/05_judge.py:judge"`` and ``each = true`` trains with it; JUDGE_URL,
JUDGE_MODEL and JUDGE_KEY say which service. Run by itself, it starts a stand-in for one and grades three texts:

    pip install 'oppo[http]'
    python examples/05_judge.py
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import anyio

from oppo.rewards.http import HttpReward

INSTRUCTION = "Grade the response to the prompt from 0 to 10. Answer with the number alone."


def ask(prompts: Sequence[object], completions: Sequence[str], columns: Mapping[str, Sequence[object]]) -> object:
    """Return the request for one response."""
    del columns
    (prompt,), (completion,) = prompts, completions
    return {
        "model": os.environ.get("JUDGE_MODEL", "judge"),
        "temperature": 0,
        "messages": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": f"Prompt: {prompt}\n\nResponse: {completion}"},
        ],
    }


def grade(answer: Any) -> list[float]:
    """Return the grade in the judge's answer, as a score from 0 to 1."""
    said = answer["choices"][0]["message"]["content"]
    found = re.search(r"\d+(\.\d+)?", said)
    if found is None:
        raise ValueError(f"no grade in {said!r}")
    return [float(found[0]) / 10]


judge = HttpReward(
    os.environ.get("JUDGE_URL", "http://127.0.0.1:8123/v1/chat/completions"),
    headers={"Authorization": f"Bearer {os.environ.get('JUDGE_KEY', 'none')}"},
    request=ask,
    scores=grade,
)


class StandIn(BaseHTTPRequestHandler):
    """Answers as a chat model that likes long responses."""

    def do_POST(self) -> None:
        """Grade a response by its words."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = asked["messages"][-1]["content"].partition("Response: ")[2].split()
        answer = {"choices": [{"message": {"role": "assistant", "content": f"{min(10, len(words))}"}}]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


async def main() -> None:
    """Grade three texts, at the same time."""
    with ThreadingHTTPServer(("127.0.0.1", 8123), StandIn) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        texts = ["Yes.", "Yes, since water boils there.", "Because the air is thinner the higher one climbs up a hill."]

        async def show(text: str) -> None:
            print(f"{await judge(['Does water boil sooner on a mountain?'], [text])}  {text}")

        async with anyio.create_task_group() as tasks:
            for text in texts:
                tasks.start_soon(show, text)
        server.shutdown()


if __name__ == "__main__":
    anyio.run(main)
