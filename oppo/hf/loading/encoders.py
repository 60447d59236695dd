"""Models that read whole texts, by directory or hub name: classifiers, and sentence encoders with their pooling."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Final, Unpack

from oppo.errors import ConfigError, ModelRefused
from oppo.hf.as_text.whole import Encoder, Pooling, reach, reads_beside
from oppo.hf.loading.directory import CONFIG, read_object
from oppo.hf.loading.hub import located
from oppo.hf.loading.kinds import CLASSIFIER, EMBEDDER
from oppo.hf.loading.models import LoadOptions, load, load_tokenizer
from oppo.hf.tokenizer import HfTokenizer
from oppo.observe import silent

MODULES: Final = "modules.json"
"""The parts of a sentence encoder, in the order of their application, as sentence-transformers writes them."""

POOLINGS: Final[dict[str, Pooling]] = {
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",  # another length, and the same direction
}
"""How a pooling module says which states stand for a text: by one word, or by a key for each."""


def load_encoder(path: str | Path, **options: Unpack[LoadOptions]) -> Encoder:
    """Return the model at a directory or hub name, in evaluation mode, with its own tokenizer.

    A sequence classification model keeps its labels. Any other is a sentence encoder: ``modules.json`` says how its
    states are pooled, as sentence-transformers writes it; without that it is their mean. Arguments and errors are those
    of :func:`oppo.hf.load_causal`.

    Raises:
        ConfigError: also if the directory holds no tokenizer.
        ModelRefused: a sentence encoder has other parts than a transformer, a pooling and a normalisation.
    """
    tell, trusted = options.get("tell", silent), options.get("trust_remote_code", False)
    directory = located(path, weights=False, trust_remote_code=trusted, tell=tell)
    transformer, pooling = _parts(directory)
    home = path if transformer == directory else transformer
    architectures = read_object(transformer / CONFIG).get("architectures") if (transformer / CONFIG).is_file() else ()
    classifies = pooling is None and str(architectures).find("ForSequenceClassification") >= 0
    if pooling is None and not classifies:
        tell(f"{path} has no {MODULES}, which would say how a text becomes one vector: it is the mean of its states")
        pooling = "mean"
    model = load(CLASSIFIER if classifies else EMBEDDER, home, **options)
    tokenizer = HfTokenizer(load_tokenizer(home, trust_remote_code=trusted, tell=tell))
    limit = min(reach(model, tokenizer), _sentence_limit(transformer))
    encoder = Encoder(model, tokenizer, limit, pooling)
    if not reads_beside(encoder):
        tell(f"{path} reads texts one by one: padding would change its outputs")
        encoder = replace(encoder, beside=False)
    return encoder


def transformer_of(directory: Path) -> Path:
    """Return the directory of the transformer of a text encoder.

    Raises:
        ConfigError: the list of modules is damaged.
        ModelRefused: a sentence encoder has other parts than a transformer, a pooling and a normalisation.
    """
    return _parts(directory)[0]


def _parts(directory: Path) -> tuple[Path, Pooling | None]:
    """Return the directory of the transformer, and the pooling of a sentence encoder."""
    file = directory / MODULES
    if not file.is_file():
        return directory, None
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))
        modules = [(PurePath(str(part["path"])), str(part["type"]).rpartition(".")[2]) for part in parts]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is no list of modules with path and type: {error}") from error
    names = [name for _, name in modules]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelRefused(
            f"{directory} is a sentence encoder of the modules {', '.join(names)}: expected Transformer, Pooling and, "
            "maybe, Normalize; serve another as a reward function"
        )
    if any(path.is_absolute() or ".." in path.parts for path, _ in modules):
        raise ConfigError(f"{file} names a module outside of its directory")
    return directory / modules[0][0], _pooling(directory / modules[1][0])


def _pooling(module: Path) -> Pooling:
    """Return the pooling that a module's config chooses."""
    chosen = read_object(module / CONFIG)
    flags = [key for key, value in chosen.items() if value is True and key.startswith("pooling_mode")]
    modes = [str(chosen["pooling_mode"])] if "pooling_mode" in chosen else flags
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelRefused(f"{module} pools by {', '.join(modes) or 'nothing'}: expected one of {', '.join(POOLINGS)}")
    return POOLINGS[modes[0]]


def _sentence_limit(directory: Path) -> int:
    """Return the tokens that a sentence encoder was made for."""
    file = directory / "sentence_bert_config.json"
    limit = read_object(file).get("max_seq_length") if file.is_file() else None
    return limit if isinstance(limit, int) else 1 << 30
