"""Attention over packed documents whose heads differ in length, inside vLLM's own blocks (experimental, on CPUs).

vLLM gives a request n placeholders' worth of blocks and never looks inside. Here they are plain memory: n * H slots of
[key, value] of a layer, of which head after head takes as many as it keeps, so memory is that of the mean length. The
backend attends for such requests in PyTorch, to its head's part of that memory with a bias per slot and to the
request's own tokens; all other requests go to vLLM's kernel.

    S slots of a layer   H KV heads   G query heads of each   Q = H * G   T queries   K own tokens   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvfold.vllm.row_reader import RowReader


@dataclass(frozen=True)
class LayerTable:
    """Where the heads of one layer lie in the memory of a document."""

    lens: list[int]
    bias_S: Tensor | None


@dataclass(frozen=True)
class RaggedDocument:
    """`num_slots`: placeholders, whole blocks."""

    num_slots: int
    layers: dict[int, LayerTable]


ACTIVE: dict[int, RaggedDocument] = {}  # of the running step, by the first block of the requests that read it


def fill_blocks(cache_BHNC: Tensor, blocks: list[int], first_slot: int, k_SD: Tensor, v_SD: Tensor) -> None:
    """Write slots of a layer into blocks that begin at placeholder `first_slot` of the document."""
    heads, size, width = cache_BHNC.shape[1:]
    room = torch.zeros(len(blocks) * heads * size, width, dtype=cache_BHNC.dtype)
    kv_SC = torch.cat((k_SD, v_SD), -1)[first_slot * heads :]
    room[: len(kv_SC)] = kv_SC
    cache_BHNC[torch.tensor(blocks)] = room.view(len(blocks), heads, size, width)


class RaggedImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, and this module's for the requests in ACTIVE."""

    reads_ragged = True
    _reader: RowReader | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **more: Any,
    ) -> Tensor:
        found: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more)
        if not ACTIVE or attn_metadata is None:
            return found
        starts, lens = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for number, seq_len in enumerate(lens):
            blocks = attn_metadata.block_table[number]
            document = ACTIVE.get(int(blocks[0]))
            if document is not None and seq_len > document.num_slots:
                mine = slice(starts[number], starts[number + 1])
                self._attend(layer, query[mine], kv_cache, blocks, document, seq_len, output[mine])
        return found

    def _attend(
        self,
        layer: Any,
        q_TQD: Tensor,
        cache_BHNC: Tensor,
        blocks: Tensor,
        document: RaggedDocument,
        seq_len: int,
        out_TQD: Tensor,
    ) -> None:
        size, width = cache_BHNC.shape[2:]
        num_stored, num_own = document.num_slots // size, seq_len - document.num_slots
        table = document.layers[extract_layer_index(layer.layer_name)]
        kv_SC = cache_BHNC[blocks[:num_stored].long()].reshape(-1, width)
        if self._reader is None:
            self._reader = RowReader(layer, cache_BHNC)
        own = cache_BHNC[blocks[num_stored : -(-seq_len // size)].long()]
        k_KHD, v_KHD = (rows[:num_own] for rows in self._reader.read(own))
        seen_TK = torch.ones(len(q_TQD), num_own, dtype=torch.bool).tril(num_own - len(q_TQD))
        q_THGD = q_TQD.reshape(len(q_TQD), self.num_kv_heads, -1, self.head_size)
        out_THGD = out_TQD.view(q_THGD.shape)
        first = 0
        for head, length in enumerate(table.lens):
            mine = slice(first, first + length)
            first += length
            k_SD, v_SD = kv_SC[mine].float().split(self.head_size, -1)
            bias_S = torch.zeros(length) if table.bias_S is None else table.bias_S[mine]
            own_TK = torch.zeros(seen_TK.shape).masked_fill(~seen_TK, -torch.inf)
            bias_TX = torch.cat((bias_S.expand(len(q_TQD), -1), own_TK), -1)
            keys, values = torch.cat((k_SD, k_KHD[:, head].float())), torch.cat((v_SD, v_KHD[:, head].float()))
            score_TGX = torch.einsum("tgd,xd->tgx", q_THGD[:, head].float(), keys) * self.scale + bias_TX[:, None]
            out_THGD[:, head] = (score_TGX.softmax(-1) @ values).to(out_TQD.dtype)


class RaggedBackend(CPUAttentionBackend):
    """Under the name of vLLM's own."""

    @staticmethod
    def get_impl_cls() -> type[RaggedImpl]:
        return RaggedImpl
