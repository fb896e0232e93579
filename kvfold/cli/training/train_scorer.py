"""`kvfold train-scorer`: train the score `learned` for a model, in minutes, and evaluate it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.cli import show
from kvfold.cli.options import Subparsers, add_option, check_out, load_model, positive
from kvfold.cli.training.calibration_data import add_reading_parser, reading
from kvfold.errors import InputError
from kvfold.policy.size import bytes_text

if TYPE_CHECKING:
    import kvfold
    from kvfold.train.scorer import Trained, TrainingConfig

_EPILOG = """examples:
  kvfold train-scorer --model smollm2-135m --out smollm2.safetensors
  kvfold train-scorer --model qwen2.5-coder-1.5b --texts 64 --length 2048 --out qwen.safetensors
  kvfold train-scorer --labels labels.safetensors --out smollm2.safetensors
  kvfold run --context notes.txt --ask "Who wrote this?" --policy 'learned(file="smollm2.safetensors") + global + 4x'
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_reading_parser(
        subparsers,
        "train-scorer",
        run,
        writes="the networks are",
        texts=20,
        length=512,
        help="train the score `learned` for a model",
        description="Score texts with a teacher that replays the prompt, and train small networks that predict its "
        "scores from a slot's key and value; evaluate them on held-out texts.",
        epilog=_EPILOG,
    )
    text = "a replay score: kvzip or kvzip_plus (default: kvzip; with --labels kvzip(surprise=2))"
    add_option(parser, "--teacher", "SCORE", text)
    text = "file of kvfold label: train on its texts, and count queries by its surprise at the token they repeat"
    add_option(parser, "--labels", "FILE", text, Path)
    add_option(parser, "--steps", "N", "training steps", positive, 400)
    add_option(parser, "--hidden", "N", "hidden units per head", positive, 64)


def run(args: argparse.Namespace) -> int:
    """Train, write, tell."""
    from kvfold.score.predictor import save_predictor  # here and below: help comes without torch
    from kvfold.train.label_surprise import DEFAULT_TEACHER
    from kvfold.train.scorer import TrainingConfig, train_scorer
    from kvfold.train.traces import TEACHER, teacher_policy

    teacher = args.teacher or (TEACHER if args.labels is None else DEFAULT_TEACHER)
    teacher_policy(teacher)
    config = TrainingConfig(steps=args.steps, hidden=args.hidden, seed=args.seed)
    if args.labels is None:
        with reading(args) as (model, texts, report):
            trained = train_scorer(model, texts, config, report, teacher=teacher)
    else:
        model, trained = _train_on_labels(args, config, teacher)
    save_predictor(trained.predictor, args.out)
    _tell(args, model, trained)
    return 0


def _train_on_labels(args: argparse.Namespace, config: TrainingConfig, teacher: str) -> tuple[kvfold.Model, Trained]:
    from kvfold.models.pull.progress import reporting
    from kvfold.train.label_format import read_labels
    from kvfold.train.label_surprise import labelled_texts
    from kvfold.train.scorer import train_scorer

    if args.text:
        raise InputError("--labels brings its own texts; leave --text out")
    check_out(args.out, args.labels)
    labels = read_labels(args.labels)
    model = load_model(args)
    ids, surprises = zip(*labelled_texts(labels, model.tokenizer, args.texts, args.length), strict=True)
    with reporting(True) as report:
        return model, train_scorer(model, ids, config, report, teacher=teacher, surprises=surprises)


def _tell(args: argparse.Namespace, model: kvfold.Model, trained: Trained) -> None:
    rows, num_bytes = trained.qualities, args.out.stat().st_size
    if args.json:
        found = {"file": str(args.out), "bytes": num_bytes, "weights": trained.predictor.weights}
        show.print_json(found | {"layers": [asdict(row) for row in rows]})
        return
    table = show.Table(numbers=("layer", "R²", "rank correlation"))
    for row in rows:
        table.add(str(row.layer), f"{row.explained:.2f}", f"{row.rank:.2f}")
    count = len(rows)
    means = sum(row.explained for row in rows) / count, sum(row.rank for row in rows) / count
    table.add("mean", *(f"{mean:.2f}" for mean in means))
    table.print()
    print(f"\n{args.out}, {bytes_text(num_bytes)}, for {model.name}; measured on held-out texts")
