"""A reward behind HTTP, both ends: a server of the plain protocol in standard Python, and a run that asks it.

    pip install 'oppo[http]'
    python examples/09_reward_service.py            # serves on a free port, and trains three steps with it
    python examples/09_reward_service.py 8000       # serves on this port until Ctrl-C

A request is ``{"prompts": [...], "completions": [...], "columns": {...}}``, the answer ``{"scores": [...]}`` with one
number for each completion; what cannot be scored is answered with 400 and a sentence. ``oppo train`` asks such a server
by a reward's ``source = "examples/09_reward_service.py:service"``, at the address in REWARD_URL.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread as OsThread

import anyio
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oppo import FunctionReward, Overcommit, Prompt, Sampling, StepReport, Thread, grpo
from oppo.hf import HfPolicy, HfTrainer
from oppo.losses import ClippedLoss
from oppo.rewards.http import HttpReward


def score(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return the share of distinct words in each completion: your own model or rules go here."""
    del prompts
    return [len(set(text.split())) / len(text.split()) for text in completions]


class Scores(BaseHTTPRequestHandler):
    """Answers requests for scores; a client keeps its connection from one to the next."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Score the completions of a request."""
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            asked = json.loads(content)
            self._answer(200, {"scores": score(asked["prompts"], asked["completions"])})
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            self._answer(400, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def serving(port: int = 0) -> Iterator[str]:
    """Serve on a port of this machine, a free one unless it is named; yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", port), Scores) as server:
        server.daemon_threads = True
        OsThread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/score"
        finally:
            server.shutdown()


service = HttpReward(os.environ.get("REWARD_URL", "http://127.0.0.1:8000/score"), timeout=20)


async def train(url: str, steps: int = 3) -> list[StepReport]:
    """Train a tiny model at random weights on the scores of the server; return what each step did."""
    torch.manual_seed(0)
    actor = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )
    sampling = Sampling(max_new_tokens=16, stop=(1, 2), seed=1)
    prompts = [Prompt(n, n, np.arange(3 + n % 50, 8 + n % 50, dtype=np.int32)) for n in range(100)]
    with Thread("actor") as acting, Thread("trainer") as training:
        graph = grpo(
            policy=HfPolicy(actor, sampling=sampling, place=acting),
            reward=FunctionReward(HttpReward(url), decode=lambda tokens: " ".join(map(str, tokens)), timeout=60),
            trainer=HfTrainer(actor, sampling=sampling, place=training, loss=ClippedLoss()),
            admission=Overcommit(batch=4, overcommit=1),
            samples=4,
        )
        async with graph.open(prompts) as run:
            return [step async for step in run.steps(steps)]


async def main() -> None:
    """Print the score of each step."""
    with serving() as url:
        for step in await train(url):
            print(f"step {step.index}: score {step.score:.3f}, {step.seconds:.2f} s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with serving(int(sys.argv[1])) as address, suppress(KeyboardInterrupt):
            print(f"scores at {address}")
            anyio.run(anyio.sleep_forever)
        sys.exit()
    torch.set_num_threads(1)
    anyio.run(main)
