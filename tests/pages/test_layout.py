"""Page classes: what a page takes, to the byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.attend.quest import Quest
from kvfold.codec import Bf16, Int2, Int4, Int8, Kivi2, Native
from kvfold.errors import InputError
from kvfold.pages.layout import PageClass
from kvfold.policy.registry import terms

MEASURED = ("palu",)  # they name a file of the model's own
CODECS = [term.variant() for term in terms("codec") if term.name not in MEASURED]


def test_a_page_of_bf16() -> None:
    """16 slots x (64 channels x 2 bytes x 2 sides + 4 bytes of position)."""
    assert PageClass(Bf16(), Bf16(), 64, torch.float32).bytes_per_page == 16 * (256 + 4)


def test_a_page_of_int4_keys_and_int2_values() -> None:
    """64 codes of 4 and of 2 bits, and a bf16 scale and zero for each side."""
    assert PageClass(Int4(), Int2(), 64, torch.bfloat16, page_size=8).bytes_per_page == 8 * (32 + 4 + 16 + 4 + 4)


def test_groups_share_their_metadata() -> None:
    """kivi2 keys: 2 bits a channel and one scale and zero per channel for 32 slots; values: two groups of 32."""
    page_class = PageClass(Kivi2(), Kivi2(), 64, torch.bfloat16, page_size=64)
    assert page_class.group == 32 and not page_class.relocatable
    assert page_class.bytes_per_page == 64 * (16 + 16 + 2 * 2 * 2 + 4) + 2 * (64 * 2 * 2)


def test_the_open_block_has_no_positions() -> None:
    assert PageClass(Native(), Native(), 8, torch.float32, 1, has_positions=False).bytes_per_page == 64


def test_a_page_must_hold_whole_groups() -> None:
    with pytest.raises(InputError, match="multiple of the codec's group 32"):
        PageClass(Kivi2(), Int8(), 64, torch.float32, page_size=48)


@given(
    k=st.sampled_from(CODECS),
    v=st.sampled_from(CODECS),
    head_dim=st.sampled_from([48, 64, 96, 128]),
    num_bytes=st.integers(0, 1 << 20),
)
def test_pages_in_is_the_most_that_fits(k: object, v: object, head_dim: int, num_bytes: int) -> None:
    page_class = PageClass(k, v, head_dim, torch.bfloat16, page_size=32)  # type: ignore[arg-type]
    num_pages = page_class.pages_in(num_bytes)
    assert page_class.span_bytes(num_pages) <= num_bytes < page_class.span_bytes(num_pages + 1)
    assert page_class.span_bytes(num_pages) >= page_class.bytes_per_page * num_pages


def test_summaries_of_a_reader_are_part_of_a_page() -> None:
    """Two rows of 64 channels for each page, beside 16 slots."""
    plain = PageClass(Int8(), Int8(), 64, torch.bfloat16)
    chosen = PageClass(Int8(), Int8(), 64, torch.bfloat16, reader=Quest())
    assert chosen.bytes_per_page == plain.bytes_per_page + 2 * 64 * 2
    assert chosen.fields == plain.fields and [item.name for item in chosen.summaries] == ["page.min", "page.max"]
