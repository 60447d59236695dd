"""A loop that exists already, overlapped: its own training step, in a graph of this library's stages."""

from __future__ import annotations

from oppo.admission import Admission
from oppo.admission.chunking import ChunkSize, Fixed
from oppo.events import Drop, FloatArray, Prompt, StepReport, merge_chunks, rollout_of
from oppo.graph import Graph, GraphBuilder
from oppo.models import Policy, Scorer
from oppo.placement import Thread
from oppo.stages import Gather, Generate, Score, Update
from oppo.stages.score import synced_models
from oppo.training import FunctionTrainer, Module, TrainStep
from oppo.turns import Environment


def wrap(
    step: TrainStep,
    actor: Module,
    *,
    policy: Policy,
    reward: Scorer[float | Drop],
    admission: Admission,
    reference: Scorer[FloatArray] | None = None,
    critic: Scorer[FloatArray] | None = None,
    critic_module: Module | None = None,
    samples: int = 1,
    chunks: ChunkSize | None = None,
    environment: Environment | None = None,
    place: Thread | None = None,
) -> Graph[StepReport]:
    """Return a loop that exists already as a graph: responses are scored while they are written, and deferred.

    The loop keeps its training step, which takes a :class:`oppo.Batch` with tokens, behaviour log-probs, scores and the
    results of the other scorers, and without rewards, advantages and returns. The policy replaces the loop's call that
    generates, since a call that returns when all responses have ended cannot be streamed.

    Args:
        step: trains ``actor`` on a batch, in place, and returns metrics or nothing.
        actor: the module that it trains.
        policy: the actor that decodes, for example :class:`oppo.hf.HfPolicy` on the same module.
        reward: the score of a finished response, or a ``Drop``.
        admission: batch size, overcommit and the cut.
        reference: log-probs of a reference model, float32 [n] for a response of n tokens.
        critic: values of the states before each response token, float32 [n].
        critic_module: the module behind ``critic``, if the step trains it too.
        samples: responses to each prompt; ``admission`` then counts prompts.
        chunks: tokens per chunk; 32 by default.
        environment: answers the turns of a response, so that it goes on after a stop token with a tool's result.
        place: where the step is called; ``None``: on the event loop, where everything else waits for it.
    """
    trainer = FunctionTrainer(step, actor, critic_module, place=place)
    capacity = max(16, 4 * admission.batch * samples)
    g: GraphBuilder[Prompt] = GraphBuilder("wrapped", capacity=capacity, merge=merge_chunks, key=rollout_of)
    generate = Generate(policy, admission, chunks or Fixed(), samples, environment=environment)
    rollout = g.add("generate", generate, g.prompts)
    score = g.add("reward", Score(reward), rollout)
    ref = None if reference is None else g.add("ref_logp", Score(reference), rollout)
    values = None if critic is None else Score(critic)
    value = None if values is None else g.add("value", values, rollout)
    batch = g.add("gather", Gather(), rollout, score, reference=ref, value=value)
    served = synced_models(policy, values) if critic_module is not None else synced_models(policy)
    return g.build(g.add("update", Update(trainer, synced=served, after=("generate",)), batch))
