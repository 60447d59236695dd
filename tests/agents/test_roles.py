"""Roles: an agent plays several, each with a reward of its own; others than the policy play those that are frozen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
import httpx2
import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo import Drop, GroupRelative, Overcommit, Prompt
from oppo.agents import Agents
from oppo.errors import ConfigError, ModelError, ModelLost
from oppo.events import Batch, Finish, Response
from oppo.models import Capabilities, Cut, Decode, Decoding
from oppo.returns import GroupAdvantage
from oppo.rewards import ByTurn
from oppo.stages import RoleBaseline, ScoredRollout
from oppo.testing import FakePolicy, FakeTrainer
from tests.agents.conftest import graph_of, stepped
from tests.agents.test_agents import tokenizer
from tests.agents.test_branches import Rows, described, policy, resumed

pytestmark = pytest.mark.usefixtures("numbers")


def scored(admission: int, sample: int, role: str, score: float, branch: int = 0) -> ScoredRollout:
    prompt = replace(Prompt(0, admission, np.ones(1, np.int32), sample, branch=branch, role=role).numbered(8))
    n = 1 + (admission + branch) % 3
    tokens, floats = np.full(n, 3, np.int32), np.full(n, -1.0, np.float32)
    response = Response(prompt, tokens, floats, np.zeros(n, np.int32), np.ones(n, np.bool_))
    return ScoredRollout(Finish(prompt.rollout, response, "eos"), None, score)


def advantages(*batches: Batch) -> dict[int, float]:
    return {rollout: advantage for rollout, (_, advantage, *_) in described(batches).items()}


def test_a_role_is_compared_with_the_mean_of_its_returns_so_far() -> None:
    stage = RoleBaseline(decay=0.95)
    first = [scored(at, 0, "a", reward) for at, reward in enumerate((1.0, 1.0, -1.0))]
    others = [scored(at, 0, "b", -each.score, branch=7 - at) for at, each in enumerate(first)]
    again = scored(1, 0, "a", 1.0, branch=9)  # another conversation of the second agent, which counts once
    batch = stage.batch([*first, *others[::-1], again])
    found = advantages(batch)
    wanted = [1.0, 0.95, -1.0975]
    assert [found[each.rollout] for each in first] == pytest.approx(wanted)
    assert [found[each.rollout] for each in others] == pytest.approx([-each for each in wanted])
    assert found[again.rollout] == found[first[1].rollout]
    assert stage.baselines == pytest.approx({"a": 0.042625, "b": -0.042625})
    assert batch.metrics["objective/baseline/a"] == pytest.approx(0.042625)
    restored = RoleBaseline(decay=0.95)
    restored.load_state_dict(stage.state_dict())
    assert advantages(restored.batch([first[0]])) == advantages(stage.batch([first[0]])) == {0: pytest.approx(0.957375)}


EPISODE = st.dictionaries(st.sampled_from("abc"), st.tuples(st.floats(0, 4, width=16), st.integers(1, 3)), min_size=1)
GROUPS = st.lists(st.lists(EPISODE, min_size=1, max_size=4), min_size=1, max_size=4)


@given(GROUPS, st.sampled_from(["leave_one_out", "standardised", "centred", "max_rl"]))
def test_roles_are_compared_as_if_each_were_alone(
    groups: Sequence[Sequence[Mapping[str, tuple[float, int]]]], how: GroupAdvantage
) -> None:
    rows, branches = list[ScoredRollout](), iter(range(1, 1000))
    episodes = [(at, sample, each) for at, group in enumerate(groups) for sample, each in enumerate(group)]
    for admission, sample, episode in episodes:
        spoken = [(role, score) for role, (score, count) in episode.items() for _ in range(count)]
        for number, (role, score) in enumerate(spoken):
            rows.append(scored(admission, sample, role, score, next(branches) if number else 0))
    rows.sort(key=lambda each: each.rollout)
    together, by_role = GroupRelative(how).batch(rows), defaultdict[str, list[ScoredRollout]](list)
    for each in rows:
        by_role[each.finish.response.prompt.role].append(each)
    alone = [GroupRelative(how).batch(each) for each in by_role.values()]
    assert advantages(together) == advantages(*alone)
    assert {*together.dropped} == {drop for batch in alone for drop in batch.dropped}


@dataclass
class Duel:
    """A game of two players of the policy and a frozen umpire, whose word is a part of what the second one reads."""

    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)  # before a request, by row and its number
    opening: bool = False  # the umpire speaks first
    returns: object = None  # in place of the rewards
    models: Mapping[str, str] = field(default_factory=dict)  # in place of the roles
    umpire: FakePolicy | None = field(default_factory=partial(FakePolicy, length=lambda prompt: 2 + prompt.stream % 5))
    said: list[tuple[str, list[int]]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        roles: dict[str, Any] = {"one": "policy", "two": "policy", "umpire": self.umpire}
        self.agents = Agents(self.run, tokenizer(), on_failure="drop", roles=roles)

    async def run(self, row: dict[str, Any], base_url: str, key: str) -> object:
        number, lengths = row["number"], defaultdict[str, int](int)
        options: dict[str, Any] = {"base_url": base_url, "headers": {"Authorization": f"Bearer {key}"}}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self.agents.app), **options) as to:

            async def ask(at: int, role: str, messages: list[dict[str, str]]) -> str:
                await anyio.sleep(self.seconds.get((number, at), 0.01))
                asked = {"model": self.models.get(role, role), "messages": messages, "return_token_ids": True}
                reply = (await to.post("/chat/completions", json=asked)).json()
                self.answers.append(reply)
                if "error" in reply:
                    raise OSError(reply["error"]["message"])
                self.said.append((role, reply["choices"][0]["token_ids"]))
                lengths[role] += len(reply["choices"][0]["token_ids"])
                content = str(reply["choices"][0]["message"]["content"])
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "2"}]
                return content.partition(":")[0]

            one = [{"role": "user", "content": await ask(0, "umpire", say(3000)) if self.opening else str(number)}]
            await ask(1, "one", one)
            word = await ask(2, "umpire", say(4000 + number))
            await ask(3, "two", say(1000 + 10 * number + int(word)))
            await ask(4, "one", one)
        return {role: float(length) for role, length in lengths.items()} if self.returns is None else self.returns


def say(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(number)}]


def played(duel: Duel, steps: int = 3, overcommit: int = 0) -> tuple[list[Batch], list[Any], list[str]]:
    trainer = FakeTrainer()
    graph = graph_of(duel.agents, policy(), trainer, Overcommit(batch=4, overcommit=overcommit))
    return trainer.batches, *stepped(graph, duel.agents.prompts(Rows()), steps)


@pytest.mark.parametrize("opening", [False, True])
def test_each_role_has_its_reward_and_what_is_frozen_is_read_and_never_trained(opening: bool) -> None:
    duel = Duel(opening=opening)
    batches, metrics, reasons = played(duel)
    assert reasons == []
    for batch in batches:
        assert batch.scores.tolist() == [each.sampled.sum() for each in batch.responses]
        assert Counter(each.prompt.role for each in batch.responses) == {"one": 8, "two": 8}
    trained = [each.tokens[each.sampled].tolist() for batch in batches for each in batch.responses]
    umpire = [tokens for role, tokens in duel.said if role == "umpire"]
    assert umpire
    assert {*map(tuple, umpire)}.isdisjoint(map(tuple, trained))
    assert all(each["rewards/umpire/mean"] > 0 and each["rewards/two/mean"] > 0 for each in metrics)
    assert {reply["model"] for reply in duel.answers if "model" in reply} == {"one", "two", "umpire"}


def test_games_that_are_deferred_are_trained_as_in_serial_steps_and_so_are_resumed_ones() -> None:
    late = {(at, 2 + at % 3): 0.5 for at in range(0, 60, 3)}
    serial = described(played(Duel(), 5)[0])
    streamed, metrics, reasons = played(Duel(late), 5, overcommit=3)
    assert reasons == []
    assert sum(each["deferral/deferred"] for each in metrics) > 0
    cut = resumed([Duel(late), Duel()], Overcommit(batch=4, overcommit=3), 2, 5)
    for found in (described(streamed), described(cut)):
        assert len(serial.keys() & found.keys()) > 40
        assert all(serial[rollout] == found[rollout] for rollout in serial.keys() & found.keys())


ROLES = "the roles 'one', 'two', 'umpire'"
SILENT: dict[str, Any] = {"models": {"two": "one"}, "returns": {"one": 1.0, "two": -1.0}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"returns": 1.0}, f"must return a mapping of {ROLES} to rewards, or a Drop; got 1.0"),
        ({"returns": {"one": 1.0, "three": 1.0}}, "returned a reward for 'three', and the roles are 'one', 'two'"),
        ({"returns": {"one": 1.0}}, "returned no reward for 'two', which has a conversation: give it one"),
        ({"returns": {"two": float("nan")}}, "must return a finite number or a ByTurn for 'two'; got nan"),
        ({"returns": {"one": 1.0, "two": ByTurn([0, 5])}}, "no turn 1 in a response of 1 turn"),
        ({"returns": Drop.because("a draw")}, "a draw"),
        (SILENT, "returned a reward for 'two', which has no conversation: leave it out"),
        ({"models": {"two": "gpt"}}, "model = 'gpt' names no role: expected 'one' or 'two' or 'umpire'"),
        ({"umpire": None}, "no policy plays role 'umpire': give Agents one, or seat() it"),
    ],
)
def test_what_fits_no_roles_drops_the_game_with_the_reason(given: dict[str, Any], words: str) -> None:
    batches, _, reasons = played(Duel(**given), 2)
    assert any(words in reason for reason in reasons)
    assert all(words in reason or reason == "left alone in its group" for reason in reasons)
    trained = {each.prompt.role for batch in batches for each in batch.responses}
    assert trained == ({"one"} if "no turn" in words else set())


class Lost(FakePolicy):
    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        raise ModelLost(f"{len(live)} rollouts")


@pytest.mark.parametrize(("adds", "words"), [(True, "the model of role 'umpire' has failed"), (False, "1 rollouts")])
def test_a_frozen_role_says_the_same_on_any_engine_and_one_that_fails_ends_the_run(adds: bool, words: str) -> None:
    can = Capabilities(adds_while_decoding=adds)
    with pytest.raises(ModelError, match=words):
        played(Duel(umpire=Lost(capabilities=can)))
    umpire = FakePolicy(length=lambda prompt: 2 + prompt.stream % 5, capabilities=can, seconds=0.3)
    assert described(played(Duel(umpire=umpire))[0]) == described(played(Duel())[0])


@pytest.mark.parametrize("name", ["", "a b", "x/y", "é", "-a", "a\n"])
def test_a_role_is_a_part_of_the_names_of_metrics(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected letters, digits, '\.', '_' and '-' as the name of a role"):
        Agents(lambda row, url, key: 0.0, tokenizer(), roles={name: "policy"})


def test_a_role_that_no_agent_has_played_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    played(Duel())
    assert "no agent has played" not in capsys.readouterr().err
    duel = Duel()
    roles: dict[str, Any] = {"one": "policy", "two": "policy", "umpire": duel.umpire, "third": "policy"}
    duel.agents = Agents(duel.run, tokenizer(), on_failure="drop", roles=roles)
    played(duel)
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "no agent has played" in line]
    assert "no agent has played the role 'third', so nothing was sampled in it: expected requests" in said


def test_the_policy_plays_one_role_at_least() -> None:
    with pytest.raises(ConfigError, match="the policy plays none of the roles 'one': leave one to it"):
        Agents(lambda row, url, key: 0.0, tokenizer(), roles={"one": FakePolicy()})
