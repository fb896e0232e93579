"""`pip install kvfold` is enough to generate, run and demonstrate; what needs more names the extra to install."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = (
    *("starlette", "uvicorn", "redis", "opentelemetry", "lm_eval", "matplotlib", "datasets", "jieba", "triton"),
    *("numba", "onnxruntime", "pydantic_monty", "msgspec", "zmq", "anthropic", "openai", "pytest", "hypothesis"),
)
WITHOUT = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None  # as if it were not installed
"""


def without_extras(program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT + program, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_library_and_its_commands_need_no_extra(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    program = """
import kvfold, kvfold.testing
from kvfold.cli.main import main
everything = [getattr(kvfold, name) for name in kvfold.__all__]
kvfold.testing.check_scorer(kvfold.score.KeyDiff())
folder = sys.argv[1]
open(folder + "/notes.txt", "w").write(kvfold.example_text()[:300])
run = ["run", "--model", folder, "--context", folder + "/notes.txt", "--ask", "Who?", "--max-new-tokens", "2"]
assert main(run) == 0
assert main(["policies", "keydiff + 4x"]) == 0
"""
    done = without_extras(program, tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_needs_an_extra_names_it() -> None:
    program = """
from kvfold.cli.main import main
print(main(["serve", "--model", "nowhere"]))
print(main(["read", sys.argv[1], "--ask", "Who?", "--code", "--model", "nowhere"]))
try:
    import kvfold.bench.lm_eval
except ImportError as error:
    print(error)
"""
    done = without_extras(program, __file__)
    *codes, bench = done.stdout.splitlines()
    assert codes == ["2", "2"] and done.stderr.count("\n") == 2, done.stderr
    assert "pip install 'kvfold[serve]'" in done.stderr and 'pip install "kvfold[code]"' in done.stderr
    assert 'pip install "kvfold[bench]"' in bench


@pytest.mark.parametrize("extra", ["serve", "bench", "gpu", "otel", "shorten", "longbench", "code", "events"])
def test_the_extras_that_errors_name_exist(extra: str) -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert about["optional-dependencies"][extra]
    named = {line.split(">")[0].lower() for line in about["dependencies"]}
    assert not named & set(OPTIONAL)
