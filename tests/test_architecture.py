"""The shape of the code base, kept honest: who may import whom, what may be called, how large things may grow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

import oppo

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "oppo"
FILES = sorted(PACKAGE.rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "libraries", "declared", "atomic_files", "images", "log", "redact", "limits"}),
    frozenset({"events", "observe", "scheduling"}),
    frozenset({"models", "admission", "rollout_buffer", "placement", "returns", "scorers", "training", "turns"}),
    frozenset({"graph"}),
    frozenset({"stages", "losses"}),
    frozenset({"algorithms", "evaluation"}),
)
"""From the bottom up: a module imports its own layer and those below it."""

LEAVES = frozenset(
    {
        "agents", "cli", "config", "data", "demo", "environments", "hf", "liveness", "report", "rewards", "run",
        "simulate", "testing", "user_code", "vllm",
    }
)  # fmt: skip
"""Nothing in a layer imports these."""

TORCH = (
    PACKAGE / "losses", PACKAGE / "hf", PACKAGE / "vllm", PACKAGE / "demo", PACKAGE / "run" / "deployment.py",
    PACKAGE / "run" / "engines.py", PACKAGE / "run" / "loading.py", PACKAGE / "run" / "memory.py",
    PACKAGE / "run" / "models.py",
)  # fmt: skip
"""The only places that know torch."""

BANNED = {
    "create_task": "use a task group",
    "ensure_future": "use a task group",
    "gather": "use a task group",
    "print": "log, or render through the console",
    "eval": "never",
    "exec": "never",
}
CORES = PACKAGE / "hf" / "devices.py"
CLOCKS = {"time", "monotonic", "perf_counter"}

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 80

BUDGETS = {
    "admission": 1_283,
    "agents": 2_551,
    "algorithms": 1_030,
    "config": 4_241,
    "data": 1_112,
    "demo": 1_389,
    "environments": 1_457,
    "evaluation": 526,
    "graph": 2_139,
    "hf": 13_142,
    "liveness": 721,
    "losses": 1_072,
    "oppo": 6_434,
    "placement": 3_654,
    "report": 3_263,
    "rewards": 1_774,
    "run": 5_649,
    "simulate": 2_503,
    "stages": 4_111,
    "testing": 2_504,
    "vllm": 4_282,
}
"""Lines of each package and, as ``oppo``, of the modules beside them. They fall; another pays for a raise."""

NAMES = [
    "Admission", "Batch", "Chunk", "Defer", "Drop", "Finish", "FunctionReward", "GAE", "Generate", "Graph",
    "GraphBuilder", "GroupRelative", "OppoError", "Overcommit", "Policy", "Process", "Prompt", "PromptStream",
    "Response", "Rewards", "Run", "Sampling", "Score", "Scorer", "StepReport", "Synchronous", "Thread", "ToolTokens",
    "Trainer", "TrainerSettings", "Update", "Weights", "distill", "evaluate", "grpo", "join", "load_settings",
    "merge_chunks", "ppo", "read_prompts", "resume", "rollout_of", "synced_models", "train", "wrap",
]  # fmt: skip
"""What users import, pinned: a name more or less is a decision, not an accident."""

RATCHETS = {
    "modules": 206,  # passes without data; drafts of settings, apart from the reading of files of other trainers
    "files in the root": 21,  # the images of a prompt, which events, data and models know
    "protocols": 44,
    "functions that only require": 56,
    "functions given all settings": 22,
    "modules that name turns": 39,  # the stage, the settings and the rewards of credit by turn
    "modules that name deterministic": 22,  # the roles of an agent, of which such decoding trains one
    "modules that name lookahead": 23,
    "modules that name restarts": 13,
    "modules that name remote": 10,
}
"""What the package may have at most. Lower a number when it falls; a raised one needs its reason beside it."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    """Return the first component below ``oppo``: ``hf`` for ``oppo/hf/serve/policy.py``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            if node.module == "oppo":
                yield from ((f"oppo.{alias.name}", node.lineno) for alias in node.names)


def dotted(path: Path) -> str:
    """Return a module's name: ``oppo.hf.servable`` for ``oppo/hf/servable.py``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports; packages, whose names are those of others, left out."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in known and known[name].name != "__init__.py"} - {dotted(path)}


def circles(edges: Mapping[str, Collection[str]]) -> frozenset[frozenset[str]]:
    """Return the sets of two or more nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in edges[waiting.pop()]:
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return seen

    reach = {name: reached(name) for name in edges}
    found = {frozenset({other for other in reach[name] if name in reach[other]}) for name in edges}
    return frozenset(circle for circle in found if len(circle) > 1)


