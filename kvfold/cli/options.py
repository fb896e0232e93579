"""Options that several commands share, and their checks, which all come before a model is loaded.

No command imports torch before its arguments are parsed, so that --help is fast.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import kvfold
from kvfold.cli import show
from kvfold.engine.speculate import MOST_DRAFTED
from kvfold.errors import FileError, InputError, KvfoldError, PolicyError
from kvfold.models.pull.pull import DEFAULT_MODEL, DTYPE_NAMES, resolve
from kvfold.policy import Policy
from kvfold.policy.size import parse_bytes
from kvfold.text_io import decode_text, is_utf8, read_bounded, read_text_file

if TYPE_CHECKING:
    from kvfold.core import Compile

_COMPILE: dict[str, Compile] = {"auto": "auto", "now": True, "never": False}
_MAX_DIGITS = 1000  # Python reads 4,300 unless it was told otherwise
_Value = TypeVar("_Value")
Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs, and keeps those with indented lines, such as examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = text.strip("\n").split("\n\n")
        return "\n\n".join(block if "\n  " in block else textwrap.fill(block, width) for block in blocks)


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments") and "--import" in message:
            message = f"{message}; --import comes before the command: kvfold --import MODULE COMMAND"
        if message.endswith("expected one argument"):
            name = message.removeprefix("argument ").partition(":")[0].split("/")[-1]
            message = f"{message}; a value that begins with - is written {name}=-…"
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


# Values


def checked(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """`parse` as the type of an argument: its own sentence becomes the error, behind the name of the argument."""

    def convert(text: str) -> _Value:
        try:
            return parse(text)
        except KvfoldError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


size_bytes = checked(parse_bytes)


@checked
def count(text: str) -> int:
    """A whole number from 0 on."""
    number = whole_number(text)
    if number is None:
        raise InputError(f'"{text:.40}" is no count; write a whole number from 0 on')
    return number


@checked
def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = whole_number(text)
    if number is None or number < 1:
        raise InputError(f'"{text:.40}" is no count; write a whole number from 1 on')
    return number


def whole_number(text: str) -> int | None:
    """None for what is none, and for one of more digits than Python reads."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


@checked
def seed(text: str) -> int:
    """What `torch.Generator.manual_seed` takes."""
    try:
        number = int(text)
    except ValueError:
        number = 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        raise InputError(f'"{text}" is no seed; write a whole number below 2^64')
    return number


@checked
def nonempty(text: str) -> str:
    if not is_utf8(text):
        raise InputError("the text is not UTF-8; set the terminal and the shell to UTF-8")
    if not text.strip():
        raise InputError("the text is empty; write something between the quotes")
    return text


@checked
def _device(text: str) -> str:
    if text == "auto":
        return text
    import torch  # here: a command line without a device is read without it

    try:
        device = torch.device(text)
    except RuntimeError:
        raise InputError(f'no device "{text}"; write auto, cpu, cuda or cuda:1') from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f'"{text}" is not here: torch sees {torch.cuda.device_count()} CUDA devices; use auto or cpu')
    return text


@checked
def _memory(text: str) -> int:
    from kvfold.pages.arena import SUPERBLOCK_BYTES  # here: a command line without a size is read without torch

    num_bytes = parse_bytes(text)
    if num_bytes < SUPERBLOCK_BYTES:
        raise InputError(f"{text} is too little for any KV cache; give {SUPERBLOCK_BYTES >> 10}KiB or more")
    return num_bytes


@checked
def _rope(text: str) -> str:
    from kvfold.models.rope_scaling import yarn_factor  # here: a command line without it is read without transformers

    yarn_factor(text)
    return text


def parse_policy(text: str, option: str = "--policy") -> Policy:
    """PolicyError names the option."""
    try:
        return Policy.parse(text)
    except PolicyError as error:
        raise PolicyError(f"{option}: {error}") from None


