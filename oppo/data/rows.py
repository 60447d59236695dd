"""Rows of prompts with their locations in words: from JSON lines, CSV, parquet, a dataset, or a program."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeGuard, cast

from oppo.errors import DataError, counted, did_you_mean_path, one_line, shown
from oppo.libraries import require
from oppo.log import logger

Row: TypeAlias = Mapping[str, object]
Located: TypeAlias = tuple[str, Row]


def rows_of_file(path: Path) -> Iterator[Located]:
    check_file(path)
    if path.suffix not in READERS:
        *most, last = READERS
        raise DataError(f"{path}: expected a file of prompts whose name ends in {', '.join(most)} or {last}")
    return READERS[path.suffix](path)


def check_file(path: Path, *, or_directory: bool = False) -> None:
    """Raise ``DataError`` unless there is a file that can be read to its end: a pipe or a device may have none."""
    try:
        if path.is_file() or (or_directory and path.is_dir()):
            return
        instead = ", but a directory, pipe or device" if path.exists() else did_you_mean_path(path)
    except OSError as error:  # the name is too long, or leads in a circle
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    raise DataError(f"there is no prompt file {path}{instead}")


def rows_of_program(rows: Iterable[object]) -> Iterator[Located]:
    for number, row in enumerate(rows, 1):
        yield located(row, number, of_columns=is_dataset(rows))


def located(row: object, number: int, *, of_columns: bool = False) -> Located:
    if not isinstance(row, Mapping):
        raise DataError(f"row {number}: expected a mapping of columns, got {shown(row)}")
    return f"row {number}", as_written(row) if of_columns else row


def is_dataset(rows: object) -> bool:
    return hasattr(rows, "features")


def _json_rows(path: Path) -> Iterator[Located]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _json_row(line, place)


def _json_row(line: str, place: str) -> Row:
    try:
        row: object = json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a name twice, thousands of digits, lists in lists without end
        raise DataError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, got {shown(row)}")
    return row


def _object(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"an object names a column twice: {', '.join(name for name, _ in pairs)}")
    return row


def _csv_rows(path: Path) -> Iterator[Located]:
    reader = csv.reader(_lines(path, newline=""), strict=True)
    try:
        names = next(reader, [])
        _require_distinct(names, f"{path}, line 1: the header")
        for fields in filter(None, reader):
            place = f"{path}, line {reader.line_num}"
            if len(fields) != len(names):
                raise DataError(f"{place}: {counted(len(fields), 'field')}, where the header names {len(names)}")
            yield place, dict(zip(names, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from error


def _lines(path: Path, newline: str | None = None) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _require_distinct(names: Sequence[str], place: str) -> None:
    if len(set(names)) < len(names):
        raise DataError(f"{place} names a column twice: {', '.join(names)}")


def as_written(row: Row) -> Row:
    # A format of columns gives all messages the keys of each: those nulls go. A message's own ``content`` may be null.
    return {
        name: [_message_as_written(part) for part in value] if _is_chat(value) else value for name, value in row.items()
    }


def _is_chat(value: object) -> TypeGuard[list[dict[str, object]]]:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    )


def _message_as_written(message: dict[str, object]) -> object:
    empty = {"content": None} if message.get("content", "") is None else {}
    return {**cast("dict[str, object]", _present(message)), **empty}


def _present(value: object) -> object:
    if isinstance(value, dict):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


def _parquet_rows(path: Path) -> Iterator[Located]:
    from pyarrow import parquet  # noqa: PLC0415 - 0.1 s, and most files are JSON lines

    try:
        file = parquet.ParquetFile(path)
        _require_distinct(file.schema_arrow.names, str(path))
        rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", as_written(row)
    except DataError:
        raise
    except Exception as error:  # errors of pyarrow, of the system and of Python's decoders
        raise DataError(f"{path} is not a readable parquet file{_unreadable(path)}: {error}") from error


def _unreadable(path: Path) -> str:
    # The first column of a file that cannot be read.
    from pyarrow import parquet  # noqa: PLC0415 - as above

    name = ""
    with suppress(Exception):
        for name in parquet.read_schema(path).names:
            for batch in parquet.ParquetFile(path).iter_batches(columns=[name]):
                batch.to_pylist()
        return ""
    return name and f" in its column {name!r}"


READERS: Final[Mapping[str, Callable[[Path], Iterator[Located]]]] = {
    ".jsonl": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}


HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # a dataset's name at a hub: owner and name
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
    except Exception as error:  # any kind, from a library of file formats
        raise DataError(f"{path} cannot be read as a dataset: {one_line(error)}") from error
    if isinstance(dataset, library.DatasetDict):
        if split not in dataset:
            raise DataError(f"{path} has no split {split!r}; the splits there are {', '.join(dataset)}")
        dataset = dataset[split]
    return _rows(dataset, str(path))


@cache
def ask_hub(name: str) -> None:
    """Raise ``DataError`` unless the hub, which is asked once, with a short timeout, or its cache has the dataset."""
    require("datasets", f"{name}: a dataset", error=DataError)
    from huggingface_hub import HfApi, constants, is_offline_mode  # noqa: PLC0415 - with its HTTP clients, .2 s

    try:
        if not is_offline_mode():
            logger.info(f"{name} is no file or directory here: asking {constants.ENDPOINT} for the dataset")
        HfApi().dataset_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # any kind: proxies, certificates, servers and their answers
        if not Path(_library(name).config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir():
            raise DataError(
                f"{name!r} is no file or directory here, and as a dataset of a hub it could not be had "
                f"({one_line(error)})"
            ) from error


def rows_of_hub(name: str, split: str, subset: str = "") -> Iterator[Located]:
    ask_hub(name)
    library = _library(name)
    try:
        with _quiet(library):
            dataset = library.load_dataset(name, subset or None, split=split)
    except Exception as error:  # any kind, from a library of file formats and networks
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
