"""Checkpoints of a run, and what it has learned, on the disk as a whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio

from oppo.app.checkpoint import Checkpoints, State, write_state
from oppo.durable import whole, writing
from oppo.errors import ModelError
from oppo.hf.loading.models import quiet
from oppo.hf.text import Text
from oppo.models import ResumableTrainer
from oppo.placement import Thread


class Saving:
    """Puts together what the trainer writes, where it works, and what the application adds: state and tokenizers.

    What has begun is done to its end, though whoever waits for it is cancelled, by Ctrl-C too: it is done in a thread,
    which waits for the trainer in an event loop of its own, where no cancellation comes.

    Args:
        trainer: writes its part.
        text: the tokenizer that goes with each model.
        models: the directories that the trainer writes, a model in each.
        thread: where it is put together.

    Attributes:
        is_saving: whether what was learned is being saved at this moment.
    """

    def __init__(self, trainer: ResumableTrainer, text: Text, models: Sequence[str], thread: Thread) -> None:
        self._trainer = trainer
        self._text = text
        self._models = models
        self._thread = thread
        self.is_saving = False

    async def checkpoint(self, checkpoints: Checkpoints, step: int, score: float, state: State) -> None:
        """Write a checkpoint: the state given, the trainer's, and what is trained, each model with the tokenizer.

        Raises:
            CheckpointError: it could not be written; nothing half-written stays.
        """

        def write() -> None:
            with checkpoints.writing(step, score) as path, quiet():
                write_state(path, state)
                anyio.run(self._trainer.write, path)
                self._write_tokenizers(path)

        await self._thread.call("checkpoint", write)

    async def save(self, directory: Path) -> None:
        """Write what is trained, each model with the tokenizer; the directory appears complete or not at all.

        Raises:
            ModelError: it could not be written; what was in the directory before is.
        """

        def write() -> None:
            with whole(directory) as path, quiet():
                anyio.run(self._trainer.save, path)
                self._write_tokenizers(path)

        self.is_saving = True
        try:
            await self._thread.call("save", write)
        except OSError as error:
            raise ModelError(
                f"what was learned could not be saved in {directory}, and nothing half-written is left there: {error}"
            ) from error
        finally:
            self.is_saving = False

    def _write_tokenizers(self, directory: Path) -> None:
        for name in self._models:
            with writing(directory / name):
                self._text.tokenizer.save_pretrained(directory / name)
