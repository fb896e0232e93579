"""`python -m benchmarks.gpu table`: lines from rows, parts that fail or take too long, and the page that is written."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.commands import run_command
from benchmarks.gpu import table as gpu_table
from benchmarks.gpu.page import BEGIN, COLUMNS, END, FILES, PAGE, TITLES, body, draw, part_rows, plotted
from benchmarks.gpu.table import DEFAULT, Part, parts, run, why_not
from benchmarks.gpu.targets import Line, lines, table
from benchmarks.rows import Row
from kvfold.errors import InputError

STEP: Row = {"question": "step", "context": 131072, "batch": 1, "codec": "native", "heads": "unequal"}


def by_name(rows: list[Row]) -> dict[str, Line]:
    return {line.what: line for line in lines(rows)}


def step(system: str, mean_ms: float, heads: str = "unequal") -> Row:
    about = {"system": system, "mean_ms": mean_ms, "heads": heads, "times_floor": mean_ms / 4, "tokens_per_s": 1e3}
    return {**STEP, **about, "floor_ms": 4.0, "kv_floor_ms": 0.5}


def test_without_rows_every_line_says_that_it_was_not_measured() -> None:
    found = lines([])
    assert len(found) == len({line.what for line in found}) >= 20
    assert {(line.reached, line.met) for line in found} == {("not measured", None)}
    assert all(line.target for line in found)


@pytest.mark.parametrize(("mean_ms", "met"), [(5.4, True), (5.5, False)])
def test_a_step_is_judged_by_its_ratio_to_the_floor(mean_ms: float, met: bool) -> None:
    peer = {"question": "peer", "system": "kvpress SnapKV 8x", "length": 131072, "batch": 1, "ms": 93.0}
    line = by_name([step("compiled", mean_ms), peer])["step, 128k x 1, 8x, compiled"]
    assert line.met is met and line.ratio == f"{mean_ms / 4:.2f} x" and line.peers == "kvpress SnapKV 8x 93.0 ms"


def test_the_share_of_attention_is_a_difference_of_two_steps() -> None:
    rows = [step("compiled", 5.5), step("compiled without attention", 4.8), step("compiled", 5.0, "equal")]
    found = by_name(rows)
    assert found["step, 128k x 1: share of attention"].ratio == "1.40 x"  # 0.7 ms where the bytes need 0.5
    assert found["step, 128k x 1: unequal heads against equal"].met is True  # 1.1 times


def test_a_shortened_prefill_is_compared_with_the_same_policy_run_whole() -> None:
    about = {"question": "prefill", "length": 16384}
    whole, plain = {**about, "system": "snapkv + 8x", "s": 0.9}, {**about, "system": "DynamicCache", "s": 0.8}
    rows = [plain, whole, {**about, "system": "snapkv + 8x + fastkv", "s": 0.5}]
    found = by_name(rows)["prefill, 16k, `snapkv + 8x + fastkv`"]
    assert (found.ratio, found.met, found.peers) == ("1.80 x", True, "DynamicCache 0.800 s; `snapkv + 8x` 0.900 s")
    assert by_name([{**row, "s": 0.7} for row in rows])[found.what].met is False


def test_codecs_are_judged_by_bandwidth_and_int4_by_its_speed_too() -> None:
    about = {"question": "attention", "context": 32768, "batch": 16, "system": "kvfold", "floor_ms": 0.4}
    rows = [
        {**about, "codec": "bf16", "ms": 0.5, "bandwidth_percent": 80.0},
        {**about, "codec": "int4", "ms": 0.2, "bandwidth_percent": 75.0},
    ]
    found = by_name(rows)
    assert [found[f"attention, 32k x 16, `{codec}`"].met for codec in ("bf16", "int4")] == [False, True]
    assert found["attention, 32k x 16, `int4` against `bf16`"].ratio == "2.50 x"


def test_drafts_have_to_be_fast_and_the_same() -> None:
    about = {"question": "lookup", "prompt": "edit", "policy": "full", "num_tokens": 9, "plain_tokens_per_s": 100.0}
    fast = {**about, "dtype": "torch.bfloat16", "speedup": 2.0, "tokens_per_s": 200.0, "same": 5}
    exact = {**about, "dtype": "torch.float32", "same": 9}
    assert by_name([fast, exact])["prompt lookup, edit"].met is True
    assert by_name([fast, {**exact, "same": 8}])["prompt lookup, edit"].met is False
    assert by_name([{**fast, "speedup": 1.4}, exact])["prompt lookup, edit"].met is False


def test_a_peer_that_ran_out_of_memory_is_named_so() -> None:
    rows = [step("captured", 7.0), {**STEP, "system": "DynamicCache", "ms": None}]
    assert by_name(rows)["step, 128k x 1, 8x, captured"].peers == "DynamicCache out of memory"


def test_a_step_stands_beside_the_full_cache_run_the_same_way() -> None:
    rows = [step("captured", 7.0), {**step("captured", 21.0), "heads": "full"}]
    assert by_name(rows)["step, 128k x 1, 8x, captured"].reached.startswith("7.00 ms")
    assert by_name(rows)["step, 128k x 1, 8x, captured"].peers == "kvfold `full`, captured 21.0 ms"


def test_capacity_counts_sequences_and_tokens() -> None:
    about = {"question": "capacity", "length": 32768}
    own = {**about, "system": "kvfold int4", "batch": 256, "fits": 699, "tokens_per_s": 12_000.0, "mean_ms": 21.3}
    own |= {"floor_ms": 12.0, "times_floor": 1.8}
    peer = {**about, "system": "DynamicCache", "batch": 24, "fits": 31, "tokens_per_s": 200.0}
    found = by_name([peer, own])
    assert (found["held, 32k, 8x, `int4`"].met, found["decoding 256 of them"].met) == (False, True)
    assert found["held, 32k, 8x, `int4`"].peers == "DynamicCache 31"


# Parts


def test_every_part_has_rows_a_command_and_a_limit() -> None:
    known = parts(Path("site"), "model")
    assert list(known) == [*DEFAULT, "sweep"] and set(known) == set(FILES)
    assert set(TITLES) == set(COLUMNS) == set(DEFAULT)
    for part in known.values():
        assert part.limit_s > 0
        assert all(command[0] == "lookup" or command[1] in gpu.COMMANDS for command in part.commands)


def test_parts_that_cannot_run_say_why(tmp_path: Path) -> None:
    assert why_not("attention", None, "") is None
    assert "--site" in (why_not("peers", None, "") or "")
    assert "kvfold models pull no-such-model" in (why_not("lookup", None, "no-such-model") or "")
    assert why_not("lookup", None, str(tmp_path)) is None


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose benchmarks are written by the test."""
    monkeypatch.setattr(gpu_table, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    return tmp_path / "benchmarks"


def test_a_part_that_fails_or_takes_too_long_is_told(scripts: Path) -> None:
    (scripts / "good.py").write_text("import sys; assert sys.argv[1:] == ['--save']")
    (scripts / "bad.py").write_text("raise SystemExit(3)")
    (scripts / "long.py").write_text("import time; time.sleep(60)")
    soon = time.monotonic() + 30
    assert run(Part("a", [["good"]], 30), soon, None).endswith(" s")
    assert run(Part("b", [["bad", "-x"], ["good"]], 30), soon, None) == "failed in bad -x, exit code 3"
    assert run(Part("c", [["long"]], 0.5), soon, None).startswith("out of time after ")
    assert run(Part("d", [["long"]], 30), time.monotonic(), None).startswith("out of time after 0 s")


def test_the_rest_goes_on(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (scripts / "gpu.py").write_text("import sys; print({'decode': 'fine'}[sys.argv[1]])")
    monkeypatch.setenv("KVFOLD_RUN", "a run without rows")
    gpu_table.main(["--parts", "attention,peers,step", "--logs", str(tmp_path / "logs")])
    shown = capsys.readouterr().out
    assert "attention: failed in gpu attention, exit code 1" in shown and "KeyError: 'attention'" in shown
    assert "peers: skipped: needs --site" in shown and "| step, 128k x 1, 8x, captured |" in shown
    assert (tmp_path / "logs" / "step.log").read_text() == "fine\n"


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command("benchmarks.gpu", ["table", "--parts", "steps"])
    assert "no part steps; parts: attention, step, " in capsys.readouterr().err


# The page


def test_rows_of_a_part_are_those_of_its_last_run(tmp_path: Path) -> None:
    rows = [{"ms": 1}, {"ms": 2, "run": "a"}, {"ms": 3, "run": "b"}, {"ms": 4, "run": "b"}]
    (tmp_path / "gpu_decode.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [row["ms"] for row in part_rows("step", folder=tmp_path)] == [3, 4]
    assert [row["ms"] for row in part_rows("step", "a", folder=tmp_path)] == [2]
    assert part_rows("sweep", folder=tmp_path) == []


def test_rows_of_prefill_are_those_of_the_last_run_of_each_length(tmp_path: Path) -> None:
    runs = [(16, "a", "r"), (32, "a", "r"), (32, "b", None), (16, "c", None), (16, "c", None)]
    rows = [
        {"length": length, "commit": commit, "date": "today", "s": s} | ({} if run is None else {"run": run})
        for s, (length, commit, run) in enumerate(runs)
    ]
    (tmp_path / "gpu_prefill.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [row["s"] for row in part_rows("prefill", folder=tmp_path)] == [2, 3, 4]
    assert [row["s"] for row in part_rows("prefill", "r", folder=tmp_path)] == [0, 1]


def test_rows_of_prompt_lookup_are_the_last_of_each_dtype_on_a_gpu(tmp_path: Path) -> None:
    runs = [("a GPU", "fp32"), ("a GPU", "fp32"), ("a GPU", "bf16"), ("x CPU", "fp32")]
    rows = [
        {"prompt": "edit", "policy": "full", "device": device, "dtype": dtype, "s": s}
        for s, (device, dtype) in enumerate(runs)
    ]
    (tmp_path / "lookup.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [row["s"] for row in part_rows("lookup", folder=tmp_path)] == [1, 2]


def test_the_page_has_a_table_of_every_part_that_was_measured() -> None:
    facts = {"device": "a GPU", "torch": "2", "transformers": "5", "commit": "abc", "date": "today", "copy_TB_s": 4.25}
    rows: dict[str, list[Row]] = {part: [] for part in FILES}
    rows["step"] = [{**step("compiled", 5.0), **facts}]
    found = body(rows)
    assert "device a GPU; torch 2; transformers 5; commit abc; date today; copy bandwidth 4.25 to 4.25 TB/s." in found
    assert "| 128k x 1 | compiled | unequal | native | 5.00 | 1,000 | 4.00 | 1.25 |" in found
    assert "## Attention alone" not in found and "gpu.svg" not in found
    with pytest.raises(InputError, match=r"run it on a GPU first"):
        body({part: [] for part in FILES})


def test_the_page_of_the_repository_has_its_markers() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1 and page.index(BEGIN) < page.index(END)


def test_a_table_is_as_wide_everywhere() -> None:
    assert len({row.count("|") for row in table(lines([])).splitlines()}) == 1


def test_the_plot_has_a_line_for_every_codec_and_ratio(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows: list[Row] = [
        {"codec": codec, "keep": keep, "context": context, "batch": 4, "attention_GB_s": 3e3, "tokens_per_s": 500.0,
         "copy_TB_s": 4.2}
        for codec in ("bf16", "int4") for keep in (1, 8) for context in (65536, 4096)
    ]  # fmt: skip
    assert [row["context"] for row in plotted(rows)["int4", 8]] == [4096, 65536]
    draw(rows, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert "int4, 8x" in drawn or "<path" in drawn
    draw(rows, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == drawn
