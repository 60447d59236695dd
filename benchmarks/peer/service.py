"""A contestant's end of its pipes: it waits for a line, clocks the steps that are asked for, and answers with a line.

====================  ==============================================================================================
written once, loaded  ``{"ready": {...}}``
read                  ``{"run": n}``
written               ``{"steps": [{"seconds", "tokens", "announced", "as_announced", "samples", "mean_length",
                      "capped"}, ...], "peak_rss_mb"}``, and ``"error"`` where that is not the work asked for
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
    """There are no more requests: the way out of somebody else's training loop."""


class Service:
    """Between requests it blocks and uses no processor; a step's clock runs while neither side reads or writes.

    Args:
        spec: the workload, which says what a step has to be.
        requests: read line by line.
        answers: nobody else writes there.
        now: seconds, monotonic.
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

    def ready(self, told: Mapping[str, object]) -> None:
        """Say that everything is loaded."""
        self._say({"ready": told})

    def wait(self) -> None:
        """Block until steps are asked for, and start the clock of the first.

        Raises:
            InputEnded: there are no more requests.
            ValueError: no steps were asked for.
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
        """Count an optimizer step that was taken, not one that was merely accumulated for."""
        self._updates += 1

    def lap(self) -> float:
        """Return the seconds that the step took which ends here; what follows is on nobody's clock."""
        return self._now() - self._started

    def done(self, seconds: float, lengths: Sequence[int], prompts: Sequence[Prompt]) -> None:
        """Take note of a step, answer if it was the last one asked for, and start the clock of the next.

        Args:
            seconds: as :meth:`lap` returned them.
            lengths: tokens trained of each response.
            prompts: what they answer, in the same order.

        Raises:
            InputEnded: there are no more requests.
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
        # Tokens are compared over the whole life of the program: a single response that runs away would be more than
        # the tolerance of a short request.
        faults = [complaint(self._tokens, self._announced)]
        expected = len(self._steps) * self._spec.epochs * self._spec.minibatches
        if self._updates != expected:
            faults.append(f"took {self._updates} optimizer steps where the workload asks for {expected}")
        error = "; ".join(filter(None, faults))
        answer: dict[str, object] = {"steps": self._steps, "peak_rss_mb": peak_rss_mb()}
        self._say(answer | ({"error": error} if error else {}))

    def _say(self, answer: Mapping[str, object]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