def sizes() -> dict[str, int]:
    """Return what :data:`RATCHETS` bounds, as it is."""
    texts = [path.read_text(encoding="utf-8") for path in FILES]
    nodes = [node for path in FILES for node in ast.walk(parsed(path))]
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bases = [ast.unparse(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    named = {
        key: sum(re.search(rf"\b{key.removeprefix('modules that name ')}\b", text) is not None for text in texts)
        for key in RATCHETS
        if key.startswith("modules that name ")
    }
    return {
        "modules": len(FILES),
        "files in the root": len(list(PACKAGE.glob("*.py"))),
        "protocols": sum(base.partition("[")[0] == "Protocol" for base in bases),
        "functions that only require": sum(name.lstrip("_").startswith("require_") for name in functions),
        "functions given all settings": sum(
            any(
                each.annotation is not None and ast.unparse(each.annotation) == "Settings"
                for each in ast.walk(node.args)
                if isinstance(each, ast.arg)
            )
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
    } | named


def lines_by_package() -> Counter[str]:
    lines = Counter[str]()
    for path in FILES:
        package = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "oppo"
        lines[package] += path.read_text(encoding="utf-8").count("\n")
    return lines


def layer_of(module: str) -> int:
    return next((k for k, layer in enumerate(LAYERS) if module in layer), len(LAYERS))


def test_every_module_has_a_layer_or_is_a_leaf() -> None:
    known = frozenset().union(*LAYERS) | LEAVES | {"__init__", "__main__"}
    assert {module_of(path) for path in FILES} <= known


def test_the_page_on_the_architecture_names_every_module_layer_and_command() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.compile(r"`([\w./-]+)`")
    rules = page.partition("Modules import downwards:")[2]
    assert [set(names.findall(layer)) for layer in re.findall(r"^\d\. (.*)$", rules, re.MULTILINE)] == [*LAYERS]
    (places,) = re.findall(r"Only (.*?) import torch", rules, re.DOTALL)
    known = {each.name if each.suffix else f"oppo/{each.name}" for each in TORCH}
    assert set(names.findall(places)) == known | {"oppo/run"}
    rows = page.partition("## Where things are")[2]
    assert [module for module in map(module_of, FILES) if f"`oppo/{module}" not in rows and "__" not in module] == []
    (commands,) = re.findall(r"^\| `oppo/cli.py` \| the commands (.*) \|$", page, re.MULTILINE)
    given = re.findall(r"app\.command\((\w+)\)", (PACKAGE / "cli.py").read_text(encoding="utf-8"))
    assert names.findall(commands) == [name.replace("_", "-") for name in given]


Forbidden: TypeAlias = Callable[[Path, str], bool]
"""Whether a module may not import a name."""

IMPORTS: dict[str, Forbidden] = {
    "modules import downwards only": lambda path, name: (
        module_of(path) not in LEAVES | {"__init__", "__main__"}
        and name.startswith("oppo.")
        and layer_of(name.split(".")[1]) > layer_of(module_of(path))
    ),
    "only the command line, the demo and the public names know the application": lambda path, name: (
        module_of(path) not in {"run", "cli", "demo", "__init__"} and name.startswith("oppo.run")
    ),
    "the package needs nothing else of the repository": lambda path, name: (
        name.split(".")[0] in {"benchmarks", "examples", "tests"}
    ),
    "the graph knows no RL": lambda path, name: (
        module_of(path) == "graph"
        and name.startswith("oppo.")
        and name.split(".")[1] not in {"declared", "errors", "graph", "observe"}
    ),
    "production code stands on no tools for tests": lambda path, name: (
        module_of(path) != "testing" and name.startswith("oppo.testing")
    ),
    "the stages know no place": lambda path, name: module_of(path) == "stages" and name.startswith("oppo.placement"),
    "torch stays in its places": lambda path, name: (
        name.split(".")[0] in {"torch", "transformers", "accelerate"}
        and not any(path.is_relative_to(place) for place in TORCH)
    ),
}


@pytest.mark.parametrize("rule", IMPORTS)
def test_imports_keep_their_rules(rule: str) -> None:
    found = ((path, name, line) for path in FILES for name, line in imports(path))
    faults = [(path, name, line) for path, name, line in found if IMPORTS[rule](path, name)]
    assert [f"{path.relative_to(ROOT)}:{line} imports {name}" for path, name, line in faults] == []


def called_name(node: ast.Call) -> tuple[str, str]:
    """Return the owner and the name of what is called: ``("time", "monotonic")``."""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        return owner.id if isinstance(owner, ast.Name) else "?", node.func.attr
    return "", node.func.id if isinstance(node.func, ast.Name) else ""


def test_banned_calls_are_not_made() -> None:
    faults = []
    for path in FILES + BENCHMARKS:
        inside = path.is_relative_to(PACKAGE)
        banned = BANNED.keys() if inside else BANNED.keys() - {"print"}
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            owner, name = called_name(node)
            where = f"{path.relative_to(ROOT)}:{node.lineno} calls {name}"
            if (name in banned and owner in {"", "asyncio", "loop"}) or (owner == "pickle"):
                faults.append(f"{where}: {BANNED.get(name, 'never')}")
            if inside and owner == "time" and name in CLOCKS and module_of(path) != "observe":
                faults.append(f"{where}: use oppo.observe.now, or the loop's clock")
            if inside and name == "set_num_threads" and path != CORES:
                faults.append(f"{where}: use oppo.hf.devices.use_cores, which no other thread's count can overtake")
    assert not faults


def test_no_broad_except_swallows_an_error() -> None:
    faults = []
    for path in FILES + BENCHMARKS:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or "Exception" in ast.unparse(node.type).split(".")
            ):
                reraises = any(isinstance(child, ast.Raise) for child in ast.walk(node))
                named_boundary = "noqa: BLE001 - " in path.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
                if not reraises and not named_boundary:
                    faults.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not faults


def test_files_and_functions_stay_small() -> None:
    faults = []
    for path in FILES + BENCHMARKS:
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            faults.append(f"{path.relative_to(ROOT)} has {lines} lines: which concept in it wants its own module?")
        faults += [
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name} is too long: which step in it wants a name?"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
        ]
    assert not faults


def exported() -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the classes and functions that the packages' ``__init__`` import to export them, with their modules."""
    known = {dotted(path): path for path in FILES}
    for package in PACKAGE.rglob("__init__.py"):
        for imported in ast.walk(parsed(package)):  # also of those that are imported when they are used
            if isinstance(imported, ast.ImportFrom) and (path := known.get(imported.module or "")):
                names = {alias.name for alias in imported.names}
                for node in parsed(path).body:
                    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names:
                        yield dotted(path), node


def test_the_public_names_are_these() -> None:
    assert sorted(oppo.__all__) == sorted(NAMES)
    assert all(hasattr(oppo, name) for name in NAMES)


def test_exported_names_have_docstrings() -> None:
    described = [
        (module, node) for module, node in exported() if "overload" not in map(ast.unparse, node.decorator_list)
    ]
    assert len(described) > 200
    assert [f"{module}.{node.name}" for module, node in described if not ast.get_docstring(node)] == []


def test_the_package_grows_no_further() -> None:
    grown = {name: (size, RATCHETS[name]) for name, size in sizes().items() if size > RATCHETS[name]}
    assert not grown, "what grew, as it is and as it may be: which concept became two?"


def test_no_package_exceeds_its_budget() -> None:
    lines = lines_by_package()
    assert lines.keys() == BUDGETS.keys()
    assert {package: (now, BUDGETS[package]) for package, now in lines.items() if now > BUDGETS[package]} == {}


def test_no_page_holds_both_sides_of_a_merge() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 10
    assert [each for each in pages if re.search(r"^(<|=|>)\1{6}( |$)", each.read_text("utf-8"), re.MULTILINE)] == []


def test_no_module_imports_itself_through_others() -> None:
    known = {dotted(path): path for path in FILES}
    found = circles({name: imported_modules(path, known) for name, path in known.items()})
    assert not found, "which of them are one thing?"


SURFACE = (
    "oppo",
    "oppo.stages",
    "oppo.algorithms",
    "oppo.testing",
    "oppo.simulate.schedule",
    "oppo.cli",
    "oppo.run.train",
    "benchmarks.__main__",
)


def test_importing_the_surface_loads_no_torch_and_the_public_names_no_network_and_no_terminal() -> None:
    probe = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules), name\n"
        "    more = {'huggingface_hub', 'httpx', 'trio', 'rich', 'structlog'} & set(sys.modules)\n"
        "    assert name != 'oppo' or not more\n"
    )
    subprocess.run([sys.executable, "-c", probe, *SURFACE], check=True)
