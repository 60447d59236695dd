"""A service as the reward, and a judge behind one: slow, flapping, hanging, and answering garbage."""

from __future__ import annotations

import gzip
import json
import math
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest

from oppo.errors import ConfigError
from oppo.redact import key_of
from oppo.rewards import FunctionReward, RewardFailure
from oppo.rewards.http import HttpReward, ServiceFailure
from oppo.rewards.judge import columns_of, judge, reading_of
from oppo.testing import run_virtual
from tests.rewards.test_combined import finished

URL = "http://me:hunter2@judge.example:8000/score?key=canary"
NAMED = "http://judge.example:8000/score"


def lengths(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"scores": [len(each) for each in json.loads(request.content)["completions"]]})


def served(*answers: httpx.Response | Exception, seconds: float = 0.0) -> tuple[HttpReward, list[float]]:
    """Return a reward whose service gives these answers in turn, then lengths; and when it was asked."""
    left, asked = list(answers), list[float]()

    async def handle(request: httpx.Request) -> httpx.Response:
        asked.append(anyio.current_time())
        await anyio.sleep(seconds)
        answer = left.pop(0) if left else lengths(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return HttpReward(URL, transport=httpx.MockTransport(handle)), asked


def called(judge: HttpReward, completions: Sequence[str] = ("one", "three")) -> object:
    return run_virtual(judge, ["a"] * len(completions), completions)


def test_a_service_is_given_prompts_completions_and_columns() -> None:
    seen = list[object]()

    async def handle(request: httpx.Request) -> httpx.Response:
        seen.append((json.loads(request.content), request.headers["Authorization"]))
        return httpx.Response(200, json=[0.5])

    judge = HttpReward(
        URL.replace("me:hunter2@", ""), headers={"Authorization": "Bearer x"}, transport=httpx.MockTransport(handle)
    )

    async def main() -> object:
        return await judge(["why"], ["because"], gold=["so"])

    assert run_virtual(main) == [0.5]
    body = {"prompts": ["why"], "completions": ["because"], "columns": {"gold": ["so"]}}
    assert seen == [(body, "Bearer x")]
    assert judge.__name__ == HttpReward(URL).__name__ == NAMED


@pytest.mark.parametrize(
    "failure",
    [*(httpx.Response(status) for status in (408, 429, 500, 503)), httpx.ConnectError("no"), httpx.ReadTimeout("late")],
    ids=str,
)
def test_what_may_pass_is_asked_again_after_growing_pauses(
    failure: httpx.Response | Exception, messages: list[str]
) -> None:
    judge, asked = served(failure, failure, failure)
    assert called(judge) == [3, 5]
    gaps = [after - before for before, after in pairwise(asked)]
    assert [1 <= gaps[0] <= 1.25, 2 <= gaps[1] <= 2.25, 4 <= gaps[2] <= 4.25] == [True] * 3, gaps
    assert [message.startswith(NAMED) for message in messages] == [True] * 3
    assert messages[-1].endswith("; attempt 4 of 4 follows in about 4 s")


def test_the_pause_is_what_the_service_asks_for() -> None:
    judge, asked = served(httpx.Response(429, headers={"Retry-After": "17"}))
    assert called(judge) == [3, 5]
    assert asked == [0, 17]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(400, text="no\nsuch  model"), "answered 400 Bad Request: no such model"),
        (httpx.Response(401), "answered 401 Unauthorized"),
        (httpx.Response(200, text="<html>login</html>"), "answered something that is no JSON: '<html>login</html>'"),
        (httpx.Response(200, json={"score": 1}), r"answered something without scores \(KeyError: 'scores'\)"),
    ],
)
def test_what_will_not_pass_is_final(answer: httpx.Response, message: str) -> None:
    judge, asked = served(answer)
    with pytest.raises(ServiceFailure, match=f"{NAMED} {message}"):
        called(judge)
    assert len(asked) == 1


