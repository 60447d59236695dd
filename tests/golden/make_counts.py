"""Writes ``counts.json``: how many updates, responses and optimizer steps other trainers make of random configurations.

Real trainers are run on a model of one layer, or the functions that count in their installed sources, unmodified: of
verl and OpenRLHF these lie inside of modules that need Ray, so they are cut out of the files and executed. None of the
packages is a dependency of this one. In an environment with the one version, or with a wheel of it unpacked on
``PYTHONPATH``::

    python -m tests.golden.make_counts grpo rloo sdpo    # trl==1.16.0
    python -m tests.golden.make_counts ppo               # trl==1.12.0, the last with trl.experimental.ppo
    python -m tests.golden.make_counts verl              # verl==0.9.1
    python -m tests.golden.make_counts openrlhf          # openrlhf==0.11.2

A wheel's own folder ``tests`` is to be removed. Each case has the fields that were given, the number of ``prompts``,
and what was counted: ``rounds`` of generation, each of as many ``responses``, and the ``optimizer_steps`` that were
made of all of them; of PPO, verl and OpenRLHF in each round.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

import yaml

from oppo.config.convert_files import flattened

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", ACCELERATE_USE_CPU="true")

PATH: Final = Path(__file__).with_name("counts.json")
CASES: Final = 50
Case = dict[str, Any]


def main(kinds: list[str]) -> None:
    for kind in kinds:
        made = counted(kind)
        found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
        text = json.dumps(dict(sorted({**found, kind: made}.items())))
        PATH.write_text(text.replace('{"given"', '\n{"given"') + "\n", encoding="utf-8")


def counted(kind: str, wanted: int = CASES) -> dict[str, Any]:
    """Return the version of a trainer and its first cases, the same in every call."""
    package = {"verl": "verl", "openrlhf": "openrlhf"}.get(kind, "trl")
    draw, count = KINDS[kind]
    random, cases = Random(kind), list[Case]()
    while len(cases) < wanted:
        given, prompts = draw(random), random.randint(4, 40)
        if made := count(kind, given, prompts):
            cases.append({"given": given, "prompts": prompts, **made})
    return {"package": package, "version": metadata.version(package), "cases": cases}


def of_groups(random: Random) -> Case:
    samples, rows, passes = random.choice([2, 3, 4]), random.randint(1, 6), random.randint(1, 4)
    given: Case = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": passes}
    given |= {"num_generations": samples, "num_iterations": random.choice([1, 1, 2, 3])}
    several = random.choice([None, None, passes * 2, passes * 3, random.randint(1, 6)])
    if several is not None:
        by_size = random.random() < 0.3
        given |= {"generation_batch_size": rows * several} if by_size else {"steps_per_generation": several}
    length = random.choice(["max_steps", "num_train_epochs"])
    return given | {length: random.randint(1, 9) if length == "max_steps" else random.choice([1, 2, 3])}


def of_trl(kind: str, given: Case, prompts: int) -> Case | None:
    """Train with TRL's trainer of groups: the real one, on a real model."""
    from datasets import Dataset

    module = import_module("trl.experimental.sdpo" if kind == "sdpo" else "trl")
    config, trainer = (getattr(module, f"{kind.upper()}{role}") for role in ("Config", "Trainer"))
    makes_round = "_prepare_training_batch" if kind == "sdpo" else "_generate_and_score_completions"
    own = {"teacher_model_kind": "live"} if kind == "sdpo" else {}  # another is loaded again, by the model's name
    with TemporaryDirectory() as folder:
        try:
            args = config(output_dir=folder, **QUIET, max_completion_length=2, beta=0.0, **own, **given)
        except ValueError:  # no whole groups
            return None
        made = trainer(
            model=model(), args=args, processing_class=tokenizer(), reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": [f"w{i % 9}" for i in range(prompts)]}),
        )  # fmt: skip
        generate, rounds = getattr(made, makes_round), list[int]()

        def generated(inputs: list[Any]) -> Any:
            rounds.append(len(inputs))
            return generate(inputs)

        setattr(made, makes_round, generated)
        if not len(made.get_train_dataloader()):
            return None
        made.train()
    (responses,) = set(rounds)
    return {"rounds": len(rounds), "responses": responses, "optimizer_steps": made.state.global_step}


