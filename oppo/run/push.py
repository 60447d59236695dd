"""The trained policy on the Hugging Face hub, with a model card of its run: what ``oppo push`` does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

from oppo.atomic_files import put
from oppo.config.load import load_settings
from oppo.config.sections import sources
from oppo.config.settings import Settings
from oppo.data.rows import is_hub_name
from oppo.errors import ConfigError, one_line
from oppo.log import logger
from oppo.redact import redacted
from oppo.report.records import SUMMARY
from oppo.run.train import FINAL

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelCard

CARD: Final = "model-card.md"  # the model card in the run directory; at the hub it is the README.md
SHOWN: Final[Mapping[tuple[str, str], str]] = {
    ("trained", "total"): "Rollouts trained",
    ("score", "first"): "Mean score of the first steps (ten, at most half of the run)",
    ("score", "last"): "Mean score of the last steps",
    ("eval/score", "first"): "Held-out score before",
    ("eval/score", "last"): "Held-out score after",
    ("eval/score", "best"): "Best held-out score",
    ("objective/kl", "last"): "KL to the reference in the last ten steps, nats a response",
}
"""The metrics of the summary that the model card shows, with their statistics."""

LOG: Final = "log.jsonl"

TOLD: Final = ("step", "sampling", "algorithm", "trainer")
"""The sections whose changed settings are in the card: they name no files and no machines."""

CITATION: Final = """\
@inproceedings{yan2026oppo,
  title = {OPPO: Accelerating PPO-based RLHF via Pipeline Overlap},
  author = {Yan, Kaizhuo and Yu, Yingjie and Yu, Yifan and Zheng, Haizhong and Lai, Fan},
  booktitle = {International Conference on Learning Representations},
  year = {2026},
  url = {https://arxiv.org/abs/2509.25762}
}"""


def push(run: Path, repo: str, *, private: bool = False, dry_run: bool = False, api: HfApi | None = None) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi  # noqa: PLC0415 - with its HTTP clients, .2 s
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415 - likewise
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # noqa: PLC0415 - likewise

    settings, actor, written = load_settings(run / "config.toml"), run / FINAL / "actor", run / CARD
    if not actor.is_dir():
        raise ConfigError(
            f"{run} has no trained policy in {actor}: a run saves one when it ends, or `oppo resume {run}`"
        )
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"expected a repository owner/name, got {repo!r}: {one_line(error)}") from error
    if "/" not in repo:
        raise ConfigError(f"expected a repository owner/name, got {repo!r}")
    put(written, [str(card(run, settings, repo))])
    if dry_run:
        return str(written)
    hub = api or HfApi(library_name="oppo")
    files = sorted(file for file in actor.rglob("*") if file.is_file() and file.name != "README.md")
    try:
        hub.create_repo(repo, private=private or None, exist_ok=True)
        operations = [CommitOperationAdd(file.relative_to(actor).as_posix(), file) for file in files]
        operations.append(CommitOperationAdd("README.md", written))
        hub.create_commit(repo, operations, commit_message=f"{settings.run.name}, trained with oppo")
    except Exception as error:
        of_client = type(error).__module__.startswith("httpx")  # which of its versions, the hub's library decides
        if not (of_client or isinstance(error, HfHubHTTPError | OSError | ValueError)):
            raise
        raise ConfigError(
            f"the hub at {hub.endpoint} did not take {repo} ({redacted(one_line(error))}): log in with `hf auth login` "
            f"or HF_TOKEN, and look at the network; the policy is in {actor} and its card in {written}, so that the "
            "command can be run again"
        ) from error
    return f"{hub.endpoint}/{repo}"


def card(run: Path, settings: Settings, repo: str) -> ModelCard:
    from huggingface_hub import ModelCard, ModelCardData  # noqa: PLC0415 - with its HTTP clients, .2 s

    facts, actor = _read(run / SUMMARY), run / FINAL / "actor"
    if not facts.get("complete"):
        logger.warning(f"{run} has not reached its end: the card says so")
    adapter = (actor / "adapter_config.json").exists()
    base, prompts = settings.models.policy, sources(settings.data.prompts)
    data = [source.path for source in prompts if source.file is None and is_hub_name(source.path)]
    about = ModelCardData(
        base_model=base if is_hub_name(base) and not Path(base).exists() else None,
        datasets=data or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["oppo", "rlhf", "reinforcement-learning", settings.step.algorithm.rpartition(":")[2]],
    )
    return ModelCard(f"---\n{about.to_yaml()}\n---\n\n" + "\n".join(_lines(run, settings, repo, facts)))


def _read(file: Path) -> dict[str, Any]:
    # the object in a JSON file, or the first of a file with one a line
    try:
        text = file.read_text(encoding="utf-8")
        held, _ = json.JSONDecoder().raw_decode(text)
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def _lines(run: Path, settings: Settings, repo: str, facts: Mapping[str, Any]) -> Iterator[str]:
    algorithm = settings.step.algorithm.rpartition(":")[2]
    learnt_from = {
        "Prompts": [source.path for source in sources(settings.data.prompts)],
        "Agent": [settings.agents.program],
        "Rewards": [reward.source for reward in settings.rewards],
        "Teacher": [*settings.teachers.values()],
    }
    yield f"# {repo.rpartition('/')[2]}\n"
    yield (
        f"{_named(settings.models.policy)}, trained with [oppo](https://github.com/oppo-rlhf/oppo): `{algorithm}`, "
        "scored while responses are written. "
        + " ".join(f"{what}: {', '.join(map(_named, names))}." for what, names in learnt_from.items() if any(names))
        + "\n"
    )
    if not facts.get("complete"):
        yield "The run had not reached its end when this was written.\n"
    yield "## Results\n\n| | |\n|---|---|"
    figures = [("Updates", facts.get("steps"))]
    for (name, statistic), words in SHOWN.items():
        held = facts.get(name)
        figures.append((words, held.get(statistic) if isinstance(held, dict) else None))
    yield from (f"| {words} | {value:.6g} |" for words, value in figures if isinstance(value, int | float))
    yield "\n## Settings that are not at their defaults\n\n```toml"
    tables, known = settings.tables(), settings.keys
    for section in TOLD:
        for key, value in tables[section].items():
            if value is not None and value != known[section][key].default and key not in {"loss", "admission"}:
                yield f"{section}.{key} = {json.dumps(_named(value) if isinstance(value, str) else value)}"
    yield "```\n\n## Versions\n"
    libraries = _read(run / LOG).get("libraries", {})
    yield ", ".join(f"{name} {version}" for name, version in libraries.items()) or "Not recorded."
    yield f"\n## Citation\n\n```bibtex\n{CITATION}\n```\n"


def _named(text: str) -> str:
    # a path tells of a machine
    return text if is_hub_name(text) and not Path(text).is_absolute() else PurePath(text).name