@pytest.mark.parametrize("answer", [[1.0], [1.0, float("nan")], "many", 7, [None, 1.0], {"scores": [1, 2, 3]}])
def test_scores_of_a_wrong_number_or_kind_are_a_failure(answer: object) -> None:
    judge, _ = served(httpx.Response(200, content=json.dumps(answer)))
    with pytest.raises(RewardFailure, match=f"reward function '{NAMED}' (must return|raised)"):
        run_virtual(FunctionReward(judge, decode=str).finish, finished(2))


def test_a_service_that_stays_away_is_named_with_what_it_said_last() -> None:
    judge, asked = served(*[httpx.Response(503, text="restarting")] * 9)
    with pytest.raises(ServiceFailure, match=f"{NAMED} answered 503 Service Unavailable: restarting"):
        called(judge)
    assert len(asked) == 4


@asynccontextmanager
async def listening(answer: Callable[[anyio.abc.SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    """Serve on a free port of this machine; yield the URL."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        yield f"http://127.0.0.1:{port}/score"
        tasks.cancel_scope.cancel()


async def hang(stream: anyio.abc.SocketStream) -> None:
    async with stream:
        await stream.receive()
        await anyio.sleep_forever()


async def hang_up(stream: anyio.abc.SocketStream) -> None:
    async with stream:
        await stream.receive()


async def babble(stream: anyio.abc.SocketStream) -> None:
    async with stream:
        await stream.receive()
        await stream.send(b"\x00\xff\xfe no HTTP at all\r\n\r\n")


async def score(stream: anyio.abc.SocketStream) -> None:
    async with stream:
        with suppress(anyio.EndOfStream):
            while True:  # a connection serves many requests
                await stream.receive()
                body = b'{"scores": [0.25]}'
                await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


async def slow(stream: anyio.abc.SocketStream) -> None:
    await anyio.sleep(0.1)
    await score(stream)


async def refuse(stream: anyio.abc.SocketStream) -> None:
    async with stream:
        await stream.receive()
        await stream.send(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")


async def trickle(stream: anyio.abc.SocketStream) -> None:
    async with stream:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(anyio.BrokenResourceError):
            while True:
                await stream.send(b"1\r\n \r\n")
                await anyio.sleep(0.02)


async def pour(stream: anyio.abc.SocketStream) -> None:
    async with stream:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(anyio.BrokenResourceError):
            while True:
                await stream.send(b"1000\r\n%s\r\n" % (b" " * 0x1000))


async def nest(stream: anyio.abc.SocketStream) -> None:
    async with stream:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n%s" % (b"[" * 200_000))


def answering(body: bytes, *headers: bytes) -> Callable[[anyio.abc.SocketStream], Awaitable[None]]:
    head = b"".join(b"%s\r\n" % each for each in (b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers))

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(head + b"\r\n" + body)

    return answer


BOMB = gzip.compress(gzip.compress(b" " * 50_000_000))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answering(BOMB, b"Content-Encoding: gzip, gzip"), r"compressed its answer \(gzip, gzip\)"),
        (answering(gzip.compress(BOMB), b"Content-Encoding: GZip"), "compressed its answer"),
        (answering(b"[0.25]", b"Content-Type: application/json; charset=hex"), "in a charset that is none of text"),
        (answering(b"[0.25]", b"Content-Type: application/json; charset=undefined"), "charset that is none of text"),
        (answering(b"9" * 50_000, b"Content-Type: application/json; charset=punycode"), "charset that is none of text"),
        (answering(b"[0.25]", b"Content-Type: application/json; charset=martian", b"Content-Encoding: identity"), ""),
    ],
    ids=range(6),
)
async def test_an_answer_is_bounded_before_it_is_read(
    answer: Callable[[anyio.abc.SocketStream], Awaitable[None]], message: str
) -> None:
    async with listening(answer) as url:
        judge = HttpReward(url, attempts=1, most_bytes=100_000)
        if not message:
            assert await judge(["a"], ["b"]) == [0.25]
            return
        tracemalloc.start()
        try:
            with pytest.raises(ServiceFailure, match=message):
                await judge(["a"], ["b"])
            assert tracemalloc.get_traced_memory()[1] < 10_000_000
        finally:
            tracemalloc.stop()


async def test_a_run_keeps_as_many_connections_as_calls_overlap() -> None:
    connections = list[anyio.abc.SocketStream]()

    async def count(stream: anyio.abc.SocketStream) -> None:
        connections.append(stream)
        await slow(stream)

    async with listening(count) as url:
        judge = HttpReward(url, concurrency=3)
        async with judge:
            for _ in range(3):
                async with anyio.create_task_group() as tasks:
                    for _ in range(8):
                        tasks.start_soon(judge, ["a"], ["b"])
        assert len(connections) == 3
        async with judge:
            await judge(["a"], ["b"])
        assert len(connections) == 4


async def test_a_service_that_is_slow_or_flaps_is_waited_for() -> None:
    answers = iter([hang_up, babble, refuse, hang])

    async def flap(stream: anyio.abc.SocketStream) -> None:
        await next(answers, slow)(stream)

    async with listening(flap) as url:
        assert await HttpReward(url, timeout=0.5, attempts=20, pause=0.01)(["a"], ["b"]) == [0.25]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (hang, "did not answer within 0.3 s"),
        (trickle, "did not answer within 0.3 s"),
        (hang_up, "cannot be asked: RemoteProtocolError"),
        (babble, "cannot be asked: RemoteProtocolError"),
        (pour, "answered more than 100000 bytes"),
        (nest, r"answered something that is no JSON: '\[\[\["),
    ],
)
@pytest.mark.parametrize("kept", [False, True])
async def test_a_service_that_hangs_trickles_babbles_or_pours_is_a_failure(
    answer: Callable[[anyio.abc.SocketStream], Awaitable[None]], message: str, kept: bool
) -> None:
    async with listening(answer) as url, AsyncExitStack() as run:
        most = 1_000_000 if answer is nest else 100_000
        judge = HttpReward(url, timeout=10 if answer in {pour, nest} else 0.3, attempts=2, pause=0.01, most_bytes=most)
        if kept:
            await run.enter_async_context(judge)
        with anyio.fail_after(30), pytest.raises(ServiceFailure, match=message):
            await judge(["a"], ["b"])


async def test_the_failure_of_a_service_that_is_not_there_names_no_line_of_a_library_and_no_private_class() -> None:
    async with listening(score) as url:
        pass
    judge = HttpReward(url, attempts=2, pause=0.01)
    with pytest.raises(RewardFailure, match=r" raised ServiceFailure: .* cannot be asked: ConnectError") as caught:
        await FunctionReward(judge, decode=str).finish(finished(1))
    assert not any(words in str(caught.value) for words in (" at ", "_Passing"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "expected the URL of a service, such as http://localhost:8000; got 'localho"),
        ({"attempts": 0}, "attempts must be more than 0, not 0"),
        ({"timeout": -1}, "timeout must be at least 0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HttpReward(**{"url": URL, **options})  # type: ignore[arg-type] # wrong on purpose


async def test_the_judge_of_the_example_grades_each_response(capsys: pytest.CaptureFixture[str]) -> None:
    await import_module("examples.05_judge").main()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[1.0]  Yes.",
        "[10.0]  Because the air is thinner the higher one climbs up a hill.",
        "[5.0]  Yes, since water boils there.",
    ]


JUDGE = "http://judge.example/v1/"


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

    service = replace(judge(JUDGE, model="grader", **options), transport=httpx.MockTransport(answer))
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
            judge(JUDGE, model="grader", template=template)


def test_the_key_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert (key_of("JUDGE_KEY"), key_of("")) == ("secret", "")
    with pytest.raises(ConfigError, match="expected the name of an environment variable") as caught:
        key_of("canary")
    assert "canary" not in str(caught.value)
