"""Do the tests notice a wrong formula? Change operators, comparisons and constants at random places, one at a time.

    python dev/mutate.py [--count 20] [--seed 0] [--jobs 2] [--timeout-s 600] [--part pages --part codec …]

A mutant swaps one arithmetic or comparison operator, or moves one number, in a copy of the package; the tests of the
same folder run on it first, then those of the folders above that use it. A mutant that no test fails on has survived;
it is printed with its line, to be judged: some changes make no difference (a growth factor, a tile size). All of these
tests run once without a mutant first; one that fails then kills none.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("policy", "score", "budget", "codec", "evicted", "pages", "attend", "compression", "passes", "engine", "store")
QUICK = "not slow and not model and not thorough"  # what `make test` runs, without downloads
ABOVE = ("tests/compression", "tests/passes", "tests/pages", "tests/engine", "tests/test_session.py", "tests/store")
_FAILED = re.compile(r"(?:FAILED|ERROR) (.+?)(?: - |$)")
_BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


@dataclass(frozen=True)
class Mutant:
    path: Path  # from the root
    source: str  # of the whole file, changed
    line: int
    before: str
    after: str


def places(tree: ast.AST) -> Iterator[ast.BinOp | ast.Compare]:
    """Operators that can be changed; strings are joined and filled by some of them, and stay."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            yield node
        is_joined = isinstance(node, ast.BinOp) and isinstance(node.left, (ast.Constant, ast.JoinedStr))
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY and not is_joined:
            yield node


def inside_function(node: ast.AST) -> bool:
    while (parent := getattr(node, "parent", None)) is not None:
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return not any(node is one for one in [*parent.decorator_list, parent.args, parent.returns])
        node = parent
    return False


def mutate(path: Path, rng: random.Random) -> Mutant | None:
    text = path.read_text(encoding="utf-8")
    nodes = [node for node in places(ast.parse(text)) if inside_function(node) and node.lineno == node.end_lineno]
    if not nodes:
        return None
    node = rng.choice(nodes)
    before = ast.unparse(node)
    if isinstance(node, ast.BinOp):
        node.op = _BINARY[type(node.op)]()
    else:
        node.ops = [_COMPARE[type(node.ops[0])]()]
    after = ast.unparse(node)
    lines = text.split("\n")
    line = lines[node.lineno - 1].encode()
    lines[node.lineno - 1] = (line[: node.col_offset] + f"({after})".encode() + line[node.end_col_offset :]).decode()
    return Mutant(path.relative_to(ROOT), "\n".join(lines), node.lineno, before, after)


def draw(count: int, seed: int, parts: tuple[str, ...]) -> list[Mutant]:
    rng = random.Random(seed)
    files = [path for part in parts for path in sorted((ROOT / "kvfold" / part).rglob("*.py"))]
    files = [path for path in files if "kernels" not in path.parts]
    found: list[Mutant] = []
    while len(found) < count:
        mutant = mutate(rng.choice(files), rng)
        if mutant is not None:
            found.append(mutant)
    return found


def tests_of(mutant: Mutant) -> list[str]:
    """Test files of the module itself first, then its folder, then what stands above it."""
    folder = Path("tests", *mutant.path.parts[1:-1])
    own = folder / f"test_{mutant.path.stem}.py"
    found = [str(own)] if (ROOT / own).exists() else []
    return [*found, str(folder), *(name for name in ABOVE if name != str(folder))]


def copied(copy: Path) -> None:
    for part in ("kvfold", "tests", "benchmarks", "docs", "examples"):
        if (ROOT / part).exists():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for part in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / part, copy / part)


def failures(copy: Path, tests: list[str], timeout_s: float, *flags: str) -> list[str]:
    """The tests that fail in a copy of the tree, in the order they ran."""
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", "-m", QUICK, *flags, *tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s)
    found = [match[1] for line in done.stdout.splitlines() if (match := _FAILED.match(line))]
    return found or ([f"pytest, exit code {done.returncode}"] if done.returncode not in (0, 5) else [])


def survives(mutant: Mutant, timeout_s: float, broken: list[str]) -> tuple[Mutant, str]:
    """How a mutant ends: "killed by …", "survived", or "timed out", which counts as killed.

    Tests that fail without the mutant are not asked."""
    with tempfile.TemporaryDirectory() as name:
        copied(Path(name))
        (Path(name) / mutant.path).write_text(mutant.source, encoding="utf-8")
        ignored = [f"--deselect={test}" for test in broken]
        for test in tests_of(mutant):
            try:
                failed = failures(Path(name), [test], timeout_s, "-x", *ignored)
            except subprocess.TimeoutExpired:
                return mutant, f"killed: {test} took over {timeout_s:g} s"
            if failed:
                return mutant, f"killed by {failed[0][:140]}"
    return mutant, "survived"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--part", action="append", choices=PARTS)
    args = parser.parse_args()
    mutants = draw(args.count, args.seed, tuple(args.part or PARTS))
    with tempfile.TemporaryDirectory() as name:
        copied(Path(name))
        tests = sorted({test for mutant in mutants for test in tests_of(mutant)})
        broken = failures(Path(name), tests, args.timeout_s * args.jobs, f"-n{args.jobs}")
    print(f"{len(broken)} tests fail without a mutant and are left out: {' '.join(broken)}", flush=True)
    num_survived = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(survives, one, args.timeout_s, broken) for one in mutants]):
            mutant, end = done.result()
            num_survived += end == "survived"
            print(f"{mutant.path}:{mutant.line}  {mutant.before}  ->  {mutant.after}\n    {end}", flush=True)
    print(f"{len(mutants) - num_survived} of {len(mutants)} killed")


if __name__ == "__main__":
    main()
