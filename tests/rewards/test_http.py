"""A service as the reward: slow, flapping, hanging, and answering garbage; in virtual time, and over a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import anyio
import anyio.abc
import httpx
import pytest

from oppo.errors import ConfigError
from oppo.events import Drop
from oppo.rewards import FunctionReward, RewardFailure, Rewards
from oppo.rewards.http import HttpReward, ServiceFailure
from oppo.testing import run_virtual
from tests.pipelines import Pipeline, Setting
from tests.rewards.test_combined import finished

URL = "http://me:hunter2@judge.example:8000/score?key=canary"
NAMED = "http://judge.example:8000/score"

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


def lengths(request: httpx.Request) -> httpx.Response:
    """Answer the length of each completion."""
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
def test_what_may_pass_is_asked_again_after_growing_pauses(failure: httpx.Response | Exception) -> None:
    judge, asked = served(failure, failure, failure)
    told = list[str]()
    assert called(replace(judge, tell=told.append)) == [3, 5]
    gaps = [after - before for before, after in pairwise(asked)]
    assert [1 <= gaps[0] <= 1.25, 2 <= gaps[1] <= 2.25, 4 <= gaps[2] <= 4.25] == [True] * 3, gaps
    assert [sentence.startswith(NAMED) for sentence in told] == [True] * 3
    assert "attempt 4 of 4 follows in 4." in told[-1]


def test_the_pause_is_what_the_service_asks_for() -> None:
    judge, asked = served(httpx.Response(429, headers={"Retry-After": "17"}))
    assert called(judge) == [3, 5]
    assert asked == [0, 17]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (httpx.Response(400, text="no\nsuch  model"), "answered 400 Bad Request: no such model"),
        (httpx.Response(401), "answered 401 Unauthorized"),
        (httpx.Response(200, text="<html>login</html>"), "answered something that is no JSON: '<html>login</html>'"),
        (httpx.Response(200, json={"score": 1}), r"answered something without scores \(KeyError: 'scores'\)"),
    ],
)
def test_what_will_not_pass_is_final(answer: httpx.Response, sentence: str) -> None:
    judge, asked = served(answer)
    with pytest.raises(ServiceFailure, match=f"{NAMED} {sentence}"):
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


def test_a_service_that_fails_again_and_again_is_left_alone_and_then_asked_once() -> None:
    told = list[str]()
    judge, asked = served(*[httpx.Response(400)] * 4)
    judge = replace(judge, open_after=3, rest=20, tell=told.append)

    async def main() -> list[str]:
        said = list[str]()
        for pause in (0, 0, 0, 0, 19, 1, 0, 20):
            await anyio.sleep(pause)
            try:
                said.append(str(await judge(["a"], ["four"])))
            except ServiceFailure as failure:
                said.append(str(failure).removeprefix(f"{NAMED} "))
        return said

    alone = "failed 3 times in a row, and is not asked for another {} s"
    refused = "answered 400 Bad Request: "
    assert run_virtual(main) == [
        *[refused] * 3,
        alone.format(20),
        alone.format(1),
        refused,
        "failed 4 times in a row, and is not asked for another 20 s",
        "[4]",
    ]
    assert len(asked) == 5
    assert told == [f"{NAMED} failed {count} times in a row, and is left alone for 20 s" for count in (3, 4)]


def test_a_step_waits_for_the_slowest_answer() -> None:
    judge, asked = served(seconds=5.0)
    pipeline = Pipeline(Setting(lengths=tuple(range(5, 21)), batch=16, steps=1))
    pipeline.reward = FunctionReward(judge, decode=str)
    run_virtual(pipeline.run)
    assert len(asked) > 1
    assert pipeline.reports[0].seconds == pytest.approx(5.2, abs=0.05)


def test_a_service_may_be_one_of_several_rewards_and_drop_what_it_does_not_score() -> None:
    judge, _ = served(httpx.Response(400))

    def one(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return [1.0 for _ in completions]

    rewards = Rewards({"judge": (1, judge), "one": (1, one)}, decode=str, on_failure="drop", on_drop="skip")
    assert [isinstance(each, Drop) for each in run_virtual(rewards.finish, finished(3))] == [False] * 3


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
        await stream.receive()
        body = b'{"scores": [0.25]}'
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


async def test_over_a_real_socket() -> None:
    async with listening(score) as url:
        assert await HttpReward(url)(["a"], ["b"]) == [0.25]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (hang, "did not answer within 0.2 s"),
        (hang_up, "cannot be asked: RemoteProtocolError"),
        (babble, "cannot be asked: RemoteProtocolError"),
    ],
)
async def test_a_service_that_hangs_or_babbles_is_a_failure(
    answer: Callable[[anyio.abc.SocketStream], Awaitable[None]], sentence: str
) -> None:
    async with listening(answer) as url:
        judge = HttpReward(url, timeout=0.2, attempts=2, pause=0.01)
        with pytest.raises(ServiceFailure, match=sentence):
            await judge(["a"], ["b"])


async def test_a_service_that_is_not_there_is_a_failure() -> None:
    async with listening(score) as url:
        pass
    with pytest.raises(ServiceFailure, match="cannot be asked: ConnectError"):
        await HttpReward(url, attempts=2, pause=0.01)(["a"], ["b"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"url": "localhost:8000"}, "expected the URL of a service, such as http://localhost:8000/score; got 'localho"),
        ({"attempts": 0}, "attempts must be at least 1, not 0"),
        ({"timeout": -1}, "timeout must be at least 0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        HttpReward(**{"url": URL, **options})  # type: ignore[arg-type] # wrong on purpose


async def test_the_judge_of_the_example_grades_each_response(capsys: pytest.CaptureFixture[str]) -> None:
    await import_module("examples.05_judge").main()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[0.1]  Yes.",
        "[0.5]  Yes, since water boils there.",
        "[1.0]  Because the air is thinner the higher one climbs up a hill.",
    ]
