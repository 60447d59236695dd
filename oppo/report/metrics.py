"""The metrics of a step, each with its unit and meaning (``docs/metrics.md`` has them), and the summary of a run.

Within the package, as in :class:`oppo.StepReport`, a metric has one name. :class:`Renamed` gives observers the name of
TRL's GRPO or of verl; readers of files take any (:func:`in_own_names`). A trainer or a loss of one's own adds others;
those are what it says they are.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, TypeVar, cast

from oppo.events import StepReport
from oppo.graph.engine import notify
from oppo.observe import Observer, Span
from oppo.report.records import METRICS as METRICS_FILE, Record, read

T = TypeVar("T")

TOKENS: Final = "tokens"
COUNT: Final = "count"
SHARE: Final = "share, 0 to 1"
SECONDS: Final = "seconds"
NATS: Final = "nats a token"
NATS_PER_ROLLOUT: Final = "nats a rollout"
CONVERSATIONS: Final = "conversations"
SCORE: Final = "as the reward"
RATIO: Final = "ratio"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # in this package; parts in braces stand for any text without a slash
    unit: str
    meaning: str  # and where TRL's or verl's differs
    trl: str = ""  # the name in TRL's GRPO, if it differs
    verl: str = ""  # the name in verl, if it differs


MetricNames: TypeAlias = Literal["trl", "verl"]  # the names of TRL's GRPO, or of verl


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(name)))


@cache
def metric(name: str) -> Metric | None:
    return next((each for each in chain(*METRICS.values()) if _pattern(each.name).fullmatch(name)), None)


def renamed(metrics: Mapping[str, T], names: MetricNames) -> dict[str, T]:
    return _renamed(metrics, lambda name: getattr(metric(name), names, "") or name)


def in_own_names(record: Mapping[str, T]) -> dict[str, T]:
    return _renamed(record, _own_name)


def _renamed(record: Mapping[str, T], name_of: Callable[[str], str]) -> dict[str, T]:
    # a metric of one's own that has the name already keeps it
    return {name if (other := name_of(name)) in record else other: value for name, value in record.items()}


@cache
def _own_name(name: str) -> str:
    if metric(name) is None:
        for each in chain(*METRICS.values()):
            for other in filter(None, (each.trl, each.verl)):
                if found := _pattern(other).fullmatch(name):
                    return each.name.format(**found.groupdict())
    return name


# Every metric, by section of the page
METRICS: Final[Mapping[str, tuple[Metric, ...]]] = MappingProxyType({
    "The step": (
        Metric("step", "ordinal", "Steps made so far, from 1; the trackers have it as their step."),
        Metric("version", COUNT, "Updates that have been made, this one included."),
        Metric("score", SCORE, "Mean score of the rollouts that were trained, and of those left out of the loss."),
        Metric("seconds", SECONDS,
               "From the step's start, or the last weight sync before if that is later, to its last weight sync."),
        Metric("trained", CONVERSATIONS, "Conversations that were trained."),
        Metric("deferred", CONVERSATIONS, "Conversations that are deferred to the next step."),
        Metric("dropped", CONVERSATIONS, "Conversations that ended without being trained."),
        Metric("lr", "1", "Learning rate of the actor.", "learning_rate", "actor/lr"),
        Metric("episode", CONVERSATIONS, "Conversations trained since the run began."),
    ),
    "Objective": (
        Metric("objective/kl", NATS_PER_ROLLOUT,
               "KL to the reference, by the estimator of the algorithm: the sum over a rollout's tokens, mean over "
               "rollouts; absent without a reference."),
        Metric("objective/kl_coef", "1", "Coefficient of the KL penalty in this step; absent without a reference.",
               verl="actor/reward_kl_penalty_coeff"),
        Metric("objective/teacher_kl", NATS_PER_ROLLOUT,
               "Reverse KL to the teacher by k1, log pi - log T: the sum over a rollout's tokens, mean over rollouts; "
               "only with a teacher."),
        Metric("objective/entropy", NATS_PER_ROLLOUT, "Mean over rollouts of minus a rollout's behaviour log-prob."),
        Metric("objective/non_score_reward", SCORE, "Minus the mean KL penalty of a rollout; only with a reference."),
        Metric("objective/rlhf_reward", SCORE, "Mean shaped score and KL penalty of a rollout together.",
               verl="critic/rewards/mean"),
        Metric("objective/scores", SCORE,
               "Mean score of a rollout; TRL's PPO has taken `missing_eos_penalty` off, as `objective/shaped_scores` "
               "has here.", "reward", "critic/score/mean"),
        Metric("objective/scores_min", SCORE, "The lowest score of a rollout.", verl="critic/score/min"),
        Metric("objective/scores_max", SCORE, "The highest score of a rollout.", verl="critic/score/max"),
        Metric("objective/scores_std", SCORE, "Standard deviation of the scores of rollouts; TRL divides by n - 1.",
               "reward_std"),
        Metric("objective/shaped_scores", SCORE, "Mean score of a rollout after scaling, clipping and penalties."),
        Metric("objective/group_std", SCORE,
               "Standard deviation of the shaped scores of a group's rollouts, mean over groups."),
        Metric("objective/frac_zero_std", SHARE,
               "Groups whose rollouts all have the same shaped score, which teach nothing.", "frac_reward_zero_std"),
        Metric("advantages/mean", "1", "Mean advantage of a token.", verl="critic/advantages/mean"),
        Metric("advantages/min", "1", "The smallest advantage of a token.", verl="critic/advantages/min"),
        Metric("advantages/max", "1", "The largest advantage of a token.", verl="critic/advantages/max"),
        Metric("values/mean", SCORE, "Mean value of a token, by the critic before the update; only with a critic.",
               verl="critic/values/mean"),
        Metric("values/min", SCORE, "The smallest value of a token.", verl="critic/values/min"),
        Metric("values/max", SCORE, "The largest value of a token.", verl="critic/values/max"),
        Metric("returns/mean", SCORE, "Mean return of a token; only with a critic.", verl="critic/returns/mean"),
        Metric("rewards/{name}/mean", SCORE, "Of each of several rewards: mean over the rollouts that it applies to."),
        Metric("rewards/{name}/share", SHARE, "Of each of several rewards: rollouts that it applies to."),
        Metric("bridge/reread_tokens", TOKENS,
               "Of a reward model that reads text: tokens read that later text changed, mean over conversations."),
        Metric("bridge/tail_tokens", TOKENS,
               "Of a reward model that reads text: tokens left to read at the end, mean over conversations."),
    ),
    "Loss and policy": (
        Metric("loss/policy_avg", "1", "Policy loss, by its aggregation, mean over minibatches.", verl="actor/pg_loss"),
        Metric("loss/nll_avg", "nats", "Negative log-likelihood of rollouts with high scores, mean over minibatches; "
               "only with `algorithm.nll`."),
        Metric("loss/distill_avg", "nats", "Divergence from the teacher over its likeliest ids, mean over minibatches; "
               "only with `algorithm.distill_top_k`."),
        Metric("loss/value_avg", "as the returns, squared", "Value loss of the critic, mean over minibatches.",
               verl="critic/vf_loss"),
        Metric("loss/aux", "1", "Load-balancing loss of a mixture of experts, mean over minibatches; not weighted.",
               "aux_loss"),
        Metric("policy/approxkl_avg", NATS,
               "Half the mean squared log-ratio over tokens (`gspo`: rollouts); verl takes minus the mean log-ratio.",
               verl="actor/ppo_kl"),
        Metric("policy/clipfrac_avg", SHARE, "Tokens with clipped loss (`gspo`: rollouts).",
               "clip_ratio/region_mean", "actor/pg_clipfrac"),
        Metric("policy/clipfrac_staleness_{versions}", SHARE, "The same of tokens of one staleness."),
        Metric("policy/entropy_avg", NATS, "Entropy of the policy, mean over tokens; verl's is before the update.",
               "entropy", "actor/entropy"),
        Metric("policy/kl_avg", NATS, "KL of the trained weights to the reference, mean over tokens; TRL takes k3.",
               "kl", "actor/kl_loss"),
        Metric("policy/margin_avg", "nats",
               "How much more the policy prefers the better rollout than the reference, times beta: mean over pairs."),
        Metric("policy/ranked_right_avg", SHARE, "Pairs whose margin is above 0."),
        Metric("val/clipfrac_avg", SHARE, "Tokens whose value loss was clipped.", verl="critic/vf_clipfrac"),
        Metric("val/explained_variance", "1, at most",
               "1 - Var(returns - values) / Var(returns) over sampled tokens: 1 of a critic that is always right, 0 of "
               "a constant; absent if all returns are equal.", verl="critic/vf_explained_var"),
        Metric("val/ratio", RATIO, "Current over old probability, mean over tokens (`gspo`: rollouts)."),
        Metric("val/ratio_var", "1", "Variance of that mean over the minibatches."),
        Metric("val/num_eos_tokens", TOKENS, "Stop tokens that were sampled: end-of-sequence tokens, any of them."),
    ),
    "Trainer": (
        Metric("train/tokens", TOKENS, "Sampled tokens in the batch, which the loss counts."),
        Metric("train/minibatches", COUNT, "Optimizer steps."),
        Metric("train/minibatches_skipped", COUNT,
               "Minibatches without an optimizer step: loss or gradient not finite."),
        Metric("train/micro_batches", COUNT, "Forward and backward passes."),
        Metric("train/padding", SHARE, "Padding, of the tokens that were read."),
        Metric("train/grad_norm", "1", "Norm of the actor's gradient before clipping, mean over minibatches.",
               "grad_norm", "actor/grad_norm"),
        Metric("router/max_load", RATIO,
               "Of a mixture: tokens of the busiest expert over an even share, mean over layers; 1 is balanced."),
        Metric("router/load_entropy", SHARE,
               "Of a mixture: entropy of the experts' shares of tokens over the largest possible, mean over layers."),
        Metric("router/replay_mismatch", SHARE,
               "With `trainer.router_replay`: tokens times layers whose router would have chosen other experts."),
        Metric("train/critic_grad_norm", "1", "Norm of the critic's gradient before clipping, mean over minibatches.",
               verl="critic/grad_norm"),
    ),
    "Responses": (
        Metric("response_length/mean", TOKENS,
               "Mean length of a conversation's response, tool tokens included; TRL leaves these out.",
               "completions/mean_length"),
        Metric("response_length/min", TOKENS, "The shortest of a conversation.", "completions/min_length"),
        Metric("response_length/max", TOKENS, "The longest of a conversation.", "completions/max_length"),
        Metric("response_length/tokens", TOKENS, "All of the batch's conversations together."),
        Metric("response_length/capped", SHARE, "Conversations that ended at the length cap.",
               "completions/clipped_ratio", "response_length/clip_ratio"),
        Metric("response_length/mean_uncapped", TOKENS,
               "Mean of the other conversations; absent without any (TRL: 0).", "completions/mean_terminated_length"),
        Metric("prompt_length/mean", TOKENS, "Mean length of the prompt of a conversation."),
        Metric("prompt_length/min", TOKENS, "The shortest of a conversation."),
        Metric("prompt_length/max", TOKENS, "The longest of a conversation."),
        Metric("throughput/tokens", TOKENS, "Prompts and responses of conversations.", verl="perf/total_num_tokens"),
    ),
    "Deferral and selection": (
        Metric("deferral/deferred", CONVERSATIONS, "Conversations deferred to the next step."),
        Metric("deferral/oldest_age", "steps", "Age of the oldest deferred conversation; 0 without one."),
        Metric("deferral/dropped", CONVERSATIONS, "Conversations that were dropped before the update."),
        Metric("deferral/trained_late", SHARE, "Conversations of the batch that were deferred to this step."),
        Metric("deferral/length_bias", RATIO,
               "Mean length of trained over generated conversations in the last steps; below 1: long ones will come."),
        Metric("deferral/overcommit", "units", "Units in flight beyond the batch, as the admission decided."),
        Metric("deferral/predicted_seconds", SECONDS, "What the adaptive admission expects a step to take."),
        Metric("deferral/discarded_tokens", TOKENS, "Tokens of conversations that begin anew in a later step."),
        Metric("selection/rounds", COUNT, "Rounds of generation, with dynamic sampling."),
        Metric("selection/rejected", "groups", "Groups that were rejected, with dynamic sampling."),
        Metric("turns/answer_seconds", SECONDS, "From the end of a turn to its answer, mean over turns."),
        Metric("tools/call_frequency", "calls", "Calls of tools in a conversation, mean over those that ended."),
        Metric("tools/failure_frequency", SHARE, "Calls of tools that failed."),
        Metric("tools/{name}/seconds", SECONDS, "A call of one tool, failed or not, mean."),
        Metric("agents/refused", SHARE, "Requests of agents that were refused."),
        Metric("agents/repeated", SHARE, "Requests of agents that a client sent again, and that were answered again."),
        Metric("agents/conversations", COUNT, "Conversations of an agent, mean over the agents that ended."),
        Metric("agents/history_changed", COUNT,
               "Requests of an agent that showed what was said otherwise than it was, so that each began another "
               "conversation or was refused; mean over these agents. A message shows the first difference."),
        Metric("num_turns/mean", COUNT, "Turns of a conversation, with an environment, mean over those that ended."),
        Metric("num_turns/min", COUNT, "The fewest turns of a conversation."),
        Metric("num_turns/max", COUNT, "The most turns of a conversation."),
    ),
    "Staleness": (
        Metric("staleness/mean", "versions", "Versions between a token's sampling and its training, mean over tokens."),
        Metric("staleness/max", "versions", "The most of a token."),
        Metric("staleness/stale_tokens", SHARE, "Tokens of an older version."),
        Metric("staleness/share_{versions}", SHARE, "Tokens of one staleness: `0`, `1` or `2plus` versions."),
        Metric("mismatch/kl", NATS, "KL of behaviour to proximal policy over stale tokens, by k3; 0 without any."),
        Metric("mismatch/kl_current", NATS, "The same over current tokens: how decoding and training differ."),
        Metric("mismatch/ess", SHARE, "Effective sample size of the tokens as importance samples (Kong 1992)."),
        Metric("mismatch/weight", RATIO, "Mean importance weight of a token."),
        Metric("mismatch/masked", SHARE, "Tokens of weight 0."),
    ),
    "Time and overlap": (
        Metric("timing_s/step", SECONDS, "As `seconds`.", "step_time"),
        Metric("timing_s/rollouts", SECONDS, "From the step's start to its complete batch: decoding and scoring."),
        Metric("timing_s/decode", SECONDS, "Decoding, up to the cut.", verl="timing_s/gen"),
        Metric("timing_s/score", SECONDS,
               "A scorer was at work, from a call to its answer; calls that overlap count once."),
        Metric("timing_s/score_exposed", SECONDS, "Of these, without decoding or training in any step meanwhile."),
        Metric("timing_s/update", SECONDS, "The update; verl's is without a critic.", verl="timing_s/update_actor"),
        Metric("timing_s/weight_sync", SECONDS, "The weight sync.", verl="timing_s/update_weights"),
        Metric("sync/members", COUNT, "Engines of a pool that have the new weights; absent without a pool."),
        Metric("sync/bytes", "bytes", "Of the weights that went to each engine of vLLM; absent where none decodes."),
        Metric("sync/rounding_loss", SHARE,
               "Of the norm of what adapters add to the weights, the part that the dtype of vLLM rounds away; absent "
               "without adapters, or where transformers decodes."),
        Metric("overlap/hidden_fraction", SHARE, "The scoring that decoding or training hid; absent without any."),
        Metric("overlap/chunk", TOKENS, "Size of a chunk, where it is tuned."),
        Metric("throughput/tokens_per_s", "tokens a second", "Tokens of the trained responses over `seconds`."),
        Metric("queue/{channel}/peak", "items", "The most items that waited in a channel (`generate->reward`)."),
        Metric("queue/{channel}/merged", "items", "Chunks that joined the one before because the channel was full."),
        Metric("loop/worst_gap_s", SECONDS,
               "The longest that the event loop was blocked, by `oppo.liveness.Heartbeat`: in `oppo train`, and in a "
               "program's run that is `watched`; not in virtual time, which what measures it would keep from "
               "jumping."),
    ),
    "Devices": (
        Metric("perf/mfu/decode", SHARE,
               "Model FLOPs utilisation: FLOP that the tokens needed, without padding and what was read twice, over "
               "what the devices can do at most; absent where that is not known (`oppo.simulate.costs.GPUS`). A "
               "CPU's is measured when the run begins: above 1, other programs kept it from its peak then."),
        Metric("perf/mfu/score", SHARE,
               "The same of the scorers that read the policy's tokens, while one of them was at work."),
        Metric("perf/mfu/update", SHARE, "The same of the update, all its ranks together; verl's is without a critic.",
               verl="perf/mfu/actor"),
        Metric("memory/allocated", "GiB",
               "The most that tensors of this process took so far, of the GPU on which that is most.",
               verl="perf/max_memory_allocated_gb"),
        Metric("memory/reserved", "GiB", "The same of what PyTorch took from the GPU for tensors.",
               verl="perf/max_memory_reserved_gb"),
    ),
    "Held-out prompts": (
        Metric("eval/score", SCORE, "Mean score of the most likely rollouts, one to each prompt."),
        Metric("eval/score_ci95", SCORE, "Half of its 95 % confidence interval, over prompts; absent with one prompt."),
        Metric("eval/passed", SHARE, "Of these rollouts, those that pass (`eval.pass_score`)."),
        Metric("eval/response_length", TOKENS, "Mean length of their first conversations' responses."),
        Metric("eval/capped", SHARE, "Rollouts whose first conversation ended at the length cap."),
        Metric("eval/rewards/{name}/mean", SCORE, "Mean over rollouts of one of several rewards."),
        Metric("eval/rewards/{name}/share", SHARE, "Of each of several rewards: rollouts that it applies to."),
        Metric("eval/turns/answer_seconds", SECONDS, "From the end of a turn to its answer, mean over turns."),
        Metric("eval/tools/call_frequency", "calls", "Calls of tools in a conversation, mean over those that ended."),
        Metric("eval/tools/failure_frequency", SHARE, "Calls of tools that failed."),
        Metric("eval/tools/{name}/seconds", SECONDS, "A call of one tool, failed or not, mean."),
        Metric("eval/agents/refused", SHARE, "Requests of agents that were refused."),
        Metric("eval/agents/repeated", SHARE, "Requests of agents that were sent again, and answered again."),
        Metric("eval/agents/conversations", COUNT, "Conversations of an agent, mean."),
        Metric("eval/agents/history_changed", COUNT, "Requests of an agent that changed what was said, mean."),
        Metric("eval/num_turns/mean", COUNT, "Turns of a conversation, mean over those that ended."),
        Metric("eval/num_turns/min", COUNT, "The fewest turns of a conversation."),
        Metric("eval/num_turns/max", COUNT, "The most turns of a conversation."),
        Metric("eval/sampled_score", SCORE, "With `eval.samples`: mean score of drawn rollouts, mean over prompts."),
        Metric("eval/sampled_score_ci95", SCORE, "Half of its 95 % confidence interval, over the means of prompts."),
        Metric("eval/pass_at_{k}", SHARE,
               "Probability that one of k drawn rollouts passes, mean over prompts: the unbiased estimate of Chen "
               "et al. (2021)."),
        Metric("eval/dropped", "rollouts", "Rollouts without a score."),
        Metric("eval/seconds", SECONDS, "The evaluation."),
    ),
    "Bottleneck": (
        Metric("bottleneck/decode", SHARE, "Of the step's time: decoding with every slot taken."),
        Metric("bottleneck/tail", SHARE, "Of the step's time: slots left empty by the long tail."),
        Metric("bottleneck/cap", SHARE, "Of the step's time: slots left empty while responses run into the cap."),
        Metric("bottleneck/score", SHARE,
               "Of the step's time: waiting for scores after decoding, or for a scorer that is slower than decoding."),
        Metric("bottleneck/train", SHARE, "Of the step's time: the update."),
        Metric("bottleneck/limit", RATIO,
               "The largest speed-up by all schedules of as many rows together: streaming, deferral, steps in "
               "flight, streamed updates, in-flight weight sync. More rows at a time and other hardware are left "
               "out."),
        Metric("bottleneck/limit_stream", RATIO, "The same by scoring responses while they are decoded alone."),
        Metric("bottleneck/limit_defer", RATIO, "The same by that and by deferral."),
        Metric("bottleneck/limit_lookahead", RATIO,
               "The same by scoring and updating beside decoding (steps in flight, streamed updates), where each has "
               "hardware of its own."),
        Metric("bottleneck/scoring", RATIO, "Busy time of the slowest scorer over the decoding time."),
        Metric("bottleneck/capped", "units", "Units that ended at the length cap."),
        Metric("bottleneck/finished", "units", "Units that were completed."),
    ),
})  # fmt: skip

MFU: Final = {kind: f"perf/mfu/{kind}" for kind in ("decode", "score", "update")}
MEMORY: Final = {kind: f"memory/{kind}" for kind in ("allocated", "reserved")}

Metrics: TypeAlias = dict[str, float | int | None]

# The least share of a step's seconds from which scoring is worth hiding; a reward of milliseconds is below
SCORING: Final = 0.01


def step_metrics(report: StepReport) -> Metrics:
    head: Metrics = {"step": report.index, "version": report.version, "score": finite(report.score)}
    counts = {"trained": len(report.trained), "deferred": len(report.deferred), "dropped": len(report.dropped)}
    measured = {name: finite(value) for name, value in report.metrics.items()}
    return head | {"seconds": report.seconds} | counts | measured


def scalars(report: StepReport) -> dict[str, float]:
    return {name: float(value) for name, value in step_metrics(report).items() if name != "step" and value is not None}


def finite(value: float) -> float | None:
    # JSON has no NaN and no infinity
    return value if math.isfinite(value) else None


def metrics_of(run: Path) -> Sequence[Metrics]:
    return [
        {name: value for name, value in in_own_names(each).items() if value is None or isinstance(value, int | float)}
        for each in read(run / METRICS_FILE)
    ]


def summary(records: Sequence[Mapping[str, float | None]]) -> dict[str, float | int | None]:
    # Means of ten steps at the beginning and at the end, or of half of a run of fewer than twenty
    scores = column(records, "score")
    return {
        "steps": len(records),
        "trained": int(sum(column(records, "trained"))),
        "dropped": int(sum(column(records, "dropped"))),
        "deferrals": int(sum(column(records, "deferred"))),
        "seconds": math.fsum(column(records, "seconds")),
        "step_seconds_median": _of(column(records, "seconds"), statistics.median),
        "score_first": _of(scores[: _few(scores)], statistics.fmean),
        "score_last": _of(scores[-_few(scores) :], statistics.fmean),
        "kl_last": _of(column(records[-10:], "objective/kl"), statistics.fmean),
        "tokens_per_s_median": _of(column(records, "throughput/tokens_per_s"), statistics.median),
        "hidden_fraction": hidden_fraction(records),
    }


def hidden_fraction(records: Sequence[Mapping[str, float | None]]) -> float | None:
    """``None`` where scoring took less than ``SCORING`` of the steps' seconds: there is nothing to hide."""
    scoring, exposed = (math.fsum(column(records, name)) for name in ("timing_s/score", "timing_s/score_exposed"))
    return 1 - exposed / scoring if scoring > SCORING * math.fsum(column(records, "seconds")) else None


