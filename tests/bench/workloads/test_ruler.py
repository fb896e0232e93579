"""RULER's tasks have its parameters: which needles, how often words occur, which documents come first."""

from __future__ import annotations

import re
from collections import Counter
from math import pi
from pathlib import Path

import pytest

from kvfold.bench.workloads import Sample, Workload, find
from kvfold.errors import InputError
from tests.bench.workloads.given import hotpot, squad
from tests.bench.workloads.tokens import setting

NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
WORD, NUMBER = r"[a-z]+-[a-z]+", r"[1-9][0-9]{6}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def sample_of(task: str, index: int = 0, length: int = 2048) -> Sample:
    return find("ruler").sample(setting(length), task, index)


@pytest.mark.parametrize(
    ("task", "needles", "keys", "answers", "key", "value"),
    [
        ("niah_single_1", 1, 1, 1, WORD, NUMBER),
        ("niah_single_2", 1, 1, 1, WORD, NUMBER),
        ("niah_single_3", 1, 1, 1, WORD, UUID),
        ("niah_multikey_1", 4, 4, 1, WORD, NUMBER),
        ("niah_multikey_2", None, None, 1, WORD, NUMBER),
        ("niah_multikey_3", None, None, 1, UUID, UUID),
        ("niah_multivalue", 4, 1, 4, WORD, NUMBER),
        ("niah_multiquery", 4, 4, 4, WORD, NUMBER),
    ],
)
def test_needles(task: str, needles: int | None, keys: int | None, answers: int, key: str, value: str) -> None:
    """`None`: the whole text is needles, of different keys."""
    sample = sample_of(task)
    found = NEEDLE.findall(sample.context)
    assert all(re.fullmatch(key, name) and re.fullmatch(value, held) for _, name, held in found)
    assert len(found) == (needles or sample.context.count("\n"))
    assert len({name for _, name, _ in found}) == (keys or len(found))
    asked = sample.question.split(" for ")[1].split(" mentioned")[0].replace(", and ", ", ").split(", ")
    assert {held for _, name, held in found if name in asked} == set(sample.answers)
    assert len(sample.answers) == answers and sample.max_new_tokens == 128


def test_wording_is_singular_for_one_answer() -> None:
    one, many = sample_of("niah_multikey_1"), sample_of("niah_multivalue")
    assert one.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
    )
    assert many.context.startswith("Some special magic numbers are hidden within the following text.")
    assert re.fullmatch(r"\nWhat is the special magic number for \S+ mentioned in the provided text\?", one.question)
    assert re.fullmatch(r"\nWhat are all the special magic numbers for \S+ mentioned .*\?", many.question)
    assert one.reply_prefix.endswith(" text is") and many.reply_prefix.endswith(" text are")


def test_depths_of_needles_are_even_over_samples() -> None:
    """Prose: forty even steps from the first sentence to the last; lines: anywhere."""
    for task, steps in (("niah_single_2", 39), ("niah_single_1", 100)):
        found = [sample.facts["depth"] for sample in find("ruler").samples(setting(384), 200, [task])]
        assert set(found) <= {round(step / steps, 2) for step in range(steps + 1)}
        quarters = Counter(min(3, int(4 * depth)) for depth in found if isinstance(depth, float))
        assert all(30 <= quarters[quarter] <= 70 for quarter in range(4))


def test_variables_form_one_chain_in_order_after_one_example() -> None:
    sample = sample_of("vt")
    example, text = sample.context.split("they are: ")
    chain = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", text, re.MULTILINE)
    value = sample.question.split("the value ")[1].split(" ")[0]
    assert tuple(name for name, _ in chain) == sample.answers and len(set(sample.answers)) == 5
    assert [source for _, source in chain] == [value, *sample.answers[:-1]]
    assert len(re.findall(r"^VAR [A-Z]{3} = ", example, re.MULTILINE)) == 5
    solved = text.split("\n")[0].split(" ")
    assert solved == re.findall(r"^VAR ([A-Z]{3}) = ", example, re.MULTILINE)
    assert sample.max_new_tokens == 30 and f"5 variables are assigned the value {value}" in sample.reply_prefix


@pytest.mark.parametrize(("length", "common", "other"), [(2048, 6, 1), (8192, 30, 3)])
def test_common_words_occur_as_often_as_they_should(length: int, common: int, other: int) -> None:
    sample = sample_of("cwe", length=length)
    listed = sample.context.rsplit("most often.\n", 1)[1]
    counts = Counter(re.findall(r"\d+\. (\S+)", listed))
    assert counts.most_common(1)[0][1] == common and set(counts.values()) == {common, other}
    assert {word for word, count in counts.items() if count == common} == set(sample.answers)
    assert len(sample.answers) == 10 and len(counts) == sample.facts["words"] and sample.max_new_tokens == 120


