"""A contestant's end of its pipes: it reads a request, times the steps, and writes the answer.

====================  ==============================================================================================
written once, loaded  ``{"ready": {...}}``
read                  ``{"run": n}``
written               ``{"steps": [{"seconds", "tokens", "announced", "as_announced", "samples", "mean_length",
                      "capped"}, ...], "peak_rss_mb"}``, and ``"error"`` if the work is not the workload's
end of input          ends the program
====================  ==============================================================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from benchmarks.memory import peak_rss_mb
from benchmarks.peer.workload import Prompt, Spec, announced_tokens, complaint


class InputEnded(Exception):  # noqa: N818 - it says what happened
    """The requests have ended; raised to leave the peer's training loop."""


class Service:
    """Serves requests for steps; it blocks between them, and a step's clock stops while it reads or writes.

    ``spec`` defines a step; only answers are written to ``answers``; ``now`` returns monotonic seconds.
    """

    def __init__(
        self, spec: Spec, requests: TextIO, answers: TextIO, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self._requests = requests
        self._answers = answers
        self._now = now
        self._wanted = 0
        self._started = 0.0
        self._updates = 0
        self._announced = 0
        self._tokens = 0
        self._steps: list[dict[str, float]] = []

    def ready(self, facts: Mapping[str, object]) -> None:
        """Answer that everything is loaded."""
        self._send({"ready": facts})

    def wait(self) -> None:
        """Block until a request for steps, and start the clock of the first.

        Raises:
            InputEnded: the requests have ended.
            ValueError: the request is for no steps.
        """
        line = self._requests.readline()
        if not line:
            raise InputEnded
        self._wanted = json.loads(line)["run"]
        if self._wanted < 1:
            raise ValueError(f"asked to run {self._wanted} steps: expected one or more")
        self._updates = 0
        self._steps = []
        self._started = self._now()

    def updated(self) -> None:
        """Count an optimizer step; an accumulated micro-batch is none."""
        self._updates += 1

    def lap(self) -> float:
        """Return the seconds of the step that ends here, and stop the clock."""
        return self._now() - self._started

    def done(self, seconds: float, lengths: Sequence[int], prompts: Sequence[Prompt]) -> None:
        """Record a step, answer after the last one of the request, and start the clock of the next.

        ``seconds`` are from :meth:`lap`; ``lengths`` are the trained tokens of each response to ``prompts``.

        Raises:
            InputEnded: the requests have ended.
        """
        cap = self._spec.max_new_tokens
        as_announced = sum(n == min(p.length, cap) for n, p in zip(lengths, prompts, strict=True))
        announced, tokens = announced_tokens(prompts, cap), sum(lengths)
        self._announced += announced
        self._tokens += tokens
        self._steps.append(
            {
                "seconds": seconds,
                "tokens": tokens,
                "announced": announced,
                "as_announced": as_announced / len(prompts),
                "samples": len(lengths),
                "mean_length": tokens / len(lengths),
                "capped": sum(n >= cap for n in lengths),
            }
        )
        if len(self._steps) < self._wanted:
            self._started = self._now()
            return
        self._answer()
        self.wait()

    def _answer(self) -> None:
        # Tokens are compared over the whole life of the program: a single runaway response would exceed the tolerance
        # of a short request.
        faults = [complaint(self._tokens, self._announced)]
        expected = len(self._steps) * self._spec.epochs * self._spec.minibatches
        if self._updates != expected:
            faults.append(f"took {self._updates} optimizer steps where the workload asks for {expected}")
        error = "; ".join(filter(None, faults))
        answer: dict[str, object] = {"steps": self._steps, "peak_rss_mb": peak_rss_mb()}
        self._send(answer | ({"error": error} if error else {}))

    def _send(self, answer: Mapping[str, object]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
