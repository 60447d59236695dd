"""Errors of a settings file, in sentences: the key, what was expected, what came, the nearest name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from pydantic import ValidationError

from oppo.algorithms import ALGORITHMS
from oppo.algorithms.ppo import PPO
from oppo.app.kinds import Kinds
from oppo.app.reward_settings import RewardPart
from oppo.app.sections import StepSection
from oppo.app.settings import Settings, keys_of
from oppo.app.tables import expectation
from oppo.declared import Declared, declared
from oppo.errors import ConfigError, did_you_mean, shortened
from oppo.redact import HIDDEN, holds_secret, names_secret, redacted

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

REWARDS = ("models", "reward")
"""The key that may be a table of tables."""

OTHER_NAMES: Final = {
    "response_length": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "batch_size": "batch",
    "lr": "learning_rate",
    "num_generations": "samples",
    "kl_coef": "kl",
    "beta": "kl",
    "num_mini_batches": "minibatches",
}
"""Keys by the names that other libraries have for them."""

SHOWN = 200
"""Characters of a wrong value in its message."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Describes the faults of a file with sections of keys.

    Attributes:
        keys: declarations by section and key.
        sections: all that there can be.
        named: sections whose keys are names of sections of one kind: ``[gpus.NAME]``.
    """

    keys: Mapping[str, Mapping[str, Declared]]
    sections: Sequence[str]
    named: Collection[str] = ()

    def describe(self, error: ValidationError) -> str:
        """Return one line for each wrong setting."""
        grouped: dict[tuple[str, ...], list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            grouped.setdefault(self._place(detail["loc"]), []).append(detail)
        lines = [self._sentence(place, details) for place, details in grouped.items()]
        if len(lines) == 1:
            return lines[0]
        return "\n".join([f"{len(lines)} settings are wrong:", *(f"  {line}" for line in lines)])

    def _place(self, loc: Sequence[int | str]) -> tuple[str, ...]:
        """Return the section and the key of a fault, as far as it has them."""
        parts = [str(part) for part in loc]
        if len(parts) > 1 and parts[0] in self.named:
            parts[:2] = [f"{parts[0]}.{parts[1]}"]
        return tuple(parts[:2])

    def _declared(self, section: str) -> Mapping[str, Declared]:
        return self.keys.get(section.partition(".")[0], {})

    def _sentence(self, place: tuple[str, ...], details: Sequence[ErrorDetails]) -> str:
        detail = details[0]
        if not place:  # a fault between sections, which its message names
            return detail["msg"].removeprefix("Value error, ")
        where = f"[{'.'.join(place)}]" if len(place) % 2 else ".".join(place)
        if detail["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
            return self._unknown(place)
        if detail["type"] == "missing":
            return f"{where} is missing: {self._wanted(place)}"
        if detail["type"] == "value_error":
            return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
        if detail["type"] in {"model_type", "dataclass_type"}:
            return f"{where}: expected {self._wanted(place)}, got {shortened(repr(detail['input']), SHOWN)}"
        if detail["loc"][-1:] == ("[key]",):
            home = ".".join(place[:2])
            return f"{home}: expected names of {expectation(detail)}, got {shortened(repr(detail['input']), SHOWN)}"
        item = next((f"item {part} to be " for part in detail["loc"][2:] if isinstance(part, int)), "")
        expected = " or ".join(dict.fromkeys(expectation(each) for each in details))
        choices = detail.get("ctx", {}).get("expected", "").replace("'", "").replace(" or ", ", ").split(", ")
        guess = did_you_mean(str(detail["input"]), choices) if detail["type"] == "literal_error" else ""
        return f"{where}: expected {item}{expected}, got {shortened(repr(detail['input']), SHOWN)}{guess}"

    def _wanted(self, place: tuple[str, ...]) -> str:
        keys = self._declared(place[0])
        return f"a section with the keys {', '.join(keys)}" if len(place) == 1 else keys[place[1]].description

    def _unknown(self, place: tuple[str, ...]) -> str:
        if len(place) == 1:
            return self._unknown_name("section", "a configuration", self.sections, place)
        return self._unknown_name("key", f"[{place[0]}]", self._declared(place[0]), place)

    def _unknown_name(self, kind: str, home: str, known: Iterable[str], place: tuple[str, ...]) -> str:
        known = list(known)
        guess = self._elsewhere(place) or did_you_mean(OTHER_NAMES.get(place[-1], place[-1]), known)
        return f"unknown {kind} {'.'.join(place)!r}{guess}; the {kind}s of {home} are {', '.join(known)}"

    def _elsewhere(self, place: tuple[str, ...]) -> str:
        """Return the sections that have the same key."""
        homes = [f"[{name}]" for name, keys in self.keys.items() if len(place) == 2 and place[1] in keys]
        return f" (it is a key of {', '.join(homes)})" if homes else ""


@dataclass(frozen=True, slots=True)
class SettingsFaults(Faults):
    """Describes the faults of a run's settings.

    Attributes:
        algorithm: the name of the algorithm that declares ``[algorithm]``.
    """

    algorithm: str = ""

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Self:
        """Return the describer for a document and its algorithm."""
        kinds, step = Kinds.of(document), document.get("step")
        named = step.get("algorithm") if kinds.algorithm is not None and isinstance(step, Mapping) else None
        keys = keys_of(kinds.algorithm or PPO, kinds)
        return cls(keys, list(Settings.model_fields), algorithm=str(named or StepSection().algorithm))

    def _place(self, loc: Sequence[int | str]) -> tuple[str, ...]:
        """Return the same, and of a reward among several its name and the key there."""
        return tuple(str(part) for part in loc[: 4 if loc[:2] == REWARDS else 2])

    def _wanted(self, place: tuple[str, ...]) -> str:
        if len(place) == 3:
            return f"a table with the keys {', '.join(declared(RewardPart))}"
        if len(place) == 4:
            return declared(RewardPart)[place[3]].description
        return super(SettingsFaults, self)._wanted(place)

    def _unknown(self, place: tuple[str, ...]) -> str:
        if len(place) == 4:
            return self._unknown_name("key", "[models.reward.NAME]", declared(RewardPart), place)
        return super(SettingsFaults, self)._unknown(place)

    def _elsewhere(self, place: tuple[str, ...]) -> str:
        """Return the sections or algorithms that have the same key."""
        if len(place) != 2:
            return ""
        others = ", ".join(repr(name) for name, kind in ALGORITHMS.items() if place[1] in declared(kind))
        if place[0] == "algorithm" and others:
            return f" (it is a key of [algorithm] for {others}, not for {self.algorithm!r})"
        homes = super(SettingsFaults, self)._elsewhere(place)
        if homes or not others:
            return homes
        return f" (it is a key of [algorithm] for {others}, not for {self.algorithm!r})"


def require_public(tables: Mapping[str, Mapping[str, object]]) -> None:
    """Check that no setting holds a secret, by its name or its value: a run writes its settings into a file.

    Raises:
        ConfigError: a setting holds one.
    """
    for name, section in tables.items():
        for key, text in _texts(name, section):
            if text and (names_secret(key.rpartition(".")[2]) or holds_secret(text)):
                shown = HIDDEN if redacted(text) == text else redacted(text)
                raise ConfigError(
                    f"{key} holds a secret, got {shown}: a run keeps its settings in a file, so give it in the "
                    "environment, or by a login, and leave it out here"
                )


def _texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the texts in a value of a file with their keys, those in lists and tables included."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(f"{key}.{name}", each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(key, each)