def reward(completions: list[str], **_: object) -> list[float]:
    return [0.0] * len(completions)


QUIET: Final = {
    "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "gradient_checkpointing": False, "logging_strategy": "no",
}  # fmt: skip


def model(*, labels: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    shape = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        pad_token_id=15,
        eos_token_id=14,
    )
    shape.num_labels = max(labels, 1)
    return LlamaForSequenceClassification(shape) if labels else LlamaForCausalLM(shape)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(14)} | {"<eos>": 14, "<pad>": 15}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", padding_side="left")


def of_ppo(random: Random) -> Case:
    rows, passes = random.randint(1, 4), random.choice([1, 2, 3, 4])
    given: Case = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": passes}
    given |= {"num_mini_batches": random.choice([1, 1, 2, 3, 4]), "num_ppo_epochs": random.choice([1, 2, 4])}
    length = random.choice(["total_episodes", "num_train_epochs"])
    return given | {length: random.randint(1, 60) if length == "total_episodes" else random.choice([1.0, 2.0, 3.0])}


def of_trl_ppo(_kind: str, given: Case, prompts: int) -> Case | None:
    """Train with TRL's PPO: the real one, on real models."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer as peer

    if given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] > prompts:
        return None
    rounds, steps = list[int](), list[int]()
    generate = peer.batch_generation

    def generated(policy: Any, queries: Any, *rest: Any) -> Any:
        rounds.append(len(queries))
        steps.append(0)
        return generate(policy, queries, *rest)

    def stepped(*_: object) -> None:
        steps[-1] += made.accelerator.sync_gradients
        step()

    with TemporaryDirectory() as folder:
        args = PPOConfig(output_dir=folder, **QUIET, response_length=2, num_sample_generations=0, **given)
        data = Dataset.from_dict({"input_ids": [[i % 9, 3] for i in range(prompts)]})
        try:
            made = PPOTrainer(
                args=args, processing_class=tokenizer(), model=model(), ref_model=model(), reward_model=model(labels=1),
                value_model=model(labels=1), train_dataset=data, eval_dataset=data,
            )  # fmt: skip
        except ValueError:  # no whole minibatches
            return None
        step = made.optimizer.step
        made.optimizer.step, peer.batch_generation = stepped, generated
        if args.num_total_batches > 10:
            return None
        try:
            made.train()
        finally:
            peer.batch_generation = generate
    (responses,) = set(rounds)
    return {"rounds": len(rounds), "responses": responses, "optimizer_steps": steps}


class Tree(dict[str, Any]):
    """A configuration by attributes, as OmegaConf has it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def tree(flat: Mapping[str, object]) -> Tree:
    found = Tree()
    for name, value in flat.items():
        place = found
        *path, last = name.split(".")
        for part in path:
            place = place.setdefault(part, Tree())
        place[last] = value
    return found


class Globals(dict[str, Any]):
    """The names of a module that a function cut out of it sees: all that are not given do nothing."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or self.setdefault(name, MagicMock(name=name))


def installed(module: str, suffix: str) -> Path:
    """Return a file of an installed package that is not imported."""
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*rest.split(".")).with_suffix(suffix)


def cut(module: str, names: list[str], **given: object) -> dict[str, Callable[..., Any]]:
    """Return functions of an installed module, by name, without importing it."""
    text = installed(module, ".py").read_text(encoding="utf-8")
    scope = Globals(given)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name in names and node.name not in given:
            node.decorator_list, node.returns = [], None
            for each in ast.walk(node.args):
                if isinstance(each, ast.arg):
                    each.annotation = None
            exec(compile(ast.Module([node], []), module, "exec"), scope)  # their own lines
    return {name: scope[name] for name in names}


def defaults_of_verl() -> dict[str, Any]:
    """Return verl's own defaults, by field."""
    text = installed("verl.trainer.config._generated_ppo_trainer", ".yaml").read_text(encoding="utf-8")
    return dict(flattened("", yaml.safe_load(text)))


