"""Parts of one's own in the graph of a run: a trainer that is checkpointed, saved and resumed, and an environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from oppo.algorithms.base import Roles
from oppo.algorithms.group import grpo
from oppo.algorithms.ppo import wrap
from oppo.errors import CheckpointError, ConfigError
from oppo.events import Batch, StepReport
from oppo.graph import Graph
from oppo.report import RunDirectory
from oppo.run.checkpoint import CHECKPOINTS
from oppo.run.train import FINAL, resume, train
from oppo.stages import Generate
from oppo.turns import Answer, Turn
from tests.kit.forked import Program
from tests.kit.workplace import furnish, records

TRAINER = '''
"""A trainer of a user: plain policy gradient by SGD with momentum, on a copy of the actor."""

from pathlib import Path

from functools import partial

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from oppo.algorithms.group import grpo
from oppo.run.train import resume, train
from oppo.placement.trainer import HostedTrainer, TrainerCounts
from oppo.models import Trained, Weights
from oppo.placement import Thread


class Reinforce:
    """The core: it owns the model and the optimizer."""

    def __init__(self, path):
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.counts = TrainerCounts.new()

    def weights(self):
        return Weights(self.counts.version, self.model.state_dict())

    def update(self, batch):
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for response, row in zip(batch.responses, batch.rows()):
            prompt, tokens = (torch.tensor(each.tolist()) for each in (response.prompt.tokens, response.tokens))
            logits = self.model(torch.cat((prompt, tokens))[None]).logits[0, len(prompt) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            total = total - (chosen * torch.tensor(batch.advantages[row])).sum() / len(batch.tokens)
        total.backward()
        self.optimizer.step()
        self.counts.version += 1
        return Trained({"loss/policy_avg": total.item()})

    def write(self, directory):
        self.save(directory)
        momenta = [self.optimizer.state[each]["momentum_buffer"] for each in self.model.parameters()]
        state = {f"momentum{k}": each for k, each in enumerate(momenta)}
        save_file({**state, "version": torch.tensor(self.counts.version)}, directory / "sgd.safetensors")

    def save(self, directory):
        self.model.save_pretrained(directory / "actor")

    def restore(self, directory):
        self.model.load_state_dict(AutoModelForCausalLM.from_pretrained(directory / "actor").state_dict())
        state = load_file(directory / "sgd.safetensors")
        for k, each in enumerate(self.model.parameters()):
            self.optimizer.state[each]["momentum_buffer"] = state[f"momentum{k}"]
        self.counts.version = self.counts.restored = int(state["version"])


def carry_out(folder, config, *overrides):
    with Thread("sgd") as place:
        def graph(roles):
            return grpo(
                policy=roles.policy, reward=roles.reward, admission=roles.admission, chunks=roles.chunks, samples=2,
                trainer=HostedTrainer(partial(Reinforce, folder / "actor"), place),
            )

        return (resume if config.is_dir() else train)(config, overrides, graph=graph)
'''

SETTINGS = (
    "run.deterministic=true", "run.panel=off", "run.steps=6", "run.checkpoint_every=2", "run.scorers=thread",
    "run.trace=0", "step.algorithm=grpo", "step.batch=3", "step.overcommit=2", "rewards.0.source=reward.py:short",
    "models.share_weights=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("parts"))


def carry_out(folder: Path, config: Path, *overrides: str) -> RunDirectory:
    defined: dict[str, Callable[..., RunDirectory]] = {}
    exec(compile(TRAINER, "<program>", "exec"), defined)
    return defined["carry_out"](folder, config, *overrides)


def weights(folder: Path, name: str) -> dict[str, bytes]:
    found = load_file(folder / "runs" / name / FINAL / "actor" / "model.safetensors")
    return {key: tensor.tobytes() for key, tensor in found.items()}


def test_a_trainer_of_the_graph_is_checkpointed_saved_and_resumed_after_a_kill(folder: Path) -> None:
    carry_out(folder, folder / "config.toml", *SETTINGS, "run.name=whole")
    whole = weights(folder, "whole")
    assert whole != {key: tensor.tobytes() for key, tensor in load_file(folder / "actor" / "model.safetensors").items()}
    run = folder / "runs" / "killed"
    settings = (*SETTINGS, "run.name=killed")
    program = f"{TRAINER}\nfolder = Path({str(folder)!r})\ncarry_out(folder, folder / 'config.toml', *{settings})"
    with Program(program) as process:
        while not list((run / CHECKPOINTS).glob("step-*2/COMPLETE")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        process.kill()
        process.communicate()
    assert len(records(folder, "killed", "metrics.jsonl")) < 6, "it was killed before its end"
    (checkpoint, *_) = sorted((run / CHECKPOINTS).glob("step-*"))
    assert {"actor", "sgd.safetensors"} <= {path.name for path in checkpoint.iterdir()}
    assert (checkpoint / "actor" / "tokenizer.json").is_file()
    carry_out(folder, run)
    assert weights(folder, "killed") == whole
    assert [line["version"] for line in records(folder, "killed", "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_run_of_another_trainer_is_not_resumed_without_it(folder: Path) -> None:
    directory = carry_out(folder, folder / "config.toml", *SETTINGS, "run.name=other", "run.steps=2")
    with pytest.raises(CheckpointError, match=r"trained by Reinforce, and would go on with HfTrainer: .* program that"):
        resume(directory.path, ["run.steps=3"])


def test_a_trainer_that_cannot_be_resumed_is_refused_by_name(folder: Path) -> None:
    class Nothing:
        def state_dict(self) -> dict[str, object]:
            return {}

    def step(batch: Batch) -> None:
        del batch

    def wrapped(roles: Roles) -> Graph[StepReport]:
        return wrap(step, Nothing(), policy=roles.policy, reward=roles.reward, admission=roles.admission)

    message = r"stage 'update', FunctionTrainer, has no has_learned, progress, write, save, restore, .*HostedTrainer"
    with pytest.raises(ConfigError, match=message):
        train(folder / "config.toml", [*SETTINGS, "run.name=refused"], graph=wrapped)
    assert not (folder / "runs" / "refused").exists()


TURNS = ("sampling.stop=['w5', 'w9', 'w13', 'w21', 'w33', 'w40']", "sampling.max_new_tokens=30")


class Twice:
    """An environment that answers the first two turns of each response."""

    def __init__(self) -> None:
        self.turns = 0

    async def answer(self, turn: Turn) -> Answer | None:
        self.turns += 1
        return None if turn.number == 2 else Answer(turn.tokens[:1])


def test_an_environment_of_the_graph_answers(folder: Path) -> None:
    tool = Twice()

    def graph(roles: Roles) -> Graph[StepReport]:
        made = grpo(
            policy=roles.policy, reward=roles.reward, trainer=roles.trainer, admission=roles.admission,
            reference=roles.reference, samples=2,
        )  # fmt: skip
        return made.replace(generate=replace(made.stage("generate", Generate), environment=tool))

    settings = [*SETTINGS, *TURNS, "run.name=turns", "run.steps=2", "models.share_weights=true"]
    train(folder / "config.toml", settings, graph=graph)
    assert tool.turns > 0
    (folder / "tools.py").write_text("def tool(turn):\n    return None\n")
    with pytest.raises(ConfigError, match=r"an environment of its own, Twice, and environment.source = .*tools.py"):
        train(folder / "config.toml", [*settings, "run.name=both", "environment.source=tools.py:tool"], graph=graph)
