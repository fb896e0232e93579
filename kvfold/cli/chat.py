"""`kvfold chat`: a chat of unbounded length in constant KV-cache memory.

The default policy keeps the first tokens and the latest ones (StreamingLLM, arXiv:2309.17453) and closes the gap
between them (`slot`), so that positions stay within the trained context window, however long the chat becomes.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import kvfold
from kvfold.cli.options import (
    Subparsers,
    add_model_options,
    add_option,
    add_sampling_options,
    load_model,
    parse_policy,
    sampling,
)
from kvfold.errors import FileError, InputError, KvfoldError
from kvfold.policy import Policy
from kvfold.policy.size import bytes_text

DEFAULT_POLICY = "streaming + 1024tok + slot"
HELP = """\
/stats      tokens seen, slots kept, resident bytes
/save FILE  write the conversation to a file
/load FILE  continue a saved conversation, under the policy it was saved with
/reset      start over, with the prefix if there is one
/help       this text
/quit       end; so does Ctrl-D
Ctrl-C stops a reply."""
_SHORT = "; the open block and page tables weigh more than so few tokens"
_COMMANDS = HELP.replace("\n", "\n  ")
_EPILOG = f"""examples:
  kvfold chat
  kvfold chat --policy "keydiff + 4x" --model qwen2.5-coder-1.5b --temperature 0.7
  kvfold chat --prefix rules.kvfold
  printf 'Hello\\n/stats\\n' | kvfold chat

commands in the chat:
  {_COMMANDS}
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="chat with a model in constant KV-cache memory",
        description="Chat with a model; piped lines are answered one by one, without a prompt sign.",
        epilog=_EPILOG,
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--policy", default=DEFAULT_POLICY, help="default: %(default)s")
    add_option(
        start, "--prefix", "SESSION", "start from a saved session (see fit-prompt), and do not compress the chat", Path
    )
    add_sampling_options(parser, max_new_tokens=256)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends. An error ends a piped chat; on a terminal it is printed and the chat continues."""
    policy, options = parse_policy(args.policy), sampling(args)
    if args.prefix is not None and not args.prefix.is_file():
        raise FileError(f"--prefix: there is no file {args.prefix}; write one with kvfold fit-prompt")
    chat = Chat(load_model(args), policy, options, args.prefix)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history
        print(f"{chat.model.name}, {chat.session.policy.short}; /help shows the commands")
    with closing(chat):
        for line in _lines("> " if is_terminal else ""):
            try:
                if not chat.hear(line.strip()):
                    break
            except KvfoldError as error:
                if not is_terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)
    return 0


class Chat:
    """A session and its commands. It starts empty, or with a compressed prefix, after which nothing is compressed."""

    def __init__(
        self, model: kvfold.Model, policy: Policy, options: dict[str, Any], prefix: Path | None = None
    ) -> None:
        self.model = model
        self.policy = policy
        self.options = options
        self.prefix = prefix
        self.session = self._new_session()
        self._commands: dict[str, Callable[[str], None]] = {
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/reset": lambda _: self._replace(self._new_session()),
            "/help": lambda _: print(HELP),
        }

    def hear(self, line: str) -> bool:
        """Carry out a command or answer a text; False when the chat is to end."""
        if not line.startswith("/"):
            if line:
                self._answer(line)
            return True
        name, _, argument = line.partition(" ")
        if name == "/quit":
            return False
        if name not in self._commands:
            raise InputError(f'no command "{name}"; commands: {", ".join(self._commands)}, /quit')
        self._commands[name](argument.strip())
        return True

    def close(self) -> None:
        self.session.close()

    def _answer(self, line: str) -> None:
        with deferred_interrupt() as is_interrupted:
            self.session.extend(line, compress=self.prefix is None)
            pieces = self.session.generate(stream=True, **self.options)
            assert isinstance(pieces, Generator)
            with closing(pieces):
                while not is_interrupted() and (piece := next(pieces, None)) is not None:
                    print(piece, end="", flush=True)
        print(flush=True)

    def _stats(self, _: str) -> None:
        stats = self.session.stats()
        is_short = stats.resident_bytes > stats.full_bytes
        print(
            f"{self.session.policy.short}: {stats.logical_len} tokens seen, {stats.mean_slots:.0f} slots per head, "
            f"{bytes_text(stats.resident_bytes)} resident (full cache: {bytes_text(stats.full_bytes)}), "
            f"{bytes_text(stats.bytes_per_step)} read per step{_SHORT if is_short else ''}"
        )

    def _save(self, argument: str) -> None:
        path = _file(argument)
        try:
            self.session.save(path)
        except OSError as error:
            raise FileError(f"{path} cannot be written ({error.strerror}); name another file") from None
        print(f"saved {path}, {bytes_text(path.stat().st_size)}")

    def _load(self, argument: str) -> None:
        self._replace(kvfold.Session.load(self.model, _file(argument)))
        print(f"{len(self.session.token_ids)} tokens under {self.session.policy.short}")

    def _new_session(self) -> kvfold.Session:
        if self.prefix is not None:
            return kvfold.Session.load(self.model, self.prefix)
        return kvfold.Session(self.model, self.policy)

    def _replace(self, session: kvfold.Session) -> None:
        self.session.close()
        self.session = session


def _file(argument: str) -> Path:
    if not argument:
        raise InputError("the name of a file is missing; write for example /save talk.kvfold")
    path = Path(argument).expanduser()
    if not path.parent.is_dir():
        raise FileError(f"the folder {path.parent} does not exist; name one that does")
    return path


def _lines(prompt: str) -> Iterator[str]:
    with suppress(EOFError):
        while True:
            yield input(prompt)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C only sets a flag, so that a decode step is never interrupted; a second one interrupts at once."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