def of_verl(random: Random) -> Case:
    batch, mini = random.randint(1, 5), random.randint(1, 4)
    given: Case = {"data.train_batch_size": batch * mini, "actor_rollout_ref.actor.ppo_mini_batch_size": mini}
    given |= {"actor_rollout_ref.rollout.n": random.choice([1, 2, 4]), "trainer.total_epochs": random.randint(1, 4)}
    given |= {"actor_rollout_ref.actor.ppo_epochs": random.choice([1, 1, 2])}
    given |= {"algorithm.adv_estimator": random.choice(["gae", "grpo", "reinforce_plus_plus"])}
    if given["algorithm.adv_estimator"] == "gae":
        given |= {"trainer.critic_warmup": random.randint(0, 4)}
    return given | random.choice([{}, {}, {"trainer.total_training_steps": random.randint(1, 12)}])


def of_verl_v1(_kind: str, given: Case, prompts: int) -> Case | None:
    """Run the loop of verl's trainer, with its counts of steps, epochs and minibatches; every stage does nothing."""
    from torch.utils.data import DataLoader

    if prompts < given["data.train_batch_size"] or (
        given["actor_rollout_ref.rollout.n"] == 1 and given["algorithm.adv_estimator"] == "grpo"
    ):
        return None
    trained, sampled = list[int](), list[int]()
    functions = cut(
        "verl.trainer.ppo.v1.trainer_base", ["_init_dataloader", "fit", "step", "_step_once", "_update_actor"],
        create_rl_dataset=lambda *_, **__: range(prompts), StatefulDataLoader=DataLoader,
        create_rl_sampler=lambda *_: None, is_distillation_enabled=bool, DictConfig=dict,
    )  # fmt: skip
    minibatches = cut("verl.utils.tensordict_utils", ["make_iterator"], torch=__import__("torch"))["make_iterator"]
    config = tree({**defaults_of_verl(), "data.dataloader_num_workers": 0, **given})

    def updated(batch: Any) -> Any:
        extra, rows = batch.extra_info, sampled[-1]
        whole = SimpleNamespace(batch_size=[rows], shape=[rows])
        chosen = {"mini_batch_size": extra["mini_batch_size"], "epochs": extra["epochs"]}
        trained[-1] = sum(1 for _ in minibatches(whole, **chosen, dataloader_kwargs=extra["dataloader_kwargs"]))
        return MagicMock()

    made = MagicMock(config=config, trainer_mode="sync", global_steps=0, parameter_sync_step=1, use_critic=False)
    for stage in ("_balance_batch", "_compute_reward_colocate", "_compute_old_log_prob", "_compute_ref_log_prob"):
        setattr(made, stage, lambda batch, **_: batch)
    made._compute_advantage = lambda batch, **_: batch
    made._step_once = lambda *arguments: functions["_step_once"](made, *arguments)
    made._update_actor = lambda batch, **options: functions["_update_actor"](made, batch, **options)
    made.actor_rollout_wg.update_actor = updated

    def step(metrics: object, times: object) -> object:
        trained.append(0)
        sampled.append(0)
        return functions["step"](made, metrics, times)

    def sample(**options: int) -> Any:
        sampled[-1] = options["batch_size"] * config.actor_rollout_ref.rollout.n
        return MagicMock(extra_info={}, tags=[]), {}

    made.step, made.replay_buffer.sample = step, sample
    functions["_init_dataloader"](made)
    functions["fit"](made, MagicMock())
    (responses,) = set(sampled)
    return {"rounds": len(sampled), "responses": responses, "optimizer_steps": trained}


