"""Lengths of responses: drawn from a lognormal distribution, or from those of a file or of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oppo.declared import require_declared
from oppo.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lognormal lengths, cut off at the cap.

    Attributes:
        median: at the beginning and at the end of the run, between which it moves in proportion to the prompts.
        sigma: standard deviation of the logarithm.
        cap: the longest response.
        runaways: fraction of the responses that run to the cap wherever the lognormal lies.
    """

    median: tuple[float, float]
    sigma: float
    cap: int
    runaways: float = 0.0

    def __post_init__(self) -> None:
        require_declared(self)

    def __call__(self, units: int, samples: int, seed: int) -> NDArray[np.int64]:
        """Return the lengths of the responses to ``units`` prompts, int64 [units, samples], in tokens."""
        random, shape = np.random.default_rng(seed), (units, samples)
        first, last = self.median
        median = (first + (last - first) * np.linspace(0, 1, units))[:, None]
        drawn = np.clip((median * np.exp(self.sigma * random.standard_normal(shape))).astype(np.int64), 1, self.cap)
        return np.where(random.random(shape) < self.runaways, self.cap, drawn)


@dataclass(frozen=True, slots=True)
class Observed:
    """Lengths drawn anew from observed ones, those of a group together.

    Attributes:
        groups: lengths by group, in tokens; at least one group, and one length in each.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Observed:
        """Return the law of single lengths."""
        return cls(tuple((length,) for length in lengths))

    @classmethod
    def read(cls, path: Path, cap: int) -> Observed:
        """Return the law of the lengths in a file, cut off at ``cap``.

        A line is a length in tokens, or a JSON object with a key ``tokens``; JSON objects without it, and empty lines,
        are left out, so that a run's ``journal.jsonl`` can be read.

        Raises:
            ConfigError: the file cannot be read, or holds a line that is neither, or no length.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the lengths in {path}: {error}") from error
        lengths = [_length(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
        found = [min(length, cap) for length in lengths if length is not None]
        if not found:
            raise ConfigError(f"{path} holds no lengths: expected a number of tokens on each line")
        return cls.of(found)

    def __call__(self, units: int, samples: int, seed: int) -> NDArray[np.int64]:
        """Return the lengths of the responses to ``units`` prompts, int64 [units, samples], in tokens.

        Every group occurs about as often as any other: they are dealt like shuffled decks of cards, so that a short run
        has the tail of the observed one.
        """
        random, found = np.random.default_rng(seed), list[NDArray[np.int64]]()
        while len(found) < units:
            for k in random.permutation(len(self.groups)):
                group = np.array(self.groups[k], np.int64)
                found.append(group if len(group) == samples else random.choice(group, samples))
        return np.stack(found[:units])


def _length(line: str, path: Path, number: int) -> int | None:
    """Return the length on a line; ``None`` for a JSON object without one."""
    try:
        found = json.loads(line)
    except ValueError:
        found = line
    length = found.get("tokens") if isinstance(found, dict) else found
    if length is None:
        return None
    if type(length) is not int or length < 1:
        raise ConfigError(f"line {number} of {path}: expected a length, a whole number of 1 or more, got {line!r:.60}")
    return length
