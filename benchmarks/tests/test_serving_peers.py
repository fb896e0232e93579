"""The comparison of servers with kvfold alone, on a tiny model; the table of rows that are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving_peers, serving_peers_page
from benchmarks.docs_section import with_section
from benchmarks.rows import read_rows
from benchmarks.server.vllm_process import preloaded, vllm_version
from benchmarks.serving_peers import Documents
from kvfold.errors import ModelError

SIZES = {"rounds": 1, "tokens": 600, "burst": 3, "reply": 2, "replies": 2, "short": 16, "decode": 4, "memory": 1}
ROW = {
    "device": "aarch64 CPU", "threads": 2, "commit": "abc1234", "date": "2026-11-18", "model": "m", "dtype": "float32",
    "tokens": 3000, "burst": 12, "replies": 16, "decode": 64, "rounds": 3,
    "cold_s": 7.891, "hit_s": 1.75, "burst_per_s": 0.333, "decode_per_s": 33.25,
    "cold_s_all": [9, 7.891, 7], "hit_s_all": [1.75] * 3, "burst_per_s_all": [0.333] * 3,
    "decode_per_s_all": [33.25] * 3,
}  # fmt: skip


ALONE: dict[str, Any] = {f"{name}_all": [1.0] for name in serving_peers.MEASURES}


def test_a_policy_of_kvfold_is_measured_and_vllm_told_to_be_missing(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--policies", "full,int4", "--model", str(tiny_llama), "--threads", "1"]
    options += [f"--{name}={value}" for name, value in SIZES.items()]
    assert serving_peers.main([*options, "--", "--cache-min-tokens", "32"]) == 0
    out, err = capsys.readouterr()
    full, quantised = json.loads(out.splitlines()[-1])["rows"]
    assert (full["server"], full["policy"], quantised["policy"]) == ("kvfold", "full", "int4")
    assert "vLLM is not measured: give --vllm-python" in err
    assert all(full[name] > 0 and full[f"{name}_all"] == [full[name]] for name in serving_peers.MEASURES)
    assert full["prompt_tokens"] > 600 and full["cold_reused"] == 0
    assert 512 <= full["hit_reused"] < full["prompt_tokens"], "the document is reused, and the question is not"


def test_documents_have_their_length_and_differ_from_the_first_word_on(tiny_llama: Path) -> None:
    documents = Documents(str(tiny_llama))
    one, other = documents.text("One", 300), documents.text("Other", 300)
    assert one.split()[0] != other.split()[0]
    assert len(documents._tokenizer(one, add_special_tokens=False)["input_ids"]) == pytest.approx(300, abs=5)


def test_a_python_without_vllm_is_refused() -> None:
    with pytest.raises(ModelError, match="has no vLLM"):
        vllm_version(sys.executable)
    with pytest.raises(ModelError, match="cannot be run"):
        vllm_version("/no/python")


def test_what_vllms_guide_recommends_is_preloaded_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    openmp = tmp_path / "lib" / "libiomp5.so"
    assert str(openmp) not in preloaded(str(tmp_path / "bin" / "python"))
    openmp.touch()
    assert preloaded(str(tmp_path / "bin" / "python"))[0] == str(openmp)


def test_the_page_is_what_the_kept_rows_give() -> None:
    page = serving_peers_page
    text, kept = page.PAGE.read_text(encoding="utf-8"), read_rows(page.KEPT) if page.KEPT.exists() else []
    assert text == with_section(text, page.BEGIN, page.END, page.body(kept))


def test_servers_of_one_machine_share_a_table_and_the_last_row_counts() -> None:
    old, new = ({**ROW, "server": "kvfold", "policy": "full", "cold_s": cold} for cold in (9.0, 7.891))
    vllm = {**ROW, "server": "vllm 0.32.0", "policy": "", "cold_s": 12.9, "cold_s_all": [13.5, 12.9, 12]}
    earlier = {**vllm, "server": "vllm 0.26.0", "commit": "0000000"}  # of another run
    x86 = {**vllm, "device": "x86_64 CPU", "rounds": 1, **ALONE}
    found = serving_peers_page.body([earlier, old, vllm, new, x86, {**x86, "processor": "Xeon, AMX"}])
    assert found.count("| server |") == 3
    assert "one round (times as fast as vLLM), x86_64 CPU (Xeon, AMX), 2 threads, commit" in found
    head = (
        "m in float32, medians of 3 rounds (times as fast as vLLM), aarch64 CPU, 2 threads, commit abc1234, 2026-11-18:"
    )
    assert head in found
    mine, theirs = (line for line in found.splitlines() if " to " in line)
    assert mine.startswith(
        "| kvfold, `full` | 7.89 s (7.00 to 9.00, 1.63x) | 1.75 s (1.75 to 1.75, 1.00x) | 0.33 requests/s"
    )
    assert theirs.startswith("| vllm 0.32.0 | 12.90 s (12.00 to 13.50) |") and "| vllm 0.32.0 | 12.90 s |" in found
    assert "0.26.0" not in found
