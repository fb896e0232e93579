"""The pages about policies say what the code does: the table of terms is current, the worked sizes come out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvfold.errors import SizeError
from kvfold.policy import Floor, Policy, SizeFacts, check_floor
from kvfold.policy.bind import bind
from kvfold.policy.describe import BEGIN, END, rows, with_table
from kvfold.policy.parse import Call, parse
from kvfold.policy.registry import terms

DOCS = Path(__file__).parents[2] / "docs"


def _size_rows() -> list[list[str]]:
    section = (DOCS / "sizes.md").read_text(encoding="utf-8").split("## Ten examples")[1].split("## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_table_of_terms_is_current() -> None:
    page = (DOCS / "policy.md").read_text(encoding="utf-8")
    assert page == with_table(page), "run `python -m kvfold.policy.describe`"


def test_every_term_is_in_the_table() -> None:
    page = (DOCS / "policy.md").read_text(encoding="utf-8")
    written = page.split(BEGIN)[1].split(END)[0]
    assert len(rows()) == len(terms()) == len(written.strip().splitlines()) - 2
    for term in terms():
        assert f"`{term.name}`" in written


def test_every_method_says_what_it_is_against_its_paper() -> None:
    for row in rows():
        assert bool(row.published) >= bool(row.paper), row.name
        assert not row.published or row.published.startswith(("as published", "differs: ")), row.name
        for form in re.findall(r"`([^`]+\(.*?\))`", row.published):
            assert bind_text(form), (row.name, form)


def bind_text(form: str) -> bool:
    """Whether a term that a remark names can be written."""
    return all(bind(call) for call in parse(form) if isinstance(call, Call))


def test_there_are_ten_worked_sizes() -> None:
    assert len(_size_rows()) == 10


@pytest.mark.parametrize("row", _size_rows(), ids=lambda row: f"{row[0]} of {row[1]}")
def test_worked_size(row: list[str]) -> None:
    text, num_tokens, num_heads, per_slot, overhead, open_len, full, slots, _ = row
    facts = SizeFacts(int(num_tokens), int(num_heads), float(per_slot), int(overhead), int(open_len), int(full))
    assert facts.full_bytes == facts.num_tokens * facts.num_heads * 64 * 2 * 2
    size = Policy.parse(f"knorm + {text}").prefill.size
    assert size is not None
    assert size.slots_per_head(facts) == int(slots)


def test_the_message_about_the_floor_is_the_one_shown() -> None:
    size = Policy.parse("knorm + 25tok").prefill.size
    assert size is not None
    with pytest.raises(SizeError) as caught:
        check_floor(25, Floor(sinks=4, recent=32, open_len=32), size, 200)
    assert str(caught.value) in (DOCS / "sizes.md").read_text(encoding="utf-8")


def test_expressions_on_the_page_parse() -> None:
    page = (DOCS / "policy.md").read_text(encoding="utf-8")
    shown = [block for block in re.findall(r"```\n(.*?)\n```", page, re.DOTALL) if "=" not in block.split("(")[0]]
    assert len(shown) == 3
    for text in (*shown, "keydiff + 8x + between_chunks + every(64)", "int4(layers=2:-2)"):
        assert text in page
        Policy.parse(text)
