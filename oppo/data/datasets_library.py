"""Rows of the ``datasets`` library: a directory that ``save_to_disk`` wrote, or a dataset of a hub.

It needs the extra ``datasets``: ``pip install 'oppo[datasets]'``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from oppo.data.rows import READERS, Located, as_written
from oppo.errors import DataError, one_line
from oppo.libraries import require
from oppo.log import logger

HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""A dataset's name at a hub: owner and name."""

WRITTEN: Final = ("dataset_info.json", "dataset_dict.json")
"""Files of which ``save_to_disk`` writes one: of a dataset, or of several splits."""


def is_hub_name(text: str) -> bool:
    return HUB_NAME.fullmatch(text) is not None and Path(text).suffix not in READERS


def rows_of_directory(path: Path, split: str) -> Iterator[Located]:
    if not any((path / name).is_file() for name in WRITTEN):
        raise DataError(
            f"{path} is a directory without {' or '.join(WRITTEN)}: expected one that Dataset.save_to_disk wrote, or "
            f"a file that ends in {', '.join(READERS)}"
        )
    library = _library(str(path))
    try:
        with _quiet(library):
            dataset = library.load_from_disk(str(path))
    except Exception as error:  # any kind: what a library of formats raises
        raise DataError(f"{path} cannot be read as a dataset: {one_line(error)}") from error
    if isinstance(dataset, library.DatasetDict):
        if split not in dataset:
            raise DataError(f"{path} has no split {split!r}; the splits there are {', '.join(dataset)}")
        dataset = dataset[split]
    return _rows(dataset, str(path))


def rows_of_hub(name: str, split: str, subset: str = "") -> Iterator[Located]:
    # The hub is asked once, with a short timeout; what this machine has already is used without a hub.
    library = _library(name)
    from huggingface_hub import HfApi, constants, is_offline_mode  # noqa: PLC0415 - with its HTTP clients, .2 s

    cached = Path(library.config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir()
    try:
        if not is_offline_mode():
            logger.info(f"{name} is no file or directory here: asking {constants.ENDPOINT} for the dataset")
        HfApi().dataset_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # any kind: proxies, certificates, servers and their answers
        if not cached:
            raise DataError(
                f"{name!r} is no file or directory here, and as a dataset of a hub it could not be had "
                f"({one_line(error)})"
            ) from error
    try:
        with _quiet(library):
            dataset = library.load_dataset(name, subset or None, split=split)
    except Exception as error:  # any kind: what a library of formats and networks raises
        raise DataError(f"the dataset {name!r}, split {split!r}, cannot be loaded ({one_line(error)})") from error
    return _rows(dataset, name)


def _library(source: str) -> Any:
    require("datasets", f"{source}: a dataset", error=DataError)
    import datasets  # noqa: PLC0415 - an extra, which takes a second to import

    return datasets


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    shown = library.is_progress_bar_enabled()
    library.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bars()


def _rows(dataset: Any, source: str) -> Iterator[Located]:
    for number, row in enumerate(dataset, 1):
        yield f"{source}, row {number}", as_written(row)
