"""Each fault by itself: how the run ends, what the error names, and that what was trained before is intact."""

from __future__ import annotations

import doctest
import pickle
from collections.abc import Sequence

import anyio
import pytest

from oppo.errors import DeadlockError, ModelError, ModelLost, ProtocolError, RewardError
from oppo.events import Drop, Finish, Response
from oppo.rewards import FunctionReward, OnFailure
from oppo.stages import Score
from oppo.testing import (
    FakePolicy,
    FakeScorer,
    Fault,
    FaultyPolicy,
    FaultyScorer,
    Flap,
    Hang,
    Raise,
    Slow,
    check_policy,
    check_scorer,
    fake_scalar,
    faulty,
    faulty_reward,
    prompts,
    run_virtual,
)
from oppo.testing.faulty import FaultKind, Method
from tests.kit.faulty import SPOILT, Case, FaultyPipeline, Garbage, HalfSynced, LoseSessions, Spoilt, stage_of
from tests.kit.pipelines import Setting, same_batches

SETTING = Setting(lengths=(5, 9, 3, 30), extra=2, steps=4)


def played(*script: Fault, setting: Setting = SETTING) -> FaultyPipeline:
    return Case(setting, script).play()


CLEAN = played()


def ended(fault: Fault, *, steps: int) -> tuple[BaseException, str]:
    """Return the error of a run with one fault, and its text with its notes.

    It has made so many steps, the batches of which are those of a run without the fault; nothing but an error that
    names where it was left it; and it can be gone on with, from its last whole step, as if nothing had been.
    """
    run = played(fault)
    assert run.struck == [fault]
    assert run.error is not None
    assert len(run.reports) == steps
    assert same_batches(run.complete, CLEAN.batches[:steps])
    rest = run.resumed()
    assert rest.error is None
    assert same_batches([*run.complete, *rest.batches], CLEAN.batches)
    message = "\n".join([str(run.error), *getattr(run.error, "__notes__", [])])
    assert f"step {steps + 1}" in message
    return run.error, message


@pytest.mark.parametrize(
    ("model", "method", "names"),
    [
        ("actor", "read", "while decoding rollout 2"),
        ("actor", "aclose", "while closing rollout"),
        ("actor", "open", "while opening rollouts [10, 11, 12, 13]"),
        ("actor", "decoding", ""),
        ("actor", "load", "while syncing version 3: FaultyPolicy has version 2, FaultyCritic has version 2"),
        ("reference", "extend", "while scoring rollouts [0, 1, 3, 4, 5]"),
        ("reference", "finish", "while scoring rollouts [1]"),
        ("reward", "extend", "while scoring rollouts [0, 1, 3, 4, 5]"),
        ("reward", "finish", "while scoring rollouts [1]"),
        ("critic", "finish", "while scoring rollouts [1]"),
        ("critic", "load", "while syncing version 3: FaultyPolicy has version 3, FaultyCritic has version 2"),
        ("trainer", "update", ""),
        ("trainer", "sync_weights", ""),
    ],
)
def test_a_model_that_raises_ends_the_run_with_its_own_error(model: str, method: Method, names: str) -> None:
    steps = 0 if method in {"read", "aclose", "extend", "finish"} else 2
    fault = Fault(model, method, Raise(ModelLost), call=2)
    error, message = ended(fault, steps=steps)
    assert type(error) is ModelLost
    assert str(error) == f"call 2 of {method}() of {model!r} fails, as its script says"
    assert f"in stage {stage_of(fault)!r} of graph 'ppo', step {steps + 1}" in message
    assert names in message


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("actor", "open"),
        ("actor", "decoding"),
        ("actor", "read"),
        ("actor", "aclose"),
        ("actor", "load"),
        ("reference", "extend"),
        ("reward", "finish"),
        ("critic", "forget"),
        ("critic", "load"),
        ("trainer", "update"),
        ("trainer", "sync_weights"),
    ],
)
def test_a_model_that_hangs_is_a_deadlock_that_names_its_stage(model: str, method: Method) -> None:
    fault = Fault(model, method, Hang())
    error, message = ended(fault, steps=0)
    assert type(error) is DeadlockError
    assert f"{stage_of(fault)} is at work" in message
    assert f"call 0 of {method}() of {model!r} hangs, as its script says" in message


