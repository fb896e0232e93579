"""The forward of vLLM's attention, with kvfold's for ragged documents behind it: what all backends share."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index

from kvfold.vllm.ragged_documents import RaggedAttention


class RaggedForward(RaggedAttention):
    """To be inherited before an implementation of vLLM, whose forward it calls."""

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
        engine: Any = super()
        found: Tensor = engine.forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more)
        if attn_metadata is not None:
            self.attend_ragged(layer, extract_layer_index(layer.layer_name), query, kv_cache, attn_metadata, output)
        return found
