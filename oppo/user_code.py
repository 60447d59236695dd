"""User code: loaded by name, and called on the event loop, in threads or in processes.

The boundary around its calls, where its errors become the run's, is :func:`oppo.errors.contained`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import re
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import ClassVar, Final, Generic, TypeVar

import anyio
import anyio.lowlevel

from oppo.declared import require_real, require_whole
from oppo.errors import ConfigError, ModelError, OppoError, awaited, contained, running_loop, shown
from oppo.log import logger
from oppo.models import Shared
from oppo.placement.place import in_thread, run_detached
from oppo.placement.process import DisposableProcess

SPEC: Final = re.compile(r"^(?P<file>.+\.py):(?P<name>[^:/\\]+)$")  # the form `file.py:name`

_PREFIX = "oppo_user_"

CONCURRENCY: Final = 64
"""Calls that overlap where nothing is computed here, unless another number is given: calls of async functions."""

PROCESSES: Final = 4  # calls that overlap in processes, unless another number is given

UNBLOCK: Final = "let what blocks it await what takes long, or make it sync"

START_SECONDS: Final = 600.0
"""Seconds in which a process of a function must start: it imports all that the function's file imports."""

NOTICE_SECONDS: Final = 30.0  # seconds of a call while rows are read after which it is logged

G = TypeVar("G")
W = TypeVar("W")
R = TypeVar("R")


def load_function(spec: str, refuse: Callable[[str], Exception]) -> Callable[..., object]:
    """Return the function or class that ``file.py:name`` names; see :func:`load_object`."""
    function = load_object(spec, refuse)
    if not callable(function):
        raise refuse(f"{spec} is not a function but {shown(function)}")
    return function


def load_object(spec: str, refuse: Callable[[str], Exception]) -> object:
    """Return what ``file.py:name`` names, or raise ``refuse(words)``.

    A file is run once in a process, as a module of its own, so that what several names refer to in it is shared. It is
    run again only after it has changed. It may import its neighbours, when it is run and later; what is installed has
    precedence. A neighbour of which another folder has a namesake is imported at the top of the file.
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
        public = [(key, value) for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        there = [key for key, value in public if getattr(value, "__module__", "") == module.__name__]
        raise refuse(f"{path} has no {name!r}; the functions and classes there are {', '.join(there) or '(none)'}")
    return found


@dataclass(frozen=True, slots=True)
class UserFunction:
    name: str
    function: Callable[..., object]
    refuse: type[OppoError]
    spec: str = ""

    @classmethod
    def of(cls, function: Callable[..., object] | str, name: str | None, refuse: type[OppoError]) -> UserFunction:
        if isinstance(function, str):
            return cls(name or function.rpartition(":")[2], load_function(function, refuse), refuse, function)
        named = name or str(getattr(function, "__name__", type(function).__name__))
        return cls(named, function, refuse, spec_of(function))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        if self.spec:
            return UserFunction.of, (self.spec, self.name, self.refuse)
        return UserFunction, (self.name, self.function, self.refuse)

    def must_take(self, kind: str, what: str, *given: object) -> None:
        signature = None
        try:
            with suppress(ValueError):  # a builtin without a signature: the call will tell
                signature = inspect.signature(self.function, follow_wrapped=False)  # a wrapper may give more itself
        except TypeError as error:
            if not callable(self.function):
                raise ConfigError(f"{kind} {self.name!r} is called with {what}: {error}") from error
        try:
            if signature is not None:
                signature.bind(*given)
        except TypeError as error:
            raise ConfigError(f"{kind} {self.name!r} is called with {what}: {error}") from error

    @property
    def is_async(self) -> bool:
        return is_async(self.function)


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A file of user code that was run. It is run in every process that this goes to, where its classes may follow."""

    path: str

    @classmethod
    def of(cls, path: str) -> LoadedFile:
        _module(Path(path), ConfigError)
        return cls(path)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return LoadedFile.of, (self.path,)


def is_async(function: object) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - the method that a call runs
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def is_of_a_file(kind: type) -> bool:
    # such a class cannot be imported by another process
    return kind.__module__.startswith(_PREFIX)