@pytest.mark.parametrize(
    ("fault", "pattern"),
    [
        (Fault("actor", "open", Garbage("count")), r"open\(\) of the policy was asked for 6 rollouts and answered"),
        (Fault("actor", "read", Garbage("shape")), "rollout 0: .* a chunk whose logprobs are .*; expected float32"),
        (
            Fault("actor", "read", Garbage("empty")),
            "rollout 0: .* a chunk with no token that says 'live'; only 'cut' may",
        ),
        (Fault("actor", "read", Garbage("version")), r"rollout 0: .* versions \[1000\], .* and the policy's is 0"),
        (Fault("actor", "read", Garbage("order")), r"versions \[-1000, 0\], lastly -1000, .* versions never decrease"),
        (
            Fault("actor", "read", Garbage("token")),
            "rollout 0: .* of FaultyPolicy returned a chunk that holds the token id -",
        ),
        (Fault("actor", "load", Garbage("version")), "version 1 was synced, but FaultyPolicy has version 0, Fau"),
        (Fault("critic", "load", Garbage("version")), "has version 1, FaultyCritic has version 0: the synced"),
        (Fault("reference", "finish", Garbage("count")), r"finish\(\) of the scorer was asked for 1 rollouts and answ"),
        (Fault("reference", "finish", Garbage("shape")), r"rollout 2: expected 3 numbers as its reference log-probs, "),
        (Fault("reference", "finish", Garbage("none")), r"rollout 2: .* one for each response token, got None"),
        (Fault("reward", "finish", Garbage("count")), r"was asked for 1 rollouts and answered for 0"),
        (Fault("reward", "finish", Garbage("shape")), r"rollout 2: expected a number as its score, got an array of sh"),
        (Fault("reward", "finish", Garbage("none")), r"rollout 2: expected a number as its score, got None"),
        (Fault("critic", "finish", Garbage("shape")), r"rollout 2: expected 3 numbers as its values, .* shape \(2,\)"),
        (Fault("trainer", "update", Garbage("version")), "after an update of version 0 the trainer's is 0, not 1"),
        (Fault("trainer", "update", Garbage("stranger")), r"rollouts \[-1\] as not finite, which are not in its batch"),
    ],
)
def test_garbage_is_refused_by_name_and_never_trained(fault: Fault, pattern: str) -> None:
    error, message = ended(fault, steps=0)
    assert type(error) is ProtocolError
    with pytest.raises(ProtocolError, match=pattern):
        raise error
    assert "in stage " in message


@pytest.mark.parametrize(
    ("fault", "drop"),
    [
        (Fault("actor", "read", Garbage("nan"), 1), Drop(1, "nonfinite behaviour log-prob")),
        (Fault("reference", "finish", Garbage("nan"), 2), Drop(1, "nonfinite reference log-prob")),
        (Fault("reward", "finish", Garbage("nan"), 2), Drop(1, "nonfinite score")),
        (Fault("critic", "finish", Garbage("nan"), 2), Drop(1, "nonfinite value")),
    ],
)
def test_numbers_that_are_none_drop_their_rollout_and_nothing_else(fault: Fault, drop: Drop) -> None:
    run = played(fault)
    assert run.error is None
    assert [report.dropped for report in run.reports] == [(drop,), (), (), ()]
    rollouts = [batch.rollouts for batch in CLEAN.batches]
    assert [batch.rollouts for batch in run.batches] == [
        tuple(r for r in rollouts[0] if r != drop.rollout),
        *rollouts[1:],
    ]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("actor", "decoding", LoseSessions(), 2),
        Fault("reward", "extend", LoseSessions(), 5),
        Fault("reference", "finish", LoseSessions(), 2),
    ],
)
def test_a_model_that_has_lost_its_sessions_is_found_out(fault: Fault) -> None:
    error, message = ended(fault, steps=2 if fault.model == "actor" else 0)
    assert type(error) is ProtocolError
    assert f"in stage {stage_of(fault)!r}" in message
    assert "closed: [" in message or ": its Prompt must come first" in message


@pytest.mark.parametrize("silent", [False, True])
def test_weights_synced_half_way_end_the_run_and_say_who_has_which(silent: bool) -> None:
    error, message = ended(Fault("trainer", "sync_weights", HalfSynced(silent), call=1), steps=1)
    assert type(error) is (ProtocolError if silent else ModelError)
    assert "FaultyPolicy has version 2, FaultyCritic has version 1" in message


def test_slow_models_take_their_time_and_change_nothing() -> None:
    slow = played(Fault("critic", "finish", Slow(7.0)), Fault("trainer", "sync_weights", Slow(5.0), call=3))
    assert slow.error is None
    assert same_batches(slow.batches, CLEAN.batches)
    took = [late.seconds - soon.seconds for late, soon in zip(slow.reports, CLEAN.reports, strict=True)]
    assert took[1:] == pytest.approx([0, 0, 5])
    assert 6.5 < took[0] <= 7


