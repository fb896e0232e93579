"""Imports point one way, from commands down to plain types, and importing has no effect but definitions.

Read from the source: what stands under `if TYPE_CHECKING:` does not run and does not count.
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
    ("cli", "serve", "bench", "train"),
    ("__init__",),  # the public names
    ("batch", "episodes", "topics", "session", "files"),
    ("engine",),
    ("models", "store"),
    ("stats",),
    ("attend",),
    ("pages",),
    ("score", "budget", "codec", "evicted", "when", "protect", "position", "prefill"),
    ("policy",),
    ("core", "errors", "whole", "yielding"),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


class Imports(ast.NodeVisitor):
    """Every module a file imports when it runs, at its top or inside a function."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
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


def imports_of(source: str) -> list[str]:
    visitor = Imports()
    visitor.visit(ast.parse(source))
    return visitor.found


def part_of(module: Path) -> str:
    """The folder or top-level file a module belongs to."""
    return module.parts[0].removesuffix(".py")


def own_parts(module: Path) -> Iterator[str]:
    for name in imports_of((ROOT / module).read_text(encoding="utf-8")):
        package, *rest = name.split(".")
        if package == "kvfold":
            yield rest[0] if rest and rest[0] in LEVEL_OF else "__init__"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_down(module: Path) -> None:
    assert part_of(module) in LEVEL_OF, f"{module} has no level; give {part_of(module)} one here and in the design"
    level = LEVEL_OF[part_of(module)]
    upwards = {part for part in own_parts(module) if LEVEL_OF[part] < level}
    assert not upwards, f"{module} is below {sorted(upwards)} but imports it"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_models_know_transformers(module: Path) -> None:
    found = imports_of((ROOT / module).read_text(encoding="utf-8"))
    knows = any(name.split(".")[0] == "transformers" for name in found)
    assert not knows or part_of(module) == "models", f"{module} imports transformers; only kvfold/models may"


def test_the_check_itself_sees_imports() -> None:
    source = "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\nelse:\n    import f\ndef g():\n    import h"
    assert imports_of(source) == ["a.b", "c.d", "f", "h"]


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
    with pytest.raises(AttributeError, match="module 'kvfold' has no attribute 'lod'; it has Cache, "):
        _ = kvfold.lod


@pytest.mark.parametrize(
    "program", ["import kvfold", "from kvfold.cli.main import build_parser; build_parser()", "import kvfold.policy"]
)
def test_torch_waits_until_it_is_needed(program: str) -> None:
    program += "; import sys; print(sorted({'numpy', 'torch', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"
