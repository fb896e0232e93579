"""LongBench: where files are found, how prompts are put together and cut, and how replies are scored."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvfold.bench.workloads import Sample, Setting, find
from kvfold.bench.workloads.longbench import EVEN, TASKS, LongBench, shorten
from kvfold.errors import InputError, MissingExtra
from tests.bench.workloads.given_rows import longbench, longbench_row, v2_row, write_lines

SETTING = Setting(100_000, 0, len)


def one(folder: Path, task: str, **changes: Any) -> Sample:
    """The only sample of a task whose file holds one row."""
    write_lines(folder / f"{task}.jsonl", [{**longbench_row(task, 3), **changes}])
    return LongBench(folder).sample(SETTING, task, 0)


def test_there_are_21_tasks_13_of_them_at_even_lengths_and_v2() -> None:
    assert len(TASKS) == 22 and len(EVEN) == 13 and set(EVEN) < set(TASKS)
    assert len(LongBench.tasks) == 21 + 13 + 1
    for task in TASKS.values():
        assert task.prompt.count("{context}") == 1 and task.prompt.count("{input}") <= 1


def test_tasks_without_a_file_are_refused_by_the_name_it_should_have(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"hotpotqa_e of workload longbench needs folder=FOLDER.*hotpotqa_e.jsonl"):
        LongBench(tmp_path).sample(SETTING, "hotpotqa_e", 0)
    with pytest.raises(InputError, match="two sources, folder=x and hub=a/b; give one"):
        LongBench(Path("x"), "a/b")
    assert LongBench().ready == ()


def test_every_task_of_a_full_folder_is_ready(tmp_path: Path) -> None:
    chinese = set() if find_spec("jieba") else {"multifieldqa_zh", "dureader", "vcsum"}
    assert set(LongBench(longbench(tmp_path)).ready) == set(LongBench.tasks) - chinese


def test_rows_of_the_even_set_are_known_by_what_they_say(tmp_path: Path) -> None:
    write_lines(tmp_path / "qasper.jsonl", [longbench_row("qasper_e", 3)])
    write_lines(tmp_path / "trec.jsonl", [longbench_row("trec", 3)])
    assert LongBench(tmp_path).ready == ("trec", "qasper_e")
    assert LongBench(tmp_path).sample(SETTING, "qasper_e", 0).facts["words"] == "4-8k"


@pytest.mark.parametrize(("length", "group"), [(3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+")])
def test_even_rows_are_grouped_by_words(tmp_path: Path, length: int, group: str) -> None:
    assert one(tmp_path, "lcc_e", length=length).facts["words"] == group


def test_a_prompt_is_the_published_one(tmp_path: Path) -> None:
    sample = one(tmp_path, "hotpotqa", context="{input} stays.", input="Who?")
    assert sample.text == (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\n{input} stays.\n\nAnswer the question based on the given passages. "
        "Only give me the answer and do not output any other words.\n\nQuestion: Who?\nAnswer:"
    )
    assert sample.question.startswith("\n\nAnswer the question") and sample.max_new_tokens == 32
    assert sample.facts["chat"] is True and one(tmp_path, "trec").facts["chat"] is False


def test_a_prompt_of_v2_lists_its_choices(tmp_path: Path) -> None:
    write_lines(tmp_path / "data.json", [v2_row(6)])
    sample = LongBench(tmp_path).sample(SETTING, "v2", 0)
    assert "question: Which 6?\nChoices:\n(A) A of 6\n(B) B of 6\n(C) C of 6\n(D) D of 6\n\nFormat" in sample.question
    assert sample.answers == ("C",) and sample.context.startswith("Please read the following text")
    assert LongBench().score(sample, "The correct answer is (C).") == 1
    assert LongBench().score(sample, "C") == 0


def test_what_is_too_long_loses_its_middle() -> None:
    sample = Sample("qasper", 0, "Read: " + "".join(chr(65 + i % 26) for i in range(1000)), " What?", ("a",), 1)
    short = shorten(sample, Setting(112, 0, len), start=6)
    assert len(short.text) == 112
    assert short.context == sample.context[:56] + sample.context[-50:]
    assert shorten(sample, Setting(2000, 0, len), start=6) == sample
    assert shorten(sample, Setting(12, 0, len), start=6).text == "Read:  What?"
    with pytest.raises(InputError, match="prompts of 11 tokens are too short for qasper; give more than 12"):
        shorten(sample, Setting(11, 0, len), start=6)


def test_no_more_is_tokenised_than_could_fit() -> None:
    seen = list[int]()

    def count(text: str) -> int:
        seen.append(len(text))
        return len(text)

    shorten(Sample("qasper", 0, "x" * 1_000_000, "", ("a",), 1), Setting(100, 0, count))
    assert max(seen) <= 3200


def test_each_row_comes_once_and_then_no_more(tmp_path: Path) -> None:
    write_lines(tmp_path / "trec.jsonl", [longbench_row("trec", i) for i in range(5)])
    write_lines(tmp_path / "lcc.jsonl", [longbench_row("lcc", i) for i in range(2)])
    found = [sample for sample in LongBench(tmp_path).samples(SETTING, 9)]
    assert [(sample.task, sample.index) for sample in found[:5]] == [
        *(("trec", 0), ("lcc", 0), ("trec", 1), ("lcc", 1), ("trec", 2)),
    ]
    assert sorted(str(s.facts["id"]) for s in found if s.task == "trec") == [f"trec-{i}" for i in range(5)]
    with pytest.raises(InputError, match="trec of workload longbench has no sample 5; its file has 5 rows"):
        LongBench(tmp_path).sample(SETTING, "trec", 5)


@pytest.mark.parametrize(
    ("task", "reply", "score"),
    [
        ("trec", "Date\nFood", 1),  # only the first line counts
        ("trec", "\n\nDate", 1),
        ("trec", "Food\nDate", 0),
        ("triviaqa", "blue whale\nred", 1),
        ("hotpotqa", "blue whale\nred", 0.8),
        ("gov_report", "blue", 2 / 3),
    ],
)
def test_replies_are_read_as_their_task_wants(tmp_path: Path, task: str, reply: str, score: float) -> None:
    answers = ["Date"] if task == "trec" else ["grey seal", "blue whale"]
    assert LongBench().score(one(tmp_path, task, answers=answers), reply) == pytest.approx(score)


def test_the_hub_needs_datasets() -> None:
    if find_spec("datasets") is not None:
        pytest.skip("datasets is installed")
    workload = find("longbench", hub="owner/name")
    with pytest.raises(MissingExtra, match=r'hub=owner/name.*pip install "kvfold\[longbench\]", or give folder='):
        workload.sample(SETTING, "qasper", 0)


def test_rows_of_another_format_are_refused_by_what_they_lack(tmp_path: Path) -> None:
    write_lines(tmp_path / "qasper.jsonl", [{"question": "What?", "dataset": "qasper"}])
    with pytest.raises(InputError, match='row of qasper has no "input"; it has dataset, question'):
        LongBench(tmp_path).sample(SETTING, "qasper", 0)
    (tmp_path / "trec.jsonl").write_text("not json\n", encoding="utf-8")
    with pytest.raises(InputError, match="does not begin with a JSON object"):
        LongBench(tmp_path).sample(SETTING, "trec", 0)
