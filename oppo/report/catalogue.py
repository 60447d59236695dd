"""The metrics of a step: the name, the unit and the meaning of each; ``docs/metrics.md`` is made of them.

They are in :class:`oppo.StepReport`, in ``metrics.jsonl`` and in the trackers under the same names. A trainer or a loss
of one's own adds others; those are what it says they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final

TOKENS: Final = "tokens"
COUNT: Final = "count"
SHARE: Final = "share, 0 to 1"
SECONDS: Final = "seconds"
NATS: Final = "nats a token"
NATS_PER_RESPONSE: Final = "nats a response"
SCORE: Final = "as the reward"
RATIO: Final = "ratio"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: parts in braces stand for any text without a slash.
        unit: of its value.
        meaning: a sentence.
    """

    name: str
    unit: str
    meaning: str

    def describes(self, name: str) -> bool:
        """Return whether a metric of this name is this one."""
        return _pattern(self.name).fullmatch(name) is not None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, re.split(r"\{\w+\}", name))))


def metric(name: str) -> Metric | None:
    """Return the declaration of a metric; ``None`` for one that oppo does not make.

    Example:
        >>> metric("queue/generate->reward/peak").unit
        'items'
    """
    return next((each for section in METRICS.values() for each in section if each.describes(name)), None)


