"""A captured decode step (CUDA graph): attention of every layer by two kernels that read block tables on the device.

All that changes from step to step (tokens, positions, fill counts) comes in as tensors, all that changes from seal to
seal (tasks, open blocks, mean keys) is rewritten in place, so a captured graph stays valid.

    B lanes   T tokens of a lane   H KV heads   G query heads per KV head   Q query heads   D head dim   L layers
    R rows, lane by lane and head by head   X queries of a row, head by head (G * T)
"""

from __future__ import annotations

from torch import Tensor

from kvfold.attend.kernels import ops
from kvfold.attend.kernels.formats import CODECS, codec_name, float_name, num_groups
from kvfold.codec.hadamard import CentredCodec
from kvfold.compression.observe import ObserverNeeds
from kvfold.pages.places import columns, slot_strides
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.batch_slots import BatchSlots
from kvfold.passes.captured.block_tables import Layout
from kvfold.passes.captured.observers import StepObserver, has_queries
from kvfold.passes.captured.position_shifts import shifts_of


def layout_of(sequence: SequenceCache) -> Layout | None:
    """One object for all sequences that can share a captured step; None if the kernels do not serve a sequence.

    They do if every slot is read, heads have few position shifts, and scorers observe attention mass or a full window
    of queries at most. Other policies, and sliding-window layers, run in `DecodePass`.
    """
    if "layout" not in sequence.derived:
        sequence.derived["layout"] = _find_layout(sequence)
    found: Layout | None = sequence.derived["layout"]
    if found is None or (found.shifts and shifts_of(sequence) is None):
        return None
    return found if has_queries(sequence, found.window) else None


def _find_layout(sequence: SequenceCache) -> Layout | None:
    policy, spec = sequence.policy, sequence.spec
    classes = tuple(layer.page_class for layer in sequence.tail.layers)
    known = all(codec_name(codec, c.kv_dtype) in CODECS for c in classes for codec in (c.k, c.v))
    aligned = all(stride * c.page_size % 16 == 0 for c in classes for stride in slot_strides(c))
    whole = not policy.attend.selects and policy.recall is None
    needs = ObserverNeeds.of([policy], decoding=True)
    if not known or not aligned or not whole or needs.query_stats or len(spec.compressible_layers) < spec.num_layers:
        return None
    layout = Layout(
        spec,
        classes,
        sequence.config.open_len,
        policy.position.shifts,
        needs.mass,
        needs.last_queries,
        0 if sequence.fp_sinks is None else sequence.fp_sinks.num_slots,
    )
    return sequence.arena.intern(layout)


class Step:
    """Attention of one step for T tokens in each lane; `fill_B` < 0 marks an empty lane."""

    def __init__(self, batch: BatchSlots, fill_B: Tensor, num_tokens: int) -> None:
        self.batch, self.fill_B, self.num_tokens = batch, fill_B, num_tokens
        self.observer: StepObserver | None = None
        if batch.observers is not None:
            self.observer = StepObserver(batch.observers, batch.tables, batch.open_LB2, batch.memory, fill_B)

    def attend(self, layer: int, q_QND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
        """Attention output [N, Q, D] for the packed tokens N, lane by lane; new slots go to the open blocks."""
        batch, spec = self.batch, self.batch.layout.spec.layers[layer]
        page_class = batch.layout.classes[layer]
        _, k_scale, _, _, v_scale, *_ = columns(page_class)
        k_codec = codec_name(page_class.k, page_class.kv_dtype)
        q_RXD = self._rows(q_QND, spec.num_kv_heads)
        shifted = batch.shifted_queries
        stored_q_RXD, offset_RX = q_RXD if shifted is None else shifted.queries(layer, q_RXD), None
        if isinstance(page_class.k, CentredCodec):
            stored_q_RXD, offset_RX = ops.centred_query(stored_q_RXD, batch.mean_LBHD[layer].flatten(0, 1))
        part_NXD, part_lse_NX = ops.attend_tasks(
            stored_q_RXD,
            offset_RX,
            batch.memory,
            batch.tables.task_LBC[layer].flatten(0, 1),
            batch.tables.order(layer),
            k_codec,
            codec_name(page_class.v, page_class.kv_dtype),
            num_groups(k_scale),
            num_groups(v_scale),
            spec.scale,
            has_bias=page_class.has_bias,
            has_skip=shifted is not None or bool(batch.layout.sinks_L[layer]),
        )
        out_RXD, lse_RX = ops.merge_rows(
            part_NXD,
            part_lse_NX,
            batch.tables.rows_LBH[layer, :, : spec.num_kv_heads].flatten(0, 1),
            q_RXD,
            self._by_lane(k_HND),
            self._by_lane(v_HND),
            batch.memory,
            batch.open_LB2[layer],
            self.fill_B,
            batch.layout.open_len,
            batch.sinks_LB2[layer],
            batch.sinks_LB[layer],
            int(batch.layout.sinks_L[layer]),
            float_name(page_class.kv_dtype),
            spec.scale,
        )
        if self.observer is not None:
            self.observer.queries(layer, q_QND)
            self.observer.stored_mass(layer, stored_q_RXD, offset_RX, lse_RX, k_codec, num_groups(k_scale))
            self.observer.open_mass(layer, q_RXD, lse_RX, float_name(page_class.kv_dtype))
        out: Tensor = out_RXD.view(batch.num_lanes, spec.num_kv_heads, spec.group, self.num_tokens, spec.head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, spec.num_query_heads, spec.head_dim)

    def _rows(self, x_AND: Tensor, num_heads: int) -> Tensor:
        """[heads, packed tokens, D] as rows [B * H, heads per KV head * T, D]: a view where T is 1."""
        num_lanes, head_dim = self.batch.num_lanes, x_AND.shape[-1]
        x = x_AND.view(num_heads, -1, num_lanes, self.num_tokens, head_dim)
        return x.permute(2, 0, 1, 3, 4).reshape(num_lanes * num_heads, -1, head_dim).contiguous()

    def _by_lane(self, x_HND: Tensor) -> Tensor:
        """[H, packed tokens, D] as [B, H, T, D], wherever they lie."""
        num_heads, _, head_dim = x_HND.shape
        return x_HND.view(num_heads, self.batch.num_lanes, self.num_tokens, head_dim).transpose(0, 1)
