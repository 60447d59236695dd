"""Whole runs whose prompts show images: neither chunks, nor a kill, nor the place of a model changes a bit of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoConfig

from examples.images import make_model
from oppo import PromptStream
from oppo.cli import DONE, main
from oppo.config.load import load_settings
from oppo.errors import DataError, OppoError
from oppo.hf.model_files import SCALAR
from oppo.run.deployment import Deployment
from oppo.run.loading import reader_of_images
from oppo.run.prompts import Rows
from oppo.run.train import prepare, resume, train
from tests.kit.assets import TEMPLATE
from tests.kit.seen import PROCESSORS, checkpoint, picture, uri
from tests.kit.workplace import read_lines
from tests.run.matrix import digests

CONFIG = Path(make_model.__file__).with_name("config.toml")
CODE = "def total(completion_ids):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"


def _rows(count: int) -> list[dict[str, Any]]:
    """Return rows of text, of an image before the text, of two at placeholders, and of one in a part."""
    rows = []
    for n in range(count):
        part, text = {"type": "image", "image": uri(n)}, {"type": "text", "text": f"{n} <|pad|>?"}
        kinds: tuple[dict[str, Any], ...] = (
            {"prompt": [{"role": "user", "content": f"{n}?"}]},
            {"prompt": [{"role": "user", "content": f"{n}?"}], "images": [uri(n)]},
            {"prompt": [{"role": "user", "content": f"<image>{n}<image>?"}], "images": [uri(n), "a.png"]},
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
    (folder / "typo.jsonl").write_text('{"prompt": "a<|pad|>b", "img": "a.png"}\n')
    asked = {"prompt": [{"role": "user", "content": "<image> red?"}], "img": "a.png"}
    (folder / "misnamed.jsonl").write_text(json.dumps(asked) + "\n")
    (folder / "empty.jsonl").write_text('{"prompt": "<image>", "images": []}\n')
    (folder / "spelt.jsonl").write_text('{"prompt": "<image>", "image": "a.png"}\n{"prompt": "a<|pad|>b"}\n')
    picture(77).save(folder / "a.png")
    return folder


SETTINGS = """
run = { steps = 2, panel = "off", cores = 1, trace = 0, deterministic = true, scorers = "thread", \
checkpoint_every = 1, logged_samples = 99 }
models.device = "cpu"
data.prompts = "prompts.jsonl"
sampling = { max_new_tokens = 10, stop = ["<|im_end|>", 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140] }
step = { batch = 3, chunk = 3, overcommit = 2 }
trainer = { learning_rate = 1e-3, epochs = 1 }
rewards = ["code.py:total"]
"""


def trained(folder: Path, name: str, run: str, *more: str, prompts: Rows | None = None) -> Path:
    """Train a model of a family, and return the run directory."""
    (folder / "config.toml").write_text(SETTINGS)
    given = [f"models.policy={name}", f"run.name={run}", f"run.directory={folder / 'runs'}", *more]
    return train(folder / "config.toml", given, prompts=prompts).path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_neither_chunks_nor_a_cut_change_a_run(name: str, folder: Path) -> None:
    expected = digests(trained(folder, name, f"{name}-whole", "step.chunk=99"))
    run = trained(folder, name, f"{name}-streamed")
    assert digests(run) == expected
    metrics = read_lines(run / "metrics.jsonl")
    assert all(abs(line["mismatch/kl_current"]) < 1e-10 for line in metrics)  # the trainer reads what the policy did
    for later in ("final", "step-000002"):
        shutil.rmtree(run / "checkpoints" / later)
    (run / "summary.json").unlink()
    for file in (run / "images").iterdir():
        file.unlink()  # written again
    assert digests(resume(run).path) == expected


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


def test_a_reward_model_sees_and_images_are_kept_once_and_never_pixels(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder / "llava", num_labels=1)
    shutil.copytree(folder / "llava", folder / "reward")
    SCALAR.made(config).save_pretrained(folder / "reward")
    grouped = ("step.algorithm=grpo", "algorithm.samples=2", 'rewards=["reward"]')
    run = trained(folder, "llava", "kept", *grouped)
    assert len([*(run / "images").iterdir()]) == 6
    assert max(file.stat().st_size for file in (run / "checkpoints").rglob("*.json")) < 60_000
    samples = read_lines(run / "samples.jsonl")
    assert max(len(line["prompt"]) for line in samples) < 200
    assert len({line["score"] for line in samples}) > 6


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('data.prompts="misnamed.jsonl"', "the prompt has <image>, and column 'img' an image: name the column 'image'"),
        ("data.images=true", r"data\.images is for rows that come one by one"),
        ("data.over_long=truncate data.max_prompt_tokens=30", "would lose a part of them"),
        ("models.reference=blind", "cannot be shown images: there is no image processor beside its weights"),
        ('data.prompts="spelt.jsonl"', "has tokens that stand for images, 1, of which its images have 0"),
        (
            'data.prompts="typo.jsonl"',
            "stand for images, 1, of which its images have 0: name their column 'image' or 'images'",
        ),
        ('data.prompts="empty.jsonl"', "line 1: the prompt has 1 place for 0 images in images"),
    ],
)
def test_what_reads_no_images_is_refused_by_name(setting: str, words: str, folder: Path) -> None:
    if not (folder / "blind").exists():
        shutil.copytree(folder / "llava", folder / "blind", ignore=shutil.ignore_patterns("*processor*"))
    with pytest.raises(OppoError, match=words):
        trained(folder, "llava", "refused", *setting.split())


def test_a_prompt_behind_a_summary_shows_none(folder: Path) -> None:
    (folder / "config.toml").write_text(SETTINGS)
    compacting = ['environment.tools=["code.py:total"]', "environment.compact=5", "environment.summary_tokens=2"]
    settings = load_settings(folder / "config.toml", ["models.policy=llava", *compacting])
    said = reader_of_images(Deployment.of(settings), folder / "images")
    assert said == "behind a summary a prompt is text: leave environment.compact out"


def test_a_dry_run_writes_no_image(folder: Path) -> None:
    (folder / "config.toml").write_text(SETTINGS)
    settings = load_settings(folder / "config.toml", ["models.policy=llava", f"run.directory={folder / 'dry'}"])
    with prepare(settings, dry_run=True) as session:
        prompts = cast("PromptStream", session.prompts).prompts
        assert {Path(image.path).is_file() for prompt in prompts for image in prompt.images} == {True}
    assert not (folder / "dry").exists()


LOOKING = """
from io import BytesIO
from pathlib import Path
from PIL import Image