def test_the_examples_in_the_docstrings_are_true() -> None:
    failed, attempted = doctest.testmod(faulty)
    assert attempted
    assert not failed


def test_a_script_is_a_value() -> None:
    written = (Fault("reward", "finish", Flap(2, 1), call=3), Fault("actor", "read", Hang()))
    assert pickle.loads(pickle.dumps(written)) == written
    assert str(written[0]) == "Fault(model='reward', method='finish', does=Flap(down=2, up=1), call=3)"
    assert [call for call in range(10) if written[0].does.strikes(call - 3)] == [3, 4, 6, 7, 9]
    assert [call for call in range(10) if Flap(2).strikes(call - 1)] == [1, 2]


@pytest.mark.parametrize(
    ("method", "does"),
    [("forget", Garbage("nan")), ("read", Garbage("stranger")), ("read", LoseSessions()), ("update", HalfSynced())],
)
def test_a_fault_that_cannot_be_is_refused(method: Method, does: FaultKind) -> None:
    with pytest.raises(ValueError, match=rf"{method}\(\) cannot do "):
        Fault("model", method, does)


def test_where_the_script_is_silent_a_wrapper_keeps_the_protocol() -> None:
    async def policy() -> FaultyPolicy:
        return FaultyPolicy("actor", FakePolicy(turns=lambda prompt: (2, 4)[: prompt.admission % 3]))

    async def scorer() -> FaultyScorer[float]:
        return FaultyScorer("reward", FakeScorer(fake_scalar))

    async def main() -> None:
        await check_policy(policy, prompts(4))
        await check_scorer(
            scorer, [event for batch in CLEAN.batches[:1] for event in finished(batch.responses)], float.__eq__
        )

    run_virtual(main)
    assert same_batches(played(Fault("nobody", "read", Hang())).batches, CLEAN.batches)


def finished(responses: Sequence[Response]) -> list[Finish]:
    return [Finish(response.prompt.rollout, response, "eos") for response in responses if len(response) > 3]


def rule(prompts: Sequence[str], completions: Sequence[str], **_columns: Sequence[object]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def judged(script: tuple[Fault, ...], on_failure: OnFailure) -> tuple[list[object], float]:
    async def main() -> tuple[list[object], float]:
        reward = FunctionReward(faulty_reward("judge", rule, script), decode=str, on_failure=on_failure)
        scores = await reward.finish(finished(CLEAN.batches[0].responses)[:2])
        return list(scores), anyio.current_time()

    return run_virtual(main)


def test_a_reward_server_that_flaps_is_asked_again_until_it_answers() -> None:
    plain, _ = judged((), "fail")
    scores, seconds = judged((Fault("judge", "call", Flap(down=2)),), "retry")
    assert scores == plain
    assert seconds == 1.0 + 5.0


def test_a_reward_server_that_stays_down_ends_the_run_after_the_last_attempt() -> None:
    with pytest.raises(RewardError, match=r"'rule' raised ConnectionError: call 3 .* connection refused") as caught:
        judged((Fault("judge", "call", Flap(down=9)),), "retry")
    assert "it was the last of 4 attempts" in caught.value.__notes__


def test_a_reward_server_that_fails_for_one_rollout_drops_that_one() -> None:
    (first, second), _ = judged((Fault("judge", "call", Flap(down=2)),), "drop")
    assert isinstance(first, Drop)
    assert "connection refused" in first.reason
    assert isinstance(second, float)


@pytest.mark.parametrize("what", SPOILT["call"])
def test_garbage_of_a_reward_function_is_no_score(what: Spoilt) -> None:
    with pytest.raises(RewardError, match="reward function 'rule' must return"):
        judged((Fault("judge", "call", Garbage(what)),), "fail")


def test_a_scorer_that_fails_while_closing_is_named_and_hides_nothing() -> None:
    async def main() -> None:
        scorer = FaultyScorer("reward", FakeScorer(fake_scalar), (Fault("reward", "forget", Raise(OSError)),))
        async with Score(scorer) as stage:
            stage._sessions[3] = object()  # type: ignore[assignment]  # something to forget
            raise ModelError("the first")

    with pytest.raises(OSError, match=r"call 0 of forget\(\) of 'reward'") as caught:
        run_virtual(main)
    assert isinstance(caught.value.__context__, ModelError)
