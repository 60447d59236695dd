"""Writes the checkpoints of a run and its trained models, each complete or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio

from oppo.app.checkpoint import Checkpoints, State, write_state
from oppo.durable import whole, writing
from oppo.errors import ModelError
from oppo.hf.model_files import quiet
from oppo.hf.tokenizer import HfTokenizer
from oppo.models import ResumableTrainer
from oppo.placement import Thread


class Saving:
    """Writes the trainer's models with the run's state and tokenizers beside them.

    A write that has begun is completed even if its caller is cancelled, by Ctrl-C too: it runs in a thread, which waits
    for the trainer in an event loop of its own.

    Args:
        models: the directories that a trainer writes, a model in each; a tokenizer comes beside those that it does.
        thread: where files are written.

    Attributes:
        is_saving: whether :meth:`save` is at work.
    """

    def __init__(
        self, trainer: ResumableTrainer, tokenizer: HfTokenizer, models: Sequence[str], thread: Thread
    ) -> None:
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._models = models
        self._thread = thread
        self.is_saving = False

    def of(self, trainer: ResumableTrainer) -> Saving:
        """Return what writes another trainer's models in the same way."""
        return Saving(trainer, self._tokenizer, self._models, self._thread)

    async def checkpoint(self, checkpoints: Checkpoints, step: int, score: tuple[float, str], state: State) -> None:
        """Write a checkpoint: ``state``, the trainer's state, and each trained model with its tokenizer.

        ``score`` is one by which the best is chosen, and what it is a score of.

        Raises:
            CheckpointError: it could not be written; nothing half-written stays.
        """

        def write() -> None:
            with checkpoints.writing(step, *score) as path, quiet():
                write_state(path, state)
                anyio.run(self._trainer.write, path)
                self._write_tokenizers(path)

        await self._thread.call("checkpoint", write)

    async def save(self, directory: Path) -> None:
        """Write each trained model with its tokenizer; the directory appears complete or not at all.

        Raises:
            ModelError: it could not be written; the directory is as it was before.
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
        for path in (directory / name for name in self._models if (directory / name).is_dir()):
            with writing(path):
                self._tokenizer.inner.save_pretrained(path)
