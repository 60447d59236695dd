"""``[scorers.NAME]``, what serves the reference or a teacher; and the keys of any model on vLLM that scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from oppo.declared import Positive, PositiveCount, changed, setting

ScoringEngine: TypeAlias = Literal["transformers", "vllm"]
"""What serves a model that scores."""


@dataclass(frozen=True, kw_only=True)
class OnVllm:
    """The keys of a model that vLLM serves; without slots, so that a table with slots may inherit them."""

    vllm: dict[str, object] = field(
        default_factory=dict,
        metadata={
            "description": "arguments of its engine, by vLLM's names, as `{tensor_parallel_size = 2}`; those that the "
            "run sets itself are refused",
            "resume": "rounding",
        },
    )
    url: str = setting(
        "",
        "a server that serves the model (`vllm serve MODEL`; a reward model with `--runner pooling`); empty: the run "
        "starts an engine",
        resume="free",
    )
    api_key_env: str = setting(
        "", "the environment variable that holds the server's key; empty: it asks for none", resume="free"
    )
    timeout: Positive = setting(60.0, "seconds for a request to the server", resume="free")
    attempts: PositiveCount = setting(
        4, "for a request that failed in a way that may pass, the first included", resume="free"
    )

    def __post_init__(self) -> None:
        of_server = changed(self, {"api_key_env", "timeout", "attempts"})
        if self.url and self.vllm:
            raise ValueError(
                f"vllm.{next(iter(self.vllm))} is for an engine that the run starts, and url names a server: give it "
                "to the server's command, or leave one of the two out"
            )
        if of_server and not self.url:
            raise ValueError(
                f"{', '.join(of_server)} is for a server, and none is named: give its url, or leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSection(OnVllm):
    """``[scorers.NAME]``: what serves the reference, the teacher or one of several."""

    engine: ScoringEngine = setting(
        "transformers",
        "what serves the model; `vllm`: an engine of its own, or a server (`url`), for a model with the policy's "
        "tokenizer",
    )

    def __post_init__(self) -> None:
        OnVllm.__post_init__(self)
        if self.engine != "vllm" and (given := changed(self, {"vllm", "url"})):
            raise ValueError(f"{next(iter(given))} is for vLLM: set engine = 'vllm', or leave it out")
