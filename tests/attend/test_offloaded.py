"""Pages that come back: which ones queries choose, what attention makes of them, and where `slot` puts them.

H KV heads   G query heads per KV head   T queries   D head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.attend.lse_merge import LseMerge, attend_reference
from kvfold.attend.offloaded import merge_offloaded, topk_pages
from kvfold.core import LayerSpec
from kvfold.evicted.recall import Recall
from kvfold.models.loader import Model
from kvfold.pages.host_offload import OffloadedLayer
from kvfold.pages.sequence import SequenceCache
from tests.engine.runs import make_runner, make_sequence
from tests.tiny import prompt

SPEC = LayerSpec(num_kv_heads=1, num_query_heads=1, head_dim=2, scale=1.0)
KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, -1.0], [2.0, 0.0]])
POLICY = "streaming(sinks=2) + 40tok + protect(sinks=2, recent=8) + recall(tokens=8, page=4)"


def two_pages(tokens: int = 2) -> OffloadedLayer:
    found = OffloadedLayer(
        Recall(tokens=tokens, page=2).recall, SPEC, torch.float32, torch.device("cpu"), rotates=False
    )
    found.offload(0, KEYS, 10 * KEYS, torch.tensor([4, 5, 8, 9]), [2, 2])
    return found


def queries(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows).view(1, 1, -1, 2)


def test_a_page_is_summarised_by_its_smallest_and_largest_keys() -> None:
    found = two_pages()
    assert found.pages.tensors["low"][0, :2].tolist() == [[0, 0], [2, -1]]
    assert found.pages.tensors["high"][0, :2].tolist() == [[1, 1], [3, 0]]
    assert found.pages.tensors["first"][0, :2].tolist() == [0, 2]
    assert found.positions(0).tolist() == [4, 5, 8, 9]


def test_each_query_chooses_its_page() -> None:
    """Bounds of (1, 1) are 2 and 3, those of (-1, 2) are 2 and -2."""
    index_HXW = topk_pages(two_pages(), queries((1, 1), (-1, 2)), together=False)
    assert index_HXW.tolist() == [[[1], [0]]]


def test_queries_that_choose_together_add_up_their_weights() -> None:
    """Weights are 0.27 and 0.73, then 0.98 and 0.02: the first page has more of both together."""
    assert topk_pages(two_pages(), queries((1, 1), (-1, 2)), together=True).tolist() == [[[0]]]
    assert topk_pages(two_pages(), queries(*[(1, 1)] * 3, (-1, 2)), together=True).tolist() == [[[1]]]


def test_heads_may_have_no_pages() -> None:
    spec = LayerSpec(num_kv_heads=2, num_query_heads=2, head_dim=2, scale=1.0)
    found = OffloadedLayer(Recall(tokens=2, page=2).recall, spec, torch.float32, torch.device("cpu"), rotates=False)
    found.offload(1, KEYS[:3], KEYS[:3], torch.arange(3), [2, 1])
    q_HGTD = torch.tensor([[1.0, 2.0], [1.0, 2.0]]).view(2, 1, 1, 2)
    assert topk_pages(found, q_HGTD, together=False)[1].tolist() == [[0]]  # bounds 3 and 1


def recalled_of(sequence: SequenceCache, layer: int, q_HGTD: Tensor, *, together: bool) -> tuple[Tensor, Tensor]:
    merge = LseMerge(q_HGTD)
    merge_offloaded(merge, sequence, layer, q_HGTD, together=together)
    assert merge.lse_HGT is not None
    return merge.result(), merge.lse_HGT


def test_attention_is_that_over_the_chosen_slots(model: Model) -> None:
    """Two pages of 4 slots of 15; the last page of a head is not full."""
    runner = make_runner(model)
    sequence = make_sequence(runner, POLICY)
    try:
        runner.prefill([sequence], [prompt(97)])
        assert sequence.offloaded is not None
        offloaded = sequence.offloaded.layers[1]
        q_HGTD = torch.randn(2, 2, 3, 16, generator=torch.Generator().manual_seed(0))
        for together in (True, False):
            out, lse = recalled_of(sequence, 1, q_HGTD, together=together)
            index_HXW = topk_pages(offloaded, q_HGTD, together=together)
            for head in range(2):
                for t in range(3):
                    pages_W = index_HXW[head, 0 if together else t].tolist()
                    first, used = (offloaded.pages.tensors[name][head] for name in ("first", "used"))
                    slots = torch.cat([first[page] + torch.arange(int(used[page])) for page in pages_W])
                    k_SD, v_SD = (offloaded.slots.tensors[name][head, slots] for name in ("k", "v"))
                    q = q_HGTD[head : head + 1, :, t : t + 1]
                    wanted = attend_reference(q, k_SD[None], v_SD[None], offloaded.spec.scale)
                    torch.testing.assert_close(out[head, :, t], wanted[0][0, :, 0])
                    torch.testing.assert_close(lse[head, :, t], wanted[1][0, :, 0])
    finally:
        sequence.release()


def test_slot_puts_a_page_before_what_is_stored(model: Model) -> None:
    """100 tokens, 32 stored: a page of 4 stands at positions 64 to 67, before the stored slots at 68 to 99."""
    runner = make_runner(model)
    kept, moved = (make_sequence(runner, POLICY + more) for more in ("", " + slot"))
    try:
        for sequence in (kept, moved):
            runner.prefill([sequence], [prompt(100)])
        assert kept.offloaded is not None and moved.offloaded is not None
        true, closed = kept.offloaded.layers[0], moved.offloaded.layers[0]
        rope, count = true.spec.rope, true.slots.lens[0]
        assert rope is not None and moved.stored_lens(0)[0] == 32
        position_N, place_N = true.positions(0), torch.arange(count) % 4
        k_ND = true.slots.tensors["k"][0, :count]
        torch.testing.assert_close(closed.slots.tensors["k"][0, :count], rope.rotate(k_ND, place_N - position_N))
        q_HGTD = torch.randn(2, 2, 1, 16, generator=torch.Generator().manual_seed(0))
        out, _ = recalled_of(moved, 0, q_HGTD, together=False)
        facing = rope.rotate(q_HGTD, torch.full((1, 1, 1), -64))
        pages_W = topk_pages(closed, facing, together=False)[0, 0]
        slots = (4 * pages_W.unsqueeze(-1) + torch.arange(4)).flatten()
        apparent_SD = rope.rotate(k_ND[slots], 64 + place_N[slots] - position_N[slots])
        v_SD = true.slots.tensors["v"][0, slots]
        wanted, _ = attend_reference(q_HGTD[:1], apparent_SD[None], v_SD[None], true.spec.scale)
        torch.testing.assert_close(out[:1], wanted, rtol=1e-4, atol=1e-4)
    finally:
        kept.release()
        moved.release()
