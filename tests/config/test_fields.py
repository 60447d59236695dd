"""Every field of the trainers that we convert from sets something, or is named with the reason why it does not."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Final

import pytest
import yaml

from oppo.config.convert import Converted, convert
from oppo.config.convert_files import Kind, rows_of
from oppo.config.load import at
from oppo.errors import ConfigError
from tests.kit.workplace import rewritten

FOLDER: Final = Path(__file__).parents[1] / "golden"
OF_TRL: Final = json.loads((FOLDER / "trl_fields.json").read_text(encoding="utf-8"))
OF_RAY: Final = json.loads((FOLDER / "ray_fields.json").read_text(encoding="utf-8"))
VALUES: Final = (True, 7, "./text")
NEEDED: Final = {"data.train_files": "a.jsonl", "data.prompt_dataset": "a.jsonl", "num_processes": 1}


def fields_of(kind: Kind) -> list[str]:
    """Return the names of all fields of a configuration, as its own code has them."""
    if kind == "openrlhf":
        return list(OF_RAY["openrlhf"])
    if kind == "verl":
        return [name for name in OF_RAY["verl"] if not name.endswith("_target_")]
    return [*OF_TRL[f"{kind.upper()}Config"]["fields"], *OF_TRL["TrainingArguments"]["fields"]]


def of(kind: Kind, given: dict[str, object], folder: Path) -> Converted:
    needed = {name: value for name, value in NEEDED.items() if ("." in name) == (kind in {"verl", "openrlhf"})}
    return convert(rewritten(folder / "c.yaml", yaml.safe_dump({**needed, **given})), kind=kind)


@pytest.mark.parametrize(
    ("kind", "set_something"), [("ppo", 33), ("grpo", 35), ("rloo", 34), ("sdpo", 34), ("verl", 45), ("openrlhf", 40)]
)
def test_no_field_of_theirs_falls_silently(kind: Kind, set_something: int, tmp_path: Path) -> None:
    plain, ends, silent = of(kind, {}, tmp_path), Counter[str](), list[str]()
    for field in fields_of(kind):
        found = set[str]()
        for value in VALUES:
            try:
                made = of(kind, {field: value}, tmp_path)
            except ConfigError as error:
                silent += [] if field in str(error) else [f"{field}: {error}"]
                found.add("refused")
                continue
            lost = {name.partition(" = ")[0] for name in chain(*made.lost.values())}
            if field not in lost and made.text == plain.text:
                silent.append(f"{field} = {value}")
            found.add("named" if field in lost else "sets")
        ends["sets" if "sets" in found else "named" if "named" in found else "refused"] += 1
    assert not silent, "these set nothing, and nothing says so"
    assert ends["sets"] >= set_something, ends
    assert ends["refused"] <= 3, ends


@pytest.mark.parametrize("kind", ["ppo", "grpo", "rloo", "sdpo", "openrlhf"])
def test_every_field_has_a_row_of_its_own_or_of_its_section(kind: Kind) -> None:
    rows = rows_of(kind)
    for field in fields_of(kind):
        assert any(field == row or field.startswith(f"{row}.") for row in rows), field


GROUPS: Final[tuple[Kind, ...]] = ("grpo", "rloo", "sdpo")
TRL: Final[tuple[Kind, ...]] = ("ppo", *GROUPS)
VERL, OPENRLHF = (tuple[Kind, ...](["verl"]), tuple[Kind, ...](["openrlhf"]))
ACTOR: Final = "actor_rollout_ref.actor"
OFF: Final[tuple[tuple[tuple[Kind, ...], str, tuple[object, ...], str, object], ...]] = (
    # transformers, and DeepSpeed for OpenRLHF, clip where the bound is above 0
    (TRL, "max_grad_norm", (0, 0.0, -1, False), "trainer.max_grad_norm", math.inf),
    (OPENRLHF, "actor.max_norm", (0, 0.0, -1.0), "trainer.max_grad_norm", math.inf),
    (GROUPS, "top_k", (0, -1, None), "sampling.top_k", 0),
    (VERL, "actor_rollout_ref.rollout.top_k", (0, -1), "sampling.top_k", 0),
    (GROUPS, "top_p", (1, 1.0, None), "sampling.top_p", 1.0),
    (VERL, "actor_rollout_ref.rollout.top_p", (1, 1.0), "sampling.top_p", 1.0),
    (OPENRLHF, "rollout.top_p", (1.0,), "sampling.top_p", 1.0),
    (GROUPS, "min_p", (None, 0.0), "", None),
    (GROUPS, "repetition_penalty", (1, 1.0), "", None),
    (GROUPS, "top_entropy_quantile", (1, 1.0), "", None),
    (GROUPS, "entropy_coef", (0, 0.0), "algorithm.entropy_coefficient", 0.0),
    (GROUPS, "delta", (None,), "", None),
    (("grpo", "rloo"), "epsilon_high", (None,), "algorithm.clip_high", None),
    (("grpo",), "beta", (0, 0.0), "algorithm.kl", 0.0),
    (("rloo",), "beta", (0, 0.0), "algorithm.kl", 0.0),
    (("ppo",), "kl_coef", (0, 0.0), "algorithm.kl", 0.0),
    (("ppo",), "missing_eos_penalty", (None, 0.0), "algorithm.missing_eos_penalty", 0.0),
    (("ppo",), "total_episodes", (None, 0), "run.steps", None),
    (GROUPS, "max_steps", (-1, 0), "run.steps", None),
    (TRL, "warmup_steps", (0, None), "trainer.warmup_steps", None),
    (TRL, "weight_decay", (0, 0.0), "trainer.weight_decay", 0.0),
    (TRL, "save_strategy", ("no",), "run.checkpoint_every", 0),
    (TRL, "eval_strategy", ("no",), "eval.prompts", None),
    (TRL, "report_to", ("none",), "run.track", None),
    (VERL, f"{ACTOR}.entropy_coeff", (0, 0.0), "algorithm.entropy_coefficient", 0.0),
    (VERL, f"{ACTOR}.use_kl_loss", (False,), "algorithm.kl", 0.0),
    (VERL, f"{ACTOR}.policy_loss.loss_mode", ("vanilla",), "algorithm.surrogate", "dual_clip"),
    (VERL, f"{ACTOR}.tis_imp_ratio_cap", (-1, -1.0), "algorithm.is_correction", "none"),
    (VERL, f"{ACTOR}.ulysses_sequence_parallel_size", (1,), "", None),
    (VERL, f"{ACTOR}.optim.lr_warmup_steps", (-1, 0, None), "trainer.warmup_steps", None),
    (VERL, "actor_rollout_ref.model.lora_rank", (0,), "models.lora_rank", 0),
    (VERL, "data.train_max_samples", (-1,), "", None),
    (VERL, "data.val_max_samples", (-1,), "eval.count", None),
    (VERL, "trainer.test_freq", (-1, 0), "eval.prompts", None),
    (VERL, "trainer.save_freq", (-1, 0), "run.checkpoint_every", 0),
    (VERL, "algorithm.rollout_correction.rollout_is", (None,), "algorithm.is_correction", "none"),
    (OPENRLHF, "algo.kl.init_coef", (0, 0.0), "algorithm.kl", 0.0),
    (OPENRLHF, "algo.kl.target", (None, 0, 0.0), "algorithm.kl_target", None),
    (OPENRLHF, "algo.advantage.is_correction_level", ("off",), "algorithm.is_correction", "none"),
    (OPENRLHF, "actor.entropy_coef", (None, 0.0), "algorithm.entropy_coefficient", 0.0),
    (OPENRLHF, "actor.aux_loss_coef", (0, 0.0), "trainer.router_aux_loss", 0.0),
    (OPENRLHF, "critic.freezing_steps", (-1,), "trainer.critic_warmup", 0),
    (OPENRLHF, "ds.lora.rank", (0,), "models.lora_rank", 0),
    (OPENRLHF, "ckpt.save_steps", (-1,), "run.checkpoint_every", 0),
    (OPENRLHF, "eval.steps", (-1,), "eval.prompts", None),
    (OPENRLHF, "data.max_samples", (10**8,), "", None),
)
"""Fields of trainers, the values by which their sources turn something off, and the setting that is off then.

Absent, or None: at its own default, which is off.
"""


@pytest.mark.parametrize(
    ("kind", "given", "key", "off"),
    [(kind, {field: value}, *ours) for kinds, field, values, *ours in OFF for kind in kinds for value in values],
    ids=repr,
)
def test_a_value_that_means_off_is_off_here_and_not_named_as_lost(
    kind: Kind, given: dict[str, object], key: str, off: object, tmp_path: Path
) -> None:
    made = of(kind, given, tmp_path)
    lost = {name.partition(" = ")[0] for name in chain(*made.lost.values())}
    assert not lost & given.keys()
    if key:
        assert at(made.document, key) in {off, None} if off != math.inf else at(made.document, key) == off


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("off", [0, -1.0, math.inf])
def test_no_bound_on_gradients_stays_none_at_any_share_of_a_loss(share: float, off: float, tmp_path: Path) -> None:
    made = of("sdpo", {"distillation_weight": share, "max_grad_norm": off}, tmp_path)
    assert at(made.document, "trainer.max_grad_norm") == math.inf
