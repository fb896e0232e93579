"""Small files in the formats of LongBench, MuSiQue and passages, made of the project's own prose."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from kvfold.bench.haystack import prose
from kvfold.bench.workloads.longbench import EVEN, TASKS

CLASSES = ("Food", "Date", "Order, rank", "Date of birth")
_ANSWERS = {
    "passage_retrieval_en": "Paragraph {i}",
    "passage_retrieval_zh": "段落{i}",
    "passage_count": "{i}",
    "lcc": "    total = total + {i}",
    "repobench-p": "    return self.value[{i}]",
    "trec": "Date",
    "lsht": "Date",
}


def text(random: Random, num_sentences: int) -> str:
    return " ".join(islice(prose(random), num_sentences))


def longbench(folder: Path, *, num_rows: int = 12) -> Path:
    """Every task of LongBench and LongBench-E, and v2; contexts of one to thirty sentences."""
    for task in [*(task for task in TASKS if task != "v2"), *(f"{task}_e" for task in EVEN)]:
        write_lines(folder / f"{task}.jsonl", (longbench_row(task, i) for i in range(num_rows)))
    rows = [v2_row(i) for i in range(num_rows)]
    (folder / "data.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder


def longbench_row(task: str, i: int) -> dict[str, Any]:
    random, base = Random(f"{task}/{i}"), task.removesuffix("_e")
    classes = list(CLASSES) if base in ("trec", "lsht") else None
    answer = _ANSWERS.get(base, "The answer {i} of " + next(prose(random))).format(i=i)
    return {
        "input": f"What of {i}?",
        "context": f"{i}: " + text(random, 1 + 3 * i),
        "answers": [answer],
        "length": 1500 * i,
        "dataset": task,
        "language": "en",
        "all_classes": classes,
        "_id": f"{task}-{i}",
    }


def v2_row(i: int) -> dict[str, str]:
    choices = {f"choice_{letter}": f"{letter} of {i}" for letter in "ABCD"}
    facts = {"_id": f"v2-{i}", "domain": "Own", "difficulty": "easy", "length": "short"}
    return {**facts, **choices, "question": f"Which {i}?", "answer": "ABCD"[i % 4], "context": text(Random(i), 3 + i)}


def musique(path: Path, *, num_rows: int = 14) -> Path:
    """Twenty paragraphs a row, of which two are needed; the last row has no answer."""
    rows = [musique_row(i) for i in range(num_rows)] + [{**musique_row(num_rows), "answerable": False}]
    write_lines(path, rows)
    return path


def musique_row(i: int) -> dict[str, Any]:
    random = Random(i)
    needed = random.sample(range(20), 2)
    paragraphs = [
        {"idx": j, "title": f"Title {i}/{j}", "paragraph_text": text(random, 4), "is_supporting": j in needed}
        for j in range(20)
    ]
    steps = [{"id": 1, "question": "a", "answer": "b"}, {"id": 2, "question": "c", "answer": "d"}]
    answer = {"answer": f"Name {i}", "answer_aliases": [f"Alias {i}"], "answerable": True}
    return {
        "id": f"2hop__{i}",
        "question": f"Who is {i}?",
        "paragraphs": paragraphs,
        "question_decomposition": steps,
        **answer,
    }


def passages(path: Path, *, num_rows: int = 30) -> Path:
    """Three passages a row, without titles."""
    random = Random(3)
    rows = [
        {
            "question": f"Who is {i}?",
            "answers": [f"Name {i}"],
            "ctxs": [{"title": "", "text": text(random, 5)} for _ in "abc"],
        }
        for i in range(num_rows)
    ]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