def spec_of(function: object) -> str:
    home, name = str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))
    module = sys.modules.get(home) if home.startswith(_PREFIX) else None
    return f"{module.__file__}:{name}" if module is not None and getattr(module, name, None) is function else ""


def _module(path: Path, refuse: Callable[[str], Exception]) -> ModuleType:
    path = path.resolve()
    name = f"{_PREFIX}{path.stem}_{_digest(str(path).encode())}"
    try:
        source = path.read_bytes()
    except OSError as error:
        raise refuse(f"{path} cannot be read: {error.strerror or error}") from error
    _importable(str(path.parent))
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


_folders: Final[set[str]] = set()  # the modules of files that were run


def _importable(folder: str) -> None:
    # behind the libraries, where a process that this one starts has it too, and before those of other files
    libraries = sysconfig.get_path("purelib")
    behind = sys.path.index(libraries) + 1 if libraries in sys.path else len(sys.path)
    if folder in sys.path[:behind]:
        return
    sys.path[behind:] = [folder, *(each for each in sys.path[behind:] if each != folder)]
    neighbours: set[str] = set()
    with suppress(OSError):  # a folder that may be searched need not be listed
        neighbours = {entry.stem for entry in Path(folder).iterdir()} - {"__main__"}
    for name in neighbours:  # a namesake of another file's is not this file's neighbour
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "/")
        home = file.parent.parent if file.stem == "__init__" else file.parent
        if str(home) in _folders - {folder}:
            for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[each]
    _folders.add(folder)


class _Loader(SourceFileLoader):
    """Runs a source that was read already; a file that changes meanwhile, or twice a second, is never mistaken."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        return self.source_to_code(self.source, self.path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@dataclass(frozen=True)
class CheckedFunction(ABC, Generic[G, W, R]):
    """A user function with the check of its results; pickled where calls are made in a process."""

    # `kind`: as in "reward function"; `where` says in errors what a call is for

    kind: ClassVar[str]
    error: ClassVar[type[OppoError]]
    user: UserFunction

    @property
    def title(self) -> str:
        return f"{self.kind} {self.user.name!r}"

    def made(self, given: G) -> object:
        return self.user.function(given)

    @abstractmethod
    def checked(self, result: object, where: W) -> R:
        """Return the function's result, or raise :meth:`failure`."""

    def failure(self, what: str, where: W) -> OppoError:
        return self.error(f"{self.title} {what} ({where})")

    async def run(self, given: G, where: W) -> R:
        """Call an async function here, a sync one in a thread of its own; inline on a loop of virtual time."""
        if self.user.is_async:
            return await self.answer(given, where)
        if getattr(running_loop(), "virtual", False):
            return self.call(given, where)
        return await run_detached(f"oppo-{self.user.name}", partial(self.call, given, where))

    def call(self, given: G, where: W) -> R:
        with self._contained(where):
            return self.checked(self.made(given), where)

    async def answer(self, given: G, where: W) -> R:
        await anyio.lowlevel.checkpoint_if_cancelled()  # it may block the event loop once it is called
        with self._contained(where):
            result = self.made(given)
            return self.checked(await awaited(result) if isinstance(result, Awaitable) else result, where)

    def _contained(self, where: W) -> AbstractContextManager[None]:
        return contained(lambda words: self.failure(f"raised {words}", where), passing=self.error)


