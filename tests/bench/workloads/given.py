"""Small files in the formats that workloads read, so that every task of every workload can run."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from kvfold.bench.haystack import prose
from tests.bench.workloads.given_rows import longbench, musique, passages


def squad(path: Path, *, num_articles: int = 6, num_paragraphs: int = 12) -> Path:
    """Each paragraph has one question with two answers, and one that cannot be answered."""
    random = Random(1)
    articles = [_article(article, num_paragraphs, random) for article in range(num_articles)]
    path.write_text(json.dumps({"data": articles}), encoding="utf-8")
    return path


def _article(article: int, num_paragraphs: int, random: Random) -> dict[str, Any]:
    paragraphs = []
    for i in range(num_paragraphs):
        text = " ".join(islice(prose(random), 6))
        answers = [
            {"text": f"Answer {article}/{i}"},
            {"text": f"reply {article}/{i}"},
            {"text": f"Answer {article}/{i}"},
        ]
        asked = {"question": f"What of {article}/{i}?", "answers": answers, "is_impossible": False}
        nothing = {"question": f"What of nothing in {article}/{i}?", "answers": [], "is_impossible": True}
        paragraphs.append({"context": f"Paragraph {article}/{i}. {text}", "qas": [asked, nothing]})
    return {"paragraphs": paragraphs}


def hotpot(path: Path, *, num_questions: int = 30) -> Path:
    """Each question has two documents of its own, and the first one of the file too."""
    random, found = Random(2), []
    for i in range(num_questions):
        own = [[f"Title {i}/{j}", [f"{sentence} " for sentence in islice(prose(random), 4)]] for j in range(2)]
        shared = [["Title 0", ["The first one.", " It is in all."]]]
        found.append({"question": f"Who is {i}?", "answer": f"Number {i}", "context": own + shared})
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def options(name: str, folder: Path) -> dict[str, Any]:
    """What makes every task of a workload ready."""
    if name == "ruler":
        return {"squad": squad(folder / "squad.json"), "hotpot": hotpot(folder / "hotpot.json")}
    if name == "longbench":
        return {"folder": longbench(folder)}
    if name == "rag":
        return {"musique": musique(folder / "musique.jsonl"), "passages": passages(folder / "passages.json")}
    return {}
