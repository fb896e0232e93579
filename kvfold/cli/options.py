"""Options that several commands share: model, device, KV-cache memory, sampling.

No command imports torch before its arguments are parsed, so that --help is fast.
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
        help="file with the secret that signs stored entries, 16 to 64 bytes; default: the environment variable "
        "KVFOLD_STORE_SECRET, else none",
    )


def add_model_options(parser: argparse.ArgumentParser, *, memory: str = "--memory") -> None:
    """`--model`, `--device`, `--dtype`, `--memory` (or another name for it), `--compile`."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=DEFAULT_MODEL, help="catalogue name, folder or hub id (default: %(default)s)")
    group.add_argument("--device", default="auto", type=_device, help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    group.add_argument("--dtype", default="auto", choices=DTYPE_NAMES, help=f"one of {', '.join(DTYPE_NAMES)}")
    group.add_argument(
        memory,
        dest="memory",
        metavar="SIZE",
        help="KV-cache memory, e.g. 512MB; default: half the machine's, or 70 %% of the GPU's free memory",
    )
    group.add_argument(
        "--compile",
        default="auto",
        choices=_COMPILE,
        help="torch.compile decode steps on CUDA: at once (now), never, or after 512 steps (auto, the default)",
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """What `Session.generate` takes."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help="maximum tokens of a reply (default: %(default)s)",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, the default")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens; 0: all")
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="nucleus sampling: the most likely tokens of total probability P",
    )
    group.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    group.add_argument(
        "--speculate",
        nargs="?",
        type=int,
        const=True,
        default=False,
        metavar="N",
        help=f"speculative decoding by n-gram lookup: draft up to N tokens (default: {MOST_DRAFTED}) from the text and "
        "verify them in one pass; off unless given: it pays where answers repeat the text",
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
