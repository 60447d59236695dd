"""Loading of user code by name; the boundary around its calls is :func:`oppo.errors.contained`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

from oppo.errors import ConfigError, OppoError, contained, shown

SPEC: Final = re.compile(r"^(?P<file>.+\.py):(?P<name>[^:/\\]+)$")
"""The form ``file.py:name``."""

_PREFIX = "oppo_user_"


def load_function(spec: str, refuse: Callable[[str], Exception]) -> Callable[..., object]:
    """Return the function or class that ``file.py:name`` names; see :func:`load_object`."""
    function = load_object(spec, refuse)
    if not callable(function):
        raise refuse(f"{spec} is not a function but {shown(function)}")
    return function


def load_object(spec: str, refuse: Callable[[str], Exception]) -> object:
    """Return what ``file.py:name`` names.

    A file is run once in a process, as a module of its own, so that what several names refer to in it is shared. It is
    run again only after it has changed.

    Args:
        spec: file and name.
        refuse: returns the error to raise if there is no such file or name, or the file cannot be run.
    """
    text, _, name = spec.rpartition(":")
    path = Path(text)
    if not text or path.suffix != ".py":
        raise refuse(f"a function is named as file.py:function; got {spec!r}")
    if not path.is_file():
        raise refuse(f"there is no file {path} to take {name!r} from")
    module = _module(path, refuse)
    found: object = getattr(module, name, None)
    if found is None:
        own = [(key, value) for key, value in vars(module).items() if _is_of(value, module.__name__)]
        there = [key for key, value in own if callable(value) and not key.startswith("_")]
        raise refuse(f"{path} has no {name!r}; the functions and classes there are {', '.join(there) or '(none)'}")
    return found


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's; pickled by its file and name if it is of a file.

    Attributes:
        refuse: the type of the error if it cannot be loaded.
        spec: its ``file.py:name``; empty if it is importable.
    """

    name: str
    function: Callable[..., object]
    refuse: type[OppoError]
    spec: str = ""

    @classmethod
    def of(cls, function: Callable[..., object] | str, name: str | None, refuse: type[OppoError]) -> UserFunction:
        """Return a function, or the one that ``file.py:name`` names."""
        if isinstance(function, str):
            return cls(name or function.rpartition(":")[2], load_function(function, refuse), refuse, function)
        named = name or str(getattr(function, "__name__", type(function).__name__))
        return cls(named, function, refuse, spec_of(function))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        if self.spec:
            return UserFunction.of, (self.spec, self.name, self.refuse)
        return UserFunction, (self.name, self.function, self.refuse)

    @property
    def is_async(self) -> bool:
        """Whether it returns an awaitable."""
        return is_async(self.function)


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A file of user code that was run. It is run in every process that this goes to, where its classes may follow."""

    path: str

    @classmethod
    def of(cls, path: str) -> LoadedFile:
        """Run a file, unless it was run before.

        Raises:
            ConfigError: it cannot be run.
        """
        _module(Path(path), ConfigError)
        return cls(path)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return LoadedFile.of, (self.path,)


def is_async(function: object) -> bool:
    """Return whether a function, or an object that is called as one, is async."""
    call = getattr(function, "__call__", None)  # noqa: B004 - the method that a call runs
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def is_of_a_file(kind: type) -> bool:
    """Return whether a class is of a file that :func:`load_object` has run: no other process can import it."""
    return kind.__module__.startswith(_PREFIX)


def spec_of(function: object) -> str:
    """Return the ``file.py:name`` by which another process finds a function; empty if it has none."""
    home, name = str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))
    module = sys.modules.get(home) if home.startswith(_PREFIX) else None
    return f"{module.__file__}:{name}" if module is not None and getattr(module, name, None) is function else ""


def _is_of(value: object, module: str) -> bool:
    return getattr(value, "__module__", "") == module


def _module(path: Path, refuse: Callable[[str], Exception]) -> ModuleType:
    """Return the module of a file, which is run unless it was before."""
    path = path.resolve()
    name = f"{_PREFIX}{path.stem}_{_digest(str(path).encode())}"
    try:
        source = path.read_bytes()
    except OSError as error:
        raise refuse(f"{path} cannot be read: {error.strerror or error}") from error
    loader = _Loader(name, str(path), source)
    known = sys.modules.get(name)
    if known is not None and isinstance(known.__loader__, _Loader) and known.__loader__.source == source:
        return known
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        with contained(lambda words: refuse(f"{path} cannot be run: {words}")):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Loader(SourceFileLoader):
    """Runs a source that was read already; a file that changes meanwhile, or twice a second, is never mistaken."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the source; none is kept beside the file."""
        del fullname
        return self.source_to_code(self.source, self.path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
