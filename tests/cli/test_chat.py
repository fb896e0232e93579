"""`kvfold chat` with piped lines: replies are those of a session, memory is bounded, Ctrl-C stops a reply only."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfold
from kvfold.cli.chat import deferred_interrupt
from tests.cli.conftest import Call, Done, Start, without_progress

POLICY = "streaming + 96tok + slot"
Talk = Callable[..., Done]


@pytest.fixture
def talk(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Pipe lines into a chat with replies of 12 tokens."""

    def run(*lines: str, options: tuple[object, ...] = ()) -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return call("chat", "--model", folder, "--policy", POLICY, "--max-new-tokens", 12, *options)

    return run


def _replies(folder: Path, *lines: str) -> str:
    found = []
    with kvfold.Session(kvfold.load(str(folder)), POLICY) as session:
        for line in lines:
            session.extend(line)
            found.append(session.generate(max_new_tokens=12).text)
    return "".join(f"{text}\n" for text in found)


def test_replies_are_those_of_a_session_and_nothing_else(talk: Talk, folder: Path) -> None:
    done = talk("hello", "", "and the sea?")
    assert (done.code, done.err) == (0, "")
    assert done.out == _replies(folder, "hello", "and the sea?")


def test_memory_is_bounded_however_long_the_talk(talk: Talk) -> None:
    lines = [word for number in range(30) for word in (f"line {number} tells of the sea", "/stats")]
    stats = [line for line in talk(*lines).out.splitlines() if line.startswith(POLICY)]
    assert len(stats) == 30
    seen = [int(line.split(": ")[1].split()[0]) for line in stats]
    kept = [int(line.split("seen, ")[1].split()[0]) for line in stats]
    assert seen[-1] > 5 * 96
    assert max(kept) <= 96
    resident = [line.split("head, ")[1].split(" resident")[0] for line in stats]
    assert resident[-1] == resident[len(resident) // 2]
    note = "the open block and page tables weigh more than so few tokens"
    assert note in stats[0] and note not in stats[-1]


def test_reset_forgets(talk: Talk, folder: Path) -> None:
    done = talk("one", "/reset", "hello")
    assert done.out == _replies(folder, "one") + _replies(folder, "hello")


def test_a_saved_talk_goes_on(talk: Talk, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.kvfold"
    assert f"saved {path}, " in talk("hello", f"/save {path}").out
    done = talk(f"/load {path}", "and the sea?")
    told, _, reply = done.out.partition("\n")
    assert told.endswith(f"tokens under {POLICY}")
    assert _replies(folder, "hello", "and the sea?").endswith(reply)


def test_help_and_quit(talk: Talk) -> None:
    done = talk("/help", "/quit", "never read")
    assert done.code == 0
    for name in ("/stats", "/save", "/load", "/reset", "/help", "/quit"):
        assert name in done.out
    assert done.out.count("\n") == 7


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/fly", 'no command "/fly"; commands: /stats, /save, /load, /reset, /help, /quit'),
        ("/save", "the name of a file is missing"),
        ("/load missing.kvfold", "missing.kvfold is no file"),
        ("/save missing/talk.kvfold", "the folder missing does not exist"),
    ],
)
def test_a_bad_command_ends_a_piped_chat(talk: Talk, line: str, message: str) -> None:
    done = talk("hello", line, "never read")
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1


def test_out_of_pages_exits_with_1(talk: Talk) -> None:
    done = talk("hello " * 2000, options=("--policy", "full", "--memory", "1MB"))
    assert done.code == 1
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["warning", "error"]  # of 12,000 tokens


def test_ctrl_c_stops_the_reply_only(start: Start, folder: Path) -> None:
    process = start("chat", "--model", folder, "--policy", POLICY, "--max-new-tokens", 10**6)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the reply has begun, and would take hours
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/stats\n", timeout=120)
    assert (process.returncode, without_progress(err)) == (0, "")
    assert out.splitlines()[-1].startswith(POLICY)


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as is_interrupted:
        assert not is_interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert is_interrupted()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is not None
