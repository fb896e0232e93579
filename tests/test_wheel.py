"""The wheel, installed into a new environment and used from an empty folder: what a user of `pip install` has.

The environment sees the packages that kvfold depends on through a .pth file, but neither this repository nor pip.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

import kvfold
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
PIP = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
OFFLINE = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
MAX_SCORER_BYTES = 2_000_000
SERVERS_AND_BENCHMARKS = {"starlette", "uvicorn", "redis", "lm_eval", "matplotlib", "datasets", "triton", "anthropic"}
GENERATE = """
import sys
import kvfold, transformers

hf = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
text = kvfold.example_text()[:600]
cache = kvfold.Cache(hf, "keydiff + 4x + int4")
hf.generate(**tokenizer(text, return_tensors="pt"), past_key_values=cache, max_new_tokens=4, do_sample=False)
assert cache.stats().mean_slots < 300
found = kvfold.answer(hf, text, ["Who?", "When?"], "keydiff + 4x", tokenizer=tokenizer, max_new_tokens=4)
assert len(found.texts) == 2
print(kvfold.__file__)
"""


class Installed:
    """An environment with the wheel, and a folder to work in."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.home, self.work = folder / "venv", folder / "work"
        self.work.mkdir()
        venv.create(self.home, with_pip=False)
        self.python = self.home / "bin" / "python"
        self.pip(str(wheel))
        (site,) = self.home.glob("lib/python*/site-packages")
        (site / "packages.pth").write_text(sysconfig.get_path("purelib"))

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "KVFOLD_IMPORT")}
        return {**kept, "OMP_NUM_THREADS": "1", "PATH": f"{self.home / 'bin'}{os.pathsep}{kept['PATH']}"}

    def run(self, *command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)), cwd=self.work, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kvfold(self, *words: str | Path) -> str:
        return self.run(self.home / "bin" / "kvfold", *words)

    def pip(self, *words: str) -> None:
        self.run(*PIP, "--python", str(self.python), "install", *OFFLINE, *words)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither the repository gets build files, nor the wheel those of an earlier build."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "kvfold", source / "kvfold", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(built), str(source)], check=True)
    (found,) = built.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.build("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def test_it_holds_what_the_package_reads_and_says_what_it_is(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        (named,) = (name for name in sizes if name.endswith("/METADATA"))
        about = message_from_bytes(archive.read(named))
    for file in (ROOT / "kvfold").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            told = f"{file} is not in the wheel; see package-data in pyproject.toml"
            assert str(file.relative_to(ROOT)) in sizes, told
    assert not any(name.startswith(("tests", "benchmarks")) for name in sizes)
    assert sum(size for name, size in sizes.items() if name.endswith(".safetensors")) <= MAX_SCORER_BYTES
    required = {line.split(">")[0].lower() for line in about.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert not required & SERVERS_AND_BENCHMARKS and "torch" in required
    assert about["Version"] == kvfold.__version__ and about["License-Expression"] == "Apache-2.0"
    urls = {line.split(",")[0] for line in about.get_all("Project-URL", [])}
    assert urls >= {"Documentation", "Source", "Changelog", "Issues"}
    assert about.get_all("License-File") == ["LICENSE"]


def test_a_program_generates(installed: Installed, model: Path) -> None:
    printed = installed.run(installed.python, "-c", GENERATE, model)
    assert Path(printed.strip()).is_relative_to(installed.home)
    (installed.work / "notes.txt").write_text(kvfold.example_text()[:600])
    words = ("--context", "notes.txt", "--ask", "Who?", "--policy", "keydiff + 4x", "--max-new-tokens", "4", "--json")
    (answered,) = json.loads(installed.kvfold("run", "--model", model, *words))["answers"]
    assert answered["policy"] == "keydiff + 4x" and answered["num_new_tokens"] == 4


def test_a_client_of_the_server_is_answered(installed: Installed, model: Path) -> None:
    anthropic = pytest.importorskip("anthropic")
    with serving(installed, model) as url:
        client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=120)
        asked = [{"role": "user", "content": kvfold.example_text()[:400]}]
        reply = client.messages.create(model="tiny", max_tokens=4, messages=asked)
    assert reply.usage.output_tokens == 4 and reply.role == "assistant"


@contextmanager
def serving(installed: Installed, model: Path) -> Iterator[str]:
    command = [installed.home / "bin" / "kvfold", "serve", "--model", model, "--policy", "keydiff + 4x", "--port", "0"]
    limits = ["--memory", "64MB", "--host-memory", "16MB"]
    server = subprocess.Popen(
        list(map(str, [*command, *limits])),
        cwd=installed.work,
        env=installed.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split("keydiff + 4x: ")[1].split()[0]
    finally:
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert server.returncode in (0, 130), errors


def test_a_scorer_of_the_user_is_compared_with_the_full_cache(installed: Installed, model: Path) -> None:
    installed.kvfold("new", "scorer", "of_user")
    installed.pip("--editable", str(installed.work / "of_user"))
    tested = installed.run(installed.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "of_user")
    assert "3 passed" in tested
    assert json.loads(installed.kvfold("policies", "of_user + 4x", "--json"))["policy"] == "of_user + 4x"
    words = ("--workloads", "passkey", "--samples", "1", "--lengths", "300", "--modes", "unknown", "--fidelity", "0")
    more = ("--policies", "of_user", "--memory", "50%", "--diagnostics", "0", "--out", "run")
    printed = installed.kvfold("bench", "--model", model, *words, *more)
    assert "of_user" in printed and (installed.work / "run" / "report.html").is_file()
