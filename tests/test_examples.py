"""Programs under examples/ run, on a near-zero-size model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests import tiny

ROOT = Path(__file__).resolve().parents[1]


def test_research_reads_checks_and_writes_over_local_files(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    for name, text in (("a.txt", "The bridge cost 300 crowns. " * 8), ("b.txt", "It was built in May. " * 8)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    command = [sys.executable, ROOT / "examples" / "research.py", *files, "--ask", "What did it cost?"]
    command += ["--model", tmp_path / "model", "--policy", "kvzip + global + 2x + int4"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^  ([\d,]+) tokens handed over, ([\d,]+) new;", done.stdout, re.MULTILINE)
    handed, new = ([int(number.replace(",", "")) for number in column] for column in zip(*found, strict=True))
    assert re.findall(r"^(\w+): ", done.stdout, re.MULTILINE) == ["read", "check", "write"]
    assert handed == [0, new[0], new[0] + new[1]]
    assert new[0] > 350 > new[1]
    assert re.search(r"is not in the text; 3 retries\]", done.stdout), "noise is no quote"