@pytest.mark.parametrize(("length", "common", "other", "num"), [(2048, 3, 1, 20), (8192, 10, 3, 40)])
def test_common_words_are_shown_once(length: int, common: int, other: int, num: int) -> None:
    example = sample_of("cwe", length=length).context.split("most often.\n")[1]
    listed, solved = example.split("\nQuestion: ")
    counts = Counter(re.findall(r"\d+\. (\S+)", listed))
    assert len(counts) == num and set(counts.values()) == {common, other}
    answers = re.findall(r"\d+\. (\S+)", solved)
    assert {word for word, count in counts.items() if count == common} == set(answers) and len(answers) == 10


def test_coded_words_follow_the_zeta_distribution() -> None:
    sample = sample_of("fwe", length=4096)
    counts = Counter(sample.context.split("coded words. ")[1].split(" "))
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked[0] == "..." and tuple(ranked[1:]) == sample.answers
    assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")
    assert len(counts) <= 4096 // 50 and sample.max_new_tokens == 50
    total = counts["..."] * pi**2 / 6
    for rank, word in enumerate(ranked, 1):
        assert counts[word] == pytest.approx(total * rank**-2 * 6 / pi**2, abs=1)


def test_the_shortest_coded_text_has_one_answer() -> None:
    sample = sample_of("fwe", length=340)
    counts = Counter(sample.context.split("coded words. ")[1].split(" ")).most_common()
    assert counts[3][1] > counts[4][1]


@pytest.fixture
def answering(tmp_path: Path) -> Workload:
    return find("ruler", squad=squad(tmp_path / "squad.json"), hotpot=hotpot(tmp_path / "hotpot.json"))


def test_squad_documents_of_the_same_article_come_first(answering: Workload) -> None:
    sample = answering.sample(setting(1024), "qa_1", 0)
    article = re.findall(r"What of (\d+)/(\d+)\?", sample.question)[0]
    found = re.findall(r"Document (\d+):\nParagraph (\d+)/(\d+)\.", sample.context)
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1))
    assert article in {(of, i) for _, of, i in found} and {of for _, of, _ in found} == {article[0]}
    assert len(found) == sample.facts["documents"] and sample.max_new_tokens == 32
    longer = answering.sample(setting(4096), "qa_1", 0)
    assert len(set(re.findall(r"Paragraph (\d+)/", longer.context))) > 1
    assert len(set(re.findall(r"Paragraph (\d+/\d+)", longer.context))) == longer.facts["documents"]


def test_squad_answers_are_alternatives(answering: Workload) -> None:
    sample = answering.sample(setting(1024), "qa_1", 3)
    first, second = sample.answers
    assert first.startswith("Answer ") and answering.score(sample, second.upper()) == 1
    assert answering.score(sample, first[:-1]) == 0


def test_questions_come_once_each_and_not_the_impossible_ones(answering: Workload) -> None:
    asked = [sample.question for sample in answering.samples(setting(512), 72, ["qa_1"])]
    assert len(set(asked)) == 72 and not any("nothing" in question for question in asked)


def test_hotpot_documents_hold_their_titles(answering: Workload) -> None:
    sample = answering.sample(setting(1024), "qa_2", 0)
    number = sample.answers[0].removeprefix("Number ")
    titles = re.findall(r"Document \d+:\nTitle (\S+)\n", sample.context)
    assert {f"{number}/0", f"{number}/1", "0"} <= set(titles) and len(set(titles)) == len(titles)


def test_files_that_are_missing_or_foreign_are_refused(tmp_path: Path) -> None:
    for task, option, kind in (("qa_1", "squad", "SQuAD"), ("qa_2", "hotpot", "HotpotQA")):
        with pytest.raises(InputError, match=f"task {task} of workload ruler needs {option}=FILE, .* {kind}'s format"):
            find("ruler").sample(setting(), task, 0)
        with pytest.raises(InputError, match="cannot be read: No such file"):
            find("ruler", **{option: tmp_path / "missing"}).sample(setting(), task, 0)
        foreign = tmp_path / option
        for content in ("not JSON", '{"data": 3}', "[1, 2]", '{"data": [{}]}'):
            foreign.write_text(content)
            with pytest.raises(InputError, match=f"is no file in {kind}'s format"):
                find("ruler", **{option: foreign}).sample(setting(), task, 0)
            foreign = tmp_path / f"{option}{len(content)}"
    empty = tmp_path / "empty"
    empty.write_text('{"data": []}')
    with pytest.raises(InputError, match="holds no question"):
        find("ruler", squad=empty).sample(setting(), "qa_1", 0)


def test_a_file_of_few_documents_is_refused_rather_than_repeated(tmp_path: Path) -> None:
    few = squad(tmp_path / "squad.json", num_articles=1, num_paragraphs=3)
    with pytest.raises(InputError, match=r"4096 tokens are too long for qa_1; what was given is enough for \d+"):
        find("ruler", squad=few).sample(setting(4096), "qa_1", 0)


def test_only_questions_are_scored_by_any_answer(answering: Workload) -> None:
    two = Sample("niah_multivalue", 0, "", "", ("11", "22"), 1)
    assert answering.score(two, "22") == 0.5
    assert answering.score(Sample("qa_2", 0, "", "", ("11", "22"), 1), "22") == 1
