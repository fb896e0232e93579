"""Documents: what is needed stays and is numbered rightly, and answers and citations are scored apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvfold.bench.workloads import Sample, Setting, find
from kvfold.bench.workloads.rag import Rag, answer_f1, citation_f1
from kvfold.errors import InputError
from tests.bench.workloads.given_rows import musique, musique_row, passages, write_lines
from tests.bench.workloads.tokens import setting

SAMPLE = Sample("musique", 0, "", "", ("Blue Whale", "whale"), 8, facts={"needed": (2, 7)})


def documents(sample: Sample) -> dict[int, str]:
    found = re.findall(r"^Document \[(\d+)\]: (.*)$", sample.context, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return {int(number): text for number, text in found}


def needed(sample: Sample) -> tuple[int, ...]:
    found = sample.facts["needed"]
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize(
    ("reply", "answer", "citations"),
    [
        ("blue whale [2] [7]", 1, 1),
        ("The whale [7, 2].", 1, 1),
        ("blue whale [2]\n[7] because", 1, 1),
        ("blue whale", 1, 0),
        ("blue whale [2] [2] [2]", 1, 2 / 3),  # each document counts once
        ("blue whale [1] [2] [3] [7]", 1, 2 / 3),
        ("grey whale [5]", 2 / 3, 0),
        ("[2] [7]", 0, 1),
        ("blue 2 7", 2 / 5, 0),
        ("", 0, 0),
    ],
)
def test_answer_and_citations_are_scored_apart(reply: str, answer: float, citations: float) -> None:
    assert answer_f1(SAMPLE, reply) == pytest.approx(answer)
    assert citation_f1(SAMPLE, reply) == pytest.approx(citations)
    assert Rag().score(SAMPLE, reply) == pytest.approx((answer + citations) / 2)


@pytest.mark.parametrize("index", range(4))
def test_two_planted_documents_lead_to_the_answer(index: int) -> None:
    sample = Rag().sample(setting(1500), "planted", index)
    (thing,) = re.findall(r"maker of the (\S+) work", sample.question)
    first, second = (documents(sample)[number] for number in needed(sample))
    (maker,) = re.findall(rf"The {thing} was made by (\w+)\.", first + second)
    works = f"{maker} works in room {sample.answers[0]}."
    assert (thing in first, works in second) in ((True, True), (False, False)) and works in first + second
    assert sample.context.count(" was made by ") == sample.context.count(" works in room ") == 4


def test_each_planted_sentence_has_a_document_of_its_own() -> None:
    for index in range(6):
        texts = documents(Rag().sample(setting(900), "planted", index)).values()
        assert sorted(text.count(" was made by ") + text.count(" works in room ") for text in texts)[-8:] == [1] * 8


@pytest.mark.parametrize("length", (600, 2000, 5000))
def test_needed_paragraphs_stay_whatever_the_length(tmp_path: Path, length: int) -> None:
    workload = find("rag", musique=musique(tmp_path / "m.jsonl"))
    for sample in workload.samples(setting(length), 5, ["musique"]):
        (row,) = re.findall(r"Who is (\d+)\?", sample.question)
        wanted = {
            f"{each['title']}. {each['paragraph_text']}"
            for each in musique_row(int(row))["paragraphs"]
            if each["is_supporting"]
        }
        assert {documents(sample)[number] for number in needed(sample)} == wanted
        assert len(set(documents(sample).values())) == sample.facts["documents"]
        assert sample.answers == (f"Name {row}", f"Alias {row}")


def test_own_paragraphs_come_before_those_of_others(tmp_path: Path) -> None:
    workload = find("rag", musique=musique(tmp_path / "m.jsonl"))
    for length, only_own in ((1200, True), (6000, False)):
        sample = workload.sample(setting(length), "musique", 0)
        (row,) = re.findall(r"Who is (\d+)\?", sample.question)
        own = [text.startswith(f"Title {row}/") for text in documents(sample).values()]
        assert all(own) == only_own and (only_own or sum(own) == 20)


def test_unanswerable_questions_are_left_out(tmp_path: Path) -> None:
    workload = Rag(musique=musique(tmp_path / "m.jsonl", num_rows=3))
    assert len(list(workload.samples(setting(1200), 9, ["musique"]))) == 3


def test_passages_all_stay_and_the_answer_alone_is_scored(tmp_path: Path) -> None:
    workload = Rag(passages=passages(tmp_path / "p.json"))
    sample = workload.sample(setting(1500), "passages", 0)
    assert "square brackets" not in sample.question and needed(sample) == ()
    assert workload.score(sample, sample.answers[0]) == 1
    with pytest.raises(InputError, match="too short for passages"):
        workload.sample(setting(100), "passages", 0)


def test_needed_places_are_spread(tmp_path: Path) -> None:
    """No half of the documents is favoured."""
    by_words = Setting(700, 0, lambda text: len(text.split()))
    for task, samples in (
        ("planted", Rag().samples(by_words, 60, ["planted"])),
        ("musique", Rag(musique=musique(tmp_path / "m", num_rows=60)).samples(by_words, 60, ["musique"])),
    ):
        places = [(number - 0.5) / len(documents(sample)) for sample in samples for number in needed(sample)]
        assert 0.42 < sum(places) / len(places) < 0.58, task


def test_files_are_asked_for_and_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="task musique of workload rag needs musique=FILE"):
        Rag().sample(Setting(100, 0, len), "musique", 0)
    write_lines(tmp_path / "rows", [{"question": "Who?", "answer": "I"}])
    with pytest.raises(InputError, match='row of musique has no "paragraphs"'):
        Rag(musique=tmp_path / "rows").sample(Setting(100, 0, len), "musique", 0)


@pytest.mark.parametrize(("task", "num_documents"), [("planted_0", 2), ("planted_50", 4), ("planted_90", 20)])
def test_a_share_of_the_documents_are_distractors(task: str, num_documents: int) -> None:
    for index in range(4):
        sample = Rag().sample(setting(1500), task, index)
        found, right = documents(sample), needed(sample)
        assert len(found) == num_documents and len(set(right)) == 2
        assert sample.facts["distractors"] == pytest.approx(1 - 2 / num_documents)
        assert f"works in room {sample.answers[0]}." in "".join(found[number] for number in right)
        others = "".join(text for number, text in found.items() if number not in right)
        assert others.count(" works in room ") == others.count(" was made by ") == (3 if num_documents > 2 else 0)
