"""Options that several commands share: which model and where, how to sample, and what they say of bad values.

Nothing here or in the commands imports torch before the arguments are parsed, so that help comes at once.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypeAlias

import kvfold
from kvfold.engine.speculate import MOST_DRAFTED
from kvfold.models.pull.catalogue import DEFAULT_MODEL, DTYPE_NAMES

if TYPE_CHECKING:
    from kvfold.core import Compile

_COMPILE: dict[str, Compile] = {"auto": "auto", "now": True, "never": False}
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_secret_option(parser: argparse._ActionsContainer) -> None:
    """For `kvfold.store.entry.signing.read_secret`."""
    parser.add_argument(
        "--store-secret",
        metavar="FILE",
        help="file with the secret that stored entries are signed with, 16 to 64 bytes; default: the variable "
        "KVFOLD_STORE_SECRET, else none",
    )


def add_model_options(parser: argparse.ArgumentParser, *, memory: str = "--memory") -> None:
    """`--model`, `--device`, `--dtype`, `--memory` (or another name for it), `--compile`."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=DEFAULT_MODEL, help="catalogue name, folder or hub id (default: %(default)s)")
    group.add_argument("--device", default="auto", type=_device, help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    group.add_argument("--dtype", default="auto", choices=DTYPE_NAMES, help=f"one of {', '.join(DTYPE_NAMES)}")
    group.add_argument(
        memory, dest="memory", metavar="SIZE", help="most memory for caches, e.g. 512MB; default: half the machine's"
    )
    group.add_argument(
        "--compile",
        default="auto",
        choices=_COMPILE,
        help="compile decode steps on a GPU: at once (now), never, or after some hundred steps (auto, the default)",
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """What `Session.generate` takes."""
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, the default")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K best tokens; 0: all")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the best tokens of mass P")
    group.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    group.add_argument(
        "--speculate",
        nargs="?",
        type=int,
        const=True,
        default=False,
        metavar="N",
        help=f"draft up to N tokens (default: {MOST_DRAFTED}) by lookup in the text, verify them in one pass; off "
        "unless given: it pays where answers repeat the text",
    )


def load_model(args: argparse.Namespace) -> kvfold.Model:
    """The model the options name; a pull shows its progress on stderr."""
    how = _COMPILE[args.compile]
    return kvfold.load(args.model, dtype=args.dtype, device=args.device, memory=args.memory, compile=how)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `Session.generate` and `Session.ask`."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "speculate")
    return {name: getattr(args, name) for name in names}


def _device(text: str) -> str:
    if text == "auto":
        return text
    import torch  # here: a command line without a device is read without it

    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f'no device "{text}"; write auto, cpu, cuda or cuda:1') from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f'"{text}" is not here: torch sees {torch.cuda.device_count()} CUDA devices')
    return text