@checked
def split_policies(text: str) -> list[str]:
    """Split at commas outside parentheses: `full, snapkv(8, 5) + 2x` are two policies."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if not text.strip():
        return []
    if not all(map(str.strip, parts)):
        raise InputError(f'"{text}" has a comma without a policy beside it; write for example "full, int4"')
    return [part.strip() for part in parts]


# Files


def read_document(name: str) -> str:
    """A file's text, or stdin's for `-`."""
    if name != "-":
        return read_text_file(Path(name))
    if sys.stdin.isatty():
        print("reading the text from this terminal; Ctrl-D ends it", file=sys.stderr)
    return decode_text(read_bounded(sys.stdin.buffer, "stdin"), "stdin")


def add_document_parser(
    subparsers: Subparsers, name: str, run: Callable[[argparse.Namespace], int], document: str, **about: Any
) -> Parser:
    """A command about one document; `about`: help, description and epilog."""
    parser = subparsers.add_parser(name, **about)
    parser.add_argument("file", metavar="FILE", help=f"{document}, UTF-8 text; - is stdin")
    parser.set_defaults(run=run)
    return parser


def check_out(path: Path, *read: str | Path) -> None:
    """FileError if a file cannot be written there, as far as can be told beforehand, or is one that is `read`."""
    if "\0" in str(path):
        raise FileError("the name of the file has a NUL character in it; name a file")
    if path.is_dir():
        raise FileError(f"{path} is a folder; name a file")
    if path.exists() and not path.is_file():
        raise FileError(f"{path} is a device or a pipe; name a file")
    if not path.parent.is_dir():
        raise FileError(f"the folder {path.parent} does not exist; name one that does")
    if any(_is_same(path, str(name)) for name in read):
        raise FileError(f"{path} is a file that this command reads; name another file to write to")


def _is_same(path: Path, name: str) -> bool:
    """Whether a file that is read, or stdin, is the one at a path, whatever links lead to it."""
    if name == "-" or "\0" in name:
        return False
    other = Path(name)
    return path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))


# Options


def add_option(
    to: argparse._ActionsContainer,
    name: str,
    metavar: str,
    text: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    **more: Any,
) -> None:
    """An option that takes a value; help tells its default, if it has one."""
    shown = "" if default in (None, []) else " (default: %(default)s)"
    to.add_argument(name, metavar=metavar, help=f"{text}{shown}", type=type, default=default, **more)


def add_secret_option(parser: argparse._ActionsContainer) -> None:
    """For `kvfold.store.entry.format.read_secret`."""
    add_option(
        parser,
        "--store-secret",
        "FILE",
        "file of 16 to 64 bytes that sign stored entries (default: $KVFOLD_STORE_SECRET, or unsigned)",
    )


def add_json_option(parser: argparse.ArgumentParser, default: Any = False) -> None:
    parser.add_argument("--json", action="store_true", default=default, help="print JSON on stdout, for machines")


def add_model_options(
    parser: argparse.ArgumentParser,
    *,
    memory: str = "--memory",
    needed: bool = True,
    does: str = "counts tokens, and judges where it is asked to",
) -> None:
    """`--model`, `--device`, `--dtype`, `--memory` (or another name for it), `--rope`, `--compile`.

    `does`: what a model that is not `needed` is for.
    """
    group = parser.add_argument_group("model")
    name = "name (see kvfold models), folder or hub id"
    if needed:
        add_option(group, "--model", "MODEL", name, nonempty, DEFAULT_MODEL)
    else:
        add_option(group, "--model", "MODEL", f"{name}; {does}", nonempty)
    add_option(group, "--device", "DEVICE", "auto, cpu, cuda, cuda:1", _device, "auto")
    group.add_argument(
        "--dtype", default="auto", choices=DTYPE_NAMES, help="of weights and KV cache (default: %(default)s)"
    )
    text = "KV-cache memory, e.g. 512MB (default: half the machine's, or 70 %% of the GPU's free memory)"
    add_option(group, memory, "SIZE", text, _memory, dest="memory")
    text = "yarn:4 makes the context window 4 times as long as the trained one (YaRN)"
    add_option(group, "--rope", "SCALING", text, _rope)
    group.add_argument(
        "--compile",
        default="auto",
        choices=_COMPILE,
        help="torch.compile decode steps on CUDA: at once (now), never, or after 512 steps (auto, the default)",
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """What `Session.generate` takes."""
    group = parser.add_argument_group("sampling")
    add_option(group, "--max-new-tokens", "N", "maximum tokens of a reply", positive, max_new_tokens)
    add_option(group, "--temperature", "T", "0 is greedy", float, 0.0)
    add_option(group, "--top-k", "K", "sample from the K most likely tokens; 0: all", count, 0)
    add_option(group, "--top-p", "P", "nucleus sampling: the most likely tokens of total probability P", float, 1.0)
    add_option(group, "--seed", "N", "seed of sampling", seed, 0)
    add_option(group, "--stop", "TEXT", "stop string; may be repeated", nonempty, [], action="append")
    text = f"""speculative decoding by n-gram lookup: draft up to N tokens (without N: {MOST_DRAFTED}) from the text and
        verify them in one pass; off unless given: it pays where answers repeat the text"""
    group.add_argument("--speculate", nargs="?", type=positive, const=True, default=False, metavar="N", help=text)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `Session.generate` and `Session.ask`, checked."""
    from kvfold.engine.sampling import Sampling  # here: help comes without torch

    Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "speculate")
    return {name: getattr(args, name) for name in names}


def load_model(args: argparse.Namespace) -> kvfold.Model:
    """The model the options name; a pull and the load show their progress on stderr."""
    from kvfold.models.attach import check_memory
    from kvfold.models.loader import target_device

    name = args.model or DEFAULT_MODEL
    check_memory(args.memory, target_device(args.device))
    resolve(name)
    how = _COMPILE[args.compile]
    with show.waiting(f"load {name}"):
        return kvfold.load(name, dtype=args.dtype, device=args.device, memory=args.memory, compile=how, rope=args.rope)
