"""Whole runs whose prompts show images: neither chunks, nor a kill, nor the place of a model changes a bit of them."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.images import make_model
from oppo.errors import ConfigError, DataError, OppoError
from oppo.run.train import resume, train
from tests.kit.seen import PROCESSORS, checkpoint, picture
from tests.kit.workplace import read_lines
from tests.run.matrix import digests

CONFIG = Path(make_model.__file__).with_name("config.toml")
CODE = "def total(completion_ids):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"


def _uri(number: int) -> str:
    buffer = io.BytesIO()
    picture(number).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _rows(count: int) -> list[dict[str, Any]]:
    """Return rows of text, of an image before the text, of two at placeholders, and of one in a part."""
    rows = []
    for n in range(count):
        part, text = {"type": "image", "image": _uri(n)}, {"type": "text", "text": f"{n} <|pad|>?"}
        kinds: tuple[dict[str, Any], ...] = (
            {"prompt": [{"role": "user", "content": f"{n}?"}]},
            {"prompt": [{"role": "user", "content": f"{n}?"}], "images": [_uri(n)]},
            {"prompt": [{"role": "user", "content": f"<image>{n}<image>?"}], "images": [_uri(n), "a.png"]},
            {"prompt": [{"role": "user", "content": [part, text]}]},
        )
        rows.append({**kinds[n % 4], "number": n})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for name in PROCESSORS:
        checkpoint(folder, name)
    (folder / "code.py").write_text(CODE)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows(8)))
    picture(77).save(folder / "a.png")
    return folder


def settings(folder: Path, name: str, run_name: str, **sections: Mapping[str, object]) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "run": {
            "name": run_name,
            "directory": str(folder / "runs"),
            "steps": 2,
            "panel": "off",
            "cores": 1,
            "trace": 0,
            "deterministic": True,
            "scorers": "thread",
            "checkpoint_every": 1,
            "logged_samples": 99,
        },
        "models": {"policy": str(folder / name), "device": "cpu"},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "sampling": {"max_new_tokens": 10, "stop": ["<|im_end|>", *range(20, 200, 10)]},
        "step": {"batch": 3, "chunk": 3, "overcommit": 2},
        "trainer": {"learning_rate": 1e-3, "epochs": 1},
        "rewards": [f"{folder / 'code.py'}:total"],
    }
    for key, values in sections.items():
        chosen[key] = values if isinstance(values, list) else {**chosen.get(key, {}), **values}
    return chosen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_neither_chunks_nor_a_cut_change_a_run(name: str, folder: Path) -> None:
    whole = train(settings(folder, name, f"{name}-whole", step={"chunk": 99}))
    streamed = train(settings(folder, name, f"{name}-streamed"))
    assert digests(streamed.path) == digests(whole.path)
    metrics = read_lines(streamed.path / "metrics.jsonl")
    assert all(abs(line["mismatch/kl_current"]) < 1e-10 for line in metrics)  # the trainer reads what the policy did
    for later in ("final", "step-000002"):
        shutil.rmtree(streamed.path / "checkpoints" / later)
    (streamed.path / "summary.json").unlink()
    for file in (streamed.path / "images").iterdir():
        file.unlink()  # written again
    assert digests(resume(streamed.path).path) == digests(whole.path)


@pytest.mark.timeout(300)
def test_the_example_learns_what_images_show(tmp_path: Path) -> None:
    make_model.make(tmp_path / "data")
    shutil.copy(CONFIG.with_name("make_model.py"), tmp_path)
    shutil.copy(CONFIG, tmp_path)
    few = ["run.steps=15", "run.panel=off", "run.cores=1", "run.checkpoint_every=0", f"run.directory={tmp_path}"]
    run = train(tmp_path / "config.toml", few)
    scores = [line["reward"] for line in read_lines(run.path / "metrics.jsonl")]
    assert max(scores[:2]) < 0.55
    assert min(scores[-3:]) > 0.7


def test_images_are_kept_once_and_never_pixels(folder: Path) -> None:
    run = train(settings(folder, "llava", "kept", step={"overcommit": 3}))
    assert len([*(run.path / "images").iterdir()]) == 6
    assert max(file.stat().st_size for file in (run.path / "checkpoints").rglob("*.json")) < 60_000
    assert max(len(line["prompt"]) for line in read_lines(run.path / "samples.jsonl")) < 200


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"environment": {"source": "code.py:total"}}, "are text: leave these out"),
        ({"data": {"images": True}}, r"data\.images is for rows that come one by one"),
        ({"data": {"over_long": "truncate", "max_prompt_tokens": 20}}, "would lose a part of them"),
        ({"models": {"reference": "LLAMA"}}, "has no tower|cannot be shown images|has no image|text only"),
    ],
)
def test_what_reads_no_images_is_refused_by_name(
    sections: Mapping[str, Mapping[str, object]], words: str, folder: Path
) -> None:
    if "environment" in sections:
        sections = {"environment": {"source": f"{folder / 'code.py'}:total"}}
    if "models" in sections:
        blind = shutil.copytree(folder / "llava", folder / "blind", dirs_exist_ok=True)
        (blind / "preprocessor_config.json").unlink(missing_ok=True)
        (blind / "processor_config.json").unlink(missing_ok=True)
        sections = {"models": {"reference": str(blind)}}
    with pytest.raises(OppoError, match=words):
        train(settings(folder, "llava", "refused", **sections))


def test_a_url_and_an_image_too_narrow_are_refused_by_row(folder: Path) -> None:
    picture(1, width=3000, height=10).save(folder / "narrow.png")
    for image, words in (
        ("https://a.b/c.png", "is a URL"),
        (str(folder / "narrow.png"), "takes no image of 3000 x 10"),
    ):
        rows = [{"prompt": [{"role": "user", "content": "?"}], "image": image}]
        with pytest.raises(DataError, match=f"row 1.*{words}"):
            train(settings(folder, "qwen2_5_vl", "refused"), prompts=rows)


def test_rows_that_come_one_by_one_show_images_if_they_are_to(folder: Path) -> None:
    rows = [{**row, "images": [str(folder / "a.png")]} for row in _rows(9)[1::4]] * 4
    chosen = settings(folder, "llava", "rows", data={"images": True})
    del chosen["data"]["prompts"]
    run = train(chosen, prompts=iter(rows))
    assert len(read_lines(run.path / "metrics.jsonl")) == 2
    del chosen["data"]["images"]
    chosen["run"]["name"] = "unsaid"
    with pytest.raises((DataError, ConfigError), match=r"only|data\.images = true"):
        train(chosen, prompts=iter(rows))
