"""A draft of settings: each value with the fields of another trainer that it is from, and what is left to fill in."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final, get_args

from pydantic import TypeAdapter, ValidationError

from oppo.algorithms import ALGORITHMS
from oppo.config.convert_files import WHOSE, Checkpoint, Computed, Function, Kind, Rows, rows_of
from oppo.config.sections import Tracker
from oppo.config.settings import keys_of
from oppo.declared import STRICT, expectation
from oppo.errors import ConfigError, did_you_mean

REWARD: Final = "a reward model's directory or hub name, or `file.py:name` of a function"

ADAPTED: Final = ("algorithm.kl_target", "algorithm.kl_horizon")
NEEDS: Final[Sequence[tuple[str | tuple[str, ...], str, Callable[[object], bool], str]]] = (
    ("eval.", "eval.prompts", bool, "nothing is evaluated without eval.prompts"),
    ("vllm.", "models.engine", lambda value: value in {"auto", "vllm"}, "vLLM does not decode (see models.engine)"),
    ("models.lora", "models.lora_rank", bool, "adapters are trained where models.lora_rank is above 0"),
    (
        "algorithm.dual_clip",
        "algorithm.surrogate",
        lambda at: at == "dual_clip",
        'with algorithm.surrogate = "dual_clip"',
    ),
    ("teacher.", "teacher.template", bool, "no teacher has a share of the loss (see algorithm.distill)"),
    ("teacher.rate", "teacher.weights", lambda at: at == "average", 'with teacher.weights = "average"'),
    ("teacher.threshold", "teacher.template", lambda at: "{sibling}" in str(at), "no {sibling} in teacher.template"),
    ("algorithm.kl_horizon", "algorithm.kl_target", bool, "with algorithm.kl_target"),
    (ADAPTED, "algorithm.kl", bool, "there is no KL penalty to adapt"),
    (ADAPTED, "algorithm.kl_in", lambda at: at != "loss", "a KL penalty in the loss is not adapted"),
)
"""Settings by how they begin, the other setting on which their effect depends, and the reason where there is none."""


ESTIMATORS: Final = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "grpo",
}
KLS: Final = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@dataclass(slots=True)
class Draft:
    """Settings in the making, each with its origin: the fields that were given, or a note."""

    kind: Kind
    given: dict[str, object]
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    blank: dict[str, str] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)

    @property
    def whose(self) -> str:
        return WHOSE.get(self.kind, "TRL")

    @property
    def algorithm(self) -> str:
        return str(self.value("step.algorithm"))

    def value(self, key: str) -> Any:
        return self.values.get(key, (None,))[0]

    def take(self, name: str, default: Any = None) -> Any:
        value = self.given.get(name)
        if isinstance(value, Computed):
            self.lose("computed when the program runs: give the setting by --set", f"{name} = {value}")
            return default
        if isinstance(default, str | bool) and isinstance(value, list | dict):
            self.lose(f"expected a value such as {default!r}", f"{name} = {value}")
            return default
        return default if value is None else value

    def whole(self, name: str, default: int, least: float = -math.inf) -> int:
        if (value := self.number(name, default)) < least:
            raise ConfigError(f"{name}: expected at least {least}, got {value}")
        return int(value)

    def number(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{name}: expected a number, got {value!r}")
        return value

    def put(self, key: str, value: object, *names: str, note: str = "") -> None:
        told = [name for name in names if self.given.get(name) is not None]
        self.values[key] = (value, note or ", ".join(told) or f"{self.whose}'s default")
        self.origins[key] = told

    def open(self, key: str, value: object, what: str, *names: str) -> None:
        # a value to be replaced, where the file names none
        self.put(key, value, *names, note="fill in")
        self.blank[key] = what

    def lose(self, reason: str, *names: str) -> None:
        if names:
            self.lost.setdefault(reason, []).extend(names)

    def unlike(self, name: str, value: object) -> None:
        self.lose(rows_of(self.kind)[name][1], f"{name} = {value}")

    def same(self, rows: Rows) -> None:
        for name, (key, _, *more) in rows.items():
            if not more:
                continue
            how, value = more[0], self.take(name, more[1] if len(more) > 1 else None)
            if value in (None, "all-linear"):
                continue
            if isinstance(how, dict):
                if (spelt := str(value).lower() if isinstance(value, bool) else str(value)) not in how:
                    self.lose(f"{key}: expected one of {', '.join(how)}", f"{name} = {value}")
                    continue
                value = how[spelt]
            elif how == "at least 0":
                value = max(self.whole(name, more[1] if len(more) > 1 else 0), 0)
            elif how == "0 is inf":
                value = math.inf if isinstance(value, int | float) and value <= 0 else value
            self.put(
                key, {how: value} if how == "target_modules" else plain_name(value) if how == "name" else value, name
            )

    def settle(self) -> None:
        # leaves out what the algorithm or a setting does not take, and names every field that went nowhere
        algorithm = self.algorithm
        known, has_critic = keys_of(ALGORITHMS[algorithm]), ALGORITHMS[algorithm].has_critic
        idle = {
            key: reason
            for begins, needed, wanted, reason in NEEDS
            for key in self.values
            if key.startswith(begins) and key != needed and not wanted(self.value(needed))
        }
        for key, (value, why) in list(self.values.items()):
            section, _, name = key.partition(".")
            of_the_critic = not has_critic and "critic" in name
            if section in {"rewards", "vllm"} and key not in idle:
                continue
            if reason := idle.get(key):
                del self.values[key]
                self.lose(reason, *self.origins.get(key, []))
            elif why.endswith("'s default") and name in known[section] and known[section][name].default == value:
                del self.values[key]
            elif name not in known[section] or of_the_critic:
                del self.values[key]
                if value not in (0, False, "none"):
                    self.lose(f"step.algorithm = {algorithm!r} does not read {key}", *self.origins.get(key, []))
            elif refusal := _refusal(known[section][name].kind, value):
                del self.values[key]
                self.lose(f"{key}: {refusal}", *(self.origins.get(key) or [why]))
        told = {name for key in self.values for name in self.origins.get(key, [])}
        told |= {name.partition(" = ")[0] for names in self.lost.values() for name in names}
        for name, value in self.given.items():
            if name not in told and not name.startswith("<") and value not in (None, False, "", "no", [], {}):
                self._unread(name, rows_of(self.kind))

    def _unread(self, name: str, rows: Rows) -> None:
        place = name
        while place and place not in rows:
            place = place.rpartition(".")[0]
        if not place:
            guess = "" if self.kind == "verl" else did_you_mean(name, rows)
            return self.lose(f"no field that is known here{guess}", name)
        key, remark = rows[place][:2]
        return self.lose(" ".join(filter(None, (remark, key and f"(see {key})"))), name)

    def trackers(self, name: str) -> None:
        given = self.take(name) or []
        listed, known = [*map(str, given if isinstance(given, list) else [given])], get_args(Tracker)
        if listed:
            self.put("run.track", [each for each in known if each in listed], name)
        if others := [f"{name} = {each}" for each in listed if each not in {*known, "console", "none"}]:
            self.lose(f"run.track knows {', '.join(known)}", *others)

    def warm_up(self, steps: float, share: float, name: str) -> None:
        if value := math.ceil(steps) if steps > 0 else share:
            self.put("trainer.warmup_steps", value, name, note=name)
            if self.values.get("trainer.schedule", ("constant",))[0] == "constant":
                self.put("trainer.schedule", "constant_with_warmup", note=name)

    def epochs(self, epochs: float, name: str) -> None:
        self.put("data.epochs", max(math.ceil(epochs), 1), name)
        if epochs % 1:
            self.lose("data.epochs counts whole passes: rounded up, so give run.steps", f"{name} = {epochs}")

    def rewards(
        self, models: Sequence[object], *names: str, functions: Sequence[object] = (), weights: Sequence[object] = ()
    ) -> None:
        rewards = [*models, *functions]
        for number, reward in enumerate(rewards):
            source, key = str(reward), f"rewards.{number}"
            named = number >= len(models) and "/" not in source and not source.startswith((".", "~"))
            code = (named and not isinstance(reward, Checkpoint)) or isinstance(reward, Function | Computed)
            last = source.rpartition(".")[2] if code else PurePosixPath(source).name
            if code:
                told = f"move {source} into a file: it gets completions as text, and the columns that it names"
                self.open(f"{key}.source", moved(source, "rewards.py"), told, *names)
            else:
                self.put(f"{key}.source", source, *names, note="the reward model")
            if len(rewards) > 1:
                self.put(f"{key}.name", plain_name(last), note="its name in metrics")
            if number < len(weights):
                self.put(f"{key}.weight", weights[number], "reward_weights")
        if not rewards and "environment.factory" not in self.values:  # whose get_reward() is the reward
            self.open("rewards.0.source", "rewards.py:score", REWARD)

    def bounded(self, kind: str, low: object, high: object, names: tuple[str, str, str]) -> None:
        (of_kind, of_low, of_high), masks = names, kind.startswith("mask")
        self.put("algorithm.is_correction", kind, of_kind)
        if high is not None:
            self.put("algorithm.is_high" if masks else "algorithm.is_cap", high, of_high)
        if masks:
            self.put("algorithm.is_low", low or 0.0, of_low)
        elif low:
            self.lose("weights are bounded from above alone (see algorithm.is_cap)", f"{of_low} = {low}")

    def source(self, key: str, source: Mapping[str, object], *names: str) -> None:
        if "path" not in source:
            self.open(
                key, "prompts.jsonl", "a .jsonl, .csv or .parquet file with a column `prompt`, or a hub's dataset"
            )
            return
        table = {name: value for name, value in source.items() if value and (name, value) != ("split", "train")}
        self.put(key, table["path"] if len(table) == 1 else [table], *names, note="the dataset")

    def estimator(self, name: str, known: Mapping[str, str]) -> str:
        chosen = self.take(name, "gae")
        if chosen not in known:
            raise ConfigError(
                f"{name} = {chosen!r}: expected one of {', '.join(known)}; another one is an algorithm of your own "
                "(step.algorithm)"
            )
        if chosen.endswith("_baseline"):  # REINFORCE++: the mean of the group, the deviation of the batch
            self.put("algorithm.scale_scores", "batch", name)
        return known[chosen]

    def kl_place(self, name: str, of_kind: str, default: str, *, in_reward: bool) -> None:
        kind = self.take(of_kind, default)
        place = "reward" if in_reward else "loss"
        if in_reward and self.algorithm in {"grpo", "dapo", "gspo"}:
            self.lose("where scores are standardised the KL is in the loss", name)
            place = "loss"
        estimator = KLS.get(str(kind).rstrip("+"), "k3")
        if place == "loss" and estimator == "k1":
            estimator = "k2"  # whose gradient is the KL's; the gradient of k1 is zero in expectation
        self.put("algorithm.kl_in", place, name)
        self.put("algorithm.kl_estimator", estimator, of_kind, note=f"{self.whose}'s {kind}")

    def files(self, key: str, name: str) -> None:
        given = self.take(name)
        files = [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)]
        if files:
            self.put(key, files[0] if len(files) == 1 else files, name)
        else:
            self.open(key, "prompts.jsonl", "a .jsonl, .csv or .parquet file, or a hub's dataset")

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, (value, _) in self.values.items():
            *place, last = key.split(".")
            table: Any = found
            for name in place:
                table = table.setdefault(name, {})
            table[last] = value
        return found | ({"rewards": list(found["rewards"].values())} if "rewards" in found else {})


def plain_name(text: object) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).lstrip("._-")[:128] or "run"


def _refusal(kind: Any, value: object) -> str:
    try:
        TypeAdapter(kind, config=STRICT).validate_python(value)
    except ValidationError as error:
        return f"expected {expectation(error.errors(include_url=False)[-1])}, got {value!r}"
    return ""


def moved(source: object, file: str) -> str:
    return f"{file}:" + (re.sub(r"\W+", "_", str(source).rpartition(".")[2]).strip("_") or "score")
