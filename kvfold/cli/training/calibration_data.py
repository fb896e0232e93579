"""Options of commands that run calibration texts and write a file: calibrate, profile, train-scorer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfold.cli.options import (
    Subparsers,
    add_json_option,
    add_model_options,
    add_option,
    check_out,
    load_model,
    positive,
    seed,
)

if TYPE_CHECKING:
    import kvfold
    from kvfold.models.pull.progress import Report


class Reading(NamedTuple):
    model: kvfold.Model
    texts: list[list[int]]  # token ids
    report: Report


def add_reading_parser(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    writes: str,
    texts: int,
    length: int,
    **about: Any,
) -> argparse.ArgumentParser:
    """The shared options; `texts` and `length` are defaults."""
    parser = subparsers.add_parser(name, **about)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=f"file that {writes} written to")
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="FILE",
        help="calibration text; may be repeated (default: generated)",
    )
    add_option(parser, "--texts", "N", "number of texts", positive, texts)
    add_option(parser, "--length", "N", "tokens per text", positive, length)
    add_option(parser, "--seed", "N", "seed of generated texts", seed, 0)
    add_json_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)
    return parser


@contextmanager
def reading(args: argparse.Namespace) -> Iterator[Reading]:
    """The model and texts of the options, and a progress reporter."""
    from kvfold.bench.haystack import read_text  # here: help comes without torch
    from kvfold.models.pull.progress import reporting

    check_out(args.out, *(args.text or ()))
    for path in args.text or ():
        read_text(path)
    model = load_model(args)
    texts = _read_texts(args, model)
    with reporting(True) as report:
        yield Reading(model, texts, report)


def _read_texts(args: argparse.Namespace, model: kvfold.Model) -> list[list[int]]:
    """Token ids of the files, or of generated text."""
    from kvfold.train.calibration_data import file_texts, own_texts  # here: help comes without torch

    if args.text:
        return list(file_texts(model.tokenizer, args.text, args.texts, args.length))
    return list(own_texts(model.tokenizer, args.texts, args.length, args.seed))
