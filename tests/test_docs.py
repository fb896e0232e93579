"""The README and the pages under docs/ say what the code does: their Python runs, their commands and policies parse."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kvfold
from kvfold.cli.demo import CASES
from kvfold.cli.main import build_parser, main
from kvfold.policy import Policy
from tests import tiny
from tests.serve.running import running

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
SERVED = DOCS / "tutorials" / "prompt-caching.md"  # its Python talks to a server
POLICY_TABLES = {"choosing.md": 8, "migrating-from-kvpress.md": 30}  # pages, and how many policies they have at least
CHECKPOINTS = ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct")
SHORT = ("kvfold.example_text()", "kvfold.example_text()[:800]")  # a token of the tiny model is about a character
MAX_README_LINES = 150


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def _commands(page: Path) -> list[str]:
    lines = [line.removeprefix("$ ") for block in _blocks(page, "(?:sh|text)") for line in block.splitlines()]
    return [line for line in lines if line.startswith(("kvfold ", "make "))]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A near-zero-size model that stands in for the one the pages name."""
    path = tmp_path_factory.mktemp("tiny")
    tiny.build("llama").save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def test_the_python_of_pages_runs(folder: Path, tmp_path: Path) -> None:
    """All blocks of a page are one program. One process runs them all, and keeps what they register."""
    programs = []
    for page in PAGES:
        blocks = _blocks(page, "python")
        if blocks and page != SERVED:
            text = "\n".join(blocks).replace(*SHORT)
            for name in CHECKPOINTS:
                text = text.replace(name, str(folder))
            programs.append(tmp_path / f"{_name(page).removesuffix('.md').replace('/', '_')}.py")
            programs[-1].write_text(
                text.replace("handbook.kvfold", str(tmp_path / "handbook.kvfold")), encoding="utf-8"
            )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run_all = "import runpy, sys; [runpy.run_path(path, run_name='__main__') for path in sys.argv[1:]]"
    command = [sys.executable, "-c", run_all, *map(str, programs)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_tutorial_of_the_server_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a server under the policy, the shortest prefix and the folder that the page's own command sets."""
    monkeypatch.chdir(tmp_path)
    (command,) = (line for line in _commands(SERVED) if line.startswith("kvfold serve --model"))
    options = build_parser().parse_args(shlex.split(command)[1:])
    model = tiny.ready("llama")
    limits = {"cache_min_tokens": options.cache_min_tokens, "point_tokens": 512}
    with running(model, options.policy, disk=Path(options.disk), **limits) as server:
        text = "\n".join(_blocks(SERVED, "python")).replace(*SHORT)
        text = text.replace("http://localhost:8080", server.url).replace("smollm2-135m", "tiny")
        exec(compile(text, str(SERVED), "exec"), {"__name__": "__main__"})
        server.settle()
        capsys.readouterr()
        shown = [line for line in _commands(SERVED) if line.startswith("kvfold cache")]
        assert [line.split()[2] for line in shown] == ["stats", "explain"]
        for line in shown:
            assert main([str(folder) if word == "smollm2-135m" else word for word in shlex.split(line)[1:]]) == 0
    assert re.search(r"\nall \d+ tokens that the first request wrote are read\n$", capsys.readouterr().out)


def test_there_is_python_on_the_pages_that_promise_it() -> None:
    assert len(_blocks(DOCS / "extending.md", "python")) >= 3
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "quickstart.md", *(DOCS / "tutorials").glob("*.md")):
        assert _blocks(page, "python"), page


@pytest.mark.parametrize("command", sorted({command for page in PAGES for command in _commands(page)}))
def test_a_shown_command_exists(command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words) <= set(targets)
    else:
        args = build_parser().parse_args(words)
        if words[0] in ("run", "serve", "chat") and '"' not in args.policy:  # a policy that names a file reads it
            Policy.parse(args.policy)


@pytest.mark.parametrize("page", POLICY_TABLES)
def test_policies_of_the_tables_parse(page: str) -> None:
    """What stands in a table as code and has a plus is a policy; a budget that reads a file is left out of it."""
    rows = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = {code for line in rows for code in re.findall(r"`([^`]+ \+ [^`]+)`", line)}
    assert len(found) >= POLICY_TABLES[page]
    for code in found:
        Policy.parse(code.replace(' + profile(file="heads.json")', ""))


def test_the_readme_is_short_and_begins_with_a_picture() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_README_LINES
    assert any(line.startswith("![") for line in lines[:12])


def test_links_of_the_readme_are_absolute_and_lead_to_files_of_the_repository() -> None:
    """The page of the package index shows the README without the repository around it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [*re.findall(r"\]\(([^)]+)\)", text), *re.findall(r"^\[[^\]^]+\]: (\S+)$", text, re.MULTILINE)]
    assert all(target.startswith("https://") for target in targets)
    own = re.compile(
        r"https://(?:github\.com/kvfold/kvfold/(?:blob|tree)|raw\.githubusercontent\.com/kvfold/kvfold)/(?:main/)?(.+)"
    )
    files = [match[1] for target in targets if (match := own.match(target))]
    assert len(files) > 10
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_shown_demo_is_the_one_that_runs() -> None:
    (shown,) = (block for block in _blocks(ROOT / "README.md", "text") if block.startswith("$ make demo"))
    rows = [line for line in shown.splitlines() if re.match(r"\S.*(right|wrong): ", line)]
    titles = [line.split("  ")[0] for line in rows]
    assert titles == [case.title for case in CASES]


def test_the_citation_is_of_this_version() -> None:
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {kvfold.__version__}\n" in cited


@pytest.mark.parametrize("page", (*PAGES, ROOT / "CONTRIBUTING.md"), ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
