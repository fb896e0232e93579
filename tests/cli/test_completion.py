"""`kvfold completion`: the bash script completes in a real bash; the others name what they must."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Call


@pytest.fixture
def script(call: Call, tmp_path: Path) -> Path:
    path = tmp_path / "kvfold.bash"
    done = call("completion", "bash")
    assert (done.code, done.err) == (0, "")
    path.write_text(done.out, encoding="utf-8")
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(script: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for words, expected in (
        (("kvfold", "cal"), "calibrate"),
        (("kvfold", "cache", "cl"), "clear"),
        (("kvfold", "run", "--question"), "--question-known"),
        (("kvfold", "run", "--model", "smol"), "smollm2-135m"),
        (("kvfold", "run", "--policy", "snap"), "snapkv"),
        (("kvfold", "run", "--context", "not"), "notes.txt"),
        (("kvfold", "models", "pull", "smol"), "smollm2-135m"),
    ):
        typed = " ".join(map(repr, words))
        ask = f'COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_kvfold; printf "%s\\n" "${{COMPREPLY[@]}}"'
        command = ["bash", "-c", f"source {script}; {ask}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [expected], (words, done)


@pytest.mark.parametrize(("shell", "start"), [("zsh", "#compdef kvfold"), ("fish", "")])
def test_other_shells_know_the_same_words(call: Call, shell: str, start: str) -> None:
    done = call("completion", shell)
    assert (done.code, done.err) == (0, "") and done.out.startswith(start)
    for word in ("calibrate", "question-known", "smollm2-135m", "snapkv", "quarantine"):
        assert word in done.out


def test_another_shell_is_refused(call: Call) -> None:
    done = call("completion", "elvish")
    assert (done.code, done.err.count("\n")) == (2, 1) and "invalid choice: 'elvish'" in done.err
