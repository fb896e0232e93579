"""Imports point one way, from commands down to plain types, never in a circle, and importing only defines.

Read from the source: what stands under `if TYPE_CHECKING:` does not run; it counts for circles and not for levels.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfold

ROOT = Path(kvfold.__file__).parent
# Each level may import itself and every level below it.
LEVELS = (
    ("__main__",),
    ("cli", "vllm"),
    ("serve", "bench", "train"),
    ("__init__",),  # the public names
    ("memory", "packed", "pipeline", "recurse"),
    ("answering", "batch", "drop_in", "episodes", "session", "testing"),
    ("reply", "session_io", "tfidf"),
    ("shortening",),
    ("engine",),
    ("models", "store"),
    ("stats",),
    ("passes",),
    ("compression",),
    ("attend",),
    ("pages",),
    ("score", "budget", "codec", "evicted", "triggers", "protect", "position", "token_pruning"),
    ("policy",),
    ("plugins",),
    ("core", "errors", "atomic_io", "plurals", "text_io", "yielding"),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
SOURCES = {module: (ROOT / module).read_text(encoding="utf-8") for module in MODULES}


class Imports(ast.NodeVisitor):
    """Every module a file imports, at its top or inside a function; `typed`: also what only type checkers import."""

    def __init__(self, *, typed: bool) -> None:
        self.found: list[str] = []
        self._typed = typed

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING") and not self._typed:
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [alias.name for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        assert node.module is not None
        self.found += [f"{node.module}.{alias.name}" for alias in node.names]


def imports_of(source: str, *, typed: bool = False) -> list[str]:
    visitor = Imports(typed=typed)
    visitor.visit(ast.parse(source))
    return visitor.found


def part_of(module: Path) -> str:
    """The folder or top-level file a module belongs to."""
    return module.parts[0].removesuffix(".py")


def own_parts(source: str) -> Iterator[str]:
    for name in imports_of(source):
        package, *rest = name.split(".")
        if package == "kvfold":
            yield rest[0] if rest and rest[0] in LEVEL_OF else "__init__"


def test_imports_point_down() -> None:
    for module in MODULES:
        assert part_of(module) in LEVEL_OF, f"{module} has no level; give {part_of(module)} one here and in the docs"
        level = LEVEL_OF[part_of(module)]
        upwards = {part for part in own_parts(SOURCES[module]) if LEVEL_OF[part] < level}
        assert not upwards, f"{module} is below {sorted(upwards)} but imports it"


def test_benchmarks_import_no_tests() -> None:
    """Their own tests do."""
    folder = ROOT.parent / "benchmarks"
    for path in folder.rglob("*.py"):
        if "tests" not in path.relative_to(folder).parts:
            found = [name for name in imports_of(path.read_text(encoding="utf-8")) if name.split(".")[0] == "tests"]
            assert not found, f"{path.relative_to(folder.parent)} imports {found}"


def test_only_models_know_transformers() -> None:
    for module in MODULES:
        knows = any(name.split(".")[0] == "transformers" for name in imports_of(SOURCES[module]))
        may = part_of(module) in ("models", "pipeline")
        assert not knows or may, f"{module} imports transformers; only kvfold/models and kvfold/pipeline.py may"


def dotted(module: Path) -> str:
    return ".".join(("kvfold", *module.with_suffix("").parts)).removesuffix(".__init__")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, by Tarjan's strongly connected components."""
    found: list[list[str]] = []
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            begin = stack.index(name)
            if len(stack) - begin > 1:
                found.append(sorted(stack[begin:]))
            del stack[begin:]

    for name in graph:
        if name not in number:
            visit(name)
    return found


def test_no_modules_import_each_other() -> None:
    """Imports for type checkers alone count: two files that need each other's types are one thing in two files."""
    names = {dotted(module) for module in MODULES}
    graph = {
        dotted(module): {
            name if name in names else name.rpartition(".")[0]
            for name in imports_of(SOURCES[module], typed=True)
            if name.startswith("kvfold.") and name != "kvfold.__version__"
        }
        & names - {dotted(module)}
        for module in MODULES
    }
    assert sum(map(len, graph.values())) > 1000
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def defined(source: str) -> set[str]:
    """Names that a module defines at its top, also under a condition."""
    found: set[str] = set()
    for statement in ast.parse(source).body:
        nodes = ast.walk(statement) if isinstance(statement, ast.If | ast.Try) else [statement]
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found


def test_a_name_is_imported_from_where_it_is_defined() -> None:
    """A name has one home; what `kvfold` and its packages export in their `__init__.py` is for users."""
    modules = {dotted(module): defined(SOURCES[module]) for module in MODULES if module.name != "__init__.py"}
    for module in MODULES:
        for name in imports_of(SOURCES[module], typed=True):
            home, _, short = name.rpartition(".")
            if home in modules:
                assert short in modules[home], f"{module} imports {short} from {home}, which does not define it"


def test_the_check_itself_sees_imports() -> None:
    source = "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\nelse:\n    import f\ndef g():\n    import h"
    assert imports_of(source) == ["a.b", "c.d", "f", "h"]
    assert imports_of(source, typed=True) == ["a.b", "c.d", "e", "f", "h"]


def test_importing_kvfold_has_no_effect_on_transformers_and_torch() -> None:
    program = """
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

def state():
    settings = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed()
    return set(AttentionInterface().valid_keys()), set(AttentionMaskInterface().valid_keys()), settings

torch.manual_seed(5)
before = state()
import kvfold
everything = [getattr(kvfold, name) for name in kvfold.__all__]
print(before == state(), "kvfold" in before[0] | before[1], "sdpa" in before[0])
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["True", "False", "True"]


def test_every_public_name_is_there_and_no_other() -> None:
    found = {name: getattr(kvfold, name) for name in kvfold.__all__}
    assert found["generate"].__name__ == "generate_batch"
    assert found["score"].__name__ == "kvfold.score"
    assert set(kvfold.__all__) <= set(dir(kvfold))
    with pytest.raises(AttributeError, match="module 'kvfold' has no attribute 'lod'; it has Answers, Cache, "):
        _ = kvfold.lod


@pytest.mark.parametrize(
    "program", ["import kvfold", "from kvfold.cli.main import build_parser; build_parser()", "import kvfold.policy"]
)
def test_torch_waits_until_it_is_needed(program: str) -> None:
    program += "; import sys; print(sorted({'numpy', 'torch', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"
