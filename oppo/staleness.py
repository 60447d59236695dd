"""Learning from tokens that older weights sampled: the base of the ratio, and the weight of a token.

Older weights wrote a part of a carried rollout. With current ``pi``, behaviour ``mu`` (the weights that sampled a
token) and proximal ``pi'`` (the weights at the beginning of the update), let ``m = pi' / mu`` be the *mismatch* of a
token. The clipped loss takes a ratio, and multiplies each token's loss by a constant weight:

============= ======================== ========================
weight        ratio base ``mu``        ratio base ``pi'``
============= ======================== ========================
(ratio)       ``pi / mu``              ``pi / pi'``
``none``      1                        1
``truncated`` ``min(m, c) / m``        ``min(m, c)``
``mask``      1 if low <= m <= high    m if low <= m <= high
============= ======================== ========================

Ratio times weight is the same in both columns, except for ``none``. With the base ``mu`` the clip band lies around the
old weights, so a token that later updates moved out of the band teaches nothing; with ``pi'`` it lies around the
weights that are being updated (the decoupled objective).

With ``level = "sequence"``, ``m`` is the geometric mean of a rollout's mismatches, which does not drift with the length
as their product would; the ratio remains a token's.

A masked token counts in the mean of the loss with loss 0, so masking does not enlarge the gradients of the others. The
value loss, the entropy bonus and a KL in the loss keep every token.

Where the trainer's backend decodes, a token of the current version has ``m = 1``, exactly: in a run that carries
nothing, every choice here makes the same update, bit for bit. Where another engine does, ``m`` holds the difference
between the two as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from oppo.declared import AtLeastOne, Fraction, require_declared
from oppo.errors import ConfigError

RatioBase: TypeAlias = Literal["behaviour", "proximal"]
TokenWeight: TypeAlias = Literal["none", "truncated", "mask"]
Level: TypeAlias = Literal["token", "sequence"]

CAP = 2.0
"""The bound of truncated importance sampling, as in Yao et al. 2025."""

TOKEN_BAND = (0.5, 5.0)
"""The mismatches of tokens that a mask keeps, as in IcePop (Zhao et al. 2025)."""

SEQUENCE_BAND = (0.9, 1.1)
"""The mismatches of rollouts that a mask keeps: a geometric mean over hundreds of tokens varies far less than a token.

Ours; published bands guard against differences between two engines, and are tighter than a version of the weights.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The correction for stale tokens; the default is plain PPO.

    Attributes:
        ratio_base: ``behaviour``: the ratio is over the policy that sampled a token (Schulman et al. 2017).
            ``proximal``: over the policy before the update (decoupled PPO: Hilton et al. 2022, arXiv 2110.00641,
            equation 3; for language models AReaL: Fu et al. 2025, arXiv 2505.24298, equation 5).
        weight: ``none``. ``truncated``: importance weights, at most ``cap`` (IMPALA: Espeholt et al. 2018, arXiv
            1802.01561; for language models truncated importance sampling: Yao et al. 2025, "Your efficient RL framework
            secretly brings you off-policy RL training"). ``mask``: importance weights, and 0 outside of ``low .. high``
            (by token, IcePop: Zhao et al. 2025, "Small leak can sink a great ship"; by sequence, the off-policy
            sequence masking of DeepSeek-V3.2, arXiv 2512.02556, section 3.1, which masks rollouts of negative advantage
            only).
        level: ``token``, or ``sequence``: by the rollout's geometric mean (GSPO: Zheng et al. 2025, arXiv 2507.18071,
            equation 7).
        cap: c, at least 1.
        low, high: the band of ``mask``, around 1; ``None``: :data:`TOKEN_BAND` or :data:`SEQUENCE_BAND`.

    Raises:
        ConfigError: a value is out of range: 1 must be neither truncated nor masked.
    """

    ratio_base: RatioBase = "behaviour"
    weight: TokenWeight = "none"
    level: Level = "token"
    cap: AtLeastOne = CAP
    low: Fraction | None = None
    high: AtLeastOne | None = None

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)

    @property
    def needs_proximal(self) -> bool:
        """Whether this differs from plain PPO, so that proximal log-probs are needed."""
        return self.ratio_base != "behaviour" or self.weight != "none"

    @property
    def band(self) -> tuple[float, float]:
        """The mismatches that a mask keeps."""
        low, high = TOKEN_BAND if self.level == "token" else SEQUENCE_BAND
        return low if self.low is None else self.low, high if self.high is None else self.high
