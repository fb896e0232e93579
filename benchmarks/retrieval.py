"""Does an embedder, BM25, or both find the sentence that answers a question, and how fast?

    python -m benchmarks.retrieval xquad.en.json musique_s.json --embedders tfidf potion minilm

Files are SQuAD (documents of eight articles each) or lists of {"question", "answers", "ctxs"} (a document each). All
units of a document, sentences or paragraphs, are ranked by the cosine to the question, by BM25, and by reciprocal-rank
fusion of both, as `rank` does. A question counts as found if a unit that bears its answer is among the first 25 %
(`--top`): the one at the answer's place where a file gives it, else any that has the answer's words. Speed is texts per
second of CPU time on one thread, without the first document of an embedder. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import Row, facts, markdown_table
from kvfold.errors import InputError
from kvfold.shortening.base import Floats
from kvfold.shortening.bm25 import bm25
from kvfold.shortening.embedders.choice import load_embedder
from kvfold.shortening.embedders.codes import cosines
from kvfold.shortening.parts import parts_of
from kvfold.shortening.word_index import WordIndex

_ARTICLES = 8
_METHODS = ("cosine", "bm25", "fused")


@dataclass(frozen=True)
class Question:
    text: str
    answers: frozenset[int]  # units of the document that bear one


@dataclass(frozen=True)
class Document:
    units: tuple[str, ...]
    questions: tuple[Question, ...]


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    rows = []
    for file in options.files:
        for units in options.units:
            documents = read(file, units == "sentences")[: options.limit]
            for name in options.embedders:
                rows += [facts(data=file.stem, units=units, **row) for row in measure(documents, name, options.top)]
                print(f"{file.stem}, {units}, {name}: done", file=sys.stderr, flush=True)
    print(table(rows))
    print(json.dumps(rows))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("retrieval", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="questions with their documents")
    names = ["tfidf", "potion", "minilm"]
    parser.add_argument("--embedders", nargs="+", default=names, metavar="NAME", help=f"default: {' '.join(names)}")
    units = ("sentences", "paragraphs")
    parser.add_argument("--units", nargs="+", default=units, choices=units, help="default: both")
    parser.add_argument(
        "--top", nargs="+", type=float, default=[25.0], metavar="PERCENT", help="of a document (default: 25)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each file (default: all)")
    return parser.parse_args(arguments)


def read(file: Path, by_sentence: bool) -> list[Document]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content, dict) and "data" in content:
        articles = content["data"]
        groups = [articles[low : low + _ARTICLES] for low in range(0, len(articles), _ARTICLES)]
        return [_squad([part for article in group for part in article["paragraphs"]], by_sentence) for group in groups]
    if isinstance(content, list):
        return [_with_contexts(sample, by_sentence) for sample in content]
    raise InputError(f"{file} is neither SQuAD nor a list of questions with ctxs")


def _squad(paragraphs: Sequence[dict[str, Any]], by_sentence: bool) -> Document:
    units: list[str] = []
    questions = []
    for paragraph in paragraphs:
        spans = _spans(paragraph["context"], by_sentence)
        for asked in paragraph["qas"]:
            places = [answer["answer_start"] for answer in asked["answers"]]
            bear = {len(units) + n for n, (low, high) in enumerate(spans) for at in places if low <= at < high}
            questions.append(Question(asked["question"], frozenset(bear)))
        units += [paragraph["context"][low:high] for low, high in spans]
    return Document(tuple(units), tuple(questions))


def _with_contexts(sample: dict[str, Any], by_sentence: bool) -> Document:
    texts = [context["text"] for context in sample["ctxs"]]
    units = [text[low:high] for text in texts for low, high in _spans(text, by_sentence)]
    answers = [_plain(answer) for answer in sample["answers"]]
    bear = {n for n, unit in enumerate(units) if any(f" {answer} " in f" {_plain(unit)} " for answer in answers)}
    return Document(tuple(units), (Question(sample["question"], frozenset(bear)),))


def _spans(text: str, by_sentence: bool) -> list[tuple[int, int]]:
    return [(unit.start, unit.end) for unit in parts_of(text)] if by_sentence else [(0, len(text))]


def _plain(text: str) -> str:
    """Lower-case letters and digits, one blank between words."""
    return " ".join("".join(mark if mark.isalnum() else " " for mark in text.lower()).split())


def measure(documents: Sequence[Document], name: str, tops: Sequence[float]) -> list[Row]:
    """For each share of a document: shares of questions found by each method, and texts per CPU second."""
    found: dict[float, list[tuple[bool, ...]]] = {percent: [] for percent in tops}
    num_texts, seconds = 0, 0.0
    for number, document in enumerate(documents):
        embedder, index = load_embedder(name), WordIndex.of(document.units)
        began = time.process_time()
        codes = embedder.codes(document.units)
        if number:
            num_texts += len(document.units)
            seconds += time.process_time() - began
        for question in (question for question in document.questions if question.answers):
            by_vector = np.maximum(cosines(codes, embedder.codes([question.text]))[:, 0], 0.0)
            by_words = bm25(index, question.text)
            scores = (by_vector, by_words, reciprocal_ranks([by_words, by_vector]))
            for percent, hits in found.items():
                hits.append(tuple(bears_answer(score, percent, question) for score in scores))
    num_units = sum(len(document.units) for document in documents) / max(1, len(documents))
    speed = num_texts / seconds if seconds else None
    told = {"embedder": name, "num_units": num_units, "texts_per_s": speed}
    return [told | {"top": percent} | counts(hits) for percent, hits in found.items()]


def reciprocal_ranks(scores: Sequence[Floats], k: int = 60) -> Floats:
    """Reciprocal-rank fusion: the sum of 1 / (k + rank) over several scores; texts that score alike rank alike."""
    total = np.zeros(len(scores[0]))
    for score in scores:
        ordered = np.sort(-np.round(score, 9))
        total += 1.0 / (k + 1 + np.searchsorted(ordered, -np.round(score, 9)))
    return total


def bears_answer(score: Floats, percent: float, question: Question) -> bool:
    """Whether an answer is in the first units by score; of equal ones the earlier come first."""
    ordered = np.argsort(-np.round(score, 9), kind="stable")[: math.ceil(len(score) * percent / 100)]
    return not question.answers.isdisjoint(ordered.tolist())


def counts(hits: Sequence[tuple[bool, ...]]) -> Row:
    """Shares of questions by method, and how many only one of BM25 and the fusion finds."""
    hits_QM = np.array(hits).reshape(-1, len(_METHODS))
    shares = dict(zip(_METHODS, hits_QM.mean(0).tolist(), strict=True))
    _, by_words, fused = hits_QM.T
    gained, lost = int((fused & ~by_words).sum()), int((by_words & ~fused).sum())
    return {"questions": len(hits_QM), **shares, "gained": gained, "lost": lost}


def table(rows: Sequence[Row]) -> str:
    headings = (
        *("data", "units", "a document", "questions", "top", "embedder", "cosine", "BM25", "fused"),
        *("found by fusion, not BM25", "by BM25, not fusion", "texts/s"),
    )
    return markdown_table(headings, map(_cells, rows))


def _cells(row: Row) -> list[str]:
    speed = "-" if row["texts_per_s"] is None else f"{row['texts_per_s']:,.0f}"
    where = [row["data"], row["units"], f"{row['num_units']:.0f}", str(row["questions"]), f"{row['top']:g} %"]
    shares = [f"{100 * row[method]:.1f} %" for method in _METHODS]
    return [*where, row["embedder"], *shares, str(row["gained"]), str(row["lost"]), speed]


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