def column(records: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    return [value for each in records if (value := each.get(name)) is not None]


def _few(values: Sequence[float]) -> int:
    return min(10, (len(values) + 1) // 2)


def _of(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> float | None:
    return statistic(values) if values else None


def by_version(records: Sequence[Record], name: str) -> list[float | None]:
    """Return a metric of the weights after 0, 1, 2, ... steps; ``None`` where there is none."""
    known = {cast("int", each["step"]) + 1: cast("float | None", each.get(name)) for each in records}
    return [known.get(made) for made in range(max(known, default=-1) + 1)]


def summary_of(records: Sequence[Record]) -> Mapping[str, float | int | None]:
    scored = [
        (cast("int", each["step"]) + 1, float(score))
        for each in records
        if isinstance(score := each.get("eval/score"), float)
    ]
    if not scored:
        return {}
    steps, best = max(scored, key=lambda each: each[1])
    return {
        "eval_score_first": scored[0][1],
        "eval_score_last": scored[-1][1],
        "eval_score_best": best,
        "eval_steps_best": steps,
    }


class Renamed(Observer):
    def __init__(self, names: MetricNames, *observers: Observer) -> None:
        self._names: MetricNames = names
        self._observers = observers

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        item = self._with_names(item)
        notify(self._observers, lambda observer: observer.on_item(step, stage, item, at))

    def on_span(self, span: Span) -> None:
        notify(self._observers, lambda observer: observer.on_span(span))

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        result = self._with_names(result)
        notify(self._observers, lambda observer: observer.on_step(step, result, channels))

    def _with_names(self, item: object) -> object:
        return replace(item, metrics=renamed(item.metrics, self._names)) if isinstance(item, StepReport) else item