class UserCalls(Shared, Generic[G, W, R]):
    """Makes the calls of a user function.

    An async function is called on the event loop; a sync one in a thread of its own for each call, in one of several
    processes, or, on a loop of virtual time, inline. A call past its timeout has failed, whatever it returns later: an
    async function is cancelled, a process interrupted and then killed, a thread left alone, which keeps neither the run
    nor the process from ending. Only calls count against the timeout, not the start of a process.
    It opens the function, if that is a context manager.
    """

    def __init__(
        self,
        checked: CheckedFunction[G, W, R],
        *,
        concurrency: int | None = None,
        timeout: float | None = None,
        process: bool = False,
    ) -> None:
        if concurrency is None:
            concurrency = PROCESSES if process else CONCURRENCY
        if timeout is not None:
            require_real("timeout", timeout, 0, error=ConfigError)
        require_whole("concurrency", concurrency, 1, error=ConfigError)
        user = checked.user
        if process and user.is_async:
            raise user.refuse(f"{checked.title} is async, and a process of its own is for sync ones: leave that out")
        self._checked = checked
        self._concurrency = concurrency
        self._timeout = math.inf if timeout is None else timeout
        self._limiter: anyio.CapacityLimiter | None = None
        self._working: dict[object, str] = {}
        try:
            self._processes = [
                DisposableProcess(user.name, checked, timeout=self._timeout)
                for _ in range(concurrency if process else 0)
            ]
        except ModelError as error:
            raise user.refuse(f"{checked.title}: {error}") from error
        self._idle = list(self._processes)

    @property
    def concurrent(self) -> bool:
        return self._concurrency > 1

    @property
    def at_work(self) -> str:
        # for a watchdog
        return next(reversed([*self._working.values()]), "")  # calls of other threads may end meanwhile

    async def make(self, given: G, where: W) -> R:
        self._limiter = self._limiter or anyio.CapacityLimiter(self._concurrency)
        async with self._limiter:
            with self.working():
                if self._processes and not getattr(running_loop(), "virtual", False):
                    return await self._made_apart(given, where)
                with anyio.move_on_after(self._timeout) as limit:
                    result = await self._checked.run(given, where)
                    if not self._checked.user.is_async or anyio.current_time() <= limit.deadline:
                        return result
            blocked = "" if limit.cancel_called else f", and the event loop was blocked: {UNBLOCK}"
            raise self._checked.failure(f"took longer than {self._timeout:g} s{blocked}", where)

    def make_here(self, given: G, where: W) -> R:
        """Return the result of a sync function while rows are read, where nothing is awaited; a long call is logged."""
        with self.working():
            outcome = in_thread(f"oppo-{self._checked.user.name}", partial(self._checked.call, given, where))
            waited, notice = 0.0, NOTICE_SECONDS
            while waited < self._timeout:
                until = min(notice, self._timeout)
                with suppress(TimeoutError):
                    return outcome.result(until - waited)
                if (waited := until) == notice:
                    notice *= 2
                    ends = "a timeout would end it" if self._timeout == math.inf else f"it has {self._timeout:g} s"
                    logger.warning(f"{self._checked.title} has not returned for {waited:g} s ({where}): {ends}")
        raise self._checked.failure(f"took longer than {self._timeout:g} s", where)

    async def _made_apart(self, given: G, where: W) -> R:
        failure = self._checked.failure
        process = self._idle.pop()  # the limiter lets in as many calls as there are processes
        try:
            with anyio.move_on_after(START_SECONDS) as starting:
                await process.start()
            if starting.cancelled_caught:
                raise failure(f"had no process that started within {START_SECONDS:g} s", where)
            return await process.call(_call, given, where)
        except TimeoutError:
            raise failure(f"took longer than {self._timeout:g} s", where) from None
        except ModelError as error:
            raise failure(f"was lost: {error}", where) from error
        finally:
            self._idle.append(process)

    @contextmanager
    def working(self, how: str = "") -> Iterator[None]:
        call = object()
        self._working[call] = f"{self._checked.title}{how}"
        try:
            yield
        finally:
            del self._working[call]

    async def _open(self, stack: AsyncExitStack) -> None:
        if isinstance(self._checked.user.function, AbstractAsyncContextManager):
            await stack.enter_async_context(self._checked.user.function)
        stack.callback(self.close)

    def close(self) -> None:
        self._limiter = None  # the next run may be on another event loop
        for process in self._processes:
            process.close()


class CallsFunction(Shared, Generic[G, W, R]):
    _calls: UserCalls[G, W, R]

    async def _open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._calls)

    def close(self) -> None:
        self._calls.close()


def _call(checked: CheckedFunction[G, W, R], given: G, where: W) -> R:
    return checked.call(given, where)
