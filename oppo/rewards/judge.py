"""A generative judge as the reward: a model behind a chat API grades each response. It needs the extra ``http``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, Unpack

from oppo.errors import ConfigError
from oppo.rewards.function import ByTurn

if TYPE_CHECKING:
    from oppo.rewards.http import JSON, HttpReward

OWN: Final = frozenset({"prompt", "response"})  # the names in a template that are no columns
LIKELY: Final = 20  # tokens whose probabilities a rating is read from: the most that OpenAI's API gives


def columns_of(template: str) -> frozenset[str]:
    """Return the columns of the data that a template names."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"a judge's template has a brace that is no field ({error}): write {{{{ for one") from error
    if odd := [name for name in names if not name.isidentifier()]:
        raise ConfigError(
            f"a judge's template names {odd[0]!r}: expected {{prompt}}, {{response}} or a column, and {{{{ for a brace"
        )
    return frozenset(names - OWN)


class ServiceOptions(TypedDict, total=False):
    """How a judge's service is asked, see :class:`~oppo.rewards.http.HttpReward`."""

    concurrency: int
    timeout: float
    attempts: int


def judge(
    url: str,
    *,
    model: str,
    template: str,
    system: str = "",
    score: str = "number",
    temperature: float = 0.0,
    max_tokens: int = 512,
    api_key: str = "",
    **service: Unpack[ServiceOptions],
) -> HttpReward:
    """Return a reward function that asks a judge for each response; give it to a ``FunctionReward`` with ``each=True``.

    Args:
        url: of a chat API as OpenAI's, such as ``http://localhost:8000/v1``.
        model: its name there.
        template: the user message: ``{prompt}``, ``{response}``, and columns of the data by their names.
        system: the message before it.
        score: see :func:`reading_of`; an answer without one is a failure.
        temperature, max_tokens: of its sampling.
        api_key: sent with each request.
        service: see :class:`~oppo.rewards.http.HttpReward`.

    Raises:
        ConfigError: the URL is none, or the template has a brace that is no field.
        ValueError: ``score`` is no way to read one.
    """
    from oppo.rewards.http import HttpReward  # noqa: PLC0415 - its libraries are an extra

    columns_of(template)
    read, by_tokens = reading_of(score), score.startswith("rating:")
    sampled = {"logprobs": True, "top_logprobs": LIKELY, "max_tokens": 1} if by_tokens else {"max_tokens": max_tokens}

    def request(
        prompts: Sequence[object], completions: Sequence[object], columns: Mapping[str, Sequence[object]]
    ) -> object:
        (prompt,), (said,) = prompts, completions
        response = said[0]["content"] if isinstance(said, list) and len(said) == 1 else as_text(said)
        own = {name: values[0] for name, values in columns.items()}
        asked = template.format_map({**own, "prompt": as_text(prompt), "response": response})
        first = [{"role": "system", "content": system}] if system else []
        messages = [*first, {"role": "user", "content": asked}]
        return {"model": model, "messages": messages, "temperature": temperature, **sampled}

    def scores(answer: JSON) -> list[float]:
        found: Any = answer
        return [read(found["choices"][0])]

    return HttpReward(
        f"{url.rstrip('/')}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        request=request,
        scores=scores,
        **service,
    )


def as_text(prompt: object) -> str:
    """Return a prompt as text; of messages, each after its role."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return str(prompt)
    return "\n\n".join(f"{each['role']}: {each.get('content') or ''}" for each in prompt)


Read: TypeAlias = Callable[[Mapping[str, Any]], float]
"""Returns the score in a choice of a chat API's answer; raises a ``ValueError`` or ``LookupError`` without one.

A list of a JSON field is a score for each turn (:class:`~oppo.rewards.ByTurn`)."""

NUMBER: Final = r"-?\d+(?:\.\d+)?"

_RATING: Final = re.compile(r"(\d{1,3})-(\d{1,3})")


def reading_of(text: str) -> Read:
    r"""Return a function that reads a score as ``number``, ``regex:PATTERN``, ``json:FIELD`` or ``rating:1-10``.

    Raises:
        ValueError: it is none of these, the pattern is none, or the rating has no range.

    Example:
        >>> reading_of("regex:grade: (\d+)")({"message": {"content": "A good one. grade: 7"}})
        7.0
    """
    kind, _, rest = text.partition(":")
    if text == "number":
        return lambda choice: _matched(re.compile(NUMBER), choice)
    if kind == "json" and rest:
        return lambda choice: _field(rest, choice)
    if kind == "regex" and rest:
        try:
            pattern = re.compile(rest)
        except re.error as error:
            raise ValueError(f"{rest!r} is no regular expression: {error}") from error
        return lambda choice: _matched(pattern, choice)
    if kind == "rating" and (found := _RATING.fullmatch(rest)):
        low, high = map(int, found.groups())
        if low < high:
            return lambda choice: _rating(range(low, high + 1), choice)
    raise ValueError(f"expected 'number', 'regex:PATTERN', 'json:FIELD' or 'rating:1-10', got {text!r}")


def _content(choice: Mapping[str, Any]) -> str:
    return str(choice["message"]["content"] or "")


def _matched(pattern: re.Pattern[str], choice: Mapping[str, Any]) -> float:
    matches = list(pattern.finditer(_content(choice)))
    if not matches:
        raise ValueError(f"nothing in {_content(choice)[-200:]!r} matches {pattern.pattern!r}")
    return _finite(matches[-1][1 if pattern.groups else 0])


def _field(name: str, choice: Mapping[str, Any]) -> float:
    # the JSON may stand in a code block, or in words
    content, decoder = _content(choice), json.JSONDecoder()
    for at in (found.start() for found in re.finditer(r"\{", content)):
        try:
            value, _ = decoder.raw_decode(content, at)
        except ValueError:
            continue
        if name in value:
            found = value[name]
            return ByTurn([_finite(each) for each in found]) if isinstance(found, list) else _finite(found)
    raise ValueError(f"no JSON object in {content[-200:]!r} has a field {name!r}")


def _rating(ratings: Sequence[int], choice: Mapping[str, Any]) -> float:
    if not choice.get("logprobs"):
        raise ValueError("the service gives no log-probs, which a rating is made of: read a number instead")
    first = choice["logprobs"]["content"][0]["top_logprobs"]
    weights = dict.fromkeys(ratings, 0.0)
    for each in first:
        if (token := str(each["token"]).strip()).isdecimal() and int(token) in weights:
            weights[int(token)] += math.exp(each["logprob"])
    total = sum(weights.values())
    if not total:
        likely = [each["token"] for each in first]
        raise ValueError(f"none of its likely first tokens {likely} is a rating of {ratings[0]} to {ratings[-1]}")
    return sum(rating * weight for rating, weight in weights.items()) / total


def _finite(value: object) -> float:
    score = float(str(value))
    if isinstance(value, bool) or not math.isfinite(score):
        raise ValueError(f"expected a finite number as the score, got {value!r}")
    return score
