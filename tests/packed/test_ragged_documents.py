"""A ragged entry in an engine's blocks, read for a batch of requests: attention over the slots that kvfold kept.

It runs on a GPU, too, where there is one; vLLM itself is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.errors import PolicyError
from kvfold.models.loader import Model
from kvfold.packed import pack
from kvfold.packed.pack import check_policy_packable
from kvfold.pages.read import stored_slots
from kvfold.store.entry.format import InvalidEntry
from kvfold.store.tiers.shared_disk import SharedDiskTier
from kvfold.vllm.ragged_documents import ACTIVE, RaggedAttention, RaggedDocuments
from tests.attend.kernels.common import DEVICE
from tests.codec.bases import random_bases
from tests.packed.common import TEXT, read, saved
from tests.pages.tiny import tiny_spec

BLOCK = 16
NUM_BLOCKS = 40
POLICIES = (
    "keydiff + global + 2x",
    "keydiff + ada + 2x + int4",
    "kvzip + global + 2x + codec(k=int8, v=fp8)",
    "keydiff + global + 2x + kivi2",
    "keydiff + 2x + fit + int4",
)


@dataclass
class Layer:
    """What is asked of an attention layer of vLLM."""

    num_kv_heads: int
    head_size: int
    kv_cache: Tensor


@dataclass
class Metadata:
    """Two requests on a document, and an ordinary one."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    kvfold_requests: Any = None


class Attention(RaggedAttention):
    def __init__(self, layer: Layer, scale: float) -> None:
        self.num_kv_heads, self.head_size, self.scale = layer.num_kv_heads, layer.head_size, scale


def engine_layers(model: Model) -> dict[int, Layer]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for index, spec in enumerate(model.spec.layers):
        shape = (NUM_BLOCKS, spec.num_kv_heads, BLOCK, 2 * spec.head_dim)
        found[index] = Layer(spec.num_kv_heads, spec.head_dim, torch.randn(shape, generator=generator).to(DEVICE))
    return found


def expected(session: kvfold.Session, index: int, q_TQD: Tensor, own: tuple[Tensor, Tensor], num_slots: int) -> Tensor:
    """Plain attention [T, Q, D], head by head, over the slots of the session and the request's own rows [K, H, D]."""
    spec = session.model.spec.layers[index]
    assert spec.rope is not None
    slots, num_own = stored_slots(session.cache, index, torch.float32), len(own[0])
    shift = torch.full(q_TQD.shape[:-1], len(session.token_ids) - num_slots)
    q_HGTD, rotated_HGTD = (
        q.unflatten(1, (spec.num_kv_heads, -1)).permute(1, 2, 0, 3) for q in (q_TQD, spec.rope.rotate(q_TQD, shift))
    )
    found = []
    for head in range(spec.num_kv_heads):
        score_old = rotated_HGTD[head] @ slots.k[head].T * spec.scale + slots.bias[head]
        score_own = q_HGTD[head] @ own[0][:, head].T * spec.scale
        seen_TK = torch.ones(len(q_TQD), num_own, dtype=torch.bool).tril(num_own - len(q_TQD))
        weight = torch.cat((score_old, score_own.masked_fill(~seen_TK, -torch.inf)), -1).softmax(-1)
        found.append(weight @ torch.cat((slots.v[head], own[1][:, head])))
    return torch.stack(found).permute(2, 0, 1, 3).flatten(1, 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_a_batch_read_the_slots_of_a_session(policy: str, tmp_path: Path) -> None:
    model, tier = saved(tmp_path / "model"), SharedDiskTier(tmp_path / "store")
    packed = pack(model, TEXT, policy, tier, ragged=True, block_size=BLOCK)
    layers = engine_layers(model)
    documents, size = RaggedDocuments(layers), packed.num_slots // BLOCK
    order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(1)).add(1).tolist()
    blocks, first_own, second_own = order[:size], order[size : size + 2], order[size + 2 : size + 4]
    documents.load(packed.entry, blocks, read(tier, packed))
    documents.start_step({blocks[0]: (packed.entry, blocks)})
    # A prefill of 5 of 5 tokens, an ordinary request, a decode step behind 19 tokens
    table = torch.zeros(3, size + 2, dtype=torch.int32)
    table[0], table[1, :2], table[2] = (
        torch.tensor([*blocks, *first_own]),
        torch.tensor(order[-2:]),
        torch.tensor([*blocks, *second_own]),
    )
    lens = [packed.num_slots + 5, 7, packed.num_slots + 20]
    metadata = Metadata(torch.tensor([0, 5, 6, 7]).to(DEVICE), torch.tensor(lens).to(DEVICE), table.to(DEVICE))
    with kvfold.Session(model, packed.policy) as session:
        session.extend(TEXT)
        assert len({n for lens in session.stats().slots for n in lens}) > 1 or "fit" in policy
        for index, layer in layers.items():
            spec = model.spec.layers[index]
            query = torch.randn(7, spec.num_query_heads, spec.head_dim, generator=torch.Generator().manual_seed(2))
            output = torch.full((7, spec.num_query_heads * spec.head_dim), 5.0, device=DEVICE)
            attention = Attention(layer, spec.scale)
            attention.attend_ragged(layer, index, query.to(DEVICE), layer.kv_cache, metadata, output)
            for queries, own_blocks, count in ((slice(0, 5), first_own, 5), (slice(6, 7), second_own, 20)):
                rows = layer.kv_cache[own_blocks].transpose(1, 2).flatten(0, 1)[:count].cpu()
                own = rows[..., : spec.head_dim], rows[..., spec.head_dim :]
                want = expected(session, index, query[queries], own, packed.num_slots)
                torch.testing.assert_close(output[queries].cpu().view(want.shape), want, atol=3e-4, rtol=3e-4)
            assert output[5].eq(5.0).all(), "what vLLM computed for others stays"
    ACTIVE.clear()


