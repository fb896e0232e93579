"""Options of commands that read texts to measure a model or to train on, and the texts they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import kvfold


def add_text_options(parser: argparse.ArgumentParser, *, texts: int, length: int) -> None:
    """`texts` and `length` are the defaults."""
    parser.add_argument(
        "--text", type=Path, action="append", metavar="FILE", help="text to read; may be repeated (default: own)"
    )
    parser.add_argument("--texts", type=positive, default=texts, metavar="N", help="texts read (default: %(default)s)")
    parser.add_argument(
        "--length", type=positive, default=length, metavar="N", help="tokens of each (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def read_texts(args: argparse.Namespace, model: kvfold.Model) -> list[list[int]]:
    """Token ids of the files, or of text of the project's own."""
    from kvfold.train.texts import file_texts, own_texts  # here: help comes without torch

    if args.text:
        return list(file_texts(model.tokenizer, args.text, args.texts, args.length))
    return list(own_texts(model.tokenizer, args.texts, args.length, args.seed))


def positive(text: str) -> int:
    """A count, as an argument."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no count; write a whole number from 1 on')
    return int(text)
