"""A layer in the blocks of another engine is attended to as in pages of kvfold, by PyTorch and by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.attend.block_attention import has_kernels, merge_blocks
from kvfold.attend.lse_merge import LseMerge, attend_reference
from kvfold.codec import Codec, Int4
from kvfold.codec.base import SIDES
from kvfold.errors import InputError
from kvfold.pages.block_arena import BlockArena, BlockLayout, BlockPages
from kvfold.pages.layer import LayerPages
from tests.attend.kernels.common import CODECS, DEVICE, DTYPES

LENS = (500, 5, 0, 47)
BLOCK_LEN = 16
TIGHT: dict[str, Any] = {"atol": 2e-4, "rtol": 2e-4}
LOOSE: dict[str, Any] = {"atol": 8e-2, "rtol": 2e-2}


class Case:
    """Random slots of a layer in shuffled blocks of a cache that is full of noise."""

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        lens: Sequence[int] = LENS,
        *,
        head_dim: int = 64,
        kv_dtype: torch.dtype = torch.bfloat16,
        num_sinks: int = 0,
        has_bias: bool = False,
        is_token_major: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        heads, most = len(lens), max(lens)
        self.layout = BlockLayout.of(
            codecs, heads, head_dim, kv_dtype, BLOCK_LEN, num_sinks=num_sinks, has_bias=has_bias
        )
        k_HSD, v_HSD = (torch.randn(heads, most, head_dim, generator=generator) for _ in range(2))
        k_HSD += 3 * torch.randn(heads, 1, head_dim, generator=generator)
        k_HSD, v_HSD = k_HSD.to(kv_dtype), v_HSD.to(kv_dtype)
        valid_HS = torch.arange(most) < torch.tensor(lens).unsqueeze(-1)
        pages = LayerPages(self.layout.page_class, heads)
        for side, x_HSD in zip(SIDES, (k_HSD, v_HSD), strict=True):
            pages.state[side] = pages.page_class.codec(side).init_state(side, x_HSD, valid_HS)
        self.bias_N = torch.randn(sum(lens), generator=generator) if has_bias else None
        k_ND, v_ND = (torch.cat([row[:n] for row, n in zip(x, lens, strict=True)]) for x in (k_HSD, v_HSD))
        tensors = pages.encode(k_ND, v_ND, torch.arange(sum(lens)), list(lens), self.bias_N)
        for side in SIDES:
            tensors |= {f"state.{side}.{name}": x for name, x in pages.state[side].items()}
        if num_sinks:
            tensors |= {"exact.k": k_HSD[:, :num_sinks].clone(), "exact.v": v_HSD[:, :num_sinks].clone()}
        self.tensors, self.lens = tensors, list(lens)
        self.k, self.v = self._decoded(pages, k_HSD), self._decoded(pages, v_HSD, "v")
        num_blocks = self.layout.num_blocks(lens)
        shape = (heads, BLOCK_LEN, 2 * head_dim)
        inside = (BLOCK_LEN, heads, 2 * head_dim) if is_token_major else shape
        noise = torch.randn(2 * num_blocks + 1, *inside, generator=generator).to(DEVICE, kv_dtype)
        self.cache = noise.transpose(1, 2) if is_token_major else noise
        self.before = self.cache.clone()
        self.blocks = torch.randperm(2 * num_blocks + 1, generator=generator)[:num_blocks].tolist()
        self.layout.check(self.lens, tensors)
        self.stored = BlockPages(self.layout, self.lens, BlockArena(self.cache), self.blocks)
        self.stored.write(tensors)

    def _decoded(self, pages: LayerPages, x_HSD: Tensor, side: Any = "k") -> list[Tensor]:
        """Every head's slots as they are read, in the model's own basis."""
        codec = pages.page_class.codec(side)
        prefix = f"{side}."
        fields = {n.removeprefix(prefix): x for n, x in self.tensors.items() if n.startswith(prefix)}
        group = pages.page_class.group
        whole = [-(-n // group) * group for n in self.lens]
        row_N = torch.repeat_interleave(torch.arange(len(whole)), torch.tensor(whole))
        x_ND = codec.restore(side, codec.decode(side, fields, torch.float32), pages.state[side], row_N)
        heads = [x_nD[:n].clone() for x_nD, n in zip(x_ND.split(whole), self.lens, strict=True)]
        for head, exact_SD in zip(heads, x_HSD, strict=True):
            sinks = self.layout.num_sinks
            head[:sinks] = exact_SD[:sinks]
        return heads

    def expected(self, q_HGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Plain attention, head by head."""
        found, first = [], 0
        for head, (k_nD, v_nD) in enumerate(zip(self.k, self.v, strict=True)):
            bias = None if self.bias_N is None else self.bias_N[first : first + len(k_nD)].unsqueeze(0)
            q = q_HGTD[head : head + 1].cpu().float()
            found.append(attend_reference(q, k_nD[None], v_nD[None], scale, bias_HS=bias))
            first += len(k_nD)
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def queries(case: Case, num_tokens: int = 3, group: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (len(case.lens), group, num_tokens, case.layout.page_class.head_dim)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_attends(case: Case, q_HGTD: Tensor, tolerance: dict[str, Any] = TIGHT) -> None:
    """As PyTorch decodes the blocks, and as kernels (or their torch twins) read their codes."""
    scale = case.layout.page_class.head_dim**-0.5
    want, want_lse = case.expected(q_HGTD, scale)
    for kernels in (False, True, None):
        merge = LseMerge(q_HGTD)
        merge_blocks(merge, case.stored, q_HGTD, scale, kernels=kernels)
        assert merge.lse_HGT is not None
        torch.testing.assert_close(merge.result().float().cpu(), want, **tolerance)
        torch.testing.assert_close(merge.lse_HGT.float().cpu(), want_lse, **tolerance)


@pytest.mark.parametrize("name", CODECS)
def test_every_codec(name: str) -> None:
    case = Case((CODECS[name], CODECS[name]), kv_dtype=DTYPES.get(name, torch.bfloat16))
    assert case.layout.num_blocks(LENS) > 1
    assert_attends(case, queries(case))


@pytest.mark.parametrize(("num_tokens", "group"), [(1, 7), (20, 2), (200, 1)])
def test_any_number_of_queries(num_tokens: int, group: int) -> None:
    case = Case((CODECS["int4"], CODECS["int2"]))
    assert_attends(case, queries(case, num_tokens, group))


def test_sinks_are_read_in_full_precision() -> None:
    case = Case((Int4(), Int4()), (300, 4, 5, 47), num_sinks=4)
    assert_attends(case, queries(case))
    case.stored.once["exact.v"].add_(1.0)
    with pytest.raises(AssertionError):
        assert_attends(case, queries(case))


def test_codes_that_end_within_a_word_are_read_without_kernels() -> None:
    case = Case((CODECS["int2"], Int4()), head_dim=36)
    assert not has_kernels(case.stored) and has_kernels(Case((Int4(), Int4())).stored)


def test_biases_and_groups_of_channels() -> None:
    case = Case((Int4(group_size=32), CODECS["fp8"]), head_dim=96, has_bias=True)
    assert_attends(case, queries(case))


def test_half_precision_queries() -> None:
    case = Case((Int4(), Int4()))
    assert_attends(case, queries(case, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32), LOOSE)


def test_heads_in_one_block_and_token_major_blocks() -> None:
    for case in (Case((Int4(), Int4()), (9, 8, 1, 0)), Case((Int4(), Int4()), is_token_major=True)):
        assert_attends(case, queries(case))


def test_blocks_of_others_stay_as_they_were() -> None:
    case = Case((Int4(), Int4()))
    others = sorted(set(range(len(case.cache))) - set(case.blocks))
    assert case.cache[others].equal(case.before[others])
    assert not case.cache[case.blocks].equal(case.before[case.blocks])


def test_int4_takes_less_than_a_third_of_the_blocks() -> None:
    lens = [4000, 100, 900, 1400]
    plain, coded = (
        BlockLayout.of((CODECS[name], CODECS[name]), 4, 128, torch.bfloat16, BLOCK_LEN) for name in ("bf16", "int4")
    )
    assert coded.num_blocks(lens) <= 0.3 * plain.num_blocks(lens)
    slack = coded.num_blocks(lens) * coded.block_bytes - coded.used_bytes(lens)
    assert 0 <= slack < 0.1 * coded.num_blocks(lens) * coded.block_bytes


def test_what_does_not_fit_is_refused() -> None:
    case = Case((Int4(), Int4()))
    for name in ("k.code", "state.k.mean"):
        with pytest.raises(InputError, match=name):
            case.layout.check(case.lens, {**case.tensors, name: case.tensors[name][:-1]})
    with pytest.raises(InputError, match="not those of 4 heads"):
        case.layout.check(case.lens[1:], case.tensors)
    with pytest.raises(InputError, match="no room for a page"):
        BlockLayout.of((Int4(), Int4()), 1, 64, torch.bfloat16, 1, num_sinks=4)
    with pytest.raises(InputError, match="no dense memory"):
        BlockArena(case.cache[..., ::2])
