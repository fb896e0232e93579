"""`python -m benchmarks.stream_perplexity` from end to end on a saved tiny model: shards, table, keep, page, plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import stream_blocks as stream
from benchmarks import stream_perplexity
from benchmarks.commands import run_main
from benchmarks.stream_table import BEGIN, END, read_rows

Main = Callable[..., int]
TEXT = "The rain fell on the garden, and the old stone wall grew dark. " * 12


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script with its results and pages in a folder of the test, and bounds that a short text reaches."""
    for name, path in (("KEPT", "streams.jsonl"), ("PAGE", "streaming.md"), ("PLOT", "stream.svg")):
        monkeypatch.setattr(stream_perplexity, name, tmp_path / path)
    monkeypatch.setattr(stream_perplexity, "ROOT", tmp_path)
    for name, run in stream.RUNS.items():
        policy = run.policy.replace("1024tok", "96tok") + " + between_chunks(chunk=64)"
        monkeypatch.setitem(stream.RUNS, name, stream.Run(policy, run.fresh))
    monkeypatch.chdir(tmp_path)
    return stream_perplexity


@pytest.fixture
def main(script: ModuleType) -> Main:
    return lambda *arguments: run_main(script.main, arguments)


@pytest.fixture
def run(tiny_llama: Path, tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.json").write_text(json.dumps({"text": TEXT.upper()}))
    model = ("--model", tiny_llama.name, "--device", "cpu", "--dtype", "float32", "--memory", "64MB")
    return ("--text", "a.txt", "b.json", *model, "--streams", "2", "--tokens", "400", "--block", "200")


def test_shards_table_keep_page_plot(
    main: Main, run: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [f"{index}.jsonl" for index in range(2)]
    for index, shard in enumerate(shards):
        assert main(*run, "--shard", f"{index}/2", "--out", shard) == 0
        blocks = read_rows([tmp_path / shard]).blocks
        assert {block.stream for block in blocks} == {index} and len(blocks) == 3 * 2
    assert main(*run, "--out", "whole.jsonl") == 0
    whole = read_rows([tmp_path / "whole.jsonl"])
    losses = {block.key: block.log_loss for block in whole.blocks}
    assert {block.key: block.log_loss for block in read_rows(map(Path, shards)).blocks} == losses

    capsys.readouterr()
    assert main("--table", *shards) == 0
    printed = capsys.readouterr().out
    assert "rotations of a.txt, b.json" in printed and "| 400 |" in printed
    assert len(json.loads(printed.splitlines()[-1])["means"]) == 3 * 2

    (tmp_path / "streaming.md").write_text(f"{BEGIN}\n{END}\n")
    assert main("--keep", *shards) == main("--docs") == main("--plot") == 0
    assert len(read_rows([tmp_path / "streams.jsonl"]).blocks) == 12
    assert "| 400 |" in (tmp_path / "streaming.md").read_text()
    svg = (tmp_path / "stream.svg").read_text()
    assert main("--plot") == 0
    assert "<svg" in svg and svg == (tmp_path / "stream.svg").read_text()


def test_runs_can_be_chosen(main: Main, run: tuple[str, ...], tmp_path: Path) -> None:
    assert main(*run, "--runs", "original", "--shard", "0/2", "--commit", "c0ffee") == 0
    assert read_rows([tmp_path / "streams.rows.jsonl"]).facts[0]["commit"] == "c0ffee"
    blocks = read_rows([tmp_path / "streams.rows.jsonl"]).blocks
    assert [(block.run, block.stream, block.block) for block in blocks] == [("original", 0, 0), ("original", 0, 1)]


def test_errors_are_one_line(main: Main, run: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    Path("there.jsonl").write_text("")
    cases = {
        ("--text", "none.txt"): "none.txt cannot be read",
        (*run, "--shard", "2"): '"2" is no shard',
        (*run, "--out", "there.jsonl"): "there.jsonl exists; name a new file",
        ("--plot",): "streams.jsonl cannot be read",
    }
    for arguments, message in cases.items():
        assert main(*arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and message in line
