"""A generative judge: what it is asked, how its scores are read, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest

from oppo.errors import ConfigError
from oppo.rewards.http import ServiceFailure
from oppo.rewards.judge import columns_of, judge, key_of, reading_of

URL = "http://judge.example/v1/"


def said(content: str | None) -> Mapping[str, Any]:
    return {"message": {"role": "assistant", "content": content}}


def likely(**probabilities: float) -> Mapping[str, Any]:
    top = [{"token": token, "logprob": math.log(each)} for token, each in probabilities.items()]
    return {"message": {"content": ""}, "logprobs": {"content": [{"top_logprobs": top}]}}


async def asked(choice: Mapping[str, Any], prompt: object = "1 + 1?", **options: Any) -> tuple[object, httpx.Request]:
    """Return the score of the response ``2``, and the request for it."""
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json={"choices": [choice]})

    service = replace(judge(URL, model="grader", **options), transport=httpx.MockTransport(answer))
    scores = await service([prompt], ["2"], answer=["two"], note=["{prompt} {unknown}"])
    return scores, requests[0]


async def test_a_judge_is_asked_by_its_template_with_columns_of_the_data() -> None:
    template = "Q: {prompt}\nA: {response}\nRight: {answer} {{grade}} {note}"
    scores, request = await asked(said("8"), template=template, system="Grade.", temperature=0.5, api_key="k")
    assert scores == [8.0]
    assert str(request.url) == "http://judge.example/v1/chat/completions"
    assert request.headers["Authorization"] == "Bearer k"
    assert json.loads(request.content) == {
        "model": "grader",
        "messages": [
            {"role": "system", "content": "Grade."},
            {"role": "user", "content": "Q: 1 + 1?\nA: 2\nRight: two {grade} {prompt} {unknown}"},
        ],
        "temperature": 0.5,
        "max_tokens": 512,
    }


async def test_messages_of_a_prompt_are_told_with_their_roles() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    _, request = await asked(said("1"), prompt, template="{prompt}")
    assert json.loads(request.content)["messages"][0]["content"] == "system: Be brief.\n\nuser: 1 + 1?"
    assert "Authorization" not in request.headers


async def test_a_rating_is_the_mean_over_the_first_token() -> None:
    choice = likely(**{"4": 0.3, " 5": 0.3, "7": 0.2, "The": 0.2})
    scores, request = await asked(choice, template="{response}", score="rating:1-5")
    assert scores == pytest.approx([4.5])
    body = json.loads(request.content)
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)


@pytest.mark.parametrize(
    ("reading", "content", "score"),
    [
        ("number", "7 of 10 points, so 0.7", 0.7),
        ("number", "-3", -3.0),
        (r"regex:grade: (\d+)", "grade: 2? No, grade: 3. 9", 3.0),
        (r"regex:\d", "a 4 b", 4.0),
        ("json:score", 'Thus:\n```json\n{"why": "{x}", "score": "0.25"}\n``` {"score": 1}', 0.25),
    ],
)
def test_a_score_is_read_from_an_answer(reading: str, content: str, score: float) -> None:
    assert reading_of(reading)(said(content)) == score


@pytest.mark.parametrize(
    ("reading", "choice", "message"),
    [
        ("number", said("fine"), "nothing in 'fine' matches"),
        ("number", said(None), "nothing in '' matches"),
        ("json:score", said('{"grade": 1} {'), "no JSON object .* has a field 'score'"),
        ("json:score", said('{"score": "NaN"}'), "expected a finite number as the score, got 'NaN'"),
        ("json:score", said('{"score": true}'), "true|True"),
        ("rating:1-5", likely(Good=1.0), r"none of its likely first tokens \['Good'\] is a rating of 1 to 5"),
    ],
)
async def test_an_answer_without_a_score_is_a_failure_that_says_what_was_looked_for(
    reading: str, choice: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ServiceFailure, match=rf"judge\.example/v1/chat/completions answered something .*{message}"):
        await asked(choice, template="{response}", score=reading)


@pytest.mark.parametrize("text", ["", "numbers", "regex:", "regex:(", "json:", "rating:5", "rating:5-1"])
def test_what_is_no_way_to_read_a_score_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected 'number'|no regular expression"):
        reading_of(text)


def test_a_template_names_columns_and_nothing_else() -> None:
    assert columns_of("{prompt} {response} {answer:>3} {{brace}} {answer}") == {"answer"}
    for template, message in (
        ("{answer", "a brace that is no field"),
        ("{}", "names ''"),
        ("{answer.__class__}", "names 'answer.__class__'"),
    ):
        with pytest.raises(ConfigError, match=message):
            judge(URL, model="grader", template=template)


def test_the_key_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert (key_of("JUDGE_KEY"), key_of("")) == ("secret", "")
    with pytest.raises(ConfigError, match="'NO_KEY', which is not set: set it, or leave api_key_env out"):
        key_of("NO_KEY")