def test_as_many_documents_are_known_as_there_are_blocks(tmp_path: Path) -> None:
    model, tier = saved(tmp_path / "model"), SharedDiskTier(tmp_path / "store")
    packed = pack(model, TEXT, POLICIES[1], tier, ragged=True, block_size=BLOCK)
    documents, blocks = RaggedDocuments(engine_layers(model)), list(range(1, 1 + packed.num_slots // BLOCK))
    for name in range(NUM_BLOCKS + 1):
        documents.load(str(name), blocks, read(tier, packed))
    documents.start_step({blocks[0]: (str(NUM_BLOCKS), blocks)})
    placed = ACTIVE[blocks[0]]
    documents.start_step({blocks[0]: (str(NUM_BLOCKS), blocks)})
    assert ACTIVE[blocks[0]] is placed, "tables are made once"
    with pytest.raises(KeyError):
        documents.start_step({blocks[0]: ("0", blocks)})
    ACTIVE.clear()


def test_layers_of_another_model_are_foreign(tmp_path: Path) -> None:
    model, tier = saved(tmp_path / "model"), SharedDiskTier(tmp_path / "store")
    packed = pack(model, TEXT, POLICIES[1], tier, ragged=True, block_size=BLOCK)
    layers = engine_layers(model)
    layers[0].num_kv_heads += 1
    with pytest.raises(InvalidEntry, match="layer 0 does not fit the model"):
        RaggedDocuments(layers).load(packed.entry, [1, 2, 3], read(tier, packed))


def test_codecs_that_are_not_read_slot_by_slot_are_refused(tmp_path: Path) -> None:
    random_bases(tiny_spec(num_layers=2, num_heads=2, head_dim=16), 1).write(tmp_path / "bases.safetensors")
    policy = kvfold.Policy.parse(f'keydiff + 2x + palu("{tmp_path / "bases.safetensors"}")')
    with pytest.raises(PolicyError, match=r"not read by themselves \(palu\); use int4"):
        check_policy_packable(policy, ragged=True)
