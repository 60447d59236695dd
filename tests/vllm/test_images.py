"""Images on vLLM, over the fake: they go along with every request, and its reader leaves tokens as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from oppo.errors import ConfigError, DataError, ModelError, OppoError
from oppo.events import Prompt, Response
from oppo.hf.loading import load_tokenizer
from oppo.hf.processor import ImagePrompts, Processor
from oppo.hf.tokenizer import HfTokenizer
from oppo.images import ImageFiles, picture_of
from oppo.vllm import VllmEngine, async_llm
from oppo.vllm.images import Pictures
from tests.kit.responses import chunk
from tests.kit.seen import checkpoint, picture
from tests.vllm.bench import SAMPLING, Bench
from tests.vllm.fakes import FakeAsyncLLM, FakeReader


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    for number, (width, height) in enumerate(((48, 32), (40, 64), (48, 32))):
        picture(number, width, height).save(folder / f"{number}.png")
    return checkpoint(folder, "qwen2_5_vl")


@dataclass
class Seeing:
    path: Path

    def __post_init__(self) -> None:
        self.processor = Processor(self.path)
        own: object = object.__new__(type(self.processor.inner).__mro__[1])  # which has no pixels to give
        self.fake = FakeReader(own, self.processor.pad)
        self.llm = FakeAsyncLLM(reader=self.fake)
        (pictures := Pictures(self.path)).begin(self.llm)
        self.bench = Bench(self.llm, sampling=replace(SAMPLING, stop=()), pictures=pictures)

    def prompt(self, number: int, *images: str) -> Prompt:
        files = ImageFiles(self.path, self.path.parent)
        reader, tokenizer = ImagePrompts(self.processor, files), HfTokenizer(load_tokenizer(self.path))
        row = {"prompt": [{"role": "user", "content": "<image>".join(["a", *"bcd"[: len(images)]])}], "images": images}
        ids, seen = (
            reader(row, "prompt", "row 1", lambda row, column: (row, tokenizer))[1:] if images else ([10, 11, 12], ())
        )
        return Prompt(number, number, np.array(ids, np.int32), images=seen)


def test_images_go_along_with_every_request_of_a_rollout(path: Path) -> None:
    seeing = Seeing(path)
    bench, pixels = seeing.bench, seeing.processor.pixels
    prompts = [seeing.prompt(0), seeing.prompt(1, "0.png"), seeing.prompt(2, "2.png", "1.png")]
    started = Response.empty(seeing.prompt(3, "1.png")).then(chunk(3, 0, np.array([8, 9], np.int32)))

    async def main() -> None:
        decodes = await bench.policy.open([*prompts, started])
        short, *_ = decodes
        await bench.step(decodes, cut_at=1, limit=3, load=0.02)
        assert short.ended
        for decode in decodes[1:]:
            await bench.policy.discard(decode)  # as in a resumed run, another request goes on
        again = await bench.policy.open(
            [Response.empty(each).then(chunk(each.rollout, 0, np.array([8], np.int32))) for each in prompts[1:]]
        )
        await bench.step(again)

    bench.policy._limit = lambda prompt: 3 if prompt.rollout == 0 else 20
    bench.run(main, threads=True)
    known = {tuple(each.tokens): each for each in (*prompts, started.prompt)}
    made = [*seeing.llm.done, *seeing.llm.aborted]
    assert len(made) == 6
    for request in made:
        (prompt,) = [each for ids, each in known.items() if tuple(request.prompt[: len(ids)]) == ids]
        assert [*request.images] == [image.sha256 for image in prompt.images]
        assert request.prompt.count(seeing.processor.pad) == sum(image.tokens for image in prompt.images)
    assert sum(len(request.prompt) not in map(len, known) for request in made) == 3  # that go on
    shown = pixels(prompts[1].images)["pixel_values"].numpy()
    np.testing.assert_array_equal(np.asarray(seeing.fake.shown[0]), shown)  # those of the trainer


def test_vllm_would_expand_an_expanded_prompt_again(path: Path) -> None:
    seeing = Seeing(path)
    ids, (image,) = (prompt := seeing.prompt(0, "0.png")).tokens.tolist(), prompt.images
    left_alone = FakeReader(seeing.processor.inner, seeing.processor.pad)
    assert len(left_alone.read(ids, [picture_of(image)])) > len(ids)
    assert seeing.fake.read(ids, [picture_of(image)]) == ids


def test_what_it_cannot_be_shown_is_named(path: Path) -> None:
    one, two = (Seeing(path).prompt(7, *images) for images in (("0.png", "1.png"), ("1.png", "0.png")))
    gone = replace(one.images[0], sha256="0" * 64)
    wrong: tuple[tuple[Prompt, type[OppoError], str], ...] = (
        (replace(one, images=two.images), ModelError, r"shown .*1\.png, .*0\.png: .* 8 image tokens .* of 14"),
        (replace(two, images=two.images[1:]), ModelError, r"shown .*0\.png: .* 6 image tokens .* of 14"),
        (replace(one, images=(gone, one.images[1])), DataError, r"0\.png changed since its prompt was read"),
    )
    for prompt, error, words in wrong:
        with pytest.raises(error, match=words):
            Seeing(path).bench.play([prompt], threads=True)
    for on, words in (("engine", "vLLM was started for text"), ("server", "a server is given text only")):
        with pytest.raises(ModelError, match=f"rollout 7 shows images, and {words}"):
            Bench(on=on).play([one])


def test_adapters_alone_are_refused_beside_images(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not been seen to be exact beside images .*lora_sync = 'merged'"):
        VllmEngine.start(path, adapters=2, images=True)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (None, "vLLM reads no images with qwen2_5_vl"),
        (SimpleNamespace(), "reads images for qwen2_5_vl .* by a SimpleNamespace, and the trainer by"),
    ],
)
def test_a_family_that_it_does_not_read_so_is_refused(own: object, words: str, path: Path) -> None:
    reader = None if own is None else FakeReader(own, 6)
    with pytest.raises(ConfigError, match=words):
        Pictures(path).begin(FakeAsyncLLM(reader=reader))


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ('{"model_type": "gemma3"}', "in given .model type 'gemma3'. the tokens of an image attend to all of it"),
        ('{"model_type": "none"}', "the configuration of .*given cannot be read: .*none"),
        (None, "the configuration of .*given cannot be read: .*config.json"),
    ],
)
def test_what_a_configuration_tells_is_refused_before_an_engine_starts(
    written: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given := tmp_path / "given").mkdir()
    if written is not None:
        (given / "config.json").write_text(written)
    monkeypatch.setattr(async_llm, "_async_llm", lambda *given, **named: pytest.fail("it was started"))
    with pytest.raises(ConfigError, match=words):
        VllmEngine.start(given, images=True)
