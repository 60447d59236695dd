"""A generative judge as the reward: any service with the chat API of OpenAI grades each response from 0 to 10.

A settings file names one by its URL (docs/rewards.md). This program starts a stand-in for one and grades three texts:

    pip install 'oppo[http]'
    python examples/05_judge.py
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anyio

from oppo.rewards.judge import judge

TEMPLATE = "Grade the response to the prompt from 0 to 10.\n\nPrompt: {prompt}\n\nResponse: {response}"


class StandIn(BaseHTTPRequestHandler):
    """Answers as a chat model that likes long responses."""

    def do_POST(self) -> None:
        """Grade a response by its words."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = asked["messages"][-1]["content"].partition("Response: ")[2].split()
        answer = {"choices": [{"message": {"role": "assistant", "content": f"Grade: {min(10, len(words))}"}}]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


async def main() -> None:
    """Grade three texts, at the same time."""
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        grade = judge(f"http://127.0.0.1:{server.server_port}/v1", model="grader", template=TEMPLATE)
        texts = ["Yes.", "Yes, since water boils there.", "Because the air is thinner the higher one climbs up a hill."]

        async def show(text: str) -> None:
            print(f"{await grade(['Does water boil sooner on a mountain?'], [text])}  {text}")

        async with anyio.create_task_group() as tasks:
            for text in texts:
                tasks.start_soon(show, text)
        server.shutdown()


if __name__ == "__main__":
    anyio.run(main)
