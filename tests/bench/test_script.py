"""`benchmarks/needle.py` from end to end on a saved tiny model: run, go on, table, keep, page."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kvfold.bench.rows import read_cells, read_rows
from kvfold.bench.table import BEGIN, END
from tests.tiny import build, tokenizer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "needle.py"
Main = Callable[..., int]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module that keeps its results in a folder of the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("needle_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "PAGE", tmp_path / "needle.md")
    monkeypatch.chdir(tmp_path)
    return module


@pytest.fixture
def main(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Main:
    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["needle.py", *arguments])
        code: int = script.main()
        return code

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-llama"
    build().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def test_run_go_on_table_keep_page(
    main: Main, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("--model", str(folder), "--device", "cpu", "--tokens", "900", "--policy", "keydiff", "--sizes", "4x")
    assert main(*run, "--samples", "1", "--commit", "c0ffee") == 0
    rows = tmp_path / "needle_tiny-llama.rows.jsonl"
    assert len(read_rows(rows)) == 4
    assert main(*run, "--samples", "2") == 0
    assert [row.prompt for row in read_rows(rows)] == [0] * 4 + [1] * 4
    assert read_rows(rows)[0].facts.commit == "c0ffee"

    capsys.readouterr()
    assert main("--table", str(rows)) == 0
    printed = capsys.readouterr().out
    assert "| `keydiff` |" in printed
    machine = json.loads(printed.splitlines()[-1])
    results = [dict(zip(machine["columns"], values, strict=True)) for values in machine["results"]]
    assert machine["model"] == "tiny-llama" and len(results) == 4
    assert {(found["policy"], found["num_prompts"]) for found in results} == {("full", 2), ("keydiff", 2)}

    assert main("--condense", str(rows)) == 0
    assert read_cells(tmp_path / "results" / "needle_tiny-llama.jsonl") == read_cells(rows)
    (tmp_path / "needle.md").write_text(f"{BEGIN}\n{END}\n")
    assert main("--docs") == 0
    assert "## tiny-llama" in (tmp_path / "needle.md").read_text()


def test_shards_of_a_plan_in_essays_make_one_table_beside_the_others(
    main: Main, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = " ".join(f"Sentence {word} is about {word}." for word in ("tea", "rain", "stone", "milk", "sand"))
    (tmp_path / "essays.json").write_text(json.dumps([{"text": sentences}] * 3))
    run = ("--model", str(folder), "--device", "cpu", "--tokens", "900", "--policy", "keydiff", "--sizes", "4x")
    command = (*run, "--plan", "few", "--samples", "3", "--haystack", "essays.json", "--memory", "64MB")
    shards = []
    for index, prompts in enumerate(([0, 2], [1])):
        assert main(*command, "--shard", f"{index}/2") == 0
        shards.append(f"needle_tiny-llama_few.rows.{index}of2.jsonl")
        assert [row.prompt for row in read_rows(tmp_path / shards[-1])] == [i for i in prompts for _ in range(2)]
        assert main(*command, "--shard", f"{index}/2") == 0  # nothing is left to do
        assert len(read_rows(tmp_path / shards[-1])) == 2 * len(prompts)

    capsys.readouterr()
    assert main("--table", *shards) == 0
    assert capsys.readouterr().out.startswith("3 prompts of 900 tokens (seed 0, haystack essays.json ")
    assert main("--condense", *shards) == 0
    assert read_cells(tmp_path / "results" / "needle_tiny-llama_essays_few_900_tokens.jsonl") == read_cells(
        *(tmp_path / shard for shard in shards)
    )


def test_time_limit_ends_with_its_own_code(main: Main, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--model", str(folder), "--tokens", "900", "--device", "cpu", "--limit-s", "0") == 3
    assert "goes on from needle_tiny-llama.rows.jsonl" in capsys.readouterr().err


def test_interrupt_ends_with_its_own_code(
    main: Main, script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "run_all", interrupted)
    assert main("--model", str(folder), "--tokens", "900", "--device", "cpu") == 130
    assert "goes on from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--table", "none.jsonl"), "none.jsonl does not exist"),
        (("--model", "x", "--policy", "nonsense"), "nonsense"),
        (("--model", "x", "--haystack", "none.txt"), "none.txt cannot be read"),
        (("--model", "x", "--shard", "4/4"), "shard 4/4 does not exist"),
        (("--model", "x", "--plan", "nonsense"), 'no plan "nonsense"'),
        (("--model", "x", "--plan", "few", "--also", "nonsense"), "nonsense"),
    ),
)
def test_errors_are_one_line(
    main: Main, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(*arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