class Looking:
    def reset(self, images=(), image=None, **row):
        paths = [*images, image] if image else images
        self.sizes = [Image.open(BytesIO(Path(path).read_bytes())).size for path in paths]
        return f" It has {self.sizes}."

    def look(self, at: int) -> str:
        \"\"\"Look.

        Args:
            at: which.
        \"\"\"
        return str(self.sizes[at])

    def get_reward(self):
        return float(len(self.sizes))
"""
HELD = {"path": "a.png", "uri": uri(3), "table": {"bytes": None, "path": "a.png"}}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("asked", [{"prompt": [{"role": "user", "content": "How large?"}]}, {}], ids=["asked", "not"])
@pytest.mark.parametrize("held", HELD)
def test_a_class_opens_the_images_of_its_row(
    held: str, asked: dict[str, object], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "looking.py").write_text(LOOKING)
    (folder / "tools.jinja").write_text(TEMPLATE)
    rows = [{**asked, "images": [HELD[held]]}, {**asked, "image": HELD[held]}]
    (folder / "looked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(SETTINGS.replace('rewards = ["code.py:total"]', ""))
    given = ["models.policy=qwen2_5_vl", f"run.name=looking-{held}-{len(asked)}", "data.prompts=looked.jsonl"]
    given += ["environment.factory=looking.py:Looking", "environment.max_turns=2", "data.chat_template=tools.jinja"]
    chosen = [f"--set={each}" for each in [*given, "run.steps=1", f"run.directory={folder / 'runs'}"]]
    assert main(["train", str(folder / "config.toml"), "--dry-run", *chosen]) == DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "It has [(48, 32)]." in shown
    assert "the environment answers" in shown
    assert main(["train", str(folder / "config.toml"), *chosen]) == DONE


def test_rows_that_come_one_by_one_show_images_if_they_are_to(folder: Path) -> None:
    rows = [{"prompt": f"<image>{number}", "image": str(folder / "a.png")} for number in range(9)]
    run = trained(folder, "llava", "rows", "data.images=true", prompts=iter(rows))
    assert len(read_lines(run / "metrics.jsonl")) == 2
    with pytest.raises(DataError, match=r"show images with data\.images = true only"):
        trained(folder, "llava", "unsaid", prompts=iter(rows))