def of_openrlhf(random: Random) -> Case:
    samples, mini, batch = random.choice([1, 2, 4]), random.choice([1, 2, 3, 4]), random.randint(1, 4)
    estimator = random.choice(["gae", "reinforce", "rloo", "group_norm"] if samples > 1 else ["gae", "reinforce"])
    given: Case = {"rollout.batch_size": mini * batch, "rollout.n_samples_per_prompt": samples}
    given |= {"train.batch_size": mini * samples, "train.max_epochs": random.choice([1, 1, 2])}
    given |= {"train.num_episodes": random.randint(1, 3), "algo.advantage.estimator": estimator}
    given |= {"data.max_samples": random.randint(10, 30)} if random.random() < 0.3 else {}
    return given | ({"critic.freezing_steps": random.randint(0, 3)} if estimator == "gae" else {})


def of_openrlhf_sync(_kind: str, given: Case, prompts: int) -> Case | None:
    """Run OpenRLHF's loop over episodes with its sampling from the buffer; engines and models do nothing.

    DeepSpeed steps the optimizer after ``train.batch_size`` responses, in each of ``train.max_epochs`` passes.
    """
    loop = cut("openrlhf.trainer.ppo_trainer", ["fit", "ppo_train"], ray=MagicMock(get=lambda found: found))
    sampling = cut("openrlhf.trainer.ppo_utils.samples_generator", ["generate_samples", "_collect_prompt_batch"])
    never = {"eval.steps": math.inf, "ckpt.save_steps": math.inf, "vllm.enable_sleep": False, "ds.enable_sleep": False}
    more = {"critic.freezing_steps": -1, "algo.dynamic_filtering_enable": False, "data.max_samples": 10**8}
    args = tree({**never, **more, "rollout.vllm_generate_batch_size": None, **given})
    data = [(None, [f"p{i}"], [None], [None]) for i in range(min(prompts, args.data.max_samples))]
    rounds, steps = list[int](), list[int]()

    def generated(dataloader_iter: Iterator[Any], num_prompts: int, **_: object) -> tuple[list[str], int, bool]:
        taken, *_rest, exhausted = sampling["_collect_prompt_batch"](dataloader_iter, num_prompts)
        return [each for each in taken for _ in range(args.rollout.n_samples_per_prompt)], len(taken), exhausted

    def trained(samples: list[str], step: int) -> tuple[dict[str, float], int]:
        rounds.append(len(samples))
        learns = MagicMock()
        loop["ppo_train"](MagicMock(args=args, actor_model_group=learns, critic_model_group=None), step)
        ran = learns.async_run_method.called
        steps.append(len(samples) // args.train.batch_size * args.train.max_epochs if ran else 0)
        return {}, step + 1

    source = MagicMock(
        args=args, prompts_dataloader=data, _generate_vllm=generated, _dataloader_iter=None, _sample_buffer=[]
    )
    loader = MagicMock(__len__=lambda _: len(data), state_dict=dict)
    made = MagicMock(args=args, prompts_dataloader=loader, generate_kwargs={}, train_step=trained, eval_dataloader=None)
    made.samples_generator.generate_samples = lambda: sampling["generate_samples"](source)
    made.init_checkpoint_states = lambda: {"episode": 0, "global_step": 0, "total_consumed_prompts": 0}
    loop["fit"](made)
    return {"rounds": len(rounds), "responses": rounds, "optimizer_steps": steps}


KINDS: Final[Mapping[str, tuple[Callable[[Random], Case], Callable[[str, Case, int], Case | None]]]] = {
    "grpo": (of_groups, of_trl),
    "rloo": (of_groups, of_trl),
    "sdpo": (of_groups, of_trl),
    "ppo": (of_ppo, of_trl_ppo),
    "verl": (of_verl, of_verl_v1),
    "openrlhf": (of_openrlhf, of_openrlhf_sync),
}


if __name__ == "__main__":
    main(sys.argv[1:])