METRICS: Final[Mapping[str, tuple[Metric, ...]]] = MappingProxyType(
    {
        "The step": (
            Metric("step", "ordinal", "Steps made so far, from 1; the trackers have it as their step."),
            Metric("version", COUNT, "Updates that have been made, this one included."),
            Metric("score", SCORE, "Mean score of the rollouts that were trained, and of those left out of the loss."),
            Metric(
                "seconds",
                SECONDS,
                "From the step's start to its last publish, or from the publish of the step before if that is later.",
            ),
            Metric("trained", "rollouts", "Rollouts that were trained."),
            Metric("deferred", "rollouts", "Rollouts that are carried into the next step."),
            Metric("dropped", "rollouts", "Rollouts that ended without being trained."),
            Metric("lr", "1", "Learning rate of the actor."),
            Metric("episode", "rollouts", "Rollouts trained since the run began."),
        ),
        "Objective": (
            Metric(
                "objective/kl",
                NATS_PER_RESPONSE,
                "KL to the reference, by the estimator of the algorithm: the sum over a response's tokens, "
                "mean over responses; absent without a reference.",
            ),
            Metric("objective/kl_coef", "1", "Coefficient of the KL penalty in this step; absent without a reference."),
            Metric(
                "objective/entropy",
                NATS_PER_RESPONSE,
                "Minus the behaviour log-prob of a response, mean over responses.",
            ),
            Metric(
                "objective/non_score_reward",
                SCORE,
                "Minus the mean KL penalty of a response; absent without a reference.",
            ),
            Metric("objective/rlhf_reward", SCORE, "Mean shaped score and KL penalty of a response together."),
            Metric("objective/scores", SCORE, "Mean score."),
            Metric("objective/scores_std", SCORE, "Standard deviation of the scores."),
            Metric("objective/shaped_scores", SCORE, "Mean score after scaling, clipping and penalties."),
            Metric(
                "objective/group_std",
                SCORE,
                "Standard deviation of the shaped scores of a group, mean over groups.",
            ),
            Metric(
                "objective/frac_zero_std",
                SHARE,
                "Groups whose shaped scores are all the same, which teach nothing.",
            ),
            Metric(
                "reward/{name}_mean",
                SCORE,
                "Of several rewards: the mean of this part over the rollouts it applies to.",
            ),
            Metric("reward/{name}_share", SHARE, "Of several rewards: rollouts that this part applies to."),
            Metric(
                "bridge/reread_tokens",
                TOKENS,
                "Of a reward model that reads text: tokens of a rollout that it had read and that later text changed.",
            ),
            Metric(
                "bridge/tail_tokens",
                TOKENS,
                "Of a reward model that reads text: tokens of a rollout that were left to read when it had ended.",
            ),
        ),
        "Loss and policy": (
            Metric("loss/policy_avg", "1", "Policy loss, mean over minibatches."),
            Metric("loss/value_avg", "as the returns, squared", "Value loss of the critic, mean over minibatches."),
            Metric(
                "policy/approxkl_avg",
                NATS,
                "Half the mean square of the log-ratio of current to old probability.",
            ),
            Metric("policy/clipfrac_avg", SHARE, "Tokens whose loss was clipped."),
            Metric(
                "policy/clipfrac_lag_{lag}",
                SHARE,
                "The same of the tokens of one lag: `0`, `1` or `2plus` updates.",
            ),
            Metric("policy/entropy_avg", NATS, "Entropy of the policy's distribution."),
            Metric("policy/kl_avg", NATS, "KL to the reference, of the weights that are trained."),
            Metric(
                "policy/margin_avg",
                "nats",
                "Of pairs: how much more the policy prefers the better response than the reference does, times beta.",
            ),
            Metric("policy/ranked_right_avg", SHARE, "Of pairs: those whose margin is above 0."),
            Metric("val/clipfrac_avg", SHARE, "Tokens whose value loss was clipped."),
            Metric("val/ratio", RATIO, "Current over old probability of a token, mean over tokens."),
            Metric("val/ratio_var", "1", "Variance of that mean over the minibatches."),
            Metric(
                "val/num_eos_tokens",
                TOKENS,
                "Stop tokens that were sampled in the batch: end-of-sequence tokens, any of them.",
            ),
        ),
        "Trainer": (
            Metric("train/tokens", TOKENS, "Sampled tokens in the batch, which the loss counts."),
            Metric("train/minibatches", COUNT, "Optimizer steps."),
            Metric(
                "train/minibatches_skipped",
                COUNT,
                "Minibatches whose loss or gradient was not finite: no optimizer step.",
            ),
            Metric("train/micro_batches", COUNT, "Forward and backward passes."),
            Metric("train/padding_fraction", SHARE, "Of the tokens that were read, those that are padding."),
            Metric("train/grad_norm", "1", "Norm of the actor's gradient before clipping, mean over minibatches."),
            Metric(
                "train/critic_grad_norm",
                "1",
                "Norm of the critic's gradient before clipping, mean over minibatches.",
            ),
        ),
        "Responses": (
            Metric("response_length/mean", TOKENS, "Mean length of the batch's responses, a tool's tokens included."),
            Metric("response_length/max", TOKENS, "Length of the longest of them."),
            Metric("response_length/tokens", TOKENS, "Length of all of them together."),
            Metric("response_length/capped", SHARE, "Responses that ended at the length cap."),
        ),
        "Deferral and selection": (
            Metric("deferral/carried", "rollouts", "Rollouts that are carried into the next step."),
            Metric("deferral/oldest_age", "steps", "Age of the oldest of them; 0 without one."),
            Metric("deferral/dropped", "rollouts", "Rollouts that were dropped before the update."),
            Metric("deferral/trained_late", SHARE, "Responses of the batch that were carried into this step."),
            Metric(
                "deferral/length_bias",
                RATIO,
                "Mean length of what was trained over that of what was generated, in the last steps; below 1, "
                "long responses are still to come.",
            ),
            Metric("deferral/extra", "units", "Units in flight beyond the batch, as the admission decided."),
            Metric("deferral/predicted_seconds", SECONDS, "What the adaptive admission expects a step to take."),
            Metric("deferral/discarded_tokens", TOKENS, "Tokens of rollouts that begin anew in a later step."),
            Metric("selection/rounds", COUNT, "Rounds of generation, with dynamic sampling."),
            Metric("selection/rejected", "groups", "Groups that were rejected, with dynamic sampling."),
            Metric("turns/answer_seconds", SECONDS, "From the end of a turn to its answer, mean over turns."),
        ),
        "Staleness": (
            Metric(
                "staleness/lag_mean",
                "updates",
                "Updates between the weights that sampled a token and those it trains, mean over tokens.",
            ),
            Metric("staleness/lag_max", "updates", "The largest of them."),
            Metric("staleness/stale_tokens", SHARE, "Tokens of an older version."),
            Metric("staleness/lag_0", SHARE, "Tokens of the current version."),
            Metric("staleness/lag_1", SHARE, "Tokens of the version before."),
            Metric("staleness/lag_2plus", SHARE, "Tokens of older versions than that."),
            Metric(
                "mismatch/kl",
                NATS,
                "KL of the behaviour to the proximal policy over stale tokens, by Schulman's k3; 0 without any.",
            ),
            Metric(
                "mismatch/kl_current",
                NATS,
                "The same over tokens of the current version: how decoding and training differ.",
            ),
            Metric("mismatch/ess", SHARE, "Effective sample size of the tokens as importance samples (Kong 1992)."),
            Metric("mismatch/weight", RATIO, "Mean importance weight of a token."),
            Metric("mismatch/masked", SHARE, "Tokens of weight 0."),
        ),
        "Time and overlap": (
            Metric("timing_s/step", SECONDS, "As `seconds`."),
            Metric(
                "timing_s/rollouts",
                SECONDS,
                "From the step's start until its batch was complete: decoding and scoring.",
            ),
            Metric("timing_s/decode", SECONDS, "Decoding, up to the cut."),
            Metric(
                "timing_s/score",
                SECONDS,
                "A scorer was at work: a call counts from when its stage makes it to its answer, and calls "
                "that overlap count once.",
            ),
            Metric(
                "timing_s/score_exposed",
                SECONDS,
                "Of these, nothing decoded or trained meanwhile, in this step or one beside it.",
            ),
            Metric("timing_s/update", SECONDS, "The update."),
            Metric("timing_s/publish", SECONDS, "Publishing the weights."),
            Metric(
                "sync/rounding_loss",
                SHARE,
                "Of the norm of what adapters add to the weights, the part that the dtype of vLLM rounds away; absent "
                "without adapters, or where transformers decodes.",
            ),
            Metric(
                "overlap/hidden_fraction",
                SHARE,
                "Of the scoring time, what decoding or training hid; absent without scoring.",
            ),
            Metric("overlap/chunk", TOKENS, "Size of a chunk, where it is tuned."),
            Metric("throughput/tokens_per_s", "tokens a second", "Tokens of the trained responses over `seconds`."),
            Metric("queue/{channel}/peak", "items", "The most items that waited in a channel (`generate->reward`)."),
            Metric(
                "queue/{channel}/merged",
                "items",
                "Chunks that joined the one before them because the channel was full.",
            ),
            Metric(
                "loop/worst_gap_s",
                SECONDS,
                "The longest that the event loop was blocked, by `oppo.liveness.Heartbeat`: in `oppo train`, and in a "
                "program's run that is `watched`; not in virtual time, which what measures it would keep from jumping.",
            ),
        ),
        "Held-out prompts": (
            Metric("eval/score", SCORE, "Mean score of the most likely responses, one to each prompt."),
            Metric(
                "eval/score_ci95",
                SCORE,
                "Half the width of its 95 % confidence interval, over prompts; absent with one prompt.",
            ),
            Metric("eval/passed", SHARE, "Of these responses, those that pass (`eval.pass_score`)."),
            Metric("eval/response_length", TOKENS, "Their mean length."),
            Metric("eval/capped", SHARE, "Those that ended at the length cap."),
            Metric("eval/reward/{name}_mean", SCORE, "Of several rewards: the mean of this part."),
            Metric("eval/reward/{name}_share", SHARE, "Of several rewards: responses that this part applies to."),
            Metric("eval/turns/answer_seconds", SECONDS, "From the end of a turn to its answer, mean over turns."),
            Metric("eval/sampled_score", SCORE, "With `eval.samples`: mean score of drawn responses, over prompts."),
            Metric(
                "eval/sampled_score_ci95",
                SCORE,
                "Half the width of its 95 % confidence interval, over the means of the prompts.",
            ),
            Metric(
                "eval/pass_at_{k}",
                SHARE,
                "Probability that one of k drawn responses passes, mean over prompts: the unbiased estimate of Chen et "
                "al. (2021).",
            ),
            Metric("eval/dropped", "responses", "Responses without a score."),
            Metric("eval/seconds", SECONDS, "The evaluation."),
        ),
        "Bottleneck": (
            Metric("bottleneck/decode", SHARE, "Of the step's time: decoding with every place taken."),
            Metric("bottleneck/tail", SHARE, "Of the step's time: places left empty by the long tail."),
            Metric(
                "bottleneck/cap",
                SHARE,
                "Of the step's time: places left empty while responses run into the length cap.",
            ),
            Metric(
                "bottleneck/score",
                SHARE,
                "Of the step's time: waiting for scores after decoding, or for a scorer that is slower than decoding.",
            ),
            Metric("bottleneck/train", SHARE, "Of the step's time: the update."),
            Metric(
                "bottleneck/limit",
                RATIO,
                "The largest speed-up by all schedules of as many rows together: streaming, carrying, steps in flight, "
                "streamed updates, in-flight weight sync. More rows at a time and other hardware are left out.",
            ),
            Metric("bottleneck/limit_stream", RATIO, "The same by scoring responses while they are decoded alone."),
            Metric("bottleneck/limit_carry", RATIO, "The same by that and by carrying stragglers."),
            Metric(
                "bottleneck/limit_lookahead",
                RATIO,
                "The same by scoring and updating beside decoding (steps in flight, streamed updates), where "
                "each has hardware of its own.",
            ),
            Metric("bottleneck/scoring", RATIO, "Busy time of the slowest scorer over that of decoding."),
            Metric("bottleneck/capped", "units", "Units that ended at the length cap."),
            Metric("bottleneck/finished", "units", "Units that were completed."),
        ),
    }
)
"""Every metric, by section of the page."""
